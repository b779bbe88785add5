// Samples one token for each row of logits: kernels/draw/__init__.py. A task is a row.
//
// A token's weight is e^((logit - largest) scale), so the likeliest token has weight 1. Tokens are ranked by logit, since
// different logits can round to the same weight.

#define LANES 8                          // on every CPU, so that the order of summation is the same

#include "../../native/csrc/threads.h"
#include "../../native/csrc/vectors.h"

enum {
    BLOCK = 512,                         // tokens whose weights are summed in float32
    STRIPE = 64,                         // tokens per maximum in the lower bound for top_k
    NOT_FINITE = -1,                     // returned instead of a token
};

struct options {
    int64_t V, top_k;                    // V: vocabulary size
    float temperature, top_p, min_p;
    int filters_first;                   // apply the filters before the temperature
};

struct token { float logit, weight; int32_t id; };

struct block { double sum; float largest; };

EXPORT_SIZE(draw_token, struct token)
EXPORT_SIZE(draw_block, struct block)

// Returns the weights of 8 tokens; weights below e^-80 become 0.
INLINE floats weights_of(floats logits, float largest, float scale) {
    floats x = (logits - largest) * scale;
    return x >= -80.0f ? exp_neg(max(x, splat(-80.0f))) : splat(0.0f);
}

// Loads n logits, at most 8; fills the remaining lanes with -inf.
INLINE floats load_logits(const float *logits, int64_t n) {
    float lanes[8];
    if (n >= 8) return load(logits);
    for (int64_t l = 0; l < 8; l++) lanes[l] = l < n ? logits[l] : -__builtin_inff();
    return load(lanes);
}

INLINE float weight_of(float logit, float largest, float scale) {
    return weights_of(splat(logit), largest, scale)[0];
}

