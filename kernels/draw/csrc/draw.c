// One token for each row of logits: kernels/draw/__init__.py. A row is a task.
//
// A token's weight is e^((logit - largest) scale), so that the likeliest has 1. Tokens are in the order of their logits: weights of
// different logits may be equal.

#define LANES 8                          // on every CPU: weights are added up in one order

#include "../../native/csrc/threads.h"
#include "../../native/csrc/vectors.h"

enum {
    BLOCK = 512,                         // tokens whose weights are added up in float32
    PART = 64,                           // tokens of which the likeliest stands for all, when top_k looks for a bound
    NOT_FINITE = -1,                     // in the place of a token
};

struct options {
    int64_t V, top_k;                    // V: tokens
    float temperature, top_p, min_p;
    int filters_first;                   // before the temperature
};

struct token { float logit, weight; int32_t id; };

struct block { double sum; float largest; };

_Static_assert(sizeof(struct token) == 12 && sizeof(struct block) == 16, "OF_TOKEN and OF_BLOCK of c_v0.py");

// the weights of 8 tokens; 0 below e^-80
INLINE floats weights_of(floats logits, float largest, float scale) {
    floats x = (logits - largest) * scale;
    return x >= -80.0f ? exp_of(larger(x, same(-80.0f))) : same(0.0f);
}

// the first n <= 8 logits, and -inf behind them
INLINE floats some(const float *logits, int64_t n) {
    float lanes[8];
    if (n >= 8) return at(logits);
    for (int64_t l = 0; l < 8; l++) lanes[l] = l < n ? logits[l] : -__builtin_inff();
    return at(lanes);
}

INLINE float weight_of(float logit, float largest, float scale) {
    return weights_of(same(logit), largest, scale)[0];
}

