"""python -m kernels.bench.tables [FILE ...]: the measured numbers in the READMEs, rewritten from the benchmark's JSON files.

Without arguments: every file in benchmarks/results/, so the same operator on a CPU and on GPUs, each under the line that says
what it was measured on. A README keeps its numbers between <!-- OP: measured --> and <!-- end of OP: measured -->; what is
between them belongs to this program, what is around them to its author.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels.bench.results import caption, committed, read
from kernels.bench.text import markdown
from kernels.registry import operators

ROOT = Path(__file__).parent.parent.parent
FRONT = "README.md"                      # has room for one shape of each operator and device, in float32


def main(files: list[str]) -> int:
    reports = read(files or committed())
    if not reports:
        print("no results of python -m kernels.bench ... --json FILE to write down", file=sys.stderr)
        return 1
    for name in (FRONT, *(f"kernels/{op}/README.md" for op in operators())):
        readme = ROOT / name
        if readme.exists():
            before = readme.read_text(encoding="utf-8")
            after = rewritten(before, front(reports) if name == FRONT else reports)
            readme.write_text(after, encoding="utf-8")
            print(f"{name}: {'rewritten' if after != before else 'as it was'}")
    return 0


def front(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [report | {"shapes": report["shapes"][:1]} for report in reports if report["dtype"] == "float32"]


def rewritten(text: str, reports: Iterable[dict[str, Any]]) -> str:
    """`text` with every section that has markers filled from the reports of its operator."""
    reports = list(reports)
    for op in dict.fromkeys(report["op"] for report in reports):
        start, end = f"<!-- {op}: measured -->", f"<!-- end of {op}: measured -->"
        sections = [section(report) for report in reports if report["op"] == op]
        if start in text and end in text:
            head, _, rest = text.partition(start)
            text = "\n\n".join((head + start, *sections, end + rest.partition(end)[2]))
    return text


def section(report: dict[str, Any]) -> str:
    """One table for each shape, under a line that says what it was measured on, and one for what more steps cost."""
    shape = {"timex": timex_table, "wkv4": wkv_table}.get(report["op"], bandwidth_table)
    growth = growth_table(report["shapes"]) if report["op"] == "wkv4" else None
    return "\n\n".join((caption(report), *map(shape, report["shapes"]), *filter(None, [growth])))


def timex_table(measured: dict[str, Any]) -> str:
    """The passes side by side, each with its share of the machine and its speed relative to the baseline."""
    passes, results = list(dict.fromkeys(result["pass"] for result in measured["results"])), _by_name(measured)
    rows = [["", *passes]]
    rows += [[name, *(_with_notes(parts[part]) if part in parts else "" for part in passes)] for name, parts in results.items()]
    return (f"{_caption(measured)} Milliseconds; in brackets the share of the matrix product and the speed relative to "
            f"{measured['baseline']}.\n\n{markdown(rows)}{_notes(measured)}")


def wkv_table(measured: dict[str, Any]) -> str:
    """Times, their ratio to a copy of one tensor, extra memory, and the speed of both passes relative to the baseline."""
    results = _by_name(measured)
    baseline = _both(results[measured["baseline"]]) if measured["baseline"] in results else None
    rows = [["", "forward ms", "backward ms", "x one copy", "extra MB", *([f"x {measured['baseline']}"] if baseline else [])]]
    for name, parts in results.items():
        forward, backward = parts["forward"], parts["backward"]
        pairs = (f"{_short(forward[column])}, {_short(backward[column])}" for column in ("copies", "extra_mb"))
        speed = [_short(baseline / _both(parts))] if baseline else []
        rows.append([name, _ms(forward["ms"]), _ms(backward["ms"]), *pairs, *speed])
    one = measured["limits"]["copy_one_ms"]
    return (f"{_caption(measured)} A copy of one such tensor takes {_ms(one)} ms; in pairs, forward and backward.\n\n"
            f"{markdown(rows)}{_notes(measured)}")


def bandwidth_table(measured: dict[str, Any]) -> str:
    """Of what does little but move data: the passes side by side, with GB/s, the share of a copy, the speed."""
    passes, results = list(dict.fromkeys(result["pass"] for result in measured["results"])), _by_name(measured)
    counted = any(result["launches"] is not None for result in measured["results"])
    rows = [["", *passes, *(["launches"] if counted else []), "extra MB"]]
    for name, parts in results.items():
        launches = [", ".join(f"{part['launches']:d}" for part in parts.values())] if counted else []
        extra = ", ".join(_short(part["extra_mb"]) for part in parts.values())
        rows.append([name, *(_with_rate(parts[part]) if part in parts else "" for part in passes), *launches, extra])
    return (f"{_caption(measured)} Milliseconds; in brackets GB/s, their share of the copy, and the speed relative to "
            f"{measured['baseline']}.\n\n{markdown(rows)}{_notes(measured)}")


def growth_table(shapes: list[dict[str, Any]]) -> str | None:
    """The longest T beside the shortest at the first shape's B and C; None where there is but one."""
    B, C = (shapes[0]["shape"][axis] for axis in "BC")
    alike = [one for one in shapes if (one["shape"]["B"], one["shape"]["C"]) == (B, C)]
    alike.sort(key=lambda one: one["shape"]["T"])
    if len(alike) < 2:
        return None
    (short, long), (first, last) = (alike[0]["shape"]["T"], alike[-1]["shape"]["T"]), map(_by_name, (alike[0], alike[-1]))
    rows = [["", "time forward", "time backward", "extra MB forward", "extra MB backward"]]
    for name in (name for name in first if name in last):
        times = [f"x {last[name][part]['ms'] / first[name][part]['ms']:.1f}" for part in ("forward", "backward")]
        memory = [f"{_short(first[name][part]['extra_mb'])} to {_short(last[name][part]['extra_mb'])}"
                  for part in ("forward", "backward")]
        rows.append([name, *times, *memory])
    return f"From T = {short} to T = {long}, {long / short:.3g} times the steps, B = {B}, C = {C}:\n\n{markdown(rows)}"


