"""One pass over a row computes the largest element and the sum online, and a second pass writes the result.

The sum is always relative to the largest element so far. A warp computes a row of up to 1024 columns, and a block of several
warps computes a longer row. Threads combine their results by warp shuffles and then in shared memory. Four columns are loaded
at a time, whatever the alignment of the row.
"""

from torch import Tensor, empty_like

from kernels.backends.cuda import Source, align, why_not
from kernels.registry import Requires

REQUIRES = Requires(devices=("cuda",), why_not=why_not)

WARP, WARPS = 32, 32                 # threads per warp; largest number of warps per block
SHORT = 1024                         # longest row that one warp computes
ROWS = 4                             # short rows per block
SOURCE = Source(__file__, "csrc/v0.cu", WARPS=WARPS)


def forward(x: Tensor) -> Tensor:
    return _launch("forward", x)


def backward(y: Tensor, grad_y: Tensor) -> Tensor:
    return _launch("backward", y, grad_y)


def _launch(kernel: str, *inputs: Tensor) -> Tensor:
    N, M = inputs[0].shape
    result = empty_like(inputs[0])
    rows, threads = (ROWS, WARP) if M <= SHORT else (1, _threads(M))
    SOURCE.launch(kernel, -(-N // rows), (threads, rows), *map(align, inputs), result, N, M)
    return result


def _threads(M: int) -> int:
    """Returns the number of threads for one row: whole warps, with 16 columns per thread, up to a full block."""
    return min(WARPS, -(-M // (16 * WARP))) * WARP
