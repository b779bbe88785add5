"""The options with which a task of lm-evaluation-harness has a text generated, as those of the engine. Needs no harness.

Source: EleutherAI/lm-evaluation-harness, lm_eval/models/utils.py (normalize_gen_kwargs: the names of the length in their order,
and its default) and lm_eval/models/huggingface.py (max_length counts the prompt).
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from rwkv.config import LARGEST_SEED, Sampling
from rwkv.errors import UserError

MAX_NEW_TOKENS = 256                     # the harness's default
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")      # the first that a task gives counts
WHOLE_LENGTH = "max_length"              # of prompt and answer; it replaces the others
SAMPLED = {"temperature": 1.0, "top_p": 1.0}     # what a sampled task leaves open: the model's own distribution
GREEDY = {"temperature": 0.0}
SAMPLING = {item.name for item in fields(Sampling)}
KNOWN = {*LENGTHS, WHOLE_LENGTH, "until", "do_sample", *SAMPLING}


def engine_options(task: Mapping[str, Any], prompt_tokens: Callable[[], int]) -> dict[str, Any]:
    """The options of generate_batch. prompt_tokens: counts the tokens of the prompt. Raises UserError for a wrong value.

    A task is greedy unless it asks for sampling. Options that are not known here are named on standard error.
    """
    given = {name: value for name, value in task.items() if value is not None}
    unknown = given.keys() - KNOWN
    if unknown:
        _name_unknown(", ".join(sorted(unknown)))
    until = given.get("until", [])
    stop = [until] if isinstance(until, str) else until
    temperature = given.get("temperature", 0.0)
    try:
        sampled = given.get("do_sample", float(temperature) > 0)
    except (TypeError, ValueError):
        raise UserError(f"a task's temperature must be a number; got {temperature!r}") from None
    sampling = SAMPLED | {name: given[name] for name in given.keys() & SAMPLING} if sampled else GREEDY
    return {"max_new_tokens": _length(given, prompt_tokens), "stop": [text for text in stop if text], **sampling}


def seeds_of(requests: Sequence[str], first: int) -> list[int]:
    """A seed for each request: `first`, and for repetitions of a request the next ones, so that their answers differ."""
    before: Counter[str] = Counter()
    seeds = []
    for request in requests:
        seeds.append((first + before[request]) % LARGEST_SEED)
        before[request] += 1
    return seeds


def _length(given: Mapping[str, Any], prompt_tokens: Callable[[], int]) -> int:
    """The most tokens of an answer."""
    name = next((name for name in (WHOLE_LENGTH, *LENGTHS) if name in given), None)
    if name is None:
        return MAX_NEW_TOKENS
    try:
        length = int(given[name])
    except (TypeError, ValueError):
        raise UserError(f"a task's {name} must be a whole number; got {given[name]!r}") from None
    if name != WHOLE_LENGTH:
        return length
    prompt = prompt_tokens()
    if length <= prompt:
        raise UserError(f"a task's max_length, which counts the prompt, must be above the {prompt} tokens of a prompt; got "
                        f"{length}: use max_gen_toks, which counts the answer alone")
    return length - prompt


@cache
def _name_unknown(names: str) -> None:
    print(f"options of generation that timemix does not have, and leaves out: {names}", file=sys.stderr, flush=True)
