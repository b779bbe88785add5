"""Compiles the Triton kernels to cubins without a GPU: `python triton_cubins.py 90` for sm_90.

`python triton_cubins.py 90 once` compiles each kernel with one set of constants, a fifth of the time, and leaves out WKV-4's
backward, which takes as long as all others.
`python triton_cubins.py 90 64,bfloat16 128,float32` compiles triton_v1 of wkv7 for these head sizes and dtypes of the inputs.

The program calls the launchers in kernels/ and compiles each launch, with its constants and options, instead of executing it.
It prints JSON: the resources of each cubin according to Triton and cuobjdump, by kernel and constants. test_triton.py and
triton_resources.py run it in a process without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from kernels.registry import load

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


def main(arch: int, *what: str) -> None:
    if what == ("once",):
        facts_by_name = cubins(arch, launches(widths=(96,), slow=False), once=True)
    elif what:
        facts_by_name = cubins(arch, (launch for head in what for launch in wkv7_launches("triton_v1", *head.split(","))))
    else:
        facts_by_name = cubins(arch, launches(widths=(96, 1) if arch == 90 else (96,)))
    print(json.dumps(facts_by_name))


def cubins(arch: int, launches: Iterable[Callable[[], Any]], once: bool = False) -> dict[str, dict[str, Any]]:
    """Returns the resources of each launch by kernel and constants; with `once`, only of the first launch of each kernel."""
    facts_by_name: dict[str, dict[str, Any]] = {}
    compiled: set[JITFunction] = set()

    def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        constants = {param.name: arg for param, arg in zip(kernel.params, args, strict=True) if is_constant(param, arg)}
        narrow = ["bfloat16"] if any(isinstance(arg, Tensor) and arg.dtype == torch.bfloat16 for arg in args) else []
        name = " ".join([kernel.__name__.lstrip("_"), *(f"{key}={value}" for key, value in constants.items()), *narrow])
        if name not in facts_by_name and not (once and kernel in compiled):
            compiled.add(kernel)
            source = ASTSource(kernel, *signature(kernel, args, constants))
            facts_by_name[name] = facts(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options))

    JITFunction.run = compile_instead
    for launch in launches:
        launch()
    return facts_by_name


def launches(widths: tuple[int, ...], slow: bool = True) -> Iterator[Any]:
    """Yields launches of every kernel with every set of constants. WKV-4's kernels are compiled for a width of 96, not of 1.

    `slow` includes the kernel that takes ten seconds to compile.
    """
    timex, wkv, softmax = load("timex", "triton_v0"), load("wkv4", "triton_scan"), load("softmax", "triton_v0")
    for B, C in ((1, 1), (40, 32), (256, 32)):
        w, k = torch.empty(C, 64), torch.empty(B, C, 64)
        yield lambda w=w, k=k: timex.forward(w, k, 0.0)
        yield lambda w=w, k=k: timex.grad_k(w, k)
        yield lambda k=k: timex.grad_w(k, k)
    for C, dtype in [*((C, torch.float32) for C in widths), (96, torch.bfloat16)]:
        x, state, row = torch.empty(2, C, C, dtype=dtype), torch.empty(2, C), torch.empty(C)
        yield lambda x=x, s=state, r=row: wkv.forward(r, r, x, x, s, s, s)
        if slow:
            yield lambda x=x, s=state, r=row: wkv.backward(r, r, x, x, s, s, s, x, x, s, s)
    for M in (1, 1000, 16384, 262144):
        x = torch.empty(2, M)
        yield lambda x=x: softmax.forward(x)
        yield lambda x=x: softmax.backward(x, x)
    for name in ("triton_v0", "triton_v1"):
        for dtype in ("bfloat16", "float32"):        # `once` compiles the first, much faster than float32's products
            yield from wkv7_launches(name, "64", dtype)


def wkv7_launches(name: str, head: str, dtype: str) -> Iterator[Any]:
    """Yields launches for one head size: forward without and with saved activations, if there are any, and backward."""
    wkv7, N = load("wkv7", name), int(head)
    x, log_w, state = torch.empty(2, 80, 3, N, dtype=getattr(torch, dtype)), torch.empty(2, 80, 3, N), torch.empty(2, 3, N, N)
    shapes = wkv7.activation_shapes(2, 80, 3, N) if hasattr(wkv7, "activation_shapes") else ()
    activations = [torch.empty(shape) for shape in shapes]
    yield lambda: wkv7.forward(x, log_w, x, x, x, x, state)
    if activations:
        yield lambda: wkv7.forward(x, log_w, x, x, x, x, state, *activations)
    yield lambda: wkv7.backward(x, log_w, x, x, x, x, state, *activations, x, state)


def is_constant(param: Any, arg: Any) -> bool:
    """Returns True if Triton compiles the argument as a constant, as it does with integers of 1."""
    return param.is_constexpr or (isinstance(arg, int) and arg == 1 and not param.do_not_specialize)


def signature(kernel: JITFunction, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of ASTSource as Triton's launch specialises them: types, constants, and multiples of 16."""
    types = {name: "constexpr" if name in constants else kind(arg) for name, arg in zip(kernel.arg_names, args, strict=True)}
    even = {(i,): DIVISIBLE_BY_16 for i, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=True))
            if name not in constants and is_even(arg) and not kernel.params[i].do_not_specialize}
    return types, constants, even


def kind(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}.get(arg.dtype, "*fp32")
    return "i32" if isinstance(arg, int) else "fp32"


def is_even(arg: Any) -> bool:
    return isinstance(arg, Tensor) or (isinstance(arg, int) and arg % 16 == 0)


def facts(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    stack, registers, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("STACK", "REG", "LOCAL"))
    return {"registers": registers, "spilled": stack + local, "shared": compiled.metadata.shared,
            "warps": compiled.metadata.num_warps, "dots": dots(compiled.asm["ttgir"])}


def dots(ttgir: str) -> list[str]:
    """Returns what each tensor core product is added to: "zeros", another "product", or a variable of a "loop"."""
    results = dict.fromkeys(re.findall(r"(%\w+)(?::\d+)? = (?:ttng\.warp_group_dot|tt\.dot)", ttgir), "product")
    accumulators = re.findall(r"= (?:ttng\.warp_group_dot|tt\.dot) %[\w#]+, %[\w#]+, (%\w+)", ttgir)
    return [results.get(name, "zeros" if name.startswith("%cst") else "loop" if name.startswith("%arg") else "product")
            for name in accumulators]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
