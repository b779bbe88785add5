"""RWKV-4: a package with the interface rwkv.model.base.Generation.

mix.py has the formulas, and architecture.py the tensors and their shapes. The other modules compute the same formulas faster:
fused.py in training, and step*.py for one token at a time.
"""

from rwkv.model.rwkv4.architecture import (
    KEPT_FLOAT32,
    LEARNS_STATE,
    LR_SCALES,
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
from rwkv.model.rwkv4.initial import init_weights
from rwkv.model.rwkv4.mix import Block
