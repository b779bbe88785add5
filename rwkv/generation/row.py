"""One sequence while it is generated, independent of all others: which tokens may follow, which were drawn, and how it ends."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rwkv.generation.grammar import Matcher
from rwkv.generation.prefill import PrefillResult, PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.sampling import Penalties, TablePenalties
from rwkv.generation.stopping import StopStrings
from rwkv.tokenizer.decoders import LAST_IDS
from rwkv.tokenizer.tokenizers import Tokenizer

CANCELLED = "cancelled"                  # a finish reason, as the next
NO_TOKEN = "no_token"
# ZEROS[byte] is an int64 whose 8 bytes are bools, one for each bit of the byte, the lowest first: True where the bit is 0.
_BYTES, _BITS = torch.arange(256, device="cpu")[:, None], torch.arange(8, device="cpu")
ZEROS = (_BYTES >> _BITS & 1).logical_not().view(torch.int64).flatten()
AT_ONCE = 64                             # random numbers that are drawn at a time


@dataclass
class Sample:
    """One generated text.

    prompt: the text to continue; "" if the prompt was given as ids. text: the continuation. finish_reason: "length", "stop",
    "end_of_text", "cancelled", or "no_token" if the grammar and the banned tokens allow no token or the grammar has become too
    complex; None while the text is generated. tokens: the ids drawn, without end-of-text and stop tokens. logprobs: if
    requested, an entry for each token drawn, computed among the tokens that the grammar allows, before all other options.
    """

    prompt: str
    seed: int
    text: str = ""
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Row:
    """A request while it runs: its random numbers, its text decoder and its stop strings.

    cached_tokens: how many tokens of the prompt came from the cache. prompt_logprobs: if requested, an entry as in
    Sample.logprobs for each token of the prompt except the first. embedding: if requested, (C), once the prompt is read.
    forbidden: (V) bool, True for tokens that the grammar does not allow next; None without a grammar. final_context: if
    requested, the result of reading the whole sequence, its last token and a stop string included; None for a row that was
    cancelled. damaged: the row was cancelled because the logits after its context are not finite.
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
        self.prompt_read = False
        self.prompt_logprobs: list[dict[str, Any]] = []
        self.embedding = torch.empty(0)
        self.last_token_in_text = True   # False after an end-of-text or stop token
        self.final_context: PrefillResult | None = None
        self._ends = {*tokenizer.ends}
        self._vocab_size = tokenizer.vocab_size
        stopping = request.stopping
        self._stop_tokens = {*stopping.stop_tokens, *tokenizer.starting(stopping.stop)}
        self._matcher: Matcher | None = None
        if request.grammar is not None:
            self._matcher = request.grammar.matcher(tokenizer, [*self._stop_tokens])
        self.forbidden: Tensor | None = None
        self._generator = torch.Generator().manual_seed(request.seed)
        self._uniform: list[float] = []  # random numbers that are still unused, the next one last
        self.damaged = False
        self._before = [*(request.context.last_ids if request.context else ()), *prompt_ids[-LAST_IDS:]][-LAST_IDS:]
        self._text_decoder = tokenizer.decoder(self._before)
        self._stop_strings = StopStrings(stopping.stop)
        if stopping.max_new_tokens == 0:
            self.sample.finish_reason = "length"

    @property
    def unfinished(self) -> bool:
        return self.sample.finish_reason is None

    @property
    def complete(self) -> bool:
        """Whether nothing more comes: the row was cancelled, or its prompt is read, it has ended and owes no context."""
        return not self.unfinished and ((self.prompt_read and not self.owes_end) or self.sample.finish_reason == CANCELLED)

    @property
    def owes_end(self) -> bool:
        """Whether the text has ended and final_context is still missing."""
        ended = self.prompt_read and self.sample.finish_reason not in (None, CANCELLED)
        return self.request.keep_context and self.final_context is None and ended

    @property
    def stays(self) -> bool:
        return self.unfinished or self.owes_end

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop_strings.found

    @property
    def read_after_text(self) -> str:
        """What final_context has read after the shown text: a stop string, and the rest of the token in which it ends."""
        return self._stop_strings.rest

    def cancel(self) -> None:
        """Ends the text; the row leaves at the next step."""
        if not self.complete:
            self.sample.finish_reason = CANCELLED

    def end_damaged(self) -> None:
        self.cancel()
        self.damaged = True

    def tokens_read(self) -> list[int]:
        """The tokens that the state has read when the text has just ended: all except the last one drawn."""
        written = self.sample.tokens
        return self.prompt_ids + (written[:-1] if self.last_token_in_text else written)

    def last_ids(self) -> list[int]:
        """The last ids that were read or drawn, including those before the prompt."""
        return [*self._before, *self.sample.tokens[-LAST_IDS:]][-LAST_IDS:]

    def uniform(self) -> float:
        if not self._uniform:
            drawn = torch.rand(AT_ONCE, generator=self._generator, dtype=torch.float64, device="cpu")
            self._uniform = drawn.tolist()[::-1]
        return self._uniform.pop()

    def find_allowed(self) -> bool:
        """Sets `forbidden`; returns whether any token may come next that the options do not ban."""
        if self._matcher is None:
            return True
        mask = self._matcher.allowed()
        if mask is None:
            return False
        self.forbidden = ZEROS[torch.frombuffer(mask, dtype=torch.uint8).int()].view(torch.bool)[:self._vocab_size]
        if not self.request.sampling.banned:
            return True
        left_out = self.forbidden.clone()
        left_out[list(self.request.sampling.banned)] = True
        return not bool(left_out.all())

    def end_without_token(self) -> str:
        """Ends a text after which no token is allowed; returns the text that was held back."""
        self.sample.finish_reason = NO_TOKEN
        text = self._flush()
        self.sample.text += text
        return text

    def push(self, token: int) -> str:
        """Appends a token that was drawn; returns the text that can be shown now. Sets finish_reason where the text ends."""
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
            if self._stop_strings.found is None and len(sample.tokens) == self.request.stopping.max_new_tokens:
                sample.finish_reason = "length"
                text += self._flush()
        if self._stop_strings.found is not None:
            sample.finish_reason = "stop"
        sample.text += text
        return text

    def _flush(self) -> str:
        text = self._stop_strings.push(self._text_decoder.flush())
        return text if self._stop_strings.found is not None else text + self._stop_strings.flush()
