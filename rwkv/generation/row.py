"""A Row is one sequence while the engine generates it. A Sample is the result: the tokens, the text and the finish reason."""

from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from rwkv.generation.grammar.matcher import Matcher, matcher_of
from rwkv.generation.prefix_cache import PrefillResult, PrefixCache
from rwkv.generation.request import Entry, Request
from rwkv.generation.sampling import Penalties, TablePenalties
from rwkv.generation.stopping import StopStrings
from rwkv.tokenizer.decoders import LAST_IDS
from rwkv.tokenizer.tokenizers import Tokenizer

CANCELLED = "cancelled"                  # finish reasons
NO_TOKEN = "no_token"
# ZEROS[byte] is an int64 that holds 8 one-byte bools, one per bit of the byte, lowest bit first: True where the bit is 0.
_BYTES, _BITS = torch.arange(256, device="cpu")[:, None], torch.arange(8, device="cpu")
ZEROS = (_BYTES >> _BITS & 1).logical_not().view(torch.int64).flatten()
RANDOM_BLOCK = 64                        # random numbers generated together


@dataclass
class Sample:
    """One generated sequence.

    Attributes:
        prompt: the prompt's text, or "" if the prompt was given as ids.
        text: the continuation.
        finish_reason: "length", "stop", "end_of_text", "cancelled", or "no_token" if the grammar and the banned tokens leave no
            token, or if the grammar has become too complex. None while the sequence is running.
        tokens: the ids drawn, without end-of-text and stop tokens.
        logprobs: one entry per token drawn, if requested. The probabilities are normalised over the tokens that the grammar
            allows, before any sampling option is applied.
    """

    prompt: str
    seed: int
    text: str = ""
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Entry] = field(default_factory=list)


