"""Compares planned and measured memory of full, LoRA and state tuning, with frozen weights in four dtypes.

    python -m benchmarks.tuning_memory --out FOLDER [--shapes 0.1b] [--ways full lora state] [--bases float32 int4]

The weights are random, in bfloat16 and in the shapes of the released RWKV-7 models. The text is conversations of random words.
Each run is a train.py process. The program prints the memory that the plan of train.py predicts, and the peak of the process's
resident memory as measured by Linux, which includes the program, the libraries and the mapped part of the weights file.
program_gb is the predicted memory of the program and libraries. The last line of standard output is the result as JSON.
"""

import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

from benchmarks._main import run_program
from benchmarks.tuning import ROOT, conversation, third_word_pairs, words, write
from kernels.arguments import Parser, at_least, path_of
from kernels.bench.results import check_folder, output_file, publish
from kernels.machine import hardware

SHAPES, WAYS = ("0.1b", "0.4b", "1.5b"), ("full", "lora", "state")
BASES = ("float32", "bfloat16", "int8", "int4")          # dtypes of frozen weights
VOCABULARY = 65536
OPTIONS = ("data=chat", "data.path=conversations.jsonl", "data.tokenizer=world", "data.cache_dir=cache",
           "trainer=cpu", "trainer.precision=32-true", "trainer.max_steps=2", "trainer.log_every=1", "trainer.sample_every=0",
           "trainer.sample_tokens=0", "data.val_fraction=0.01", "trainer.keep_last=1", "logger=csv",
           "trainer.val_tokens=100")
# This code runs in a separate process, because a child's peak memory includes its parent's memory at the fork.
RANDOM_WEIGHTS = """
import sys, torch, yaml
from rwkv.config import ModelConfig
from rwkv.model.rwkv7 import shapes
config = ModelConfig(**yaml.safe_load(open(sys.argv[1])))
torch.save({name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)
            for name, shape in shapes(config, int(sys.argv[2])).items()}, sys.argv[3])
"""


def write_weights(shape: str, path: Path) -> None:
    config = ROOT / "configs" / "model" / f"rwkv7_{shape}.yaml"
    subprocess.run([sys.executable, "-c", RANDOM_WEIGHTS, str(config), str(VOCABULARY), str(path)], check=True,
                   env=os.environ | {"PYTHONPATH": str(ROOT)})


def run(folder: Path, *options: str) -> tuple[float, float, float, float]:
    """Runs train.py. Returns GB of planned memory, GB of program and libraries, GB of the measured peak, and CPU seconds."""
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *OPTIONS, *options], cwd=folder, text=True,
                               stderr=subprocess.PIPE)
    assert process.stderr is not None
    output = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(output)
    planned = gigabytes("about {} for each process", output)
    program = gigabytes("program and libraries {},", output)
    return planned, program, 1024 * used.ru_maxrss / 1e9, used.ru_utime + used.ru_stime


def gigabytes(line: str, output: str) -> float:
    """Returns the size in GB that the plan `output` has at the {} of `line`."""
    match = re.search(line.format(r"([\d.,]+) (GB|MB)"), output)
    assert match, output
    return float(match[1].replace(",", "")) * (1 if match[2] == "GB" else 1e-3)


def main() -> None:
    parser = Parser("benchmarks.tuning_memory", (__doc__ or "").split(":")[0])
    parser.add_argument("--out", type=path_of, required=True, metavar="FOLDER", help="for results; weights in it are reused")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES[:1]))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--ctx-len", type=at_least(1), default=512, metavar="T")
    parser.add_argument("--batch-size", type=at_least(1), default=8, metavar="B")
    parser.add_argument("--options", nargs="*", default=[], help="more of train.py's")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    results = []
    folder = options.out.resolve()
    check_folder(folder)
    write(folder / "conversations.jsonl",
          (conversation(*pair) for pair in third_word_pairs(words(500, 1), 2000, random.Random(0))))
    for shape in options.shapes:
        weights = folder / f"{shape}.pth"
        if not weights.exists():
            write_weights(shape, weights)
        for way, base in itertools.product(options.ways, options.bases):
            if way == "full" and base != "float32":
                continue
            planned, program, peak, seconds = run(folder, f"init_from={weights}", f"tune={way}", f"tune.base={base}",
                                                  f"model.ctx_len={options.ctx_len}", f"data.batch_size={options.batch_size}",
                                                  f"out_dir={shape}-{way}-{base}", *options.options)
            results.append({"shape": shape, "way": way, "base": base, "ctx_len": options.ctx_len,
                            "batch_size": options.batch_size, "planned_gb": round(planned, 2), "peak_gb": round(peak, 2),
                            "planned_over_peak": round(planned / peak, 2), "program_gb": round(program, 2),
                            "processor_s": round(seconds, 1)})
            print(results[-1], flush=True)
    publish({"machine": hardware.describe("cpu"), "results": results}, options.json)


if __name__ == "__main__":
    run_program(main)
