// RWKV-7's step: the formulas of rwkv/model/rwkv7.py, token by token.

#include "step.h"

#define FASTEST_LOG_W -0.6065306597126334f      // of the decay: -e^-0.5
#define LEAST_NORM 1e-12f                // of kk, as in torch.nn.functional.normalize
enum { USUAL_N = 64 };                   // channels of a head in all released models: the step is compiled for them as well

// The matrices of the gates are stored as y = f(m down) up is read: w1 (rank,C) by output, and w2 by input.
struct layer {
    struct norm ln0, ln1, ln2, ln_x;     // ln0: of the first layer
    vector mixes;                        // (6,C) of r, k, v, w, a, g
    struct matrix receptance, key, value, output;
    struct matrix w1, w2, a1, a2, g1, g2, v1, v2;        // v1, v2: not of the first layer
    vector w0, a0, v0, k_k, k_a, r_k;
    vector ffn_mixes;                    // (1,C)
    struct matrix ffn_key, ffn_value;
};

struct model {
    struct common common;
    int64_t H, N;
    // places of a row: mixed (6,C); those of the gates' insides; v_first, r, k, v; what is added in z, rate, share, and g (C); ...
    int64_t mixed, of_w, of_a, of_g, of_v, v_first, r, k, v, z, rate, share, g, kk, y, out, relu;
    struct layer layers[];
};

// Of a row and a layer: att_x (C), S (H,N,N), whose rows are of the value, ffn_x (C).
static float *layer_state(const struct step *s, const struct model *m, int64_t row, const struct layer *l) {
    return state_of(s, row) + (l - m->layers) * m->common.C * (2 + m->N);
}

// S = S w + (S a) b + v k, and y = S r, row by row
INLINE void state_and_y(int64_t N, float *S, vector w, vector a, vector b, vector k, vector v, vector r, float *y) {
    for (int64_t i = 0; i < N; i++, S += N) {
        floats products[2] = {same(0.0f), same(0.0f)}, outputs[2] = {same(0.0f), same(0.0f)};
        SEVERAL for (int64_t j = 0; j < N / 8; j++) products[j % 2] = fused(at(S + j * 8), at(a + j * 8), products[j % 2]);
        floats sa = same(sum_of(products[0] + products[1])), value = same(v[i]);
        SEVERAL for (int64_t j = 0; j < N / 8; j++) {
            floats decayed = at(S + j * 8) * at(w + j * 8);
            floats now = fused(value, at(k + j * 8), fused(sa, at(b + j * 8), decayed));
            outputs[j % 2] = fused(now, at(r + j * 8), outputs[j % 2]);
            put(S + j * 8, now);
        }
        y[i] = sum_of(outputs[0] + outputs[1]);
    }
}

// One head of a row, from `channel` on: all that lies between the products. z becomes the decay w, rate b, and kk a.
static void wkv(const struct model *m, const struct layer *l, float *at_row, float *S, int64_t channel) {
    int64_t N = m->N;
    float *at_head = at_row + channel, *k = at_head + m->k, *v = at_head + m->v, *w = at_head + m->z, *b = at_head + m->rate;
    float *v_first = at_head + m->v_first, *a = at_head + m->kk, *y = at_head + m->y;
    vector r = at_head + m->r, g = at_head + m->g, share = at_head + m->share, bias = l->ln_x.bias + channel;
    vector weight = l->ln_x.weight + channel, w0 = l->w0 + channel, a0 = l->a0 + channel, v0 = l->v0 + channel;
    vector k_k = l->k_k + channel, k_a = l->k_a + channel, r_k = l->r_k + channel;
    floats squares = same(0.0f), bonus = same(0.0f);
    for (int64_t j = 0; j < N; j += 8) {
        floats key = at(k + j), value = at(v + j), rate = sigmoid((at(a0 + j) + at(b + j)));
        put(w + j, exp_of_any(FASTEST_LOG_W * sigmoid((at(w0 + j) + at(w + j)))));
        if (l == m->layers) put(v_first + j, value);
        else put(v + j, fused(at(v_first + j) - value, sigmoid((at(v0 + j) + at(share + j))), value));
        floats direction = key * at(k_k + j);
        squares = fused(direction, direction, squares);
        key = key * fused(rate - 1.0f, at(k_a + j), same(1.0f));
        bonus = fused(at(r + j) * key, at(r_k + j), bonus);
        put(k + j, key), put(b + j, rate), put(a + j, direction);
    }
    float length = root(sum_of(squares));
    floats factor = same(1.0f / (length > LEAST_NORM ? length : LEAST_NORM)), of_v = same(sum_of(bonus));
    for (int64_t j = 0; j < N; j += 8) {
        floats direction = at(a + j) * factor;
        put(a + j, -direction);
        put(b + j, at(b + j) * direction);
    }
    if (N == USUAL_N) state_and_y(USUAL_N, S, w, a, b, k, v, r, y);
    else state_and_y(N, S, w, a, b, k, v, r, y);
    float mean = mean_of(y, N), scale = 1.0f / root(mean_of_squares(y, N, mean) + (float)l->ln_x.eps);
    for (int64_t j = 0; j < N; j += 8) {
        floats normal = fused((at(y + j) - mean) * scale, at(weight + j), at(bias + j));
        put(y + j, fused(of_v, at(v + j), normal) * at(g + j));
    }
}

