"""python -m rwkv.tools.convert IN OUT [--dtype DTYPE] [--format FORMAT] [--tokenizer NAME]: Converts weights between formats.

One tensor at a time is converted, so memory is needed only for the largest tensor; --calibrate needs memory for one layer. OUT
is written atomically.
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
from rwkv.chat.metadata import not_in_gguf
from rwkv.checkpoint import formats
from rwkv.checkpoint.location import FOLDER, locate
from rwkv.cli import exit_on_user_error
from rwkv.cli.recipe import RUN_FILE
from rwkv.config import STATE_LAYOUTS
from rwkv.errors import UserError
from rwkv.io.lines import count_of
from rwkv.io.output_file import require_other_file
from rwkv.io.utf8 import require_file
from rwkv.tokenizer.tokenizers import Tokenizer

if TYPE_CHECKING:                        # files.py imports PyTorch
    from rwkv.checkpoint.files import Checkpoint

# These options apply to weights only
WEIGHT_OPTIONS = ("dtype", "calibrate", "format", "layout", "lora", "lora_alpha", "tokenizer", "end_of_text", "by_input")
WITHOUT_TOKENIZER = ("pth", "ggmf")      # these formats cannot contain a tokenizer
READ_WITH_TOKENIZER = ("gguf", "huggingface")            # other programs take the tokenizer from files in these formats

EPILOG = """IN's format is detected from its content: .pth, .ckpt, .safetensors, ggmf, GGUF, a Hugging Face or a run directory.
OUT's suffix chooses the format: .pth, .ckpt, .safetensors; .st for web-rwkv and ai00, in float16; .bin or .ggmf for
rwkv.cpp; .gguf for llama.cpp (RWKV-7); none for a Hugging Face directory. IN may also be a tuned state; then OUT must be
.pth or .st. Decays (time_decay, time_first, w0) are float32 in every dtype; ggmf supports float32 and float16; ggmf and GGUF
keep vectors in float32; q4_0 to q8_0 require GGUF, and int8 and int4 require .safetensors, which all programs here read.
llama.cpp requires the tokenizer in the file.
"""
DTYPES = ("float32", "float16", "bfloat16", *chain(*formats.QUANTISED.values()))  # lazy_tensors.py imports PyTorch


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with exit_on_user_error():
        locate(options.source)           # reports an error before PyTorch is imported, which takes seconds
        if str(options.target) == "-":
            raise UserError("OUT must be a file or a folder; got -: standard output is not supported")
        format = options.format or formats.by_suffix(options.target)
        if options.tokenizer is not None:
            Tokenizer.check_named(options.tokenizer, "--tokenizer")
        if options.lora is not None:
            locate(options.lora)
        elif options.lora_alpha is not None:
            raise UserError("--lora-alpha requires --lora")
        if options.calibrate is not None:
            _require_calibration_options(options.calibrate, options.dtype, format)
        require_other_file("OUT", options.target, (options.lora, options.tokenizer, options.calibrate))
        _require_no_training_checkpoint(options.target)
        if _is_state(options):
            convert_state(options.source, options.target, options.state_layout)
            return
        command = shlex.join(["timemix", "convert", *(arguments or sys.argv[1:])])
        convert(options.source, options.target, options.dtype, format, options.tokenizer, options.end_of_text,
                options.layout, options.lora, options.lora_alpha, command, options.by_input, options.calibrate)


def _require_no_training_checkpoint(target: Path) -> None:
    path = target.resolve()
    if path.exists() and path.parent.name == FOLDER and (path.parents[1] / RUN_FILE).is_file():
        raise UserError(f"OUT={target} is a checkpoint of a run, which could not be resumed from the weights alone: choose a "
                        "different file")


def _require_calibration_options(text: Path, dtype: str | None, format: str) -> None:
    if (format, dtype) != ("safetensors", "int4"):
        raise UserError(f"--calibrate requires --dtype int4 and .safetensors; got {dtype or 'no --dtype'} and {format}")
    require_file(text, "--calibrate")


def _is_state(options: argparse.Namespace) -> bool:
    """Returns True if IN is a tuned state. Raises UserError for an option of weights with a state, or the reverse."""
    from rwkv.checkpoint import time_states

    source = locate(options.source)
    is_state = source.is_file() and time_states.is_file(source)
    weight_options = [name for name in WEIGHT_OPTIONS if getattr(options, name) not in (None, False)]
    if is_state and weight_options:
        raise UserError(f"--{weight_options[0].replace('_', '-')} requires weights, but {source} is a tuned state: omit the "
                        "option")
    if not is_state and options.state_layout is not None:
        raise UserError(f"--state-layout requires a tuned state, but {source} contains weights: omit the option")
    return is_state


def convert_state(source: Path, target: Path, layout: str | None = None) -> None:
    """Converts the tuned state `source` to `target`, a .pth or, for web-rwkv, an .st.

    `layout` is the layout of `source`; None infers it from the file format.
    """
    from rwkv.checkpoint import time_states

    states = time_states.read(locate(source), None, layout)
    _log(states.line)
    written_layout = time_states.write(states, target)
    _log(f"written: {target} ({written_layout}, {time_states.AXES[written_layout]})")


def convert(source: Path, target: Path, dtype: str | None = None, format: str | None = None,
            tokenizer: str | None = None, end_of_text: str | None = None, layout: str | None = None,
            lora: str | Path | None = None, lora_alpha: float | None = None, command: str | None = None,
            by_input: bool = False, calibrate: Path | None = None) -> None:
    """Converts the checkpoint `source` to `target`.

    Args:
        dtype: the dtype to write; None keeps each tensor's dtype.
        format: the name of target's format; None infers it from the suffix.
        tokenizer: the tokenizer to write with the weights, a name as in Tokenizer.named; by default the source's tokenizer, or
            else, in the formats READ_WITH_TOKENIZER, the one that the programs assume (assumed_tokenizer).
        end_of_text: the end-of-text token of a .json tokenizer; by default the one that the source or else the tokenizer's
            file states.
        layout: the layout of an RWKV-7 Hugging Face directory, one of LAYOUTS.
        lora: an adapter to merge.
        lora_alpha: the adapter's alpha if its file lacks one.
        command: the conversion command, for the model card.
        by_input: stores matrices with sparse inputs transposed, as in write_checkpoint.
        calibrate: a text file on which int4 in .safetensors is calibrated.
    """
    from rwkv.checkpoint.files import (
        WITH_TEMPLATES,
        assumed_tokenizer,
        read_checkpoint,
        texts_beside,
        tokenizer_of,
        with_adapter,
        write_checkpoint,
    )
    from rwkv.model.base import generation, n_parameters

    name = format or formats.by_suffix(target)
    if calibrate is not None:
        _require_calibration_options(calibrate, dtype, name)
    checkpoint = read_checkpoint(source)
    if calibrate is not None:
        _require_unpacked(checkpoint)
    _warn_of_second_rounding(checkpoint, dtype)
    if lora is not None:
        checkpoint = with_adapter(checkpoint, lora, lora_alpha)
    assumed = assumed_tokenizer(checkpoint) if tokenizer is None and name in READ_WITH_TOKENIZER else None
    chosen = None
    if tokenizer is not None or end_of_text is not None:
        chosen = tokenizer_of(checkpoint, tokenizer, end_of_text, "--tokenizer")
    elif assumed:
        with suppress(UserError):        # the vocabulary is not installed: the last line of output says what the file lacks
            chosen = tokenizer_of(checkpoint, option="--tokenizer")
    if chosen is not None:
        checkpoint = replace(checkpoint, tokenizer=chosen.to_dict(), tokenizer_hash=chosen.hash)
    for note in checkpoint.notes:
        _log(f"WARNING: {note}")
    if checkpoint.state_note:
        _log(checkpoint.state_note)
    config = checkpoint.config
    _log(f"{checkpoint.path}: {generation(config).NAME}, {count_of(config.n_layer, 'layer')}, {config.n_embd} wide, "
         f"{n_parameters(config, checkpoint.vocab_size):,} parameters, vocabulary {checkpoint.vocab_size}")
    if assumed and chosen is not None:
        _log(f"tokenizer: {assumed} (guessed from the vocabulary size, {checkpoint.vocab_size:,})")
    if checkpoint.unadapted:
        _log(_adapter_line(checkpoint, dtype))
    with suppress(UserError):            # an unknown end-of-text token is not an error here
        if checkpoint.tokenizer and (end := tokenizer_of(checkpoint).end_line()):
            _log(f"sequences end with {end}")
    if calibrate is not None:
        checkpoint = _calibrate(checkpoint, calibrate)
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True, delay=0.5, file=sys.stderr) as bar:
        def progress(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        write_checkpoint(checkpoint, target, dtype, name, progress, layout, str(source), command, by_input)
    _log(f"written: {target} ({name})")
    texts = texts_beside(checkpoint)
    lost = [*texts] if name not in WITH_TEMPLATES else not_in_gguf(texts) if name == "gguf" else []
    if lost:
        _log(f"{target} does not contain {', '.join(lost)} of {source}: the format {name} cannot store them")
    if checkpoint.tokenizer and name in WITHOUT_TOKENIZER:
        _log(f"{target} does not contain the tokenizer: the format {name} cannot store a tokenizer")
    if not checkpoint.tokenizer and name in READ_WITH_TOKENIZER:
        _log(f"{target} does not contain a tokenizer, which other programs require: --tokenizer=NAME adds one")


def _require_unpacked(checkpoint: "Checkpoint") -> None:
    """Raises UserError if the weights are packed in int8 or int4."""
    if checkpoint.packed:
        dtype = next(iter(checkpoint.packed.values())).dtype
        raise UserError(f"--calibrate requires unpacked weights, but {checkpoint.path} has {dtype} weights: pass the "
                        "checkpoint that this file was converted from")


def _warn_of_second_rounding(checkpoint: "Checkpoint", dtype: str | None) -> None:
    """Prints a warning if the file's matrices are quantised, and `dtype` quantises them in another way."""
    from rwkv.pretrained import REQUANTISED

    packed, blocks = checkpoint.packed.get(REQUANTISED), checkpoint.weights.stored[REQUANTISED].blocks
    source = packed.dtype if packed else blocks and blocks.lower()
    if source and dtype is not None and dtype in chain(*formats.QUANTISED.values()) and source != dtype:
        _log(f"WARNING: {checkpoint.path} is quantised ({source}), and {dtype} rounds the weights a second time. To "
             "avoid this, pass the checkpoint that this file was converted from")


