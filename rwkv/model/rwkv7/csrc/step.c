// RWKV-7's decoding step: the formulas of ../mix.py at T = 1.

#include "../../decoding/csrc/step.h"
#include "rwkv7.h"

enum { USUAL_N = 64 };                   // head size of all released models, for which wkv is compiled separately

// A low-rank gate is f(m w1) w2. Its matrices w1 (C,rank) and w2 (rank,C) are stored by input, as in the files.
struct layer {
    struct norm ln0, ln1, ln2, ln_x;     // ln0: first layer only
    vector mixes;                        // (MIXES,C): mu of each
    struct matrix receptance, key, value, output;
    struct matrix w1, w2, a1, a2, g1, g2, v1, v2;        // v1, v2: not in the first layer
    vector w0, a0, v0, k_k, k_a, r_k;
    vector ffn_mixes;                    // (1,C): mu of k
    struct matrix ffn_key, ffn_value;
};

struct model {
    struct common common;
    int64_t H, N;
    // offsets in a row's workspace: mixed (MIXES,C); hidden_* (rank), the gates' hidden activations; relu (F); all others (C), where
    // zw, za, zv are the gates' outputs, before their sigmoid
    int64_t mixed, hidden_w, hidden_a, hidden_g, hidden_v, v_first, r, k, v, zw, za, zv, g, kk, y, out, relu;
    struct layer layers[];
};

// row_state with an offset within layer l's state, which consists of att_x (C); S (H,N,N), rows: value, columns: key; ffn_x (C).
static float *layer_state(const struct step *s, const struct model *m, int64_t row, const struct layer *l, int64_t offset,
                          int64_t size) {
    return row_state(s, row, (l - m->layers) * m->common.C * (2 + m->N) + offset, size);
}

// S = S diag(w) + (S a) b^T + v k^T, and y = S r, row by row
INLINE void update_state(int64_t N, float *S, vector w, vector a, vector b, vector k, vector v, vector r, float *y) {
    for (int64_t i = 0; i < N; i++, S += N) {
        floats sums[2] = {splat(0.0f), splat(0.0f)}, outputs[2] = {splat(0.0f), splat(0.0f)};
        UNROLL_4 for (int64_t j = 0; j < N / 8; j++) sums[j % 2] = fma(load(S + j * 8), load(a + j * 8), sums[j % 2]);
        floats sa = splat(hsum(sums[0] + sums[1])), value = splat(v[i]);
        UNROLL_4 for (int64_t j = 0; j < N / 8; j++) {
            floats decayed = load(S + j * 8) * load(w + j * 8);
            floats updated = fma(value, load(k + j * 8), fma(sa, load(b + j * 8), decayed));
            outputs[j % 2] = fma(updated, load(r + j * 8), outputs[j % 2]);
            store(S + j * 8, updated);
        }
        y[i] = hsum(outputs[0] + outputs[1]);
    }
}

// Everything between the matrix products, for one row and the head that starts at `channel`. Overwrites zw with the decay w, za
// with b and kk with a.
static void wkv(const struct model *m, const struct layer *l, float *work, float *S, int64_t channel) {
    int64_t N = m->N;
    float *head = work + channel, *k = head + m->k, *v = head + m->v, *w = head + m->zw, *b = head + m->za;
    float *v_first = head + m->v_first, *a = head + m->kk, *y = head + m->y;
    vector r = head + m->r, g = head + m->g, zv = head + m->zv, bias = l->ln_x.bias + channel;
    vector weight = l->ln_x.weight + channel, w0 = l->w0 + channel, a0 = l->a0 + channel, v0 = l->v0 + channel;
    vector k_k = l->k_k + channel, k_a = l->k_a + channel, r_k = l->r_k + channel;
    floats squares = splat(0.0f), bonus_sums = splat(0.0f);
    for (int64_t j = 0; j < N; j += 8) {
        floats key = load(k + j), value = load(v + j), rate = sigmoid((load(a0 + j) + load(b + j)));
        store(w + j, exp_neg_clamped(FASTEST_LOG_W * sigmoid((load(w0 + j) + load(w + j)))));
        if (l == m->layers) store(v_first + j, value);
        else store(v + j, fma(load(v_first + j) - value, sigmoid((load(v0 + j) + load(zv + j))), value));
        floats direction = key * load(k_k + j);
        squares = fma(direction, direction, squares);
        key = key * fma(rate - 1.0f, load(k_a + j), splat(1.0f));
        bonus_sums = fma(load(r + j) * key, load(r_k + j), bonus_sums);
        store(k + j, key), store(b + j, rate), store(a + j, direction);
    }
    float norm = square_root(hsum(squares));
    floats factor = splat(1.0f / (norm > LEAST_NORM ? norm : LEAST_NORM)), bonus = splat(hsum(bonus_sums));
    for (int64_t j = 0; j < N; j += 8) {
        floats direction = load(a + j) * factor;
        store(a + j, -direction);
        store(b + j, load(b + j) * direction);
    }
    if (N == USUAL_N) update_state(USUAL_N, S, w, a, b, k, v, r, y);
    else update_state(N, S, w, a, b, k, v, r, y);
    float mean = mean_of(y, N), scale = 1.0f / square_root(variance_of(y, N, mean) + (float)l->ln_x.eps);
    for (int64_t j = 0; j < N; j += 8) {
        floats normal = fma((load(y + j) - mean) * scale, load(weight + j), load(bias + j));
        store(y + j, fma(bonus, load(v + j), normal) * load(g + j));
    }
}

