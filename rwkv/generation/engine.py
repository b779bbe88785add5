"""The engine generates a batch of sequences, one row each, and draws one token per row in each step.

Prefill reads a prompt in chunks of many tokens (prefill.py). After prefill, each step reads one token per row (decoder.py), so
memory and time per token do not depend on the length of the sequence. With a draft, a step may read and draw several tokens
of a row (speculation.py). Rows join and leave between steps. A sequence depends only on its prompt, seed and options,
not on the other rows, the draft or streaming.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from itertools import chain
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from kernels.backends.transfer import to_device
from kernels.operator import PLAIN
from rwkv.config import LARGEST_SEED, Sampling, require_type, strings, whole_number, whole_numbers
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder, GpuDecoder, decoder_of
from rwkv.generation.draft import Draft
from rwkv.generation.grammar import Grammar
from rwkv.generation.logprobs import logprob_entry, logprobs
from rwkv.generation.prefill import SHORT_PROMPT, Prefill, advance_all, chunks_on, pool_embedding, prefill
from rwkv.generation.prefix_cache import EMPTY, PrefillResult, PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.row import CANCELLED, Row, Sample
from rwkv.generation.sampling import (
    Penalties,
    PenaltyTable,
    TablePenalties,
    draw_function_on,
    not_finite_error,
    queue_tokens,
    to_host,
)
from rwkv.generation.speculation import Speculation
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.json_types import JsonObject
from rwkv.model.base import Model, State
from rwkv.model.decoding.triton_step import SPARE_SLOTS
from rwkv.model.weights_watch import WeightsWatch, tensors_of
from rwkv.tokenizer.decoders import LAST_IDS, require_id
from rwkv.tokenizer.tokenizers import MAX_UNUSED_ROWS, Tokenizer, require_tokenizer_type

WARM_TOKENS = 4                          # warm_up generates this many tokens
WARM_SAMPLINGS = (                       # one for each variant of the GPU draw kernels
    Sampling(), Sampling(temperature=0), Sampling(presence_penalty=0.5), Sampling(top_k=2), Sampling(top_p=1),
    Sampling(top_p=1, min_p=0.1), Sampling(order="rwkv"), Sampling(order="rwkv", top_k=2),
    Sampling(order="rwkv", top_p=1, min_p=0.1))
CHECK_INTERVAL_GPU = 64                  # checks the weights only once in 64 steps, because a check synchronises with the GPU


def generate(model: Model, tokenizer: Tokenizer, prompt: str = "", max_new_tokens: int = 200, seed: int = 0,
             stop: Sequence[str] = (), stop_tokens: Sequence[int] = (), context: PrefillResult | None = None,
             cache: PrefixCache | None = None, grammar: Grammar | None = None, draft: Draft | None = None,
             **sampling: Any) -> Iterator[str]:
    """Yields the continuation of `prompt`, without the prompt, in pieces of whole characters as they are generated.

    The call raises ValueError, before the iterator is used, if an option is invalid, if the prompt cannot be encoded, or if
    the tokenizer has more tokens than the model. If there is neither a context nor a prompt, generation starts from the
    end-of-text token.

    Args:
        context: the prefill result of the text before the prompt.
        cache, draft: as for Engine.
        grammar: constrains the generated text (rwkv/generation/grammar).
        sampling: fields of rwkv.config.Sampling.
    """
    engine = Engine(model, tokenizer, cache, draft)
    warn_of_other_tokenizer(model, tokenizer)
    require_type("prompt", prompt, str, "a string (generate_batch continues a list of prompts)")
    engine.add_all([Request(prompt, seed, StoppingCriteria(max_new_tokens, stop, stop_tokens),
                            _sampling_of(generate, sampling), grammar=grammar, context=context)])
    return (piece for _, piece in engine if piece)


def generate_batch(model: Model, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int = 200,
                   seeds: Sequence[int] | None = None, stop: Sequence[str] = (), stop_tokens: Sequence[int] = (),
                   cache: PrefixCache | None = None, logprobs: int = 0, grammar: Grammar | None = None,
                   draft: Draft | None = None, **sampling: Any) -> list[Sample]:
    """Continues all prompts as one batch, and returns a finished Sample for each prompt. Raises ValueError as `generate` does.

    The tokens are exactly those of `generate` for small models, for int8, and for large models on a CPU with C kernels
    (kernels/native). For other models, PyTorch's matrix products of several rows may differ in the last bits from those of one
    row, so a text may diverge where two tokens are almost equally likely.

    Args:
        seeds: one seed per prompt; the default is 0 for all prompts.
        logprobs: the number of likeliest tokens in each entry of Sample.logprobs; 0 turns log-probabilities off.
    """
    prompts = strings("prompts", prompts)
    seeds = [0] * len(prompts) if seeds is None else whole_numbers("seed", seeds, most=LARGEST_SEED)
    if len(prompts) != len(seeds):
        raise UserError(f"seeds must have one seed per prompt, but there are {len(prompts)} prompts and {len(seeds)} seeds")
    stopping = StoppingCriteria(max_new_tokens, stop, stop_tokens)
    options = _sampling_of(generate_batch, sampling)
    n_logprobs = whole_number("logprobs", logprobs) or None
    engine = Engine(model, tokenizer, cache, draft)
    warn_of_other_tokenizer(model, tokenizer)
    rows = engine.add_all([Request(prompt, seed, stopping, options, n_logprobs, grammar=grammar)
                           for prompt, seed in zip(prompts, seeds, strict=True)])
    engine.run()
    return [row.sample for row in rows]


def _sampling_of(function: Callable[..., object], options: dict[str, Any]) -> Sampling:
    """Returns the sampling options, which are keyword arguments of `function`. Raises TypeError if it has no such argument."""
    fields_of_sampling = [item.name for item in fields(Sampling)]
    unknown = next((name for name in options if name not in fields_of_sampling), None)
    if unknown is not None:
        known = [*signature(function).parameters][:-1] + fields_of_sampling
        close = get_close_matches(unknown, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the arguments are {', '.join(known)}"
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}: {hint}")
    return Sampling(**options)


def require_model(value: object) -> None:
    """Raises UserError unless the argument `model` of a function is a Model, or one that torch.compile has wrapped."""
    require_type("model", getattr(value, "_orig_mod", value), Model, 'an RWKV model, such as RWKV.from_pretrained("FILE.pth")')


def warn_of_other_tokenizer(model: Model, tokenizer: Tokenizer) -> None:
    """Warns the caller's caller if the model has many more tokens than the tokenizer, a sign of a different tokenizer."""
    if tokenizer.vocab_size + MAX_UNUSED_ROWS < model.vocab_size:
        warnings.warn(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model has {model.vocab_size}: use the "
                      "tokenizer that the model was trained with, because another one's ids have other meanings", stacklevel=3)


