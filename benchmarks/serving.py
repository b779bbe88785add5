"""Measures the throughput of the server, and compares it with the engine alone and with llama.cpp's server.

    python -m benchmarks.serving PART [--dtype int8 ...] [--texts 8 32] [--seconds 12] [--shape L,C,V] [--json FILE]

Measures the tokens per second of streams after their prompts. PART is one of

    share   alternates requests over HTTP, the engine alone, and the decoder without sampling, with RWKV-4
    peers   measures the server with RWKV-7, on an idle machine and with one busy process, alternating with llama.cpp's on the
            same weights and requests if --llama-server names that program (make llama-server); two threads each

The server is `python serve.py` with random weights in RWKV-4's 169M shape, or RWKV-7's 0.1b shape for peers. The vocabulary
consists of whole characters, so that each token is an event, and has 50,304 tokens for RWKV-4, a multiple of 64 as in a World
vocabulary. The client reads with one selector, counts events, and prints its CPU use. Each part takes less than three minutes
with these defaults. The last line of standard output is the result as JSON.
"""

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._main import answering_process, run_program
from kernels.arguments import Parser, above_zero, at_least, program, sizes_of
from kernels.bench.results import output_file, publish

ROOT = Path(__file__).parent.parent
PROMPT = "A prompt of some words, "
SETTLE_S = 1.0                           # seconds before events are counted
VOCABULARY = "vocabulary.txt"
LLAMA_FORMATS = {"float32": ["F32"], "bfloat16": ["BF16", "F16"], "int8": ["Q8_0"]}
LLAMA_CONTEXT = 2**15                    # tokens per slot, which cost a recurrent model no memory
LONGEST = LLAMA_CONTEXT - 100            # tokens of a stream that must not end while it is measured


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    run(PARTS, args, "rwkv7" if args.part == "peers" else "rwkv4")


def run(parts: Mapping[str, Callable[..., Iterator[dict[str, Any]]]], args: argparse.Namespace, generation: str) -> None:
    """Measures the part `args.part` with a random checkpoint of the generation, and publishes the rows."""
    from benchmarks.generation import SHAPES, write_checkpoint  # imports torch, which _serving_engine.py must import later
    from kernels.machine import hardware

    with tempfile.TemporaryDirectory() as folder:
        shape = args.shape or (SHAPES["rwkv7"] if generation == "rwkv7" else [12, 768, 50304])
        checkpoint = write_checkpoint(Path(folder), generation, shape)
        write_vocabulary(checkpoint.with_name(VOCABULARY), shape[-1])
        rows = [row for dtype in args.dtype for row in parts[args.part](checkpoint, dtype, args)]
    publish({"part": args.part, "machine": hardware.describe("cpu"), "rows": rows}, args.json)


def write_vocabulary(path: Path, most: int) -> None:
    """Writes a vocabulary in the World format: the 256 bytes, then as many characters of 3 or 4 bytes as fit."""
    singles = [bytes([value]) for value in range(256)]
    characters = (chr(code) for code in range(0x800, 0x110000) if not 0xD800 <= code < 0xE000)     # without surrogates
    letters = list(islice(characters, most - 1 - len(singles)))
    tokens = [repr(single.decode()) if single < b"\x80" else repr(single) for single in singles]
    tokens += [repr(letter) for letter in letters]
    lengths = [1] * len(singles) + [len(letter.encode()) for letter in letters]
    lines = (f"{index} {token} {length}\n" for index, (token, length) in enumerate(zip(tokens, lengths, strict=True), start=1))
    path.write_text("".join(lines), encoding="utf-8")


class Server:
    """The server `python serve.py`, which has two processes."""

    def __init__(self, checkpoint: Path, dtype: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "serve.py"), f"checkpoint={checkpoint}", f"dtype={dtype}", "port=0",
             f"tokenizer={checkpoint.with_name(VOCABULARY)}",
             "max_tokens=1000000", *options], stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1))})
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(line, end="", flush=True)
            if line.startswith("address"):
                self.port = int(line.rpartition(":")[2])
            if line.startswith("ready"):
                break
        else:
            sys.exit("the server did not start")
        self.pids = [self.process.pid, *children_of(self.process.pid)]

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def resident(self) -> int:
        """Returns the resident bytes of both processes, without mapped files."""
        return sum(1024 * int(line.split()[1]) for pid in self.pids
                   for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))

    def connect(self, body: dict[str, Any]) -> socket.socket:
        content = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", self.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                       % len(content) + content)
        return client