static void time_mix(struct step *s, const struct model *m, const struct layer *l) {
    int64_t C = m->common.C, N = m->N, size = m->common.size;
    int is_first = l == m->layers;
    float *base = s->call->work, *mixed = base + m->mixed;
    FOR_EACH_TILE(first, s, s->call->R) FOR_EACH_TOKEN(row, s, first) {
        float *work = row_work(s, row), *x = work + m->common.x, *normal = work + m->common.normal;
        if (is_first) {
            embed(s, row, x);
            layer_norm(&l->ln0, x, x, C);
        } else {
            add(x, work + m->out, C);
        }
        layer_norm(&l->ln1, x, normal, C);
        token_shift(MIXES, l->mixes, normal, layer_state(s, m, row, l, 0, C), work + m->mixed, C);
    }
    multiply(s, is_first ? 6 : 7, (struct job[]){
        {&l->receptance, mixed + MIX_R * C, base + m->r, size, IDENTITY},
        {&l->key, mixed + MIX_K * C, base + m->k, size, IDENTITY},
        {&l->value, mixed + MIX_V * C, base + m->v, size, IDENTITY},
        {&l->w1, mixed + MIX_W * C, base + m->hidden_w, size, TANH},
        {&l->a1, mixed + MIX_A * C, base + m->hidden_a, size, IDENTITY},
        {&l->g1, mixed + MIX_G * C, base + m->hidden_g, size, SIGMOID},
        {&l->v1, mixed + MIX_V * C, base + m->hidden_v, size, IDENTITY},
    });
    multiply(s, is_first ? 3 : 4, (struct job[]){
        {&l->w2, base + m->hidden_w, base + m->zw, size, IDENTITY},
        {&l->a2, base + m->hidden_a, base + m->za, size, IDENTITY},
        {&l->g2, base + m->hidden_g, base + m->g, size, IDENTITY},
        {&l->v2, base + m->hidden_v, base + m->zv, size, IDENTITY},
    });
    FOR_EACH_TILE(tile, s, s->call->R * m->H) FOR_EACH_TOKEN(row, s, tile / m->H) {
        int64_t channel = tile % m->H * N;
        wkv(m, l, row_work(s, row), layer_state(s, m, row, l, C + channel * N, N * N), channel);
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
        token_shift(1, l->ffn_mixes, normal, layer_state(s, m, row, l, C * (1 + m->N), C), work + m->mixed, C);
    }
    multiply(s, 1, &(struct job){&l->ffn_key, base + m->mixed, base + m->relu, size, RELU2});
    multiply(s, 1, &(struct job){&l->ffn_value, base + m->relu, base + m->out, size, IDENTITY});
}

STEP(rwkv7) {
    const struct model *m = (const struct model *)s->common;
    for (const struct layer *l = m->layers; l < m->layers + m->common.L; l++) {
        time_mix(s, m, l);
        channel_mix(s, m, l);
    }
    FOR_EACH_TILE(row, s, s->call->R) add(row_work(s, row) + m->common.x, row_work(s, row) + m->out, m->common.C);
    compute_logits(s);
}
