"""Prefill: reads prompts in passes of bounded size, and caches the results by the tokens read.

A pass has at most Chunks.longest tokens. It begins at a multiple of that from the prompt's start, or where a cached prefix
ends, so the result does not depend on other prompts. A pass goes through the blocks in parts, each with about the work of
Chunks.budget tokens through all blocks; between two parts, other sequences advance. Where the model's step is in C, a pass of
at most SHORT_PROMPT tokens is one call of C: the blocks in PyTorch take as long for few tokens as for Chunks.weights more. On
a GPU such a pass is one replay of a CUDA graph, which saves the host some 30 launches a layer, and several prompts share it:
each token has the bits that a decoding step would give it, whatever is beside it. Longer prompts are read alone, because the
libraries behind the blocks' products choose the order of summation by the number of rows.

The result of reading has the same size for every length of text, so the cache holds many; those of a GPU are moved to host
memory. A prompt that begins with an earlier prompt, or with an earlier prompt and its answer, is read from the end of that on.
"""

import secrets
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, count, repeat
from math import ceil
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.backends.transfer import to_device
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder, GpuDecoder
from rwkv.generation.logprobs import logprobs
from rwkv.io.fair_lru import FairLRU
from rwkv.model.base import Model, State
from rwkv.model.weights_watch import WeightsWatch

LOGPROB_ROWS = 32                        # tokens of a prompt whose log-probabilities are computed at a time
SHORT_PROMPT = 64                        # tokens: C is no slower than PyTorch in any dtype, and a GPU's graph holds them
WEIGHTS_IN_C = 8                         # as Chunks.weights, in a call of C


class Chunks(NamedTuple):
    """How a prompt is cut on a device, in tokens.

    longest: the most tokens of a pass. budget: the work between two decoding steps, which bounds how long other sequences wait.
    weights: the tokens whose work takes as long as reading all weights, which each pass does once.
    """

    longest: int
    budget: int
    weights: int


ON_CPU = Chunks(512, 32, 48)             # with fewer rows products are slower, by a third for 128
ON_GPU = Chunks(4096, 2048, 300)         # an H100 multiplies some 300 rows in the time in which it reads the weights


def chunks_on(device: torch.device) -> Chunks:
    return ON_GPU if device.type == "cuda" else ON_CPU


class PrefillResult(NamedTuple):
    """The result of reading B rows: the logits (B,V) after the last token of each, and the state. It is never changed in place.

    last_ids: the last ids that a single row has read, because the text of the next id may depend on them; () where they are
    unknown or no text was read.
    """

    logits: Tensor
    state: State
    last_ids: tuple[int, ...] = ()

    def nbytes(self) -> int:
        return self.logits.nbytes + self.state.nbytes()

    def to(self, device: torch.device | str) -> "PrefillResult":
        return self._replace(logits=self.logits.to(device), state=self.state.to(device))

    @staticmethod
    def cat(results: Sequence["PrefillResult"]) -> "PrefillResult":
        """One result with the rows of all, in order."""
        return PrefillResult(torch.cat([result.logits for result in results]), State.cat([result.state for result in results]))


class Key(NamedTuple):
    """The key of a text in a PrefixCache: the number and the hash of its tokens, the model that has read it, and its owner.

    Different models, and different owners, share no entries.
    """

    length: int = 0
    hash: int = 0
    model: str = ""
    owner: str = ""


EMPTY = Key()


