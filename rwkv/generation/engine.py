"""The engine: continues prompts together, one row for each, and draws one token per row and step.

Prompts are read in parallel passes (prefill.py); then each step reads one token per row (decoder.py), so that memory and time
per token do not depend on the length of a text. A text depends only on its prompt, its seed and the options: not on the rows
beside it, nor on how it is streamed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rwkv.config import strings, whole_number, whole_numbers
from rwkv.errors import UserError
from rwkv.generation.decoder import decoder_of
from rwkv.generation.prefill import PrefillResult, PrefixCache, read_prompts
from rwkv.generation.sampling import Sampling, TokenCounts, logprobs, next_tokens
from rwkv.generation.stopping import StoppingCriteria, StopStrings
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer

LARGEST_SEED = 2**63 - 1                 # of torch's generators


@dataclass
class Sample:
    """One generated text.

    text: the continuation of the prompt. finish_reason: "length", "stop" or "end_of_text"; None while the text is generated.
    tokens: the ids drawn, without end-of-text and stop tokens. logprobs: an entry for each token drawn, where requested.
    """

    prompt: str
    seed: int
    text: str = ""
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


def generate(model: Model, tokenizer: Tokenizer, prompt: str = "", max_new_tokens: int = 200, seed: int = 0,
             stop: Sequence[str] = (), stop_tokens: Sequence[int] = (), context: PrefillResult | None = None,
             cache: PrefixCache | None = None, **sampling: Any) -> Iterator[str]:
    """Yields the continuation of `prompt`, without the prompt, in pieces of whole characters as they are generated.

    sampling: the fields of rwkv.generation.sampling.Sampling. context: the result of reading the text before the prompt.
    Without a context and a prompt, generation starts from the end-of-text token, which also ends a text. Raises ValueError,
    before the first piece is requested, where an option is wrong, the prompt cannot be encoded or the tokenizer does not fit
    the model.
    """
    engine = Engine(model, tokenizer, [prompt], [seed], StoppingCriteria(max_new_tokens, stop, stop_tokens),
                    Sampling(**sampling), context, cache)
    return (piece for _, piece in engine if piece)


def generate_batch(model: Model, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int = 200,
                   seeds: Sequence[int] | None = None, stop: Sequence[str] = (), stop_tokens: Sequence[int] = (),
                   cache: PrefixCache | None = None, logprobs: int = 0, **sampling: Any) -> list[Sample]:
    """A finished Sample for each prompt, generated together; each text is the one that `generate` gives for prompt and seed.

    seeds: one for each prompt; all 0 by default. Raises ValueError as `generate` does.
    """
    prompts = strings("prompts", prompts)
    engine = Engine(model, tokenizer, prompts, [0] * len(prompts) if seeds is None else seeds,
                    StoppingCriteria(max_new_tokens, stop, stop_tokens), Sampling(**sampling), cache=cache, n_logprobs=logprobs)
    for _ in engine:
        pass
    return engine.samples


class Engine:
    """Continues prompts together, one row for each. Iterating yields (row, piece of text), empty pieces included.

    samples: the texts as far as they are generated. prompt_tokens: the number of tokens in all prompts. The constructor
    checks the options and reads the prompts; it raises ValueError as `generate` does.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, prompts: Sequence[str], seeds: Sequence[int],
                 stopping: StoppingCriteria, sampling: Sampling, context: PrefillResult | None = None,
                 cache: PrefixCache | None = None, n_logprobs: int = 0) -> None:
        prompts = strings("prompts", prompts)
        seeds = whole_numbers("seed", seeds, most=LARGEST_SEED)
        if len(prompts) != len(seeds):
            raise UserError(f"one seed per prompt: got {len(prompts)} prompts and {len(seeds)} seeds")
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}: they do not "
                            "belong together")
        sampling.check_ids(tokenizer.vocab_size)
        self._sampling = sampling
        self._n_logprobs = whole_number("logprobs", n_logprobs)
        self._vocab_size = tokenizer.vocab_size

        ids = [_prompt_ids(tokenizer, prompt, context) for prompt in prompts]
        self.prompt_tokens = sum(map(len, ids))
        self.samples = [Sample(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        self._rows = [_Row(index, sample, tokenizer, stopping) for index, sample in enumerate(self.samples)]
        self._active = [row for row in self._rows if row.sample.finish_reason is None]
        self._counts = TokenCounts(ids, tokenizer.vocab_size) if sampling.needs_counts else None

        start = read_prompts(model, ids, context, cache)
        self._logits = start.logits
        self._decoder = decoder_of(model, start.state)
        self._drawn: Tensor | None = None        # the tokens drawn last, while the decoder has not read them

    def __iter__(self) -> Iterator[tuple[int, str]]:
        while self._active:
            yield from self.step()

    def step(self) -> list[tuple[int, str]]:
        """Draws one token for each unfinished row and returns (row, piece of text) for each."""
        self._read_drawn()
        tokens = self._draw()
        pieces = [(row.index, row.push(token)) for row, token in zip(self._active, tokens.tolist(), strict=True)]
        self._drop_finished(tokens)
        return pieces

    def context(self) -> PrefillResult:
        """What the only row has read and written: `generate(..., context=...)` continues from there."""
        row, = self._rows
        if row.last_token_in_text:
            self._read_drawn()
        return PrefillResult(self._logits.clone(), self._decoder.state())

    def _read_drawn(self) -> None:
        if self._drawn is not None:
            self._logits = self._decoder.step(self._drawn)
            self._drawn = None

    def _draw(self) -> Tensor:
        """The next token of each active row."""
        logits = self._logits[:, :self._vocab_size]
        uniform = torch.stack([row.uniform() for row in self._active])
        tokens = next_tokens(logits, uniform, self._sampling, self._counts)
        if self._n_logprobs:
            own, ids, values = logprobs(logits, tokens, self._n_logprobs)
            for index, row in enumerate(self._active):
                row.add_logprobs(int(tokens[index]), own[index].item(), ids[index].tolist(), values[index].tolist())
        if self._counts is not None:
            self._counts.add(tokens)
        return tokens

    def _drop_finished(self, tokens: Tensor) -> None:
        """Keeps the unfinished rows; where none is left, the decoder keeps those that finished last, for `context`."""
        kept = [index for index, row in enumerate(self._active) if row.sample.finish_reason is None]
        if 0 < len(kept) < len(self._active):
            self._decoder.keep(kept)
            if self._counts is not None:
                self._counts.keep(kept)
        self._drawn = tokens[kept] if kept else tokens
        self._active = [self._active[index] for index in kept]


class _Row:
    """One text while it is generated: its random numbers, its text decoder and its stop strings."""

    def __init__(self, index: int, sample: Sample, tokenizer: Tokenizer, stopping: StoppingCriteria) -> None:
        self.index = index
        self.sample = sample
        self.last_token_in_text = True           # False after an end-of-text or stop token
        self._tokenizer = tokenizer
        self._stopping = stopping
        self._random = torch.Generator().manual_seed(sample.seed)
        self._text_decoder = tokenizer.decoder()
        self._stop_strings = StopStrings(stopping.stop)
        if stopping.max_new_tokens == 0:
            sample.finish_reason = "length"

    def uniform(self) -> Tensor:
        """The row's next random number from [0, 1)."""
        return torch.rand((), generator=self._random, dtype=torch.float64)

    def push(self, token: int) -> str:
        """Appends a token that was drawn; returns the text that can be shown now. Sets finish_reason where the text ends."""
        sample = self.sample
        if token == self._tokenizer.end_of_text or token in self._stopping.stop_tokens:
            self.last_token_in_text = False
            sample.finish_reason = "end_of_text" if token == self._tokenizer.end_of_text else "stop"
            text = self._flush()
        else:
            sample.tokens.append(token)
            text = self._stop_strings.push(self._text_decoder.push(token))
            if self._stop_strings.found is None and len(sample.tokens) == self._stopping.max_new_tokens:
                sample.finish_reason = "length"
                text += self._flush()
        if self._stop_strings.found is not None:
            sample.finish_reason = "stop"
        sample.text += text
        return text

    def _flush(self) -> str:
        """The text held back, at the end."""
        text = self._stop_strings.push(self._text_decoder.flush())
        return text if self._stop_strings.found is not None else text + self._stop_strings.flush()

    def add_logprobs(self, token: int, logprob: float, likeliest: list[int], their_logprobs: list[float]) -> None:
        top = [self._logprob_entry(*each) for each in zip(likeliest, their_logprobs, strict=True)]
        self.sample.logprobs.append({**self._logprob_entry(token, logprob), "top": top})

    def _logprob_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": token, "text": self._tokenizer.decode([token]), "logprob": logprob}


def _prompt_ids(tokenizer: Tokenizer, prompt: str, context: PrefillResult | None) -> list[int]:
    ids = list(tokenizer.encode(prompt))
    return ids if ids or context is not None else [tokenizer.end_of_text]
