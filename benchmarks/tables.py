"""python -m benchmarks.tables: writes the tables of docs/benchmarks.md from benchmarks/results/.

The program replaces the page's lines between <!-- NAME: measured --> and <!-- end of NAME: measured -->. Benchmarks also call
some of these functions. The parameter `table` formats the rows, in Markdown for the page or aligned for a terminal.
"""

import sys
from collections.abc import Callable, Sequence

from benchmarks._main import run_program
from benchmarks.generation import BY_INPUT, IN_BLOCKS, PEER_FORMATS, WIDTHS
from kernels.arguments import Parser
from kernels.bench.results import FOLDER, Report, read_json
from kernels.bench.text import fill_section, markdown
from kernels.machine.hardware import ROOT
from rwkv.io.lines import count_of

PAGE = ROOT / "docs" / "benchmarks.md"


def main(argv: Sequence[str] = ()) -> None:
    Parser("benchmarks.tables", __doc__).parse_args(argv)
    text = PAGE.read_text(encoding="utf-8")
    for name, (files, table) in TABLES.items():
        reports = [read_json(file) for file in sorted(FOLDER.glob(files))]           # one report for each measured machine
        if reports:
            text = fill_section(text, name, "\n\n".join(f"{caption(report)}\n\n{table(report)}" for report in reports))
    PAGE.write_text(text, encoding="utf-8")


def caption(report: Report) -> str:
    machine = report["machine"]
    instructions = f" with {machine['instructions']}" if "instructions" in machine else ""
    return (f"{machine['cpu']}{instructions}, {count_of(machine['threads'], 'thread')}; torch {machine['torch']}; "
            f"commit {machine['commit']}, {machine['date'][:10]}.")


def generation(report: Report) -> str:
    """Makes a table of tokens per second by task and dtype: timemix, its percentages of two limits, and each peer's best."""
    widths = WIDTHS | {name: width for width, name in IN_BLOCKS.items()} | {BY_INPUT: WIDTHS["bfloat16"]}
    peers = list(dict.fromkeys(row["of"] for row in report["rows"] if row["of"] != "timemix"))
    table = [["tokens/s", "dtype", "timemix", "of the read bandwidth", "of the matrix products", *peers, "first token s",
              "peak MiB"]]
    ours = [row for row in report["rows"] if row["of"] == "timemix"]
    for row in sorted(ours, key=lambda row: str(row["what"])):
        formats = PEER_FORMATS[widths[row["dtype"]]]
        theirs = [[other for other in report["rows"] if other["of"] == peer and other["what"] == row["what"]
                   and other["dtype"] in formats.get(peer, [])] for peer in peers]
        table.append([row["what"], row["dtype"], f"{row['tokens_per_s']:.0f}",
                      *(f"{row['tokens_per_s'] / row[limit]:.0%}" if limit in row else "" for limit in ("read", "products")),
                      *map(_fastest, theirs), f"{row['first_token_s']:.2f}", f"{row['peak_mib']:.0f}"])
    zeros = f"{report['zeros']:.0%} of the squared ReLUs are zero.\n\n" if "zeros" in report else ""
    return zeros + markdown(table)


def _fastest(rows: list[Report]) -> str:
    best = max(rows, key=lambda row: float(row["tokens_per_s"]), default=None)
    return f"{best['tokens_per_s']:.0f} ({best['dtype']})" if best else ""


def training(report: Report) -> str:
    """Makes a table of the training steps, and sentences about the other parts of the benchmark."""
    table = [["6 layers, 384 wide, V 8192, 4 x 512 tokens", "tokens/s", "of the matrix products", "ms a step", "around a step"]]
    for part, name in STEPS.items():
        if part in report:
            result = report[part]
            table.append([name, f"{result['tok_per_sec']:,.0f}", f"{result['of_matmuls']:.0%}", f"{result['ms']['step']:.0f}",
                          f"{result['around_a_step']:.1%}"])
    parts = (markdown(table), AROUND, _losses(report), _head(report), _earlier_commits(report))
    return "\n\n".join(filter(None, parts))


STEPS = {f"{prefix}{dtype}": f"{name}, {dtype}" for prefix, name in (("", "RWKV-4"), ("rwkv7_", "RWKV-7"))
         for dtype in ("float32", "bfloat16")}
AROUND = ("Around a step: the time of train.py beyond the bare step, relative to the bare step, measured alternately; "
          "a negative value is noise.")


def _earlier_commits(report: Report) -> str:
    commits = {name: commit for name, commit in report.get("commits", {}).items() if commit != report["machine"]["commit"]}
    return "From earlier commits: " + ", ".join(f"{name} {commit}" for name, commit in commits.items()) + "." if commits else ""


def _losses(report: Report) -> str:
    losses = [f"{name} {report[part]['float32']:.4f} nats in float32 and {report[part]['bfloat16']:.4f} in bf16-mixed"
             for part, name in (("losses", "RWKV-4"), ("rwkv7_losses", "RWKV-7")) if part in report]
    return f"The loss after 500 of these steps: {'; '.join(losses)}." if losses else ""


