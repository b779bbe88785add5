"""make parity: our model under every kernel beside a float64 NumPy RWKV-4, PyPI's `rwkv` and transformers' RwkvForCausalLM.

Random checkpoints of several shapes are written as files; every program reads them and answers with its logits at all
positions, its state and a greedy continuation. The tables say how far the answers are apart; exit status 1 if a bound is
broken, or if a weight that is off goes unnoticed. The peers run in .venv-peers, because their packages have the names of ours.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from models import reasons
from parity.cases import CASES, STATE, TO_FLOAT64, TO_PEER
from parity.comparison import Answers, Cell, Row, files_apart, forms_apart, greedy_apart, logits_apart, state_apart, worst
from parity.exchange import EXCHANGED, OFFICIAL, ask, versions, write_checkpoints
from parity.ours import float64, ours
from parity.report import Tables, as_json, passed, report

Asked = dict[tuple[str, str, str], Answers]          # by case, program and file
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
    """The rows by case and kernel, by file exchanged, and of checkpoints with one weight off."""
    write_checkpoints(folder)
    asked: Asked = {(name, "float64", OFFICIAL): float64(case) for name, case in CASES.items()}
    for peer in PEERS:
        asked |= {(name, peer, file): answers for (name, file), answers in ask(peer, folder).items()}
    asked |= {(name, "ours", file): ours(case, folder / name / file, "reference")
              for name, case in CASES.items() for file in (OFFICIAL, "theirs", "control.pth")}
    return {"kernels": [row for name in CASES for row in by_kernel(folder, name, asked)],
            "files": [exchanged(file, reader, asked) for file, reader in EXCHANGED.items()],
            "control": [against_all((name, "reference"), asked[name, "ours", "control.pth"], name, asked) for name in CASES]}


def by_kernel(folder: Path, name: str, asked: Asked) -> Iterator[Row]:
    """Ours under every kernel that runs here; then how far the peers are from float64 themselves."""
    for kernel in (kernel for kernel, reason in reasons().items() if reason is None):
        answers = ours(CASES[name], folder / name / OFFICIAL, kernel)
        row = against_all((name, kernel), answers, name, asked)
        yield Row(row.labels, row.cells | forms_apart(answers))
    for peer in PEERS:
        theirs, exact = asked[name, peer, OFFICIAL], asked[name, "float64", OFFICIAL]
        yield Row((name, f"({peer})"), {"float64": Cell(logits_apart(theirs, exact), TO_PEER),
                                        "state": Cell(state_apart(theirs, exact), STATE)})


def against_all(labels: tuple[str, ...], answers: Answers, name: str, asked: Asked) -> Row:
    """The logits beside each of the three, the state and the greedy continuation beside all."""
    others = {program: asked[name, program, OFFICIAL] for program in ("float64", *PEERS)}
    logits = {program: Cell(logits_apart(answers, other), TO_FLOAT64 if program == "float64" else TO_PEER)
              for program, other in others.items()}
    state = Cell(max(state_apart(answers, other) for other in others.values()), STATE)
    return Row(labels, logits | {"state": state, "greedy": greedy_apart(answers, *others.values())})


def exchanged(file: str, reader: str, asked: Asked) -> Row:
    """What `reader` answers from a file that another program wrote, beside what it answers from the official one."""
    rows = [Row((), files_apart(asked[name, reader, file], asked[name, reader, OFFICIAL])) for name in CASES]
    return worst((file, reader), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
