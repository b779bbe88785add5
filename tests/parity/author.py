"""Runs RWKV-LM's own training code on a CPU, in a separate process: python author.py JOB.json

The model, the groups of its parameters and its learning rates are those of the author's unchanged files in RWKV-v4neo/src and
RWKV-v7/train_temp/src. Calls that need a GPU or other packages are replaced with plain PyTorch in the dtype of the weights: the
compiled operators, DeepSpeed's FusedAdam, and a few names of pytorch_lightning.

A job is a JSON object with these fields:

    rwkv_lm, generation, dtype
    args        options of the author's program
    weights     a .pth, or null for the author's initial weights, which are then written to the file `initial`
    tokens      a .npy of (steps,B,T+1)
    result      the .npz for the losses (steps,), the gradients of the first step, the learning rates (steps,) of each
                parameter, and the final weights

    B rows, T tokens, C channels in H heads of N
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.utils.cpp_extension
from torch import Tensor
from torch.nn import functional

FOLDERS = {"rwkv4": "RWKV-v4neo", "rwkv7": "RWKV-v7/train_temp"}
N = 64                                   # the author's code for RWKV-7 supports no other size
HEAD_EPS, L2_WRAP = 64e-5, 1e-4
ENVIRONMENT = {"RWKV_JIT_ON": "0", "RWKV_MY_TESTING": "", "RWKV_FLOAT_MODE": "fp32", "RWKV_HEAD_SIZE": str(N),
               "RWKV_KERNEL": "", "RWKV_HEAD_L2WRAP_CE_CHUNK": "0", "RWKV_T_MAX": "1024"}


def wkv4(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns y (B,T,C), the mean of all v so far.

    Earlier v are weighted by e^k and a decay of e^(-e^w) per step, and the current v by e^(u+k).
    """
    above, below, largest = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e38)
    ys = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        top = torch.maximum(largest, u + k_t).detach()
        before, now = (largest - top).exp(), (u + k_t - top).exp()
        ys.append((before * above + now * v_t) / (before * below + now))
        faded = largest - w.exp()
        top = torch.maximum(faded, k_t).detach()
        before, now = (faded - top).exp(), (k_t - top).exp()
        above, below, largest = before * above + now * v_t, before * below + now, top
    return torch.stack(ys, 1)


def wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns y = S r (B,T,C), where S <- S diag(decay) + (S a) b^T + v k^T and decay = e^(-e^-0.5 sigmoid(w))."""
    B, T, C = r.shape
    decay = torch.exp(-torch.sigmoid(w) * float(np.exp(-0.5)))
    r, decay, k, v, a, b = (x.reshape(B, T, C // N, N) for x in (r, decay, k, v, a, b))
    state, ys = r.new_zeros(B, C // N, N, N), []
    for t in range(T):
        product = torch.einsum("bhij,bhj->bhi", state, a[:, t])
        state = (state * decay[:, t, :, None] + product[..., None] * b[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None])
        ys.append(torch.einsum("bhij,bhj->bhi", state, r[:, t]))
    return torch.stack(ys, 1).view(B, T, C)


def mixes(x: Tensor, *mus: Tensor) -> tuple[Tensor, ...]:
    change = functional.pad(x, (0, 0, 1, -1)) - x
    return tuple(x + change * mu for mu in mus)


def channel_mixing(x: Tensor, mu: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.linear(functional.linear(*mixes(x, mu), key).relu().square(), value)


def keys(k: Tensor, k_k: Tensor, rate: Tensor, k_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kk = functional.normalize((k * k_k).unflatten(-1, (-1, N)), dim=-1).flatten(-2)
    return k * (1 + (rate - 1) * k_a), -kk, kk * rate


def gated(y: Tensor, r: Tensor, k: Tensor, v: Tensor, r_k: Tensor, weight: Tensor, bias: Tensor, g: Tensor) -> Tensor:
    B, T, C = y.shape
    normed = functional.group_norm(y.reshape(B * T, C), C // N, weight, bias, HEAD_EPS).view(B, T, C)
    bonus = (r * k * r_k.flatten()).unflatten(-1, (-1, N)).sum(-1, keepdim=True) * v.unflatten(-1, (-1, N))
    return (normed + bonus.flatten(-2)) * g


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy; its gradient contains that of L2Wrap, which is L2_WRAP times the largest logit of each row."""
    wrap = L2_WRAP / 2 * logits.amax(-1).square().mean()
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten()) + wrap - wrap.detach()


