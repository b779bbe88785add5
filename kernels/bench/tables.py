"""python -m kernels.bench.tables [FILE ...]: writes the tables of kernels/OP/README.md from the benchmark's JSON files.

The default is all files in benchmarks/results/, so that a README contains the tables of a CPU and of GPUs. In a README this
program replaces the lines between <!-- OP: measured --> and <!-- end of OP: measured -->.
"""

import sys
from collections.abc import Iterable
from typing import Any

from kernels.arguments import Parser
from kernels.bench.results import FOLDER, UnusableFile, caption, committed_reports, exit_status, read
from kernels.bench.text import fill_section, markdown
from kernels.machine.hardware import ROOT
from kernels.registry import operators

SCANS = ("wkv4", "wkv7")
COLUMNS = {"x_limit": "x limit", "copies": "x one copy", "extra_mb": "extra MB"}     # shown if every result has a value


def main(argv: list[str]) -> int:
    parser = Parser("kernels.bench.tables", __doc__)
    parser.add_argument("files", nargs="*")
    files = parser.parse_args(argv).files
    reports = read(files or committed_reports())
    if not reports:
        raise UnusableFile(f"there are no results from python -m kernels.bench in {', '.join(files) or FOLDER}: write a "
                           "result with --json FILE")
    for op in operators():
        readme = ROOT / "kernels" / op / "README.md"
        if readme.exists():
            before = readme.read_text(encoding="utf-8")
            after = rewrite_sections(before, reports)
            readme.write_text(after, encoding="utf-8")
            print(f"{readme.relative_to(ROOT)}: {'rewritten' if after != before else 'unchanged'}")
    return 0


def rewrite_sections(text: str, reports: Iterable[dict[str, Any]]) -> str:
    """Returns `text` with a new section for each reported operator that has a section in `text`."""
    reports = list(reports)
    for op in dict.fromkeys(report["op"] for report in reports):
        text = fill_section(text, op, "\n\n".join(section(report) for report in reports if report["op"] == op))
    return text


def section(report: dict[str, Any]) -> str:
    """Makes an operator's section: the machine, a table for each shape, and for wkv4 and wkv7 the growth of the cost with T."""
    shapes = report["shapes"]
    if report["op"] in SCANS:
        tables = [*map(scan_table, shapes), *filter(None, [growth_table(shapes)])]
    else:
        tables = [pass_table(measured, bound_by_memory=report["op"] != "timex") for measured in shapes]
    return "\n\n".join((caption(report), *tables))


def scan_table(measured: dict[str, Any]) -> str:
    """Makes the table of a scan: times, their ratios to the machine's limit and to the copy of one tensor, extra memory, the
    largest error of a result or a gradient, and the speed of both passes relative to the baseline.
    """
    results = _by_name(measured)
    baseline = _total_ms(results[measured["baseline"]]) if measured["baseline"] in results else None
    columns = {column: title for column, title in COLUMNS.items() if all(result[column] for result in measured["results"])}
    checked = ["largest error"] if all(result["err_ratio"] for result in measured["results"]) else []
    speed_of = [f"x {measured['baseline']}"] if baseline else []
    rows = [["", "forward ms", "backward ms", *columns.values(), *checked, *speed_of]]
    for name, parts in results.items():
        forward = parts["forward"]
        backward = parts["backward"]
        pairs = (f"{_short(forward[column])}, {_short(backward[column])}" for column in columns)
        speed = [_short(baseline / _total_ms(parts))] if baseline else []
        error = [f"{forward['err_ratio']:.0e}"] if checked else []
        rows.append([name, _ms(forward["ms"]), _ms(backward["ms"]), *pairs, *error, *speed])
    copy_ms = measured["limits"].get("copy_one_ms")
    copy = f" A copy of one such tensor takes {_ms(copy_ms)} ms. Pairs of times are forward and backward." if copy_ms else ""
    return f"{_caption(measured)}{copy}\n\n{markdown(rows)}{_notes(measured)}"


