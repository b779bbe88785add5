"""make files: reads each kind of RWKV-7 file, compares it with other programs and float64, writes it and reads it back.

Small models with random weights are written as each kind, by the program that gives the kind its name, if it is installed:
PyPI's rwkv7-hf, flash-linear-attention and peft (.venv-peers), or llama.cpp's quantiser (.venv-llama). For programs that are
not on PyPI, this file follows their map of names. Logits are compared with float64, on weights that are read without rwkv/, and
with a program that runs such files. A missing program is named; its rows of an earlier result are kept, with their date. The
exit status is 1 if a number exceeds its bound.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import torch
from numpy import ndarray
from numpy_rwkv7 import NumpyRWKV7
from parity import file_peers
from parity.cases import Case7, random_weights
from parity.exchange import ENVIRONMENT, PYTHON, PYTHON_LLAMA, versions
from safetensors.torch import save_file

from kernels.bench.text import fill_section, markdown
from kernels.machine import hardware
from kernels.matvec import pack
from rwkv.checkpoint import time_states
from rwkv.checkpoint.files import Checkpoint, read_checkpoint, with_adapter, write_checkpoint
from rwkv.errors import UserError
from rwkv.model.base import generation, is_linear_weight
from rwkv.model.operators import operator_for
from rwkv.pretrained import RWKV

Weights = dict[str, ndarray]

TO_FLOAT64 = 3e-6                        # bound of |difference| / |logits| in the Euclidean norm
OF_PEER = 1.5                            # this multiple of the peer's distance from float64 is added to its bound
MOST_OF_PEER = {"llama.cpp": 0.2}        # largest distance; llama.cpp rounds inputs, and other peers have 1e-4
T = 12
PAGE = hardware.ROOT / "docs" / "files.md"
SMALL = Case7(L=3, H=2, N=64, ranks=(32, 24, 16, 40), V=77, T=T, chunks=())
WIDE = Case7(L=2, H=4, N=64, ranks=(32, 24, 16, 40), V=256, T=T, chunks=())          # rows of 256, as k-quants need
CASES = {
    "small": SMALL, "wide": WIDE,
    "512": Case7(L=33, H=8, N=64, ranks=(64, 64, 32, 128), V=300, T=T, chunks=()),
    "576": Case7(L=25, H=9, N=64, ranks=(64, 64, 32, 128), V=300, T=T, chunks=()),
    "128": WIDE._replace(H=2, N=128),
}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")
WRITTEN_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
DEEP = 32                                # DeepEmbed's width in RWKV-7a; the author's demo supports no other


@dataclass
class Kind:
    """A kind of file, with the program that made it and a program that runs it.

    Attributes:
        weights: returns the weights in the file for the comparison with float64. blocks.i.att.time_state (value by key), if
            present, is the state with which a text begins.
        peer: the program that runs such files.
        layout: the layout of a Hugging Face directory.
        epsilon: the epsilon of the norm of each head.
        tokens: the case whose tokens are read.
        base: the weights that an adapter or a state at `path` belongs to.
        alpha: the alpha of an adapter whose file does not contain it.
        peer_reads: the file that the peer reads instead of `path`.
    """

    name: str
    path: Path
    weights: Callable[[], Weights]
    made_by: str = "torch.save"
    peer: str | None = None
    layout: str | None = None
    epsilon: float = 64e-5
    tokens: str = "small"
    base: Path | None = None
    alpha: float | None = None
    peer_reads: Path | None = None

    def read(self, path: Path) -> Checkpoint:
        if self.base is None:
            return read_checkpoint(path)
        if self.holds_state():
            checkpoint = read_checkpoint(self.base)
            return replace(checkpoint, time_states=time_states.read(path, checkpoint.config).layers)
        return with_adapter(read_checkpoint(self.base), path, self.alpha)

    def holds_state(self) -> bool:
        """Returns True if the file has only a tuned state."""
        return self.base is not None and self.path.is_file() and time_states.is_file(self.path)


# Files


def official(folder: Path, name: str, case: str, changes: Weights | None = None, dtype: torch.dtype = torch.float32,
             without: tuple[str, ...] = ()) -> tuple[Path, Callable[[], Weights]]:
    """Writes an official .pth, and returns its path and a function that returns its weights, rounded to `dtype`."""
    weights = {**as_deep_as(CASES[case].L, random_weights(CASES[case])), **(changes or {})}
    tensors = {key: torch.from_numpy(value).to(dtype) for key, value in weights.items() if key not in without}
    torch.save(tensors, folder / name)
    return folder / name, lambda: {key: torch.from_numpy(value).to(dtype).float().numpy() for key, value in weights.items()}


def as_deep_as(L: int, weights: Weights) -> Weights:
    """Divides the outputs of all blocks by sqrt(2 L), because otherwise many layers would magnify rounding errors."""
    added = ("att.output.weight", "ffn.value.weight")
    factor = np.float32((2 * L) ** -0.5)
    return {name: value * factor if name.endswith(added) else value for name, value in weights.items()}


def official_kinds(folder: Path) -> Iterator[Kind]:
    """Yields files with BlinkDL's names and dtype; some of his files lack layer 0's v0, v1 and v2."""
    unused = tuple(f"blocks.0.att.v{part}" for part in range(3))
    for kind, name, case, without in (
            ("World .pth", "RWKV-x070-World-0.4B-v2.9-20250107-ctx4096.pth", "small", ()),
            ("G1d .pth, layer 0 without v0..v2", "rwkv7-g1d-0.4b-20260210-ctx8192.pth", "small", unused),
            ("G1k .pth", "rwkv7-g1k-1.5b-20260930-ctx25600.pth", "wide", ()),
            ("weekly .pth", "rwkv-g1k-3b-temp-5441.pth", "small", ()),
            ("Pile .pth, L33-D512", "RWKV-x070-Pile-164M-L33-D512-20241218-ctx4096.pth", "512", ()),
            ("Pile .pth, L25-D576", "RWKV-x070-Pile-L25-D576-ctx4096.pth", "576", ()),
            (".pth, heads of 128", "rwkv7-heads-of-128.pth", "128", ())):
        path, weights = official(folder, name, case, dtype=torch.bfloat16, without=without)
        yield Kind(kind, path, weights, peer="rwkv", tokens=case)
    path, weights = official(folder, "rwkv7a-g1b-0.1b-20250819-ctx4096.pth", "small", deep_embed(SMALL))
    yield Kind("7a .pth (DeepEmbed)", path, weights, peer="RWKV-LM")


def deep_embed(case: Case7) -> Weights:
    random, R, C = np.random.default_rng(2), DEEP, case.C
    shapes = {"s_emb.weight": (case.V, R * R), "s_emb_x.weight": (R * R, C), "s1": (C, R), "s2": (R, 4 * C),
              "s0": (1, 1, 4 * C)}
    scales = {"s_emb.weight": R ** -0.5, "s_emb_x.weight": (R * C) ** -0.5, "s1": C ** -0.5, "s2": R ** -0.5, "s0": 1.0}
    return {f"blocks.{layer}.ffn.{name}": (scales[name] * random.normal(size=shape)).astype(np.float32)
            for layer in range(case.L) for name, shape in shapes.items()}


def directory_kinds(folder: Path) -> Iterator[Kind]:
    path, weights = official(folder, "source.pth", "small")
    wide, wide_weights = official(folder, "source-128.pth", "128")
    run("rwkv", [save("rwkv7-hf", path, folder / "rwkv7-hf"),
                 save("rwkv7-hf", path, folder / "native"),
                 save("rwkv7-hf", path, folder / "sharded", shard="300KB"),
                 save("rwkv7-hf", wide, folder / "rwkv7-hf-128"),
                 save("fla", folder / "rwkv7-hf", folder / "fla")])
    yield Kind("rwkv7-hf's directory", folder / "rwkv7-hf", weights, "rwkv7-hf", "rwkv7-hf", "fla")
    yield Kind("rwkv7-hf's directory, in shards", folder / "sharded", weights, "rwkv7-hf", "rwkv7-hf", "fla")
    yield Kind("rwkv7-hf's directory, heads of 128", folder / "rwkv7-hf-128", wide_weights, "rwkv7-hf", "rwkv7-hf", "fla",
               epsilon=128e-5, tokens="128")
    if (described := folder / "native" / "config.json").exists():        # versions that are not on PyPI have this name
        described.write_text(described.read_text().replace('"model_type": "rwkv7"', '"model_type": "rwkv7_native"'))
    yield Kind("the same as rwkv7_native", folder / "native", weights, "rwkv7-hf", "rwkv7-hf", "fla")
    yield Kind("fla's directory", folder / "fla", weights, "fla", "rwkv7-hf", "fla")
    write_checkpoint(read_checkpoint(path), folder / "official", layout="official")
    yield Kind("official directory", folder / "official", weights, "timemix", "transformers", "official")
    as_transformers_rwkv(folder / "transformers-rwkv", weights())
    yield Kind("transformers-rwkv's directory", folder / "transformers-rwkv", weights, "its map", layout="transformers-rwkv")
    as_web_rwkv(folder / "model.st", weights())
    yield Kind("web-rwkv's .st", folder / "model.st", lambda: rounded(weights(), torch.float16), "its map")
    for name, kind in (("ours.safetensors", ".safetensors"), ("ours.bin", "rwkv.cpp's ggmf")):
        write_checkpoint(read_checkpoint(path), folder / name, format=None)
        yield Kind(kind, folder / name, weights, "timemix")


def rounded(weights: Weights, dtype: torch.dtype) -> Weights:
    return {name: torch.from_numpy(value).to(dtype).float().numpy() for name, value in weights.items()}


def as_transformers_rwkv(folder: Path, weights: Weights) -> None:
    """Writes tensors as temp/rwkv_pth2st.py of rwkv-rs/transformers-rwkv: vectors are [C], low-rank matrices unchanged."""
    top = {"emb.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "ln_out": "model.norm",
           "blocks.0.ln0": "model.embedding_norm"}
    parts = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "att.receptance": "linear_attn.r_proj",
             "att.key": "linear_attn.k_proj", "att.value": "linear_attn.v_proj", "att.output": "linear_attn.o_proj",
             "att.ln_x": "linear_attn.g_norm", "att.": "linear_attn.", "ffn.": "mlp."}
    tensors = {}
    for name, value in weights.items():
        if re.fullmatch(r"blocks\.0\.att\.v[012]", name):
            continue
        theirs = next((name.replace(ours, other) for ours, other in top.items() if name.startswith(ours)), None)
        if theirs is None:
            layer, rest = re.fullmatch(r"blocks\.(\d+)\.(.+)", name).groups()           # type: ignore[union-attr]
            start = next(start for start in parts if rest.startswith(start))
            theirs = f"model.layers.{layer}.{parts[start]}{rest.removeprefix(start)}"
        tensors[theirs] = torch.from_numpy(value.reshape(-1) if value.ndim == 3 else value)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    case = SMALL
    described = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "architecture_version": "rwkv7",
                 "vocab_size": case.V, "hidden_size": case.C, "num_hidden_layers": case.L, "head_size": case.N,
                 "num_attention_heads": case.H, "intermediate_size": weights["blocks.0.ffn.key.weight"].shape[0],
                 "context_length": 4096, "layer_norm_epsilon": 1e-5, "hidden_act": "relu2", "wkv_mode": "fp32io16"}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")


def as_web_rwkv(path: Path, weights: Weights) -> None:
    """Writes tensors as assets/scripts/convert_safetensors.py of web-rwkv: float16, low-rank matrices and states transposed."""
    turned = re.compile(r".*\.att\.([wavg][12]|time_state)")
    tensors = {name: torch.from_numpy(value).half() for name, value in weights.items()}
    save_file({name: (tensor.mT if turned.fullmatch(name) else tensor).contiguous() for name, tensor in tensors.items()}, path,
              metadata={"format": "pt"})


def state_kinds(folder: Path) -> Iterator[Kind]:
    """Yields one tuned state in each form, with numbers that fit float16, because web-rwkv's form is float16."""
    path, weights = official(folder, "for-states.pth", "small")
    random = np.random.default_rng(3)
    values = 0.3 * random.normal(size=(SMALL.L, SMALL.H, SMALL.N, SMALL.N)).astype(np.float32)
    states = rounded({f"blocks.{layer}.att.time_state": value for layer, value in enumerate(values)}, torch.float16)
    torch.save({name: torch.from_numpy(value) for name, value in states.items()}, folder / "time_state.pth")
    as_web_rwkv(folder / "time_state.st", states)
    both, _ = official(folder, "with-states.pth", "small", states)
    for name, file in (("tuned state, RWKV-PEFT's .pth", "time_state.pth"), ("tuned state, web-rwkv's .st", "time_state.st")):
        yield Kind(name, folder / file, lambda: {**weights(), **states}, "its map", "rwkv", base=path, peer_reads=both)
    yield Kind("tuned state beside weights, .pth", both, lambda: {**weights(), **states}, "torch.save", "rwkv")