class Row:
    """A request that is being generated, with its random numbers, its text decoder and its stop strings.

    Attributes:
        cached_tokens: the number of prompt tokens that came from the cache.
        prompt_logprobs: one entry, as in Sample.logprobs, per prompt token except the first, if requested.
        embedding (C): the embedding, set after prefill if requested.
        forbidden (V): True for each token that the grammar does not allow next; None without a grammar.
        final_context: the prefill result of the whole sequence, including the last token and a stop string, if requested. None
            for a cancelled row.
        damaged: True if the row was cancelled because its logits were not finite. The context may then be damaged.
        proposed_tokens, accepted_tokens: counts of draft tokens.
    """

    def __init__(self, index: int, request: Request, prompt_ids: list[int], tokenizer: Tokenizer,
                 penalties: Penalties | TablePenalties | None = None, cache: PrefixCache | None = None) -> None:
        self.index = index
        self.request = request
        self.sample = Sample(request.prompt_text, request.seed)
        self.prompt_ids = prompt_ids
        self.penalties = penalties
        self.cache = cache
        self.cached_tokens = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self.prompt_read = False
        self.prompt_logprobs: list[Entry] = []
        self.embedding = torch.empty(0)
        self.last_token_in_text = True   # False after an end-of-text or stop token
        self.final_context: PrefillResult | None = None
        self._ends = {*tokenizer.ends}
        self._vocab_size = tokenizer.vocab_size
        stopping = request.stopping
        self._stop_tokens = {*stopping.stop_tokens, *tokenizer.starting(stopping.stop)}
        self._matcher: Matcher | None = None
        if request.grammar is not None:
            self._matcher = matcher_of(request.grammar, tokenizer, [*self._stop_tokens])
        self.forbidden: Tensor | None = None
        self._generator = torch.Generator().manual_seed(request.seed)
        self._uniform: list[float] = []  # unused random numbers, the next one last
        self.damaged = False
        self._preceding_ids = [*(request.context.last_ids if request.context else ()), *prompt_ids[-LAST_IDS:]][-LAST_IDS:]
        self._text_decoder = tokenizer.decoder(self._preceding_ids)
        self._stop_strings = StopStrings(stopping.stop)
        if stopping.max_new_tokens == 0:
            self.sample.finish_reason = "length"

    @property
    def unfinished(self) -> bool:
        return self.sample.finish_reason is None

    @property
    def complete(self) -> bool:
        """Returns True if the row was cancelled, or has finished after prefill and needs no final context."""
        return not self.unfinished and (
            (self.prompt_read and not self.needs_final_context) or self.sample.finish_reason == CANCELLED)

    @property
    def needs_final_context(self) -> bool:
        """Returns True if the sequence has ended but the requested final_context is not set yet."""
        ended = self.prompt_read and self.sample.finish_reason not in (None, CANCELLED)
        return self.request.keep_context and self.final_context is None and ended

    @property
    def active(self) -> bool:
        return self.unfinished or self.needs_final_context

    @property
    def stop(self) -> str | None:
        """Returns the stop string that ended the sequence, or None if no stop string has."""
        return self._stop_strings.matched

    @property
    def read_after_text(self) -> str:
        """Returns the text that final_context includes after Sample.text: the stop string, and the rest of its last token."""
        return self._stop_strings.rest

    @property
    def last_token_unread(self) -> bool:
        """Returns True if the sequence ended before the last token was read, so that the state does not include this token."""
        return self.last_token_in_text and self.sample.finish_reason != NO_TOKEN

    def cancel(self) -> None:
        """Ends the sequence as cancelled. The row leaves at the next step."""
        if not self.complete:
            self.sample.finish_reason = CANCELLED

    def cancel_damaged(self) -> None:
        self.cancel()
        self.damaged = True

    def tokens_read(self) -> list[int]:
        """Returns the tokens read when the sequence has just ended: the prompt, and all tokens drawn except the last."""
        tokens = self.sample.tokens
        return self.prompt_ids + (tokens[:-1] if self.last_token_in_text else tokens)

    def last_ids(self) -> list[int]:
        """Returns the last ids read or drawn, including ids before the prompt."""
        return [*self._preceding_ids, *self.sample.tokens[-LAST_IDS:]][-LAST_IDS:]

    @property
    def known_ids(self) -> list[int]:
        """Returns the ids before the continuation: the known ids of the context, then the ids of the prompt."""
        earlier = [*self.request.earlier]
        includes_prompt = earlier[len(earlier) - len(self.prompt_ids):] == self.prompt_ids
        return earlier if includes_prompt else earlier + self.prompt_ids

    @property
    def tokens_left(self) -> int:
        """Returns the number of tokens that can still be drawn."""
        return self.request.stopping.max_new_tokens - len(self.sample.tokens)

    def tokens_before_end(self, tokens: list[int]) -> list[int]:
        """Returns the tokens before the first token that would end the sequence."""
        return [*takewhile(lambda token: token not in self._ends and token not in self._stop_tokens, tokens)]

    def uniform(self) -> float:
        self.next_uniform(1)
        return self._uniform.pop()

    def next_uniform(self, n: int) -> list[float]:
        """Returns the numbers that the next n calls of uniform() will return."""
        while len(self._uniform) < n:
            numbers = torch.rand(RANDOM_BLOCK, generator=self._generator, dtype=torch.float64, device="cpu")
            self._uniform = numbers.tolist()[::-1] + self._uniform
        return self._uniform[:-n - 1:-1]

    def update_forbidden(self) -> bool:
        """Sets `forbidden` from the grammar. Returns False if the grammar and the banned tokens leave no token."""
        if self._matcher is None:
            return True
        mask = self._matcher.allowed_mask()
        if mask is None:
            return False
        self.forbidden = ZEROS[torch.frombuffer(mask, dtype=torch.uint8).int()].view(torch.bool)[:self._vocab_size]
        if not self.request.sampling.banned:
            return True
        excluded = self.forbidden.clone()
        excluded[list(self.request.sampling.banned)] = True
        return not bool(excluded.all())

    def end_without_token(self) -> str:
        """Ends the sequence because no token is allowed next. Returns the text that was held back."""
        self.sample.finish_reason = NO_TOKEN
        text = self._flush()
        self.sample.text += text
        return text

    def push(self, token: int) -> str:
        """Appends a drawn token and returns the text that can be shown now. Sets finish_reason if the sequence ends."""
        sample = self.sample
        if token in self._ends or token in self._stop_tokens:
            self.last_token_in_text = False
            sample.finish_reason = "end_of_text" if token in self._ends else "stop"
            text = self._flush()
        else:
            sample.tokens.append(token)
            if self._matcher is not None:
                self._matcher.push(token)
            text = self._stop_strings.push(self._text_decoder.push(token))
            if self._stop_strings.matched is None and len(sample.tokens) == self.request.stopping.max_new_tokens:
                sample.finish_reason = "length"
                text += self._flush()
        if self._stop_strings.matched is not None:
            sample.finish_reason = "stop"
        sample.text += text
        return text

    def _flush(self) -> str:
        text = self._stop_strings.push(self._text_decoder.flush())
        return text if self._stop_strings.matched is not None else text + self._stop_strings.flush()