def children_of(parent: int) -> list[int]:
    """Returns the process ids of a process's children. Kernels without CONFIG_PROC_CHILDREN have no file with this list."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):          # the process has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                children.append(int(folder.name))
    return children


class LlamaServer(Server):
    """The server of llama.cpp, with one slot per stream."""

    def __init__(self, program: Path, weights: Path, slots: int, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        threads = str(min(2, os.cpu_count() or 1))
        self.process = subprocess.Popen([program, "--model", weights, "--port", str(self.port), "--parallel", str(slots),
                                         "--ctx-size", str(slots * LLAMA_CONTEXT), "--threads", threads, "--no-ui",
                                         "--threads-batch", threads, "--log-disable", *options])
        self.pids = [self.process.pid]
        while not self._ready():
            if self.process.poll() is not None:
                sys.exit("llama.cpp's server did not start")
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                return connection.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


@contextmanager
def stopped_at_exit(server: Server) -> Iterator[Server]:
    """Yields the server, and stops the server at the end of the `with` block."""
    try:
        yield server
    finally:
        server.signal(signal.SIGCONT)
        server.process.terminate()
        server.process.wait()


def serving(checkpoint: Path, dtype: str, *options: str) -> AbstractContextManager[Server]:
    return stopped_at_exit(Server(checkpoint, dtype, *options))


def request_body(n: int, seed: int, prompt: str | list[int] = PROMPT) -> dict[str, Any]:
    """Returns a request body. Token 0 is banned, because this token would end the text.

    The body sets the options whose defaults differ in llama.cpp.
    """
    return {"prompt": prompt, "max_tokens": n, "seed": seed, "stream": True, "logit_bias": {"0": -100}, "temperature": 1,
            "top_p": 1, "top_k": 0, "min_p": 0}


class Client:
    """A stream, and the arrival times of its events. `more` are further fields of the request."""

    def __init__(self, server: Server, n: int, seed: int, hang_up_after: int | None = None, prompt: str | list[int] = PROMPT,
                 **more: Any) -> None:
        self.began = time.perf_counter()
        self.n = n
        self.hang_up_after = hang_up_after
        self.socket = server.connect({**request_body(n, seed, prompt), **more})
        self.times: list[float] = []
        self.status = b""
        self.finished = False

    def read(self) -> bool:
        """Reads the available data. Returns False if the stream has ended or the client hangs up."""
        data = self.socket.recv(65536)
        self.status = self.status or data[9:12]
        self.finished = self.finished or b"[DONE]" in data
        self.times += [time.perf_counter()] * data.count(b"data: {")
        return bool(data) and (self.hang_up_after is None or len(self.times) < self.hang_up_after)


def read_for(selector: selectors.BaseSelector, seconds: float) -> list[Client]:
    """Reads from all clients for some time. Closes the sockets of the finished clients, and returns these clients."""
    finished_clients = []
    until = time.perf_counter() + seconds
    while (remaining := until - time.perf_counter()) > 0 and selector.get_map():
        for key, _ in selector.select(remaining):
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.socket.close()
                finished_clients.append(key.data)
    return finished_clients


# Parts


def share(checkpoint: Path, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    engine = [sys.executable, "-m", "benchmarks._serving_engine", checkpoint, dtype, checkpoint.with_name(VOCABULARY)]
    with answering_process(engine) as alone, serving(checkpoint, dtype) as server:
        for texts in args.texts:
            rates: dict[str, list[float]] = {"http": [], "engine": [], "decoder": []}
            busy: list[float] = []
            for turn in range(args.turns):
                rate, client = rate_over_http(server, texts, args.seconds / args.turns, turn)
                rates["http"].append(rate)
                busy.append(client)
                for name, measured in alone([texts, args.seconds / args.turns]).items():
                    rates[name] += measured
            row = {"dtype": dtype, "texts": texts, **{name: median(samples) for name, samples in rates.items()},
                   "client_cpu": median(busy)}
            print(f"{dtype:9}{texts:3} texts: HTTP {row['http']:.0f} tokens/s, engine alone {row['engine']:.0f}, decoder "
                  f"{row['decoder']:.0f}; HTTP/engine {row['http'] / row['engine']:.0%}, engine/decoder "
                  f"{row['engine'] / row['decoder']:.0%}; the client took {row['client_cpu']:.0%} of a core", flush=True)
            yield row


def rate_over_http(server: Server, texts: int, seconds: float, turn: int) -> tuple[float, float]:
    """Returns the events per second of all streams after their prompts, and the fraction of a core that the client used."""
    with selectors.DefaultSelector() as selector:
        clients = [Client(server, LONGEST, 1000 * turn + seed) for seed in range(texts)]
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        while not all(client.times for client in clients):
            if read_for(selector, 0.1):
                sys.exit(f"a stream ended early; the first stream had the HTTP status {clients[0].status.decode()}")
        read_for(selector, SETTLE_S)
        counted = sum(len(client.times) for client in clients)
        cpu = time.process_time()
        began = time.perf_counter()
        read_for(selector, seconds)
        elapsed = time.perf_counter() - began
        events = sum(len(client.times) for client in clients) - counted
        cpu = time.process_time() - cpu
        for client in clients:
            client.socket.close()
    time.sleep(0.5)                      # lets the server remove the closed streams' rows
    return events / elapsed, cpu / elapsed


def peers(checkpoint: Path, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures the servers with weights of `dtype`'s size alternately, each without and with a busy process.

    The server that is measured runs; the others are suspended.
    """
    with ExitStack() as running:
        servers = {("timemix", dtype): running.enter_context(serving(checkpoint, dtype, f"max_rows={max(args.texts)}"))}
        for name in LLAMA_FORMATS[dtype] if args.llama_server else ():
            weights = write_gguf(checkpoint, name)
            server = LlamaServer(args.llama_server, weights, max(args.texts))
            servers["llama.cpp", name] = running.enter_context(stopped_at_exit(server))
        company = running.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        running.callback(company.kill)
        company.send_signal(signal.SIGSTOP)
        for server in servers.values():
            server.signal(signal.SIGSTOP)
        for texts in args.texts:
            rates: dict[tuple[str, str], dict[str, list[float]]] = {key: {"quiet": [], "busy": []} for key in servers}
            for turn in range(args.turns):
                for key, server in servers.items():
                    server.signal(signal.SIGCONT)
                    rates[key]["quiet"].append(rate_over_http(server, texts, args.seconds / args.turns, turn)[0])
                    company.send_signal(signal.SIGCONT)
                    rates[key]["busy"].append(rate_over_http(server, texts, args.seconds / args.turns, turn)[0])
                    company.send_signal(signal.SIGSTOP)
                    server.signal(signal.SIGSTOP)
            for (of, format), measured in rates.items():
                row = {"of": of, "dtype": format, "texts": texts,
                       **{name: median(samples) for name, samples in measured.items()}}
                print(f"{of:10}{format:9}{texts:3} texts: {row['quiet']:.0f} tokens/s, beside a busy process {row['busy']:.0f} "
                      f"({row['busy'] / row['quiet']:.0%})", flush=True)
                yield row