def adapter_kinds(folder: Path) -> Iterator[Kind]:
    """Yields PEFT's adapters, with the weights that PEFT merges, and RWKV-PEFT's, merged by the formula in float64."""
    path, weights = official(folder, "for-adapters.pth", "small")
    (folder / "peft").mkdir()
    run("rwkv", [save("peft", path, folder / "peft")])
    for kind in ("lora", "rslora", "dora", "pissa", "miss"):
        merged = folder / "peft" / f"merged-{kind}.pth"
        yield Kind(f"PEFT's {kind}", folder / "peft" / kind, partial(load_weights, merged), "peft", "rwkv", base=path,
                   peer_reads=merged)
    random, rank, alpha = np.random.default_rng(4), 4, 8.0
    changed, parts = weights(), {}
    for layer in range(SMALL.L):
        name = f"blocks.{layer}.att.key"
        out, inputs = changed[f"{name}.weight"].shape
        A, B = (0.1 * random.normal(size=shape).astype(np.float32) for shape in ((rank, inputs), (out, rank)))
        parts |= {f"{name}.lora_A": torch.from_numpy(A), f"{name}.lora_B": torch.from_numpy(B)}
        changed[f"{name}.weight"] = (changed[f"{name}.weight"] + alpha / rank * B.astype(np.float64) @ A).astype(np.float32)
    torch.save(parts, folder / "rwkv-0.pth")
    torch.save({name: torch.from_numpy(value) for name, value in changed.items()}, folder / "merged.pth")
    yield Kind("RWKV-PEFT's LoRA", folder / "rwkv-0.pth", lambda: changed, "its map", "rwkv", base=path, alpha=alpha,
               peer_reads=folder / "merged.pth")


