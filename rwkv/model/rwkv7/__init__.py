"""RWKV-7 "Goose": the names that rwkv.model.base.Generation lists.

mix.py has the architecture and its formulas. Beside it are the other forms: fused.py in training, step*.py for one token at a
time.
"""

from rwkv.model.rwkv7.mix import (
    DEEP_EMBED,
    KEPT_FLOAT32,
    LEARNS_STATE,
    LOW_RANK,
    LR_SCALES,
    MIXES,
    NAME,
    OPERATOR,
    OPTIONS,
    PLAIN,
    UNUSED,
    Block,
    State,
    add_deep_embed,
    empty_state,
    first_carry,
    gpu_launches,
    group,
    init_weights,
    merge,
    non_negative,
    operator_work,
    resolved,
    saved_activations,
    saved_when_recomputing,
    shapes,
    sizes,
)
from rwkv.model.rwkv7.step import Step
from rwkv.model.rwkv7.step_c import c_model
