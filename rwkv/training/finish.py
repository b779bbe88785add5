"""Writes and prints a run's results: files of tuned weights, losses, model card, report, and a sample."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv import report
from rwkv.checkpoint.files import read_checkpoint
from rwkv.checkpoint.location import LAST
from rwkv.config import TrainConfig
from rwkv.data.mixture import source_metric
from rwkv.data.prepare import Corpus
from rwkv.distributed import log, rank
from rwkv.generation.engine import generate
from rwkv.io.broken_pipe import discard_when_unread
from rwkv.io.lines import escape_controls, labelled_line, wrap_text
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.plan.this_machine import validated_part
from rwkv.training.run.card import write_card
from rwkv.training.run.directory import Run, sampling_command
from rwkv.training.sharding.strategy import full_tensor
from rwkv.training.task import LanguageModel
from rwkv.training.tuning.exports import write_tuned
from rwkv.training.tuning.preferences import REWARDS


class Result(NamedTuple):
    """The metrics of the last validation by name, and the lines that compare the losses before and after tuning."""

    metrics: Mapping[str, Tensor]
    comparison_lines: list[str]


def write_results(run: Run, task: LanguageModel, data: Corpus, validated: Corpus, result: Result, device: torch.device) -> None:
    """Writes the tuned files, the card and the report, and prints the losses and a sample.

    Args:
        validated: the data with the part of the validation split that validation uses.
        device: the device of the run. At the end of training, Lightning has moved the model to the CPU.
    """
    config = run.config
    trained = {name: full_tensor(weight.detach()) for name, weight in task.model.named_parameters() if weight.requires_grad and
               config.tune.method != "full"}
    if rank() == 0:
        model = task.model if config.tune.method != "state" else trained_model(
            task, config.trainer.strategy, run.out_dir, torch.device("cpu"))
        for path in write_tuned(model, trained, data.tokenizer, config, run.out_dir):
            log(f"tuned: {path}")
    log_losses(result, validated, validated_part(config.trainer.val_tokens, data.sizes.val_tokens))
    if rank() == 0:
        write_card(run, data, result.metrics, result.comparison_lines)
    write_report(run.out_dir)
    show_sample(task, data.tokenizer, config, run.out_dir, device)


def log_losses(result: Result, data: Corpus, part: str | None = None) -> None:
    """Prints the losses. `part` describes the validated part of the split. None stands for the whole split."""
    metrics = result.metrics
    if part is not None:
        log(f"validation used {part}")
    paired = data.conversations is not None and data.conversations[1].paired
    loss = f"val/loss {metrics['val/loss']:.4f} {'per pair' if paired else 'nats per token'}"
    if paired:
        loss += "".join(f", val/{name} {metrics[f'val/{name}']:.4f}" for name in REWARDS)
    if "val/bpb" in metrics:
        loss += f", val/bpb {metrics['val/bpb']:.4f} bits per byte (gzip -9 of the same text: {data.sizes.gzip_bpb:.4f})"
    lost = data.describe_lost()
    log(wrap_text(f"{loss}; {lost}" if lost else loss, sys.stderr))
    if data.parts:
        losses = (f"{part.name} {metrics[source_metric(part.name)]:.4f}" for part in data.parts)
        log(wrap_text(f"val/loss by source: {', '.join(losses)}", sys.stderr))
    for line in result.comparison_lines:
        log(wrap_text(line, sys.stderr))


def write_report(out_dir: Path) -> None:
    """Writes the run's report and prints the report's warnings. An error is printed and does not end the run."""
    if rank() > 0:
        return
    try:
        result = report.write(out_dir)
        log(f"report: {result.page}")
        for sentence in result.sentences:
            log(labelled_line("WARNING", sentence, sys.stderr))
    except Exception as error:
        log(f"cannot write the report: {error!r}")


def show_sample(task: LanguageModel, tokenizer: Tokenizer, config: TrainConfig, out_dir: Path, device: torch.device) -> None:
    """Prints a sample on standard output, and the command for more samples on standard error. An error is only printed."""
    if rank() > 0:
        return
    log("\nsample:")
    prompt = config.data.sample_prompt
    with redirect_stdout(discard_when_unread(sys.stdout)):
        print(escape_controls(prompt, sys.stdout), end="")
        try:
            model = trained_model(task, config.trainer.strategy, out_dir, device).eval()
            for piece in generate(model, tokenizer, prompt, max_new_tokens=config.trainer.sample_tokens, seed=config.seed):
                print(escape_controls(piece, sys.stdout), end="", flush=True)
        except Exception as error:
            log(f"cannot generate a sample: {error}")
        print(flush=True)
    log(f"\nmore: {sampling_command(out_dir, config.data.name)}")


def trained_model(task: LanguageModel, strategy: str, out_dir: Path, device: torch.device) -> Model:
    """Returns the trained model on `device`.

    With trainer=fsdp the model is read from the last checkpoint, because the weights are sharded.
    """
    if strategy != "fsdp":
        return task.model.to(device)
    checkpoint = read_checkpoint(out_dir / LAST)
    weights = checkpoint.tensors("float32", str(device), mmap=True)
    model = Model.with_weights(task.model.config, task.model.operator, weights)
    if checkpoint.time_states:
        model.set_time_states([state.get().to(device) for state in checkpoint.time_states])
    return model
