"""Measures what tuning gains and breaks: the losses and answers of a tuned run before its first step and after its last step.

The losses are those of the validation split and of the text of tune.guard, which is scored as one sequence
(rwkv/evaluation.py). The answers are greedy continuations of prompts from the validation split. Loggers receive val/loss,
val/bpb, guard/loss and guard/bpb at step 0 and at the last step. The file out_dir/tuned.json holds all results for the report.

A checkpoint holds the results from before training, so a resumed run does not measure them again. Each measurement restores the
random generators, so training is the same with and without this callback.
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
from rwkv.io.atomic import require_folder, write_file
from rwkv.io.json_types import JsonObject, StateDict
from rwkv.io.lines import count_of, labelled_line
from rwkv.model.base import Model
from rwkv.model.lora import layers_to_adapt
from rwkv.report.run_files import TUNED
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.callbacks.progress_bar import bar
from rwkv.training.task import LanguageModel
from rwkv.training.tuning.guard import guard_path, sha256_of
from rwkv.training.tuning.held_out import generate_continuations, select_prompts, visible_text

Measurement = dict[str, float]           # maps metric names and "step" to values


class BeforeAfter(Callback):
    """A callback that measures losses and answers before and after training.

    This callback must precede Checkpoints in the list of callbacks, so that the last checkpoint holds all results. Rank 0 alone
    scores the guard text and generates the answers. `exclude` is called with the seconds of the measurement before training.
    """

    def __init__(self, config: TrainConfig, data: Corpus, out_dir: Path, exclude: Callable[[float], None]) -> None:
        self.config = config
        self.tokenizer = data.tokenizer
        self.path = out_dir / TUNED
        self.guard = guard_path(config)
        self.guard_sha256 = sha256_of(self.guard)
        self.before: Measurement | None = None
        self.after: Measurement | None = None
        can_sample = config.trainer.sample_tokens > 0 and config.trainer.strategy != "fsdp"
        self.prompts = select_prompts(data, config.model.ctx_len, config.trainer.sample_tokens) if can_sample else []
        self.answers: dict[str, list[str]] = {}          # maps "before" and "after" to one answer per prompt
        self._exclude = exclude

    def state_dict(self) -> StateDict:
        return {"guard": self.guard_sha256, "before": self.before, "after": self.after, "answers": self.answers}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Raises UserError if the text of tune.guard has changed since the run started."""
        if state_dict["guard"] != self.guard_sha256:
            raise UserError(f"the text of tune.guard={self.config.tune.guard} has changed since the run started, so the losses "
                            "before and after training cannot be compared. Restore the text, then resume the run")
        self.before, self.after, self.answers = state_dict["before"], state_dict["after"], state_dict["answers"]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.global_step < trainer.max_steps:      # the user may have extended a finished run
            self.after = None
            self.answers.pop("after", None)
        if self.before is not None:
            self._write(cast(LanguageModel, pl_module))
        elif trainer.global_step:
            log("guard      losses are not compared, because they were not measured before the first step")

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Measures before the first step. on_train_start would be too early: StopCleanly installs its signal handlers there."""
        if trainer.global_step or self.before is not None:
            return
        start = time.perf_counter()
        self._announce("before")
        task = cast(LanguageModel, pl_module)
        gpus = [task.device] if task.device.type == "cuda" else []
        task.eval()
        with torch.random.fork_rng(gpus), torch.no_grad():
            self.before = self._measure(trainer, task, "before", _validation_metrics(trainer, task))
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
        """Returns a line with the losses before and after training, for the end of the run."""
        assert self.before is not None
        assert self.after is not None
        names = {"val/loss": "the validation split", "guard/loss": f"tune.guard={self.config.tune.guard}"}
        changes = [f"{subject} {self.before[name]:.4f} before, {self.after[name]:.4f} after"
                   for name, subject in names.items() if name in self.before and name in self.after]
        objective_note = "; the loss of the validation split is the objective, per pair" if self.config.tune.prefers else ""
        return f"nats per token: {'; '.join(changes)}{objective_note}"

    def _announce(self, when: str) -> None:
        if rank() == 0:
            answers = f" and {count_of(len(self.prompts), 'answer')}" if self.prompts else ""
            tqdm.write(labelled_line("measuring", f"the losses{answers} {when} training", sys.stderr), file=sys.stderr)

    def _measure(self, trainer: lightning.Trainer, task: LanguageModel, when: str, validation: Measurement) -> Measurement:
        step = trainer.global_step
        guard: Measurement = {}
        if rank() == 0:
            if self.guard is not None:
                with trainer.precision_plugin.val_step_context():
                    guard = score_guard(task.model, self.tokenizer, self.guard, self.config.model.ctx_len)
            self._store_answers(task.model, when)
        for logger in trainer.loggers:
            logger.log_metrics((validation if when == "before" else {}) | guard, step)
        return {"step": step} | validation | guard

    def _store_answers(self, model: Model, when: str) -> None:
        if not self.prompts:
            return
        try:
            self.answers[when] = generate_continuations(model, self.tokenizer, self.config, self.prompts)
        except Exception as error:       # training must not end because no answers can be generated
            print(f"cannot generate answers {when} training: {error}", file=sys.stderr)

    def _write(self, task: LanguageModel) -> None:
        if rank() > 0:
            return
        samples = [{"prompt": visible_text(self.tokenizer, prompt.ids),
                    "reference": visible_text(self.tokenizer, prompt.reference),
                    **{when: texts[number] for when, texts in self.answers.items()}}
                   for number, prompt in enumerate(self.prompts)] if self.answers else []
        measured = {"before": self.before, "after": self.after}
        content = {"tuned": self._tuning_summary(task.model), "guard": self.config.tune.guard if self.guard else None,
                   **{when: losses for when, losses in measured.items() if losses}, "samples": samples}
        text = json.dumps(content, ensure_ascii=False)
        require_folder(self.path.parent)
        # In a path that is not UTF-8, backslashreplace writes JSON's escapes
        write_file(self.path, lambda file: file.write(text.encode(errors="backslashreplace")))

    def _tuning_summary(self, model: Model) -> JsonObject:
        tune = self.config.tune
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        lora = {"rank": tune.rank, "alpha": tune.alpha, "modules": layers_to_adapt(model.config, tune.modules)}
        return {"method": tune.method, "base": str(self.config.init_from), "dtype": tune.base, "trained": trained,
                **(lora if tune.method == "lora" else {})}


def score_guard(model: Model, tokenizer: Tokenizer, path: Path, chunk_len: int) -> Measurement:
    """Returns the metrics guard/loss, in nats per token, and guard/bpb of the text in the file `path`.

    guard/bpb is missing if the tokenizer loses too much of the text.
    """
    tokens, lost = count_tokens(tokenizer, path, "tune.guard")
    nats = 0.0
    with bar(total=tokens, desc="guard", unit="token", leave=False) as progress:
        for chunk_tokens, chunk_nats in score_text(model, tokenizer, path, [tokenizer.end_of_text], chunk_len):
            nats += chunk_nats
            progress.update(chunk_tokens)
    score = TextScore(tokens, lost.of, nats, lost).as_dict()
    metrics = {"guard/loss": score["loss"], "guard/bpb": score["bits_per_byte"]}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _validation_metrics(trainer: lightning.Trainer, task: LanguageModel) -> Measurement:
    task.on_validation_epoch_start()
    batches = bar(iterable=trainer.val_dataloaders or (), desc="validating", unit="batch", leave=False, disable=rank() > 0)
    for number, batch in enumerate(batches):
        on_device = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
        trainer.strategy.validation_step(on_device, number)
    return task.validation_metrics()


def comparison_lines(trainer: lightning.Trainer) -> list[str]:
    """Returns the lines that compare the losses before and after tuning. The list is empty without tuning."""
    return [callback.describe() for callback in trainer.callbacks          # type: ignore[attr-defined]
            if isinstance(callback, BeforeAfter) and callback.after is not None]
