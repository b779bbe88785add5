"""Samples text from a checkpoint: `python generate.py checkpoint=runs/latest prompt="def main"`. Options: rwkv/config.py."""

import sys
from contextlib import nullcontext, redirect_stdout

from kernels import threads

if __name__ == "__main__":
    threads.wait_briefly()               # before torch is imported

import torch

from kernels.select import select
from rwkv import cli
from rwkv.checkpoint import computed_in, read_checkpoint
from rwkv.checkpoint_tokenizer import tokenizer_of
from rwkv.config import GenerateConfig
from rwkv.model import RWKV
from rwkv.state_file import load_context
from rwkv.unread import abandon, unread
from rwkv.writing import check, prompts_of, write


def main(config: GenerateConfig, line: cli.CommandLine) -> None:
    how, prompts = check(config), prompts_of(config)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    wkv = select(config.kernel.name, device, computed_in(config.dtype))
    checkpoint = read_checkpoint(config.checkpoint)
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    model = RWKV.from_checkpoint(checkpoint, wkv, device, config.dtype)
    context = load_context(config.state, model, tokenizer) if config.state else None
    files = config.out or config.save_state
    with redirect_stdout(unread(sys.stdout)) if files else nullcontext():        # these are to be whole, whoever reads
        try:
            whole = write(model, tokenizer, config, prompts, how, context)
        except BrokenPipeError:          # whoever read standard output has seen enough, as in: generate.py | head
            abandon(sys.stdout)
            return
    if not whole:
        sys.exit(cli.INTERRUPTED)


if __name__ == "__main__":
    cli.run(main, GenerateConfig, "generate")
