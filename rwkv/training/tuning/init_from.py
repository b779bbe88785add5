"""train.py init_from=PATH: a new run with the weights of a checkpoint. Its optimiser, schedule and data are its own.

The checkpoint gives the sizes, and the tokenizer if it carries one; ctx_len, on which no weight depends, is the run's own.
Options that the user gives and that contradict the checkpoint are refused; those of an experiment= or a debug= are replaced.
"""

from collections.abc import Collection
from dataclasses import replace

from rwkv.chat.names import choose_template
from rwkv.checkpoint import time_states
from rwkv.checkpoint.files import Checkpoint, assumed_tokenizer, read_checkpoint, tokenizer_of
from rwkv.config import DataConfig, ModelConfig, TrainConfig
from rwkv.distributed import log
from rwkv.errors import CheckpointError, UserError
from rwkv.io import hub
from rwkv.io.state_file import state_file
from rwkv.model.base import generation
from rwkv.model.lora import chosen
from rwkv.tokenizer.tokenizers import MADE_FROM_DATA, Tokenizer

NOT_A_SIZE = "ctx_len"                   # the option of model on which no weight depends


def open_init_checkpoint(config: TrainConfig, given: Collection[str]) -> tuple[TrainConfig, Checkpoint, Tokenizer]:
    """The configuration with the checkpoint's sizes, the checkpoint, and the tokenizer for the data.

    given: the keys that the user set on the command line. Raises CheckpointError if the file cannot be read, or if a given
    key contradicts it.
    """
    checkpoint = read_checkpoint(str(config.init_from))
    model = replace(checkpoint.config, ctx_len=config.model.ctx_len)
    _require_sizes(config.model, model, given, checkpoint)
    template = choose_template(config.data.template, str(config.init_from), checkpoint.run).template
    data = replace(config.data, template=template) if config.data.name == "chat" else config.data
    config = replace(config, model=model, data=data)
    on_hub = hub.parse(str(config.init_from)) is not None
    if on_hub or config.tune.method != "full":           # the name must mean the same file later, and in another folder
        pinned = hub.fetched(str(config.init_from)).pinned if on_hub else str(checkpoint.path.resolve())
        config = replace(config, init_from=pinned)
    if config.tune.state is not None:
        learnt = time_states.read(state_file(config.tune.state), checkpoint.config)
        checkpoint = replace(checkpoint, time_states=learnt.layers, begins=learnt.line)
    require_tunable(config, checkpoint)
    return config, checkpoint, _tokenizer(config.data, given, checkpoint)


def require_tunable(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raises UserError where tune= cannot train something beside these weights."""
    if checkpoint.time_states and config.tune.method != "state":
        raise UserError(f"{checkpoint.path} has a tuned state beside its weights: tune=state trains it on; for "
                        f"tune={config.tune.method} name the weights that it was trained with")
    if checkpoint.time_states and config.tune.prefers:
        raise UserError(f"tune.objective={config.tune.objective} compares with the weights alone, and this state begins as a "
                        "tuned one: leave the objective out, or begin without the state")
    if config.tune.method == "lora":
        chosen(config.model, config.tune.modules)
    if config.tune.method == "state" and not generation(config.model).LEARNS_STATE:
        raise UserError(f"tune=state learns the state of RWKV-7, and {checkpoint.path} is {generation(config.model).NAME}: use "
                        "tune=lora")


def _require_sizes(config: ModelConfig, found: ModelConfig, given: Collection[str], checkpoint: Checkpoint) -> None:
    wanted_sizes, found_sizes = (vars(generation(sizes).resolved(sizes)) for sizes in (config, found))
    for name, wanted in wanted_sizes.items():
        has = found_sizes[name]
        if name != NOT_A_SIZE and wanted != has and not {"model", f"model.{name}"}.isdisjoint(given):
            raise CheckpointError(f"model.{name} is {wanted} on the command line and {has} in {checkpoint.path}: leave model= "
                                  "out, and the file's sizes are taken")


def _tokenizer(data: DataConfig, given: Collection[str], checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer, or the one that data.tokenizer names. Raises CheckpointError if the two differ."""
    assumed = assumed_tokenizer(checkpoint)
    if "data.tokenizer" not in given and (checkpoint.tokenizer or assumed):
        if assumed:
            log(f"tokenizer  {assumed} (guessed from the vocabulary size of {checkpoint.path}, {checkpoint.vocab_size:,})")
        return tokenizer_of(checkpoint, None, data.end_of_text, "data.tokenizer")
    if data.tokenizer in MADE_FROM_DATA:
        remedy = "leave data.tokenizer out" if checkpoint.tokenizer else "name theirs: data.tokenizer=FILE.json, or world"
        raise CheckpointError(f"data.tokenizer={data.tokenizer} makes a tokenizer from the data, and the weights in "
                              f"{checkpoint.path} ({checkpoint.vocab_size} tokens) were trained with another: {remedy}")
    return tokenizer_of(checkpoint, data.tokenizer, data.end_of_text, "data.tokenizer")
