"""Texts from a model in training, by which its progress can be read: a line of samples.jsonl each, and a table in W&B.

All continue the same prompt with the same random numbers, so that they differ in the weights alone. These numbers come from
a generator of their own (rwkv/generation.py): training draws the same ones with samples and without.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from rwkv.config import TrainConfig, TrainerConfig
from rwkv.formats._atomic import write_file
from rwkv.generation import generate
from rwkv.json_lines import parse
from rwkv.processes import rank
from rwkv.tokenizer import Tokenizer
from rwkv.tracking import log_samples

FILE = "samples.jsonl"

Row = dict[str, Any]                     # step, prompt, text (which continues the prompt)


class Samples(Callback):
    """After every `every` steps and after the last one; before the checkpoint of that step, which vouches for the line.

    resumed_at: the step of the checkpoint that the run continues from; lines after it are dropped, since they come again.
    paused(seconds): told how long each took. The first of several processes writes for all. Raises ValueError where the
    prompt cannot be encoded.
    """

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer, out_dir: Path, resumed_at: int | None,
                 paused: Callable[[float], None]) -> None:
        self.every, self.length, self.seed = sample_every(config.trainer), config.trainer.sample_tokens, config.seed
        self.prompt, self.tokenizer, self.path, self._paused = config.data.sample_prompt, tokenizer, out_dir / FILE, paused
        self._stepped, self._rows = 0, _rows_until(self.path, resumed_at) if resumed_at is not None else []
        tokenizer.encode(self.prompt)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._stepped = trainer.global_step
        if rank() == 0:
            write_file(self.path, lambda file: file.writelines(map(_line, self._rows)))

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if step == self._stepped:        # in the middle of an accumulation
            return
        self._stepped = step
        if rank() == 0 and (step % self.every == 0 or step >= trainer.max_steps):
            _wait_for(pl_module.device)
            since = time.perf_counter()
            text = self._text(pl_module.model, step)
            if text is not None:
                self._add({"step": step, "prompt": self.prompt, "text": text})
                log_samples(trainer.loggers, self._rows, step)
            self._paused(time.perf_counter() - since)

    def _text(self, model: Any, step: int) -> str | None:
        """None, with the reason on standard error, where none can be drawn: training goes on."""
        model.eval()
        try:
            return "".join(generate(model, self.tokenizer, self.prompt, max_new_tokens=self.length, seed=self.seed))
        except Exception as error:
            print(f"no sample at step {step}: {error}", file=sys.stderr)
            return None
        finally:
            model.train()

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        with self.path.open("ab") as file:
            file.write(_line(row))


def sample_every(config: TrainerConfig) -> int:
    """In steps; 0 for never, as where each process has but a share of the weights."""
    if config.strategy == "fsdp":
        return 0
    return config.val_every if config.sample_every is None else config.sample_every


def read_samples(path: Path) -> list[Row]:
    """Those of a run's samples.jsonl; a last line that a kill cut short is left out."""
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [parse(line, f"{path}, line {number}") for number, line in enumerate(whole.split(b"\n"), start=1) if line]


def _rows_until(path: Path, step: int) -> list[Row]:
    return [row for row in read_samples(path) if row["step"] <= step] if path.is_file() else []


def _line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _wait_for(device: torch.device) -> None:
    """For the steps that a GPU has not finished: their time is training's."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
