"""RWKV-7 "Goose": a package with the interface rwkv.model.base.Generation.

mix.py has the formulas, and architecture.py the tensors and their shapes. The other modules compute the same formulas faster:
fused*.py in training, and step*.py for one token at a time.
"""

from rwkv.model.rwkv7.architecture import (
    DEEP_EMBED,
    KEPT_FLOAT32,
    LEARNS_STATE,
    LOW_RANK,
    LR_SCALES,
    MIXES,
    NAME,
    OPERATOR,
    OPTIONS,
    UNUSED,
    State,
    empty_state,
    group,
    non_negative,
    operator_work,
    saved_activations,
    saved_when_recomputing,
    shapes,
    sizes,
    with_default_widths,
)
from rwkv.model.rwkv7.deep_embed import add_deep_embed, first_carry, merge
from rwkv.model.rwkv7.initial import init_weights
from rwkv.model.rwkv7.mix import Block
