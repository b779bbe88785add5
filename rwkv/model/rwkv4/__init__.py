"""RWKV-4: the names that rwkv.model.base.Generation lists.

mix.py has the architecture and its formulas. Beside it are the other forms: fused.py in training, step*.py for one token at a
time.
"""

from rwkv.model.rwkv4.mix import (
    KEPT_FLOAT32,
    LEARNS_STATE,
    LR_SCALES,
    NAME,
    OPERATOR,
    OPTIONS,
    PLAIN,
    UNUSED,
    Block,
    State,
    empty_state,
    gpu_launches,
    group,
    init_weights,
    non_negative,
    operator_work,
    resolved,
    saved_activations,
    saved_when_recomputing,
    shapes,
    sizes,
)
from rwkv.model.rwkv4.step import Step
from rwkv.model.rwkv4.step_c import c_model
