"""python -m kernels.tables [FILE ...]: the measured numbers in the READMEs, rewritten from the benchmark's JSON files.

Without arguments: every file in benchmarks/results/. A README keeps its numbers between <!-- OP: measured --> and
<!-- end of OP: measured -->; what is between them belongs to this program, what is around them to its author.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels._text import markdown

ROOT = Path(__file__).parent.parent
FRONT = "README.md"                      # has room for one shape of each operator
READMES = (FRONT, "kernels/timex/README.md", "kernels/wkv/README.md")


def main(files: list[str]) -> int:
    paths = [Path(name) for name in files] or sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    reports = [report for path in paths if "op" in (report := json.loads(path.read_text(encoding="utf-8")))]
    if not reports:
        print("no results of python -m kernels.bench ... --json FILE to write down", file=sys.stderr)
        return 1
    for name in READMES:
        readme = ROOT / name
        if readme.exists():
            before = readme.read_text(encoding="utf-8")
            after = rewritten(before, map(first_shape, reports) if name == FRONT else reports)
            readme.write_text(after, encoding="utf-8")
            print(f"{name}: {'rewritten' if after != before else 'as it was'}")
    return 0


def first_shape(report: dict[str, Any]) -> dict[str, Any]:
    return report | {"shapes": report["shapes"][:1]}


def rewritten(text: str, reports: Iterable[dict[str, Any]]) -> str:
    """`text` with every section that has markers filled from the reports of its operator."""
    reports = list(reports)
    for op in ("timex", "wkv"):
        start, end = f"<!-- {op}: measured -->", f"<!-- end of {op}: measured -->"
        sections = [section(report) for report in reports if report["op"] == op]
        if sections and start in text and end in text:
            head, _, rest = text.partition(start)
            text = "\n\n".join((head + start, *sections, end + rest.partition(end)[2]))
    return text


def section(report: dict[str, Any]) -> str:
    """One table for each shape, under a line that says what it was measured on."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "taichi", "triton", "cuda") if name in machine)
    where = f"{machine['gpu']}" if "gpu" in machine else f"{machine['cpu']}, {machine['threads']} threads"
    head = f"{where}; {versions}; {report['dtype']}; commit {machine['commit']}, {machine['date'][:10]}."
    return "\n\n".join((head, *(_shape(measured) for measured in report["shapes"])))


def _shape(measured: dict[str, Any]) -> str:
    limits, results = measured["limits"], measured["results"]
    sizes = ", ".join(f"{axis} = {size}" for axis, size in measured["shape"].items())
    caption = (f"{sizes}. In the same run: matrix product {limits['matmul_gflops']:.0f} GFLOP/s, "
               f"copy {limits['copy_gbs']:.0f} GB/s. Milliseconds; in brackets the share of the "
               f"{'matrix product' if results[0]['gflops'] else 'copy'} and the speed relative to {measured['baseline']}.")
    passes = list(dict.fromkeys(result["pass"] for result in results))
    cells = {(result["name"], result["pass"]): _cell(result) for result in results}
    rows = [["", *passes]]
    rows += [[name, *(cells.get((name, part), "") for part in passes)] for name in dict.fromkeys(name for name, _ in cells)]
    return f"{caption}\n\n{markdown(rows)}"


def _cell(result: dict[str, Any]) -> str:
    share = result["of_matmul"] or result["of_copy"]
    notes = [f"{share:.0%}"] + ([f"{result['vs_baseline']:.2g}x"] if result["vs_baseline"] else [])
    digits = ".0f" if result["ms"] >= 100 else ".3g"
    return f"{result['ms']:{digits}} ({', '.join(notes)})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
