"""python -m benchmarks.tokenize_corpus [--gigabytes 1] [--folder DIR] [--vocabulary 8192] [--json FILE]

Tokenises a large text: the speed, the peak memory, and whether the shards are identical with one worker, with two, and after a
run that was killed half-way and resumed. The text is assembled from the standard library's sources by a fixed rule; each run
is a process of its own. Peak memory is the largest sum of the resident memory of that process and all its children, sampled
every 20 ms. The last line of standard output is the result as JSON; shards that differ make the exit status 1.
"""

import argparse
import hashlib
import json
import mmap
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks._main import run_program
from kernels.arguments import Parser, above_zero, at_least, existing_folder
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware
from rwkv.data.sources.stdlib import read_stdlib
from rwkv.tokenizer.tokenizers import JsonTokenizer

BPE_BYTES = 20_000_000                   # of text that the tokenizer is trained on
LEAST_GIGABYTES = 0.001
EVERY = 0.02                             # seconds between two samples of the memory
RUN = """
import json, resource, sys, time
from rwkv.config import DataConfig
from rwkv.data.prepare import prepare
path, tokenizer, cache, workers = sys.argv[1:]
since, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
corpus = prepare(DataConfig(name="text", path=path, tokenizer=tokenizer, cache_dir=cache, tokenize_workers=int(workers)), 512)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"seconds": time.perf_counter() - since,
                  "cpu_seconds": used.ru_utime - before.ru_utime + used.ru_stime - before.ru_stime,
                  "tokens": corpus.sizes.train_tokens + corpus.sizes.val_tokens}))
"""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="tokenize-corpus-") as folder:
        report = _measure(Path(folder), int(args.gigabytes * 1e9), args.vocabulary)
    report = {"machine": hardware.describe("cpu"), **report}
    print(tables.corpus(report, aligned), flush=True)
    publish(report, args.json)
    return 0 if report["identical"] else 1


def _measure(folder: Path, size: int, vocabulary: int) -> dict[str, Any]:
    size = _write_text(folder / "text", size)
    tokenizer = folder / "bpe.json"
    tokenizer.write_text(JsonTokenizer.train(_sample(folder / "text"), vocabulary).definition, encoding="utf-8")
    runs = {"bpe, 1 worker": _run(folder, size, str(tokenizer), 1), "bpe, 2 workers": _run(folder, size, str(tokenizer), 2)}
    runs["bpe, killed and resumed"] = _killed_and_resumed(folder, size, str(tokenizer), runs["bpe, 2 workers"]["shards"])
    hashes = {run["sha256"] for run in runs.values()}
    runs["bpe, again"] = _run(folder, size, str(tokenizer), 2)
    runs["world, 2 workers"] = _run(folder, size, "world", 2)
    return {"bytes": size, "vocabulary": vocabulary, "runs": runs, "identical": len(hashes) == 1}


def _write_text(folder: Path, size: int) -> int:
    """Writes files of 10 kB to 30 MB from random blocks of lines of the standard library; returns their bytes."""
    text = read_stdlib(Path(sysconfig.get_path("stdlib")), 0.5)
    lines = "\n".join([*text.val, *text.train]).encode().splitlines(keepends=True)
    chance = random.Random(0)
    written = number = 0
    folder.mkdir()
    while written < size:
        wanted = min(int(10_000 * 3000 ** chance.random()), size - written)
        with (folder / f"{number:05}.txt").open("wb") as file:
            while file.tell() < wanted:
                start = chance.randrange(len(lines))
                file.writelines(lines[start:start + chance.randint(5, 200)])
            written += file.tell()
        number += 1
    return written


def _sample(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir())[:: max(1, sum(1 for _ in folder.iterdir()) // 20)]:
        yield path.read_text(encoding="utf-8")[:BPE_BYTES // 20]


def _run(folder: Path, size: int, tokenizer: str, workers: int, cache: str = "cache",
         until: Callable[[Path], bool] = lambda cache: False) -> dict[str, Any]:
    """Tokenises in a process, which is killed once until(cache) is true; returns {} then, else its measurements."""
    place = folder / f"{cache}-{Path(tokenizer).stem}-{workers}"
    with subprocess.Popen([sys.executable, "-c", RUN, folder / "text", tokenizer, place, str(workers)],
                          stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident(process.pid))
            time.sleep(EVERY)
            if until(place):
                process.send_signal(signal.SIGKILL)
                process.wait()
                return {}
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
    return {**result, "mb_per_s": size / 1e6 / result["seconds"], "peak_mb": peak / 1e6, **_shards(place)}


def _killed_and_resumed(folder: Path, size: int, tokenizer: str, shards: int) -> dict[str, Any]:
    def half_done(cache: Path) -> bool:
        return len(list(cache.glob("tokens-*/00*-train.ids"))) >= shards // 2

    _run(folder, size, tokenizer, 2, "killed", half_done)
    return _run(folder, size, tokenizer, 2, "killed")


def _resident(pid: int) -> int:
    """Resident bytes of a process and all its children; 0 if it has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return pages * mmap.PAGESIZE + sum(_resident(int(child)) for child in children)


def _shards(cache: Path) -> dict[str, Any]:
    files = sorted(cache.glob("tokens-*/*.ids"))
    hashed = hashlib.sha256()
    for file in files:
        hashed.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return {"shards": sum(file.name.endswith("-train.ids") for file in files), "sha256": hashed.hexdigest()}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.tokenize_corpus", "Tokenise much text.")
    parser.add_argument("--gigabytes", type=above_zero, default=1.0, metavar="N")
    parser.add_argument("--folder", type=existing_folder, metavar="DIR",
                        help="for the text and the shards, about 4 times as many bytes")
    parser.add_argument("--vocabulary", type=at_least(257), default=8192, metavar="N", help="of the bpe tokenizer")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result here as well")
    args = parser.parse_args(argv)
    if args.gigabytes < LEAST_GIGABYTES:
        parser.error(f"--gigabytes is at least {LEAST_GIGABYTES}, for shards to compare; got {args.gigabytes}")
    return args


if __name__ == "__main__":
    run_program(main)