def pass_table(measured: dict[str, Any], bound_by_memory: bool) -> str:
    """Makes a table with the time of each pass, the fraction of the machine's limit, and the speed relative to the baseline."""
    passes = list(dict.fromkeys(result["pass"] for result in measured["results"]))
    counted = any(result["launches"] is not None for result in measured["results"])
    rows = [["", *passes, *(["launches"] if counted else []), *(["extra MB"] if bound_by_memory else [])]]
    for name, parts in _by_name(measured).items():
        row = [name, *(_time(parts[part], bound_by_memory) if part in parts else "" for part in passes)]
        if counted:
            row.append(", ".join(f"{part['launches']:d}" for part in parts.values()))
        if bound_by_memory:
            row.append(", ".join(_short(part["extra_mb"]) for part in parts.values()))
        rows.append(row)
    rate = "GB/s, their share of the copy," if bound_by_memory else "the share of the matrix product"
    return (f"{_caption(measured)} Milliseconds; in brackets {rate} and the speed relative to {measured['baseline']}.\n\n"
            f"{markdown(rows)}{_notes(measured)}")


def growth_table(shapes: list[dict[str, Any]]) -> str | None:
    """Compares the costs of the longest and the shortest T, at the first shape's other sizes. Returns None for a single T."""
    sizes = {axis: size for axis, size in shapes[0]["shape"].items() if axis != "T"}
    same_sizes = [shape for shape in shapes if shape["shape"] == sizes | {"T": shape["shape"]["T"]}]
    same_sizes.sort(key=lambda shape: shape["shape"]["T"])
    if len(same_sizes) < 2 or not same_sizes[0]["limits"]:
        return None
    short = same_sizes[0]["shape"]["T"]
    long = same_sizes[-1]["shape"]["T"]
    first = _by_name(same_sizes[0])
    last = _by_name(same_sizes[-1])
    rows = [["", "time forward", "time backward", "extra MB forward", "extra MB backward"]]
    for name in (name for name in first if name in last):
        times = [f"x {last[name][part]['ms'] / first[name][part]['ms']:.1f}" for part in ("forward", "backward")]
        memory = [f"{_short(first[name][part]['extra_mb'])} to {_short(last[name][part]['extra_mb'])}"
                  for part in ("forward", "backward")]
        rows.append([name, *times, *memory])
    at = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    return f"From T = {short} to T = {long}, {long / short:.3g} times the steps, {at}:\n\n{markdown(rows)}"


def _caption(measured: dict[str, Any]) -> str:
    limits = measured["limits"]
    sizes = ", ".join(f"{axis} = {size}" for axis, size in measured["shape"].items())
    if not limits:                       # the report has only times
        return f"{sizes}."
    return (f"{sizes}. In the same run: matrix product {limits['matmul_gflops']:.0f} GFLOP/s, "
            f"copy {limits['copy_gbs']:.0f} GB/s.")


def _notes(measured: dict[str, Any]) -> str:
    """Lists the implementations skipped for their time or memory, but not those that cannot run on the device."""
    slow = [name for name, reason in measured["skipped"].items() if "takes over" in reason]
    return f"\n\nNot measured at this shape, because of the time or memory needed: {', '.join(slow)}." if slow else ""


def _by_name(measured: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for result in measured["results"]:
        results.setdefault(result["name"], {})[result["pass"]] = result
    return results


def _total_ms(parts: dict[str, dict[str, Any]]) -> float:
    return parts["forward"]["ms"] + parts["backward"]["ms"]


def _time(result: dict[str, Any], bound_by_memory: bool) -> str:
    share = result["of_copy"] if bound_by_memory else result["of_matmul"]
    notes = [*([f"{_short(result['gbs'])} GB/s"] if bound_by_memory else []), f"{share:.0%}"]
    if result["vs_baseline"]:
        notes.append(f"{_short(result['vs_baseline'])}x")
    return f"{_ms(result['ms'])} ({', '.join(notes)})"


def _ms(value: float) -> str:
    return format(value, ".0f" if value >= 100 else ".3g")


def _short(value: float) -> str:
    """Formats a number with one decimal below 10, otherwise without decimals."""
    return format(value, ".0f" if value >= 10 else ".1f")


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
