// Sums the tasks' partial gradients of vectors; each task has summed those of its own rows.

#pragma once
#include "../../../../kernels/native/csrc/vectors.h"

// to[i] = sum over tasks of partial[task * stride + i], 0 <= i < size, summed in float64 and rounded once.
INLINE void sum_partials(float *to, const float *partial, int64_t tasks, int64_t size, int64_t stride) {
    typedef double doubles VECTOR(LANES);
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t lanes = size - i < LANES ? size - i : LANES;
        doubles sum = (doubles)0.0;
        for (int64_t task = 0; task < tasks; task++)
            sum += __builtin_convertvector(load_partial(FLOAT32, partial + task * stride, i, lanes), doubles);
        store_partial(FLOAT32, to, i, lanes, __builtin_convertvector(sum, floats));
    }
}