def load_weights(path: Path) -> Weights:
    return {name: tensor.float().numpy() for name, tensor in torch.load(path, weights_only=True).items()}


def gguf_kinds(folder: Path) -> Iterator[Kind]:
    for case in ("wide", "128"):
        path, _ = official(folder, f"for-gguf-{case}.pth", case)
        write_checkpoint(read_checkpoint(path), folder / f"{case}.gguf")
    yield gguf_kind("GGUF, F32", folder / "wide.gguf", "timemix")
    yield gguf_kind("GGUF, F32, heads of 128", folder / "128.gguf", "timemix", "128")
    run("llama.cpp", [save("llama.cpp", folder / "wide.gguf", folder / f"{name}.gguf", type=name) for name in BLOCKS])
    for name in BLOCKS:
        yield gguf_kind(f"GGUF, {name}", folder / f"{name}.gguf", "llama.cpp")
    whole = folder / "Q4_K_M.gguf"
    if whole.exists():
        first = gguf_files.in_parts(whole, folder / "parts", 20)[0]
        yield Kind("GGUF, Q4_K_M, in parts", first, lambda: gguf_files.official_weights(whole), "llama.cpp, gguf", "llama.cpp",
                   tokens="wide")


def gguf_kind(name: str, path: Path, made_by: str, tokens: str = "wide") -> Kind:
    return Kind(name, path, lambda: gguf_files.official_weights(path), made_by, "llama.cpp", tokens=tokens)


