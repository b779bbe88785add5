"""Lightning's Trainer for a run: callbacks, distributed strategy, precision, activation checkpointing and torch.compile.

After training: the result, the report and a sample.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.checkpoint import checkpoint

from kernels.registry import missing_compiler
from rwkv import cli, report
from rwkv.checkpoint.files import read_checkpoint
from rwkv.checkpoint.location import FOLDER, LAST
from rwkv.config import TrainConfig, TrainerConfig
from rwkv.data.mixture import source_metric
from rwkv.data.prepare import Corpus
from rwkv.distributed import launched, log, rank, world_size
from rwkv.errors import UserError
from rwkv.generation.engine import generate
from rwkv.io.lines import harmless, labelled, wrapped
from rwkv.io.unread import unread
from rwkv.model.base import Model
from rwkv.model.weight_cache import WeightCache
from rwkv.report.numbers import REWARDS
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.callbacks.checkpoints import Checkpoints, RandomState, VerifiedFiles
from rwkv.training.callbacks.divergence import Divergence
from rwkv.training.callbacks.interruption import StopCleanly
from rwkv.training.callbacks.kernel_probe import Probe
from rwkv.training.callbacks.metrics import Metrics
from rwkv.training.callbacks.progress_bar import ProgressBar
from rwkv.training.callbacks.samples import Samples, sample_every
from rwkv.training.device import dtype_for
from rwkv.training.run.directory import Run
from rwkv.training.sharding import Sharded
from rwkv.training.task import LanguageModel
from rwkv.training.tuning.before_after import BeforeAfter
from rwkv.training.tuning.guard import is_compared

UNHELPFUL = (".*set_vital", ".*LeafSpec", "Checkpoint directory", ".*does not have many workers", ".*sync_dist=True",
             "The .grad attribute of a Tensor that is not a leaf", ".*should not be instantiated",
             ".*srun. command is available",
             "FSDP2-wrapped module")     # library warnings that users cannot act on


def build_trainer(run: Run, device: torch.device, loggers: list[Logger], data: Corpus,
                  kernel_error: str | None) -> lightning.Trainer:
    """A Trainer that counts optimiser steps, validates every val_every steps and after the last one, and stops cleanly.

    data: for samples, and for a tuned run's losses before and after training. kernel_error: the message of kernel_check.check.
    Raises UserError if the samples' prompt cannot be encoded.
    """
    silence_libraries()
    config = run.config
    out_dir = run.out_dir
    options = config.trainer
    precision = precision_for(options, device)
    divergence = Divergence(out_dir, options.log_every)
    checkpoints = Checkpoints(out_dir, options.checkpoint_every, options.val_every, options.keep_last, divergence)
    metrics = Metrics(options.log_every, options.grad_norms)
    probe = Probe(out_dir, options, metrics.exclude, kernel_error)
    samples = [Samples(config, data.tokenizer, out_dir, run.resume_step, metrics.exclude)] if sample_every(options) else []
    compared = [BeforeAfter(config, data, out_dir, metrics.exclude)] if is_compared(config) else []
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", **strategy_for(options),
        **precision | {"plugins": [VerifiedFiles(), environment(), *precision.get("plugins", [])]},
        max_steps=options.max_steps, max_epochs=-1, accumulate_grad_batches=options.accumulate,
        val_check_interval=options.val_every * options.accumulate, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        limit_train_batches=options.overfit_batches or None, gradient_clip_val=config.optim.grad_clip or None, logger=loggers,
        log_every_n_steps=1,
        callbacks=[probe, metrics, ProgressBar(metrics), divergence, *samples,
                   *compared, checkpoints, StopCleanly(checkpoints), RandomState(config.seed)],
        default_root_dir=out_dir / FOLDER, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
    if run.resume_step == options.max_steps:
        trainer.fit_loop.run = partial(_validate_alone, trainer)  # type: ignore[method-assign]
    return trainer


def _validate_alone(trainer: lightning.Trainer) -> None:
    """The last validation of a run that was stopped during it. Lightning's loop would skip it, since no steps are left."""
    loop = trainer.fit_loop
    loop.setup_data()
    loop.reset()
    loop.on_run_start()
    trainer.validating = True
    loop.epoch_loop.val_loop.run()
    trainer.training = True
    loop.on_run_end()


def silence_libraries() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)      # Muon's exchange on a CPU
    for message in UNHELPFUL:
        warnings.filterwarnings("ignore", message=message)


def show_sample(task: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, out_dir: Path) -> None:
    """Prints a sample on standard output, and the command for more, or an error, on standard error."""
    if rank() > 0:
        return
    model = trained_model(task, config.trainer.strategy, out_dir).eval()
    log("\nsample:")
    prompt = config.data.sample_prompt
    with redirect_stdout(unread(sys.stdout)):
        print(harmless(prompt, sys.stdout), end="")
        try:
            for piece in generate(model, tokenizer, prompt, max_new_tokens=config.trainer.sample_tokens, seed=config.seed):
                print(harmless(piece, sys.stdout), end="", flush=True)
        except Exception as error:
            log(f"no sample: {error}")
        print(flush=True)
    checkpoint_option = quote(f"checkpoint={out_dir}")
    chat = config.data.name == "chat"
    more = f"{cli.command('chat')} {checkpoint_option}" if chat else f"{cli.command('generate')} {checkpoint_option} prompt=..."
    log(f"\nmore: {more}")


