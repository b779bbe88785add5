"""Learning rates for a new run that tunes the weights of init_from=: those of training from nothing are too high.

They depend on tune= and are the usual ones in the field; docs/tune.md has the sources. Options that the user, an experiment or
a debug run sets are kept.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rwkv.config import TrainConfig

DEFAULTS: dict[str, dict[str, Any]] = {              # options of optim, by tune.method
    "full": {"lr": 1e-5, "schedule": "constant", "warmup_steps": 10},
    "lora": {"lr": 2e-4, "schedule": "constant", "warmup_steps": 10},
    "state": {"lr": 0.1, "min_lr": 0.01, "schedule": "cosine", "warmup_steps": 10},
}
SLOWER = 0.1                             # factor on these rates, for objectives that learn from pairs of answers


def with_tuning_defaults(config: TrainConfig, chosen: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The configuration with DEFAULTS for the options that are not in `chosen`, and the names of these options.

    If lr is chosen, min_lr has no default either.
    """
    own = {name for name in DEFAULTS[config.tune.method] if f"optim.{name}" in chosen}
    if "lr" in own:
        own.add("min_lr")
    values = {name: value for name, value in DEFAULTS[config.tune.method].items() if name not in own}
    if config.tune.prefers:
        values |= {name: float(f"{SLOWER * values[name]:.6g}") for name in ("lr", "min_lr") if name in values}
        values["l2_wrap"] = 0.0          # this and the confidence penalty are for the likelihood of tokens
        config = replace(config, optim=replace(config.optim, confidence_penalty=0.0))
    return replace(config, optim=replace(config.optim, **values)), tuple(values)


def describe(config: TrainConfig, names: Collection[str]) -> str:
    """One line for people."""
    values = ", ".join(f"optim.{name}={getattr(config.optim, name)}" for name in names)
    of_pairs = f" tune.objective={config.tune.objective}" if config.tune.prefers else ""
    return (f"{values}: the defaults of tune={config.tune.method}{of_pairs} with init_from=, from what others have found "
            "(docs/tune.md)")
