"""Declares the options of generate.py."""

from dataclasses import dataclass

from rwkv.config.common import LARGEST_SEED, DraftedConfig, layout_option
from rwkv.config.sampling import Sampling, preset_option, with_sampling
from rwkv.config.schema import PATH, TEXT, check_options, option


@dataclass
@with_sampling
class GenerateConfig(DraftedConfig):
    """The options of generate.py. rwkv/generation/options.py rejects options that conflict with each other."""

    prompt: str | None = option(None, "prompt; -: read from standard input", heading="Samples", verbatim=TEXT)
    prompts: str | None = option(None, 'file with a prompt per line, or .jsonl with {"prompt": "..."} per line; -: '
                                       'standard input, a prompt per line', verbatim=PATH)
    state: str | None = option(None, "state file to start from, written by save_state= with the same model and tokenizer; or a "
                               "tuned state (timemix's or another trainer's)", verbatim=PATH)
    state_layout: str | None = layout_option("state=")
    num_samples: int = option(1, "samples per prompt", least=1)
    seed: int = option(0, "random seed of a prompt's first sample; the next sample has seed + 1", least=0,
                       most=LARGEST_SEED)
    batch_size: int = option(16, "batch size, which does not change the samples", least=1)
    max_new_tokens: int = option(200, "maximum tokens per sample", least=0)
    stop: list[str] = option(list, "stop string, not shown; repeatable")
    stop_tokens: list[int] = option(list, "[ID,...]: stop tokens, not shown")
    json_schema: str | None = option(None, "JSON schema file that each sample must satisfy", verbatim=PATH)
    grammar: str | None = option(None, "Lark grammar file that each sample must follow", verbatim=PATH)
    regex: str | None = option(None, "regular expression that each sample must match in full", verbatim=TEXT,
                              filled=True)
    sampling: str = preset_option("default")
    stream: bool = option(True, "print a single sample token by token", heading="Output")
    out: str | None = option(None, "JSON Lines file for the samples, with tokens and finish reason", verbatim=PATH)
    logprobs: int = option(0, "number of top log-probabilities to write per token, to out= or else standard error", least=0)
    save_state: str | None = option(None, "file for the state after the sample and its stop string; state= continues from it",
                                    verbatim=PATH)

    def __post_init__(self) -> None:
        check_options(self)
        Sampling.from_config(self)
