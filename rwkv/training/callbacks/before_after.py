"""Measures what tuning gains and breaks: the losses and answers of a tuned run before its first step and after its last.

It measures two losses, of the validation split and of tune.guard's text, which is read as one sequence (rwkv/evaluation.py),
and generates greedy continuations of prompts from the validation split. The losses are metrics of step 0 and of the last step:
val/loss, val/bpb, guard/loss and guard/bpb. All results are in out_dir/tuned.json, for the report.

Checkpoints hold the results from before training, so a resumed run does not measure them again. Random generators are restored
after each measurement, so training is the same with and without this callback.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from rwkv.config import TrainConfig
from rwkv.data.prepare import Corpus
from rwkv.distributed import log, rank
from rwkv.errors import UserError
from rwkv.evaluation import TextScore, count_tokens, score_text
from rwkv.io.atomic import write_file
from rwkv.io.json_types import JsonObject, StateDict
from rwkv.io.lines import counted, labelled
from rwkv.model.base import Model
from rwkv.model.lora import chosen
from rwkv.report.run_files import TUNED
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.callbacks.progress_bar import bar
from rwkv.training.task import LanguageModel
from rwkv.training.tuning.guard import guard_path, sha256_of
from rwkv.training.tuning.held_out import continuations, prompts, readable

Measured = dict[str, float]              # metric name -> value, and "step"


class BeforeAfter(Callback):
    """The callback that measures before and after training. Among the callbacks it must precede Checkpoints, so that the last
    checkpoint has all results.

    exclude(seconds) is called with each measurement's duration. Rank 0 measures the guard text and the continuations.
    """

    def __init__(self, config: TrainConfig, data: Corpus, out_dir: Path, exclude: Callable[[float], None]) -> None:
        self.config = config
        self.tokenizer = data.tokenizer
        self.path = out_dir / TUNED
        self.guard = guard_path(config)
        self.guard_sha256 = sha256_of(self.guard)
        self.before: Measured | None = None
        self.after: Measured | None = None
        can_sample = config.trainer.sample_tokens > 0 and config.trainer.strategy != "fsdp"
        self.prompts = prompts(data, config.model.ctx_len, config.trainer.sample_tokens) if can_sample else []
        self.answers: dict[str, list[str]] = {}          # "before" or "after" -> one answer per prompt
        self._exclude = exclude

    def state_dict(self) -> StateDict:
        return {"guard": self.guard_sha256, "before": self.before, "after": self.after, "answers": self.answers}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Raises UserError if the text of tune.guard has changed since the run started."""
        if state_dict["guard"] != self.guard_sha256:
            raise UserError(f"the text of tune.guard={self.config.tune.guard} has changed since the run started, so its losses "
                            "before and after cannot be compared: restore the text, then resume")
        self.before, self.after, self.answers = state_dict["before"], state_dict["after"], state_dict["answers"]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.global_step < trainer.max_steps:      # a finished run may be extended
            self.after = None
            self.answers.pop("after", None)
        if self.before is not None:
            self._write(cast(LanguageModel, pl_module))
        elif trainer.global_step:
            log("guard      no comparison of before and after: nothing was measured before the first step")

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Measures here, not in on_train_start, where StopCleanly installs its signal handlers."""
        if trainer.global_step or self.before is not None:
            return
        start = time.perf_counter()
        self._announce("before")
        task = cast(LanguageModel, pl_module)
        gpus = [task.device] if task.device.type == "cuda" else []
        task.eval()
        with torch.random.fork_rng(gpus), torch.no_grad():
            self.before = self._measure(trainer, task, "before", _validation(trainer, task))
        self._write(task)
        task.train()
        self._exclude(time.perf_counter() - start)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if self.before is None or trainer.global_step < trainer.max_steps or not math.isfinite(metrics["val/loss"]):
            return
        self._announce("after")
        task = cast(LanguageModel, pl_module)
        gpus = [task.device] if task.device.type == "cuda" else []
        with torch.random.fork_rng(gpus):
            self.after = self._measure(trainer, task, "after", metrics)
        self._write(task)

    def describe(self) -> str:
        """A line with the losses before and after, for the end of the run."""
        assert self.before is not None
        assert self.after is not None
        names = {"val/loss": "the validation split", "guard/loss": f"tune.guard={self.config.tune.guard}"}
        changes = [f"{subject} {self.before[name]:.4f} before, {self.after[name]:.4f} after"
                   for name, subject in names.items() if name in self.before and name in self.after]
        objective_note = "; the loss of the validation split is the objective, per pair" if self.config.tune.prefers else ""
        return f"nats per token: {'; '.join(changes)}{objective_note}"

    def _announce(self, when: str) -> None:
        """Prints a line above the progress bar."""
        if rank() == 0:
            answers = f" and {counted(len(self.prompts), 'answer')}" if self.prompts else ""
            tqdm.write(labelled("measuring", f"the losses{answers} {when} training", sys.stderr), file=sys.stderr)

    def _measure(self, trainer: lightning.Trainer, task: LanguageModel, when: str, validation: Measured) -> Measured:
        step = trainer.global_step
        guard: Measured = {}
        if rank() == 0:
            if self.guard is not None:
                with trainer.precision_plugin.val_step_context():
                    guard = score_guard(task.model, self.tokenizer, self.guard, self.config.model.ctx_len)
            self._answer(task.model, when)
        for logger in trainer.loggers:
            logger.log_metrics((validation if when == "before" else {}) | guard, step)
        return {"step": step} | validation | guard

    def _answer(self, model: Model, when: str) -> None:
        """Stores the answers. If generation fails, prints the reason on standard error, and training continues."""
        if not self.prompts:
            return
        try:
            self.answers[when] = continuations(model, self.tokenizer, self.config, self.prompts)
        except Exception as error:
            print(f"no answers {when} training: {error}", file=sys.stderr)

    def _write(self, task: LanguageModel) -> None:
        if rank() > 0:
            return
        samples = [{"prompt": readable(self.tokenizer, prompt.ids), "reference": readable(self.tokenizer, prompt.reference),
                    **{when: texts[number] for when, texts in self.answers.items()}}
                   for number, prompt in enumerate(self.prompts)] if self.answers else []
        measured = {"before": self.before, "after": self.after}
        content = {"tuned": self._tuned(task.model), "guard": self.config.tune.guard if self.guard else None,
                   **{when: losses for when, losses in measured.items() if losses}, "samples": samples}
        write_file(self.path, lambda file: file.write(json.dumps(content, ensure_ascii=False).encode()))

    def _tuned(self, model: Model) -> JsonObject:
        """The tuning method, the base model, and the number of trained values."""
        tune = self.config.tune
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        lora = {"rank": tune.rank, "alpha": tune.alpha, "modules": chosen(model.config, tune.modules)}
        return {"method": tune.method, "base": str(self.config.init_from), "dtype": tune.base, "trained": trained,
                **(lora if tune.method == "lora" else {})}


def score_guard(model: Model, tokenizer: Tokenizer, path: Path, chunk_len: int) -> Measured:
    """The metrics guard/loss, in nats per token, and guard/bpb, unless the tokenizer loses too much of the text."""
    tokens, lost = count_tokens(tokenizer, path, "tune.guard")
    nats = 0.0
    with bar(total=tokens, desc="guard", unit="token", leave=False) as progress:
        for chunk_tokens, chunk_nats in score_text(model, tokenizer, path, [tokenizer.end_of_text], chunk_len):
            nats += chunk_nats
            progress.update(chunk_tokens)
    score = TextScore(tokens, lost.of, nats, lost).as_dict()
    metrics = {"guard/loss": score["loss"], "guard/bpb": score["bits_per_byte"]}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _validation(trainer: lightning.Trainer, task: LanguageModel) -> Measured:
    """Validates, as Lightning's own loop does, and returns the metrics."""
    task.on_validation_epoch_start()
    batches = bar(iterable=trainer.val_dataloaders or (), desc="validating", unit="batch", leave=False, disable=rank() > 0)
    for number, batch in enumerate(batches):
        on_device = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        trainer.strategy.validation_step(on_device, number)
    return task.validation_metrics()


def compared(trainer: lightning.Trainer) -> list[str]:
    """Lines on the losses before and after tuning; empty without tuning."""
    return [callback.describe() for callback in trainer.callbacks          # type: ignore[attr-defined]
            if isinstance(callback, BeforeAfter) and callback.after is not None]
