"""Learning rates of a new run for which none is set: by the model's width, or with init_from= by tune=.

Options that the user, an experiment or a debug run sets are kept.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rwkv.config import ORTHOGONAL, OptimConfig, TrainConfig

WIDEST = 384                             # channels; wider models take less than optim.lr's default, in inverse proportion
OF_TUNING: dict[str, dict[str, Any]] = {             # options of optim, by tune.method; docs/tune.md has the sources
    "full": {"lr": 1e-5, "schedule": "constant", "warmup_steps": 10},
    "lora": {"lr": 2e-4, "schedule": "constant", "warmup_steps": 10},
    "state": {"lr": 0.1, "min_lr": 0.01, "schedule": "cosine", "warmup_steps": 10},
}
SLOWER = 0.1                             # factor on these rates, for objectives that learn from pairs of answers


def with_default_rates(config: TrainConfig, chosen: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The configuration with the options of optim that have another default in this run, and their names.

    chosen: the options that are set.
    """
    if config.init_from is None:
        return _by_width(config, chosen)
    return _by_tuning(config, chosen)


def _by_width(config: TrainConfig, chosen: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    """muon and normuon scale the updates of matrices by themselves, and optim.lr is the rate of vectors and embeddings."""
    if config.model.n_embd <= WIDEST or config.optim.name in ORTHOGONAL or "optim.lr" in chosen:
        return config, ()
    lr = float(f"{OptimConfig.lr * WIDEST / config.model.n_embd:.2g}")
    return replace(config, optim=replace(config.optim, lr=lr)), ("lr",)


def _by_tuning(config: TrainConfig, chosen: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    """If lr is chosen, min_lr has no default either."""
    own = {name for name in OF_TUNING[config.tune.method] if f"optim.{name}" in chosen}
    if "lr" in own:
        own.add("min_lr")
    values = {name: value for name, value in OF_TUNING[config.tune.method].items() if name not in own}
    if config.tune.prefers:
        values |= {name: float(f"{SLOWER * values[name]:.6g}") for name in ("lr", "min_lr") if name in values}
        values["l2_wrap"] = 0.0          # this and the confidence penalty are for the likelihood of tokens
        config = replace(config, optim=replace(config.optim, confidence_penalty=0.0))
    return replace(config, optim=replace(config.optim, **values)), tuple(values)


def describe(config: TrainConfig, names: Collection[str]) -> str:
    """One line for people."""
    values = ", ".join(f"optim.{name}={getattr(config.optim, name)}" for name in names)
    if config.init_from is None:
        return f"{values}, the default for {config.model.n_embd} channels; up to {WIDEST} channels it is {OptimConfig.lr}"
    objective = f" tune.objective={config.tune.objective}" if config.tune.prefers else ""
    return f"{values} (defaults of tune={config.tune.method}{objective} with init_from=; docs/tune.md gives the sources)"
