"""Writes the model card of a run as README.md in the run's directory and in adapter/.

The card gives the base model, the data, the commands, the losses, the licence, and the commands that load the model.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import join, quote

from torch import Tensor

from rwkv.checkpoint import card
from rwkv.data.prepare import Corpus
from rwkv.io import hub
from rwkv.io.atomic import write_file
from rwkv.model.base import generation
from rwkv.training.run.directory import Run


def command() -> str:
    return join(["timemix", "train", *sys.argv[1:]])


def write_card(run: Run, data: Corpus, metrics: Mapping[str, Tensor], compared: Sequence[str]) -> None:
    """Writes the cards at the end of a run. In a resumed run, the earlier commands come from the earlier card.

    Args:
        metrics: the metrics of the last validation.
        compared: the lines that compare the losses before and after tuning.
    """
    config, file = run.config, run.out_dir / card.FILE
    method = config.tune.method
    losses = list(compared)
    if "val/loss" in metrics:
        bits = f", val/bpb {float(metrics['val/bpb']):.4f}" if "val/bpb" in metrics else ""
        losses.append(f"after {config.trainer.max_steps:,} steps: val/loss {float(metrics['val/loss']):.4f}{bits}")
    name = run.out_dir.name
    base = config.init_from
    loads = card.loading_commands(name)
    if method == "state":
        loads.insert(0, f"timemix generate {quote(f'checkpoint={base}')} {quote(f'state={name}/state.safetensors')} prompt=...")
    base_path = None if base is None else hub.local(base) if hub.parse(base) else Path(base)
    commands = card.commands_in(file)
    tags = ("rwkv", generation(config.model).NAME.lower().replace("-", ""), *([method] if method != "full" else []))
    content = card.Card(name, base, None if base_path is None else card.licence_of(base_path),
                        [f"{data.source}; SHA-256 {data.sha256}"], losses,
                        commands if command() in commands else [*commands, command()], loads, tags)
    _write(file, str(content))
    adapter = run.out_dir / "adapter"
    if adapter.is_dir():
        path = json.dumps(f"{name}/adapter", ensure_ascii=False)
        loads = [f"timemix generate {quote(f'checkpoint={base}')} {quote(f'lora={name}/adapter')} prompt=...",
                 f"PeftModel.from_pretrained(model, {path})        # from peft import PeftModel; names as in a .pth"]
        _write(adapter / card.FILE, str(replace(content, title=f"{name}: adapter", loads=loads)))


def _write(file: Path, text: str) -> None:
    # A card that the user wrote is kept
    if not file.exists() or card.is_ours(file):
        write_file(file, lambda opened: opened.write(text.encode(errors="backslashreplace")))     # a path may not be UTF-8
