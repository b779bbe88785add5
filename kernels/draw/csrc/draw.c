// One token for each row of logits: kernels/draw/__init__.py. The arguments are numbers of a Taichi kernel, which hands over their
// addresses; arrays are addresses as numbers.
//
// A token's weight is e^((logit - largest) scale), so that the likeliest has 1.

#include "../../backends/csrc/vectors.h"

const char SOURCE_HASH = 0;             // a name that tells what the bitcode was made of

enum {
    BLOCK = 512,                         // tokens whose weights are added up in float32
    PART = 64,                           // tokens of which the likeliest stands for all, when top_k looks for a bound
    NOT_FINITE = -1,                     // in the place of a token
};

struct options {
    long V, top_k;                       // V: tokens
    float temperature, top_p, min_p;
    int filters_first;                   // before the temperature
};

struct token { float weight; int32_t id; };

// the largest logit; NaN where one is no number
INLINE float largest_of(const float *logits, long V) {
    v8 largest = all(-__builtin_inff()), wrong = all(0.0f);
    long i = 0;
    for (; i + 8 <= V; i += 8) {
        largest = most(largest, at(logits + i));
        wrong = _mm256_or_ps(wrong, _mm256_cmp_ps(at(logits + i), at(logits + i), _CMP_UNORD_Q));
    }
    float lanes[8], found;
    put(lanes, largest);
    found = lanes[0];
    for (int l = 1; l < 8; l++) found = lanes[l] > found ? lanes[l] : found;
    int nan = _mm256_movemask_ps(wrong);
    for (; i < V; i++) {
        nan |= logits[i] != logits[i];
        found = logits[i] > found ? logits[i] : found;
    }
    return nan ? __builtin_nanf("") : found;
}

// the weights of 8 tokens; 0 below e^-80
INLINE v8 weights_of(v8 logits, float largest, float scale) {
    v8 x = times(minus(logits, all(largest)), all(scale));
    return _mm256_and_ps(exp_of(x), _mm256_cmp_ps(x, all(-80.0f), _CMP_GE_OQ));
}

// the first n <= 8 logits, and -inf behind them
INLINE v8 some(const float *logits, long n) {
    float lanes[8];
    if (n >= 8) return at(logits);
    for (long l = 0; l < 8; l++) lanes[l] = l < n ? logits[l] : -__builtin_inff();
    return at(lanes);
}

INLINE float weight_of(float logit, float largest, float scale) {
    return _mm256_cvtss_f32(weights_of(all(logit), largest, scale));
}

// Writes all weights, and the sum of those of each block; returns the sum of all.
INLINE double add_up(const float *logits, long V, float largest, float scale, float *weights, double *sums) {
    double total = 0;
    for (long first = 0; first < V; first += BLOCK) {
        v8 sum = all(0.0f);
        for (long i = first; i < first + BLOCK && i < V; i += 8) {
            v8 found = weights_of(some(logits + i, V - i), largest, scale);
            put(weights + i, found);
            sum = plus(sum, found);
        }
        total += sums[first / BLOCK] = sum8(sum);
    }
    return total;
}

// the token at which the cumulative weight first exceeds uniform * total, in the order of the vocabulary
INLINE long pick_of_all(const float *weights, const double *sums, long V, double wanted) {
    double before = 0;
    long block = 0, last = 0;
    for (; block < (V - 1) / BLOCK && before + sums[block] <= wanted; block++) before += sums[block];
    for (long i = block * BLOCK; i < V; i++) {           // to the end of the block but for rounding
        before += weights[i];
        if (weights[i] > 0) last = i;
        if (before > wanted) return i;
    }
    return last;
}

// The tokens with at least that weight, in the order of the vocabulary; returns how many.
INLINE long keep_likely(const float *weights, long V, float least, struct token *kept) {
    long n = 0;
    for (long i = 0; i < V; i += 8) {                    // weights has room for whole vectors
        int mask = _mm256_movemask_ps(_mm256_cmp_ps(at(weights + i), all(least), _CMP_GE_OQ));
        for (; mask; mask &= mask - 1) {
            long token = i + __builtin_ctz((unsigned)mask);
            if (token < V) kept[n++] = (struct token){weights[token], (int32_t)token};
        }
    }
    return n;
}

INLINE int comes_first(struct token a, struct token b) {
    return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
}

