"""Online: one pass over a row finds its largest element and the sum relative to it, a second one writes the result.

A warp takes a row of up to 1024 columns, a block of several warps a longer one; what their threads found is joined by
warp shuffles and then through shared memory. Four columns are loaded at a time, wherever a row starts.
"""

from torch import Tensor, empty_like

from kernels.backends.cuda import Source, aligned
from kernels.registry import Requires

REQUIRES = Requires(packages=("cuda.core",), devices=("cuda",))

WARP, WARPS = 32, 32                 # threads of a warp, and warps of a block at most
SHORT = 1024                         # columns that a warp takes alone
ROWS = 4                             # short rows of a block
SOURCE = Source(__file__, "csrc/v0.cu", WARPS=WARPS)


def forward(x: Tensor) -> Tensor:
    return _launch("forward", x)


def backward(y: Tensor, grad_y: Tensor) -> Tensor:
    return _launch("backward", y, grad_y)


def _launch(kernel: str, *inputs: Tensor) -> Tensor:
    (N, M), result = inputs[0].shape, empty_like(inputs[0])
    rows, threads = (ROWS, WARP) if M <= SHORT else (1, _threads(M))
    SOURCE.launch(kernel, -(-N // rows), (threads, rows), *map(aligned, inputs), result, N, M)
    return result


def _threads(M: int) -> int:
    """Of a block for one row: four loads of four columns each, as far as that goes, in full warps."""
    return min(WARPS, -(-M // (16 * WARP))) * WARP
