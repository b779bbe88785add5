// WKV-7 and its gradients, in the vector instructions of x86-64 CPUs: the passes of taichi_v3. Compiled with AVX-512 or with AVX2 and
// FMA.
//
// Per row and head a step is, with S an N x N matrix, its rows i of the value and its columns j of the key, and w = exp(log_w),
//
//     S <- S (diag(w) + a b^T) + v k^T        y = S r         sa_t = S_{t-1} a_t
//
// Within a chunk of steps W_t is the product of w from the chunk's first step to t, S = S' diag(W_t) and G = dL/dS = G' / diag(W_t).
// With b' = b / W, k' = k / W, r' = r W and a'_t = a_t W_{t-1} no step has a decay, and each of four passes over a matrix adds two
// outer products to it, and multiplies it by two vectors:
//
//     forward   lanes i   S' += sa_t b'_t + v_t k'_t              y_t = S' r'_t              sa_{t+1} = S' a'_{t+1}
//     rows      lanes i   G' += gsa_{t+1} a'_{t+1} + gy_t r'_t    gv_t = G' k'_t             gsa_t = G' b'_t
//     states    lanes j   S' as in forward                        gr_t = W_t (S'^T gy_t)     ga_{t+1} = W_t (S'^T gsa_{t+1})
//     keys      lanes j   G' as in rows                           gk_t = (G'^T v_t) / W_t    gb_t = (G'^T sa_t) / W_t
//
// Backward goes twice through the sequences: from the last chunk to the first for rows, which keep G after each chunk; then forwards,
// a chunk at a time, for its states and, back from its end, for its keys. States keep S' after each step of the chunk, so that keys
// have both matrices of one moment for gl, the gradient of log_w:
//
//     gl_t = sum_i (S_{t-1} diag(w_t))_ij (G_t)_ij = sum_i (S'_{t-1})_ij (G'_t)_ij
//
// The running sum gl_{t+1} = gl_t - (r gr)_t - (a ga)_{t+1} + (b gb)_t + (k gk)_t costs less. But a small gl beside a large one is
// then the difference of two large sums, and where gl is 0 it is not.
//
// A matrix is cut into strips, which are as wide as a vector: LANES rows of it, with lanes along i, or LANES columns, along j. A
// strip is its vectors, N of them, one after the other, and stays in the first cache for a chunk of steps.
//
// Sequences are (B,T,H,N), states (B,H,N,N). Threads take heads (b,h) from a counter.

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")

const char SOURCE_HASH = 0;             // a name that tells what the bitcode was made of

enum form { FLOAT32, BFLOAT16 };         // of r, k, v, a, b, y and their gradients; all else is float32
enum {
    CHUNK = 16,                          // steps: 1/W is at most e^16 where log_w >= -1
};

// The arguments of a launch, as taichi_v4.py lists them.
struct call {
    int64_t B, T, H, N, scratch_size;    // scratch_size: numbers of scratch for each thread
    int32_t *taken;                      // heads that threads have taken
    float *scratch;
    const void *r, *log_w, *k, *v, *a, *b;
    const float *state;
    float *sa;                           // forward writes it, unless it is null; backward reads it
    void *y;                             // in backward gy
    float *after;                        // the state after the last step; in backward its gradient
    void *gr, *gl, *gk, *gv, *ga, *gb;   // of backward alone, as gstate
    float *gstate;
};

// A head at work. Its step t begins at number `first + t * stride` of a sequence. matrix: of forward, rows or states; gsa: of T + 1
// steps, of which the last is 0; G: a strip of keys; history: a strip of S' after each step of a chunk; kept: G after each chunk.
struct head {
    const struct call *call;
    long first, stride, T, N;
    float *matrix, *columns, *rows, *gsa, *G, *history, *kept;
};

#ifdef __AVX512F__

enum { LANES = 16 };
typedef __m512 floats;

