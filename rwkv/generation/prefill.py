"""Prefill reads prompts in chunks of bounded size.

A chunk has at most Chunks.longest tokens. Chunks begin at multiples of Chunks.longest from the prompt's start, or where a
cached prefix ends, so the result does not depend on other prompts. A chunk passes through the blocks in stages. Each stage has
about the work of Chunks.budget tokens through all blocks. Between two stages, other sequences advance.

If a CDecoder can run the model, a chunk of at most SHORT_PROMPT tokens is one C call: in PyTorch, reading the weights would
cost as much as Chunks.weights more tokens. On a GPU such a chunk is one replay of a CUDA graph, which saves the host some 30
launches per layer. Several short prompts can share a replay, because the results are bit for bit those of decoding steps in any
batch. Longer prompts run alone, because the matrix-product libraries choose the order of summation by the number of rows.
"""

from collections.abc import Generator, Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.backends.transfer import to_device
from rwkv.config import Pooling
from rwkv.generation.decoder import CDecoder, GpuDecoder
from rwkv.generation.logprobs import logprobs
from rwkv.generation.prefix_cache import EMPTY, Key, PrefillResult, PrefixCache
from rwkv.model.base import Model, State

LOGPROB_ROWS = 32                        # prompt tokens whose log-probabilities are computed together
SHORT_PROMPT = 64                        # up to this many tokens C is as fast as PyTorch in any dtype; also a GPU graph's limit
WEIGHTS_IN_C = 8                         # replaces Chunks.weights where a chunk is one C call or graph replay


class Chunks(NamedTuple):
    """The sizes that prefill uses on a device, in tokens."""

    longest: int                         # the largest number of tokens per chunk
    budget: int                          # the work between two decoding steps, which limits how long other sequences wait
    weights: int                         # reading all weights once, as each chunk does, takes as long as this many tokens


ON_CPU = Chunks(512, 32, 48)             # with shorter chunks, prefill is slower per token: by a third at 128
ON_GPU = Chunks(4096, 2048, 300)         # an H100 multiplies some 300 rows in the time in which it reads the weights


def chunks_on(device: torch.device) -> Chunks:
    return ON_GPU if device.type == "cuda" else ON_CPU


