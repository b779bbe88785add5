"""Compiles the kernels of decoding on a GPU to cubins, without a GPU: `python gpu_cubins.py 90` compiles for sm_90.

`python gpu_cubins.py 90 bfloat16 int4` compiles only the products of these formats (for RWKV-4, of the last one), and only the
variant of each kernel with the most registers: prefill, tiles of 32 rows, and a draw with all filters. Prints JSON: the
registers, the bytes of spills and the shared memory of each kernel with its constants. test_gpu.py runs this program in a
process without TRITON_INTERPRET.
"""

import json
import sys
from typing import Any

import torch
from models import small_model
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction
from triton_cubins import DIVISIBLE_BY_16, facts, is_constant, is_even

from kernels.draw import NO_BIAS, Filters, _triton_penalties, triton_v0
from rwkv.model.decoding import triton_step
from rwkv.model.decoding.triton_step import GpuStep
from rwkv.model.quantized import to_packed

FORMATS = ["bfloat16", "float16", "float32", "int8", "int4"]
ALL_FILTERS = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "filters_first": True}
FILTERS = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_p": 0.5, "filters_first": True}, ALL_FILTERS]
POINTERS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
            torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8"}


def main(arch: int, chosen_formats: list[str]) -> None:
    resources: dict[str, dict[str, Any]] = {}

    def compile_instead(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
        args = (*args, *(named[param.name] for param in kernel.params[len(args):]))
        constants = {param.name: arg for param, arg in zip(kernel.params, args, strict=True) if is_constant(param, arg)}
        name = " ".join([kernel.__name__.lstrip("_"), *(f"{key}={value}" for key, value in constants.items())])
        if name not in resources:
            types = {param.name: "constexpr" if param.name in constants else kind(arg)
                     for param, arg in zip(kernel.params, args, strict=True)}
            even = {(i,): DIVISIBLE_BY_16 for i, (param, arg) in enumerate(zip(kernel.params, args, strict=True))
                    if param.name not in constants and is_even(arg) and not param.do_not_specialize}
            source = ASTSource(kernel, types, constants, even)
            resources[name] = facts(compile(source, target=GPUTarget("cuda", arch, 32), options=options))

    JITFunction.run = compile_instead
    triton_step.product_dtype = lambda dtype, device: dtype
    for generation in ("rwkv7", "rwkv4"):
        for format in chosen_formats[-1:] if generation == "rwkv4" and chosen_formats else chosen_formats or FORMATS:
            sizes = {"n_layer": 2, "n_embd": 128, "vocab_size": triton_step.MANY_OUTPUTS}
            sizes |= {"head_size": 64} if generation == "rwkv7" else {}
            model = small_model("reference", generation=generation, **sizes).requires_grad_(False)
            model = to_packed(model, format, "cpu") if format.startswith("int") else model.to(getattr(torch, format))
            step = GpuStep(model, 32)
            step.run(32, prefill=True)
            for rows, prefill in () if chosen_formats else ((1, False), (32, False), (16, True)):
                step.run(rows, prefill)
    logits = torch.empty(2, 65536)
    for options in [ALL_FILTERS] if chosen_formats else FILTERS:
        triton_v0.draw(logits, torch.empty(2), Filters(**options), NO_BIAS)
    counts, flags, places = logits.double(), logits.to(torch.uint8), torch.empty(2).long()
    _triton_penalties.penalize(logits, counts, flags, places, places, torch.empty(2, 4, dtype=torch.float64))
    print(json.dumps(resources))


def kind(arg: Any) -> str:
    return f"*{POINTERS[arg.dtype]}" if isinstance(arg, torch.Tensor) else "i32" if isinstance(arg, int) else "fp32"


if __name__ == "__main__":
    with torch.no_grad():
        main(int(sys.argv[1]), sys.argv[2:])
