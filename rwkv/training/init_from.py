"""train.py init_from=PATH: a run that begins with a checkpoint's weights. The optimiser, the schedule and the data are new.

The sizes are the file's, and so is the tokenizer where it carries one; ctx_len, which nothing in the weights depends on, is
the run's own. What the command line says against the file is refused; what an experiment= or a debug= sets gives way.
"""

from collections.abc import Collection
from dataclasses import replace

from rwkv.checkpoint.files import Checkpoint, read_checkpoint, require_tokenizer
from rwkv.config import DataConfig, ModelConfig, TrainConfig
from rwkv.errors import CheckpointError
from rwkv.model.base import generation
from rwkv.tokenizer.tokenizers import Tokenizer

SIZES = ("n_layer", "n_embd", "n_att", "n_ffn")
MADE_FROM_DATA = ("bpe", "char")         # tokenizers that a text gives rise to: another text, another tokenizer


def begin(config: TrainConfig, given: Collection[str]) -> tuple[TrainConfig, Checkpoint, Tokenizer]:
    """The configuration with the file's sizes, the file, and the tokenizer for the data. `given`: as in open_run.

    Raises ValueError where the file cannot be read, or does not agree with what was given.
    """
    checkpoint = read_checkpoint(str(config.init_from))
    model = replace(checkpoint.config, ctx_len=config.model.ctx_len)
    _require_sizes(config.model, model, given, checkpoint)
    return replace(config, model=model), checkpoint, _tokenizer(config.data, given, checkpoint)


def _require_sizes(asked: ModelConfig, found: ModelConfig, given: Collection[str], checkpoint: Checkpoint) -> None:
    asked, found = generation(asked).resolved(asked), generation(found).resolved(found)
    for name in SIZES:
        wanted, has = getattr(asked, name), getattr(found, name)
        if wanted != has and not {"model", f"model.{name}"}.isdisjoint(given):
            raise CheckpointError(f"model.{name} is {wanted} on the command line and {has} in {checkpoint.path}: leave model= "
                                  "out, and the file's sizes are taken")


def _tokenizer(data: DataConfig, given: Collection[str], checkpoint: Checkpoint) -> Tokenizer:
    """The one that data.tokenizer names, which must be the file's, or the one that it carries."""
    if checkpoint.tokenizer is not None and "data.tokenizer" not in given:
        tokenizer, name = Tokenizer.from_dict(checkpoint.tokenizer), "the tokenizer in the file"
    elif data.tokenizer in MADE_FROM_DATA:
        remedy = "leave data.tokenizer out" if checkpoint.tokenizer else "name theirs: data.tokenizer=FILE.json, or world"
        raise CheckpointError(f"data.tokenizer={data.tokenizer} makes a tokenizer from the data, and the weights in "
                              f"{checkpoint.path} ({checkpoint.vocab_size} tokens) were trained with another: {remedy}")
    else:
        tokenizer, name = Tokenizer.named(data.tokenizer, "data.tokenizer"), f"data.tokenizer={data.tokenizer}"
    require_tokenizer(checkpoint, tokenizer, name)
    return tokenizer
