"""Compares the kernel that the user chose with the operator's float64 reference before the run.

The test case launches many thread blocks and runs RUNS times, so that race conditions are likely to appear. A small case that
runs once might pass by luck. The check takes less than a second, plus the time to compile the kernel for the case's width on
some GPUs. Kernels that use torch.compile are not checked, because compiling them for the case's shape takes a minute. The
command pytest tests/kernels -k NAME runs all tests of a kernel.
"""

import importlib

import torch

from kernels.compare import errors, misses, tolerance
from kernels.operator import Operator
from kernels.registry import KernelUnavailable, load
from kernels.select import folder, select
from rwkv.errors import UserError

RUNS = 2
PARTS = ("CHECKED", "inputs", "double", "results", "tolerance")         # an operator's cases.py must define these names


def check(wkv: Operator, operator: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns a message if the errors of the kernel's output, state or gradients exceed the tests' tolerance, or else None.

    Raises UserError if the operator's cases.py lacks one of PARTS.

    Args:
        wkv: the operator with the kernel that the user chose.
        dtype: the dtype of the operator's inputs.
    """
    if load(folder(operator, wkv.name), wkv.name).REQUIRES.compiled:
        return None
    cases = importlib.import_module(f"kernels.{operator}.cases")
    missing = [part for part in PARTS if not hasattr(cases, part)]
    if missing:
        raise UserError(f"kernel={wkv.name} must be compared with the reference before the run, but "
                        f"kernels/{operator}/cases.py does not define {', '.join(missing)}. Define these names (see "
                        "kernels/README.md), or omit kernel=")
    inputs = cases.inputs(*cases.CHECKED, dtype=dtype, device=str(device))
    try:
        runs = [cases.results(wkv, inputs) for _ in range(RUNS)]
    except KernelUnavailable:
        raise
    except Exception as error:           # the kernel may support only the run's shape; if not, the run raises an error too
        return f"kernel={wkv.name} could not be compared with the reference before the run: {' '.join(str(error).split())}"
    expected = cases.results(select(operator, "reference", device), cases.double(inputs))
    failures = [misses(errors(actual, expected), tolerance(wkv, dtype)) for actual in runs]
    where = f"in {sum(map(bool, failures))} of {RUNS} runs of one case"
    return mismatch_message(wkv.name, next(filter(None, failures), {}), where)


def mismatch_message(kernel: str, failures: dict[str, str], where: str) -> str | None:
    """Returns the message for the failures that kernels.compare.misses returned, or None if there are no failures."""
    if not failures:
        return None
    differences = "; ".join(f"{name.replace('grad ', 'the gradient of ')} by {amount}" for name, amount in failures.items())
    return (f"kernel={kernel} is wrong: {where} the kernel differs from the reference in {differences} (relative errors). A "
            "model trained with this kernel may be worthless. To test the kernel, run in a clone: "
            f"python -m pytest tests/kernels -k {kernel}")