INLINE void sink(struct token *heap, long n, long i) {
    struct token moved = heap[i];
    for (long child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && comes_first(heap[child + 1], heap[child])) child++;
        if (!comes_first(heap[child], moved)) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

INLINE void make_heap(struct token *tokens, long n) {
    for (long i = n / 2 - 1; i >= 0; i--) sink(tokens, n, i);
}

// Moves the likeliest of n tokens in a heap to its end, and makes the rest a heap.
INLINE struct token take_likeliest(struct token *heap, long n) {
    struct token found = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = found;
    sink(heap, n - 1, 0);
    return found;
}

// Puts what top_k and top_p leave at the end of `tokens`, the likeliest last; returns how many. total: of all weights.
INLINE long keep_nucleus(struct token *tokens, long n, const struct options *o, double total) {
    long most_kept = o->top_k && o->top_k < n ? o->top_k : n, taken = 0, kept = 0;
    double sum = 0;
    make_heap(tokens, n);
    if (o->top_k && !o->filters_first) {                 // top_p is a share of what top_k leaves
        for (total = 0; taken < most_kept; taken++) total += take_likeliest(tokens, n - taken).weight;
    }
    for (; kept < most_kept && (o->top_p >= 1 || sum < o->top_p * total); kept++)
        sum += (kept < taken ? tokens[n - 1 - kept] : take_likeliest(tokens, n - kept)).weight;
    return kept ? kept : 1;
}

// A weight that k tokens have at least: the k-th largest of the largest weights of parts of the vocabulary. `any` for fewer parts.
INLINE float weight_of_likeliest(const float *weights, long V, long k, struct token *parts, float any) {
    long n = V / PART, taken = 0;
    if (n < k) return any;
    for (long part = 0; part < n; part++) {
        v8 largest = at(weights + part * PART);
        for (long i = 8; i < PART; i += 8) largest = most(largest, at(weights + part * PART + i));
        float lanes[8];
        put(lanes, largest);
        parts[part] = (struct token){lanes[0], (int32_t)part};
        for (int l = 1; l < 8; l++) parts[part].weight = lanes[l] > parts[part].weight ? lanes[l] : parts[part].weight;
    }
    make_heap(parts, n);
    while (taken < k - 1) take_likeliest(parts, n - taken++);
    return parts[0].weight > any ? parts[0].weight : any;
}

// the least weight of a token that the filters may keep: tokens with less add up to less than what top_p drops
INLINE float least_weight(const struct options *o, const float *weights, double total, struct token *tokens) {
    const float any = 1e-38f;
    if (o->top_k) return weight_of_likeliest(weights, o->V, o->top_k, tokens, any);
    float share = o->top_p < 1 ? 0.99f * (1 - o->top_p) * (float)total / (float)o->V : any;
    return o->min_p > share ? o->min_p : share;
}

// the same among the tokens that the filters keep: the likeliest first where they were sorted
INLINE long pick_of_some(const float *logits, const struct options *o, double uniform, float largest, double total,
                         const float *weights, struct token *tokens) {
    long n = keep_likely(weights, o->V, least_weight(o, weights, total, tokens), tokens), last = 0;
    if (o->top_k || o->top_p < 1) {
        long kept = keep_nucleus(tokens, n, o, total);
        for (long i = 0; i < n / 2; i++) {               // the likeliest first
            struct token moved = tokens[i];
            tokens[i] = tokens[n - 1 - i];
            tokens[n - 1 - i] = moved;
        }
        n = kept;
    }
    double sum = 0, before = 0;
    for (long i = 0; i < n; i++) {
        if (tokens[i].weight < o->min_p) tokens[i].weight = 0;
        else if (o->filters_first) tokens[i].weight = weight_of(logits[tokens[i].id], largest, 1 / o->temperature);
        sum += tokens[i].weight;
    }
    for (long i = 0; i < n; i++) {
        before += tokens[i].weight;
        if (tokens[i].weight > 0) last = tokens[i].id;
        if (before > uniform * sum) return tokens[i].id;
    }
    return last;
}

INLINE long draw_row(const float *logits, const struct options *o, double uniform, float *weights, double *sums,
                     struct token *tokens) {
    float largest = largest_of(logits, o->V);
    if (!(largest - largest == 0)) return NOT_FINITE;
    int filtered = o->top_k || o->top_p < 1 || o->min_p > 0;
    float scale = filtered && o->filters_first ? 1 : 1 / o->temperature;
    double total = add_up(logits, o->V, largest, scale, weights, sums);
    if (filtered) return pick_of_some(logits, o, uniform, largest, total, weights, tokens);
    return pick_of_all(weights, sums, o->V, uniform * total);
}

// Threads take rows from a counter. scratch: scratch_size bytes for each thread, for weights, sums of blocks, and tokens.
void draw(int64_t *taken, int64_t *logits, int64_t *uniform, int64_t *drawn, int64_t *scratch, int32_t *rows, int32_t *row_size,
          int32_t *V, int32_t *scratch_size, int32_t *top_k, float *temperature, float *top_p, float *min_p,
          int32_t *filters_first, int32_t *thread) {
    const struct options options = {*V, *top_k, *temperature, *top_p, *min_p, *filters_first};
    double *sums = (double *)(*scratch + (int64_t)*thread * *scratch_size);
    float *weights = (float *)(sums + *V / BLOCK + 1);
    struct token *tokens = (struct token *)(weights + *V + 8);
    for (long row; (row = __atomic_fetch_add((int32_t *)*taken, 1, __ATOMIC_RELAXED)) < *rows;)
        ((int64_t *)*drawn)[row] = draw_row((const float *)*logits + row * *row_size, &options, ((const double *)*uniform)[row],
                                            weights, sums, tokens);
}
