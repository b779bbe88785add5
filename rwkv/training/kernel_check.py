"""Compares the kernel that a user has named with its operator's float64 reference, before the run.

The case has many blocks and is computed RUNS times, so that a kernel whose threads race is likely to be seen: a small case that
is computed once has one block, and the luck of the first launch. It takes less than a second, and on a GPU perhaps a
compilation for the case's width. Kernels that torch.compile compiles are left out: they would be compiled once more for the
case's shape, in a minute. python -m pytest tests/kernels -k NAME compares in full.
"""

import importlib
from typing import Any

import torch

from kernels.compare import errors, misses, tolerance
from kernels.registry import KernelUnavailable, load
from kernels.select import folder, select

RUNS = 2


def check(wkv: Any, operator: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """A sentence on a kernel whose output, state or gradients are off by more than the tests allow; None for all others.

    wkv: the operator. dtype: of its inputs.
    """
    if load(folder(operator, wkv.name), wkv.name).REQUIRES.compiled:
        return None
    cases = importlib.import_module(f"kernels.{operator}.cases")
    inputs = cases.inputs(*cases.CHECKED, dtype=dtype, device=str(device))
    try:
        runs = [cases.results(wkv, inputs) for _ in range(RUNS)]
    except KernelUnavailable:
        raise
    except Exception as error:           # such as a kernel that takes the run's shape and no other: the run will show it
        return f"kernel={wkv.name} could not be compared with the reference before the run: {' '.join(str(error).split())}"
    expected = cases.results(select(operator, "reference", device), cases.double(inputs))
    wrong = [misses(errors(found, expected), tolerance(wkv, dtype)) for found in runs]
    where = f"in {sum(map(bool, wrong))} of {RUNS} runs of one case"
    return sentence(wkv.name, next(filter(None, wrong), {}), where)


def sentence(kernel: str, wrong: dict[str, str], where: str) -> str | None:
    """wrong: what kernels.compare.misses has found. None if that is nothing."""
    if not wrong:
        return None
    named = "; ".join(f"{name.replace('grad ', 'the gradient of ')} by {amount}" for name, amount in wrong.items())
    return (f"kernel={kernel} is wrong: {where} it differs from the reference in {named} (relative errors). What is trained "
            f"with it may be worthless; in a clone, python -m pytest tests/kernels -k {kernel} tests it")
