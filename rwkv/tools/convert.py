"""python -m rwkv.tools.convert IN OUT [--dtype DTYPE] [--format FORMAT] [--tokenizer NAME]: Converts weights between formats.

It converts one tensor at a time, with the memory of the largest tensor; calibration needs that of the largest layer. OUT is
written atomically.
"""

import argparse
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from kernels.arguments import Parser, above_zero, from_home, path_of
from rwkv.checkpoint import formats
from rwkv.checkpoint.location import locate
from rwkv.cli import exit_on_user_error
from rwkv.config import STATE_LAYOUTS
from rwkv.errors import UserError
from rwkv.io.lines import counted
from rwkv.io.utf8 import require_file
from rwkv.tokenizer.tokenizers import Tokenizer

if TYPE_CHECKING:                        # imports PyTorch
    from rwkv.checkpoint.files import Checkpoint

# Invalid for a tuned state
WEIGHT_OPTIONS = ("dtype", "calibrate", "format", "form", "lora", "lora_alpha", "tokenizer", "end_of_text")
WITHOUT_TOKENIZER = ("pth", "ggmf")      # formats without a tokenizer

EPILOG = """IN's format is detected from its content: .pth, .ckpt, .safetensors, ggmf, GGUF, a Hugging Face or a run directory.
OUT's format is that of its suffix: .pth, .ckpt, .safetensors; .st for web-rwkv and ai00, in float16; .bin or .ggmf for
rwkv.cpp; .gguf for llama.cpp (RWKV-7); none for a Hugging Face directory. IN may also be a tuned state, for a .pth or
.st. Decays (time_decay, time_first, w0) are float32 in every dtype; ggmf supports float32 and float16; ggmf and GGUF
keep vectors in float32; q4_0 to q8_0 require GGUF, and int8 and int4 require .safetensors, which all programs here read.
llama.cpp requires the tokenizer in the file.
"""
DTYPES = ("float32", "float16", "bfloat16", *chain(*formats.QUANTISED.values()))     # as in stored.py, which imports PyTorch


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with exit_on_user_error():
        locate(options.source)           # checks before PyTorch, which takes seconds to import
        format = options.format or formats.by_suffix(options.target)
        if options.tokenizer is not None:
            Tokenizer.check_named(options.tokenizer, "--tokenizer")
        if options.lora is not None:
            locate(options.lora)
        elif options.lora_alpha is not None:
            raise UserError("--lora-alpha requires an adapter, --lora")
        if options.calibrate is not None:
            _require_calibration(options.calibrate, options.dtype, format)
        if _is_state(options):
            convert_state(options.source, options.target, options.state_layout)
            return
        command = shlex.join(["timemix", "convert", *(arguments or sys.argv[1:])])
        convert(options.source, options.target, options.dtype, format, options.tokenizer, options.end_of_text,
                options.form, options.lora, options.lora_alpha, command, options.by_input, options.calibrate)


def _require_calibration(text: Path, dtype: str | None, format: str) -> None:
    """Raises UserError unless --calibrate has a readable text, --dtype int4 and .safetensors."""
    if (format, dtype) != ("safetensors", "int4"):
        raise UserError(f"--calibrate requires --dtype int4 and .safetensors; got {dtype or 'no --dtype'} and {format}")
    require_file(text, "--calibrate")


def _is_state(options: argparse.Namespace) -> bool:
    """Whether IN is a tuned state. Raises UserError for options that require weights, or a state, if IN is the other."""
    from rwkv.checkpoint import time_states

    source = locate(options.source)
    is_state = source.is_file() and time_states.is_file(source)
    weight_options = [name for name in WEIGHT_OPTIONS if getattr(options, name) is not None]
    if is_state and weight_options:
        raise UserError(f"--{weight_options[0].replace('_', '-')} requires weights; {source} is a tuned state: leave it out")
    if not is_state and options.state_layout is not None:
        raise UserError(f"--state-layout requires a tuned state; {source} has weights: leave it out")
    return is_state


def convert_state(source: Path, target: Path, layout: str | None = None) -> None:
    """Writes the tuned state at `source` to `target`: .pth, or .st for web-rwkv. layout: of `source`; None: from its form."""
    from rwkv.checkpoint import time_states

    states = time_states.read(locate(source), None, layout)
    _log(states.line)
    written = time_states.write(states, target)
    _log(f"written: {target} ({written}, {time_states.AXES[written]})")


