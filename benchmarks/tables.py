"""python -m benchmarks.tables: the README's numbers beside the peers', from benchmarks/results/: never written by hand.

The README keeps each table between <!-- NAME: measured --> and <!-- end of NAME: measured -->.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels._text import markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Report = dict[str, Any]


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for name, (file, table) in TABLES.items():
        if (RESULTS / file).exists():
            report = json.loads((RESULTS / file).read_text(encoding="utf-8"))
            text = filled(text, name, f"{caption(report)}\n\n{table(report)}")
    readme.write_text(text, encoding="utf-8")


def filled(text: str, name: str, section: str) -> str:
    """`text` with `section` between the markers of `name`, where it has them."""
    start, end = f"<!-- {name}: measured -->", f"<!-- end of {name}: measured -->"
    if start not in text or end not in text:
        return text
    head, _, rest = text.partition(start)
    return f"{head}{start}\n\n{section}\n\n{end}{rest.partition(end)[2]}"


def caption(report: Report) -> str:
    machine = report["machine"]
    return (f"{machine['cpu']}, {machine['threads']} threads; torch {machine['torch']}; commit {machine['commit']}, "
            f"{machine['date'][:10]}.")


def generation(report: Report) -> str:
    """Tokens per second of each task and dtype: ours, its share of the matrix products alone, and the peers'."""
    rows: dict[tuple[str, str], dict[str, Report]] = {}
    for row in report["rows"]:
        rows.setdefault((row["what"], row["dtype"]), {})[row["of"]] = row
    peers = list(dict.fromkeys(row["of"] for row in report["rows"] if row["of"] != "timemix"))
    table = [["tokens/s", "dtype", "timemix", "of the matrix products", *peers, "first token s", "peak MiB"]]
    for (what, dtype), by in sorted(rows.items(), key=lambda item: item[0][0]):
        ours = by["timemix"]
        table.append([what, dtype, f"{ours['tokens_per_s']:.0f}", f"{ours['tokens_per_s'] / ours['wall']:.0%}",
                      *(f"{by[peer]['tokens_per_s']:.0f}" if peer in by else "" for peer in peers),
                      f"{ours['first_token_s']:.2f}", f"{ours['peak_mib']:.0f}"])
    return markdown(table)


def training(report: Report) -> str:
    """A step through train.py, beside the same step bare and its matrix products alone."""
    table = [["6 layers, 384 wide, V 8192, 4 x 512 tokens", "tokens/s", "of the matrix products", "ms a step", "around a step"]]
    for dtype in ("float32", "bfloat16"):
        if dtype in report:
            one = report[dtype]
            table.append([dtype, f"{one['tok_per_sec']:,.0f}", f"{one['of_matmuls']:.0%}", f"{one['ms']['step']:.0f}",
                          f"{one['around_a_step']:.1%}"])
    parts = (markdown(table), AROUND, _losses(report), _shakespeare(report), _head(report), _earlier(report))
    return "\n\n".join(filter(None, parts))


AROUND = ("Around a step: what train.py takes beyond the same step bare, in turns with it, as a share of the bare step; below "
          "0 it is the noise of the two measurements.")


def _earlier(report: Report) -> str:
    """Which parts the last measurement left as they were."""
    commits = {name: commit for name, commit in report.get("commits", {}).items() if commit != report["machine"]["commit"]}
    return "Of earlier commits: " + ", ".join(f"{name} {commit}" for name, commit in commits.items()) + "." if commits else ""


def _losses(report: Report) -> str:
    if "losses" not in report:
        return ""
    whole, half = report["losses"]["float32"], report["losses"]["bfloat16"]
    return f"After 500 steps of one window each the loss is {whole:.4f} nats in float32 and {half:.4f} in bf16-mixed."


PRECISIONS = ("nanoGPT computes in float32 on a CPU, and so do the lines that say float32, which stand first. The others have "
              "trainer.precision=auto: bf16-mixed where the machine multiplies bfloat16 clearly faster.")
SHAPES = ("As it is, the model has 2 layers, 192 wide, and 0.99 M weights; nanoGPT's has 4 layers, 128 wide, and 0.80 M, the "
          "shape of ours in the lines that name it.")


def _shakespeare(report: Report) -> str:
    """Every variant beside nanoGPT's float32 step: those in float32 first."""
    if "shakespeare" not in report:
        return ""
    rows = [["experiment=shakespeare_char, 2000 steps", "val/loss, nats", "ms a step, median (fastest tenth below)",
             "nanoGPT's step in float32, in turns"]]
    for name, one in sorted(report["shakespeare"].items(), key=lambda item: "float32" not in item[0]):
        peer = f"{one['nanogpt_ms']:.1f} ({one['nanogpt_fast_ms']:.1f})" if "nanogpt_ms" in one else ""
        rows.append([name, f"{one['val_loss']:.4f}", f"{one['ms']:.1f} ({one['fast_ms']:.1f})", peer])
    return "\n\n".join([markdown(rows), PRECISIONS] + [SHAPES] * ("4 layers, 128 wide" in report["shakespeare"]))


def _head(report: Report) -> str:
    if "head" not in report:
        return ""
    chunked, whole = report["head"]["chunked"], report["head"]["whole"]
    return ("Peak memory of a step with 65,536 tokens of vocabulary (2 layers, 256 wide, 4096 tokens): "
            f"{chunked['peak_mb']:.0f} MB, and {whole['peak_mb']:.0f} MB where all logits exist at once; "
            f"the gradients differ by {chunked['difference']:.0e} of the largest.")


TABLES: dict[str, tuple[str, Callable[[Report], str]]] = {
    "generation": ("generation-cpu.json", generation), "training": ("training-cpu.json", training)}


if __name__ == "__main__":
    main()
