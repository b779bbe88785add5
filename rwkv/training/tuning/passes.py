"""How a new run with init_from= takes less memory than its options alone would.

A step is divided into passes of a few rows, and their gradients are added up. The order of the data and the weight of each
target stay the same, so the step does too, with a fraction of the activations. If a run would not fit into the free memory,
freed blocks are returned to the system; if that is not enough, activations are computed again.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rwkv.config import TrainConfig
from rwkv.training.device import device_for
from rwkv.training.memory import LITTLE, estimate, readable, with_options

PASS_TOKENS = 512                        # least tokens of a pass on a CPU: matrix products have their full speed then
SMALLER: tuple[dict[str, Any], ...] = ({"malloc": "small"}, {"malloc": "small", "activation_checkpointing": True})


def with_passes(config: TrainConfig, vocab_size: int, given: Collection[str]) -> tuple[TrainConfig, str | None]:
    """The configuration with steps in passes of the fewest rows that have PASS_TOKENS, and a line that says so.

    Steps are divided only in a single process on a CPU, without other options that count batches, and only if weights are
    frozen or the run would take more memory than LITTLE.
    """
    rows, trainer = config.data.batch_size, config.trainer
    counted = (trainer.tbptt or trainer.overfit_batches or trainer.strategy != "single" or trainer.optim_in_backward
               or "trainer.accumulate" in given)
    little = config.tune.method == "full" and estimate(config, vocab_size).total <= LITTLE
    if little or counted or device_for(trainer.accelerator).type != "cpu":
        return config, None
    of_pass = next(n for n in range(1, rows + 1) if rows % n == 0 and (n * config.model.ctx_len >= PASS_TOKENS or n == rows))
    if of_pass == rows:
        return config, None
    accumulate = trainer.accumulate * rows // of_pass
    divided = replace(with_options(config, accumulate=accumulate), data=replace(config.data, batch_size=of_pass))
    return divided, (f"a step's {rows * trainer.accumulate} rows are read {of_pass} at a time, in the same step from less "
                     f"memory: data.batch_size={of_pass} trainer.accumulate={accumulate}")


def same_step(config: TrainConfig, run: TrainConfig) -> bool:
    """Whether with_passes has divided the steps of `run`, and `config` asks for as many rows in a step."""
    rows, of_run = (asked.data.batch_size * asked.trainer.accumulate for asked in (config, run))
    return run.init_from is not None and run.data.batch_size < config.data.batch_size and rows == of_run


def with_less_memory(config: TrainConfig, vocab_size: int, given: Collection[str],
                     free: int | None) -> tuple[TrainConfig, str | None]:
    """The configuration with the first of SMALLER with which the run fits into `free` bytes, or the last one, and a line that
    says so.

    It is unchanged, without a line, if the run fits, if the user has set one of these options, and if the free memory is not
    known (None).
    """
    need = estimate(config, vocab_size).total
    if free is None or need <= free or {f"trainer.{option}" for option in SMALLER[-1]} & {*given}:
        return config, None
    for options in SMALLER:
        smaller = with_options(config, **options)
        if estimate(smaller, vocab_size).total <= free:
            break
    words = " ".join(f"trainer.{option}={str(value).lower()}" for option, value in options.items())
    return smaller, f"{words}, which is slower: without it training needs {readable(need)}, and {readable(free)} is free"