INLINE float largest8(floats x) {
    float lanes[8];
    put(lanes, x);
    for (int l = 1; l < 8; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

// A block's largest logit, and the sum of its weights as if that were the largest of all; *wrong: whether one is no number.
INLINE struct block block_of(const float *logits, int64_t n, float scale, int *wrong) {
    floats largest = same(-__builtin_inff()), sum = same(0.0f);
    ints unordered = (ints)0;
    for (int64_t i = 0; i < n; i += 8) {
        floats x = some(logits + i, n - i);
        largest = larger(largest, x);
        unordered |= x != x;
    }
    *wrong |= any(unordered);
    float found = largest8(largest);
    if (!(found > -__builtin_inff())) return (struct block){0, found};
    for (int64_t i = 0; i < n; i += 8) sum += weights_of(some(logits + i, n - i), found, scale);
    return (struct block){sum_of(sum), found};
}

// Writes the blocks; returns the sum of all weights, and in *largest the largest logit: NaN where one is no number.
INLINE double add_up(const float *logits, int64_t V, float scale, struct block *blocks, float *largest) {
    int64_t n = (V + BLOCK - 1) / BLOCK;
    float found = -__builtin_inff();
    int wrong = 0;
    for (int64_t b = 0; b < n; b++) {
        int64_t left = V - b * BLOCK;
        blocks[b] = block_of(logits + b * BLOCK, left < BLOCK ? left : BLOCK, scale, &wrong);
        found = blocks[b].largest > found ? blocks[b].largest : found;
    }
    double total = 0;
    for (int64_t b = 0; b < n; b++) total += blocks[b].sum *= weight_of(blocks[b].largest, found, scale);
    *largest = wrong ? __builtin_nanf("") : found;
    return total;
}

// the token at which the cumulative weight first exceeds `wanted`, in the order of the vocabulary
INLINE int64_t pick_of_all(const float *logits, int64_t V, float largest, float scale, const struct block *blocks, double wanted) {
    double before = 0;
    int64_t block = 0, last = 0;
    for (; block < (V - 1) / BLOCK && before + blocks[block].sum <= wanted; block++) before += blocks[block].sum;
    for (int64_t i = block * BLOCK; i < V; i += 8) {        // normally in this block; rounding may lead beyond
        float weights[8];
        put(weights, weights_of(some(logits + i, V - i), largest, scale));
        for (int64_t l = 0; l < 8; l++) {
            before += weights[l];
            if (weights[l] > 0) last = i + l;
            if (before > wanted) return i + l;
        }
    }
    return last;
}

// The tokens with at least that logit and that weight, in the order of the vocabulary; returns how many.
INLINE int64_t keep_likely(const float *logits, int64_t V, float largest, float scale, float least_logit, float least_weight,
                        struct token *kept) {
    int64_t n = 0;
    for (int64_t i = 0; i < V; i += 8) {
        floats x = some(logits + i, V - i), found = weights_of(x, largest, scale);
        ints likely = (x >= least_logit) & (found >= least_weight);
        if (!any(likely)) continue;
        for (int l = 0; l < LANES; l++)
            if (likely[l]) kept[n++] = (struct token){logits[i + l], found[l], (int32_t)(i + l)};
    }
    return n;
}

INLINE int comes_first(struct token a, struct token b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

INLINE void sink(struct token *heap, int64_t n, int64_t i) {
    struct token moved = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && comes_first(heap[child + 1], heap[child])) child++;
        if (!comes_first(heap[child], moved)) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

INLINE void make_heap(struct token *tokens, int64_t n) {
    for (int64_t i = n / 2 - 1; i >= 0; i--) sink(tokens, n, i);
}

// Moves the likeliest of n tokens in a heap to its end, and makes the rest a heap.
INLINE struct token take_likeliest(struct token *heap, int64_t n) {
    struct token found = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = found;
    sink(heap, n - 1, 0);
    return found;
}

// Puts what top_k and top_p leave at the end of `tokens`, the likeliest last; returns how many. total: of all weights.
INLINE int64_t keep_nucleus(struct token *tokens, int64_t n, const struct options *o, double total) {
    int64_t most_kept = o->top_k && o->top_k < n ? o->top_k : n, taken = 0, kept = 0;
    double sum = 0;
    make_heap(tokens, n);
    if (o->top_k && !o->filters_first) {                 // top_p is a share of what top_k leaves
        for (total = 0; taken < most_kept; taken++) total += take_likeliest(tokens, n - taken).weight;
    }
    for (; kept < most_kept && (o->top_p >= 1 || sum < o->top_p * total); kept++)
        sum += (kept < taken ? tokens[n - 1 - kept] : take_likeliest(tokens, n - kept)).weight;
    return kept ? kept : 1;
}

// A logit that k tokens have at least: the k-th largest of the largest of parts of the vocabulary; for fewer parts the smallest
// number, for a token at -inf is never drawn.
INLINE float logit_of_likeliest(const float *logits, int64_t V, int64_t k, struct token *parts) {
    int64_t n = V / PART, taken = 0;
    if (n < k) return -__FLT_MAX__;
    for (int64_t part = 0; part < n; part++) {
        floats largest = at(logits + part * PART);
        for (int64_t i = 8; i < PART; i += 8) largest = larger(largest, at(logits + part * PART + i));
        parts[part] = (struct token){largest8(largest), 0, (int32_t)part};
    }
    make_heap(parts, n);
    while (taken < k - 1) take_likeliest(parts, n - taken++);
    return parts[0].logit > -__FLT_MAX__ ? parts[0].logit : -__FLT_MAX__;
}

// the least weight of a token that the filters may keep without top_k: tokens with less add up to less than what top_p drops
INLINE float least_weight(const struct options *o, double total) {
    const float any = 1e-36f;            // above 0 also where a CPU takes subnormal numbers for 0, below e^-80
    float share = o->top_p < 1 ? 0.99f * (1 - o->top_p) * (float)total / (float)o->V : any;
    return o->min_p > share ? o->min_p : share;
}

// the same among the tokens that the filters keep: the likeliest first where they were sorted
INLINE int64_t pick_of_some(const float *logits, const struct options *o, double uniform, float largest, float scale, double total,
                         struct token *tokens) {
    float least_logit = o->top_k ? logit_of_likeliest(logits, o->V, o->top_k, tokens) : -__FLT_MAX__;
    float weight = o->top_k ? 0 : least_weight(o, total);
    int64_t n = keep_likely(logits, o->V, largest, scale, least_logit, weight, tokens), last = 0;
    if (o->top_k || o->top_p < 1) {
        int64_t kept = keep_nucleus(tokens, n, o, total);
        for (int64_t i = 0; i < n / 2; i++) {               // the likeliest first
            struct token moved = tokens[i];
            tokens[i] = tokens[n - 1 - i];
            tokens[n - 1 - i] = moved;
        }
        n = kept;
    }
    double sum = 0, before = 0;
    for (int64_t i = 0; i < n; i++) {
        int likely = o->min_p < 1 ? tokens[i].weight >= o->min_p : tokens[i].logit == largest;       // others may have 1, too
        if (!likely) tokens[i].weight = 0;
        else if (o->filters_first) tokens[i].weight = weight_of(logits[tokens[i].id], largest, 1 / o->temperature);
        sum += tokens[i].weight;
    }
    for (int64_t i = 0; i < n; i++) {
        before += tokens[i].weight;
        if (tokens[i].weight > 0) last = tokens[i].id;
        if (before > uniform * sum) return tokens[i].id;
    }
    return last;
}

INLINE int64_t draw_row(const float *logits, const struct options *o, double uniform, struct block *blocks, struct token *tokens) {
    int filtered = o->top_k || o->top_p < 1 || o->min_p > 0;
    float scale = filtered && o->filters_first ? 1 : 1 / o->temperature, largest;
    double total = add_up(logits, o->V, scale, blocks, &largest);
    if (!(largest - largest == 0)) return NOT_FINITE;
    if (filtered) return pick_of_some(logits, o, uniform, largest, scale, total, tokens);
    return pick_of_all(logits, o->V, largest, scale, blocks, uniform * total);
}

// Adds the biases, each to the logit of its token, and keeps the logits before. One of -inf is for any logit, NaN too.
INLINE void add_biases(float *logits, const int32_t *ids, const float *biases, int64_t n, float *before) {
    for (int64_t i = 0; i < n; i++) {
        before[i] = logits[ids[i]];
        if (biases[i] > -__builtin_inff()) logits[ids[i]] += biases[i];
        else logits[ids[i]] = biases[i];                 // banned
    }
}

INLINE void take_biases_back(float *logits, const int32_t *ids, int64_t n, const float *before) {
    for (int64_t i = n - 1; i >= 0; i--) logits[ids[i]] = before[i];
}

// The arguments of a call, as c_v0.py lists them. scratch: scratch_size bytes for each thread, for blocks, tokens, and the logits
// before biases.
struct call {
    int64_t rows, row_size, V, n_biases, scratch_size, top_k, filters_first;
    double temperature, top_p, min_p;
    float *logits;
    const double *uniform;
    int64_t *drawn;
    const int32_t *ids;
    const float *biases;
    char *scratch;
};

static void draw_rows(struct tasks *tasks, int64_t thread) {
    const struct call *call = tasks->call;
    const struct options options = {call->V, call->top_k, (float)call->temperature, (float)call->top_p, (float)call->min_p,
                                    call->filters_first != 0};
    struct block *blocks = (struct block *)(call->scratch + thread * call->scratch_size);
    struct token *tokens = (struct token *)(blocks + call->V / BLOCK + 1);
    float *before = (float *)(tokens + call->V);
    for (int64_t row; (row = next_task(tasks)) < call->rows;) {
        float *own = call->logits + row * call->row_size;
        add_biases(own, call->ids, call->biases, call->n_biases, before);
        call->drawn[row] = draw_row(own, &options, call->uniform[row], blocks, tokens);
        take_biases_back(own, call->ids, call->n_biases, before);
    }
}

ENTRY(draw)(const struct call *call, int64_t threads) { share(draw_rows, call, threads); }
