"""One job on a checkpoint, in a process of its own, for benchmarks/loading.py: _loading_job.py JOB SOURCE TARGET DTYPE.

JOB is timemix or timemix-convert, in our environment; rwkv, rwkv-convert or transformers in the peers', where `rwkv` is PyPI's.
Prints seconds and the peak resident bytes beyond those after importing the libraries.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Job = Callable[[str, str, str], Any]


def timemix() -> Job:
    from rwkv.pretrained import RWKV

    return lambda source, target, dtype: RWKV.from_pretrained(source, kernel="torch_scan", dtype=dtype)


def timemix_convert() -> Job:
    from rwkv.checkpoint.files import read_checkpoint, write_checkpoint

    return lambda source, target, dtype: write_checkpoint(read_checkpoint(source), target, dtype)


def rwkv() -> Job:
    from rwkv.pretrained import RWKV

    return lambda source, target, dtype: RWKV(model=source.removesuffix(".pth"), strategy=f"cpu {_short(dtype)}", verbose=False)


def rwkv_convert() -> Job:
    from rwkv.pretrained import RWKV

    def convert(source: str, target: str, dtype: str) -> Any:
        with suppress(SystemExit):       # rwkv exits after converting
            RWKV(source.removesuffix(".pth"), f"cpu {_short(dtype)}", verbose=False, convert_and_save_and_exit=target)

    return convert


def transformers() -> Job:
    import torch
    from transformers import RwkvForCausalLM

    return lambda source, target, dtype: RwkvForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))


def _short(dtype: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(name: str, source: str, target: str, dtype: str) -> None:
    jobs = {"timemix": timemix, "timemix-convert": timemix_convert, "rwkv": rwkv, "rwkv-convert": rwkv_convert,
            "transformers": transformers}
    job = jobs[name]()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")      # the peak counts from here
    before, start = resident("VmRSS"), time.perf_counter()
    kept = job(source, target, dtype)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": resident("VmHWM") - before}))
    del kept


if __name__ == "__main__":
    main(*sys.argv[1:])
