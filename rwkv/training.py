"""Lightning's Trainer as this program uses it, what is said before a run, and what is shown after it."""

import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import Logger

from kernels.allocator import keep_large_blocks
from kernels.select import AUTO, select, why_auto
from kernels.wkv import WKV
from rwkv.callbacks import Bar, Metrics, StopCleanly
from rwkv.config import TrainConfig
from rwkv.generation import generate
from rwkv.processes import rank, world_size
from rwkv.run import Run
from rwkv.saving import Checkpoints, RandomState, VerifiedFiles
from rwkv.scale import precision_for, strategy_for
from rwkv.task import LanguageModel, n_parameters
from rwkv.tokenizer import Tokenizer

LIBRARY_CHATTER = (".*set_vital", ".*LeafSpec", "Checkpoint directory", ".*does not have many workers", ".*sync_dist=True",
                   "The .grad attribute of a Tensor that is not a leaf", ".*should not be instantiated")
ESTIMATED_STEPS = 2                      # timed before a run, after one that warms up


def dtype_for(precision: str) -> torch.dtype:
    """The dtype of what the model's matrix products give, and so of k and v."""
    return {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision, torch.float32)


def kernel_for(config: TrainConfig, device: torch.device) -> tuple[WKV, str]:
    """The operator that the configuration names, and how it is announced. Raises as kernels.select does."""
    dtype = dtype_for(config.trainer.precision)
    wkv = select(config.kernel.name, device, dtype)
    return wkv, why_auto(device, dtype) if config.kernel.name == AUTO else wkv.name


def build_trainer(config: TrainConfig, out_dir: Path, device: torch.device, loggers: list[Logger]) -> lightning.Trainer:
    """A Trainer that counts optimiser steps, validates on the whole split and after the last step, and stops cleanly."""
    quiet()
    options, precision = config.trainer, precision_for(config.trainer, device)
    if options.malloc == "tuned":
        keep_large_blocks()
    saved = Checkpoints(out_dir, options.checkpoint_every, options.val_every, options.keep_last)
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu", **strategy_for(options),
        **precision | {"plugins": [VerifiedFiles(), *precision.get("plugins", [])]},
        max_steps=options.max_steps, max_epochs=-1, accumulate_grad_batches=options.accumulate,
        val_check_interval=options.val_every * options.accumulate, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        overfit_batches=options.overfit_batches, gradient_clip_val=config.optim.grad_clip or None, logger=loggers,
        log_every_n_steps=1, callbacks=[Bar(), Metrics(options.log_every), saved, StopCleanly(saved), RandomState()],
        default_root_dir=out_dir, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)


def quiet() -> None:
    """Leaves out what libraries say of their own insides: advice that a user of this program cannot follow."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in LIBRARY_CHATTER:
        warnings.filterwarnings("ignore", message=message)


def announce(run: Run, kernel: str, device: torch.device, task: LanguageModel, source: str) -> None:
    """What will happen: device, kernel, parameters, tokens, steps, estimated minutes; on standard error."""
    if rank() > 0:
        return
    config = run.config
    if config.resume == "auto" and run.resume_from is None:
        say("resume=auto: no run to continue, starting a new one")
    tokens = config.data.batch_size * config.model.ctx_len * config.trainer.accumulate
    steps = config.trainer.max_steps - (run.resume_step or 0)
    minutes = _seconds_per_step(task, config, device) * steps / 60
    say(f"data       {source}")
    say(f"model      RWKV-4, {config.model.n_layer} layers, {config.model.n_embd} wide, "
        f"{n_parameters(task.model.parameters()):,} parameters, vocabulary {task.model.vocab_size}")
    if run.beginning is not None and run.resume_from is None:
        say(f"weights    from {run.beginning.path}, which gives the sizes and the tokenizer; the optimiser begins anew")
    say(f"kernel     {kernel} on {device.type}, precision {config.trainer.precision}, {torch.get_num_threads()} threads")
    say(f"training   {steps:,} steps of {tokens:,} tokens: {steps * tokens:,} tokens, about {minutes:.1f} minutes")
    say(f"run        {run.out_dir}" + (f", continued from {run.resume_from}" if run.resume_from else ""))


def show_sample(task: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, out_dir: Path) -> None:
    """A sample on standard output, and the command for more."""
    if rank() > 0:
        return
    task.model.eval()
    say("\nsample:")
    prompt = config.data.sample_prompt
    print(prompt, end="")
    for piece in generate(task.model, tokenizer, prompt, max_new_tokens=config.trainer.sample_tokens, seed=config.seed):
        print(piece, end="", flush=True)
    print(flush=True)
    say(f"\nmore: python generate.py checkpoint={out_dir} prompt=...")


def say_result(metrics: Mapping[str, Any], gzip_bpb: float) -> None:
    say(f"val/loss {metrics['val/loss']:.4f} nats per token, val/bpb {metrics['val/bpb']:.4f} bits per byte "
        f"(gzip -9 of the same text: {gzip_bpb:.4f})")


def say(text: str) -> None:
    """Once, for all processes."""
    if rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _seconds_per_step(task: LanguageModel, config: TrainConfig, device: torch.device) -> float:
    """Forward and backward of one batch, timed; it compiles the kernels on the way and leaves nothing behind."""
    x = torch.zeros(config.data.batch_size // world_size(), config.model.ctx_len, dtype=torch.long, device=device)
    task.to(device)
    since = 0.0
    for step in range(1 + ESTIMATED_STEPS):
        if step == 1:
            since = time.perf_counter()
        dtype = dtype_for(config.trainer.precision)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = task.loss(x, x)
        loss.backward()
    _: Any = loss.item()                 # waits for the device
    task.zero_grad(set_to_none=True)
    return (time.perf_counter() - since) / ESTIMATED_STEPS * config.trainer.accumulate
