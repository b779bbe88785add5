"""Trains one run in five stages, prepare, plan, build, fit and finish, and prints how to continue an interrupted run.

The stage `plan` also builds the model. rwkv/programs/train.py calls `main` in each process.
"""

import sys
from dataclasses import dataclass, replace
from shlex import quote

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kernels.machine.allocator import give_back_free_blocks, keep_large_blocks, return_large_blocks
from kernels.operator import Operator
from kernels.select import AUTO
from rwkv import cli, distributed
from rwkv.checkpoint.files import describe, fingerprint_of
from rwkv.checkpoint.location import FOLDER
from rwkv.config import TrainConfig
from rwkv.data.loaders import DataModule, require_same_data, require_workers, validation_rows, worker_error
from rwkv.data.prepare import Corpus
from rwkv.data.validation import limit_validation
from rwkv.distributed import log
from rwkv.errors import UserError, memory_message
from rwkv.io.json_types import JsonObject
from rwkv.io.signals import caught_signals
from rwkv.model.base import generation
from rwkv.training import graphs, kernel_check
from rwkv.training.callbacks.before_after import comparison_lines
from rwkv.training.device import (
    device_for,
    dtype_for,
    is_planned_elsewhere,
    process_count,
    rows_per_process,
    set_product_precision,
)
from rwkv.training.errors import Diverged, Interrupted
from rwkv.training.finish import Result, write_report, write_results
from rwkv.training.loggers import loggers, require
from rwkv.training.memory.capacity import Needs, needs_here, require_capacity
from rwkv.training.memory.estimate import returns_free_memory
from rwkv.training.plan import other_gpus
from rwkv.training.plan.duration import is_timed
from rwkv.training.plan.this_machine import announce_needs, announce_training
from rwkv.training.run.directory import Run, as_plain, create
from rwkv.training.run.opening import open_run
from rwkv.training.run.resolve import Context, Stage, resolve
from rwkv.training.run.resume import is_fixed, require_unfinished
from rwkv.training.setup import data_for, kernel_for, new_model, show_conversations
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import build_trainer, prepare_blocks
from rwkv.training.tuning.preferences import REFERENCE, Preferences, write_reference


@dataclass(frozen=True)
class Prepared:
    """A run whose length in steps is known, and the parts from which the run's model is built.

    Args:
        rows: the number of a batch's rows that this process computes.
        operator: the operator with the kernel that kernel= names.
        kernel_line: the kernel's name. If kernel=auto chose the kernel, the line also gives the reason.
        kernel_error: the message that kernel_check.check returned.
        validated: `data` with the validation split cut to the part that validation uses.
    """

    run: Run
    device: torch.device
    rows: int
    operator: Operator
    kernel_line: str
    kernel_error: str | None
    use_graphs: bool
    data: Corpus
    validated: Corpus
    needs: Needs

    @property
    def options(self) -> JsonObject:
        """Returns the resolved options, with the kernel's name, for config.yaml, checkpoints and loggers."""
        return as_plain(self.run.config) | {"kernel": {"name": self.operator.name}}


@dataclass(frozen=True)
class Built:
    """The objects that training needs: the LightningModule with the model, Lightning's Trainer, and the data loaders."""

    task: LanguageModel
    trainer: lightning.Trainer
    loaders: DataModule


def main(config: TrainConfig, line: cli.CommandLine) -> None:
    if distributed.is_launched():
        with distributed.connect_processes():
            train(distributed.broadcast_from_rank0(lambda: open_run(config, line.keys, line.chosen_keys)))
    else:
        run = open_run(config, line.keys, line.chosen_keys)
        count = 1
        elsewhere = is_planned_elsewhere(run.config)
        if not elsewhere:
            count = process_count(run.config.trainer, run.config.data.batch_size)
        if count > 1 or (run.config.trainer.strategy == "fsdp" and not elsewhere):
            run.lock.release()           # rank 0 locks the directory again
            sys.exit(distributed.launch(count, caught_signals()))
        train(run)


def train(run: Run) -> None:
    if is_planned_elsewhere(run.config):
        other_gpus.announce(run)
        sys.exit(0)
    prepared = prepare(run)
    task = plan(prepared)
    built = build(prepared, task)
    result = fit(built, prepared.run)
    finish(prepared, task, result)


# Prepare


