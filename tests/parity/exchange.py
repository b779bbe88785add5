"""Writes checkpoints as files, and returns the outputs of each program that reads them.

Each case has a folder with these files:

    official.pth                        RWKV-LM's layout, written by torch.save
    control.pth                         official.pth with one weight slightly changed (RWKV-4)
    ours.pth, ours/ (RWKV-4), ours.gguf and q8_0.gguf (RWKV-7)      written by save_pretrained
    theirs/                             written by transformers
    theirs.gguf                         quantised to Q8_0 by llama.cpp from ours.gguf
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity import peers
from parity.cases import CASES, CASES_7, GREEDY, Case, Case7, random_tokens, random_weights
from parity.comparison import Outputs

from rwkv.pretrained import RWKV

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PYTHON_LLAMA = ROOT / ".venv-llama" / "bin" / "python"
OFFICIAL, GGUF, OUR_Q8_0, THEIR_Q8_0 = "official.pth", "ours.gguf", "q8_0.gguf", "theirs.gguf"
EXCHANGED = {"ours.pth": "rwkv", "ours": "transformers", "theirs": "ours"}       # file and reader
READS = {"rwkv": [OFFICIAL, "ours.pth"], "transformers": [OFFICIAL, "ours"], "rwkv7": [OFFICIAL, "ours.pth"],
         "llama.cpp": [GGUF]}
SAVES = {("transformers", OFFICIAL): "theirs", ("llama.cpp", GGUF): THEIR_Q8_0}
# Variables of the peers: no compilation, no network, no progress bars.
ENVIRONMENT = {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
CONTROL, OFF = "blocks.0.att.value.weight", 1e-3         # the weight changed in control.pth, and by how much


def write_checkpoints(folder: Path) -> None:
    for name, case in {**CASES, **CASES_7}.items():
        (folder / name).mkdir()
        weights = {name: torch.from_numpy(tensor) for name, tensor in random_weights(case).items()}
        torch.save(weights, folder / name / OFFICIAL)
        model = RWKV.from_pretrained(folder / name / OFFICIAL, "reference")
        for file in ("ours.pth", GGUF if isinstance(case, Case7) else "ours"):
            model.save_pretrained(folder / name / file)
        if isinstance(case, Case7):
            model.save_pretrained(folder / name / OUR_Q8_0, dtype="q8_0")
        else:
            weights[CONTROL][0, 0] += OFF
            torch.save(weights, folder / name / "control.pth")
        np.save(folder / name / "tokens.npy", random_tokens(case))


def run_peer(peer: str, folder: Path) -> dict[tuple[str, str], Outputs]:
    """Runs a peer and returns its outputs by case and file. transformers also writes theirs/, and llama.cpp theirs.gguf."""
    cases = CASES_7 if peer in ("rwkv7", "llama.cpp") else CASES
    jobs = [job(peer, folder / name, case, file) for name, case in cases.items() for file in READS[peer]]
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    in_peers_environment(peers.__file__, peer, "jobs.json", cwd=folder, peer=peer)
    return {(name, file): np.load(folder / name / f"{peer} {file}.npz") for name in cases for file in READS[peer]}


def job(peer: str, folder: Path, case: Case | Case7, file: str) -> dict[str, Any]:
    saves = {"save": str(folder / SAVES[peer, file])} if (peer, file) in SAVES else {}
    return saves | {"model": str(folder / file), "tokens": str(folder / "tokens.npy"), "chunks": case.chunks,
                    "greedy": GREEDY, "outputs": str(folder / f"{peer} {file}.npz")}


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of the packages in the peers' environment, and of llama-cpp-python in its own."""
    program = ("import importlib.metadata as m, json\nfound = {}\nfor name in %r:\n    try: found[name] = m.version(name)\n"
               "    except m.PackageNotFoundError: pass\nprint(json.dumps(found))")
    found: dict[str, str] = {}
    for peer, python, names in (("rwkv", PYTHON, packages), ("llama.cpp", PYTHON_LLAMA, ("llama-cpp-python",))):
        if python.exists():
            found |= json.loads(in_peers_environment("-c", program % (names,), peer=peer))
    return found


def in_peers_environment(*arguments: str, cwd: Path | None = None, peer: str = "rwkv") -> str:
    """Runs Python in the environment of `peer` and returns its standard output.

    -I keeps our packages off the path, because they have the same names as the peers'.
    """
    python = PYTHON_LLAMA if peer == "llama.cpp" else PYTHON
    if not python.exists():
        raise SystemExit(f"no {python}: `make peers` sets it up")
    environment = os.environ | ENVIRONMENT | ({"RWKV_V7_ON": "1"} if peer == "rwkv7" else {})
    process = subprocess.run([python, "-I", *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"in the peers' environment, {' '.join(arguments)} failed:\n{process.stderr[-4000:]}")
    return process.stdout
