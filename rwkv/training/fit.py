"""One training run, from its configuration to its report. rwkv/programs/train.py calls `main` in each of its processes."""

import sys
from dataclasses import replace
from itertools import islice
from shlex import quote
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kernels.machine.allocator import give_back_free_blocks, keep_large_blocks, return_large_blocks
from kernels.select import AUTO
from rwkv import cli, distributed
from rwkv.checkpoint.files import describe
from rwkv.checkpoint.tuned import identity
from rwkv.config import TrainConfig
from rwkv.data.conversations import marked
from rwkv.data.loaders import DataModule, require_workers, worker_error
from rwkv.data.prepare import Corpus
from rwkv.data.validation import with_part
from rwkv.distributed import log
from rwkv.errors import UserError
from rwkv.io.lines import harmless
from rwkv.io.signals import caught_signals
from rwkv.model.base import generation
from rwkv.training import graphs, kernel_check, on_paper
from rwkv.training.callbacks.divergence import Diverged
from rwkv.training.callbacks.interruption import Interrupted
from rwkv.training.device import device_for, dtype_for, is_planned_elsewhere, process_count, set_product_precision, share
from rwkv.training.loggers import loggers, require
from rwkv.training.memory.capacity import Needs, needs_here, require_capacity
from rwkv.training.memory.estimate import gives_back
from rwkv.training.plan import announce_needs, announce_training, is_timed, validated_part
from rwkv.training.run.card import write_card
from rwkv.training.run.directory import Run, as_plain, create
from rwkv.training.run.opening import open_run
from rwkv.training.run.resolve import Context, Stage, resolve
from rwkv.training.run.resume import require_unfinished
from rwkv.training.setup import data_for, kernel_for, new_model
from rwkv.training.sharding import whole
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import build_trainer, compared, log_losses, prepare_blocks, show_sample, trained_model, write_report
from rwkv.training.tuning.preferences import REFERENCE, Preferences, read_reference, write_reference
from rwkv.training.tuning.tuned import write_tuned


def show_conversations(data: Corpus) -> None:
    """Prints two training conversations as the model sees them, with trained text in [[ ]], and exits."""
    if data.conversations is None:
        raise UserError("data.preview requires data=chat: it shows conversations")
    if distributed.rank() == 0:
        print(harmless("\n\n".join(islice(marked(data.conversations[0], data.tokenizer), 2)), sys.stdout))
    sys.exit(0)


def main(config: TrainConfig, line: cli.CommandLine) -> None:
    if distributed.launched():
        with distributed.connected():
            train(distributed.broadcast_from_rank0(lambda: open_run(config, line.keys, line.chosen)))
    else:
        run = open_run(config, line.keys, line.chosen)
        count = 1
        elsewhere = is_planned_elsewhere(run.config)
        if not elsewhere:
            count = process_count(run.config.trainer, run.config.data.batch_size)
        if count > 1 or (run.config.trainer.strategy == "fsdp" and not elsewhere):
            run.lock.release()           # rank 0 takes it
            sys.exit(distributed.launch(count, caught_signals()))
        train(run)


def fit(trainer: lightning.Trainer, task: LanguageModel, loaders: DataModule, run: Run) -> None:
    """Lightning's fit. Ctrl-C raises KeyboardInterrupt; Lightning would exit with status 1.

    Raises UserError if a data worker was killed or met a user's mistake.
    """
    try:
        trainer.fit(task, loaders, ckpt_path=run.resume_from, weights_only=True)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise
    except (RuntimeError, UserError) as error:
        raise (worker_error(error) or error) from None


def build_preferences(run: Run, task: LanguageModel, data: Corpus, device: torch.device) -> Preferences:
    """The preference objective. With tune=full, rank 0 writes the reference before the first step and all processes load it."""
    config = run.config
    path = run.out_dir / REFERENCE
    if config.tune.method != "full":
        return Preferences(config.tune)
    if run.resume_from is None:
        log(f"computing reference log-probabilities of the answers for {path}")
        distributed.broadcast_from_rank0(lambda: write_reference(
            path, task.model, data, config.data.batch_size, config.model.ctx_len, device, dtype_for(config.trainer.precision)))
    return Preferences(config.tune, read_reference(path, data))


def _set_allocator(config: TrainConfig) -> None:
    """Called before the model is built and timed. With fsdp, retaining gathered weights would take the memory that it saves."""
    trainer = config.trainer
    if trainer.malloc == "small" or (trainer.malloc == "tuned" and trainer.strategy == "fsdp"):
        return_large_blocks()
    elif trainer.malloc == "tuned":
        keep_large_blocks()


