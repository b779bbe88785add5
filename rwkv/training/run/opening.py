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
from rwkv.training.memory.capacity import free_memory
from rwkv.training.memory.savings import fit_memory, with_passes
from rwkv.training.run.directory import Run, new_folder, require_unused
from rwkv.training.run.options import check_new_run, require_one_beginning
from rwkv.training.run.rates import with_default_rates
from rwkv.training.run.resume import Request, resolved, resumed_run
from rwkv.training.tuning.guard import with_guard
from rwkv.training.tuning.init_from import open_init_checkpoint


def open_run(config: TrainConfig, user_keys: Collection[str] = (), chosen: Collection[str] = ()) -> Run:
    """A new run, or the one that `resume` names. Nothing is written yet.

    user_keys: the keys that the user set on the command line. chosen: the options that the groups among these keys set.
    """
    require_one_beginning(config)
    if config.resume is not None:
        resumed = resumed_run(Request(config, user_keys, chosen))
        if resumed is not None:
            return resumed
    check_new_run(config, user_keys)
    config = with_default_length(config, {*user_keys, *chosen})
    out_dir = Path(config.out_dir) if config.out_dir else new_folder()
    require_unused(out_dir)
    config, rates = with_default_rates(config, {*user_keys, *chosen})
    if config.init_from is None:
        require_own_options(config)
        return Run(out_dir, resolved(config, user_keys), default_rates=rates)
    config, checkpoint, tokenizer = open_init_checkpoint(config, user_keys)
    require_own_options(config)
    config = resolved(with_guard(config, tokenizer, user_keys), user_keys)
    notes: list[str | None] = []
    if not is_planned_elsewhere(config):
        config, passes_note = with_passes(config, checkpoint.vocab_size, user_keys)
        free = free_memory(device_for(config.trainer.accelerator))
        config, memory_note = fit_memory(config, checkpoint.vocab_size, user_keys, free)
        notes = [passes_note, memory_note]
    return Run(out_dir, config, init_checkpoint=checkpoint, tokenizer=tokenizer, default_rates=rates,
               saved_memory=tuple(note for note in notes if note))


def require_own_options(config: TrainConfig) -> None:
    """Raises UserError for the first option of another generation that is not at its default."""
    supported = _own_options(config.model)
    default = TrainConfig()
    for name in GENERATIONS:
        for key in _own_options(replace(config.model, generation=name)):
            get = attrgetter(key)
            if key not in supported and get(config) != get(default):
                raise UserError(f"{key} is an option of {name}, and the model is {config.model.generation}: leave it out, or "
                                "use another model=")


def _own_options(model: ModelConfig) -> list[str]:
    """The dotted keys of the options that are specific to the model's generation."""
    module = generation(model)
    return [*(f"model.{name}" for name in module.OPTIONS), *(f"optim.{name}" for name in module.LR_SCALES.values())]
