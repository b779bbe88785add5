"""Generates samples during training, and stores each as a line of samples.jsonl and a row of a table in W&B.

All samples continue the same prompt with the same seed, so only the weights differ. Sampling has its own random generator
(rwkv/generation/engine.py), so training draws the same random numbers with and without samples.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT

from rwkv.config import TrainConfig, TrainerConfig
from rwkv.distributed import rank
from rwkv.errors import UserError
from rwkv.generation.engine import generate
from rwkv.io.atomic import append, write_file
from rwkv.io.json_types import JsonObject
from rwkv.model.base import Model
from rwkv.report.run_files import SAMPLES, read_samples
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.loggers import log_samples

Row = JsonObject                         # has the keys step, prompt and text; text is the continuation


class Samples(Callback):
    """A callback that generates a sample in rank 0 at regular steps and after the last step.

    The sample is stored before the step's checkpoint. Raises UserError if the prompt cannot be encoded.

    Args:
        resumed_at: the step of the checkpoint that the run resumes from. Samples of later steps are dropped, because the run
            repeats these steps.
        exclude: called with the seconds that each sample takes.
    """

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, out_dir: Path, resumed_at: int | None,
                 exclude: Callable[[float], None]) -> None:
        self.every = sample_every(config.trainer)
        self.length = config.trainer.sample_tokens
        self.seed = config.seed
        self.prompt = config.data.sample_prompt
        self.tokenizer = tokenizer
        self.path = out_dir / SAMPLES
        self._exclude = exclude
        self._rows: list[Row] = []
        if resumed_at is not None:
            self._rows = [row for row in read_samples(self.path) if row["step"] <= resumed_at]
        try:                             # a prompt that cannot be encoded must raise before the first step
            tokenizer.encode(self.prompt)
        except ValueError as error:
            raise UserError(f"data.sample_prompt= cannot be encoded: {error}") from None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if rank() == 0:
            write_file(self.path, lambda file: file.writelines(map(_line, self._rows)))

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: STEP_OUTPUT,
                           batch: object, batch_idx: int) -> None:
        step = trainer.global_step
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if rank() == 0 and (step % self.every == 0 or step >= trainer.max_steps):
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)         # unfinished steps must count as training time
            start = time.perf_counter()
            text = self._generate_sample(cast(Model, pl_module.model), step)
            if text is not None:
                self._rows.append({"step": step, "prompt": self.prompt, "text": text})
                append(self.path, _line(self._rows[-1]))
                log_samples(trainer.loggers, self._rows, step)
            self._exclude(time.perf_counter() - start)

    def _generate_sample(self, model: Model, step: int) -> str | None:
        model.eval()
        try:
            return "".join(generate(model, self.tokenizer, self.prompt, max_new_tokens=self.length, seed=self.seed))
        except Exception as error:       # training must not end because no sample can be generated
            print(f"cannot generate a sample at step {step}: {error}", file=sys.stderr)
            return None
        finally:
            model.train()


def sample_every(config: TrainerConfig) -> int:
    """Returns the number of steps between samples, or 0 for none. With fsdp there are none: no process has all weights."""
    if config.strategy == "fsdp":
        return 0
    return config.val_every if config.sample_every is None else config.sample_every


def _line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