INLINE float hmax(floats x) {
    float lanes[8];
    store(lanes, x);
    for (int l = 1; l < 8; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

// Returns a block's largest logit, and the sum of its weights relative to that logit. Sets *has_nan if a logit is NaN.
INLINE struct block sum_block(const float *logits, int64_t n, float scale, int *has_nan) {
    floats largest = splat(-__builtin_inff()), sum = splat(0.0f);
    ints is_nan = (ints)0;
    for (int64_t i = 0; i < n; i += 8) {
        floats x = load_logits(logits + i, n - i);
        largest = max(largest, x);
        is_nan |= x != x;
    }
    *has_nan |= any(is_nan);
    float top = hmax(largest);
    if (!(top > -__builtin_inff())) return (struct block){0, top};
    for (int64_t i = 0; i < n; i += 8) sum += weights_of(load_logits(logits + i, n - i), top, scale);
    return (struct block){hsum(sum), top};
}

// Fills `blocks`. Returns the sum of all weights. Sets *largest to the largest logit, or to NaN if any logit is NaN.
INLINE double sum_weights(const float *logits, int64_t V, float scale, struct block *blocks, float *largest) {
    int64_t n = (V + BLOCK - 1) / BLOCK;
    float top = -__builtin_inff();
    int has_nan = 0;
    for (int64_t b = 0; b < n; b++) {
        int64_t left = V - b * BLOCK;
        blocks[b] = sum_block(logits + b * BLOCK, left < BLOCK ? left : BLOCK, scale, &has_nan);
        top = blocks[b].largest > top ? blocks[b].largest : top;
    }
    double total = 0;
    for (int64_t b = 0; b < n; b++) total += blocks[b].sum *= weight_of(blocks[b].largest, top, scale);
    *largest = has_nan ? __builtin_nanf("") : top;
    return total;
}

// Samples without filters: the first token of the vocabulary at which the cumulative weight exceeds `threshold`.
INLINE int64_t sample_all(const float *logits, int64_t V, float largest, float scale, const struct block *blocks,
                          double threshold) {
    double sum = 0;
    int64_t block = 0, last = 0;
    for (; block < (V - 1) / BLOCK && sum + blocks[block].sum <= threshold; block++) sum += blocks[block].sum;
    for (int64_t i = block * BLOCK; i < V; i += 8) {        // the token is in this block or, due to rounding, after it
        float weights[8];
        store(weights, weights_of(load_logits(logits + i, V - i), largest, scale));
        for (int64_t l = 0; l < 8; l++) {
            sum += weights[l];
            if (weights[l] > 0) last = i + l;
            if (sum > threshold) return i + l;
        }
    }
    return last;
}

// Collects the tokens with a logit >= min_logit and a weight >= min_weight, in the order of the vocabulary; returns their number.
INLINE int64_t collect_candidates(const float *logits, int64_t V, float largest, float scale, float min_logit, float min_weight,
                                  struct token *candidates) {
    int64_t n = 0;
    for (int64_t i = 0; i < V; i += 8) {
        floats x = load_logits(logits + i, V - i), weights = weights_of(x, largest, scale);
        ints likely = (x >= min_logit) & (weights >= min_weight);
        if (!any(likely)) continue;
        for (int l = 0; l < LANES; l++)
            if (likely[l]) candidates[n++] = (struct token){logits[i + l], weights[l], (int32_t)(i + l)};
    }
    return n;
}

INLINE int precedes(struct token a, struct token b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

INLINE void sift_down(struct token *heap, int64_t n, int64_t i) {
    struct token moved = heap[i];
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && precedes(heap[child + 1], heap[child])) child++;
        if (!precedes(heap[child], moved)) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

INLINE void make_heap(struct token *tokens, int64_t n) {
    for (int64_t i = n / 2 - 1; i >= 0; i--) sift_down(tokens, n, i);
}

// Removes the likeliest token from a heap of n: swaps it to the end, behind the remaining heap, and returns it.
INLINE struct token pop_likeliest(struct token *heap, int64_t n) {
    struct token likeliest = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = likeliest;
    sift_down(heap, n - 1, 0);
    return likeliest;
}

// Moves the tokens that pass top_k and top_p to the end of `tokens`, the likeliest last, and returns their number. total: the sum
// of all weights.
INLINE int64_t select_nucleus(struct token *tokens, int64_t n, const struct options *o, double total) {
    int64_t limit = o->top_k && o->top_k < n ? o->top_k : n, popped = 0, selected = 0;
    double sum = 0;
    make_heap(tokens, n);
    if (o->top_k && !o->filters_first) {                 // top_p is relative to the tokens that pass top_k
        for (total = 0; popped < limit; popped++) total += pop_likeliest(tokens, n - popped).weight;
    }
    for (; selected < limit && (o->top_p >= 1 || sum < o->top_p * total); selected++)
        sum += (selected < popped ? tokens[n - 1 - selected] : pop_likeliest(tokens, n - selected)).weight;
    return selected ? selected : 1;
}

// Returns a lower bound of the k-th largest logit: the k-th largest of the stripes' maxima. With fewer than k stripes, the bound is
// the least finite float, which excludes only logits of -inf; their tokens are never drawn.
INLINE float top_k_bound(const float *logits, int64_t V, int64_t k, struct token *stripes) {
    int64_t n = V / STRIPE, popped = 0;
    if (n < k) return -__FLT_MAX__;
    for (int64_t s = 0; s < n; s++) {
        floats largest = load(logits + s * STRIPE);
        for (int64_t i = 8; i < STRIPE; i += 8) largest = max(largest, load(logits + s * STRIPE + i));
        stripes[s] = (struct token){hmax(largest), 0, (int32_t)s};
    }
    make_heap(stripes, n);
    while (popped < k - 1) pop_likeliest(stripes, n - popped++);
    return stripes[0].logit > -__FLT_MAX__ ? stripes[0].logit : -__FLT_MAX__;
}

// Returns a weight below which min_p or top_p drops every token: all tokens below top_p's bound have a sum less than 1 - top_p.
INLINE float min_candidate_weight(const struct options *o, double total) {
    const float smallest = 1e-36f;       // below e^-80, but not denormal, so that no CPU flushes it to 0
    float top_p_bound = o->top_p < 1 ? 0.99f * (1 - o->top_p) * (float)total / (float)o->V : smallest;
    return o->min_p > top_p_bound ? o->min_p : top_p_bound;
}

// Samples from the tokens that pass the filters: in descending order of logits with top_k or top_p, else in vocabulary order.
INLINE int64_t sample_filtered(const float *logits, const struct options *o, double uniform, float largest, float scale,
                               double total, struct token *tokens) {
    float min_logit = o->top_k ? top_k_bound(logits, o->V, o->top_k, tokens) : -__FLT_MAX__;
    float min_weight = o->top_k ? 0 : min_candidate_weight(o, total);
    int64_t n = collect_candidates(logits, o->V, largest, scale, min_logit, min_weight, tokens), last = 0;
    if (o->top_k || o->top_p < 1) {
        int64_t selected = select_nucleus(tokens, n, o, total);
        for (int64_t i = 0; i < n / 2; i++) {            // reverse, so that the likeliest is first
            struct token swapped = tokens[i];
            tokens[i] = tokens[n - 1 - i];
            tokens[n - 1 - i] = swapped;
        }
        n = selected;
    }
    double sum = 0, cumulative = 0;
    for (int64_t i = 0; i < n; i++) {
        int likely = o->min_p < 1 ? tokens[i].weight >= o->min_p : tokens[i].logit == largest;   // smaller logits may have weight 1
        if (!likely) tokens[i].weight = 0;
        else if (o->filters_first) tokens[i].weight = weight_of(logits[tokens[i].id], largest, 1 / o->temperature);
        sum += tokens[i].weight;
    }
    for (int64_t i = 0; i < n; i++) {
        cumulative += tokens[i].weight;
        if (tokens[i].weight > 0) last = tokens[i].id;
        if (cumulative > uniform * sum) return tokens[i].id;
    }
    return last;
}

INLINE int64_t draw_row(const float *logits, const struct options *o, double uniform, struct block *blocks,
                        struct token *tokens) {
    int filtered = o->top_k || o->top_p < 1 || o->min_p > 0;
    float scale = filtered && o->filters_first ? 1 : 1 / o->temperature, largest;
    double total = sum_weights(logits, o->V, scale, blocks, &largest);
    if (!(largest - largest == 0)) return NOT_FINITE;
    if (filtered) return sample_filtered(logits, o, uniform, largest, scale, total, tokens);
    return sample_all(logits, o->V, largest, scale, blocks, uniform * total);
}

// Adds the biases to their tokens' logits, one after another, and saves the original logits. A bias of -inf replaces the logit, so
// that even a token with a NaN logit is banned.
INLINE void apply_biases(float *logits, const int32_t *ids, const float *biases, int64_t n, float *originals) {
    for (int64_t i = 0; i < n; i++) {
        originals[i] = logits[ids[i]];
        if (biases[i] > -__builtin_inff()) logits[ids[i]] += biases[i];
        else logits[ids[i]] = biases[i];
    }
}

INLINE void restore_logits(float *logits, const int32_t *ids, int64_t n, const float *originals) {
    for (int64_t i = n - 1; i >= 0; i--) logits[ids[i]] = originals[i];      // in reverse, since an id may occur twice
}

// Arguments, in the order of c_v0.py. scratch: scratch_size bytes per thread, for blocks, candidates and original logits.
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
    float *originals = (float *)(tokens + call->V);
    for (int64_t row; (row = next_task(tasks)) < call->rows;) {
        float *logits = call->logits + row * call->row_size;
        apply_biases(logits, call->ids, call->biases, call->n_biases, originals);
        call->drawn[row] = draw_row(logits, &options, call->uniform[row], blocks, tokens);
        restore_logits(logits, call->ids, call->n_biases, originals);
    }
}

ENTRY(draw, struct call) { parallel_for(draw_rows, call, threads); }
