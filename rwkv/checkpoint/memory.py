"""Computes how much memory a model's weights need on a CPU, and checks that they fit."""

from rwkv.checkpoint.files import Checkpoint
from rwkv.config import BITS, BLOCKS
from rwkv.errors import UserError
from rwkv.model.base import generation, is_linear_weight

GIB = 2**30
SMALL = GIB                              # weights of at most this many bytes are always accepted
SMALLER = ("bfloat16", "int8", "int4")   # an error message suggests the first of these that fits


def weights_nbytes(checkpoint: Checkpoint, dtype: str, on_cpu: bool = True) -> int:
    """Returns the number of bytes that the weights need in `dtype`.

    With `on_cpu`, a mapped embedding does not count unless `dtype` is float32, because only a few of its rows are read.
    """
    if dtype == BLOCKS:
        return sum(tensor.packed_nbytes() for tensor in checkpoint.weights.stored.values())
    group = generation(checkpoint.config).group
    total = 0
    for name, tensor in checkpoint.weights.stored.items():
        if is_linear_weight(name, group(name)):
            total += tensor.count * BITS[dtype] // 8
        elif not (on_cpu and name.endswith("emb.weight") and tensor.mapped and dtype != "float32"):
            total += tensor.count * (4 if dtype == "float32" else 2)
    return total


def require_memory(checkpoint: Checkpoint, dtype: str, available: int | None) -> None:
    """Raises UserError if the weights do not fit into `available` bytes (None: unknown), and suggests a dtype that fits."""
    needed = weights_nbytes(checkpoint, dtype)
    if available is None or needed <= max(available, SMALL):
        return
    fitting = [(smaller, size) for smaller in SMALLER if (size := weights_nbytes(checkpoint, smaller)) <= available]
    remedy = "no dtype fits. Free memory, or use a smaller model"
    if fitting:
        smaller, size = fitting[0]
        remedy = f"pass dtype={smaller}, which requires {size / GIB:.1f} GiB"
    raise UserError(f"{checkpoint.path} in {dtype} requires {needed / GIB:.1f} GiB of memory, but only {available / GIB:.1f} "
                    f"GiB are free: {remedy}")
