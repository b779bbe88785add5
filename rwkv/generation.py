"""Text from a model: the prompts in parallel passes, then one token after the other from the recurrent state.

Memory and time per token do not depend on how much has been read or written. A text depends on its prompt, its seed and
the options alone: not on the rows beside it, nor on how it is streamed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernels import select
from rwkv.config import strings, whole_number, whole_numbers
from rwkv.decoding import decoder_of
from rwkv.model import RWKV
from rwkv.prefill import Context, read_prompts
from rwkv.prefix_cache import PrefixCache
from rwkv.sampling import Sampling, Seen, logprobs, next_tokens
from rwkv.stops import StopStrings
from rwkv.tokenizer import Tokenizer

LARGEST_SEED = 2**63 - 1                 # that torch's generators take


@dataclass(frozen=True)
class Ending:
    """When a text ends: after max_new_tokens, before the first stop string or stop token, or at the end-of-text token.

    Raises ValueError for a value that means nothing, or of another type.
    """

    max_new_tokens: int = 200
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_new_tokens", whole_number("max_new_tokens", self.max_new_tokens))
        object.__setattr__(self, "stop_tokens", whole_numbers("stop_tokens", self.stop_tokens))
        object.__setattr__(self, "stop", strings("stop", self.stop))
        StopStrings(self.stop)


@dataclass
class Sample:
    """One text: `text` continues the prompt; finish is "length", "stop" or "end_of_text", None while it is being written.

    tokens: the ids that were drawn, end-of-text and stop tokens excluded. logprobs: for each of them, where asked for.
    """

    prompt: str
    seed: int
    text: str = ""
    finish: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


def generate(model: RWKV, tokenizer: Tokenizer, prompt: str = "", max_new_tokens: int = 200, seed: int = 0,
             stop: Sequence[str] = (), stop_tokens: Sequence[int] = (), context: Context | None = None,
             cache: PrefixCache[Context] | None = None, **sampling: Any) -> Iterator[str]:
    """Pieces of text that continue `prompt` (not repeated), as they come, each of whole characters.

    sampling: the fields of rwkv.sampling.Sampling. context: what was read before the prompt; without one and without a
    prompt, generation starts from the end-of-text token, which also ends a text. Raises ValueError, before the first piece
    is asked for, where an option means nothing, the prompt cannot be encoded or the tokenizer does not fit the model.
    """
    writer = Writer(model, tokenizer, [prompt], [seed], Ending(max_new_tokens, stop, stop_tokens),
                    Sampling(**sampling), context, cache)
    return (piece for _, piece in writer if piece)


def generate_batch(model: RWKV, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int = 200,
                   seeds: Sequence[int] | None = None, stop: Sequence[str] = (), stop_tokens: Sequence[int] = (),
                   cache: PrefixCache[Context] | None = None, logprobs: int = 0, **sampling: Any) -> list[Sample]:
    """A finished Sample for each prompt, written together: each is the text that `generate` gives for its prompt and seed.

    seeds: one per prompt, 0 for all where none are given. Raises ValueError as `generate` does.
    """
    prompts = strings("prompts", prompts)
    writer = Writer(model, tokenizer, prompts, seeds if seeds is not None else [0] * len(prompts),
                    Ending(max_new_tokens, stop, stop_tokens), Sampling(**sampling), None, cache, logprobs)
    for _ in writer:
        pass
    return writer.samples


class Writer:
    """Texts being written together, one row for each prompt: iterating gives (row, piece of text), empty pieces included.

    Making one checks the options and reads the prompts. Raises ValueError as `generate` does.
    """

    def __init__(self, model: RWKV, tokenizer: Tokenizer, prompts: Sequence[str], seeds: Sequence[int], ending: Ending,
                 sampling: Sampling, context: Context | None = None, cache: PrefixCache[Context] | None = None,
                 n_logprobs: int = 0) -> None:
        prompts = strings("prompts", prompts)
        seeds = whole_numbers("seed", seeds, most=LARGEST_SEED)
        if len(prompts) != len(seeds):
            raise ValueError(f"one seed per prompt: got {len(prompts)} prompts and {len(seeds)} seeds")
        _require_fit(model, tokenizer)
        sampling.check_ids(tokenizer.vocab_size)
        self.samples = [Sample(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        self._tokenizer, self._sampling, self._n_logprobs = tokenizer, sampling, whole_number("logprobs", n_logprobs)
        self._softmax = select.softmax("cpu").forward         # there, whatever device the model is on, tokens are drawn
        self._ids = [_prompt_ids(tokenizer, prompt, context) for prompt in prompts]
        self._rows = [_Row(tokenizer, sample, ending) for sample in self.samples]
        self.prompt_tokens = sum(map(len, self._ids))
        start = read_prompts(model, self._ids, context, cache)
        self._decoder, self._logits = decoder_of(model, start.state), start.logits
        self._unread: Tensor | None = None                    # tokens drawn and not yet read by the decoder

    def __iter__(self) -> Iterator[tuple[int, str]]:
        alive = [row for row in range(len(self._rows)) if self._rows[row].sample.finish is None]
        seen = Seen(self._ids, self._tokenizer.vocab_size) if self._sampling.penalises else None
        while alive:
            tokens = self._draw(alive, seen)
            yield from [(row, self._rows[row].push(token)) for row, token in zip(alive, tokens.tolist(), strict=True)]
            alive = self._drop_finished(alive, tokens, seen)
            if alive and self._unread is not None:
                self._read_drawn(self._unread)

    def context(self) -> Context:
        """What a single row has read and written, for text that goes on from there."""
        assert len(self._rows) == 1
        if self._unread is not None and self._rows[0].last_counts:
            self._read_drawn(self._unread)
        return Context(self._logits.clone(), self._decoder.state())

    def _draw(self, alive: list[int], seen: Seen | None) -> Tensor:
        logits = self._logits[:, :self._tokenizer.vocab_size]
        uniform = torch.stack([self._rows[row].uniform() for row in alive])
        self._unread = tokens = next_tokens(logits, uniform, self._sampling, seen, self._softmax)
        if self._n_logprobs:
            for row, *entry in zip(alive, tokens.tolist(), *_lists(logprobs(logits, tokens, self._n_logprobs)), strict=True):
                self._rows[row].note_logprobs(*entry)
        if seen is not None:
            seen.add(tokens)
        return tokens

    def _drop_finished(self, alive: list[int], tokens: Tensor, seen: Seen | None) -> list[int]:
        """The rows that go on; the last to finish stays in the decoder, for `context`."""
        going = [index for index, row in enumerate(alive) if self._rows[row].sample.finish is None]
        self._unread = tokens[going] if going else tokens
        if 0 < len(going) < len(alive):
            self._decoder.keep(going)
            if seen is not None:
                seen.keep(going)
        return [alive[index] for index in going]

    def _read_drawn(self, tokens: Tensor) -> None:
        self._logits, self._unread = self._decoder.step(tokens), None


class _Row:
    """One text while it is written: its random numbers, its decoder, its stop strings."""

    def __init__(self, tokenizer: Tokenizer, sample: Sample, ending: Ending) -> None:
        self.sample, self._ending, self._end_of_text = sample, ending, tokenizer.end_of_text
        self._random = torch.Generator().manual_seed(sample.seed)
        self._decoder, self._stops, self._spell = tokenizer.decoder(), StopStrings(ending.stop), tokenizer.decode
        self.last_counts = True          # whether the token drawn last belongs to the text
        if ending.max_new_tokens == 0:
            sample.finish = "length"

    def uniform(self) -> Tensor:
        return torch.rand((), generator=self._random, dtype=torch.float64)

    def push(self, token: int) -> str:
        """The text that can be shown now."""
        shown = self._shown(token)
        if self._stops.found is not None:
            self.sample.finish = "stop"
        self.sample.text += shown
        return shown

    def _shown(self, token: int) -> str:
        sample, ending = self.sample, self._ending
        if token == self._end_of_text or token in ending.stop_tokens:
            self.last_counts, sample.finish = False, "end_of_text" if token == self._end_of_text else "stop"
            return self._rest()
        sample.tokens.append(token)
        text = self._stops.push(self._decoder.push(token))
        if self._stops.found is None and len(sample.tokens) == ending.max_new_tokens:
            sample.finish = "length"
            text += self._rest()
        return text

    def _rest(self) -> str:
        """What was held back, at the end."""
        text = self._stops.push(self._decoder.flush())
        return text if self._stops.found is not None else text + self._stops.flush()

    def note_logprobs(self, token: int, own: float, likeliest: list[int], theirs: list[float]) -> None:
        top = [{"token": other, "text": self._spell([other]), "logprob": value}
               for other, value in zip(likeliest, theirs, strict=True)]
        self.sample.logprobs.append({"token": token, "text": self._spell([token]), "logprob": own, "top": top})


def _prompt_ids(tokenizer: Tokenizer, prompt: str, context: Context | None) -> list[int]:
    ids = list(tokenizer.encode(prompt))
    return ids if ids or context is not None else [tokenizer.end_of_text]


def _require_fit(model: RWKV, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}: they do not "
                         "belong together")


def _lists(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [tensor.tolist() for tensor in tensors]