def train(run: Run) -> None:
    config = run.config
    if is_planned_elsewhere(config):
        on_paper.announce(run)
        sys.exit(0)
    device = device_for(config.trainer.accelerator)
    # Lightning would take the rank from a batch system's variables, which this process may have inherited
    rank_zero_only.rank = distributed.rank()     # type: ignore[attr-defined]
    _set_allocator(config)
    if config.trainer.offload and device.type == "cpu":
        distributed.fail_together(UserError("trainer.offload=true requires a GPU, and this run is on a CPU: leave it out"))
    set_product_precision(str(config.trainer.precision), device)
    # Before the data are read: raises UserError if the rows cannot be divided among the processes
    rows = share(config.data.batch_size, config.trainer.strategy, config.trainer.num_nodes)
    wkv, kernel = kernel_for(config.model, config.kernel.name, device, config.trainer.precision, rows)
    distributed.broadcast_from_rank0(lambda: require(config.logger))
    require_workers(config.data.num_workers)
    data = data_for(run, device)
    if config.data.preview:
        show_conversations(data)
    config, notes = resolve(config, Stage.DATA, Context(data=data))
    run = replace(run, config=config, notes=run.notes + notes)
    distributed.broadcast_from_rank0(lambda: require_unfinished(run))
    data.tokenizer.drop_library()
    give_back_free_blocks()              # left by data preparation
    kernel_error = None
    if config.kernel.name != AUTO and run.resume_from is None:       # a resumed run has the name that auto chose
        kernel_error = distributed.broadcast_from_rank0(lambda: kernel_check.check(
            wkv, generation(config.model).OPERATOR, device, dtype_for(config.trainer.precision)))
    use_graphs = graphs.chosen(config, device, wkv.name)
    V = run.init_checkpoint.vocab_size if run.init_checkpoint else data.tokenizer.vocab_size
    timed = is_timed(config, V, device)
    needs = needs_here(config, V, device)
    announce_needs(run, needs, kernel, kernel_error, data, timed)
    if config.only_plans and not timed:
        announce_training(run, device, data)
    distributed.broadcast_from_rank0(lambda: require_capacity(needs, run.out_dir))
    if config.only_plans and not timed:
        sys.exit(0)
    window = len(data.val) if config.trainer.tbptt else config.model.ctx_len
    validated = with_part(data, config.trainer.val_tokens, window)
    resolved = as_plain(config) | {"kernel": {"name": wkv.name}}
    task = _build_task(run, needs, wkv, use_graphs, data, validated, resolved)
    announce_training(run, device, data, task if timed else None)
    if config.only_plans:
        sys.exit(0)

    distributed.broadcast_from_rank0(lambda: create(run, resolved))
    if config.tune.prefers:
        task.preferences = build_preferences(run, task, validated, device)
    logs = loggers(config.logger, run.out_dir, resolved, run.resume_step)
    trainer = build_trainer(run, device, logs, validated, kernel_error)
    batches = replace(config.data, batch_size=rows)
    loaders = DataModule(validated, batches, config.model.ctx_len, config.seed, config.trainer.tbptt)
    _fit_or_exit(trainer, task, loaders, run)
    give_back_free_blocks()
    _write_results(trainer, task, run, data, validated)


def _build_task(run: Run, needs: Needs, wkv: Any, use_graphs: bool, data: Corpus, validated: Corpus,
                resolved: dict[str, Any]) -> LanguageModel:
    config = run.config
    lightning.seed_everything(config.seed, verbose=False)
    model = prepare_blocks(new_model(config.model, run.init_checkpoint, data.tokenizer, wkv, config.tune), config.trainer)
    model.gives_back = gives_back(config, needs.memory)
    if use_graphs:
        model.replay = graphs.Replay(model)
    task = LanguageModel(model, config.optim, config.trainer.max_steps, validated.val_bytes_per_token, validated.val_lost)
    task.sources = [part.name for part in validated.parts]
    task.optim_in_backward = config.trainer.optim_in_backward
    task.entry = describe(resolved, model.vocab_size, data.tokenizer) | {"data_sha256": data.sha256}
    if config.tune.method != "full" and run.init_checkpoint is not None:
        task.entry["base"] = identity(run.init_checkpoint)
    return task


def _fit_or_exit(trainer: lightning.Trainer, task: LanguageModel, loaders: DataModule, run: Run) -> None:
    """Calls fit; if it stops early, prints or raises why, with the command that continues the run."""
    continue_with = f"continue with: {cli.command('train')} resume=auto {quote(f'out_dir={run.out_dir}')}"
    try:
        fit(trainer, task, loaders, run)
    except Interrupted:
        log(f"\nstopped at step {trainer.global_step}; {continue_with}")
        sys.exit(cli.INTERRUPTED)
    except KeyboardInterrupt:
        log(f"\nstopped at step {trainer.global_step} without a checkpoint of it; {continue_with}")
        raise
    except OSError as error:             # a full disk, a deleted folder
        where = error.filename or run.out_dir
        raise UserError(f"training stopped at step {trainer.global_step}: {where}: {error.strerror or error}; once that is "
                        f"fixed, {continue_with}") from None
    except Diverged as error:
        write_report(run.out_dir)
        distributed.fail_together(error)


def _write_results(trainer: lightning.Trainer, task: LanguageModel, run: Run, data: Corpus, validated: Corpus) -> None:
    """Writes the tuned files, the card and the report, and prints the losses and a sample."""
    config = run.config
    trained = {name: whole(weight.detach()) for name, weight in task.model.named_parameters() if weight.requires_grad and
               config.tune.method != "full"}
    if distributed.rank() == 0:
        model = task.model if config.tune.method != "state" else trained_model(task, config.trainer.strategy, run.out_dir)
        for path in write_tuned(model, trained, data.tokenizer, config, run.out_dir):
            log(f"tuned: {path}")
    log_losses(trainer, validated, validated_part(config.trainer.val_tokens, data.sizes.val_tokens))
    if distributed.rank() == 0:
        write_card(run, data, trainer.callback_metrics, compared(trainer))
    write_report(run.out_dir)
    show_sample(task, data.tokenizer, config, run.out_dir)
