"""Selects the kernel that computes an operator, for all programs and for from_pretrained.

    wkv = select("wkv4", "taichi_v3", device, dtype)

A kernel has the name of its file in the operator's folder. WKV can also be composed of TimeX (COMPOSED in registry.py), so
select("wkv4", ...) accepts the names of TimeX's kernels too: select("wkv4", "conv1d") returns the convolution formula of WKV
with TimeX("conv1d") inside. The name `auto` selects a kernel by the operator, the device and the dtype of the inputs (RULES).
For some operators `auto` also considers the numbers of heads and steps (BY_SIZE).
"""

import importlib
import math
from typing import Any, NamedTuple

import torch

from kernels.registry import COMPOSED, KernelUnavailable, UnknownKernel, load, names, operators, why_not

AUTO = "auto"
Dtype = torch.dtype | str                # dtype of the inputs; for matvec the format of the weights


class Rule(NamedTuple):
    """The order in which auto tries kernels.

    Attributes:
        measured: true if benchmarks/results/ show that the first kernel is the fastest, within noise, or if there is only one.
        source: the measurement, for the printed line about auto's choice.
    """

    order: tuple[str, ...]
    measured: bool
    source: str = ""


class Size(NamedTuple):
    """The sizes that determine which kernel is fastest: `heads` is B H, `steps` is T, and `width` is N, the size of a head."""

    heads: int
    steps: int
    width: int = 64

    def distance(self, other: "Size") -> float:
        """Returns the distance between two sizes, which is 0 for equal sizes and log 2 for twice the heads or steps."""
        return abs(math.log(self.heads / other.heads)) + abs(math.log(self.steps / other.steps))