# The keys begin the names in the author's model.py, which end with versions
PLAIN: dict[str, Any] = {
    "RUN_CUDA": wkv4, "RWKV7_CLAMPW_CUDA": wkv7, "tmix_mix6_": mixes, "tmix_kk_pre_": keys, "tmix_lnx_rkvres_xg_": gated,
    "tmix_a_gate_": lambda a0, a: torch.sigmoid(a0 + a), "_CmixLayer": SimpleNamespace(apply=channel_mixing),
    "tmix_vres_gate_": lambda v, first, v0, v12: v + (first - v) * torch.sigmoid(v0 + v12), "l2wrap_cross_entropy": loss}


def adam(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, bias_correction: bool,
         adam_w_mode: bool, amsgrad: bool, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Replaces DeepSpeed's FusedAdam."""
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups, lr, betas, eps, weight_decay)


def model_module(folder: Path) -> ModuleType:
    """Imports src/model.py of the folder, and replaces its operators with those of PLAIN."""
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True       # nothing is written into the user's folder
    lightning, utilities, strategies = (ModuleType(f"pytorch_lightning{part}") for part in ("", ".utilities", ".strategies"))
    lightning.LightningModule, lightning.Callback, lightning.__version__ = torch.nn.Module, object, "1.9.5"
    utilities.rank_zero_info, utilities.rank_zero_only = print, lambda function: function
    strategies.DeepSpeedStrategy = type("DeepSpeedStrategy", (), {})
    sys.modules |= {module.__name__: module for module in (lightning, utilities, strategies)}
    sys.path.insert(0, str(folder))
    with without_compilers():
        module = importlib.import_module("src.model")
    for name in list(vars(module)):
        for beginning, plain in PLAIN.items():
            if name == beginning or (beginning.endswith(("_", "Layer")) and name.startswith(beginning)):
                setattr(module, name, plain)
    vars(module).setdefault("RWKV7_CLAMPW_CUDA", wkv7)   # the file defines this name only if it compiles the operator
    module.FusedAdam = adam
    return module


@contextlib.contextmanager
def without_compilers() -> Iterator[None]:
    """Replaces the functions that compile operators and register their derivatives, within the block."""
    before = torch.utils.cpp_extension.load, torch.jit.script, torch.library.register_autograd
    nothing: Callable[..., None] = lambda *_, **__: None         # noqa: E731
    torch.utils.cpp_extension.load, torch.library.register_autograd = nothing, nothing
    torch.jit.script = lambda function: function
    try:
        yield
    finally:
        torch.utils.cpp_extension.load, torch.jit.script, torch.library.register_autograd = before


def work(job: dict[str, Any]) -> None:
    args, dtype = SimpleNamespace(**job["args"]), getattr(torch, job["dtype"])
    module = model_module(Path(job["rwkv_lm"]) / FOLDERS[job["generation"]])
    torch.manual_seed(0)
    model = module.RWKV(args)
    if job["weights"] is None:
        weights = model.generate_init_weight()
        torch.save(weights, job["initial"])
    else:
        weights = torch.load(job["weights"])
    model.load_state_dict(weights)
    model.to(dtype)
    trainer = SimpleNamespace(is_global_zero=False, strategy=None, global_step=0)
    model.trainer = trainer
    trainer.optimizers = [model.configure_optimizers()]
    schedule = importlib.import_module("src.trainer").train_callback(args)
    named = dict(model.named_parameters())
    results: dict[str, Any] = {"losses": [], **{f"rate: {name}": [] for name in named}}
    for step, tokens in enumerate(torch.from_numpy(np.load(job["tokens"]))):
        trainer.global_step = step
        schedule.on_train_batch_start(trainer, model, None, step)
        rates = {id(parameter): group["lr"] for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
        value = model.training_step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), step)
        trainer.optimizers[0].zero_grad()
        value.backward()
        results["losses"].append(value.item())
        for name, parameter in named.items():
            results[f"rate: {name}"].append(rates[id(parameter)])
            if step == 0 and parameter.grad is not None:
                results[f"gradient: {name}"] = parameter.grad.clone().numpy()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizers[0].step()
    results |= {f"weight: {name}": parameter.detach().numpy() for name, parameter in named.items()}
    np.savez(job["result"], **results)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
