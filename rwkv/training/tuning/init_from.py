"""Opens the checkpoint of init_from=, whose weights a new run trains with a new optimiser, schedule and data.

The checkpoint determines the sizes, except ctx_len, on which no weight depends. If the checkpoint has a tokenizer, the run uses
it. Options on the command line that conflict with the checkpoint are refused. Options of experiment= or debug= are overridden.
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
from rwkv.io.state_path import state_path
from rwkv.model.base import generation, names_with_learnt_state
from rwkv.model.lora import layers_to_adapt, require_rank
from rwkv.tokenizer.tokenizers import MADE_FROM_DATA, Tokenizer

NOT_A_SIZE = "ctx_len"                   # no weight depends on the option model.ctx_len


def open_init_checkpoint(config: TrainConfig, user_keys: Collection[str]) -> tuple[TrainConfig, Checkpoint, Tokenizer]:
    """Returns the configuration with the checkpoint's sizes, the checkpoint, and the tokenizer for the data.

    `user_keys` are the keys that the user set on the command line. Raises CheckpointError if the file cannot be read, or if one
    of these keys conflicts with the file.
    """
    checkpoint = read_checkpoint(str(config.init_from))
    model = replace(checkpoint.config, ctx_len=config.model.ctx_len)
    _require_sizes(config.model, model, user_keys, checkpoint)
    template = choose_template(config.data.template, str(config.init_from), checkpoint.run).template
    data = replace(config.data, template=template) if config.data.name == "chat" else config.data
    config = replace(config, model=model, data=data)
    on_hub = hub.parse(str(config.init_from)) is not None
    if on_hub or config.tune.method != "full":           # the name must mean the same file later and on other machines
        pinned = hub.fetch(str(config.init_from)).pinned if on_hub else str(checkpoint.path.resolve())
        config = replace(config, init_from=pinned)
    if config.tune.state is not None:
        state = time_states.read(state_path(config.tune.state), checkpoint.config)
        checkpoint = replace(checkpoint, time_states=state.layers, state_note=state.line)
    require_tunable(config, checkpoint)
    if "tune.rank" in user_keys:         # the default may exceed the width of a very small model
        require_rank(config.model, config.tune.modules, config.tune.rank)
    return config, checkpoint, _tokenizer(config.data, user_keys, checkpoint)


def require_tunable(config: TrainConfig, checkpoint: Checkpoint) -> None:
    """Raises UserError if tune= does not support the weights of the checkpoint."""
    if checkpoint.time_states and config.tune.method != "state":
        raise UserError(f"tune={config.tune.method} requires weights without a tuned state (a trained initial state), but "
                        f"{checkpoint.path} has a tuned state. Use tune=state to train the state further, or use a file with "
                        "only the weights")
    if checkpoint.time_states and config.tune.prefers:
        raise UserError(f"tune.objective={config.tune.objective} conflicts with a tuned state (a trained initial state), "
                        "because the reference model has no such state: omit tune.objective=, or start without the tuned state")
    if config.tune.method == "lora":
        layers_to_adapt(config.model, config.tune.modules)
    if config.tune.method == "state" and not generation(config.model).LEARNS_STATE:
        raise UserError(f"tune=state requires {names_with_learnt_state()}, but {checkpoint.path} is "
                        f"{generation(config.model).NAME}: use tune=lora")


def _require_sizes(config: ModelConfig, saved: ModelConfig, user_keys: Collection[str], checkpoint: Checkpoint) -> None:
    sizes, saved_sizes = (vars(generation(model).with_default_widths(model)) for model in (config, saved))
    for name, size in sizes.items():
        if name != NOT_A_SIZE and size != saved_sizes[name] and not {"model", f"model.{name}"}.isdisjoint(user_keys):
            raise CheckpointError(f"model.{name} is {size} on the command line, but {saved_sizes[name]} in "
                                  f"{checkpoint.path}: omit model= to use the file's sizes")


def _tokenizer(data: DataConfig, user_keys: Collection[str], checkpoint: Checkpoint) -> Tokenizer:
    """Returns the checkpoint's tokenizer or the tokenizer of data.tokenizer. Raises CheckpointError if the two differ."""
    assumed = assumed_tokenizer(checkpoint)
    if "data.tokenizer" not in user_keys and (checkpoint.tokenizer or assumed):
        if assumed:
            log(f"tokenizer  {assumed} (guessed from the vocabulary size of {checkpoint.path}, {checkpoint.vocab_size:,})")
        return tokenizer_of(checkpoint, None, data.end_of_text, "data.tokenizer")
    if data.tokenizer in MADE_FROM_DATA:
        remedy = "omit data.tokenizer=" if checkpoint.tokenizer else "pass it with data.tokenizer=FILE.json or world"
        raise CheckpointError(f"data.tokenizer={data.tokenizer} makes a tokenizer from the data, but the weights in "
                              f"{checkpoint.path} (vocabulary of {checkpoint.vocab_size} tokens) were trained with another "
                              f"tokenizer: {remedy}")
    return tokenizer_of(checkpoint, data.tokenizer, data.end_of_text, "data.tokenizer")