INLINE floats zeros(void) { return _mm512_setzero_ps(); }
INLINE floats same(float x) { return _mm512_set1_ps(x); }
INLINE floats at(const float *p) { return _mm512_loadu_ps(p); }
INLINE void put(float *p, floats x) { _mm512_storeu_ps(p, x); }
INLINE floats times(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats plus(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats over(floats a, floats b) { return _mm512_div_ps(a, b); }
INLINE floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE floats less(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }          // c - a b
INLINE floats whole(floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE floats times_power(floats x, floats n) { return _mm512_scalef_ps(x, n); }

INLINE floats bfloats_at(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

// rounded to nearest, ties to even; every NaN becomes 0x7FC0, since rounding could turn its bits into an infinity's
INLINE void put_bfloats(uint16_t *p, floats x) {
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(rounded));
}

#else

enum { LANES = 8 };
typedef __m256 floats;

INLINE floats zeros(void) { return _mm256_setzero_ps(); }
INLINE floats same(float x) { return _mm256_set1_ps(x); }
INLINE floats at(const float *p) { return _mm256_loadu_ps(p); }
INLINE void put(float *p, floats x) { _mm256_storeu_ps(p, x); }
INLINE floats times(floats a, floats b) { return _mm256_mul_ps(a, b); }
INLINE floats plus(floats a, floats b) { return _mm256_add_ps(a, b); }
INLINE floats over(floats a, floats b) { return _mm256_div_ps(a, b); }
INLINE floats fused(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats less(floats a, floats b, floats c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE floats whole(floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE floats times_power(floats x, floats n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return times(x, _mm256_castsi256_ps(bits));
}

INLINE floats bfloats_at(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}

INLINE void put_bfloats(uint16_t *p, floats x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    _mm_storeu_si128((void *)p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

#endif

INLINE floats read(enum form form, const void *p, long i) {
    return form == FLOAT32 ? at((const float *)p + i) : bfloats_at((const uint16_t *)p + i);
}

INLINE void write(enum form form, void *p, long i, floats x) {
    if (form == FLOAT32) put((float *)p + i, x);
    else put_bfloats((uint16_t *)p + i, x);
}

// e^x for -80 <= x <= 0, to 2 units in the last place
INLINE floats exp_of(floats x) {
    floats z = times(x, same(1.4426950408889634f)), power = whole(z), f = less(power, same(1.0f), z);
    floats m = same(0.00015403530393381606f);
    m = fused(m, f, same(0.0013333558146428443f));
    m = fused(m, f, same(0.009618129107628477f));
    m = fused(m, f, same(0.05550410866482158f));
    m = fused(m, f, same(0.2402265069591007f));
    m = fused(m, f, same(0.6931471805599453f));
    m = fused(m, f, same(1.0f));
    return times_power(m, power);
}

// What a step needs of the key's axis and of the value's, N numbers of each: b', k', r', the next step's a' (0 after the last), W
// and 1/W; sa, v and gy
enum { B, K, R, A_NEXT, DECAY, OVER_DECAY, COLUMNS };
enum { SA, V, GY, ROWS };

INLINE float *column(const struct head *head, long s, int name) { return head->columns + (s * COLUMNS + name) * head->N; }
INLINE float *row(const struct head *head, long s, int name) { return head->rows + (s * ROWS + name) * head->N; }
INLINE long number_of(const struct head *head, long t) { return head->first + t * head->stride; }
INLINE long steps_from(const struct head *head, long t_0) { return head->T - t_0 < CHUNK ? head->T - t_0 : CHUNK; }

INLINE void stage_columns(enum form form, const struct head *head, long t_0, long steps) {
    const struct call *call = head->call;
    for (long s = 0; s < steps; s++) {
        long is_last = t_0 + s == head->T - 1, i = number_of(head, t_0 + s), next = is_last ? i : i + head->stride;
        floats more = same(is_last ? 0.0f : 1.0f);
        for (long j = 0; j < head->N; j += LANES) {
            floats w = exp_of(read(FLOAT32, call->log_w, i + j));
            if (s) w = times(w, at(column(head, s - 1, DECAY) + j));
            floats over_w = over(same(1.0f), w);
            put(column(head, s, B) + j, times(read(form, call->b, i + j), over_w));
            put(column(head, s, K) + j, times(read(form, call->k, i + j), over_w));
            put(column(head, s, R) + j, times(read(form, call->r, i + j), w));
            put(column(head, s, A_NEXT) + j, times(times(read(form, call->a, next + j), w), more));
            put(column(head, s, DECAY) + j, w);
            put(column(head, s, OVER_DECAY) + j, over_w);
        }
    }
}

INLINE void stage_rows(enum form form, const struct head *head, long t_0, long steps) {
    const struct call *call = head->call;
    for (long s = 0; s < steps; s++) {
        long i = number_of(head, t_0 + s);
        for (long j = 0; j < head->N; j += LANES) {
            put(row(head, s, SA) + j, at(call->sa + i + j));
            put(row(head, s, V) + j, read(form, call->v, i + j));
            put(row(head, s, GY) + j, read(form, call->y, i + j));
        }
    }
}

// Puts `from`, a strip, plus p x^T + q y^T into `to`, and returns its products with u and v. Two sums for each, since one that waits
// for its last addition at every vector would be the slowest part.
INLINE void pass(const float *from, float *to, long N, floats p, floats q, const float *x, const float *y, const float *u,
                 const float *v, floats *of_u, floats *of_v) {
    floats sums_u[2] = {zeros(), zeros()}, sums_v[2] = {zeros(), zeros()};
    for (long n = 0; n < N; n += 2)
        UNROLLED for (int o = 0; o < 2; o++) {
            floats new = fused(q, same(y[n + o]), fused(p, same(x[n + o]), at(from + (n + o) * LANES)));
            put(to + (n + o) * LANES, new);
            sums_u[o] = fused(new, same(u[n + o]), sums_u[o]);
            sums_v[o] = fused(new, same(v[n + o]), sums_v[o]);
        }
    *of_u = plus(sums_u[0], sums_u[1]), *of_v = plus(sums_v[0], sums_v[1]);
}

// The same, and of each lane the sum of products with another strip.
INLINE void pass_beside(const float *from, float *to, const float *other, long N, floats p, floats q, const float *x, const float *y,
                        const float *u, const float *v, floats *of_u, floats *of_v, floats *of_other) {
    floats sums_u[2] = {zeros(), zeros()}, sums_v[2] = {zeros(), zeros()}, sums_other[2] = {zeros(), zeros()};
    for (long n = 0; n < N; n += 2)
        UNROLLED for (int o = 0; o < 2; o++) {
            floats of_o = at(other + (n + o) * LANES);
            floats new = fused(q, same(y[n + o]), fused(p, same(x[n + o]), at(from + (n + o) * LANES)));
            put(to + (n + o) * LANES, new);
            sums_u[o] = fused(new, same(u[n + o]), sums_u[o]);
            sums_v[o] = fused(new, same(v[n + o]), sums_v[o]);
            sums_other[o] = fused(new, of_o, sums_other[o]);
        }
    *of_u = plus(sums_u[0], sums_u[1]), *of_v = plus(sums_v[0], sums_v[1]), *of_other = plus(sums_other[0], sums_other[1]);
}

INLINE floats product(const float *strip, long N, const float *u) {
    floats sum = zeros();
    for (long n = 0; n < N; n++) sum = fused(at(strip + n * LANES), same(u[n]), sum);
    return sum;
}

// Of a strip with lanes along i, each column times its decay.
INLINE void decay_columns(float *strip, long N, const float *w) {
    for (long n = 0; n < N; n++) put(strip + n * LANES, times(at(strip + n * LANES), same(w[n])));
}

// The same of one with lanes along j, from one place to another.
INLINE void decay(const float *from, float *to, long N, floats w) {
    for (long n = 0; n < N; n++) put(to + n * LANES, times(at(from + n * LANES), w));
}

// The transpose of a matrix, in tiles of 4 x 4. A row of `from` begins from_row numbers after the one before.
INLINE void turn(float *to, long to_row, const float *from, long from_row, long rows, long columns) {
    for (long i = 0; i < rows; i += 4)
        for (long j = 0; j < columns; j += 4) {
            __m128 tile[4];
            UNROLLED for (int n = 0; n < 4; n++) tile[n] = _mm_loadu_ps(from + (i + n) * from_row + j);
            _MM_TRANSPOSE4_PS(tile[0], tile[1], tile[2], tile[3]);
            UNROLLED for (int n = 0; n < 4; n++) _mm_storeu_ps(to + (j + n) * to_row + i, tile[n]);
        }
}

// Asks for the place of a step of a sequence that a chunk later is read or written: H heads apart, the CPU does not guess it.
INLINE void fetch(enum form form, const void *p, long i) {
    _mm_prefetch((const char *)p + i * (form == FLOAT32 ? 4 : 2), _MM_HINT_T1);
}

INLINE void fetch_columns(enum form form, const struct call *call, long i) {
    fetch(FLOAT32, call->log_w, i);
    fetch(form, call->r, i);
    fetch(form, call->k, i);
    fetch(form, call->a, i);
    fetch(form, call->b, i);
}

INLINE void fetch_rows(enum form form, const struct call *call, long i) {
    fetch(FLOAT32, call->sa, i);
    fetch(form, call->v, i);
    fetch(form, call->y, i);
}

INLINE void forward_strip(enum form form, const struct head *head, long lane, long t_0, long steps, float *sa) {
    const struct call *call = head->call;
    float *strip = head->matrix + lane * head->N;
    floats sa_t = at(sa + lane), y;
    for (long s = 0; s < steps; s++) {
        long i = number_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        fetch_columns(form, call, later);
        fetch(form, call->v, later);
        fetch(form, call->y, later);
        if (call->sa) {
            fetch(FLOAT32, call->sa, later);
            put(call->sa + i, sa_t);
        }
        pass(strip, strip, head->N, sa_t, read(form, call->v, i), column(head, s, B), column(head, s, K),
             column(head, s, R), column(head, s, A_NEXT), &y, &sa_t);
        write(form, call->y, i, y);
    }
    put(sa + lane, sa_t);
    decay_columns(strip, head->N, column(head, steps - 1, DECAY));
}

INLINE void forward(enum form form, const struct head *head, const float *state, float *after) {
    long N = head->N;
    float *a = head->columns, *sa = head->gsa;           // of one step
    for (long j = 0; j < N; j += LANES) put(a + j, read(form, head->call->a, head->first + j));
    for (long lane = 0; lane < N; lane += LANES) {
        turn(head->matrix + lane * N, LANES, state + lane * N, N, LANES, N);
        put(sa + lane, product(head->matrix + lane * N, N, a));
    }
    for (long t_0 = 0; t_0 < head->T; t_0 += CHUNK) {
        long steps = steps_from(head, t_0);
        stage_columns(form, head, t_0, steps);
        for (long lane = 0; lane < N; lane += LANES) forward_strip(form, head, lane, t_0, steps, sa);
    }
    for (long lane = 0; lane < N; lane += LANES) turn(after + lane * N, N, head->matrix + lane * N, LANES, N, LANES);
}

INLINE void rows_strip(enum form form, const struct head *head, long lane, long t_0, long steps) {
    const struct call *call = head->call;
    long N = head->N;
    float *strip = head->matrix + lane * N, *gsa = head->gsa + t_0 * N + lane;
    floats gsa_t = at(gsa + steps * N), gv;
    decay_columns(strip, N, column(head, steps - 1, DECAY));
    for (long s = steps - 1; s >= 0; s--) {
        long i = number_of(head, t_0 + s) + lane, later = i - CHUNK * head->stride;
        fetch_columns(form, call, later);
        fetch(form, call->y, later);
        fetch(form, call->gv, later);
        pass(strip, strip, N, gsa_t, read(form, call->y, i), column(head, s, A_NEXT), column(head, s, R), column(head, s, K),
             column(head, s, B), &gv, &gsa_t);
        write(form, call->gv, i, gv);
        put(gsa + s * N, gsa_t);
    }
}

// G after the chunk that begins with step t_0, in strips of keys.
INLINE float *kept_after(const struct head *head, long t_0) { return head->kept + t_0 / CHUNK * head->N * head->N; }

// From the strips of rows to those of keys.
INLINE void keep(const struct head *head, float *kept) {
    long N = head->N;
    for (long j = 0; j < N; j += LANES)
        for (long i = 0; i < N; i += LANES)
            turn(kept + j * N + i * LANES, LANES, head->matrix + i * N + j * LANES, LANES, LANES, LANES);
}

// gv, and the gradient of the state before the first step: G' there, and gsa a^T of that step.
INLINE void rows(enum form form, const struct head *head, const float *gafter, float *gstate) {
    long N = head->N;
    for (long lane = 0; lane < N; lane += LANES) {
        turn(head->matrix + lane * N, LANES, gafter + lane * N, N, LANES, N);
        put(head->gsa + head->T * N + lane, zeros());
    }
    for (long t_0 = (head->T - 1) / CHUNK * CHUNK; t_0 >= 0; t_0 -= CHUNK) {
        long steps = steps_from(head, t_0);
        stage_columns(form, head, t_0, steps);
        keep(head, kept_after(head, t_0));
        for (long lane = 0; lane < N; lane += LANES) rows_strip(form, head, lane, t_0, steps);
    }
    float *a = head->columns;                            // of the first step
    for (long j = 0; j < N; j += LANES) put(a + j, read(form, head->call->a, head->first + j));
    for (long lane = 0; lane < N; lane += LANES) {
        float *strip = head->matrix + lane * N;
        floats gsa = at(head->gsa + lane);
        for (long n = 0; n < N; n++) put(strip + n * LANES, fused(gsa, same(a[n]), at(strip + n * LANES)));
        turn(gstate + lane * N, N, strip, LANES, N, LANES);
    }
}

// Fills the history, in which S' before the chunk's first step is missing.
INLINE void states_strip(enum form form, const struct head *head, long lane, long t_0, long steps) {
    const struct call *call = head->call;
    long N = head->N;
    const float *before = head->matrix + lane * N, *gsa_next = head->gsa + (t_0 + 1) * N;
    floats gr, ga;
    for (long s = 0; s < steps; s++) {
        long i = number_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        float *after = head->history + s * N * LANES;
        fetch_columns(form, call, later);
        fetch_rows(form, call, later);
        fetch(form, call->gr, later);
        fetch(form, call->ga, later);
        pass(before, after, N, at(column(head, s, B) + lane), at(column(head, s, K) + lane), row(head, s, SA), row(head, s, V),
             row(head, s, GY), gsa_next + s * N, &gr, &ga);
        floats w = at(column(head, s, DECAY) + lane);
        write(form, call->gr, i, times(gr, w));
        if (t_0 + s < head->T - 1) write(form, call->ga, i + head->stride, times(ga, w));
        before = after;
    }
}

INLINE void keys_strip(enum form form, const struct head *head, long lane, long t_0, long steps) {
    const struct call *call = head->call;
    long N = head->N;
    const float *gsa_next = head->gsa + (t_0 + 1) * N;
    floats gk, gb, gl;
    decay(kept_after(head, t_0) + lane * N, head->G, N, at(column(head, steps - 1, DECAY) + lane));
    for (long s = steps - 1; s >= 0; s--) {
        long i = number_of(head, t_0 + s) + lane, later = i + CHUNK * head->stride;
        const float *before = s ? head->history + (s - 1) * N * LANES : head->matrix + lane * N;
        fetch(form, call->gk, later);
        fetch(form, call->gb, later);
        fetch(FLOAT32, call->gl, later);
        pass_beside(head->G, head->G, before, N, at(column(head, s, A_NEXT) + lane), at(column(head, s, R) + lane),
                    gsa_next + s * N, row(head, s, GY), row(head, s, V), row(head, s, SA), &gk, &gb, &gl);
        floats over_w = at(column(head, s, OVER_DECAY) + lane);
        write(form, call->gk, i, times(gk, over_w));
        write(form, call->gb, i, times(gb, over_w));
        write(FLOAT32, call->gl, i, gl);
    }
}

// gr, ga, gk, gb and gl
INLINE void states_and_keys(enum form form, const struct head *head, const float *state) {
    long N = head->N;
    for (long lane = 0; lane < N; lane += LANES) {
        float *strip = head->matrix + lane * N;
        for (long n = 0; n < N; n++) put(strip + n * LANES, at(state + n * N + lane));
        write(form, head->call->ga, head->first + lane, product(strip, N, head->gsa));
    }
    for (long t_0 = 0; t_0 < head->T; t_0 += CHUNK) {
        long steps = steps_from(head, t_0);
        stage_columns(form, head, t_0, steps);
        stage_rows(form, head, t_0, steps);
        for (long lane = 0; lane < N; lane += LANES) {
            states_strip(form, head, lane, t_0, steps);
            keys_strip(form, head, lane, t_0, steps);
            decay(head->history + (steps - 1) * N * LANES, head->matrix + lane * N, N, at(column(head, steps - 1, DECAY) + lane));
        }
    }
}

INLINE struct head head_of(const struct call *call, long number, long thread) {
    long N = call->N;
    struct head head = {.call = call, .first = (number / call->H * call->T * call->H + number % call->H) * N,
                        .stride = call->H * N, .T = call->T, .N = N};
    head.matrix = call->scratch + thread * call->scratch_size;
    head.columns = head.matrix + N * N;
    head.rows = head.columns + CHUNK * COLUMNS * N;
    head.gsa = head.rows + CHUNK * ROWS * N;             // forward has its sa here
    head.G = head.gsa + (call->T + 1) * N;               // in backward, as what follows
    head.history = head.G + N * LANES;
    head.kept = head.history + CHUNK * N * LANES;
    return head;
}

// Returns 0 where threads have taken all heads.
INLINE int take(const struct call *call, long *number) {
    *number = __atomic_fetch_add(call->taken, 1, __ATOMIC_RELAXED);
    return *number < call->B * call->H;
}

INLINE void forward_of_thread(enum form form, const struct call *call, long thread) {
    for (long number; take(call, &number);) {
        struct head head = head_of(call, number, thread);
        long matrix = number * call->N * call->N;
        forward(form, &head, call->state + matrix, call->after + matrix);
    }
}

INLINE void backward_of_thread(enum form form, const struct call *call, long thread) {
    for (long number; take(call, &number);) {
        struct head head = head_of(call, number, thread);
        long matrix = number * call->N * call->N;
        rows(form, &head, call->after + matrix, call->gstate + matrix);
        states_and_keys(form, &head, call->state + matrix);
    }
}

void wkv7_forward_float32(int64_t *call, int32_t *thread) { forward_of_thread(FLOAT32, (const void *)*call, *thread); }
void wkv7_forward_bfloat16(int64_t *call, int32_t *thread) { forward_of_thread(BFLOAT16, (const void *)*call, *thread); }
void wkv7_backward_float32(int64_t *call, int32_t *thread) { backward_of_thread(FLOAT32, (const void *)*call, *thread); }
void wkv7_backward_bfloat16(int64_t *call, int32_t *thread) { backward_of_thread(BFLOAT16, (const void *)*call, *thread); }
