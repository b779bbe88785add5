"""Builds Lightning's Trainer: callbacks, distributed strategy, precision, activation checkpointing and torch.compile."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.checkpoint import checkpoint

from kernels.registry import missing_compiler
from rwkv.checkpoint.location import FOLDER
from rwkv.config import TrainerConfig
from rwkv.data.prepare import Corpus
from rwkv.distributed import is_launched, world_size
from rwkv.errors import UserError
from rwkv.model.base import Model
from rwkv.model.weight_cache import WeightCache
from rwkv.training.callbacks.before_after import BeforeAfter
from rwkv.training.callbacks.checkpoints import Checkpoints, RandomState, VerifiedFiles
from rwkv.training.callbacks.divergence import Divergence
from rwkv.training.callbacks.interruption import StopCleanly
from rwkv.training.callbacks.kernel_probe import Probe
from rwkv.training.callbacks.metrics import Metrics
from rwkv.training.callbacks.progress_bar import ProgressBar
from rwkv.training.callbacks.samples import Samples, sample_every
from rwkv.training.device import dtype_for
from rwkv.training.run.directory import Run
from rwkv.training.sharding.strategy import ShardedStrategy
from rwkv.training.tuning.guard import is_compared

UNHELPFUL = (".*set_vital", ".*LeafSpec", "Checkpoint directory", ".*does not have many workers", ".*sync_dist=True",
             "The .grad attribute of a Tensor that is not a leaf", ".*should not be instantiated",
             ".*srun. command is available",
             "FSDP2-wrapped module")     # users can do nothing about these warnings of libraries


def build_trainer(run: Run, device: torch.device, loggers: list[Logger], data: Corpus,
                  kernel_error: str | None) -> lightning.Trainer:
    """Returns a Trainer that counts optimiser steps, validates every val_every steps and after the last, and stops cleanly.

    Raises UserError if the prompt of the samples cannot be encoded.

    Args:
        data: the data for samples, and for the losses of a tuned run before and after training.
        kernel_error: the message that kernel_check.check returned.
    """
    silence_libraries()
    config = run.config
    out_dir = run.out_dir
    options = config.trainer
    precision = precision_for(options, device)
    log_every = min(options.log_every, options.max_steps)          # a shorter run logs its loss at the last step
    divergence = Divergence(log_every)
    checkpoints = Checkpoints(out_dir, options.checkpoint_every, options.val_every, options.keep_last, divergence)
    metrics = Metrics(log_every, options.grad_norms)
    probe = Probe(out_dir, options, metrics.exclude, kernel_error)
    samples = [Samples(config, data.tokenizer, out_dir, run.resume_step, metrics.exclude)] if sample_every(options) else []
    compared = [BeforeAfter(config, data, out_dir, metrics.exclude)] if is_compared(config) else []
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", **strategy_for(options),
        **precision | {"plugins": [VerifiedFiles(), environment(), *precision.get("plugins", [])]},
        max_steps=options.max_steps, max_epochs=-1, accumulate_grad_batches=options.accumulate,
        val_check_interval=options.val_every * options.accumulate, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        limit_train_batches=options.overfit_batches or None,     # debug=overfit tests that a model can learn one batch
        gradient_clip_val=config.optim.grad_clip or None, logger=loggers,
        log_every_n_steps=1,
        callbacks=[probe, metrics, ProgressBar(metrics), divergence, *samples,
                   *compared, checkpoints, StopCleanly(checkpoints), RandomState(config.seed)],
        default_root_dir=out_dir / FOLDER, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
    if run.resume_step == options.max_steps:
        trainer.fit_loop.run = partial(_validate_alone, trainer)  # type: ignore[method-assign]
    return trainer


def _validate_alone(trainer: lightning.Trainer) -> None:
    """Repeats the last validation in a resumed run that was stopped or killed during this validation.

    No steps are left, so Lightning's loop would skip the validation, and the run would end without the last val/loss.
    """
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
    # Muon's redistribution on a CPU prints warnings
    logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
    for message in UNHELPFUL:
        warnings.filterwarnings("ignore", message=message)


def strategy_for(config: TrainerConfig) -> dict[str, Any]:
    """Returns Lightning's arguments for the number of processes and the distributed strategy."""
    shared = {"devices": world_size() // config.num_nodes, "num_nodes": config.num_nodes, "use_distributed_sampler": False}
    if config.strategy == "fsdp":
        # Inference tensors cannot be trained later
        return shared | {"strategy": ShardedStrategy(config), "inference_mode": False}
    return shared | ({"strategy": DDPStrategy()} if config.strategy == "ddp" and is_launched() else {})


def environment() -> ClusterEnvironment:
    """Returns the environment that tells Lightning how the processes were launched.

    Lightning guesses the environment from environment variables, and is wrong in a batch job: Lightning takes a single process
    for a SLURM task, and writes a checkpoint at SIGUSR1.
    """
    return TorchElasticEnvironment() if is_launched() else LightningEnvironment()


def precision_for(config: TrainerConfig, device: torch.device) -> dict[str, Any]:
    """Returns Lightning's arguments for the precision. On a CPU, Lightning's own fp16 would silently be bf16."""
    if config.precision == "fp16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", device.type)]}
    half = dtype_for(config.precision) != torch.float32
    return {"precision": str(config.precision).replace("fp16", "16") if half else "32-true"}


def prepare_blocks(model: Model, config: TrainerConfig) -> Model:
    """Applies trainer.activation_checkpointing and trainer.compile to each block, and adds a weight cache in half precision.

    The weights keep their names and values. Raises UserError if trainer.compile=true finds no compiler.
    """
    if config.compile and (compiler := missing_compiler()):
        raise UserError(f"trainer.compile=true requires a C++ compiler, but {compiler} is not on the PATH. Install a "
                        "compiler, or omit trainer.compile=")
    if dtype_for(config.precision) != torch.float32 and caches_weights(config):
        model.weight_cache = WeightCache(parameter for parameter in model.parameters() if parameter.requires_grad)
    for block in model.blocks:
        if config.activation_checkpointing or (config.strategy == "fsdp" and config.tbptt):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if config.compile:
            block.forward = _compile_for_training(block.forward)
    return model


def caches_weights(config: TrainerConfig) -> bool:
    """Returns True if a half-precision run has a weight cache.

    There is no cache with optim_in_backward, because the update of each parameter would invalidate the whole cache.
    """
    return config.strategy != "fsdp" and not config.compile and not config.optim_in_backward


def _compile_for_training(forward: Callable[..., object]) -> Callable[..., object]:
    # Without gradients, torch 2.13 cannot trace an autograd.Function, so only calls with gradients are compiled
    compiled = torch.compile(forward)
    return lambda *inputs: (compiled if torch.is_grad_enabled() else forward)(*inputs)
