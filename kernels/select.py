"""The one place where a kernel's name becomes an operator, for all programs and from_pretrained alike.

    wkv = select("wkv4", "taichi_v3", device, dtype)

The names of an operator are the files of its folder. An operator in the registry's COMPOSED can also be computed from the
operator named there, so the files of that folder are its names, too: select("wkv4", "conv1d") is the convolution form of WKV
with TimeX("conv1d") inside. `auto` is the one choice made by a rule: RULES, by operator, device and the dtype of the inputs.
"""

import importlib
from typing import Any, NamedTuple

import torch

from kernels.registry import COMPOSED, KernelUnavailable, UnknownKernel, load, name_now, names, operators, why_not

AUTO = "auto"
Dtype = torch.dtype | str                # that of the inputs; of matvec the form of the weights


class Rule(NamedTuple):
    """The kernels that auto tries in turn. measured: benchmarks/results/ shows that the first is the fastest or within
    noise of it, or it is the only one."""

    order: tuple[str, ...]
    measured: bool


# The last of each order needs nothing but torch. An order that is not measured follows the design: linear time, one launch.
CPU = Rule(("c_v0", "taichi_scan", "torch_scan"), measured=True)
CUDA = Rule(("triton_scan", "cuda_scan", "taichi_scan", "torch_scan"), measured=False)
CPU_7 = Rule(("c_v0", "taichi_v3", "torch_chunk"), measured=True)
# cuda_v2 takes 0.95 of cuda_v3's time on an H100 and 2.5 times its memory.
CUDA_7 = Rule(("cuda_v3", "triton_v0", "torch_chunk"), measured=True)
MATVEC = Rule(("c_v0", "torch_linear"), measured=False)
RULES = {
    ("wkv4", "cpu", "float32"): CPU,
    ("wkv4", "cpu", "bfloat16"): CPU,
    ("wkv4", "cpu", "float64"): Rule(("torch_scan",), measured=False),
    ("wkv4", "cuda", "float32"): CUDA,
    ("wkv4", "cuda", "bfloat16"): CUDA,
    ("wkv4", "cuda", "float64"): Rule(("torch_scan",), measured=False),
    ("wkv7", "cpu", "float32"): CPU_7,
    ("wkv7", "cpu", "bfloat16"): Rule(CPU_7.order, measured=False),
    ("wkv7", "cuda", "float32"): CUDA_7,
    ("wkv7", "cuda", "bfloat16"): Rule(CUDA_7.order, measured=False),
    **{("wkv7", device, "float64"): Rule(("torch_chunk",), measured=False) for device in ("cpu", "cuda")},
    ("matvec", "cpu", "float32"): MATVEC,
    ("matvec", "cpu", "bfloat16"): MATVEC,
    ("matvec", "cpu", "int8"): Rule(("fbgemm", "c_v0", "reference"), measured=False),
    ("matvec", "cpu", "int4"): Rule(("c_v0", "reference"), measured=False),
    ("draw", "cpu", "float32"): Rule(("c_v0",), measured=True),
    ("draw", "cuda", "float32"): Rule(("triton_v0",), measured=False),
}


def select(operator: str, name: str, device: str | torch.device = "cpu", dtype: Dtype = torch.float32) -> Any:
    """The operator ("wkv4", "timex", ...) computed by the kernel `name`, checked to run on `device`.

    `dtype` decides only what auto means. Raises UnknownKernel where the operator has no such kernel,
    ValueError for a TimeX that is unsound inside WKV, and KernelUnavailable where the kernel cannot run on `device`.
    """
    device = torch.device(device)
    name = resolve(operator, name, device, dtype)
    _check_name(operator, name, device.type)
    reason = why_not(folder(operator, name), name, device.type)
    if reason:
        others = runnable_on(operator, device.type)
        only_auto = others == [AUTO]
        raise KernelUnavailable(reason, "" if only_auto else f"on {device.type} there are: {', '.join(others)}")
    kind = importlib.import_module(f"kernels.{operator}").OPERATOR
    inner = folder(operator, name)
    selected = kind(name) if inner == operator else kind(inner, **{inner: name})
    selected.check_device(device)
    return selected


def selectable(operator: str) -> list[str]:
    """Every name that `select` takes for the operator, `auto` aside; a kernel whose package is missing is among them."""
    inner = COMPOSED.get(operator)
    inner_names = [name for name in names(inner) if _usable_inside(inner, name)] if inner else []
    return [*inner_names, *(name for name in names(operator) if name != inner)]


def folder(operator: str, name: str) -> str:
    """The folder of kernels/ that holds the file of the operator's kernel `name`: "timex" for ("wkv4", "conv1d")."""
    return operator if name in names(operator) else COMPOSED.get(operator, operator)


def resolve(operator: str, name: str, device: str | torch.device = "cpu", dtype: Dtype = torch.float32) -> str:
    """The kernel that `auto` means for `dtype` on `device`, the rule's last where none runs; any other name as it is now."""
    if name != AUTO or not _has_rule(operator):
        return name_now(operator, name)
    device = torch.device(device).type
    choices = rule(operator, device, dtype).order
    return next((choice for choice in choices if why_not(folder(operator, choice), choice, device) is None), choices[-1])


def why_auto(operator: str, device: str | torch.device = "cpu", dtype: Dtype = torch.float32) -> str:
    """One line to print: the kernel that auto resolves to and, where it is not the first choice or not measured, why."""
    device = torch.device(device).type
    (first, *_), measured = rule(operator, device, dtype)
    chosen = resolve(operator, AUTO, device, dtype)
    reason = why_not(folder(operator, first), first, device)
    doubts = [*filter(None, [reason]), *([] if measured else [f"not measured on {device} yet"])]
    return f"{chosen} (chosen by auto{': ' if doubts else ''}{'; '.join(doubts)})"


def rule(operator: str, device: str, dtype: Dtype) -> Rule:
    """The operator's rule for the device and dtype: float16 counts as bfloat16, and a device that no rule names as a CPU."""
    name = str(dtype).removeprefix("torch.")
    return RULES[operator, "cuda" if device == "cuda" else "cpu", "bfloat16" if name == "float16" else name]


def _check_name(operator: str, name: str, device: str) -> None:
    inner = COMPOSED.get(operator)
    if name != inner and name in names(folder(operator, name)):
        return
    owners = [other for other in operators() if name in names(other) and name != inner]
    problem = f"{name} is a kernel of {' and '.join(owners)}, not of {operator}" if owners else f"unknown kernel {name!r}"
    raise UnknownKernel(f"{problem}; on {device} there are: {', '.join(runnable_on(operator, device))}")


def _has_rule(operator: str) -> bool:
    return any(key[0] == operator for key in RULES)


def _usable_inside(operator: str, name: str) -> bool:
    try:
        return load(operator, name).REQUIRES.wkv
    except KernelUnavailable:
        return True


def runnable_on(operator: str, device: str) -> list[str]:
    """The names that select takes for the operator on the device type `device`, auto first where there is a rule."""
    here = [name for name in selectable(operator) if why_not(folder(operator, name), name, device) is None]
    return [AUTO, *here] if _has_rule(operator) else here