class Engine:
    """Generates a batch of sequences, one row each. Iterating over the engine yields pairs (row's index, piece of text).

    Rows may join and leave while the engine runs. The prefill of a new row runs between the steps of the other rows, with the
    work of about Chunks.budget tokens per step. A piece of text may be empty. If the model's weights change
    (rwkv/model/weights_watch.py), the next step uses the new weights with the old states; on a GPU, one of the next 64 steps
    does. The engine is not thread-safe. Raises UserError if the tokenizer has more tokens than the model.

    Args:
        cache: supplies the longest cached prefix of each prompt, and stores the results of prefill and of finished sequences.
        draft: proposes tokens, which changes no sequence. The draft is used only on a CPU with C kernels (see `speculates`).
        checks_weights: if False, step() does not look for changed weights, which takes up to a sixth of a small model's step.
            After a change, step() then uses old and new weights, until add_all(), run() or context() is called.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, cache: PrefixCache | None = None, draft: Draft | None = None,
                 checks_weights: bool = True) -> None:
        require_model(model)
        require_tokenizer_type(tokenizer)
        require_type("cache", cache, (PrefixCache, type(None)), "a PrefixCache or None")
        if draft is not None and not hasattr(draft, "propose"):
            raise UserError("draft must be an object that proposes tokens, such as NGram(), or None; got a "
                            f"{type(draft).__name__}")
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(f"the tokenizer does not fit the model: the model has only {model.vocab_size} tokens, but the "
                            f"tokenizer has {tokenizer.vocab_size}")
        self._model = model
        self._tokenizer = tokenizer
        self._cache = cache
        self._draft = draft
        self._speculation = Speculation(draft) if draft else None
        self._ahead: dict[int, _ReadAhead] = {}          # the keys are positions; empty between steps
        self._prefills: deque[_SharedPrefill] = deque()  # unfinished prefills, the next one first
        self._rows: list[Row] = []                       # has the decoder's order; finished rows leave at the next step
        self._logits = torch.empty(0, model.vocab_size, device=model.emb.weight.device)       # (rows, V)
        self._decode_from(model.empty_state(0))
        on_gpu = self._draw_device.type == "cuda"
        self._penalty_table = PenaltyTable(tokenizer.vocab_size, self._draw_device) if on_gpu else None
        self._drawn: Tensor | None = None                # holds the last tokens drawn, until the decoder reads them
        self._added = 0                                  # rows added so far
        self._chunks = chunks_on(model.emb.weight.device)
        self._steps = 0
        self._check_interval = CHECK_INTERVAL_GPU if self._logits.is_cuda else 1
        self._checks_weights = checks_weights

    def add_all(self, requests: Sequence[Request]) -> list[Row]:
        """Adds a row for each request and runs their prefills. Raises ValueError as add() does, before any prefill."""
        rows = [self.add(request) for request in requests]
        self._use_current_weights()
        self._drop_finished()
        self._step_decoder()             # earlier rows must read their last tokens before the new rows join them
        while self._prefills:
            self._advance_prefills()
        return rows

    def add(self, request: Request) -> Row:
        """Adds a row, whose prefill begins at the next step. Raises ValueError as `generate` does."""
        require_type("context", request.context, (PrefillResult, type(None)), "a PrefillResult or None")
        sampling = request.sampling
        sampling.check_ids(self._tokenizer.vocab_size)
        request.stopping.check_ids(self._tokenizer.vocab_size)
        ids = self._prompt_ids(request)
        penalties: Penalties | TablePenalties | None = None
        if sampling.has_penalties:
            new_penalties = self._penalty_table.row if self._penalty_table else Penalties
            penalties = new_penalties(sampling, [*request.earlier, *ids], sampling.ids_without_penalty(self._tokenizer))
        row = Row(self._added, request, ids, self._tokenizer, penalties, self._cache if request.uses_cache else None)
        shared = next((shared for shared in self._prefills if shared.serves(request, ids)), None)
        if shared is None:
            shared = _SharedPrefill(self._new_prefill(request, ids), request, [])
            self._prefills.append(shared)
        row.cached_tokens = shared.prefill.cached
        shared.rows.append(row)
        self._added += 1
        return row

    def warm_up(self, rows: int = 1) -> None:
        """Runs a prefill and a few steps, so that no later request waits for kernels, weights or threads to be prepared.

        On a GPU, this also captures the CUDA graphs for up to `rows` rows, and runs every sampling kernel once.
        """
        longest, budget, _ = self._chunks
        # kernels may have special code for short, odd and one-token chunks, and for a chunk that continues from a state
        for tokens in (longest + 1, budget, longest - 1, 1):
            prefill(self._model, torch.zeros(1, tokens, dtype=torch.long, device="cpu"))
        engine = Engine(self._model, self._tokenizer, draft=self._draft)         # without a cache, so that nothing is stored
        for n_logprobs in (None, 1):     # runs steps with one row, and then with two
            engine.add(Request([0], stopping=StoppingCriteria(WARM_TOKENS), n_logprobs=n_logprobs))
            engine.step()
        engine.run()
        for options in WARM_SAMPLINGS if self._draw_device.type == "cuda" else ():
            engine.add(Request([0], stopping=StoppingCriteria(1), sampling=options))
            engine.run()
        if isinstance(self._decoder, GpuDecoder):        # comes last, because new slots would invalidate the graphs
            self._decoder.warm_up(rows)

    @property
    def unfinished(self) -> bool:
        return bool(self._prefills) or any(row.active for row in self._rows)

    def run(self) -> None:
        """Finishes all rows."""
        self._use_current_weights()
        while self.unfinished:
            self._step()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[tuple[int, str]]:
        """Draws a token for each unfinished row whose prefill is done, and returns (row's index, piece of text) for each.

        With a draft, several tokens may be drawn for a row. Before the draw, finished rows leave, and prefills advance by the
        work of about Chunks.budget tokens.
        """
        if not self.unfinished:          # keeps the last rows, because context() needs them
            return []
        self._steps += 1
        if self._checks_weights and self._steps % self._check_interval == 0:
            self._use_current_weights()
        return self._step()

    def _step(self) -> list[tuple[int, str]]:
        self._drop_finished()
        timed = self._speculation if self.speculates and self._drawn is not None and not self._prefills else None
        began = perf_counter()
        self._step_decoder(speculate=True)
        self._advance_prefills()
        pieces: dict[int, str] = {}
        positions = [*range(len(self._rows))]
        while positions:
            for index, piece in self._draw_next(positions):
                pieces[index] = pieces.get(index, "") + piece
            positions = [position for position, ahead in self._ahead.items() if self._accept(position, ahead)]
        proposed = sum(len(ahead.draft) for ahead in self._ahead.values())
        self._drop_ahead()
        if timed is not None:
            timed.record_time(len(self._rows), proposed, perf_counter() - began)
        return [*pieces.items()]

    def _draw_next(self, positions: Sequence[int]) -> list[tuple[int, str]]:
        rows = [(position, self._rows[position]) for position in positions]
        pieces = [(row.index, row.end_without_token()) for _, row in rows if row.unfinished and not row.update_forbidden()]
        for position, row in rows:
            if row.needs_final_context:  # the result is complete now that the step has read the last token
                self._set_final_context(position)
        unfinished = [(position, row) for position, row in rows if row.unfinished]
        if not unfinished:
            return pieces
        tokens = self._draw([position for position, _ in unfinished])
        if self._drawn is None:
            self._drawn = torch.zeros(len(self._rows), dtype=torch.int64, device="cpu")
        self._drawn[[position for position, _ in unfinished]] = torch.tensor(tokens, device="cpu")
        for (position, row), token in zip(unfinished, tokens, strict=True):
            if row.damaged:
                continue
            pieces.append((row.index, row.push(token)))
            if not row.unfinished and row.cache is not None:
                key = row.cache.key(row.tokens_read(), row.request.context_key or EMPTY)
                row.cache.put(key, self._row_result(position))
            if row.needs_final_context and not row.last_token_in_text:
                self._set_final_context(position)
        return pieces

    def _accept(self, position: int, ahead: "_ReadAhead") -> bool:
        """Moves the row past the next proposed token if the row has drawn that token. Returns True if the row has moved."""
        if not self._rows[position].unfinished or ahead.accepted == len(ahead.draft):
            return False
        assert self._drawn is not None
        if ahead.draft[ahead.accepted] != self._drawn[position]:
            return False
        ahead.accepted += 1
        cast(CDecoder, self._decoder).advance(position)
        self._logits[position] = ahead.logits[ahead.accepted]
        return True

    def _drop_ahead(self) -> None:
        for position, ahead in self._ahead.items():
            assert self._speculation is not None
            self._speculation.record(self._rows[position], len(ahead.draft), ahead.accepted)
        if self._ahead:
            cast(CDecoder, self._decoder).drop_ahead()
            self._ahead = {}

    def context(self) -> PrefillResult:
        """Returns the prefill result of the only row's whole sequence. `generate(..., context=...)` can continue from it."""
        row, = self._rows
        self._use_current_weights()
        if row.last_token_unread:
            self._step_decoder()
        return self._final_context(0)

    def _new_prefill(self, request: Request, ids: list[int]) -> Prefill:
        cache = self._cache if request.uses_cache else None
        return Prefill(self._model, ids, request.context, cache, request.n_prompt_logprobs, self._tokenizer.vocab_size,
                       request.context_key or EMPTY, self._short_prompt_decoder, request.pooling is not None)

    def _decode_from(self, state: State) -> None:
        self._weights = WeightsWatch(self._model)
        # The decoder may hold the weights' addresses, which must stay valid even if a parameter gets other data
        self._storages = [tensor.untyped_storage() for tensor in tensors_of(self._model) if type(tensor) in PLAIN]
        self._decoder = decoder_of(self._model, state)
        self._short_prompt_decoder = self._decoder if isinstance(self._decoder, CDecoder | GpuDecoder) else None
        self._draw_function, self._draw_device = draw_function_on(self._model.emb.weight.device,
                                                                  isinstance(self._decoder, CDecoder))

    def _use_current_weights(self) -> None:
        """If the weights have changed, continues with the new ones, and restarts unfinished prefills.

        Running rows then no longer put results into the cache, because their states mix old and new weights.
        """
        if self._weights.is_unchanged():
            return
        self._decode_from(self._decoder.state())
        for row in self._rows:
            row.cache = None
        for shared in self._prefills:
            shared.prefill.abandon()
            shared.prefill = self._new_prefill(shared.request, shared.prefill.tokens)
            shared.logprobs.clear()

    def _row_result(self, position: int) -> PrefillResult:
        return PrefillResult(self._logits[[position]], self._decoder.state([position])).to("cpu")

    def _final_context(self, position: int) -> PrefillResult:
        return self._row_result(position)._replace(last_ids=tuple(self._rows[position].last_ids()))

    def _prompt_ids(self, request: Request) -> list[int]:
        prompt, context = request.prompt, request.context
        if isinstance(prompt, str):
            ids = self._tokenizer.encode_after(prompt, context.last_ids if context else ())
        else:
            ids = list(whole_numbers("prompt", prompt))
        for token in ids:
            require_id(token, self._tokenizer.vocab_size)
        return ids if ids or context is not None else [self._tokenizer.end_of_text]

    def _drop_finished(self) -> None:
        positions = [position for position, row in enumerate(self._rows) if row.active]
        if len(positions) == len(self._rows):
            return
        self._logits = self._logits[to_device(torch.tensor(positions, dtype=torch.int64, device="cpu"), self._logits.device)]
        self._decoder.keep(positions)    # after the logits are copied, because keep() may overwrite them
        if self._drawn is not None:
            self._drawn = self._drawn[positions]
        self._rows = [self._rows[position] for position in positions]

    def _step_decoder(self, speculate: bool = False) -> None:
        """Reads the last token of each row. With `speculate`, also reads the tokens that the draft proposes."""
        if self._drawn is not None:
            drafts = self._speculation.propose(self._rows) if speculate and self._speculation and self.speculates else []
            if any(drafts):
                self._read_ahead(drafts)
            elif self._rows:
                self._logits = self._decoder.step(self._drawn)
            self._drawn = None

    def _read_ahead(self, drafts: Sequence[list[int]]) -> None:
        assert self._drawn is not None
        decoder = cast(CDecoder, self._decoder)
        sequences = [[token, *draft] for token, draft in zip(self._drawn.tolist(), drafts, strict=True)]
        logits = decoder.read_ahead(sequences).split([*map(len, sequences)])
        self._logits = torch.stack([each[0] for each in logits])
        self._ahead = {position: _ReadAhead(draft, logits[position]) for position, draft in enumerate(drafts) if draft}
        for position in range(len(self._rows)):
            decoder.advance(position)

    @property
    def speculates(self) -> bool:
        """Returns True if the engine has a draft and uses it, which requires a CDecoder."""
        return self._draft is not None and isinstance(self._decoder, CDecoder)

    def _advance_prefills(self) -> None:
        """Advances the prefills by the work of Chunks.budget tokens in total. Rows whose prefill is done join the batch."""
        budget = self._chunks.budget
        results = []
        while self._prefills and self._prefills[0].prefill.next_cost <= budget:
            batch = self._next_prefills(budget)
            budget -= sum(shared.prefill.next_cost for shared in batch)
            if len(batch) > 1:
                advance_all([shared.prefill for shared in batch])
            elif batch and batch[0].prefill.next_cost:
                batch[0].prefill.advance()
                self._append_prompt_logprobs(batch[0])
            for shared in batch:
                result = shared.prefill.result
                if result is None:
                    self._prefills.append(shared)
                    continue
                for row in shared.rows:
                    row.prompt_read = True
                    row.prompt_logprobs = shared.logprobs
                    if row.request.pooling is not None:
                        row.embedding = pool_embedding(shared.prefill, row.request.pooling)
                self._rows += shared.rows
                results += [result] * len(shared.rows)
        if results:
            joined = PrefillResult.cat(results)
            self._decoder.join(joined.state)
            self._logits = torch.cat((self._logits, joined.logits))

    def _next_prefills(self, budget: int) -> list["_SharedPrefill"]:
        """Removes and returns the next prefill in the queue, with the short prefills behind it that can share its pass."""
        batch: list[_SharedPrefill] = []
        tokens = 0
        while self._prefills and self._prefills[0].prefill.next_cost <= budget:
            first = self._prefills[0].prefill
            total = tokens + first.joinable_tokens
            if batch and not (tokens and first.joinable_tokens and total <= SHORT_PROMPT and len(batch) < SPARE_SLOTS):
                break
            shared = self._prefills.popleft()
            shared.rows = [row for row in shared.rows if row.sample.finish_reason != CANCELLED]
            if shared.rows:
                batch.append(shared)
                tokens = total
                budget -= first.next_cost
            else:
                first.abandon()
        return batch

    def _set_final_context(self, position: int) -> None:
        row, context = self._rows[position], self._final_context(position)
        if row.request.context is not None and not context.logits.amax().isfinite():
            row.cancel_damaged()
        else:
            row.final_context = context

    def _draw(self, positions: Sequence[int]) -> list[int]:
        """Returns the next token of the row at each position. Rows with equal options are drawn together.

        If the logits of a row with a context are not finite, the context's file may be damaged. The row is then cancelled, and
        its token is 0.
        """
        rows = [self._rows[position] for position in positions]
        logits = self._logits[:, :self._tokenizer.vocab_size]
        if len(rows) < len(self._rows):
            logits = logits[to_device(torch.tensor(positions, device="cpu"), logits.device)]
        logits = _mask_forbidden(logits.to(self._draw_device), rows)
        tokens = [0] * len(rows)
        groups: dict[Sampling, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.request.sampling, []).append(index)
        queued = []
        for options, indices in groups.items():
            group = [rows[index] for index in indices]
            penalties: Any = [row.penalties for row in group if row.penalties is not None] or None
            group_logits = logits
            if len(group) < len(rows):
                group_logits = logits[to_device(torch.tensor(indices, device="cpu"), logits.device)]
            uniform = torch.tensor([row.uniform() for row in group], dtype=torch.float64, device="cpu")
            queued.append(queue_tokens(group_logits, uniform, options, penalties, self._draw_function))
        for index, token in zip(chain.from_iterable(groups.values()), to_host(queued).tolist(), strict=True):
            row = rows[index]
            if token < 0 and row.request.context is None:
                raise not_finite_error()
            if token < 0:
                row.cancel_damaged()
                continue
            tokens[index] = token
            if row.penalties is not None:
                row.penalties.add(token)
        self._append_logprobs(rows, logits, tokens)
        return tokens

    def _append_logprobs(self, rows: Sequence[Row], logits: Tensor, tokens: Sequence[int]) -> None:
        indices = [index for index, row in enumerate(rows) if row.request.n_logprobs is not None and not row.damaged]
        if not indices:
            return
        n = max(rows[index].request.n_logprobs or 0 for index in indices)
        drawn = torch.tensor([tokens[index] for index in indices], device="cpu")
        for index, logprob, top_ids, top_logprobs in zip(indices, *logprobs(logits[indices], drawn, n), strict=True):
            row = rows[index]
            row.sample.logprobs.append(logprob_entry(self._tokenizer, tokens[index], logprob, top_ids, top_logprobs,
                                                     row.request.n_logprobs, row.last_ids()))

    def _append_prompt_logprobs(self, shared: "_SharedPrefill") -> None:
        """Appends the entries of the last chunk. Creating all entries at the end of a long prompt would take seconds."""
        for chunk_logprobs, *chunk_top in shared.prefill.logprobs:
            start = len(shared.logprobs) + 1
            tokens = shared.prefill.tokens[start:start + len(chunk_logprobs)]
            for token, logprob, top_ids, top_logprobs in zip(tokens, chunk_logprobs, *chunk_top, strict=True):
                position = len(shared.logprobs) + 1
                before = shared.prefill.tokens[max(0, position - LAST_IDS):position]
                shared.logprobs.append(logprob_entry(self._tokenizer, token, logprob, top_ids, top_logprobs,
                                                     shared.request.n_logprobs, before))
        shared.prefill.logprobs.clear()


def _mask_forbidden(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    masks = [(index, row.forbidden) for index, row in enumerate(rows) if row.forbidden is not None]
    if masks:
        logits = logits.clone()
    for index, forbidden in masks:
        logits[index].masked_fill_(to_device(forbidden, logits.device), -torch.inf)
    return logits


@dataclass
class _ReadAhead:
    """Holds the n tokens proposed for a row, with the logits (n+1,V) after the row's last token and after each proposal."""

    draft: list[int]
    logits: Tensor
    accepted: int = 0


@dataclass
class _SharedPrefill:
    """A prefill that serves all rows with the same prompt. `request` is the first row's request."""

    prefill: Prefill
    request: Request
    rows: list[Row]
    logprobs: list[JsonObject] = field(default_factory=list)         # entries of all prompt tokens read, except the first

    def serves(self, request: Request, ids: list[int]) -> bool:
        return self.request.shares_prefill(request) and self.prefill.tokens == ids
