"""Samples text from a checkpoint: `python generate.py checkpoint=runs/latest prompt="def main"`. Options: rwkv/config.py."""

import sys

import torch

from kernels.select import select
from rwkv import cli
from rwkv.checkpoint import read_checkpoint
from rwkv.checkpoint_tokenizer import tokenizer_of
from rwkv.config import GenerateConfig
from rwkv.generation import generate
from rwkv.model import RWKV


def main(config: GenerateConfig, line: cli.CommandLine) -> None:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    wkv = select(config.kernel.name, device, getattr(torch, config.dtype))
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


if __name__ == "__main__":
    cli.run(main, GenerateConfig, "generate")