# Other programs


def save(program: str, model: Path, to: Path, **options: Any) -> dict[str, Any]:
    return {"program": program, "do": "save", "model": str(model), "result": str(to), **options}


def run(environment: str, jobs: list[dict[str, Any]]) -> None:
    """Runs the jobs if the environment exists. If a job ends the program, the job has failed, and the others are run."""
    python = PYTHON_LLAMA if environment == "llama.cpp" else PYTHON
    if not python.exists():
        return
    while jobs:
        jobs_file = Path(jobs[0]["result"]).parent / f"{environment} jobs.json"
        jobs_file.write_text(json.dumps(jobs), encoding="utf-8")
        variables = {"RWKV_V7_ON": "1", "TRITON_INTERPRET": "1", "HF_MODULES_CACHE": str(jobs_file.parent)}
        process = subprocess.run([python, "-I", file_peers.__file__, jobs_file], env=os.environ | ENVIRONMENT | variables,
                                 capture_output=True, text=True)
        if process.returncode == 0:
            return
        last = next(number for number, job in enumerate(jobs) if not Path(job["result"] + file_peers.DONE).exists())
        reason = process.stderr.strip().splitlines()[-1:] or [f"it ended with {process.returncode}"]
        Path(jobs[last]["result"] + file_peers.FAILED).write_text(reason[0], encoding="utf-8")
        jobs = jobs[last + 1:]


