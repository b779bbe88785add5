"""Chooses options that reduce the memory of a new run with init_from=.

The first choice is gradient accumulation, which splits a step into passes of a few rows. The data order and the weights of
targets do not change, so the step is the same, but activations take a fraction of the memory. If the run would still exceed the
free memory, the run returns freed memory blocks to the system. If even that does not suffice, the run recomputes activations.
"""

from collections.abc import Collection

from rwkv.config import TrainConfig
from rwkv.training.device import device_for
from rwkv.training.memory.estimate import SMALL_RUN, format_bytes
from rwkv.training.memory.remedies import Options, Variant, format_options, with_keys

PASS_TOKENS = 512                        # on a CPU, passes with fewer tokens have slower matrix products
SMALLER: tuple[Options, ...] = ({"trainer.malloc": "small"},
                                {"trainer.malloc": "small", "trainer.activation_checkpointing": True})


def with_passes(config: TrainConfig, vocab_size: int, user_keys: Collection[str]) -> tuple[TrainConfig, str | None]:
    """Splits the steps into the smallest passes of at least PASS_TOKENS, and returns the configuration and a note for the plan.

    Only a single process on a CPU splits steps, and only if no other option counts batches. In addition, weights must be
    frozen, or the run must need more memory than SMALL_RUN.
    """
    rows, trainer = config.data.batch_size, config.trainer
    counts_batches = (trainer.tbptt or trainer.overfit_batches or trainer.strategy != "single" or trainer.optim_in_backward
                      or "trainer.accumulate" in user_keys)
    is_small = config.tune.method == "full" and Variant.of(config, {}, vocab_size).memory.total <= SMALL_RUN
    if is_small or counts_batches or device_for(trainer.accelerator).type != "cpu":
        return config, None
    pass_rows = next(n for n in range(1, rows + 1) if rows % n == 0 and (n * config.model.ctx_len >= PASS_TOKENS or n == rows))
    if pass_rows == rows:
        return config, None
    accumulate = trainer.accumulate * rows // pass_rows
    options = {"data.batch_size": pass_rows, "trainer.accumulate": accumulate}
    return with_keys(config, options), (f"a step accumulates {rows * trainer.accumulate} rows in micro-batches of {pass_rows}: "
                                        f"{format_options(options)} (same step, less memory)")


def same_step(config: TrainConfig, run: TrainConfig) -> bool:
    """Returns True if with_passes has split the steps of `run`, and a step of `config` has as many rows as a step of `run`."""
    rows, run_rows = (each.data.batch_size * each.trainer.accumulate for each in (config, run))
    return run.init_from is not None and run.data.batch_size < config.data.batch_size and rows == run_rows


def fit_memory(config: TrainConfig, vocab_size: int, user_keys: Collection[str],
               free: int | None) -> tuple[TrainConfig, str | None]:
    """Replaces options so that the run fits into `free` bytes, and returns the configuration and a note for the plan.

    The new options are the first in SMALLER with which the run fits, or else the last. The configuration is returned unchanged,
    with None, if the run fits already, if the user has set one of these options, or if `free` is None, which means unknown.
    """
    need = Variant.of(config, {}, vocab_size).memory.total
    if free is None or need <= free or not {*user_keys}.isdisjoint(SMALLER[-1]):
        return config, None
    for options in SMALLER:
        smaller = Variant.of(config, options, vocab_size)
        if smaller.memory.total <= free:
            break
    return smaller.config, (f"{format_options(options)} (slower): otherwise training needs {format_bytes(need)}; "
                            f"{format_bytes(free)} is free")
