"""Formats the tables that `make parity` prints, and returns them as data."""

from typing import Any

from models import reasons
from parity.cases import CASES, CASES_7, GREEDY, STATE, TO_FLOAT64, TO_PEER, B
from parity.comparison import Row, as_data, table, worst
from parity.exchange import CONTROL, OFF

from kernels.machine import hardware

Tables = dict[str, list[Row]]            # the keys are kernels, files and control
HEADS = {"kernels": ("case", "kernel"), "files": ("file", "read by"), "control": ("case", "changed")}

HEADING = """\
float32, {B} rows: max |difference| over all positions, read whole, in chunks and one by one. Allowed: {TO_FLOAT64:.0e} for
the logits to float64 and between forms, {TO_PEER:.0e} to the peers; {STATE:.0e} for the state (att_x, ffn_x, and a/b and
p + log b, or RWKV-7's S), to all but llama.cpp and between forms; none of {GREEDY} tokens of a greedy continuation. The
peers' own rows: how far they are from float64 themselves."""


def passed(tables: Tables) -> bool:
    return all(row.ok for row in tables["kernels"] + tables["files"]) and not any(row.ok for row in tables["control"])


def not_run() -> dict[str, str]:
    return {f"{operator} {kernel}": reason for operator in ("wkv4", "wkv7") for kernel, reason in reasons(operator).items()
            if reason}


def as_json(tables: Tables, peers: dict[str, str]) -> dict[str, Any]:
    return {"machine": hardware.describe("cpu"), "peers": peers, "rows": B, "greedy tokens": GREEDY, "passed": passed(tables),
            "cases": {name: case._asdict() for name, case in {**CASES, **CASES_7}.items()}, "not run": not_run(),
            **{name: [as_data(HEADS[name], row) for row in rows] for name, rows in tables.items()}}


def report(tables: Tables, peers: dict[str, str]) -> str:
    """Returns the tables as text, each below a sentence that explains the numbers."""
    rows = tables["kernels"]
    kernels = list(dict.fromkeys(row.labels[1] for row in rows))
    overall = [worst(("the worst", kernel), [row for row in rows if row.labels[1] == kernel]) for kernel in kernels]
    return "\n".join((
        HEADING.format(B=B, TO_FLOAT64=TO_FLOAT64, TO_PEER=TO_PEER, STATE=STATE, GREEDY=GREEDY),
        "In the peers' environment: " + ", ".join(f"{package} {version}" for package, version in peers.items()), "",
        *(f"{name}: {case}" for name, case in {**CASES, **CASES_7}.items()), "",
        table(HEADS["kernels"], rows), "", table(HEADS["kernels"], overall), "",
        *(f"not run: {reason}" for reason in not_run().values()), "",
        "Files written by one program and read by another, beside the same weights in RWKV-LM's layout, or the Q8_0 file that",
        "llama.cpp made of our GGUF beside our own Q8_0; the worst case:", "",
        table(HEADS["files"], tables["files"]), "",
        f"Control: one weight of {CONTROL} off by {OFF:g} in what ours reads, or all tensors of a kind with every second",
        "channel times 1.01; every line must be out of bounds:", "",
        table(HEADS["control"], tables["control"]), "", "parity: " + ("yes" if passed(tables) else "NO")))