def peers_logits(folder: Path, kinds: list[Kind], rwkv_lm: Path | None) -> None:
    """Writes the peer's logits to NAME.npy for every kind that the peer can run."""
    jobs: dict[str, list[dict[str, Any]]] = {"rwkv": [], "llama.cpp": []}
    for kind in kinds:
        reads = kind.peer_reads or kind.path
        if kind.peer is None or (kind.peer == "RWKV-LM" and rwkv_lm is None) or not reads.exists():
            continue
        job = {"program": kind.peer, "do": "logits", "model": str(reads), "tokens": str(folder / f"{kind.tokens}.npy"),
               "result": str(folder / f"{kind.name}.npy"), "rwkv_lm": str(rwkv_lm)}
        jobs["llama.cpp" if kind.peer == "llama.cpp" else "rwkv"].append(job)
    for environment, its_jobs in jobs.items():
        run(environment, its_jobs)


# The table


def row(folder: Path, kind: Kind) -> dict[str, Any]:
    """Returns the results of a kind: each number with its bound, or a reason."""
    result: dict[str, Any] = {"file": kind.name, "made by": kind.made_by}
    if not kind.path.exists():
        return result | {"absent": failure(kind.path) or f"{kind.made_by} is not here"}
    try:
        checkpoint = kind.read(kind.path)
    except UserError as error:
        return result | {"read": f"refused: {error}"}
    tokens = np.load(folder / f"{kind.tokens}.npy")
    logits = ours(checkpoint, tokens)
    exact = exact_logits(kind, tokens)
    result |= {"read": "yes", "float64": bounded(apart(logits, exact), TO_FLOAT64)}
    result |= beside_peer(folder, kind, logits, exact)
    result |= written_again(folder, kind, checkpoint, logits, tokens)
    return result | (rounded_again(checkpoint) if blocks_of(kind) else {})


def blocks_of(kind: Kind) -> str | None:
    return next((name for name in reversed(BLOCKS) if f"GGUF, {name}" in kind.name), None)


