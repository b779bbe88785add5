"""make parity RWKV_LM=FOLDER: compares our training with the author's own code in a copy of BlinkDL/RWKV-LM.

RWKV-4 is compared with RWKV-v4neo (experiment=rwkv4_original), and RWKV-7 with RWKV-v7/train_temp (experiment=rwkv7_minipile).
The optimiser, its groups, rates, clipping and L2Wrap are those of these files. Both sides train without warm-up and with the
cosine schedule, because the other schedules differ by design (configs/experiment). The author's code runs in float64, in a
separate process (author.py).

    gradients       of one step, from random weights that all affect the loss
    first, losses   the first loss and the largest difference of STEPS of them, from the author's initial weights
    rates, weights  each parameter's learning rate in all steps, and the weights after them

All differences are relative to the largest number of the losses, the tensor or the rates. The tables also show the author's
code in float32, and a control: our training with the same rate for the decays as for all others, which must be out of bounds.
The last line is the first loss of train_temp's model of 12 x 768 with 65,536 tokens, with our initialisation, on RWKV-LM's
README.md. The exit status is 1 if a number is out of its bound.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from omegaconf import OmegaConf
from parity import author
from parity.cases import Case, Case7, random_weights
from parity.comparison import Cell, Row, table

from kernels.arguments import existing_folder
from kernels.machine import hardware
from rwkv.config import ModelConfig, OptimConfig
from rwkv.model.operators import operator_for
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.task import LanguageModel

STEPS, B, T = 50, 4, 32
CASES: dict[str, Case | Case7] = {
    "rwkv4": Case(L=3, C=64, A=64, F=256, V=128, T=T, chunks=()),
    "rwkv7": Case7(L=3, H=2, N=64, ranks=(32, 32, 32, 64), V=128, T=T, chunks=())}
EXPERIMENTS = {"rwkv4": "rwkv4_original", "rwkv7": "rwkv7_minipile"}
BOUNDS = {"gradients": 3e-4, "first": 1e-6, "losses": 1e-5, "rates": 1e-12, "weights": 0.02}
WORLD = "RWKV-v7/rwkv_vocab_v20230424.txt"
PUBLISHED, WITHIN = 11.1937, 0.01        # the first loss, and how much it may differ on another text
FIRST = ModelConfig(generation="rwkv7", n_layer=12, n_embd=768, ctx_len=512)
CONTROL = "ours, another rate"
Found = Mapping[str, ndarray]


def optim_of(name: str) -> OptimConfig:
    """Returns the optimiser options of the generation's experiment, with a cosine schedule and no warm-up."""
    path = hardware.ROOT / "configs" / "experiment" / f"{EXPERIMENTS[name]}.yaml"
    options: Any = OmegaConf.to_container(OmegaConf.load(path))
    chosen = next(default["override /optim"] for default in options["defaults"] if "override /optim" in default)
    return replace(OptimConfig(**options["optim"]), name=chosen, schedule="cosine", warmup_steps=0)


def author_args(name: str, optim: OptimConfig) -> dict[str, Any]:
    """Returns the options as arguments of the author's program; my_exit_tokens selects the cosine schedule."""
    case = CASES[name]
    args_of_rwkv4 = {"layerwise_lr": 1, "my_pile_stage": 0, "my_pile_edecay": 0, "weight_decay_final": -1.0, "pre_ffn": 0,
                     "head_qk": 0, "dropout": 0.0, "tiny_att_dim": 0, "tiny_att_layer": -1, "my_pos_emb": 0, "my_qa_mask": 0}
    return {"n_layer": case.L, "n_embd": case.C, "dim_att": case.C, "dim_ffn": 4 * case.C, "vocab_size": case.V, "ctx_len": T,
            "head_size": author.N, "my_testing": "", "grad_cp": 0, "accelerator": "CPU", "strategy": "",
            "weight_decay": optim.weight_decay, "betas": optim.betas, "adam_eps": optim.eps, "lr_init": optim.lr,
            "lr_final": optim.last_lr, "warmup_steps": 0, "epoch_begin": 0, "epoch_steps": 10**6, "epoch_count": 1,
            "real_bsz": B, "my_exit_tokens": STEPS * B * T, **(args_of_rwkv4 if name == "rwkv4" else {})}


def authors(folder: Path, rwkv_lm: Path, name: str, dtype: str, weights: Path | None, steps: int) -> Found:
    """Runs the author's code and returns its results. Without weights it writes its own initial weights to initial.pth."""
    file, result = folder / "job.json", folder / "author.npz"
    file.write_text(json.dumps({
        "rwkv_lm": str(rwkv_lm), "generation": name, "dtype": dtype, "args": author_args(name, optim_of(name)),
        "weights": weights and str(weights), "initial": str(folder / "initial.pth"), "result": str(result),
        "tokens": str(tokens(folder, name, steps))}), encoding="utf-8")
    process = subprocess.run([sys.executable, author.__file__, str(file)], stderr=subprocess.PIPE, text=True)
    if process.returncode:
        raise SystemExit(f"the code in {rwkv_lm} does not run here: it may be of another date than tests/parity/author.py\n\n"
                         + process.stderr)
    return dict(np.load(result))