static void time_mix(struct step *s, const struct model *m, const struct layer *l) {
    int64_t C = m->common.C, N = m->N, size = m->common.size;
    int is_first = l == m->layers;
    float *row_0 = s->call->work, *m_r = row_0 + m->mixed, *m_k = m_r + C, *m_v = m_k + C, *m_w = m_v + C, *m_a = m_w + C, *m_g = m_a + C;
    EACH_TILE(first, s, s->call->R) EACH_TOKEN(row, s, first) {
        float *at_row = work_of(s, row), *x = at_row + m->common.x, *normal = at_row + m->common.normal;
        if (is_first) {
            embed(s, row, x);
            normalize(&l->ln0, x, x, C);
        } else {
            add(x, at_row + m->out, C);
        }
        normalize(&l->ln1, x, normal, C);
        mix(6, l->mixes, normal, layer_state(s, m, row, l), at_row + m->mixed, C);
    }
    multiply(s, is_first ? 6 : 7, (struct job[]){
        {&l->receptance, m_r, row_0 + m->r, size, IDENTITY},
        {&l->key, m_k, row_0 + m->k, size, IDENTITY},
        {&l->value, m_v, row_0 + m->v, size, IDENTITY},
        {&l->w1, m_w, row_0 + m->of_w, size, TANH},
        {&l->a1, m_a, row_0 + m->of_a, size, IDENTITY},
        {&l->g1, m_g, row_0 + m->of_g, size, SIGMOID},
        {&l->v1, m_v, row_0 + m->of_v, size, IDENTITY},
    });
    multiply_by_input(s, is_first ? 3 : 4, (struct job[]){
        {&l->w2, row_0 + m->of_w, row_0 + m->z, size, IDENTITY},
        {&l->a2, row_0 + m->of_a, row_0 + m->rate, size, IDENTITY},
        {&l->g2, row_0 + m->of_g, row_0 + m->g, size, IDENTITY},
        {&l->v2, row_0 + m->of_v, row_0 + m->share, size, IDENTITY},
    });
    EACH_TILE(tile, s, s->call->R * m->H) EACH_TOKEN(row, s, tile / m->H) {
        int64_t channel = tile % m->H * N;
        wkv(m, l, work_of(s, row), layer_state(s, m, row, l) + C + channel * N, channel);
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
        mix(1, l->ffn_mixes, normal, layer_state(s, m, row, l) + C * (1 + m->N), at_row + m->mixed, C);
    }
    multiply(s, 1, &(struct job){&l->ffn_key, row_0 + m->mixed, row_0 + m->relu, size, RELU2});
    multiply(s, 1, &(struct job){&l->ffn_value, row_0 + m->relu, row_0 + m->out, size, IDENTITY});
}

STEP(rwkv7_step) {
    const struct model *m = (const struct model *)s->common;
    for (const struct layer *l = m->layers; l < m->layers + m->common.L; l++) {
        time_mix(s, m, l);
        channel_mix(s, m, l);
    }
    EACH_TILE(row, s, s->call->R) add(work_of(s, row) + m->common.x, work_of(s, row) + m->out, m->common.C);
    end(s);
}
