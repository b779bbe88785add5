"""The one place where a kernel's name becomes an operator, for train.py, generate.py and from_pretrained alike.

A file of kernels/wkv4/ is selected as it is; a file of kernels/timex/ means the convolution form with that TimeX inside.
`auto` is the one choice made by a rule: RULES, by device and by the dtype of k and v.
"""

from typing import NamedTuple

import torch

from kernels.registry import KernelUnavailable, UnknownKernel, check, load, names, runnable, why_not
from kernels.wkv4 import WKV

AUTO = "auto"


class Rule(NamedTuple):
    """What auto tries in turn, and whether benchmarks/results/ shows the first to be the fastest."""

    order: tuple[str, ...]
    measured: bool


# The last of each order needs nothing but torch. What is not measured follows the design: linear time, one launch, exact.
CPU = Rule(("taichi_scan", "torch_scan"), measured=True)
CUDA = Rule(("triton_scan", "cuda_scan", "taichi_scan", "torch_scan"), measured=False)
RULES = {
    ("cpu", torch.float32): CPU,
    ("cpu", torch.bfloat16): CPU,
    ("cuda", torch.float32): CUDA,
    ("cuda", torch.bfloat16): CUDA,
}
IN_FLOAT64 = Rule(("torch_scan",), measured=False)


def selectable() -> list[str]:
    """Every name that `select` takes, `auto` aside; what cannot be asked, because its package is missing, is among them."""
    return [*filter(_sound, names("timex")), *(name for name in names("wkv4") if name != "timex")]


def resolve(name: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """`auto` as the name that it stands for with k and v of `dtype` on `device`, the last choice where none runs.

    Any other name as it is.
    """
    if name != AUTO:
        return name
    device = torch.device(device).type
    choices = rule(device, dtype).order
    return next((choice for choice in choices if why_not(_op(choice), choice, device) is None), choices[-1])


def why_auto(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """What auto resolves to and, where it is not the first choice or no measurement says so, why: one line to print."""
    device = torch.device(device).type
    (first, *_), measured = rule(device, dtype)
    chosen, reason = resolve(AUTO, device, dtype), why_not(_op(first), first, device)
    doubts = [*filter(None, [reason]), *([] if measured else [f"not measured on {device} yet"])]
    return f"{chosen} (chosen by auto{': ' if doubts else ''}{'; '.join(doubts)})"


def rule(device: str, dtype: torch.dtype) -> Rule:
    """float16 counts as bfloat16, and a device that no rule names as a CPU."""
    if dtype == torch.float64:
        return IN_FLOAT64
    half = dtype in (torch.bfloat16, torch.float16)
    return RULES["cuda" if device == "cuda" else "cpu", torch.bfloat16 if half else torch.float32]


def select(name: str, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> WKV:
    """The WKV operator that `name` means; `dtype`, that of k and v, decides only what auto means.

    Raises ValueError for an unknown name and for a TimeX that is unsound inside WKV, KernelUnavailable where it can't run.
    """
    name, device = resolve(name, device, dtype), torch.device(device)
    if name not in (*names("timex"), *names("wkv4")) or name == "timex":
        raise UnknownKernel(f"unknown kernel {name!r}; on {device.type} there are: {', '.join(_runnable(device))}")
    try:
        check(_op(name), name, device)
    except KernelUnavailable as error:
        reason = str(error).split("; on ")[0]
        here = _runnable(device)         # auto first, which is of no use alone
        raise KernelUnavailable(f"{reason}; on {device.type} there are: {', '.join(here)}" if here[1:] else reason) from None
    return WKV(name) if _op(name) == "wkv4" else WKV("timex", timex=name)


def _op(name: str) -> str:
    return "wkv4" if name in names("wkv4") else "timex"


def _sound(timex: str) -> bool:
    try:
        return load("timex", timex).REQUIRES.wkv
    except KernelUnavailable:
        return True


def _runnable(device: torch.device) -> list[str]:
    ops = ("timex", "wkv4")
    return [AUTO, *(name for op in ops for name in runnable(op, device.type) if name in selectable())]