def prepare(run: Run) -> Prepared:
    """Determines the device, operator, data and length of the run. Raises UserError if one of the options is invalid."""
    config = run.config
    device = device_for(config.trainer.accelerator)
    # Without this line Lightning would read the rank from a batch system's variables, which this process may have inherited
    rank_zero_only.rank = distributed.rank()     # type: ignore[attr-defined]
    _set_allocator(config)
    if config.trainer.offload and device.type == "cpu":
        distributed.fail_together(UserError("trainer.offload=true requires a GPU, but this run is on a CPU: omit "
                                            "trainer.offload="))
    set_product_precision(str(config.trainer.precision), device)
    # Called before the data are read: raises UserError if the rows cannot be divided among the processes
    rows = rows_per_process(config.data.batch_size, config.trainer.strategy, config.trainer.num_nodes)
    operator, kernel_line = kernel_for(config.model, config.kernel.name, device, config.trainer.precision, rows)
    distributed.broadcast_from_rank0(lambda: require(config.logger, config.only_plans or config.data.preview))
    require_workers(config.data.num_workers)
    data = data_for(run, device)
    before = run.data_sha256
    if before is not None and not data.parts:            # the error about a mix compares its sources
        distributed.broadcast_from_rank0(lambda: require_same_data(before, data))
    if config.data.preview:
        show_conversations(data)
    config, notes = resolve(config, Stage.DATA, Context(data=data, resumed=run.resume_from is not None))
    run = replace(run, config=config, notes=run.notes + notes)
    distributed.broadcast_from_rank0(lambda: require_unfinished(run))
    window = len(data.val) if config.trainer.tbptt else config.model.ctx_len
    validated = limit_validation(data, config.trainer.val_tokens, window)
    if validated.conversations:
        val = validated.conversations[1]
        distributed.broadcast_from_rank0(lambda: len(validation_rows(val, config.model.ctx_len, config.trainer.tbptt)))
    data.tokenizer.drop_library()
    give_back_free_blocks()              # data preparation has freed memory
    kernel_error = None
    if config.kernel.name != AUTO and run.resume_from is None:       # a resumed run names the kernel that auto chose
        kernel_error = distributed.broadcast_from_rank0(lambda: kernel_check.check(
            operator, generation(config.model).OPERATOR, device, dtype_for(config.trainer.precision)))
    return Prepared(run, device, rows, operator, kernel_line, kernel_error, graphs.uses_graphs(config, device, operator.name),
                    data, validated, needs_here(config, run.vocab_size(data.tokenizer), device))


def _set_allocator(config: TrainConfig) -> None:
    trainer = config.trainer
    # With fsdp, kept blocks of gathered weights would cost the memory that sharding saves
    if trainer.malloc == "small" or (trainer.malloc == "tuned" and trainer.strategy == "fsdp"):
        return_large_blocks()
    elif trainer.malloc == "tuned":
        keep_large_blocks()


# Plan


def plan(prepared: Prepared) -> LanguageModel:
    """Prints the plan and returns the LightningModule with the model. With plan= the program ends after the plan.

    The plan may require timing the model's first steps. Raises UserError, after printing the plan's first part, if the run does
    not fit into memory or onto the disk.
    """
    run, device, data = prepared.run, prepared.device, prepared.data
    timed = is_timed(run.config, prepared.needs.vocab_size, device)
    ends_untimed = run.config.only_plans and not timed
    announce_needs(run, prepared.needs, prepared.kernel_line, prepared.kernel_error, data, timed)
    if ends_untimed:
        announce_training(run, device, data)
    distributed.broadcast_from_rank0(lambda: require_capacity(prepared.needs, run.out_dir, is_fixed if run.exists else None))
    if ends_untimed:
        sys.exit(0)
    task = new_task(prepared)
    announce_training(run, device, data, task if timed else None)
    if run.config.only_plans:
        sys.exit(0)
    return task