class PrefixCache:
    """The prefill results that were used last, by the tokens read, in at most max_bytes. An owner that holds no more than an
    equal share of them loses none to others.

    An entry is found by a polynomial hash of all its tokens, modulo a prime of 127 bits and at a random point. Finding the
    longest match takes one look-up for each token of the prompt, for any number of entries, and the key of a longer text is
    computed from that of its beginning. Two prefixes have the same hash with a probability of about their length / 2^127.
    A model's name in the keys stands for one model: its entries are removed when another model gets the name, and when the
    weights change. Threads may share a cache. Raises UserError for a max_bytes below 0.
    """

    _PRIME = 2**127 - 1

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        if max_bytes < 0:
            raise UserError(f"max_bytes must be 0 or more; got {max_bytes}")
        self.max_bytes = max_bytes
        self._point = secrets.randbelow(self._PRIME)
        self._entries: dict[Key, PrefillResult] = {}
        self._shares = FairLRU[Key]()
        self._weights: dict[str, WeightsWatch] = {}                     # by the name of the model
        self._lock = Lock()              # guards all of these

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        return self._shares.total

    def begin(self, model: Model, name: str = "") -> None:
        """Removes the entries under the model's name if they are of another model, or if the weights have changed."""
        with self._lock:
            known = self._weights.get(name)
            if known is not None and known.model is model and known.unchanged():
                return
            if known is not None:
                for key in [key for key in self._entries if key.model == name]:
                    self._remove(key)
            self._weights[name] = WeightsWatch(model)

    def key(self, tokens: Sequence[int], after: Key = EMPTY) -> Key:
        """The key of a text and these tokens. after: the key of the text."""
        *_, last = self._keys(tokens, after)
        return last

    def longest(self, tokens: Sequence[int], after: Key = EMPTY) -> tuple[Key, PrefillResult | None]:
        """The key of the longest prefix of `tokens` in the cache and the result after it; (after, None) where there is none."""
        keys = list(self._keys(tokens, after))
        with self._lock:
            found = next((key for key in reversed(keys) if key in self._entries), None)
            if found is None:
                return after, None
            self._shares.use(found)
            return found, self._entries[found]

    def put(self, key: Key, result: PrefillResult) -> None:
        result = result.to("cpu")
        size = result.nbytes()
        with self._lock:
            if key in self._entries:
                self._remove(key)
            if size > self.max_bytes:
                return
            self._entries[key] = result
            self._shares.add(key, key.owner, size)
            while self._shares.total > self.max_bytes:
                self._remove(self._shares.victim(self.max_bytes))

    def _keys(self, tokens: Sequence[int], after: Key = EMPTY) -> Iterator[Key]:
        """The key of each prefix of `tokens`, the empty one first, after the text with the key `after`."""
        hashes = accumulate(tokens, lambda value, token: (value * self._point + token + 1) % self._PRIME, initial=after.hash)
        return map(Key, count(after.length), hashes, repeat(after.model), repeat(after.owner))

    def _remove(self, key: Key) -> None:
        del self._entries[key]
        self._shares.remove(key)


