"""Decodes with the timemix of the current folder: the path of a checkpoint and a dtype are its arguments.

Each line of standard input is a number of texts. Each line of standard output is the milliseconds of one of their steps, and
the texts, as JSON. It uses only what every version of timemix has.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from rwkv import RWKV, generate_batch
from rwkv.tokenizer.tokenizers import ByteTokenizer

TOKENS = 40


def main() -> None:
    checkpoint, dtype = sys.argv[1:]
    model = RWKV.from_pretrained(checkpoint, dtype=dtype)
    for line in sys.stdin:
        prompts = [f"{i} is a number that" for i in range(int(line))]
        read = _seconds(model, prompts, 1)[0]
        whole, samples = _seconds(model, prompts, 1 + TOKENS)
        steps = max(len(sample.tokens) for sample in samples) - 1            # fewer where all texts end early
        texts = [sample.text for sample in samples]
        print(json.dumps([1000 * (whole - read) / max(1, steps), texts]), flush=True)


def _seconds(model: RWKV, prompts: list[str], n: int) -> tuple[float, list[Any]]:
    """The seconds of reading the prompts and decoding up to n tokens of each without temperature, and the samples."""
    since = time.perf_counter()
    samples = generate_batch(model, ByteTokenizer(), prompts, max_new_tokens=n, temperature=0.0)
    return time.perf_counter() - since, samples


if __name__ == "__main__":
    main()
