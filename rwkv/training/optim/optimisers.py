"""Provides the optimisers by name, the parameter groups and the learning-rate schedule."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rwkv.config import ORTHOGONAL, OptimConfig
from rwkv.model.base import MATRICES, Model
from rwkv.model.lora import is_adapter
from rwkv.training.optim.adamw8bit import AdamW8bit
from rwkv.training.optim.muon import Muon


def parameter_groups(model: Model, optim: OptimConfig) -> list[dict[str, Any]]:
    """Returns the optimiser's parameter groups, each with one learning rate and one weight decay.

    Adapters and the model's matrices have weight decay, but not its vectors and own low-rank matrices. muon and normuon
    orthogonalise the updates of the blocks' matrices, except for the gates, which AdamW trains equally well at a lower cost.
    """
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = model.generation.group(name)
        orthogonal = optim.name in ORTHOGONAL and group == "matrix"
        lr = optim.matrix_lr if orthogonal else optim.lr * lr_scale(name, model.generation.LR_SCALES, optim)
        decay = optim.weight_decay if group in MATRICES or is_adapter(name) else 0.0
        groups.setdefault((lr, decay, orthogonal), []).append(parameter)
    muon = {"orthogonal": True, "momentum": optim.matrix_momentum}
    adam = {"betas": optim.betas, "eps": optim.eps}
    return [{"params": parameters, "lr": lr, "weight_decay": decay} | (muon if orthogonal else adam)
            for (lr, decay, orthogonal), parameters in groups.items()]


def lr_scale(name: str, scales: Mapping[str, str], optim: OptimConfig) -> float:
    """Returns a parameter's learning rate as a multiple of optim.lr. `scales` is LR_SCALES of the model's generation."""
    last = name.rpartition(".")[2]
    return next((float(getattr(optim, option)) for begin, option in scales.items() if last.startswith(begin)), 1.0)


def lr_factor(optim: OptimConfig, max_steps: int) -> Callable[[int], float]:
    """Returns a function of the step that gives the learning rate as a multiple of optim.lr.

    The learning rate rises linearly during the warm-up. Then optim.schedule, unless constant, lowers it to optim.last_lr at
    `max_steps`.
    """
    lowest = optim.last_lr / optim.lr

    def factor(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        progress = min(1.0, (step - optim.warmup_steps) / max(1, max_steps - optim.warmup_steps))
        if optim.schedule == "cosine":
            return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2
        if optim.schedule == "linear":
            return lowest + (1 - lowest) * (1 - progress)
        return lowest ** progress if optim.schedule == "exponential" else 1.0

    return factor


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Makes each backward pass update a parameter as soon as its gradient is complete, and then free the gradient.

    The optimiser's own step then has no gradients and changes nothing. The optimiser's options, state and checkpoints stay the
    same. The update of a parameter must not depend on the gradients of other parameters.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(_update_alone, optimizer, number))


def _update_alone(optimizer: torch.optim.Optimizer, number: int, parameter: Tensor) -> None:
    groups = optimizer.param_groups      # load_state_dict replaces groups, so each call looks up the group
    optimizer.param_groups = [groups[number] | {"params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
    parameter.grad = None


OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "muon": Muon, "normuon": partial(Muon, row_beta=0.95),
    "adamw8bit": AdamW8bit}
