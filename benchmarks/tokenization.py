"""Compares the ids and the speed of timemix's tokenizers with those of other libraries.

    python -m benchmarks.tokenization [--text FILE] [--neox FILE.json] [--peers PYTHON] [--strings N] [--json FILE]

First the ids of N random strings are compared. Then encoding and decoding of one text are timed alternately, and the table
shows medians. The exit status is 1 if any ids differ. PyPI's `rwkv` runs in the environment of `make peers`. The last line of
standard output is the result as JSON.
"""

import argparse
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers
from pyrwkv_tokenizer import RWKVTokenizer

from benchmarks import tables
from benchmarks._main import answering_process, read_text, run_program
from benchmarks._strings import unicode_strings
from kernels.arguments import Parser, at_least, existing_file, program
from kernels.bench.results import output_file, publish
from kernels.bench.text import aligned
from kernels.bench.timing import time_alternately
from kernels.machine import hardware
from rwkv.data.sources.stdlib import read_stdlib
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer

PEERS = Path(__file__).parent.parent / ".venv-peers" / "bin" / "python"
PEER = Path(__file__).with_name("_rwkv_tokenizer.py")    # runs with -E, because PYTHONPATH makes `import rwkv` find timemix
STDLIB_CHARACTERS = 1_000_000            # bytes of the standard library's sources: the default text
BPE_SIZE = 8192

Peer = Callable[[Any], Any]              # peer(request) -> answer, see _rwkv_tokenizer.py
Work = dict[tuple[str, str], Callable[[], Any]]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    text = read_text(args.text) if args.text else _stdlib()
    size = len(text.encode())
    ours = _ours(text, args.neox)
    libraries = {name: tokenizers.Tokenizer.from_str(it.definition) for name, it in ours.items()
                 if isinstance(it, JsonTokenizer)}
    with answering_process([args.peers.absolute(), "-E", PEER]) if args.peers.exists() else nullcontext() as peer:
        checks = {**_check_world(ours["world"], peer, args.strings), **_check_json(ours, libraries, args.strings)}
        samples = time_alternately(_work(ours, libraries, peer, text), "cpu")
        versions = {name: metadata.version(name) for name in ("tokenizers", "pyrwkv-tokenizer")}
        versions |= {"rwkv": peer({"version": None})} if peer else {}
    tokens = {name: len(tokenizer.encode(text)) for name, tokenizer in ours.items()}
    report = {"machine": hardware.describe("cpu"), "versions": versions,
              "text": args.text.name if args.text else "stdlib", "bytes": size, "tokens": tokens, "checks": checks,
              "mb_per_s": _speeds(samples, size)}
    print(tables.tokenization(report, aligned), flush=True)
    if peer is None:
        print("PyPI's rwkv was not compared: install it with `make peers`")
    publish(report, args.json)
    return 1 if any(check["different"] for check in checks.values()) else 0


def _ours(text: str, neox: Path | None) -> dict[str, Tokenizer]:
    optional = {"neox": Tokenizer.from_file(neox)} if neox else {}
    ours: dict[str, Tokenizer] = {"byte": ByteTokenizer(), "char": CharTokenizer(text)}
    return ours | {"bpe": JsonTokenizer.train([text], BPE_SIZE), "world": Tokenizer.named("world")} | optional


def _check_world(world: Any, peer: Peer | None, count: int) -> dict[str, dict[str, int]]:
    texts = list(unicode_strings(count))
    library = RWKVTokenizer()
    ids = [world.encode(text) for text in texts]
    checks = {"world and pyrwkv-tokenizer, Unicode": _compare(ids, [library.encode(text) for text in texts])}
    if peer:
        checks["world and rwkv, Unicode"] = _compare(ids, peer({"ids_of": [text.encode().hex() for text in texts]}))
    return checks


def _check_json(ours: dict[str, Tokenizer], libraries: dict[str, Any], count: int) -> dict[str, dict[str, int]]:
    texts = list(unicode_strings(count))
    return {f"{name} and tokenizers, Unicode": _compare([ours[name].encode(text) for text in texts],
                                                        [library.encode(text, add_special_tokens=False).ids for text in texts])
            for name, library in libraries.items()}


def _compare(ids: list[list[int]], peer_ids: list[list[int]]) -> dict[str, int]:
    return {"strings": len(ids), "different": sum(a != b for a, b in zip(ids, peer_ids, strict=True))}


def _work(ours: dict[str, Tokenizer], libraries: dict[str, Any], peer: Peer | None, text: str) -> Work:
    """Returns, for each program and direction (encode, decode), a function that processes the whole text once."""
    work: Work = {}
    for name, tokenizer in ours.items():
        _add(work, f"ours, {name}", tokenizer.encode, tokenizer.decode, text, tokenizer.encode(text))
    for name, library in libraries.items():
        _add(work, f"tokenizers, {name}", library.encode, library.decode, text, library.encode(text).ids)
    rust = RWKVTokenizer()
    _add(work, "pyrwkv-tokenizer, world", rust.encode, rust.decode, text, rust.encode(text))
    if peer:
        _add(work, "rwkv, world", peer, peer, {"work": "encode"}, {"work": "decode"})
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "text").write_bytes(text.encode())
            peer({"text": str(Path(folder) / "text")})
    return work


def _add(work: Work, name: str, encode: Callable[..., Any], decode: Callable[..., Any], text: Any, ids: Any) -> None:
    work[name, "encode"] = partial(encode, text)
    work[name, "decode"] = partial(decode, ids)


def _speeds(samples: dict[tuple[str, str], list[float]], size: int) -> dict[str, dict[str, float]]:
    speeds: dict[str, dict[str, float]] = {}
    for (name, which), seconds in samples.items():
        speeds.setdefault(name, {})[which] = size / median(seconds) / 1e6
    return speeds


def _stdlib() -> str:
    documents = read_stdlib(Path(sysconfig.get_path("stdlib")), 0.5)
    return "\n".join([*documents.val, *documents.train])[:STDLIB_CHARACTERS]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.tokenization", "Compare and time tokenizers.")
    parser.add_argument("--text", type=existing_file, metavar="FILE", help="default: a part of the standard library's sources")
    parser.add_argument("--neox", type=existing_file, metavar="FILE",
                        help="a `tokenizers` JSON file, such as 20B_tokenizer.json")
    parser.add_argument("--peers", type=program, default=PEERS, metavar="PYTHON", help="Python with PyPI's rwkv")
    parser.add_argument("--strings", type=at_least(1), default=10_000, metavar="N")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the result to this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