def tokens(folder: Path, name: str, steps: int) -> Path:
    """Writes a file of (steps,B,T+1) tokens and returns its path.

    Only 16 tokens occur, and each is followed by one of two tokens, so that there is much to learn.
    """
    rng, V = np.random.default_rng(1), CASES[name].V
    vocabulary = rng.integers(V, size=16)
    text = [rng.integers(16, size=(steps, B))]
    for _ in range(T):
        text.append((2 * text[-1] + rng.integers(2, size=(steps, B))) % 16)
    np.save(folder / "tokens.npy", vocabulary[np.stack(text, axis=2)])
    return folder / "tokens.npy"


def ours(folder: Path, weights: Path, optim: OptimConfig) -> Found:
    """Returns the results of our model, optimiser and schedule for the tokens that the author's code has read."""
    task = LanguageModel(RWKV.from_pretrained(weights, trainable=True), optim, STEPS, None)
    configured = task.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    named = dict(task.model.named_parameters())
    results: dict[str, Any] = {"losses": [], **{f"rate: {name}": [] for name in named}}
    for step, batch in enumerate(torch.from_numpy(np.load(folder / "tokens.npy"))):
        rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        loss = task.training_step((batch[:, :-1], batch[:, 1:]), step)
        optimizer.zero_grad()
        loss.backward()
        results["losses"].append(loss.item())
        for name, parameter in named.items():
            results[f"rate: {name}"].append(rates[id(parameter)])
            if step == 0 and parameter.grad is not None:
                results[f"gradient: {name}"] = parameter.grad.clone().numpy()
        torch.nn.utils.clip_grad_norm_(task.parameters(), optim.grad_clip)
        optimizer.step()
        schedule.step()
    return {name: np.asarray(value) for name, value in results.items()} | {
        f"weight: {name}": parameter.detach().numpy() for name, parameter in named.items()}


def apart(found: Found, expected: Found, kind: str) -> float:
    """Returns the largest relative difference of one kind of results, over the parameters with a gradient in the author's code.

    Layer 0's v0, v1 and v2 have no gradient. The difference is infinite if `found` lacks a parameter.
    """
    names = [kind + name.removeprefix("gradient: ") for name in expected if name.startswith("gradient: ")]
    return max(relative(found[name], expected[name]) if name in found else math.inf for name in names)


def relative(one: ndarray, other: ndarray) -> float:
    """Returns max |one - other| / max |other|, or 0 if both are 0."""
    if one.shape != other.shape:
        return math.inf
    difference, largest = float(np.abs(one.astype(np.float64) - other).max()), float(np.abs(other).max())
    return difference / largest if largest else difference and math.inf


def rows_of(folder: Path, rwkv_lm: Path, name: str) -> list[Row]:
    """Compares our training, the control and the author's code in float32 with the author's code in float64."""
    random = folder / "random.pth"
    torch.save({key: torch.from_numpy(value) for key, value in random_weights(CASES[name]).items()}, random)
    optim = optim_of(name)
    wrong = replace(optim, time_decay_lr_scale=1.0)
    exact = authors(folder, rwkv_lm, name, "float64", random, 1)
    single = authors(folder, rwkv_lm, name, "float32", random, 1)
    gradients = {"ours": ours(folder, random, optim), "RWKV-LM in float32": single, CONTROL: None}
    exact_steps = authors(folder, rwkv_lm, name, "float64", None, STEPS)
    initial = folder / "initial.pth"
    steps = {"ours": ours(folder, initial, optim), CONTROL: ours(folder, initial, wrong)}
    steps["RWKV-LM in float32"] = authors(folder, rwkv_lm, name, "float32", initial, STEPS)
    rows = []
    for who, results in gradients.items():
        values = {} if results is None else {"gradients": apart(results, exact, "gradient: ")}
        losses = steps[who]["losses"], exact_steps["losses"]
        values |= {"first": relative(losses[0][:1], losses[1][:1]), "losses": relative(*losses),
                   "rates": apart(steps[who], exact_steps, "rate: "), "weights": apart(steps[who], exact_steps, "weight: ")}
        rows.append(Row((name, who), {kind: Cell(value, BOUNDS[kind]) for kind, value in values.items()}))
    return rows


def first_loss(rwkv_lm: Path) -> float:
    """Returns the loss, in nats per token, of a new model with the config FIRST on 16 windows of RWKV-LM's README.md."""
    tokenizer = Tokenizer.named(str(rwkv_lm / WORLD))
    ids = torch.tensor(tokenizer.encode((rwkv_lm / "README.md").read_text(encoding="utf-8"))[:16 * FIRST.ctx_len + 1])
    windows = len(ids[1:]) // FIRST.ctx_len
    x, y = (part[:windows * FIRST.ctx_len].view(windows, -1) for part in (ids[:-1], ids[1:]))
    torch.manual_seed(0)
    model = RWKV(FIRST, 65536, operator_for(FIRST, "auto", "cpu", torch.float32)).init_weights()
    with torch.no_grad():
        return LanguageModel(model, OptimConfig(), 1, None).loss(x, y).item()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make parity", description=__doc__.splitlines()[0])
    parser.add_argument("rwkv_lm", type=existing_folder, help="a copy of BlinkDL/RWKV-LM")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in CASES for row in rows_of(Path(folder), options.rwkv_lm.resolve(), name)]
    first = first_loss(options.rwkv_lm)
    ok = abs(first - PUBLISHED) <= WITHIN and all(row.ok == (row.labels[1] != CONTROL) for row in rows)
    print(__doc__.split("\n\n")[2], "\n")
    print(table(("generation", "what"), rows))
    print(f"\nfirst loss of 12 x 768: {first:.4f}; published {PUBLISHED}, on another text")
    print(f"\ntraining parity: {'yes' if ok else 'NO'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
