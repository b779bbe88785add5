"""Opens a new run, or one that is resumed (rwkv/training/run/resume.py)."""

from collections.abc import Collection
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from rwkv.config import GENERATIONS, ModelConfig, TrainConfig
from rwkv.errors import UserError
from rwkv.model.base import generation
from rwkv.training.device import device_for, is_planned_elsewhere
from rwkv.training.length import with_default_length
from rwkv.training.memory import free_memory
from rwkv.training.run.directory import Run, new_folder, require_unused
from rwkv.training.run.options import check_new_run, require_one_beginning
from rwkv.training.run.rates import with_default_rates
from rwkv.training.run.resume import Request, resolved, resumed_run
from rwkv.training.tuning.guard import with_guard
from rwkv.training.tuning.init_from import open_init_checkpoint
from rwkv.training.tuning.passes import with_less_memory, with_passes


def open_run(config: TrainConfig, given: Collection[str] = (), chosen: Collection[str] = ()) -> Run:
    """A new run, or the one that `resume` names. Nothing is written yet.

    given: the keys that the user set on the command line. chosen: the options that the groups among these keys set.
    """
    require_one_beginning(config)
    if config.resume is not None:
        resumed = resumed_run(Request(config, given, chosen))
        if resumed is not None:
            return resumed
    check_new_run(config, given)
    config = with_default_length(config, {*given, *chosen})
    out_dir = Path(config.out_dir) if config.out_dir else new_folder()
    require_unused(out_dir)
    config, rates = with_default_rates(config, {*given, *chosen})
    if config.init_from is None:
        require_own_options(config)
        return Run(out_dir, resolved(config, given), default_rates=rates)
    sized, checkpoint, tokenizer = open_init_checkpoint(config, given)
    require_own_options(sized)
    guarded = with_guard(sized, tokenizer, given)
    if is_planned_elsewhere(config):
        return Run(out_dir, resolved(guarded, given), init_checkpoint=checkpoint, tokenizer=tokenizer, default_rates=rates)
    divided, of_passes = with_passes(resolved(guarded, given), checkpoint.vocab_size, given)
    free = free_memory(device_for(config.trainer.accelerator))
    frugal, of_memory = with_less_memory(divided, checkpoint.vocab_size, given, free)
    return Run(out_dir, frugal, init_checkpoint=checkpoint, tokenizer=tokenizer, default_rates=rates,
               saved_memory=tuple(line for line in (of_passes, of_memory) if line))


def require_own_options(config: TrainConfig) -> None:
    """Raises UserError for the first option that only other generations have and that is not at its default."""
    own = _own_options(config.model)
    default = TrainConfig()
    for name in GENERATIONS:
        for key in _own_options(replace(config.model, generation=name)):
            get = attrgetter(key)
            if key not in own and get(config) != get(default):
                raise UserError(f"{key} is an option of {name}, and the model is {config.model.generation}: leave it out, or "
                                "take another model=")


def _own_options(model: ModelConfig) -> list[str]:
    """The dotted keys of the model's options that not every generation has."""
    module = generation(model)
    return [*(f"model.{name}" for name in module.OPTIONS), *(f"optim.{name}" for name in module.LR_SCALES.values())]
