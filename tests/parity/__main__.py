"""make parity: our model under every kernel beside a float64 NumPy RWKV-4, PyPI's `rwkv` and transformers' RwkvForCausalLM.

Random checkpoints of several shapes are written as files; each program reads them and computes the logits at all positions,
the state and a greedy continuation. The tables show the differences; exit status 1 if one exceeds its bound, or if a changed
weight does not exceed it. The peers run in .venv-peers, because their packages have the names of ours.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from models import reasons
from parity.cases import CASES, STATE, TO_FLOAT64, TO_PEER
from parity.comparison import Cell, Outputs, Row, files_apart, forms_apart, greedy_apart, logits_apart, state_apart, worst
from parity.exchange import EXCHANGED, OFFICIAL, run_peer, versions, write_checkpoints
from parity.ours import float64, ours
from parity.report import Tables, as_json, passed, report

AllOutputs = dict[tuple[str, str, str], Outputs]        # by case, program and file
PEERS = ("rwkv", "transformers")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make parity", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tables = compare(Path(folder))
    peers = versions()
    print(report(tables, peers))
    if options.json:
        options.json.write_text(json.dumps(as_json(tables, peers)) + "\n", encoding="utf-8")
    return 0 if passed(tables) else 1


def compare(folder: Path) -> Tables:
    """The rows by case and kernel, by file exchanged, and of checkpoints with one weight changed."""
    write_checkpoints(folder)
    outputs: AllOutputs = {(name, "float64", OFFICIAL): float64(case) for name, case in CASES.items()}
    for peer in PEERS:
        outputs |= {(name, peer, file): found for (name, file), found in run_peer(peer, folder).items()}
    outputs |= {(name, "ours", file): ours(case, folder / name / file, "reference")
              for name, case in CASES.items() for file in (OFFICIAL, "theirs", "control.pth")}
    return {"kernels": [row for name in CASES for row in by_kernel(folder, name, outputs)],
            "files": [exchanged(file, reader, outputs) for file, reader in EXCHANGED.items()],
            "control": [against_all((name, "reference"), outputs[name, "ours", "control.pth"], name, outputs)
                        for name in CASES]}


def by_kernel(folder: Path, name: str, outputs: AllOutputs) -> Iterator[Row]:
    """Ours under every kernel that runs on this CPU, then the peers' own difference from float64."""
    for kernel in (kernel for kernel, reason in reasons().items() if reason is None):
        found = ours(CASES[name], folder / name / OFFICIAL, kernel)
        row = against_all((name, kernel), found, name, outputs)
        yield Row(row.labels, row.cells | forms_apart(found))
    for peer in PEERS:
        theirs, exact = outputs[name, peer, OFFICIAL], outputs[name, "float64", OFFICIAL]
        yield Row((name, f"({peer})"), {"float64": Cell(logits_apart(theirs, exact), TO_PEER),
                                        "state": Cell(state_apart(theirs, exact), STATE)})


def against_all(labels: tuple[str, ...], found: Outputs, name: str, outputs: AllOutputs) -> Row:
    """The difference of the logits from each of the three, of the state and the greedy continuation from all."""
    others = {program: outputs[name, program, OFFICIAL] for program in ("float64", *PEERS)}
    logits = {program: Cell(logits_apart(found, other), TO_FLOAT64 if program == "float64" else TO_PEER)
              for program, other in others.items()}
    state = Cell(max(state_apart(found, other) for other in others.values()), STATE)
    return Row(labels, logits | {"state": state, "greedy": greedy_apart(found, *others.values())})


def exchanged(file: str, reader: str, outputs: AllOutputs) -> Row:
    """The difference between `reader`'s outputs from a file that another program wrote and from the official one."""
    rows = [Row((), files_apart(outputs[name, reader, file], outputs[name, reader, OFFICIAL])) for name in CASES]
    return worst((file, reader), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