def write_gguf(checkpoint: Path, name: str) -> Path:
    """Converts the checkpoint and its vocabulary to GGUF, and returns the path."""
    from benchmarks.generation import GGUF
    from rwkv.pretrained import RWKV
    from rwkv.tokenizer.tokenizers import Tokenizer

    path = checkpoint.with_name(f"{name}.gguf")
    RWKV.from_pretrained(checkpoint).save_pretrained(path, Tokenizer.named(str(checkpoint.with_name(VOCABULARY))), GGUF[name])
    return path


PARTS = {"share": share, "peers": peers}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.serving", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--texts", nargs="+", type=at_least(1), default=[8, 32], metavar="N")
    parser.add_argument("--seconds", type=above_zero, default=12, metavar="S",
                        help="measured seconds of HTTP, and of the engine alone, over all turns")
    parser.add_argument("--turns", type=at_least(1), default=3, metavar="N")
    return parse_arguments(parser, argv)


def parse_arguments(parser: Parser, argv: list[str] | None) -> argparse.Namespace:
    """Adds the options that both server benchmarks share, and returns the parsed arguments."""
    parser.add_argument("--dtype", nargs="+", default=["int8"], choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--shape", type=sizes_of("L,C,V"), metavar="L,C,V", help="layers, width, vocabulary")
    parser.add_argument("--llama-server", type=program, metavar="PROGRAM", help="llama.cpp's own server (make llama-server)")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    if args.shape and (args.shape[-1] < 320 or args.shape[-1] % 64):
        parser.error("the vocabulary in --shape must be a multiple of 64, and at least 320")
    return args


if __name__ == "__main__":
    run_program(main)
