"""Chooses the default learning rates of a new run by the model's width, or with init_from= by tune=.

Options set by the user, an experiment or a debug run take precedence.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rwkv.config import ORTHOGONAL, OptimConfig, TrainConfig
from rwkv.errors import UserError

WIDEST = 384                             # with more channels, the default optim.lr is inversely proportional to the width
TUNING_DEFAULTS: dict[str, dict[str, Any]] = {             # optim options by tune.method; docs/tune.md has the sources
    "full": {"lr": 1e-5, "schedule": "constant", "warmup_steps": 10},
    "lora": {"lr": 2e-4, "schedule": "constant", "warmup_steps": 10},
    "state": {"lr": 0.1, "min_lr": 0.01, "schedule": "cosine", "warmup_steps": 10},
}
SLOWER = 0.1                             # preference objectives (dpo, ipo) multiply the defaults of lr and min_lr by this


def with_default_rates(config: TrainConfig, user_keys: Collection[str], chosen: Collection[str] = ()
                       ) -> tuple[TrainConfig, tuple[str, ...]]:
    """Sets this run's default optim options. Returns the configuration and the names of the options that were set.

    `user_keys` are the options on the command line, and `chosen` those of an experiment or a debug run. Raises UserError if
    optim.min_lr is on the command line but has no effect, because the schedule is the default one.
    """
    fixed = {*user_keys, *chosen}
    if config.init_from is None:
        return _with_rate_for_width(config, fixed)
    tuned, names = _with_rates_for_tuning(config, fixed)
    if "optim.min_lr" in user_keys and config.optim.min_lr is not None and "schedule" in names and \
            tuned.optim.schedule == "constant":
        raise UserError("optim.min_lr has no effect, because the default of optim.schedule with init_from= and "
                        f"tune={config.tune.method} is constant: set optim.schedule=cosine too, or omit optim.min_lr")
    return tuned, names


def _with_rate_for_width(config: TrainConfig, chosen: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    # With muon and normuon, optim.lr is only for vectors and embeddings and does not depend on the width
    if config.model.n_embd <= WIDEST or config.optim.name in ORTHOGONAL or "optim.lr" in chosen:
        return config, ()
    lr = float(f"{OptimConfig.lr * WIDEST / config.model.n_embd:.2g}")
    return replace(config, optim=replace(config.optim, lr=lr)), ("lr",)


def _with_rates_for_tuning(config: TrainConfig, chosen: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    overrides = {name for name in TUNING_DEFAULTS[config.tune.method] if f"optim.{name}" in chosen}
    if "lr" in overrides:                # a default of min_lr might exceed the user's lr
        overrides.add("min_lr")
    values = {name: value for name, value in TUNING_DEFAULTS[config.tune.method].items() if name not in overrides}
    if config.tune.prefers:
        values |= {name: float(f"{SLOWER * values[name]:.6g}") for name in ("lr", "min_lr") if name in values}
        values["l2_wrap"] = 0.0          # l2_wrap and confidence_penalty regularise the token likelihood
        config = replace(config, optim=replace(config.optim, confidence_penalty=0.0))
    return replace(config, optim=replace(config.optim, **values)), tuple(values)


def describe(config: TrainConfig, names: Collection[str]) -> str:
    """Returns the plan's line on these defaults."""
    values = ", ".join(f"optim.{name}={getattr(config.optim, name)}" for name in names)
    if config.init_from is None:
        return f"{values}, the default for {config.model.n_embd} channels; up to {WIDEST} channels lr is {OptimConfig.lr}"
    objective = f" tune.objective={config.tune.objective}" if config.tune.prefers else ""
    return f"{values} (defaults of tune={config.tune.method}{objective} with init_from=; the sources are in docs/tune.md)"