def trained_model(task: LanguageModel, strategy: str, out_dir: Path) -> Model:
    """The model in memory; with trainer=fsdp, which shards the weights, the model of the last checkpoint."""
    if strategy != "fsdp":
        return task.model
    checkpoint = read_checkpoint(out_dir / LAST)
    weights = checkpoint.tensors("float32", str(task.device), mmap=True)
    model = Model.with_weights(task.model.config, task.model.operator, weights)
    if checkpoint.time_states:
        model.set_time_states([state.get().to(task.device) for state in checkpoint.time_states])
    return model


def write_report(out_dir: Path) -> None:
    """Writes the run's report and prints its warnings. A failure is printed and does not end the run."""
    if rank() > 0:
        return
    try:
        result = report.write(out_dir)
        log(f"report: {result.page}")
        for sentence in result.sentences:
            log(labelled("WARNING", sentence, sys.stderr))
    except Exception as error:
        log(f"no report: {error!r}")


def log_losses(trainer: lightning.Trainer, data: Corpus, part: str | None = None) -> None:
    """Prints the losses. part: the part of the validation split that was used, in words; None for all."""
    metrics = trainer.callback_metrics
    if part is not None:
        log(f"validation used {part}")
    paired = data.conversations is not None and data.conversations[1].paired
    loss = f"val/loss {metrics['val/loss']:.4f} {'per pair' if paired else 'nats per token'}"
    if paired:
        loss += "".join(f", val/{name} {metrics[f'val/{name}']:.4f}" for name in REWARDS)
    if "val/bpb" in metrics:
        loss += f", val/bpb {metrics['val/bpb']:.4f} bits per byte (gzip -9 of the same text: {data.sizes.gzip_bpb:.4f})"
    lost = data.describe_lost()
    log(wrapped(f"{loss}; {lost}" if lost else loss, sys.stderr))
    if data.parts:
        losses = (f"{part.name} {metrics[source_metric(part.name)]:.4f}" for part in data.parts)
        log(wrapped(f"val/loss by source: {', '.join(losses)}", sys.stderr))
    for line in compared(trainer):
        log(wrapped(line, sys.stderr))


def compared(trainer: lightning.Trainer) -> list[str]:
    """Lines on the losses before and after tuning; none in other runs."""
    return [callback.describe() for callback in trainer.callbacks          # type: ignore[attr-defined]
            if isinstance(callback, BeforeAfter) and callback.after is not None]


def strategy_for(config: TrainerConfig) -> dict[str, Any]:
    """Lightning's arguments for the processes and their strategy."""
    shared = {"devices": world_size() // config.num_nodes, "num_nodes": config.num_nodes, "use_distributed_sampler": False}
    if config.strategy == "fsdp":
        return shared | {"strategy": Sharded(config), "inference_mode": False}       # inference tensors cannot be trained later
    return shared | ({"strategy": DDPStrategy()} if config.strategy == "ddp" and launched() else {})


def environment() -> ClusterEnvironment:
    """How the processes were launched. Lightning would guess from environment variables: in a batch job it takes a single
    process for a SLURM task, and at SIGUSR1 it writes its own checkpoint.
    """
    return TorchElasticEnvironment() if launched() else LightningEnvironment()


def precision_for(config: TrainerConfig, device: torch.device) -> dict[str, Any]:
    """Lightning's arguments for the precision. On a CPU Lightning's own fp16 would silently be bf16."""
    if config.precision == "fp16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", device.type)]}
    half = dtype_for(config.precision) != torch.float32
    return {"precision": str(config.precision).replace("fp16", "16") if half else "32-true"}


def prepare_blocks(model: Model, config: TrainerConfig) -> Model:
    """Applies trainer.activation_checkpointing and trainer.compile to each block, keeping names and values of the weights. In
    half precision adds a weight cache.

    Raises UserError if trainer.compile has no compiler.
    """
    if config.compile and (compiler := missing_compiler()):
        raise UserError(f"trainer.compile=true requires a C++ compiler, and {compiler} is not on the PATH: install it, or "
                        "leave out trainer.compile")
    if dtype_for(config.precision) != torch.float32 and caches_weights(config):
        model.weight_cache = WeightCache(parameter for parameter in model.parameters() if parameter.requires_grad)
    for block in model.blocks:
        if config.activation_checkpointing or (config.strategy == "fsdp" and config.tbptt):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.compile:
            block.forward = _compiled(block.forward)
    return model


def caches_weights(config: TrainerConfig) -> bool:
    """Whether a half-precision run has a weight cache. With optim_in_backward each parameter's update would invalidate all of
    it.
    """
    return config.strategy != "fsdp" and not config.compile and not config.optim_in_backward


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the compiled `forward` only with gradients: without, torch 2.13 cannot trace autograd.Function."""
    compiled = torch.compile(forward)
    return lambda *inputs: (compiled if torch.is_grad_enabled() else forward)(*inputs)
