"""Measures prefill and decoding in each dtype, and compares them with other programs.

    python -m benchmarks.generation [--generation rwkv7] [--shape L,C,V] [--zeros FRACTION] [--dtype ...] [--batch 1,8]
        [--prompt 512] [--json FILE]

Measures tokens per second of prefill and decode, time to the first token, load time and peak memory for each dtype. Rates are
compared with two limits, measured in the same run: the bytes that a step must read over this machine's read bandwidth, and the
model's matrix products alone. The weights are random. Only one property of the weights affects the time: decoding skips weights
whose squared-ReLU input is zero. The result states the fraction of zeros: about half, or FRACTION with --zeros.

Other programs can be measured on the same weights, with two threads each:
    --peers PYTHON       PyPI's rwkv and, for RWKV-4, transformers, in an environment that has them (make peers)
    --llama PYTHON       llama.cpp, for RWKV-7, in an environment with llama-cpp-python (make peers)
    --rwkv-cpp FOLDER    rwkv.cpp: a checkout that is built (librwkv.so)

For RWKV-7, int8 and int4 also measure GGUF files in Q8_0 and Q4_K_M, whose blocks are multiplied without conversion. The blocks
of Q4_K_M are random in any case, because both programs multiply by all blocks, whatever their inputs. With --zeros, bfloat16
also measures a file written by `timemix convert --by-input`.

Each program and dtype is a process. Processes with the same weight width, such as float32, run alternately, so that only one
runs at any moment. The last line of standard output is the result as JSON.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._gguf import write_q4_k_m
from benchmarks._main import ProcessEnded, line_process, receive_line, run_program, send_line
from kernels.arguments import Parser, any_sizes, at_least, existing_folder, fraction, path_of, program, sizes_of, some_of
from kernels.bench.results import UnusableFile, output_file, publish
from kernels.bench.text import aligned
from kernels.machine import hardware, threads
from kernels.machine.allocator import keep_large_blocks
from kernels.machine.memory import peak_memory
from kernels.select import select
from rwkv.config import BITS, BLOCKS, ModelConfig
from rwkv.generation.decoder import decoder_of
from rwkv.generation.prefill import prefill
from rwkv.model.base import MATRICES, generation
from rwkv.model.decoding.c_step import LINEAR, step_of
from rwkv.model.quantized import BFloat16Linear, BlockLinear, Int4Linear, Int8Linear
from rwkv.pretrained import RWKV
from rwkv.tools.convert import convert

WIDTHS = {"float32": "32 bits", "bfloat16": "16 bits", "int8": "8 bits", "int4": "4 to 6 bits"}
PEER_FORMATS = {"32 bits": {"rwkv": ["float32"], "transformers": ["float32"], "llama.cpp": ["F32"], "rwkv.cpp": ["FP32"]},
                "16 bits": {"rwkv": ["bfloat16"], "transformers": ["bfloat16"], "llama.cpp": ["BF16", "F16"],
                            "rwkv.cpp": ["FP16"]},
                "8 bits": {"rwkv": ["int8"], "llama.cpp": ["Q8_0"], "rwkv.cpp": ["Q8_0"]},
                "4 to 6 bits": {"llama.cpp": ["Q4_K_M"], "rwkv.cpp": ["Q4_0", "Q5_1"]}}
LACKING: dict[str, list[tuple[str, str | None]]] = {             # peers that do not support this architecture or this format
    "rwkv4": [("llama.cpp", None)], "rwkv7": [("transformers", None), ("rwkv", "int8")]}
IN_BLOCKS = {"8 bits": "Q8_0", "4 to 6 bits": "Q4_K_M"}         # the GGUF format that timemix measures at a width, for RWKV-7
BY_INPUT, BY_INPUT_FILE = "bfloat16 by input", "by_input.safetensors"
GGUF = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "q8_0"}
GGMF = {"FP32": "float32", "FP16": "float16"}
SHAPES = {"rwkv4": [12, 768, 50277], "rwkv7": [12, 768, 65536]}
ROUNDS = 5                               # in each round every program runs each of its tasks once
THREADS = 2                              # threads of each program
TURN_S = 0.6                             # seconds per task and round
LIMIT = "limit of "                      # prefix of the name of a task's matrix products
READ = "read"                            # the task that measures the bandwidth
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.measure is not None:
        answer(args.checkpoint, args.measure, args.batch, args.prompt)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shape = args.shape or SHAPES[args.generation]
        zeros = write_files(Path(folder), args, shape)
        widths = {width: dtype for dtype, width in WIDTHS.items() if dtype in args.dtype}
        rows, ended = [], []
        for width, dtype in widths.items():
            measured, errors = compare(_commands(args, Path(folder), width, dtype))
            ended += errors
            print(table({"rows": measured}), file=sys.stderr, flush=True)
            rows += measured
    report = {"generation": args.generation, "shape": dict(zip("LCV", shape, strict=True)), "prompt": args.prompt,
              "zeros": zeros, "rows": rows, "machine": hardware.describe("cpu")}
    print(table(report))
    print(f"squared ReLU: {zeros:.0%} zeros")
    publish(report, args.json)
    for error in ended:
        print(f"not measured: {error}", file=sys.stderr)
    return 1 if ended else 0


def compare(programs: dict[tuple[str, str], list[str]]) -> tuple[list[Row], list[str]]:
    """Measures the programs alternately. `programs` are commands by name and format.

    Returns the programs' rows, and an error for each other program that ended early. Exits if timemix has ended early.
    """
    workers: dict[tuple[str, str], Worker] = {}
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    errors = []
    with ExitStack() as running:
        for turn in range(ROUNDS + 1):   # the first turn starts the programs
            for key, command in programs.items():
                try:
                    if turn == 0:
                        workers[key] = running.enter_context(worker(command))
                        seconds[key] = {task: [] for task in workers[key].tasks}
                    elif key in workers:
                        for task, samples in seconds[key].items():
                            samples.append(workers[key].seconds(task))
                except ProcessEnded as ended:
                    if key[0] == "timemix":
                        raise
                    workers.pop(key, None)
                    errors.append(str(ended))
    rows = []
    for (of, dtype), process in workers.items():
        middle = {task: median(samples) for task, samples in seconds[of, dtype].items()}
        rows += [{"of": of, "dtype": dtype, "what": task} | _limits(process, middle, task)
                 | {key: process.header[key] for key in ("load_s", "first_token_s", "peak_mib")}
                 for task in middle if task != READ and not task.startswith(LIMIT)]
    return rows, errors


def _limits(worker: "Worker", seconds: dict[str, float], task: str) -> Row:
    """Returns the tokens per second of a task and, if known, of its matrix products alone and at the bandwidth limit."""
    tokens = worker.tasks[task]
    row = {"tokens_per_s": tokens / seconds[task]}
    if READ in seconds:
        bandwidth = worker.header["read_bytes"] / seconds[READ]
        row |= {"products": tokens / seconds[LIMIT + task], "read_gb_s": bandwidth / 1e9}
        if task in worker.header["step_bytes"]:
            row["read"] = tokens * bandwidth / worker.header["step_bytes"][task]
    return row


class Worker:
    """A process that measures tasks on request, and is suspended between requests.

    Attributes:
        tasks: number of tokens of each task, by name.
        header: the first line of the process, parsed from JSON.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.header = json.loads(receive_line(process, "{"))
        self.tasks: dict[str, int] = self.header["tasks"]
        process.send_signal(signal.SIGSTOP)

    def seconds(self, task: str) -> float:
        """Measures a task, and returns the mean seconds of a call."""
        self._process.send_signal(signal.SIGCONT)
        send_line(self._process, f"{TURN_S} {task}")
        seconds = float(receive_line(self._process))
        self._process.send_signal(signal.SIGSTOP)
        return seconds