def beside_peer(folder: Path, kind: Kind, logits: ndarray, exact: ndarray) -> dict[str, Any]:
    if kind.peer is None:
        return {"peer": "none runs it here"}
    result = folder / f"{kind.name}.npy"
    if not result.exists():
        return {"peer": f"{kind.peer} is absent", "reason": failure(result) or "not installed"}
    theirs = np.load(result)
    peer_error = apart(theirs, exact)
    bound = TO_FLOAT64 + OF_PEER * min(peer_error, MOST_OF_PEER.get(kind.peer, 1e-4))
    return {"peer": kind.peer, "to the peer": bounded(apart(logits, theirs), bound), "the peer to float64": peer_error}


def written_again(folder: Path, kind: Kind, checkpoint: Checkpoint, logits: ndarray, tokens: ndarray) -> dict[str, Any]:
    """Writes the file in the same kind, reads it and compares the logits; blocks that cannot be written become Q8_0."""
    target = folder / "again" / (kind.path.name if kind.base is None or kind.holds_state() else f"{kind.path.name}.pth")
    target.parent.mkdir(exist_ok=True)
    if kind.holds_state():
        assert checkpoint.time_states is not None
        time_states.write(time_states.TimeStates(kind.path, checkpoint.time_states, time_states.OFFICIAL, ""), target)
        return {"written": "the same", "read back": bounded(apart(ours(kind.read(target), tokens), logits), 0.0)}
    dtype = None if (type_ := blocks_of(kind)) is None else type_.lower() if type_.lower() in WRITTEN_BLOCKS else "q8_0"
    try:
        write_checkpoint(checkpoint, target, dtype=dtype, layout=kind.layout)
    except UserError as error:
        return {"written": f"refused: {error}"}
    again = read_checkpoint(target)
    same = all(torch.equal(again.weights[name], checkpoint.weights[name]) for name in checkpoint.weights)
    bound = 0.05 if dtype else 0.0 if kind.epsilon == 64e-5 else TO_FLOAT64      # another epsilon changes the receptance
    written = dtype or ("the same" if kind.base is None else "merged, .pth")
    return {"written": written, "weights": "equal" if same else "rounded",
            "read back": bounded(apart(ours(again, tokens), logits), bound)}