# The last kernel of each order requires only torch. Orders that were not measured prefer linear time and a single launch.
CPU = Rule(("c_v0", "taichi_scan", "torch_scan"), measured=True)
H200 = "fastest on an NVIDIA H200, benchmarks/results/"
SCANS = ("cuda_scan", "triton_scan", "taichi_scan", "torch_scan")
CPU_7 = Rule(("c_v0", "taichi_v3", "torch_chunk"), measured=True)
# On an H100, cuda_v2 takes 0.95 times as long as cuda_v3, but 2.5 times as much memory.
CUDA_7 = Rule(("cuda_v3", "triton_v0", "torch_chunk"), True, "fastest on an NVIDIA H100, benchmarks/results/wkv7-cuda.json")
FEW_HEADS = "triton_v1", "cuda_v3", "cuda_v2", "triton_v0", "torch_chunk"
MANY_HEADS = "cuda_v2", "cuda_v3", "triton_v1", "triton_v0", "torch_chunk"
MATVEC = Rule(("c_v0", "torch_linear"), measured=False)
RULES = {
    ("wkv4", "cpu", "float32"): CPU,
    ("wkv4", "cpu", "bfloat16"): CPU,
    ("wkv4", "cpu", "float64"): Rule(("torch_scan",), measured=False),
    ("wkv4", "cuda", "float32"): Rule(SCANS, True, f"{H200}wkv4-cuda.json"),
    ("wkv4", "cuda", "bfloat16"): Rule(SCANS, True, f"{H200}wkv4-cuda-bfloat16.json"),
    ("wkv4", "cuda", "float64"): Rule(("torch_scan",), measured=False),
    ("wkv7", "cpu", "float32"): CPU_7,
    ("wkv7", "cpu", "bfloat16"): Rule(CPU_7.order, measured=False),
    ("wkv7", "cuda", "float32"): CUDA_7,
    ("wkv7", "cuda", "bfloat16"): Rule(FEW_HEADS, True, f"{H200}wkv7-cuda-bfloat16.json"),
    **{("wkv7", device, "float64"): Rule(("torch_chunk",), measured=False) for device in ("cpu", "cuda")},
    ("matvec", "cpu", "float32"): MATVEC,
    ("matvec", "cpu", "bfloat16"): MATVEC,
    ("matvec", "cpu", "int8"): Rule(("fbgemm", "c_v0", "reference"), measured=False),
    ("matvec", "cpu", "int4"): Rule(("c_v0", "reference"), measured=False),
    **{("matvec", "cpu", format): Rule(("c_v0", "reference"), measured=False)
       for format in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")},
    ("draw", "cpu", "float32"): Rule(("c_v0",), measured=True),
    ("draw", "cuda", "float32"): Rule(("triton_v0",), measured=False),
}
UNORDERED = Rule(("reference",), measured=False)         # for operators that are not in RULES
# The order at each measured size, by the time of forward and backward together. The nearest size applies; without a size, RULES
# apply. triton_v1's times are those of a prototype that had five times as many instructions in the slowest part of its
# backward.
BY_SIZE = {("wkv7", "cuda", "bfloat16"): {
    Size(8 * 12, 4096): FEW_HEADS, Size(8 * 12, 1024): FEW_HEADS, Size(1 * 64, 512): FEW_HEADS, Size(8 * 64, 4096): MANY_HEADS}}


def select(operator: str, name: str, device: str | torch.device = "cpu", dtype: Dtype = torch.float32,
           size: Size | None = None) -> Any:
    """Returns the operator ("wkv4", "timex", ...) that is computed by the kernel `name`.

    `dtype` and `size` are used only for name="auto". Raises UnknownKernel if the operator has no kernel `name`, or if WKV
    cannot be composed of that kernel. Raises KernelUnavailable if the kernel cannot run on `device`.
    """
    device = torch.device(device)
    name = resolve(operator, name, device, dtype, size)
    _check_name(operator, name, device.type)
    reason = why_not(folder(operator, name), name, device.type)
    if reason:
        others = runnable_on(operator, device.type)
        only_auto = others == [AUTO]
        raise KernelUnavailable(reason, "" if only_auto else f"These kernels run on {device.type}: {', '.join(others)}")
    kind = importlib.import_module(f"kernels.{operator}").OPERATOR
    inner = folder(operator, name)
    selected = kind(name) if inner == operator else kind(inner, **{inner: name})
    selected.check_device(device)
    return selected


def selectable(operator: str) -> list[str]:
    """Returns all names that `select` accepts for the operator, except `auto`, including kernels that cannot run here."""
    inner = COMPOSED.get(operator)
    inner_names = [name for name in names(inner) if _usable_inside(inner, name)] if inner else []
    return [*inner_names, *(name for name in names(operator) if name != inner)]


def folder(operator: str, name: str) -> str:
    """Returns the folder of kernels/ that contains the kernel's file, such as "timex" for ("wkv4", "conv1d")."""
    return operator if name in names(operator) else COMPOSED.get(operator, operator)


def resolve(operator: str, name: str, device: str | torch.device = "cpu", dtype: Dtype = torch.float32,
            size: Size | None = None) -> str:
    """Returns the name of the kernel that `auto` selects, or any other name unchanged.

    `auto` selects the first kernel of the rule that can run, or the last kernel if none can.
    """
    if name != AUTO or not _has_rule(operator):
        return name
    device = torch.device(device).type
    choices = rule(operator, device, dtype, size).order
    return next((choice for choice in choices if _why_skipped(operator, choice, device, size) is None), choices[-1])


def why_auto(operator: str, device: str | torch.device = "cpu", dtype: Dtype = torch.float32, size: Size | None = None) -> str:
    """Returns a text for the plan that a program prints: the kernel that auto selects, and the reason.

    The reason is the measurement, or why the first kernel of the rule was skipped.
    """
    device = torch.device(device).type
    (first, *_), measured, source = rule(operator, device, dtype, size)
    chosen = resolve(operator, AUTO, device, dtype, size)
    reason = _why_skipped(operator, first, device, size)
    reasons = [*filter(None, [reason or source]), *([] if measured else [f"not measured on {device} yet"])]
    return f"{chosen} (chosen by auto{': ' if reasons else ''}{'; '.join(reasons)})"


def rule(operator: str, device: str, dtype: Dtype, size: Size | None = None) -> Rule:
    """Returns the operator's rule for the device and dtype. Devices other than CUDA use the rules of a CPU.

    float16 uses the rules of bfloat16. In wkv7, float16 uses the rules of float32, because all kernels of wkv7 compute float16
    in float32. With a size, the rule has the order of the nearest measured size.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "float16":
        name = "float32" if operator == "wkv7" else "bfloat16"
    key = operator, "cuda" if device == "cuda" else "cpu", name
    base = RULES.get(key, UNORDERED)
    if size is None or key not in BY_SIZE:
        return base
    nearest = min(BY_SIZE[key], key=size.distance)
    return Rule(BY_SIZE[key][nearest], base.measured, f"{base.source}, with {nearest.heads} heads and {nearest.steps} steps")


def _why_skipped(operator: str, name: str, device: str, size: Size | None) -> str | None:
    reason = why_not(folder(operator, name), name, device)
    if reason or size is None:
        return reason
    widths = load(folder(operator, name), name).REQUIRES.N_sizes
    return f"{name} supports heads of up to {widths[-1]} channels" if widths and size.width > widths[-1] else None


def _check_name(operator: str, name: str, device: str) -> None:
    inner = COMPOSED.get(operator)
    if name != inner and name in names(folder(operator, name)):
        return
    owners = [other for other in operators() if name in names(other) and name != inner]
    problem = f"{name} is a kernel of {' and '.join(owners)}, not of {operator}" if owners else f"there is no kernel {name!r}"
    raise UnknownKernel(f"{problem}. These kernels run on {device}: {', '.join(runnable_on(operator, device))}")


def _has_rule(operator: str) -> bool:
    return any(key[0] == operator for key in RULES) or {*UNORDERED.order} <= {*names(operator)}


def _usable_inside(operator: str, name: str) -> bool:
    try:
        return load(operator, name).REQUIRES.wkv
    except KernelUnavailable:
        return True


def runnable_on(operator: str, device: str) -> list[str]:
    """Returns the names that `select` accepts on the device type `device`, beginning with `auto` if there is a rule."""
    here = [name for name in selectable(operator) if why_not(folder(operator, name), name, device) is None]
    return [AUTO, *here] if _has_rule(operator) else here