class Prefill:
    """Reads one prompt. Each call of advance() runs one stage, and the prompt has been read when `result` is no longer None.

    Raises ValueError if `start` has several rows or belongs to a different model.

    Args:
        start: the result, with one row, from which the prompt continues.
        n_logprobs: the number of likeliest tokens to collect at each prompt token, with log-probabilities, in addition to the
            prompt token itself. None turns log-probabilities off. Any number turns off the use of cached prefixes.
        vocab_size: the number of tokens, from id 0 on, over which log-probabilities are computed.
        after: the cache key of `start`. Different starts need different keys.
        decoder: a decoder of the model for short chunks, or None if the model has neither a CDecoder nor a GpuDecoder.
        pool_hidden: sums the final hidden states for embeddings (rwkv/generation/embedding.py). The cache is then not used.
    """

    def __init__(self, model: Model, tokens: Sequence[int], start: PrefillResult | None = None,
                 cache: PrefixCache | None = None, n_logprobs: int | None = None, vocab_size: int | None = None,
                 after: Key = EMPTY, decoder: CDecoder | GpuDecoder | None = None, pool_hidden: bool = False) -> None:
        if start is not None:
            model.check_state(start.state, B=1)
        self._model = model
        self._device = model.emb.weight.device
        self._chunks = chunks_on(self._device)
        self._cache = cache = None if pool_hidden else cache
        self.hidden_sum: Tensor | None = None                    # (C) float64, over all tokens read; None without pool_hidden
        self.last_hidden: Tensor | None = None                   # (C), of the last token read; None without pool_hidden
        self._pool_hidden = pool_hidden
        self._n_logprobs = n_logprobs
        self._vocab_size = vocab_size
        self.tokens = list(tokens)
        self._latest_result = start      # the result after the tokens read so far
        self._key = after                # the cache key of _latest_result
        if cache is not None:
            cache.begin(model, after.model)
        if cache is not None and n_logprobs is None:
            self._key, cached_result = cache.longest(self.tokens, after)
            self._latest_result = cached_result or start
        if self._latest_result is not None:
            self._latest_result = self._latest_result.to(self._device)
        self._position = self._key.length
        self.cached = self._position                             # tokens that came from the cache
        self.logprobs: list[tuple[Tensor, Tensor, Tensor]] = []  # return values of logprobs(), until the caller clears them
        self._chunk_run: Iterator[None] | None = None            # the chunk in progress
        self._decoder = None if pool_hidden else decoder         # decoders do not return the hidden states

    @property
    def next_cost(self) -> int:
        """Returns the work of the next stage, in units of one token through all blocks.

        The work is at most Chunks.budget, and 0 when the whole prompt has been read.
        """
        length = self._chunk_end - self._position
        if not length:
            return 0
        if self._decoder is not None and length <= SHORT_PROMPT and self._n_logprobs is None:
            return min(self._chunks.budget, WEIGHTS_IN_C + length)
        return min(self._chunks.budget, ceil((self._chunks.weights + length) / self._n_stages(length)))

    @property
    def joinable_tokens(self) -> int:
        """Returns the number of tokens in the next chunk, or 0 if this chunk cannot share a pass with other prompts."""
        length = self._chunk_end - self._position
        joins = isinstance(self._decoder, GpuDecoder) and length <= SHORT_PROMPT and self._n_logprobs is None
        return length if joins else 0

    @property
    def result(self) -> PrefillResult | None:
        """Returns the result, which has one row, or None until the whole prompt has been read."""
        return None if self.next_cost else self._latest_result

    def advance(self) -> None:
        """Runs the next stage. The last stage of a chunk also puts the result into the cache."""
        self._chunk_run = self._chunk_run or self._run_chunk()
        try:
            next(self._chunk_run)
        except StopIteration:
            self._chunk_run = None

    def abandon(self) -> None:
        """Frees the tensors of the chunk in progress.

        Without this call they would stay until Python's garbage collector runs, because the chunk's generator refers to self.
        """
        self._chunk_run = None

    @property
    def _chunk_end(self) -> int:
        longest = self._chunks.longest
        return min(len(self.tokens), (self._position // longest + 1) * longest)

    def _n_stages(self, length: int) -> int:
        """Returns the fewest stages of whole blocks that keep to the budget, or one stage per block if no block fits."""
        L = len(self._model.blocks)
        blocks = self._chunks.budget * L // (self._chunks.weights + length)
        return ceil(L / max(1, blocks))

    @torch.no_grad()
    def _run_chunk(self) -> Iterator[None]:
        ids = to_device(self._chunk_ids.unsqueeze(0), self._device)
        state = self._latest_result.state if self._latest_result else None
        if self._decoder is not None and ids.shape[1] <= SHORT_PROMPT:
            if self._n_logprobs is not None:             # only for logprobs, because decoders return only the last logits
                yield from self._run_blocks(ids, state)
            advance_all([self])
        else:
            self._finish_chunk((yield from self._run_blocks(ids, state)))

    @property
    def _chunk_ids(self) -> Tensor:
        return torch.tensor(self.tokens[self._position:self._chunk_end], device="cpu")

    def _finish_chunk(self, result: PrefillResult) -> None:
        end = self._chunk_end
        if self._cache is not None:
            self._key = self._cache.key(self.tokens[self._position:end], self._key)
            self._cache.put(self._key, result)
        self._latest_result = result
        self._position = end

    def _run_blocks(self, ids: Tensor, state: State | None) -> Generator[None, None, PrefillResult]:
        model = self._model
        head: nn.Module = model.head
        if model.is_unmodified() or self._pool_hidden:
            for result in model.hidden_in_parts(ids, state, self._n_stages(ids.shape[1])):
                if result is None:
                    yield
                else:
                    hidden, state = result
        else:                            # runs the whole model, because a hook may change the logits of all positions
            hidden, state = model(ids, state)
            head = nn.Identity()
        if self._pool_hidden:
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
def advance_all(prompts: Sequence[Prefill]) -> None:
    """Reads the next chunk of each prompt. The prompts share one call of the decoder.

    If there are several prompts, each must have joinable_tokens above 0.
    """
    first = prompts[0]
    assert first._decoder is not None
    states = [prompt._latest_result.state if prompt._latest_result else first._model.empty_state(1) for prompt in prompts]
    decoder = first._decoder.with_state(State.cat(states))
    logits, state = decoder.read([prompt._chunk_ids for prompt in prompts]), decoder.state()
    for row, prompt in enumerate(prompts):
        prompt._finish_chunk(PrefillResult(logits[row:row + 1], state.rows(slice(row, row + 1))))


def pool_embedding(prefill: Prefill, pooling: Pooling) -> Tensor:
    """Returns the embedding (C) of a prompt that was read with pool_hidden=True, as float32 with norm 1."""
    assert prefill.hidden_sum is not None
    assert prefill.last_hidden is not None
    vector = prefill.hidden_sum if pooling == "mean" else prefill.last_hidden.double()
    return nn.functional.normalize(vector, dim=0).float().cpu()


def prefill(model: Model, tokens: Tensor, start: PrefillResult | None = None) -> PrefillResult:
    state = start.state if start else None
    device = model.emb.weight.device
    for chunk in tokens.to(device).split(chunks_on(device).longest, dim=1):
        logits, state = model.prefill(chunk, state)
    assert state is not None
    return PrefillResult(logits, state)

