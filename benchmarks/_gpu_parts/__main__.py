"""Runs a part of gpu_check in this process: python -m benchmarks._gpu_parts PART OUT --device cuda --deadline 60.

A failed measurement becomes a row of the results, and the part continues. After a GPU fault the part ends, because all later
CUDA calls of the process fail.
"""

import argparse
import shutil
import time
from pathlib import Path

from benchmarks._gpu_parts.check import Check
from benchmarks._gpu_parts.decode import decode
from benchmarks._gpu_parts.machine import machine
from benchmarks._gpu_parts.operators import peers, wkv4, wkv7
from benchmarks._gpu_parts.programs import programs, resume, shards, tests
from benchmarks._gpu_parts.right import right
from benchmarks._gpu_parts.serve import serve
from benchmarks._gpu_parts.train import compiled, train
from benchmarks.gpu_check import Rows

PARTS = (machine, right, train, decode, wkv7, serve, programs, resume, wkv4, peers, shards, compiled, tests)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.__name__ for part in PARTS])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds from now")
    args = parser.parse_args()
    check = Check(args.part, Rows(args.out), args.device, time.monotonic() + args.deadline)
    try:
        next(part for part in PARTS if part.__name__ == args.part)(check)
    finally:
        shutil.rmtree(check.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
