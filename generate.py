"""Samples text from a checkpoint: `python generate.py checkpoint=runs/latest prompt="def main"`. Options: rwkv/config.py."""

import sys
from pathlib import Path

import torch

from kernels.select import select
from rwkv import cli
from rwkv.checkpoint import Checkpoint, read_checkpoint
from rwkv.config import GenerateConfig
from rwkv.generation import generate
from rwkv.model import RWKV
from rwkv.tokenizer import Tokenizer


def main(config: GenerateConfig, line: cli.CommandLine) -> None:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    wkv = select(config.kernel.name, device)
    checkpoint = read_checkpoint(config.checkpoint)
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    model = RWKV.from_checkpoint(checkpoint, wkv, device, config.dtype)
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt or ""
    pieces = generate(model, tokenizer, prompt, config.max_new_tokens, config.temperature, config.top_k, config.top_p,
                      config.seed)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def tokenizer_of(checkpoint: Checkpoint, path: str | None) -> Tokenizer:
    if path is not None:
        return Tokenizer.from_file(Path(path))
    if checkpoint.tokenizer is None:
        raise ValueError(f"{checkpoint.path} carries no tokenizer: name its file with tokenizer=FILE.json")
    return Tokenizer.from_dict(checkpoint.tokenizer)


if __name__ == "__main__":
    cli.run(main, GenerateConfig, "generate")