def convert(source: Path, target: Path, dtype: str | None = None, format: str | None = None,
            tokenizer: str | None = None, end_of_text: str | None = None, form: str | None = None,
            lora: str | Path | None = None, lora_alpha: float | None = None, command: str | None = None,
            by_input: bool = False, calibrate: Path | None = None) -> None:
    """Writes the checkpoint at `source` to `target`. dtype: None keeps that of each tensor. format: None: from the suffix.

    tokenizer: the name, as in Tokenizer.named, of the tokenizer to write with the weights; None: that of `source`, if any.
    end_of_text: the end-of-text token of a .json tokenizer; None: that of `source`, or else of the file. form: of a Hugging
    Face directory of RWKV-7, one of FORMS. lora, lora_alpha: an adapter to merge, as in with_adapter. command: for the model
    card of a directory. by_input: as in write_checkpoint. calibrate: a text for which int4 in .safetensors is rounded.
    """
    from rwkv.checkpoint.files import read_checkpoint, tokenizer_of, with_adapter, write_checkpoint
    from rwkv.model.base import generation, n_parameters

    name = format or formats.by_suffix(target)
    checkpoint = read_checkpoint(source)
    if lora is not None:
        checkpoint = with_adapter(checkpoint, lora, lora_alpha)
    if tokenizer is not None or end_of_text is not None:
        chosen = tokenizer_of(checkpoint, tokenizer, end_of_text, "--tokenizer")
        checkpoint = replace(checkpoint, tokenizer=chosen.to_dict(), tokenizer_hash=chosen.hash)
    for note in checkpoint.notes:
        _log(f"WARNING: {note}")
    if checkpoint.begins:
        _log(checkpoint.begins)
    config = checkpoint.config
    _log(f"{checkpoint.path}: {generation(config).NAME}, {counted(config.n_layer, 'layer')}, {config.n_embd} wide, "
         f"{n_parameters(config, checkpoint.vocab_size):,} parameters, vocabulary {checkpoint.vocab_size}")
    if checkpoint.unadapted:
        _log(_adapter_line(checkpoint, dtype))
    with suppress(UserError):            # the end-of-text token may be unknown
        if checkpoint.tokenizer and (end := tokenizer_of(checkpoint).end_line()):
            _log(f"sequences end with {end}")
    if calibrate is not None:
        checkpoint = _calibrated(checkpoint, calibrate, tokenizer)
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True, delay=0.5, file=sys.stderr) as bar:
        def progress(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        write_checkpoint(checkpoint, target, dtype, name, progress, form, str(source), command, by_input)
    _log(f"written: {target} ({name})")
    if checkpoint.tokenizer and name in WITHOUT_TOKENIZER:
        _log(f"the tokenizer is not in {target}: the format {name} has none")


def _calibrated(checkpoint: "Checkpoint", text: Path, tokenizer: str | None) -> "Checkpoint":
    """The checkpoint with matrices rounded for a text, of which a line says what is read and how they are rounded."""
    from rwkv.checkpoint.calibration import calibrated, describe, read_ids
    from rwkv.checkpoint.files import tokenizer_of

    if checkpoint.packed:
        dtype = next(iter(checkpoint.packed.values())).dtype
        raise UserError(f"--calibrate requires weights that are not packed; {checkpoint.path} has them in {dtype}: convert the "
                        "original")
    ids = read_ids(text, tokenizer_of(checkpoint, tokenizer, option="--tokenizer"))
    result = calibrated(checkpoint, ids)
    _log(f"int4, calibrated on the first {ids.numel():,} tokens of {text}: {describe(result)}")
    return result


def _adapter_line(checkpoint: "Checkpoint", dtype: str | None) -> str:
    from rwkv.checkpoint.tuned import surviving

    merged = f"adapters merged into the weights of {counted(len(checkpoint.unadapted), 'layer')}"
    if dtype in (None, "float32"):
        return f"{merged}, in float32"
    return f"{merged} and rounded to {dtype}: {surviving(checkpoint, str(dtype)):.0%} of their training survives"


def _parser() -> Parser:
    epilog = f"{EPILOG}\nDTYPE is one of {', '.join(DTYPES)}; FORM is one of {', '.join(formats.FORMS)}."
    parser = Parser("rwkv.tools.convert", (__doc__ or "").partition(": ")[2], epilog)
    parser.add_argument("source", metavar="IN", type=path_of, help="the checkpoint to read: a file or a directory")
    parser.add_argument("target", metavar="OUT", type=path_of, help="the file or the directory to write")
    parser.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help="default: that of each tensor")
    parser.add_argument("--calibrate", metavar="TEXT", type=path_of, help="with --dtype int4 and .safetensors: round the "
                        "weights for what the model computes on this UTF-8 text (its first 8,192 tokens): half the loss, in "
                        "4.5 bits instead of 5; minutes for a large model")
    parser.add_argument("--by-input", action="store_true", help="with --dtype bfloat16 and .safetensors: store ffn.value by "
                        "input, for faster decoding on a CPU, by this program alone")
    parser.add_argument("--format", choices=formats.names(), help="default: from OUT's suffix")
    parser.add_argument("--form", choices=formats.FORMS, metavar="FORM", help="layout of a Hugging Face directory "
                        f"of RWKV-7: {', '.join(formats.FORMS)}; default: fla")
    parser.add_argument("--lora", metavar="PATH", type=from_home,
                        help="another program's LoRA adapter to merge: a PEFT directory or an RWKV-PEFT file")
    parser.add_argument("--lora-alpha", metavar="NUMBER", type=above_zero,
                        help="alpha of an adapter whose file lacks it")
    parser.add_argument("--state-layout", choices=STATE_LAYOUTS, metavar="LAYOUT", help="layout of a tuned state IN that does "
                        f"not say: {' or '.join(STATE_LAYOUTS)}")
    parser.add_argument("--tokenizer", metavar="NAME", type=from_home,
                        help="tokenizer to write: world, FILE.json or FILE.txt; default: IN's")
    parser.add_argument("--end-of-text", metavar="TEXT", help="end-of-text token of FILE.json; default: IN's or FILE.json's")
    return parser


def _log(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
