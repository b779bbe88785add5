"""The one place where a kernel's name becomes an operator, for train.py, generate.py and from_pretrained alike.

A file of kernels/wkv/ is selected as it is; a file of kernels/timex/ means the convolution form with that TimeX inside.
`auto` is the one choice made by a rule.
"""

import torch

from kernels.registry import KernelUnavailable, check, names, runnable, why_not
from kernels.wkv import WKV

AUTO = "auto"
# What auto takes: the first that runs. On a CPU the fastest measured (the README's table); on a GPU nothing is measured yet.
PREFERRED = {"cpu": ("taichi_scan", "conv1d"), "cuda": ("taichi_v3", "conv1d")}


def selectable() -> list[str]:
    """Every name that `select` takes, `auto` aside."""
    return [*names("timex"), *(name for name in names("wkv") if name != "timex")]


def resolve(name: str, device: str | torch.device = "cpu") -> str:
    """`auto` as the name that it stands for on `device`, the last choice where none runs; any other name as it is."""
    if name != AUTO:
        return name
    device = torch.device(device).type
    choices = _preferred(device)
    return next((choice for choice in choices if why_not(_op(choice), choice, device) is None), choices[-1])


def why_auto(device: str | torch.device = "cpu") -> str:
    """What auto resolves to on `device` and, where it is not the first choice, why: one line to print."""
    device = torch.device(device).type
    first = _preferred(device)[0]
    chosen, reason = resolve(AUTO, device), why_not(_op(first), first, device)
    return f"{chosen} (chosen by auto)" if reason is None else f"{chosen} (chosen by auto: {reason})"


def select(name: str, device: str | torch.device = "cpu") -> WKV:
    """The WKV operator that `name` means. Raises ValueError for an unknown name, KernelUnavailable where it can't run."""
    name, device = resolve(name, device), torch.device(device)
    if name not in selectable():
        raise ValueError(f"unknown kernel {name!r}; on {device.type} there are: {', '.join(_runnable(device))}")
    try:
        check(_op(name), name, device)
    except KernelUnavailable as error:
        reason = str(error).split("; on ")[0]
        here = _runnable(device)         # auto first, which is of no use alone
        raise KernelUnavailable(f"{reason}; on {device.type} there are: {', '.join(here)}" if here[1:] else reason) from None
    return WKV(name) if _op(name) == "wkv" else WKV("timex", timex=name)


def _op(name: str) -> str:
    return "wkv" if name in names("wkv") else "timex"


def _preferred(device: str) -> tuple[str, ...]:
    return PREFERRED.get(device, PREFERRED["cpu"])


def _runnable(device: torch.device) -> list[str]:
    ops = ("timex", "wkv")
    return [AUTO, *(name for op in ops for name in runnable(op, device.type) if name in selectable())]
