// RWKV-4's step for one token: the formulas of rwkv/model/rwkv4.py at T = 1.

#include "step.h"

struct layer {
    struct norm ln0, ln1, ln2;           // ln0: of the first layer
    vector mixes, decay, first;          // mixes (3,C) of k, v, r; p + decay decays; first: the bonus
    struct matrix key, value, receptance, output;
    vector ffn_mixes;                    // (2,C) of k, r
    struct matrix ffn_key, ffn_receptance, ffn_value;
};

struct model {
    struct common common;
    int64_t A, F;
    int64_t mixed, k, v, r, y, out, relu, gate;          // places of a row: mixed (3,C); k, v, r, y (A); out, gate (C); relu (F)
    struct layer layers[];
};

// Of a row and a layer: att_x (C), a, b, p (A), ffn_x (C).
static float *layer_state(const struct step *s, const struct model *m, int64_t row, const struct layer *l) {
    return state_of(s, row) + (l - m->layers) * (2 * m->common.C + 3 * m->A);
}

// y = sigmoid(r) wkv(k, v), of 8 channels
INLINE void wkv(const struct layer *l, int64_t channel, vector k_row, vector v_row, vector r_row, float *a_row, float *b_row,
                float *p_row, float *y_row) {
    floats k = at(k_row + channel), v = at(v_row + channel), r = at(r_row + channel);
    floats a = at(a_row + channel), b = at(b_row + channel), p = at(p_row + channel);
    floats w = at(l->decay + channel), u = at(l->first + channel);
    floats top = larger(p, u + k), past = exp_of_any(p - top), now = exp_of_any(u + k - top);
    put(y_row + channel, sigmoid(r) * (fused(past, a, now * v) / fused(past, b, now)));
    top = larger(p + w, k), past = exp_of_any(p + w - top), now = exp_of_any(k - top);
    put(a_row + channel, fused(past, a, now * v));
    put(b_row + channel, fused(past, b, now));
    put(p_row + channel, top);
}

// x = x + sigmoid(gate) y
INLINE void add_gated(float *x, vector gate, vector y, int64_t C) {
    for (int64_t j = 0; j < C; j += 8) put(x + j, at(x + j) + at(y + j) * sigmoid(at(gate + j)));
}

// x, after the layer before, or the embedding; then the inputs of k, v, r
static void time_mix(struct step *s, const struct model *m, const struct layer *l) {
    int64_t C = m->common.C, A = m->A, size = m->common.size;
    float *row_0 = s->call->work;
    EACH_TILE(first, s, s->call->R) EACH_TOKEN(row, s, first) {
        float *at_row = work_of(s, row), *x = at_row + m->common.x, *normal = at_row + m->common.normal;
        if (l == m->layers) {
            embed(s, row, x);
            normalize(&l->ln0, x, x, C);
        } else {
            add_gated(x, at_row + m->gate, at_row + m->out, C);
        }
        normalize(&l->ln1, x, normal, C);
        mix(3, l->mixes, normal, layer_state(s, m, row, l), at_row + m->mixed, C);
    }
    multiply(s, 3, (struct job[]){
        {&l->key, row_0 + m->mixed, row_0 + m->k, size, IDENTITY},
        {&l->value, row_0 + m->mixed + C, row_0 + m->v, size, IDENTITY},
        {&l->receptance, row_0 + m->mixed + 2 * C, row_0 + m->r, size, IDENTITY},
    });
    int64_t of_row = tiles(A, CHANNELS);
    EACH_TILE(tile, s, s->call->R * of_row) EACH_TOKEN(row, s, tile / of_row) {
        float *at_row = work_of(s, row), *a = layer_state(s, m, row, l) + C;
        int64_t begin = tile % of_row * CHANNELS, end = least(A, begin + CHANNELS);
        for (int64_t channel = begin; channel < end; channel += 8)
            wkv(l, channel, at_row + m->k, at_row + m->v, at_row + m->r, a, a + A, a + 2 * A, at_row + m->y);
    }
    multiply(s, 1, &(struct job){&l->output, row_0 + m->y, row_0 + m->out, size, IDENTITY});
}

static void channel_mix(struct step *s, const struct model *m, const struct layer *l) {
    int64_t C = m->common.C, size = m->common.size;
    float *row_0 = s->call->work;
    EACH_TILE(first, s, s->call->R) EACH_TOKEN(row, s, first) {
        float *at_row = work_of(s, row), *x = at_row + m->common.x, *normal = at_row + m->common.normal;
        add(x, at_row + m->out, C);
        normalize(&l->ln2, x, normal, C);
        mix(2, l->ffn_mixes, normal, layer_state(s, m, row, l) + C + 3 * m->A, at_row + m->mixed, C);
    }
    multiply(s, 2, (struct job[]){
        {&l->ffn_key, row_0 + m->mixed, row_0 + m->relu, size, RELU2},
        {&l->ffn_receptance, row_0 + m->mixed + C, row_0 + m->gate, size, IDENTITY},
    });
    multiply(s, 1, &(struct job){&l->ffn_value, row_0 + m->relu, row_0 + m->out, size, IDENTITY});
}

STEP(rwkv4_step) {
    const struct model *m = (const struct model *)s->common;
    for (const struct layer *l = m->layers; l < m->layers + m->common.L; l++) {
        time_mix(s, m, l);
        channel_mix(s, m, l);
    }
    EACH_TILE(row, s, s->call->R) {
        float *at_row = work_of(s, row);
        add_gated(at_row + m->common.x, at_row + m->gate, at_row + m->out, m->common.C);
    }
    end(s);
}
