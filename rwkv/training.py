"""Lightning's Trainer as this program uses it, and what is shown after a run."""

import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.loggers import Logger

from kernels.allocator import keep_large_blocks
from kernels.select import AUTO, select, why_auto
from kernels.wkv import WKV
from rwkv import report
from rwkv.callbacks import Bar, Metrics, StopCleanly
from rwkv.checkpoint import read_checkpoint
from rwkv.config import TrainConfig
from rwkv.divergence import Divergence
from rwkv.generation import generate
from rwkv.model import RWKV, Block
from rwkv.probe import Probe
from rwkv.processes import rank, world_size
from rwkv.run import Run
from rwkv.samples import Samples, sample_every
from rwkv.saving import LAST, Checkpoints, RandomState, VerifiedFiles
from rwkv.scale import precision_for, strategy_for
from rwkv.task import LanguageModel
from rwkv.tokenizer import Tokenizer
from rwkv.unread import unread

LIBRARY_CHATTER = (".*set_vital", ".*LeafSpec", "Checkpoint directory", ".*does not have many workers", ".*sync_dist=True",
                   "The .grad attribute of a Tensor that is not a leaf", ".*should not be instantiated")


def dtype_for(precision: str) -> torch.dtype:
    """The dtype of what the model's matrix products give, and so of k and v."""
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, torch.float32)


def kernel_for(config: TrainConfig, device: torch.device) -> tuple[WKV, str]:
    """The operator that the configuration names, and how it is announced. Raises as kernels.select does."""
    dtype = dtype_for(config.trainer.precision)
    wkv = select(config.kernel.name, device, dtype)
    return wkv, why_auto(device, dtype) if config.kernel.name == AUTO else wkv.name


def build_trainer(run: Run, device: torch.device, tokenizer: Tokenizer, loggers: list[Logger]) -> lightning.Trainer:
    """A Trainer that counts optimiser steps, validates on the whole split and after the last step, and stops cleanly.

    `tokenizer` is for the samples during training. Raises ValueError where their prompt cannot be encoded.
    """
    quiet()
    config, out_dir = run.config, run.out_dir
    options, precision = config.trainer, precision_for(config.trainer, device)
    if options.malloc == "tuned":
        keep_large_blocks()
    divergence = Divergence(out_dir, options.log_every)
    saved = Checkpoints(out_dir, options.checkpoint_every, options.val_every, options.keep_last, divergence)
    metrics = Metrics(options.log_every, options.grad_norms, dtype_for(options.precision),
                      config.data.batch_size // world_size() * config.model.ctx_len)
    probe = Probe(out_dir, options, metrics.leave_out)
    samples = [Samples(config, tokenizer, out_dir, run.resume_step, metrics.leave_out)] if sample_every(options) else []
    trainer = lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", **strategy_for(options),
        **precision | {"plugins": [VerifiedFiles(), *precision.get("plugins", [])]},
        max_steps=options.max_steps, max_epochs=-1, accumulate_grad_batches=options.accumulate,
        val_check_interval=options.val_every * options.accumulate, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        limit_train_batches=options.overfit_batches or None, gradient_clip_val=config.optim.grad_clip or None, logger=loggers,
        log_every_n_steps=1,
        callbacks=[probe, metrics, Bar(metrics), divergence, *samples, saved, StopCleanly(saved), RandomState()],
        default_root_dir=out_dir, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
    if run.resume_step == options.max_steps:
        trainer.fit_loop.run = partial(_validate_alone, trainer)  # type: ignore[method-assign]
    return trainer


def _validate_alone(trainer: lightning.Trainer) -> None:
    """What is left of a run that was stopped after its last step. Lightning's own loop would do nothing at all."""
    loop = trainer.fit_loop
    loop.setup_data()
    loop.reset()
    loop.on_run_start()
    trainer.validating = True
    loop.epoch_loop.val_loop.run()
    trainer.training = True
    loop.on_run_end()


def quiet() -> None:
    """Leaves out what libraries say of their own insides: advice that a user of this program cannot follow."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in LIBRARY_CHATTER:
        warnings.filterwarnings("ignore", message=message)


def show_sample(task: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, out_dir: Path) -> None:
    """A sample on standard output, and the command for more; where none can be drawn, the reason."""
    if rank() > 0:
        return
    model = _whole(task, config, out_dir).eval()
    say("\nsample:")
    prompt = config.data.sample_prompt
    with redirect_stdout(unread(sys.stdout)):
        print(prompt, end="")
        try:
            for piece in generate(model, tokenizer, prompt, max_new_tokens=config.trainer.sample_tokens, seed=config.seed):
                print(piece, end="", flush=True)
        except Exception as error:
            say(f"no sample: {error}")
        print(flush=True)
    say(f"\nmore: python generate.py checkpoint={out_dir} prompt=...")


def _whole(task: LanguageModel, config: TrainConfig, out_dir: Path) -> RWKV:
    """The trained model; with trainer=fsdp, where each process has a share of the weights, from the last checkpoint."""
    if config.trainer.strategy != "fsdp":
        return task.model
    wkv = cast(Block, task.model.blocks[0]).att.wkv
    return RWKV.from_checkpoint(read_checkpoint(out_dir / LAST), wkv, str(task.device))


def leave_report(out_dir: Path) -> None:
    """What the run has come to, as a page: no reason for a run to fail, whatever becomes of it."""
    if rank() > 0:
        return
    try:
        say(f"report: {report.write(out_dir)}")
    except Exception as error:
        say(f"no report: {error!r}")


def say_result(metrics: Mapping[str, Any], gzip_bpb: float) -> None:
    say(f"val/loss {metrics['val/loss']:.4f} nats per token, val/bpb {metrics['val/bpb']:.4f} bits per byte "
        f"(gzip -9 of the same text: {gzip_bpb:.4f})")


def say(text: str) -> None:
    """Once, for all processes."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)
