"""Samples text from a checkpoint: `python generate.py checkpoint=runs/latest prompt="def main"`. Options: rwkv/config.py."""

import sys
from contextlib import nullcontext, redirect_stdout

from kernels.backends import threads

if __name__ == "__main__":
    threads.wait_briefly()               # before torch is imported

import torch

from kernels.select import select
from rwkv import cli
from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import GenerateConfig
from rwkv.generation.output import check_config, prompts_from, run_generation
from rwkv.generation.states import load_context
from rwkv.io.unread import abandon, unread
from rwkv.pretrained import RWKV, computed_in, tokenizer_of


def main(config: GenerateConfig, line: cli.CommandLine) -> None:
    check_config(config)
    prompts = prompts_from(config)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    wkv = select(config.kernel.name, device, computed_in(config.dtype))
    checkpoint = read_checkpoint(config.checkpoint)
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    model = RWKV.from_checkpoint(checkpoint, wkv, device, config.dtype)
    context = load_context(config.state, model, tokenizer) if config.state else None
    files = config.out or config.save_state
    with redirect_stdout(unread(sys.stdout)) if files else nullcontext():        # these are to be whole, whoever reads
        try:
            whole = run_generation(model, tokenizer, config, prompts, context)
        except BrokenPipeError:          # whoever read standard output has seen enough, as in: generate.py | head
            abandon(sys.stdout)
            return
    if not whole:
        sys.exit(cli.INTERRUPTED)


if __name__ == "__main__":
    cli.run(main, GenerateConfig, "generate")