def _caption(measured: dict[str, Any]) -> str:
    limits, sizes = measured["limits"], ", ".join(f"{axis} = {size}" for axis, size in measured["shape"].items())
    return (f"{sizes}. In the same run: matrix product {limits['matmul_gflops']:.0f} GFLOP/s, "
            f"copy {limits['copy_gbs']:.0f} GB/s.")


def _notes(measured: dict[str, Any]) -> str:
    """Who is missing for what it takes; who cannot run on that device at all is not expected there."""
    slow = [name for name, reason in measured["skipped"].items() if "takes over" in reason]
    return f"\n\nNot measured, for the time or the memory that it takes at this shape: {', '.join(slow)}." if slow else ""


def _by_name(measured: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in measured["results"]:
        found.setdefault(result["name"], {})[result["pass"]] = result
    return found


def _both(parts: dict[str, dict[str, Any]]) -> float:
    return parts["forward"]["ms"] + parts["backward"]["ms"]


def _with_notes(result: dict[str, Any]) -> str:
    notes = [f"{result['of_matmul']:.0%}", *_speed(result)]
    return f"{_ms(result['ms'])} ({', '.join(notes)})"


def _with_rate(result: dict[str, Any]) -> str:
    notes = [f"{_short(result['gbs'])} GB/s", f"{result['of_copy']:.0%}", *_speed(result)]
    return f"{_ms(result['ms'])} ({', '.join(notes)})"


def _speed(result: dict[str, Any]) -> list[str]:
    return [f"{_short(result['vs_baseline'])}x"] if result["vs_baseline"] else []


def _ms(value: float) -> str:
    return format(value, ".0f" if value >= 100 else ".3g")


def _short(value: float) -> str:
    """Two digits, or whole numbers; a tenth at least."""
    return format(value, ".0f" if value >= 10 else ".1f")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