@contextmanager
def worker(command: list[str]) -> Iterator[Worker]:
    """Runs the command as a Worker, which ends with the `with` block.

    timemix's threads spin as in generate.py (kernels/machine/threads.py).
    """
    environment = {"GOMP_SPINCOUNT": threads.SPINS} | os.environ if command[0] == sys.executable else None
    with line_process(command, environment) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def _commands(args: argparse.Namespace, folder: Path, width: str, dtype: str) -> dict[tuple[str, str], list[str]]:
    sizes = [",".join(map(str, args.batch)), str(args.prompt)]
    files = {("timemix", dtype): (dtype, "model.pth")}
    if args.generation == "rwkv7" and width in IN_BLOCKS:
        name = IN_BLOCKS[width]
        files["timemix", name] = (BLOCKS, f"{name}.gguf")
    if dtype == "bfloat16" and _measures_by_input(args):
        files["timemix", BY_INPUT] = (dtype, BY_INPUT_FILE)
    ours = {key: [sys.executable, "-m", "benchmarks.generation", "--measure", format, "--checkpoint", str(folder / file),
                  "--batch", sizes[0], "--prompt", sizes[1]] for key, (format, file) in files.items()}
    pythons = {"rwkv": args.peers, "transformers": args.peers, "llama.cpp": args.llama,
               "rwkv.cpp": args.rwkv_cpp and sys.executable}
    script = str(hardware.ROOT / "benchmarks" / "_peer_generation.py")
    lacking = LACKING[args.generation]
    peers = {(peer, format): [str(pythons[peer]), "-I", script, peer, format, str(folder), *sizes]
             for peer, formats in PEER_FORMATS[width].items() for format in formats
             if pythons[peer] and (peer, None) not in lacking and (peer, format) not in lacking}
    return {**ours, **peers}


