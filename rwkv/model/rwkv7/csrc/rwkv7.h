// RWKV-7's constants and the order of its mixes, as in ../architecture.py; tests/model/rwkv7/test_constants.py compares them.

#ifndef RWKV7_H
#define RWKV7_H

#define FASTEST_LOG_W (-0.6065306597126334f)     // -e^-0.5, log_w of the fastest decay
#define LEAST_NORM 1e-12f                // lower bound of |k k_k|, as in torch.nn.functional.normalize
#define EPS 64e-5f                       // epsilon of the GroupNorm over each head

enum { MIX_R, MIX_K, MIX_V, MIX_W, MIX_A, MIX_G, MIXES };        // STEP_MIXES

#endif
