"""python -m kernels.verdicts [FILE ...]: what is asked of the kernels beside what was measured, from the benchmark's JSON.

Without FILE: every file in benchmarks/results/. A number that is missing, because a kernel or a shape was not measured, gives
no verdict. Limits are those of the same run: a floor is the least traffic at the rate of a copy, or the operations at the rate
of a float32 matrix product; the nominal floor takes the GPU's published float32 rate without tensor cores.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kernels import registry
from kernels._results import Report, committed, measured_at, read
from kernels._text import aligned
from kernels.timex import cases as timex_cases

PASSES = ("forward", "backward")
PUBLISHED = dict(zip("BCT", timex_cases.PUBLISHED, strict=True))
LONG = {"B": 8, "C": 768, "T": 8192}
SHORT = LONG | {"T": 1024}
SQUARE = {"rows": 4096, "columns": 4096}                 # softmax, float32
TFLOPS = {"H200": 67, "H100": 67, "A100": 19.5, "L40S": 91.6, "RTX 4090": 82.6, "RTX 3090": 35.6}      # NVIDIA's data sheets
Result = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """`found` may be at most `limit`."""

    what: str
    found: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.found <= self.limit


def main(files: list[str]) -> int:
    found = verdicts(read(files or committed()))
    print(text(found))
    return 0 if all(verdict.ok for verdict in found) else 1


def verdicts(reports: Iterable[Report], peer_ms: tuple[float, float] | None = None) -> list[Verdict]:
    """Of every float32 report; peer_ms: forward and backward of another cuda_v3 on the same GPU, at the published shape."""
    found: list[Verdict] = []
    for report in reports:
        if report["dtype"] == "float32":
            rule = {("timex", "cuda"): _timex_cuda, ("wkv", "cuda"): _wkv_cuda, ("wkv", "cpu"): _wkv_cpu,
                    ("pad", "cpu"): _pad_cpu, ("softmax", "cpu"): _softmax, ("softmax", "cuda"): _softmax}
            found += rule.get((report["op"], report["device"]), lambda report: ())(report)
            found += _peer(report, peer_ms) if peer_ms and report["op"] == "timex" else []
            found += _growth(report) if report["op"] == "wkv" else []
    return found


def text(found: list[Verdict]) -> str:
    if not found:
        return "no verdict: nothing of what is asked was measured"
    rows = [["", "found", "at most", ""]]
    rows += [[one.what, f"{one.found:.3g}", f"{one.limit:.3g}", "ok" if one.ok else "MISSED"] for one in found]
    return f"{aligned(rows)}\n{sum(one.ok for one in found)} of {len(found)} as asked"


def as_data(found: list[Verdict]) -> list[dict[str, Any]]:
    return [asdict(one) | {"ok": one.ok} for one in found]


def _timex_cuda(report: Report) -> Iterator[Verdict]:
    at, measured = _at(report, PUBLISHED), measured_at(report, PUBLISHED)
    for part in PASSES:
        if ("taichi_v3", part) in at and ("cuda_v3", part) in at:
            yield Verdict(f"taichi_v3 / cuda_v3, {part}", at["taichi_v3", part]["ms"] / at["cuda_v3", part]["ms"], 1.1)
    direct = {name: result["ms"] for (name, part), result in at.items() if part == "forward" and name != "fft"}
    if measured and direct:
        best, flop = min(direct, key=lambda name: direct[name]), timex_cases.flop(*timex_cases.PUBLISHED)
        yield Verdict(f"ms of {best}, the best TimeX forward; measured FMA floor", direct[best],
                      flop / measured["limits"]["matmul_gflops"] / 1e6)
        for gpu in (name for name in TFLOPS if name in report["machine"].get("gpu", "")):
            yield Verdict(f"ms of {best}, the best TimeX forward; nominal FMA floor", direct[best], flop / TFLOPS[gpu] / 1e9)


def _wkv_cuda(report: Report) -> Iterator[Verdict]:
    """Of the hand-written kernels: against the least traffic, k, v -> y and k, v, grad_y -> grad_k, grad_v."""
    for (name, part), result in _at(report, PUBLISHED).items():
        if name in _scans() and _is_ours(name):
            yield Verdict(f"{name} / memory floor, {part}", 1 / result["of_copy"], {"forward": 1.5, "backward": 2.0}[part])


def _wkv_cpu(report: Report) -> Iterator[Verdict]:
    at = _at(report, SHORT)
    for part, limit in zip(PASSES, (6.0, 16.0), strict=True):
        if ("taichi_scan", part) in at:
            yield Verdict(f"taichi_scan / copy of one tensor, {part}", at["taichi_scan", part]["copies"], limit)
    one_block, scan = at.get(("conv1d in one block", "forward")), at.get(("torch_scan", "forward"))
    if one_block and scan:
        yield Verdict("torch_scan / conv1d in one block, forward", scan["ms"] / one_block["ms"], 1 / 5)


def _pad_cpu(report: Report) -> Iterator[Verdict]:
    """At the first shape, the published one."""
    at = _at(report, report["shapes"][0]["shape"])
    one, many = at.get(("taichi_v0", "forward")), at.get(("torch_index", "forward"))
    if one and many:
        yield Verdict("pad: taichi_v0 / torch_index", one["ms"] / many["ms"], 1 / 20)
    if one:
        yield Verdict("pad: taichi_v0 / copy of the output", one["copies"], 3.0)


def _softmax(report: Report) -> Iterator[Verdict]:
    """The best of ours, which is neither the formula nor torch's, eager or compiled, beside torch's own: the baseline."""
    at, measured = _at(report, SQUARE), measured_at(report, SQUARE)
    baseline = measured["baseline"] if measured else ""
    for part in PASSES:
        ours = [name for name, one in at if one == part and _is_ours(name)]
        if ours and (baseline, part) in at:
            best = min(ours, key=lambda name: at[name, part]["ms"])
            yield Verdict(f"softmax: {best} / {baseline}, {part}, {report['device']}",
                          at[best, part]["ms"] / at[baseline, part]["ms"], 1.1)
            if report["device"] == "cuda":
                yield Verdict(f"softmax: {best} / memory floor, {part}", 1 / at[best, part]["of_copy"], 1.3)


def _is_ours(name: str) -> bool:
    """A kernel, rather than what torch makes of the formula, compiled or not."""
    return name not in ("formula", "reference") and not name.startswith("torch")


def _growth(report: Report) -> Iterator[Verdict]:
    """From T = 1024 to T = 8192 of every scan: 8 times the work, and memory no more than linear."""
    short, long = _at(report, SHORT), _at(report, LONG)
    for name, part in long:
        if name in _scans() and (name, part) in short:
            yield Verdict(f"{name}, time at T=8192 / T=1024, {part}, {report['device']}",
                          long[name, part]["ms"] / short[name, part]["ms"], 8.2)
            yield Verdict(f"{name}, extra MB at T=8192, {part}, {report['device']}", long[name, part]["extra_mb"],
                          8.2 * short[name, part]["extra_mb"])


def _peer(report: Report, peer_ms: tuple[float, float]) -> Iterator[Verdict]:
    for part, ms in zip(PASSES, peer_ms, strict=True):
        if (result := _at(report, PUBLISHED).get(("cuda_v3", part))) is not None:
            yield Verdict(f"ms of cuda_v3, {part}; the peer's", result["ms"], ms)


def _scans() -> list[str]:
    """Those in linear time that are held to a speed: not the convolution form, nor the reference's loop."""
    return [name for name in registry.names("wkv") if name not in ("timex", "reference")]


def _at(report: Report, shape: dict[str, int]) -> dict[tuple[str, str], Result]:
    measured = measured_at(report, shape)
    return {(result["name"], result["pass"]): result for result in measured["results"]} if measured else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