def answer(checkpoint: Path, dtype: str, batches: list[int], prompt: int) -> None:
    """Runs in timemix's Worker process. Prints the header, then the mean seconds for each input line "SECONDS TASK"."""
    keep_large_blocks()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    began = time.perf_counter()
    model = RWKV.from_pretrained(checkpoint, dtype=dtype)
    load_s = time.perf_counter() - began
    tokens = torch.randint(model.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    prefill(model, tokens[:, :8])        # compiles the kernels
    began = time.perf_counter()
    decoder_of(model, prefill(model, tokens).state).step(tokens[:, 0])
    first_s = time.perf_counter() - began
    peak_mib = peak_memory() / 2**20     # is read before the inputs of the matrix products are allocated
    read, read_bytes = hardware.read("cpu")
    tasks: dict[str, tuple[int, Callable[[], Any]]] = {READ: (1, read)}
    for B in batches:
        tasks |= {decode_name(B): (B, _decode(model, B)), LIMIT + decode_name(B): (B, _products(model, B))}
    name = f"prefill {prompt}"
    tasks |= {name: (prompt, lambda: prefill(model, tokens)), LIMIT + name: (prompt, _prefill_products(model, prompt))}
    print(json.dumps({"load_s": load_s, "first_token_s": first_s, "peak_mib": peak_mib, "read_bytes": read_bytes,
                      "tasks": {key: n for key, (n, _) in tasks.items()},
                      "step_bytes": {decode_name(B): step_bytes(model, dtype, B) for B in batches}}), flush=True)
    for line in sys.stdin:
        seconds, _, key = line.rstrip("\n").partition(" ")
        print(_mean_seconds(tasks[key][1], float(seconds)), flush=True)


def decode_name(B: int) -> str:
    return f"decode, batch {B}"


def step_bytes(model: RWKV, dtype: str, B: int) -> float:
    """Returns the bytes that a step of B rows must read: the state, B rows of the embedding, and all other weights."""
    if dtype == BLOCKS:
        matrices = sum(layer.packed.nbytes() for layer in model.modules() if isinstance(layer, BlockLinear))
        return matrices + sum(4 * weight.numel() for weight in model.parameters()) + model.empty_state(B).nbytes()
    kind = generation(model.config)
    matrix_bits = BITS["bfloat16" if step_of(model).reads_copies else dtype]
    bits = {name: matrix_bits if kind.group(name) in MATRICES else 32 for name in kind.shapes(model.config, model.vocab_size)}
    sizes = {name: math.prod(shape) for name, shape in kind.shapes(model.config, model.vocab_size).items()}
    return sum(sizes[name] * bits[name] / 8 for name in sizes if name != "emb.weight") + model.empty_state(B).nbytes()


def write_files(folder: Path, args: argparse.Namespace, shape: Sequence[int]) -> float:
    """Writes a random model in the format of each program, and returns its zero_fraction.

    Raises UnusableFile if the folder of --rwkv-cpp has no librwkv.so.
    """
    library = args.rwkv_cpp and next(args.rwkv_cpp.rglob("librwkv.so"), None)
    if args.rwkv_cpp and not library:
        raise UnusableFile(f"{args.rwkv_cpp} contains no librwkv.so: build rwkv.cpp in this folder")
    about = {"generation": args.generation, "rwkv.cpp": str(library)}
    (folder / "model.json").write_text(json.dumps(about), encoding="utf-8")
    checkpoint = write_checkpoint(folder, args.generation, shape, args.zeros)
    model = RWKV.from_pretrained(checkpoint)
    if args.peers and args.generation == "rwkv4":
        model.save_pretrained(folder / "huggingface", dtype="float32")
    formats = set(GGUF) if args.llama else {"Q8_0"} if {"int8", "int4"} & set(args.dtype) else set()
    for name in formats if args.generation == "rwkv7" else ():
        model.save_pretrained(folder / f"{name}.gguf", dtype=GGUF[name])
    if _measures_by_input(args):
        convert(checkpoint, folder / BY_INPUT_FILE, "bfloat16", by_input=True)
    if args.generation == "rwkv7" and "int4" in args.dtype:
        write_q4_k_m(folder / "Q8_0.gguf", folder / "Q4_K_M.gguf")
    for name, dtype in GGMF.items() if args.rwkv_cpp else ():
        model.save_pretrained(folder / f"{name}.ggmf", dtype=dtype)
    return zero_fraction(model)


def _measures_by_input(args: argparse.Namespace) -> bool:
    return args.generation == "rwkv7" and args.zeros is not None and "bfloat16" in args.dtype


def write_checkpoint(folder: Path, name: str, shape: Sequence[int], zeros: float | None = None) -> Path:
    """Writes a random model as a .pth in bfloat16, like the published models, and returns its path.

    `zeros` is the approximate fraction of squared ReLUs that are zero; None means about half.
    """
    L, C, V = shape
    torch.manual_seed(0)
    config = ModelConfig(generation=name, n_layer=L, n_embd=C)
    model = RWKV(config, V, select(generation(config).OPERATOR, "reference")).init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, C ** -0.5)
        if zeros is not None:            # the norm's bias of 1 gives each input of a squared ReLU the mean -shift * C
            shift = NormalDist(0, 2 ** 0.5).inv_cdf(zeros) / C
            for block in model.blocks:
                block.ln2.bias.fill_(1)
                block.ffn.key.weight.sub_(shift)
    model.save_pretrained(folder / "model.pth", dtype="bfloat16")
    return folder / "model.pth"


