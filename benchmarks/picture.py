"""python -m benchmarks.picture SWEEP [FILE.svg]: draws the README's picture of several kernels' training curves and times.

The left half shows the training loss of each run of a sweep; the curves coincide. The right half shows the milliseconds of the
same kernels, forward and backward, from benchmarks/results/wkv4-cpu.json. The committed picture shows the sweep

    python train.py -m experiment=kernel_ablation data=text data.path=tinyshakespeare.txt seed=0 logger=csv out_dir=SWEEP \\
        kernel=reference,conv1d,torch_scan,taichi_v3,taichi_scan,c_v0 trainer.max_steps=200 trainer.val_every=200
"""

from pathlib import Path
from typing import Any

from benchmarks._main import run_program
from kernels.arguments import Parser
from kernels.bench.results import FOLDER, UnusableFile, read_json
from kernels.machine.hardware import ROOT
from rwkv.report import svg, units
from rwkv.report.page import COLOURS_OF_LINES
from rwkv.report.run_files import Run, read

WIDTH, HEIGHT, HEAD = 980, 330, 30       # pixels; HEAD is the height of a caption above a figure
SHAPE = {"B": 8, "C": 768, "T": 1024}
STYLE = COLOURS_OF_LINES + """
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--quiet); }
.end { text-anchor: end; } .middle { text-anchor: middle; } .caption { font-size: 14px; }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--quiet); fill: none; }
.line { fill: none; stroke-width: 1.8; } .bar0 { fill: var(--b0); } .bar1 { fill: var(--b1); }
"""


def main() -> None:
    parser = Parser("benchmarks.picture", __doc__)
    parser.add_argument("sweep", type=Path, metavar="SWEEP")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "docs" / "kernels.svg", metavar="FILE.svg")
    args = parser.parse_args()
    runs = [run for run in read(args.sweep) if run.curve("train/loss")]
    args.file.write_text(picture(runs, times([run.kernel for run in runs])), encoding="utf-8")
    print(args.file)


def times(kernels: list[str]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Returns the milliseconds of each kernel's forward and backward pass. Raises UnusableFile if one was not measured."""
    report = read_json(FOLDER / "wkv4-cpu.json")
    results = next(shape["results"] for shape in report["shapes"] if shape["shape"] == SHAPE)
    return [(name, [(part, _ms(results, name, part)) for part in ("forward", "backward")]) for name in kernels]


def _ms(results: list[dict[str, Any]], name: str, part: str) -> float:
    for result in results:
        if (result["name"], result["pass"]) == (name, part):
            return float(result["ms"])
    raise UnusableFile(f"wkv4-cpu.json has no time for the kernel {name}: omit this kernel from the sweep, or measure the "
                       "kernel with make bench")


def picture(runs: list[Run], bars: list[tuple[str, list[tuple[str, float]]]]) -> str:
    drawn = [svg.Line(run.kernel, colour, list(run.curve("train/loss").items())) for colour, run in enumerate(runs)]
    same = [line for group in svg.overlapping_lines(drawn) for line in group]
    words = f"{len(same)} kernels, one curve: training loss, nats per token" if same else "training loss, nats per token"
    shape = " x ".join(str(size) for size in (SHAPE["B"], SHAPE["T"], SHAPE["C"]))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{words}; times of each"><style>{STYLE}</style>'
            f"{_part(words, svg.lines('training loss', 'step', drawn), 0)}"
            f"{_part(f'WKV forward and backward at {shape}', svg.bars('times', units.time, bars), WIDTH - svg.WIDTH)}</svg>\n")


def _part(caption: str, figure: str, left: int) -> str:
    inner = figure.partition(">")[2].rpartition("</svg>")[0].replace('class="b', 'class="bar')
    return f'<text x="{left + 12}" y="18" class="caption">{caption}</text><g transform="translate({left} {HEAD})">{inner}</g>'


if __name__ == "__main__":
    run_program(main)
