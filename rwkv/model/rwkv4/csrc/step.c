// RWKV-4's decoding step: the formulas of ../mix.py at T = 1.

#include "../../decoding/csrc/step.h"

struct layer {
    struct norm ln0, ln1, ln2;           // ln0: first layer only
    vector mixes, decay, first;          // mixes (3,C): mu of k, v, r; decay (A): w, first (A): u (kernels/wkv4)
    struct matrix key, value, receptance, output;
    vector ffn_mixes;                    // (2,C): mu of k, r
    struct matrix ffn_key, ffn_receptance, ffn_value;
};

struct model {
    struct common common;
    int64_t A, F;
    // offsets in a row's workspace: mixed (3,C); k, v, r, y (A); out, gate (C); relu (F)
    int64_t mixed, k, v, r, y, out, relu, gate;
    struct layer layers[];
};

// row_state with an offset within layer l's state, which consists of att_x (C); a, b, p (A); ffn_x (C).
static float *layer_state(const struct step *s, const struct model *m, int64_t row, const struct layer *l, int64_t offset,
                          int64_t size) {
    return row_state(s, row, (l - m->layers) * (2 * m->common.C + 3 * m->A) + offset, size);
}

// y = sigmoid(r) wkv(k, v) for 8 channels, whose state is at a_state, b_state and p_state
INLINE void wkv(const struct layer *l, int64_t channel, vector k_row, vector v_row, vector r_row, float *a_state, float *b_state,
                float *p_state, float *y_row) {
    floats k = load(k_row + channel), v = load(v_row + channel), r = load(r_row + channel);
    floats a = load(a_state), b = load(b_state), p = load(p_state);
    floats w = load(l->decay + channel), u = load(l->first + channel);
    floats top = max(p, u + k), past = exp_neg_clamped(p - top), new = exp_neg_clamped(u + k - top);
    store(y_row + channel, sigmoid(r) * (fma(past, a, new * v) / fma(past, b, new)));
    top = max(p + w, k), past = exp_neg_clamped(p + w - top), new = exp_neg_clamped(k - top);
    store(a_state, fma(past, a, new * v));
    store(b_state, fma(past, b, new));
    store(p_state, top);
}

// x = x + sigmoid(gate) y
INLINE void add_gated(float *x, vector gate, vector y, int64_t C) {
    for (int64_t j = 0; j < C; j += 8) store(x + j, load(x + j) + load(y + j) * sigmoid(load(gate + j)));
}

// Embeds the token, or adds the previous layer's channel mixing to x; then computes time mixing, which channel_mix adds to x.
static void time_mix(struct step *s, const struct model *m, const struct layer *l) {
    int64_t C = m->common.C, A = m->A, size = m->common.size;
    float *base = s->call->work;
    FOR_EACH_TILE(first, s, s->call->R) FOR_EACH_TOKEN(row, s, first) {
        float *work = row_work(s, row), *x = work + m->common.x, *normal = work + m->common.normal;
        if (l == m->layers) {
            embed(s, row, x);
            layer_norm(&l->ln0, x, x, C);
        } else {
            add_gated(x, work + m->gate, work + m->out, C);
        }
        layer_norm(&l->ln1, x, normal, C);
        token_shift(3, l->mixes, normal, layer_state(s, m, row, l, 0, C), work + m->mixed, C);
    }
    multiply(s, 3, (struct job[]){
        {&l->key, base + m->mixed, base + m->k, size, IDENTITY},
        {&l->value, base + m->mixed + C, base + m->v, size, IDENTITY},
        {&l->receptance, base + m->mixed + 2 * C, base + m->r, size, IDENTITY},
    });
    int64_t row_tiles = tiles(A, TILE_CHANNELS);
    FOR_EACH_TILE(tile, s, s->call->R * row_tiles) FOR_EACH_TOKEN(row, s, tile / row_tiles) {
        int64_t begin = tile % row_tiles * TILE_CHANNELS, end = min_int64(A, begin + TILE_CHANNELS), size = end - begin;
        float *work = row_work(s, row), *a = layer_state(s, m, row, l, C + begin, size);
        float *b = layer_state(s, m, row, l, C + A + begin, size), *p = layer_state(s, m, row, l, C + 2 * A + begin, size);
        for (int64_t channel = begin; channel < end; channel += 8, a += 8, b += 8, p += 8)
            wkv(l, channel, work + m->k, work + m->v, work + m->r, a, b, p, work + m->y);
    }
    multiply(s, 1, &(struct job){&l->output, base + m->y, base + m->out, size, IDENTITY});
}

static void channel_mix(struct step *s, const struct model *m, const struct layer *l) {
    int64_t C = m->common.C, size = m->common.size;
    float *base = s->call->work;
    FOR_EACH_TILE(first, s, s->call->R) FOR_EACH_TOKEN(row, s, first) {
        float *work = row_work(s, row), *x = work + m->common.x, *normal = work + m->common.normal;
        add(x, work + m->out, C);
        layer_norm(&l->ln2, x, normal, C);
        token_shift(2, l->ffn_mixes, normal, layer_state(s, m, row, l, C + 3 * m->A, C), work + m->mixed, C);
    }
    multiply(s, 2, (struct job[]){
        {&l->ffn_key, base + m->mixed, base + m->relu, size, RELU2},
        {&l->ffn_receptance, base + m->mixed + C, base + m->gate, size, IDENTITY},
    });
    multiply(s, 1, &(struct job){&l->ffn_value, base + m->relu, base + m->out, size, IDENTITY});
}

STEP(rwkv4) {
    const struct model *m = (const struct model *)s->common;
    for (const struct layer *l = m->layers; l < m->layers + m->common.L; l++) {
        time_mix(s, m, l);
        channel_mix(s, m, l);
    }
    FOR_EACH_TILE(row, s, s->call->R) {
        float *work = row_work(s, row);
        add_gated(work + m->common.x, work + m->gate, work + m->out, m->common.C);
    }
    compute_logits(s);
}