@torch.inference_mode()
def zero_fraction(model: RWKV) -> float:
    """Returns the fraction of squared ReLUs that are zero, over all layers, for 64 random tokens."""
    fractions = []
    hooks = [block.ffn.key.register_forward_hook(lambda *call: fractions.append((call[-1] <= 0).double().mean().item()))
             for block in model.blocks]
    prefill(model, torch.randint(model.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0)))
    for hook in hooks:
        hook.remove()
    return fmean(fractions)


def table(report: dict[str, Any]) -> str:
    head = ["", "dtype", "tokens/s", "of the bandwidth", "of the products", "load s", "first token s", "peak MiB"]
    return aligned([head, *map(_cells, report["rows"])], left=2)


def _cells(row: Row) -> list[str]:
    shares = [f"{row['tokens_per_s'] / row[limit]:.0%}" if limit in row else "" for limit in ("read", "products")]
    return [f"{row['of']}: {row['what']}", row["dtype"], f"{row['tokens_per_s']:.1f}", *shares,
            f"{row['load_s']:.2f}", f"{row['first_token_s']:.2f}", f"{row['peak_mib']:.0f}"]


def _mean_seconds(function: Callable[[], Any], least: float) -> float:
    calls = 0
    began = time.perf_counter()
    while calls == 0 or time.perf_counter() - began < least:
        function()
        calls += 1
    return (time.perf_counter() - began) / calls


def _decode(model: RWKV, B: int) -> Callable[[], Tensor]:
    decoder = decoder_of(model, model.empty_state(B))
    tokens = torch.arange(B)
    return lambda: decoder.step(tokens)


def _products(model: nn.Module, rows: int) -> Callable[[], None]:
    """Returns a function that multiplies `rows` rows by every matrix of the model."""
    products = [_product(module, rows) for module in model.modules() if isinstance(module, LINEAR)]

    @torch.inference_mode()
    def multiply() -> None:
        for product in products:
            product()

    return multiply


def _prefill_products(model: RWKV, rows: int) -> Callable[[], None]:
    """Returns the function that _products returns, except that the head is applied only to the last position."""
    blocks = _products(model.blocks, rows)
    head = _product(model.head, 1)

    def multiply() -> None:
        blocks()
        head()

    return multiply


def _product(module: nn.Linear | BFloat16Linear | Int8Linear | Int4Linear | BlockLinear, rows: int) -> Callable[[], Tensor]:
    x = torch.rand(rows, module.in_features)
    if isinstance(module, BFloat16Linear | Int8Linear | Int4Linear | BlockLinear):
        return lambda: module.forward_rows(x)
    weight = module.weight.detach()
    x = x.to(weight.dtype)
    return lambda: F.linear(x, weight)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.generation", "Speed of prefill and decode.")
    parser.add_argument("--generation", choices=SHAPES, default="rwkv4")
    parser.add_argument("--shape", type=sizes_of("L,C,V"), metavar="L,C,V", help="layers, width, vocabulary")
    parser.add_argument("--zeros", type=fraction, metavar="FRACTION",
                        help="make about this fraction of the squared ReLUs zero; 0.8 to 0.9 is usual after training")
    parser.add_argument("--dtype", type=some_of(WIDTHS), default=list(WIDTHS), metavar="NAME,...",
                        help=", ".join(WIDTHS))
    parser.add_argument("--batch", type=any_sizes, default=[1, 8], metavar="B,...")
    parser.add_argument("--prompt", type=at_least(1), default=512, metavar="TOKENS")
    parser.add_argument("--peers", type=program, metavar="PYTHON", help="Python with PyPI's rwkv and transformers")
    parser.add_argument("--llama", type=program, metavar="PYTHON", help="Python with llama-cpp-python")
    parser.add_argument("--rwkv-cpp", type=existing_folder, metavar="FOLDER",
                        help="a checkout of rwkv.cpp with librwkv.so built")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the result to this file")
    parser.add_argument("--measure", choices=(*WIDTHS, BLOCKS), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=path_of, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