def new_task(prepared: Prepared) -> LanguageModel:
    """Returns the LightningModule with the model, the model's initial weights and the settings of the optimiser."""
    run, config, data, validated = prepared.run, prepared.run.config, prepared.data, prepared.validated
    lightning.seed_everything(config.seed, verbose=False)
    model = new_model(config.model, run.init_checkpoint, data.tokenizer, prepared.operator, config.tune, prepared.device)
    model = prepare_blocks(model, config.trainer)
    model.returns_free_memory = returns_free_memory(config, prepared.needs.memory)
    if prepared.use_graphs:
        model.replay = graphs.Replay(model)
    entry = describe(prepared.options, model.vocab_size, data.tokenizer) | {"data_sha256": data.sha256}
    if config.tune.method != "full" and run.init_checkpoint is not None:
        entry["base"] = fingerprint_of(run.init_checkpoint)
    return LanguageModel(model, config.optim, config.trainer.max_steps, validated.val_bytes_per_token, validated.val_lost,
                         entry=entry, sources=[part.name for part in validated.parts],
                         optim_in_backward=config.trainer.optim_in_backward,
                         preferences=Preferences(config.tune) if config.tune.prefers else None)


# Build


def build(prepared: Prepared, task: LanguageModel) -> Built:
    """Creates the run's directory and returns the objects that training needs."""
    run, config, validated = prepared.run, prepared.run.config, prepared.validated
    distributed.broadcast_from_rank0(lambda: create(run, prepared.options))
    if task.preferences is not None and config.tune.method == "full":
        _store_reference(task.preferences, prepared, task)
    logs = loggers(config.logger, run.out_dir, prepared.options, run.resume_step)
    trainer = build_trainer(run, prepared.device, logs, validated, prepared.kernel_error)
    batches = replace(config.data, batch_size=prepared.rows)
    return Built(task, trainer, DataModule(validated, batches, config.model.ctx_len, config.seed, config.trainer.tbptt))


def _store_reference(preferences: Preferences, prepared: Prepared, task: LanguageModel) -> None:
    run, config = prepared.run, prepared.run.config
    path = run.out_dir / REFERENCE
    if run.resume_from is None:          # a resumed run finds the file in its directory
        log(f"computing reference log-probabilities of the answers for {path}")
        distributed.broadcast_from_rank0(lambda: write_reference(
            path, task.model, prepared.validated, config.data.batch_size, config.model.ctx_len, prepared.device,
            dtype_for(config.trainer.precision)))
    preferences.read_reference(path, prepared.validated)


# Fit


def fit(built: Built, run: Run) -> Result:
    """Trains the model. If the run stops early, prints the command that continues the run and ends the program."""
    trainer = built.trainer
    continue_with = f"continue with: {cli.command('train')} resume=auto {quote(f'out_dir={run.out_dir}')}"
    try:
        _run_lightning(built, run)
    except Interrupted:
        log(f"\nstopped at step {trainer.global_step}; {continue_with}")
        sys.exit(cli.INTERRUPTED)
    except KeyboardInterrupt:
        log(f"\nstopped at step {trainer.global_step} without a checkpoint of this step; {continue_with}")
        raise
    except OSError as error:             # the disk may be full, or a folder deleted
        where = error.filename or run.out_dir
        raise UserError(f"training stopped at step {trainer.global_step}: {where}: {error.strerror or error}. Fix this error, "
                        f"then {continue_with}") from None
    except (MemoryError, RuntimeError) as error:
        if (message := memory_message(error)) is None:
            raise
        remedy = "start a new run with a smaller data.batch_size= or model.ctx_len="
        if not run.config.trainer.activation_checkpointing:
            remedy = f"{continue_with} trainer.activation_checkpointing=true"
        raise UserError(f"training stopped at step {trainer.global_step}: {message}. To reduce memory use, "
                        f"{remedy}") from None
    except Diverged as error:
        write_report(run.out_dir)
        saved = any((run.out_dir / FOLDER).glob("*.ckpt"))
        checkpoints = f". The checkpoints in {run.out_dir} are from earlier steps and intact" if saved else ""
        distributed.fail_together(Diverged(f"{error}{checkpoints}"))
    return Result(trainer.callback_metrics, comparison_lines(trainer))


def _run_lightning(built: Built, run: Run) -> None:
    try:
        built.trainer.fit(built.task, built.loaders, ckpt_path=run.resume_from, weights_only=True)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):     # Lightning turns Ctrl-C into an exit with status 1
            raise error.__context__ from None
        raise
    except (RuntimeError, UserError) as error:
        if (ended := worker_error(error)) is not None:
            raise ended from None
        raise                            # with its context, because Lightning's clean-up may raise an error of its own


# Finish


def finish(prepared: Prepared, task: LanguageModel, result: Result) -> None:
    """Writes and prints the run's results."""
    give_back_free_blocks()
    write_results(prepared.run, task, prepared.data, prepared.validated, result, prepared.device)