def _calibrate(checkpoint: "Checkpoint", text: Path) -> "Checkpoint":
    from rwkv.checkpoint.calibration import calibrate, describe, read_ids
    from rwkv.checkpoint.files import tokenizer_of

    ids = read_ids(text, tokenizer_of(checkpoint, option="--tokenizer"))
    result = calibrate(checkpoint, ids)
    _log(f"int4, calibrated on {ids.numel():,} tokens of {text}: {describe(result)}")
    return result


def _adapter_line(checkpoint: "Checkpoint", dtype: str | None) -> str:
    from rwkv.checkpoint.tuned import surviving_fraction

    merged = f"adapters merged into {count_of(len(checkpoint.unadapted), 'linear layer')}"
    if dtype in (None, "float32"):
        return f"{merged}, in float32"
    survives = surviving_fraction(checkpoint.weights.stored, checkpoint.unadapted, str(dtype))
    return f"{merged} and rounded to {dtype}: {survives:.0%} of their training survives"


def _parser() -> Parser:
    epilog = f"{EPILOG}\nDTYPE is one of {', '.join(DTYPES)}."
    parser = Parser("rwkv.tools.convert", (__doc__ or "").partition(": ")[2], epilog)
    parser.add_argument("source", metavar="IN", type=path_of, help="the checkpoint to read: a file or a directory")
    parser.add_argument("target", metavar="OUT", type=path_of, help="the file or the directory to write")
    parser.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help="default: the dtype of each tensor in IN")
    parser.add_argument("--calibrate", metavar="TEXT", type=path_of, help="a UTF-8 text: rounds the weights so that the "
                        "model's results on the text's first 8,192 tokens change least; loses about half as much as int4 "
                        "without a text, in about 4.6 bits per weight instead of 5; takes minutes for a large model; requires "
                        "--dtype int4 and .safetensors")
    parser.add_argument("--by-input", action="store_true", help="store ffn.value transposed, as in int8, for faster "
                        "decoding on a CPU; requires --dtype bfloat16 and .safetensors; only this project reads such files")
    parser.add_argument("--format", choices=formats.names(), help="default: from OUT's suffix")
    parser.add_argument("--layout", choices=formats.LAYOUTS, metavar="LAYOUT", help="layout of a Hugging Face directory "
                        f"of RWKV-7: {', '.join(formats.LAYOUTS)}; default: fla")
    parser.add_argument("--lora", metavar="PATH", type=from_home,
                        help="another program's LoRA adapter to merge: a PEFT directory or an RWKV-PEFT file")
    parser.add_argument("--lora-alpha", metavar="NUMBER", type=above_zero,
                        help="LoRA's alpha, if the adapter's file does not state it")
    parser.add_argument("--state-layout", choices=STATE_LAYOUTS, metavar="LAYOUT", help="layout of a tuned state IN, if the "
                        f"layout cannot be inferred: {' or '.join(STATE_LAYOUTS)}")
    parser.add_argument("--tokenizer", metavar="NAME", type=from_home,
                        help="tokenizer to write: world, FILE.json or FILE.txt; default: IN's, or "
                        "else, in a GGUF file or a directory, world if the vocabulary has 65,536 tokens")
    parser.add_argument("--end-of-text", metavar="TEXT", help="end-of-text token of FILE.json; default: IN's or FILE.json's")
    return parser


def _log(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
