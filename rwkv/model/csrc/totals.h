// The gradients of vectors, of which each task has its own sums.

#pragma once
#include "../../../kernels/native/csrc/vectors.h"

// to[i] = the sum of of_tasks[task * stride + i] over all tasks, 0 <= i < size, rounded once.
INLINE void total(float *to, const float *of_tasks, int64_t tasks, int64_t size, int64_t stride) {
    typedef double wide VECTOR(LANES);
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t lanes = size - i < LANES ? size - i : LANES;
        wide sum = (wide)0.0;
        for (int64_t task = 0; task < tasks; task++)
            sum += __builtin_convertvector(read_some(FLOAT32, of_tasks + task * stride, i, lanes), wide);
        write_some(FLOAT32, to, i, lanes, __builtin_convertvector(sum, floats));
    }
}