def _head(report: Report) -> str:
    if "head" not in report:
        return ""
    chunked = report["head"]["chunked"]
    whole = report["head"]["whole"]
    return ("Peak memory of a step with 65,536 tokens of vocabulary (2 layers, 256 wide, 4096 tokens): "
            f"{chunked['peak_mb']:.0f} MB with the chunked loss, {whole['peak_mb']:.0f} MB with all logits at once; "
            f"the gradients differ by {chunked['difference']:.0e} of the largest.")


def serving(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of the tokens per second of streams after their prompts, without and with another busy process."""
    rows = [[row["of"], row["dtype"], f"{row['texts']}", f"{row['quiet']:.0f}", f"{row['busy']:.0f}"] for row in report["rows"]]
    return table([["server", "dtype", "texts", "tokens/s", "beside a busy process"], *rows], left=2)


PARTS = {"stdlib": "train.py as it is, model=tiny and rwkv7_tiny", "shakespeare": "experiment=shakespeare_char"}
MODEL_NAMES = {"rwkv4": "RWKV-4", "rwkv7": "RWKV-7", "nanogpt": "nanoGPT"}


def generations(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of each model's loss and bits per byte, as means over the seeds, after the same training time."""
    rows = [["mean of the seeds", "", "ms a step", "steps", "val/loss, nats", "val/bpb"]]
    for part, name in PARTS.items():
        results = report.get(part, {"mean": {}})
        for trained, mean in results["mean"].items():
            rows.append([name, MODEL_NAMES[trained], f"{results['ms'][trained]:.0f}", f"{results['steps'][trained]}",
                         f"{mean['val_loss']:.4f}", f"{mean['val_bpb']:.4f}"])
    return "\n\n".join(filter(None, [table(rows, left=2), _earlier_commits(report)]))


def positions(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of each run's loss, as the mean over the context and by position."""
    places = list(max((run["nats"] for run in report["runs"]), key=len, default={}))
    rows = [["", "tokens", "width", "context", *places]]
    for run in report["runs"]:
        rows.append([MODEL_NAMES[run["generation"]], f"{run['tokens']:,}", f"{run['width']}", f"{run['context']:,}",
                     *(f"{run['nats'][place]:.3f}" if place in run["nats"] else "" for place in places)])
    return table(rows)


def first_token(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of the seconds to the first token for each way of loading, and their ratio to the first row."""
    least, *_ = report["seconds"].values()
    return table([["", "s", "of the first row"],
                  *([name, f"{seconds:.2f}", f"{seconds / least:.2f}"] for name, seconds in report["seconds"].items())])


def in_place(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of the starts of generate.py by kind of file: seconds to the first byte, and memory besides the file."""
    rows = [[name, f"{row['file_gib']:.2f}" if row["file_gib"] else "", f"{row['first_byte_s']:.2f}",
             f"{row['beside_file_gib']:.2f}", f"{row['tokens_per_second']:.1f}" if row["tokens_per_second"] else ""]
            for name, row in report["variants"].items()]
    return table([[report["shape"], "file, GiB", "first byte, s", "besides the file, GiB", "tokens/s"], *rows])


def tuning(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of each tuning method's number of trained values, time, memory, and exact matches."""
    rows = [["", "trained values", "minutes", "peak MB", "exact matches", "of new words"]]
    for row in report["results"]:
        cost = [f"{row['trained']:,}", f"{row['seconds'] / 60:.1f}", f"{row['peak_mem']:.0f}"] if "trained" in row else [""] * 3
        rows.append([row["way"], *cost, f"{row['same_words']:.0%}", f"{row['new_words']:.0%}"])
    return table(rows)


def quality(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of the bits per byte for each model and dtype."""
    rows = [[row["generation"], f"{row['parameters']:,}", row["dtype"], f"{row['bits_per_byte']:.4f}", f"{row['more']:+.2%}"]
            for row in report["rows"]]
    return table([["model", "parameters", "dtype", "bits per byte", "more than float32"], *rows], left=3)


def tokenization(report: Report, table: Callable[..., str] = markdown) -> str:
    """Makes a table of the MB per second of each tokenizer, and counts the random strings with different ids."""
    rows = [["", "encode MB/s", "decode MB/s", "bytes per token"]]
    for name, speed in report["mb_per_s"].items():
        tokens = report["tokens"][name.rpartition(" ")[2]]
        rows.append([name, f"{speed['encode']:.1f}", f"{speed['decode']:.1f}", f"{report['bytes'] / tokens:.2f}"])
    checks = (f"{name}: {check['different']} of {check['strings']:,}" for name, check in report["checks"].items())
    return f"{table(rows)}\n\nRandom strings with different ids: {'; '.join(checks)}."


TABLES: dict[str, tuple[str, Callable[[Report], str]]] = {
    "generation": ("generation-cpu*.json", generation),
    "generation of RWKV-7": ("generation-rwkv7-cpu*.json", generation),
    "generation of 1.5b": ("generation-1.5b*.json", generation),
    "serving": ("serving-peers-cpu.json", serving),
    "training": ("training-cpu.json", training), "generations": ("generations-cpu.json", generations),
    "positions": ("positions-cpu.json", positions),
    "first token": ("first-token-cpu.json", first_token), "large files": ("in-place-*-cpu.json", in_place),
    "quality": ("quality.json", quality),
    "tuning": ("tuning-cpu.json", tuning),
    "tokenization": ("tokenization.json", tokenization)}


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
