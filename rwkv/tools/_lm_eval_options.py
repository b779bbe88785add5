"""Converts generation options of lm-evaluation-harness tasks to the engine's options. Does not import the harness.

Source: EleutherAI/lm-evaluation-harness, lm_eval/models/utils.py (normalize_gen_kwargs: the names for the length in order of
precedence, and its default) and lm_eval/models/huggingface.py (max_length includes the prompt).
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache

from rwkv.config import LARGEST_SEED, Sampling
from rwkv.errors import UserError
from rwkv.io.json_types import JsonObject

MAX_NEW_TOKENS = 256                     # this is the harness's default
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")      # the first one given applies
WHOLE_LENGTH = "max_length"              # length of prompt plus answer; this option precedes all LENGTHS
SAMPLED = {"temperature": 1.0, "top_p": 1.0}     # a task that samples uses the model's own distribution by default
GREEDY = {"temperature": 0.0}
SAMPLING = {item.name for item in fields(Sampling)}
KNOWN = {*LENGTHS, WHOLE_LENGTH, "until", "do_sample", *SAMPLING}


def engine_options(task: JsonObject, prompt_tokens: Callable[[], int]) -> JsonObject:
    """Returns the options for generate_batch. Raises UserError for an invalid value.

    Decoding is greedy unless the task's options ask for sampling. Unknown options are ignored with a warning on standard error.
    `prompt_tokens` counts the prompt's tokens.
    """
    options = {name: value for name, value in task.items() if value is not None}
    unknown = options.keys() - KNOWN
    if unknown:
        _warn_unknown(", ".join(sorted(unknown)))
    until = options.get("until", [])
    stop = [until] if isinstance(until, str) else until
    temperature = options.get("temperature", 0.0)
    try:
        sampled = options.get("do_sample", float(temperature) > 0)
    except (TypeError, ValueError):
        raise UserError(f"a task's temperature must be a number; got {temperature!r}") from None
    sampling = SAMPLED | {name: options[name] for name in options.keys() & SAMPLING} if sampled else GREEDY
    return {"max_new_tokens": _max_new_tokens(options, prompt_tokens), "stop": [text for text in stop if text], **sampling}


def seeds_of(requests: Sequence[str], first: int) -> list[int]:
    """Returns a seed for each request: `first`, and the next numbers for repetitions, so that their answers differ."""
    repetitions: Counter[str] = Counter()
    seeds = []
    for request in requests:
        seeds.append((first + repetitions[request]) % LARGEST_SEED)
        repetitions[request] += 1
    return seeds


def _max_new_tokens(options: JsonObject, prompt_tokens: Callable[[], int]) -> int:
    name = next((name for name in (WHOLE_LENGTH, *LENGTHS) if name in options), None)
    if name is None:
        return MAX_NEW_TOKENS
    try:
        length = int(options[name])
    except (TypeError, ValueError):
        raise UserError(f"a task's {name} must be a whole number; got {options[name]!r}") from None
    if name != WHOLE_LENGTH:
        return length
    prompt = prompt_tokens()
    if length <= prompt:
        raise UserError(f"a task's max_length includes the prompt, so max_length must exceed {prompt} tokens; got {length}. "
                        "To count only the answer, use max_gen_toks")
    return length - prompt


@cache
def _warn_unknown(names: str) -> None:
    print(f"WARNING: ignoring unknown generation options: {names}", file=sys.stderr, flush=True)
