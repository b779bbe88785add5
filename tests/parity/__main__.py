"""make parity: compares our models under every kernel with independent float64 models in NumPy and with other programs.

The other programs, called peers, are PyPI's `rwkv` and transformers' RwkvForCausalLM for RWKV-4, and PyPI's `rwkv` and
llama.cpp, on our GGUF file, for RWKV-7. Random checkpoints of several shapes are written as files. Each program reads them and
computes the logits at all positions, the state (llama.cpp's is not compared) and a greedy continuation. The tables show the
differences. The exit status is 1 if a difference exceeds its bound, or if a changed weight stays within the bounds. The peers
run in .venv-peers and .venv-llama, because their packages have the same names as ours.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from models import reasons
from parity.cases import CASES, CASES_7, STATE, TO_FLOAT64, TO_PEER, Case7, kinds, random_weights, scaled
from parity.comparison import Cell, Outputs, Row, files_apart, forms_apart, greedy_apart, logits_apart, state_apart, worst
from parity.exchange import EXCHANGED, GGUF, OFFICIAL, OUR_Q8_0, THEIR_Q8_0, run_peer, versions, write_checkpoints
from parity.ours import float64, ours
from parity.report import Tables, as_json, passed, report

from kernels.arguments import path_of

AllOutputs = dict[tuple[str, str, str], Outputs]        # the keys are case, program and file
PEERS = {"rwkv": OFFICIAL, "transformers": OFFICIAL}     # the file that each program reads for the comparison
PEERS_7 = {"rwkv7": OFFICIAL, "llama.cpp": GGUF}
ALL = {**CASES, **CASES_7}
CONTROL_CASE, FACTOR = "7: heads of 64", 1.01            # for the rows in which a kind of tensor is changed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make parity", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=path_of, help="write the results here too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tables = compare(Path(folder))
    peers = versions("torch", "numpy", "rwkv", "transformers")
    print(report(tables, peers))
    if options.json:
        options.json.write_text(json.dumps(as_json(tables, peers)) + "\n", encoding="utf-8")
    return 0 if passed(tables) else 1


def compare(folder: Path) -> Tables:
    """Returns the rows of all tables: by case and kernel, by exchanged file, and of checkpoints with changed weights."""
    write_checkpoints(folder)
    outputs: AllOutputs = {(name, "float64", OFFICIAL): float64(case) for name, case in ALL.items()}
    for peer in (*PEERS, *PEERS_7):
        outputs |= {(name, peer, file): outputs_of_peer for (name, file), outputs_of_peer in run_peer(peer, folder).items()}
    outputs |= {(name, "ours", file): ours(case, folder / name / file, "reference")
                for name, case in CASES.items() for file in (OFFICIAL, "theirs", "control.pth")}
    outputs |= {(name, "ours", file): ours(case, folder / name / file, "reference")
                for name, case in CASES_7.items() for file in (THEIR_Q8_0, OUR_Q8_0)}
    files = [exchanged(file, reader, OFFICIAL, CASES, outputs) for file, reader in EXCHANGED.items()]
    files += [exchanged("ours.pth", "rwkv7", OFFICIAL, CASES_7, outputs),
              exchanged(THEIR_Q8_0, "ours", OUR_Q8_0, CASES_7, outputs)]
    control = [against_all((name, "one weight"), outputs[name, "ours", "control.pth"], name, outputs) for name in CASES]
    return {"kernels": [row for name in ALL for row in by_kernel(folder, name, outputs)], "files": files,
            "control": [*control, *each_kind_changed(folder, outputs)]}


def peers_of(name: str) -> dict[str, str]:
    """Returns the programs that the case is compared with, and the file that each reads.

    llama.cpp multiplies 64 numbers of a head at a time where the CPU has AVX-512 (ggml_compute_forward_rwkv_wkv7_f32 in
    ggml/src/ggml-cpu/ops.cpp), so it reads beyond a head of 32, which no released model has.
    """
    case = ALL[name]
    if not isinstance(case, Case7):
        return PEERS
    return {peer: file for peer, file in PEERS_7.items() if peer != "llama.cpp" or case.N % 64 == 0}


def by_kernel(folder: Path, name: str, outputs: AllOutputs) -> Iterator[Row]:
    """Yields a row for our model under every kernel that runs on this CPU, then the differences of the peers from float64."""
    operator = "wkv7" if isinstance(ALL[name], Case7) else "wkv4"
    for kernel in (kernel for kernel, reason in reasons(operator).items() if reason is None):
        outputs_of_kernel = ours(ALL[name], folder / name / OFFICIAL, kernel)
        row = against_all((name, kernel), outputs_of_kernel, name, outputs)
        yield Row(row.labels, row.cells | forms_apart(outputs_of_kernel))
    for peer, file in peers_of(name).items():
        theirs, exact = outputs[name, peer, file], outputs[name, "float64", OFFICIAL]
        cells = {"float64": Cell(logits_apart(theirs, exact), TO_PEER)}
        if has_state(theirs):
            cells["state"] = Cell(state_apart(theirs, exact), STATE)
        yield Row((name, f"({peer})"), cells)


def has_state(outputs: Outputs) -> bool:
    return "whole: att_x" in outputs


def against_all(labels: tuple[str, ...], actual: Outputs, name: str, outputs: AllOutputs) -> Row:
    """Returns a row of the differences from all programs: of logits, of states where there are any, and of the continuation."""
    others = {program: outputs[name, program, file] for program, file in ({"float64": OFFICIAL} | peers_of(name)).items()}
    logits = {program: Cell(logits_apart(actual, other), TO_FLOAT64 if program == "float64" else TO_PEER)
              for program, other in others.items()}
    state = Cell(max(state_apart(actual, other) for other in others.values() if has_state(other)), STATE)
    return Row(labels, logits | {"state": state, "greedy": greedy_apart(actual, *others.values())})


def exchanged(file: str, reader: str, expected: str, cases: Iterable[str], outputs: AllOutputs) -> Row:
    """Returns the differences between the outputs of `reader` from a file of another program and from the `expected` file."""
    rows = [Row((), files_apart(outputs[name, reader, file], outputs[name, reader, expected])) for name in cases]
    return worst((file, reader), rows)


def each_kind_changed(folder: Path, outputs: AllOutputs) -> Iterator[Row]:
    """Yields a row for each kind of RWKV-7's tensors. The tensors of that kind are changed in all layers.

    The row has the difference of the logits from float64 under the kernel for which it is smallest.
    """
    case = CASES_7[CONTROL_CASE]
    weights, kernels = random_weights(case), [kernel for kernel, reason in reasons("wkv7").items() if reason is None]
    for kind in kinds(case):
        changed = {name: torch.from_numpy(weight) for name, weight in scaled(weights, kind, FACTOR).items()}
        torch.save(changed, folder / "changed.pth")
        exact = outputs[CONTROL_CASE, "float64", OFFICIAL]
        apart = min(logits_apart(ours(case, folder / "changed.pth", kernel, n_greedy=1), exact) for kernel in kernels)
        yield Row((CONTROL_CASE, kind), {"float64": Cell(apart, TO_FLOAT64)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
