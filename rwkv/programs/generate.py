"""Generates text from a checkpoint to standard output.

  python generate.py prompt="def main"                  from the latest run
  python generate.py checkpoint=DIRECTORY prompt=...   Hugging Face's or a run's
  python generate.py checkpoint=FILE.pth tokenizer=FILE.json dtype=int8
  python generate.py prompts=FILE num_samples=3 seed=7 out=SAMPLES.jsonl
  python generate.py prompt="User: hi" stop="User:" save_state=chat.safetensors
  python generate.py state=chat.safetensors prompt=" and then?"
  python generate.py prompt="A person as JSON: " json_schema=FILE.json
  cat story.txt | python generate.py prompt=- seed=1

Texts and paths are taken verbatim: commas, quotes and equals signs need no
escaping. On Linux, GOMP_SPINCOUNT is set as train.py --help explains.
"""

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from kernels.machine import allocator, threads
from rwkv import cli
from rwkv.cli.garbage import without_garbage_collection
from rwkv.config import GenerateConfig
from rwkv.io.broken_pipe import abandon, discard_when_unread, raise_unwritten
from rwkv.io.lines import wrap_text
from rwkv.programs.sampling import ChosenSampling, SamplingChoice

if TYPE_CHECKING:
    from rwkv.generation.draft import Draft
    from rwkv.generation.prefix_cache import PrefillResult
    from rwkv.pretrained import RWKV
    from rwkv.tokenizer.tokenizers import Tokenizer


def generate(config: GenerateConfig, line: cli.CommandLine) -> None:
    allocator.keep_large_blocks()
    model, tokenizer, prompts, context, chosen, draft = _open(config, line)

    from rwkv.generation.decoder import decoding_line
    from rwkv.programs.generate_results import run_generation

    files = config.out or config.save_state
    # The files must be completed even if nobody reads the output
    output = discard_when_unread(sys.stdout) if files else sys.stdout
    with redirect_stdout(output):
        try:
            completed = run_generation(model, tokenizer, config, prompts, context, chosen.sampling, chosen.stop, draft)
        except BrokenPipeError:          # the reader of standard output has gone, as in: generate.py | head
            abandon(sys.stdout)
            return
    print(wrap_text(f"sampling: {chosen}", sys.stderr), file=sys.stderr)
    print(wrap_text(decoding_line(model), sys.stderr), file=sys.stderr)
    raise_unwritten(output)
    if not completed:
        sys.exit(cli.INTERRUPTED)


@without_garbage_collection()
def _open(config: GenerateConfig, line: cli.CommandLine
          ) -> "tuple[RWKV, Tokenizer, list[str], PrefillResult | None, ChosenSampling, Draft | None]":
    from rwkv.checkpoint.option_files import require_files
    from rwkv.generation.options import check_config, prompts_from

    require_files(config, state=config.state)
    check_config(config)
    prompts = prompts_from(config)
    print(f"loading {config.checkpoint}", file=sys.stderr, flush=True)
    from rwkv.pretrained import open_checkpoint
    from rwkv.programs.draft import load_draft, open_draft

    opened = open_checkpoint(config)
    draft = open_draft(config, opened)
    opened.print_notes()
    chosen = SamplingChoice(config, line.keys, opened.checkpoint.path, opened.checkpoint.run).for_answers()
    if chosen.max_new_tokens is not None:
        config.max_new_tokens = chosen.max_new_tokens
    model, context = opened.model_and_context(config.state, config.state_layout)
    return model, opened.tokenizer, prompts, context, chosen, load_draft(draft, model)


def main() -> None:
    threads.wait_briefly()               # this call must precede the import of torch
    cli.run(generate, GenerateConfig, "generate", __doc__)


if __name__ == "__main__":
    main()
