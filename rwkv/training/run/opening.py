"""Opens a run: a new run, or a resumed run (rwkv/training/run/resume.py)."""

from collections.abc import Collection
from dataclasses import replace

from rwkv.config import TrainConfig
from rwkv.model.base import require_own_options
from rwkv.training.run.directory import Run, new_folder, require_unused, run_folder
from rwkv.training.run.options import check_new_run, require_one_beginning
from rwkv.training.run.resolve import Context, Stage, resolve
from rwkv.training.run.resume import Request, resumed_run
from rwkv.training.tuning.init_from import open_init_checkpoint


def open_run(config: TrainConfig, user_keys: Collection[str] = (), chosen: Collection[str] = ()) -> Run:
    """Returns a new run, or the run that `resume` names, without writing anything.

    Args:
        user_keys: the keys that the user set on the command line.
        chosen: the options that the groups among these keys set.
    """
    require_one_beginning(config)
    if config.resume is not None:
        resumed = resumed_run(Request(config, user_keys, chosen))
        if resumed is not None:
            return resumed
    check_new_run(config, user_keys)
    out_dir = run_folder(config.out_dir) if config.out_dir else new_folder()
    require_unused(out_dir)
    context = Context(user_keys, chosen)
    config, notes = resolve(config, Stage.COMMAND_LINE, context)
    if config.init_from is not None:
        config, checkpoint, tokenizer = open_init_checkpoint(config, user_keys)
        context = replace(context, base=checkpoint, tokenizer=tokenizer)
    require_own_options(config.model, config.optim)
    config, more_notes = resolve(config, Stage.BASE, context)
    return Run(out_dir, config, init_checkpoint=context.base, tokenizer=context.tokenizer, notes=notes + more_notes)
