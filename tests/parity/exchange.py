"""Checkpoints as files, and the outputs of each program that reads them.

For each case one folder: official.pth, RWKV-LM's layout, written by torch.save alone; control.pth, the same with one weight
slightly changed; ours.pth and ours/, written by save_pretrained; theirs/, written by transformers.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity import peers
from parity.cases import CASES, GREEDY, Case, random_tokens, random_weights
from parity.comparison import Outputs

from rwkv.pretrained import RWKV

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
OFFICIAL = "official.pth"
EXCHANGED = {"ours.pth": "rwkv", "ours": "transformers", "theirs": "ours"}       # and its reader
PACKAGES = ("torch", "numpy", "rwkv", "transformers")
# Read by the peers alone: no compilation, no network, no progress bars.
ENVIRONMENT = {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
CONTROL, OFF = "blocks.0.att.value.weight", 1e-3         # the weight changed in control.pth, and by how much


def write_checkpoints(folder: Path) -> None:
    for name, case in CASES.items():
        (folder / name).mkdir()
        weights = {name: torch.from_numpy(tensor) for name, tensor in random_weights(case).items()}
        torch.save(weights, folder / name / OFFICIAL)
        model = RWKV.from_pretrained(folder / name / OFFICIAL, "reference")
        model.save_pretrained(folder / name / "ours.pth")
        model.save_pretrained(folder / name / "ours")
        weights[CONTROL][0, 0] += OFF
        torch.save(weights, folder / name / "control.pth")
        np.save(folder / name / "tokens.npy", random_tokens(case))


def run_peer(peer: str, folder: Path) -> dict[tuple[str, str], Outputs]:
    """The outputs of `peer`, by case and file. transformers also writes theirs/."""
    jobs = [job(peer, folder / name, case, file) for name, case in CASES.items() for file in reads(peer)]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    in_peers_environment(peers.__file__, peer, "jobs.json", cwd=folder)
    return {(name, file): np.load(folder / name / f"{peer} {file}.npz") for name in CASES for file in reads(peer)}


def reads(peer: str) -> list[str]:
    return [OFFICIAL, *(file for file, reader in EXCHANGED.items() if reader == peer)]


def job(peer: str, folder: Path, case: Case, file: str) -> dict[str, Any]:
    saves = {"save": str(folder / "theirs")} if (peer, file) == ("transformers", OFFICIAL) else {}
    return saves | {"model": str(folder / file), "tokens": str(folder / "tokens.npy"), "chunks": case.chunks,
                    "greedy": GREEDY, "outputs": str(folder / f"{peer} {file}.npz")}


def versions() -> dict[str, str]:
    """The versions of PACKAGES in the peers' environment."""
    program = f"import importlib.metadata as m, json; print(json.dumps({{name: m.version(name) for name in {PACKAGES}}}))"
    return json.loads(in_peers_environment("-c", program))


def in_peers_environment(*arguments: str, cwd: Path | None = None) -> str:
    """Standard output. -I keeps our packages, which have the names of theirs, off their path."""
    if not PYTHON.exists():
        raise SystemExit(f"no {PYTHON}: `make peers` sets it up")
    done = subprocess.run([PYTHON, "-I", *arguments], cwd=cwd, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"in the peers' environment, {' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    return done.stdout
