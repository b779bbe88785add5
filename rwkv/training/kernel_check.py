"""Compares the kernel that the user chose with its operator's float64 reference, before the run.

The test case launches many thread blocks and runs RUNS times, so that races are likely to show; a small case, run once, might
pass by luck. The check takes less than a second, plus a compilation for the case's width on some GPUs. Kernels of torch.compile
are skipped: recompiling for the case's shape takes a minute. pytest tests/kernels -k NAME runs a kernel's full tests.
"""

import importlib

import torch

from kernels.compare import errors, misses, tolerance
from kernels.operator import Operator
from kernels.registry import KernelUnavailable, load
from kernels.select import folder, select
from rwkv.errors import UserError

RUNS = 2
PARTS = ("CHECKED", "inputs", "double", "results", "tolerance")         # names that an operator's cases.py must define


def check(wkv: Operator, operator: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """A message if the errors of the kernel's output, state or gradients exceed the tests' tolerance; None otherwise.

    wkv: the operator with the chosen kernel. dtype: the dtype of the operator's inputs. Raises UserError if the operator's
    cases.py lacks one of PARTS.
    """
    if load(folder(operator, wkv.name), wkv.name).REQUIRES.compiled:
        return None
    cases = importlib.import_module(f"kernels.{operator}.cases")
    missing = [part for part in PARTS if not hasattr(cases, part)]
    if missing:
        raise UserError(f"kernel={wkv.name} cannot be compared with the reference before the run: kernels/{operator}/cases.py "
                        f"must define {', '.join(missing)} (kernels/README.md); define them, or omit kernel=")
    inputs = cases.inputs(*cases.CHECKED, dtype=dtype, device=str(device))
    try:
        runs = [cases.results(wkv, inputs) for _ in range(RUNS)]
    except KernelUnavailable:
        raise
    except Exception as error:           # the kernel may support only the run's shape; if not, the run raises too
        return f"kernel={wkv.name} could not be compared with the reference before the run: {' '.join(str(error).split())}"
    expected = cases.results(select(operator, "reference", device), cases.double(inputs))
    failures = [misses(errors(actual, expected), tolerance(wkv, dtype)) for actual in runs]
    where = f"in {sum(map(bool, failures))} of {RUNS} runs of one case"
    return sentence(wkv.name, next(filter(None, failures), {}), where)


def sentence(kernel: str, failures: dict[str, str], where: str) -> str | None:
    """The message for `failures`, the result of kernels.compare.misses; None if there are none."""
    if not failures:
        return None
    named = "; ".join(f"{name.replace('grad ', 'the gradient of ')} by {amount}" for name, amount in failures.items())
    return (f"kernel={kernel} is wrong: {where} it differs from the reference in {named} (relative errors). A model trained "
            f"with it may be worthless; in a clone, python -m pytest tests/kernels -k {kernel} tests it")