def rounded_again(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the relative error of the matrices in int8 and int4, compared with the numbers in the file."""
    group = generation(checkpoint.config).group
    result = {}
    for form in ("int8", "int4"):
        error = total = 0.0
        for name in checkpoint.weights:
            if is_linear_weight(name, group(name)):
                exact = checkpoint.weights[name].float()
                error += float((pack(exact, form).dense() - exact).square().sum())
                total += float(exact.square().sum())
        result[form] = math.sqrt(error / total)
    return result


def ours(checkpoint: Checkpoint, tokens: ndarray) -> ndarray:
    wkv = operator_for(checkpoint.config, "auto", "cpu", torch.float32)
    with torch.no_grad():
        return RWKV.from_checkpoint(checkpoint, wkv)(torch.tensor(tokens)[None])[0][0].float().numpy()


def exact_logits(kind: Kind, tokens: ndarray) -> ndarray:
    """Returns logits in float64, beginning with the state among the weights, if there is one."""
    weights = kind.weights()
    learnt = [weights.pop(name) for name in [*weights] if name.endswith(".time_state")]
    model = NumpyRWKV7(weights, kind.epsilon)
    state = [layer._replace(wkv=S[None].astype(np.float64)) for layer, S in zip(model.empty_state(1), learnt, strict=True)] \
        if learnt else None
    logits: ndarray = model(tokens[None], state)[0][0]
    return logits


def apart(actual: ndarray, expected: ndarray) -> float:
    if actual.shape != expected.shape:
        return math.inf
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))


def bounded(value: float, bound: float) -> dict[str, float]:
    return {"difference": value, "allowed": bound}


def failure(result: Path) -> str | None:
    file = Path(f"{result}{file_peers.FAILED}")
    if not file.exists():
        return None
    return re.sub(r" \(/\S+\)", "", file.read_text(encoding="utf-8").splitlines()[0])          # removes paths of this machine


def passed(result: dict[str, Any]) -> bool:
    numbers = [value for value in result.values() if isinstance(value, dict)]
    refused = any(str(result.get(name, "")).startswith("refused") for name in ("read", "written"))
    return not refused and all(each["difference"] <= each["allowed"] for each in numbers)


def format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "0" if value["difference"] == 0 else f"{value['difference']:.1e}" + (
            "" if value["difference"] <= value["allowed"] else f" > {value['allowed']:.1e} !")
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    heads = ["file", "made by", "read", "float64", "peer", "to the peer", "the peer to float64", "written", "read back", "int8",
             "int4"]
    lines = [heads]
    for result in rows:
        percent = {name: f"{result[name]:.1%}" for name in ("int8", "int4") if name in result}
        absent = {"read": f"absent: {result['absent']}"} if "absent" in result else {}
        lines.append([format_value((result | percent | absent).get(name, "")) for name in heads])
    return lines


def with_earlier(rows: list[dict[str, Any]], earlier: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows, and replaces rows of missing programs with those of earlier results."""
    def complete(result: dict[str, Any]) -> bool:
        return "absent" not in result and "reason" not in result

    before = {result["file"]: result for result in earlier.get("rows", []) if complete(result)}
    when = "commit {commit}, {date:.10}".format(**earlier["machine"]) if earlier else ""
    present = {result["file"] for result in rows if complete(result)}
    absent = [result for result in rows if result["file"] not in present | before.keys()]
    earlier_rows = [{"measured at": when, **result} for name, result in before.items() if name not in present]
    return [*(result for result in rows if complete(result)), *absent, *earlier_rows]


def section(rows: list[dict[str, Any]], peers: dict[str, str], machine: dict[str, Any]) -> str:
    absent = [f"{result['file']}: {result['peer']} ({result['reason']})." for result in rows if "reason" in result]
    for when in sorted({result["measured at"] for result in rows if "measured at" in result}):
        absent.append(f"{'; '.join(each['file'] for each in rows if each.get('measured at') == when)}: measured at {when}.")
    return "\n\n".join((
        f"{machine['cpu']}; torch {machine['torch']}; commit {machine['commit']}, {machine['date'][:10]}. Peers: "
        + (", ".join(f"{name} {version}" for name, version in peers.items()) or "none") + ".",
        markdown(table(rows), left=3), *(["\n".join(f"- {line}" for line in absent)] if absent else [])))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make files", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--rwkv-lm", type=Path, help="a copy of BlinkDL/RWKV-LM, whose demo of RWKV-7a is run")
    parser.add_argument("--page", action="store_true", help=f"rewrite the table of {PAGE.name}")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case_name, case in CASES.items():
            np.save(folder / f"{case_name}.npy", np.random.default_rng(1).integers(case.V, size=T))
        kinds = [*official_kinds(folder), *directory_kinds(folder), *state_kinds(folder), *adapter_kinds(folder),
                 *gguf_kinds(folder)]
        peers_logits(folder, kinds, options.rwkv_lm)
        rows = [row(folder, kind) for kind in kinds]
    earlier = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else {}
    rows = with_earlier(rows, earlier)
    installed = versions("torch", "rwkv", "transformers", "peft", "rwkv7-hf", "flash-linear-attention", "triton")
    peers = {**earlier.get("peers", {}), **installed}
    machine = hardware.describe("cpu")
    print(section(rows, peers, machine))
    ok = all(map(passed, rows))
    print("\nfiles:", "yes" if ok else "NO")
    if options.json:
        content = {"machine": machine, "peers": peers, "passed": ok, "rows": rows}
        options.json.write_text(json.dumps(content) + "\n", encoding="utf-8")
    if options.page:
        page = fill_section(PAGE.read_text(encoding="utf-8"), "files", section(rows, peers, machine))
        PAGE.write_text(page, encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
