"""Writes the files of runs with tune=lora and tune=state, without training."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rwkv.checkpoint.files import describe, fingerprint_of, read_checkpoint


def write_run(folder: Path, base: Path, method: str, trained: dict[str, Tensor], alpha: float = 8.0, **entry: Any) -> None:
    """Writes the checkpoint of a run with tune=METHOD."""
    checkpoint = read_checkpoint(base)
    run = {"model": asdict(checkpoint.config), "init_from": str(base), "tune": {"method": method, "rank": 2, "alpha": alpha}}
    described = {**describe(run, checkpoint.vocab_size, None), "tokenizer": checkpoint.tokenizer,
                 "tokenizer_hash": checkpoint.tokenizer_hash, "base": fingerprint_of(checkpoint), **entry}
    path = folder / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": {f"model.{name}": tensor for name, tensor in trained.items()}, "timemix": described}, path)