class Prefill:
    """One prompt while it is read: each advance() reads the next part, until `result` is there.

    start: the result, of one row, that the prompt follows. after: the key of `start` in the cache; different starts need
    different keys. n_logprobs: keep log-probabilities, among the first vocab_size tokens, of each token of the prompt and of
    this many likeliest tokens; the whole prompt is then read, whatever is in the cache; None for no log-probabilities. decoder:
    of the model, which reads short passes; None where neither C nor a GPU's graph fits the model. pools: sum the final hidden
    states, for rwkv/generation/embedding.py; the whole prompt is then read, and nothing is cached. Raises ValueError where
    `start` has several rows or is of another model.
    """

    def __init__(self, model: Model, tokens: Sequence[int], start: PrefillResult | None = None,
                 cache: PrefixCache | None = None, n_logprobs: int | None = None, vocab_size: int | None = None,
                 after: Key = EMPTY, decoder: CDecoder | GpuDecoder | None = None, pools: bool = False) -> None:
        if start is not None:
            model.check_state(start.state, B=1)
        self._model = model
        self._device = model.emb.weight.device
        self._chunks = chunks_on(self._device)
        self._cache = cache = None if pools else cache
        self.hidden_sum: Tensor | None = None                    # (C) float64, of all tokens read, if it pools
        self.last_hidden: Tensor | None = None                   # (C), of the last token read, if it pools
        self._pools = pools
        self._n_logprobs = n_logprobs
        self._vocab_size = vocab_size
        self.tokens = list(tokens)
        self._so_far = start             # the result of the part that is read
        self._key = after                # the key of that result
        if cache is not None:
            cache.begin(model, after.model)
        if cache is not None and n_logprobs is None:
            self._key, found = cache.longest(self.tokens, after)
            self._so_far = found or start
        if self._so_far is not None:
            self._so_far = self._so_far.to(self._device)
        self._position = self._key.length
        self.cached = self._position                             # tokens that need not be read
        self.logprobs: list[tuple[Tensor, Tensor, Tensor]] = []  # results of logprobs() that are not taken yet
        self._running: Iterator[None] | None = None              # the pass that has begun
        self._decoder = None if pools else decoder               # it returns no hidden state

    @property
    def next_cost(self) -> int:
        """The work of the next part, measured in tokens through all blocks, at most Chunks.budget; 0 when all is read."""
        length = self._end - self._position
        if not length:
            return 0
        if self._decoder is not None and length <= SHORT_PROMPT and self._n_logprobs is None:
            return min(self._chunks.budget, WEIGHTS_IN_C + length)
        return min(self._chunks.budget, ceil((self._chunks.weights + length) / self._n_parts(length)))

    @property
    def joinable(self) -> int:
        """The tokens of the next part, if it can be read together with those of other prompts; else 0."""
        length = self._end - self._position
        joins = isinstance(self._decoder, GpuDecoder) and length <= SHORT_PROMPT and self._n_logprobs is None
        return length if joins else 0

    @property
    def result(self) -> PrefillResult | None:
        """The result, one row; None before the prompt's end."""
        return None if self.next_cost else self._so_far

    def advance(self) -> None:
        """Reads the next part, and caches the result at the end of a pass."""
        self._running = self._running or self._read_pass()
        try:
            next(self._running)
        except StopIteration:
            self._running = None

    @property
    def _end(self) -> int:
        longest = self._chunks.longest
        return min(len(self.tokens), (self._position // longest + 1) * longest)

    def _n_parts(self, length: int) -> int:
        """The smallest number of parts of whole blocks that each fit into the budget; a part per block if one does not fit."""
        L = len(self._model.blocks)
        blocks = self._chunks.budget * L // (self._chunks.weights + length)
        return ceil(L / max(1, blocks))

    @torch.no_grad()
    def _read_pass(self) -> Iterator[None]:
        ids = to_device(self._ids.unsqueeze(0), self._device)
        state = self._so_far.state if self._so_far else None
        if self._decoder is not None and ids.shape[1] <= SHORT_PROMPT:
            if self._n_logprobs is not None:             # nothing else of this pass is used: the text is the one without them
                yield from self._through_blocks(ids, state)
            read_together([self])
        else:
            self._end_pass((yield from self._through_blocks(ids, state)))

    @property
    def _ids(self) -> Tensor:
        """The tokens (t,) of the next pass."""
        return torch.tensor(self.tokens[self._position:self._end], device="cpu")

    def _end_pass(self, result: PrefillResult) -> None:
        end = self._end
        if self._cache is not None:
            self._key = self._cache.key(self.tokens[self._position:end], self._key)
            self._cache.put(self._key, result)
        self._so_far = result
        self._position = end

    def _through_blocks(self, ids: Tensor, state: State | None) -> Generator[None, None, PrefillResult]:
        model = self._model
        head: nn.Module = model.head
        if model.is_untouched() or self._pools:
            for found in model.hidden_in_parts(ids, state, self._n_parts(ids.shape[1])):
                if found is None:
                    yield
                else:
                    hidden, state = found
        else:                            # a hook on the model may change the logits of all positions
            hidden, state = model(ids, state)
            head = nn.Identity()
        if self._pools:
            total = hidden[0].double().sum(0)
            self.hidden_sum = total if self.hidden_sum is None else self.hidden_sum + total
            self.last_hidden = hidden[0, -1]
        if self._n_logprobs is not None:
            following = torch.tensor(self.tokens[self._position + 1:self._position + ids.shape[1] + 1], device="cpu")
            for rows, targets in zip(hidden[0].split(LOGPROB_ROWS), following.split(LOGPROB_ROWS), strict=False):
                logits = head(rows[:len(targets)])[:, :self._vocab_size]
                self.logprobs.append(logprobs(logits, targets, self._n_logprobs))
                yield
        assert state is not None
        return PrefillResult(head(hidden[:, -1]), state)


@torch.no_grad()
def read_together(readings: Sequence[Prefill]) -> None:
    """Reads the next passes of prompts by the decoder that they share: of one prompt, or of several that are joinable."""
    first = readings[0]
    assert first._decoder is not None
    states = [first._model.empty_state(1) if reading._so_far is None else reading._so_far.state for reading in readings]
    decoder = first._decoder.beside(State.cat(states))
    logits, state = decoder.read([reading._ids for reading in readings]), decoder.state()
    for row, reading in enumerate(readings):
        reading._end_pass(PrefillResult(logits[row:row + 1], state.rows(slice(row, row + 1))))


def prefill(model: Model, tokens: Tensor, start: PrefillResult | None = None) -> PrefillResult:
    state = start.state if start else None
    device = model.emb.weight.device
    for part in tokens.to(device).split(chunks_on(device).longest, dim=1):
        logits, state = model.prefill(part, state)
    assert state is not None
    return PrefillResult(logits, state)

