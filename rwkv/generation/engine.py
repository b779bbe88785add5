"""The engine: continues prompts together, one row for each, and draws one token per row and step.

Prompts are read in passes of many tokens (prefill.py). After that each step reads one token per row (decoder.py), so memory and
time per token do not depend on the length of a text. Rows join and leave between steps. A text depends only on its prompt, its
seed and its options, not on the other rows or on how it is streamed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kernels.backends.transfer import to_device
from rwkv.config import LARGEST_SEED, Sampling, strings, whole_number, whole_numbers
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder, GpuDecoder, decoder_of
from rwkv.generation.grammar import Grammar
from rwkv.generation.logprobs import entry, logprobs
from rwkv.generation.pooling import pooled
from rwkv.generation.prefill import EMPTY, SHORT_PROMPT, Prefill, PrefillResult, PrefixCache, chunks_on, prefill, read_together
from rwkv.generation.request import Request
from rwkv.generation.row import CANCELLED, Row, Sample
from rwkv.generation.sampling import Penalties, PenaltyTable, TablePenalties, drawing_on, not_finite, on_host, queued_tokens
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import Model, State
from rwkv.model.decoding.triton_step import SPARE
from rwkv.model.weights_watch import WeightsWatch
from rwkv.tokenizer.decoders import LAST_IDS, require_id
from rwkv.tokenizer.tokenizers import Tokenizer

WARM_TOKENS = 4                          # of a text that nobody reads
WARM_SAMPLINGS = (                       # one for each variant of the kernels that draw on a GPU
    Sampling(), Sampling(temperature=0), Sampling(presence_penalty=0.5), Sampling(top_k=2), Sampling(top_p=1),
    Sampling(top_p=1, min_p=0.1), Sampling(order="rwkv"), Sampling(order="rwkv", top_k=2),
    Sampling(order="rwkv", top_p=1, min_p=0.1))
WATCH_ON_GPU = 64                        # steps between two looks at the weights, each of which waits for the GPU


def generate(model: Model, tokenizer: Tokenizer, prompt: str = "", max_new_tokens: int = 200, seed: int = 0,
             stop: Sequence[str] = (), stop_tokens: Sequence[int] = (), context: PrefillResult | None = None,
             cache: PrefixCache | None = None, grammar: Grammar | None = None, **sampling: Any) -> Iterator[str]:
    """Yields the continuation of `prompt`, without the prompt, in pieces of whole characters as they are generated.

    sampling: the fields of rwkv.config.Sampling. grammar: what the text may be (rwkv/generation/grammar.py). context: the
    result of reading the text before the prompt. Without a context and a prompt, generation starts from the end-of-text token,
    which also ends a text. Raises ValueError, before the first piece is requested, where an option is wrong, the prompt cannot
    be encoded or the tokenizer does not fit the model.
    """
    engine = Engine(model, tokenizer, cache)
    prompt, = strings("prompts", [prompt])
    engine.add_all([Request(prompt, seed, StoppingCriteria(max_new_tokens, stop, stop_tokens), Sampling(**sampling),
                            grammar=grammar, context=context)])
    return (piece for _, piece in engine if piece)


def generate_batch(model: Model, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int = 200,
                   seeds: Sequence[int] | None = None, stop: Sequence[str] = (), stop_tokens: Sequence[int] = (),
                   cache: PrefixCache | None = None, logprobs: int = 0, grammar: Grammar | None = None,
                   **sampling: Any) -> list[Sample]:
    """A finished Sample for each prompt, generated together; each text is the one that `generate` yields for prompt and seed.

    The tokens are exactly the same for small models, for int8, and for large models on a CPU with C kernels (kernels/native).
    Otherwise PyTorch's products of several rows may differ in the last bits from those of one row, and a text may differ from
    where two tokens are almost equally likely.

    seeds: one for each prompt; all 0 by default. Raises ValueError as `generate` does.
    """
    prompts = strings("prompts", prompts)
    seeds = [0] * len(prompts) if seeds is None else whole_numbers("seed", seeds, most=LARGEST_SEED)
    if len(prompts) != len(seeds):
        raise UserError(f"one seed per prompt: got {len(prompts)} prompts and {len(seeds)} seeds")
    stopping = StoppingCriteria(max_new_tokens, stop, stop_tokens)
    options = Sampling(**sampling)
    n_logprobs = whole_number("logprobs", logprobs) or None
    engine = Engine(model, tokenizer, cache)
    rows = engine.add_all([Request(prompt, seed, stopping, options, n_logprobs, grammar=grammar)
                           for prompt, seed in zip(prompts, seeds, strict=True)])
    engine.run()
    return [row.sample for row in rows]


class Engine:
    """Continues texts together, one row for each; rows join and leave while it runs. Iterating yields (row's index, piece of
    text), empty pieces included.

    add() adds a row. Its prompt is read between the steps of the other rows, in parts with the work of about Chunks.budget
    tokens. cache: also gets the result for each whole sequence when it ends. If the model's weights change, the next step, on a
    GPU one of the next 64, uses the new ones (as far as rwkv/model/weights_watch.py detects it) with the old states. Not
    thread-safe. Raises UserError where the tokenizer has more tokens than the model.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, cache: PrefixCache | None = None) -> None:
        if tokenizer.vocab_size > model.vocab_size:
            raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}: they do not "
                            "belong together")
        self._model = model
        self._tokenizer = tokenizer
        self._cache = cache
        self._readings: deque[_Shared] = deque()         # prompts that are being read, the next one first
        self._rows: list[Row] = []                       # in the decoder's order; rows that have ended leave at the next step
        self._logits = torch.empty(0, model.vocab_size, device=model.emb.weight.device)       # (rows, V)
        self._decode_from(model.empty_state(0))
        on_gpu = self._draw_device.type == "cuda"
        self._penalty_table = PenaltyTable(tokenizer.vocab_size, self._draw_device) if on_gpu else None
        self._drawn: Tensor | None = None                # the tokens drawn last, until the decoder has read them
        self._added = 0                                  # number of rows added so far
        self._chunks = chunks_on(model.emb.weight.device)
        self._steps = 0
        self._watch_every = WATCH_ON_GPU if self._logits.is_cuda else 1

    def add_all(self, requests: Sequence[Request]) -> list[Row]:
        """A row for each request, with all prompts read. Raises ValueError as add() does, before anything is read."""
        rows = [self.add(request) for request in requests]
        while self._readings:
            self._read_prompts()
        return rows

    def add(self, request: Request) -> Row:
        """A row that continues the request's prompt from the next step on. Raises ValueError as `generate` does."""
        sampling = request.sampling
        sampling.check_ids(self._tokenizer.vocab_size)
        ids = self._prompt_ids(request)
        penalties: Penalties | TablePenalties | None = None
        if sampling.has_penalties:
            make = self._penalty_table.row if self._penalty_table else Penalties
            penalties = make(sampling, [*request.earlier, *ids], sampling.ids_without_penalty(self._tokenizer))
        row = Row(self._added, request, ids, self._tokenizer, penalties, self._cache if request.uses_cache else None)
        shared = next((shared for shared in self._readings if shared.serves(request, ids)), None)
        if shared is None:
            shared = _Shared(self._reading(request, ids), request, [])
            self._readings.append(shared)
        row.cached_tokens = shared.reading.cached
        shared.rows.append(row)
        self._added += 1
        return row

    def warm_up(self, rows: int = 1) -> None:
        """Reads and generates a few tokens, so that no later text waits for things that are made at their first use: compiled
        kernels, weights in the order of a product, memory, threads; on a GPU the graphs for up to that many rows, and the
        kernels for all kinds of sampling."""
        budget, longest, _ = self._chunks
        for tokens in (budget, longest, budget - 1, 1):  # kernels may treat short, odd and single lengths in other ways
            prefill(self._model, torch.zeros(1, tokens, dtype=torch.long, device="cpu"))
        texts = Engine(self._model, self._tokenizer)     # without the cache
        for n_logprobs in (None, 1):                     # one row, then two
            texts.add(Request([0], stopping=StoppingCriteria(WARM_TOKENS), n_logprobs=n_logprobs))
            texts.step()
        texts.run()
        for options in WARM_SAMPLINGS if self._draw_device.type == "cuda" else ():
            texts.add(Request([0], stopping=StoppingCriteria(1), sampling=options))
            texts.run()
        if isinstance(self._decoder, GpuDecoder):        # last: more slots than before would need other graphs
            self._decoder.warm_up(rows)

    @property
    def unfinished(self) -> bool:
        return bool(self._readings) or any(row.stays for row in self._rows)

    def run(self) -> None:
        for _ in self:
            pass

    def __iter__(self) -> Iterator[tuple[int, str]]:
        while self.unfinished:
            yield from self.step()

    def step(self) -> list[tuple[int, str]]:
        """Draws one token for each unfinished row whose prompt is read; returns (row's index, piece of text) for each.

        Before that, rows that have ended leave, and waiting prompts are read, with the work of about Chunks.budget tokens.
        """
        if not self.unfinished:          # the last rows stay, for context()
            return []
        self._steps += 1
        if self._steps % self._watch_every == 0 and not self._weights.unchanged():
            self._read_new_weights()
        self._drop_finished()
        self._read_drawn()
        self._read_prompts()
        pieces = [(row.index, row.end_without_token()) for row in self._rows if row.unfinished and not row.find_allowed()]
        for position, row in enumerate(self._rows):
            if row.owes_end:             # its last token has been read now
                self._keep_end(position)
        self._drop_finished()
        if not self._rows:
            return pieces
        tokens = self._draw()
        self._drawn = torch.tensor(tokens, device="cpu")
        for position, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if row.damaged:
                continue
            pieces.append((row.index, row.push(token)))
            if not row.unfinished and row.cache is not None:
                row.cache.put(row.cache.key(row.tokens_read(), row.request.context_key or EMPTY), self._result(position))
            if row.owes_end and not row.last_token_in_text:
                self._keep_end(position)
        return pieces

    def context(self) -> PrefillResult:
        """The result of reading the only row's whole text: `generate(..., context=...)` continues from there."""
        row, = self._rows
        if not self._weights.unchanged():
            self._read_new_weights()
        if row.last_token_in_text:
            self._read_drawn()
        return self._end_of(0)

    def _reading(self, request: Request, ids: list[int]) -> Prefill:
        cache = self._cache if request.uses_cache else None
        return Prefill(self._model, ids, request.context, cache, request.n_prompt_logprobs, self._tokenizer.vocab_size,
                       request.context_key or EMPTY, self._reads_short, request.pooling is not None)

    def _decode_from(self, state: State) -> None:
        """Makes the decoder, which keeps values computed from the weights, and a watch on the weights."""
        self._weights = WeightsWatch(self._model)
        self._decoder = decoder_of(self._model, state)
        self._reads_short = self._decoder if isinstance(self._decoder, CDecoder | GpuDecoder) else None
        self._draw_by, self._draw_device = drawing_on(self._model.emb.weight.device, isinstance(self._decoder, CDecoder))

    def _read_new_weights(self) -> None:
        """Continues with the model's new weights and reads unfinished prompts again. Results of old weights are not cached."""
        self._decode_from(self._decoder.state())
        for row in self._rows:
            row.cache = None
        for shared in self._readings:
            shared.reading = self._reading(shared.request, shared.reading.tokens)
            shared.logprobs.clear()

    def _result(self, position: int) -> PrefillResult:
        """A copy of the result of reading, for the row at this position, in host memory."""
        return PrefillResult(self._logits[[position]], self._decoder.state([position])).to("cpu")

    def _end_of(self, position: int) -> PrefillResult:
        """_result(position) with the last ids of the row's text, so that another text can follow it."""
        return self._result(position)._replace(last_ids=tuple(self._rows[position].last_ids()))

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
        kept = [position for position, row in enumerate(self._rows) if row.stays]
        if len(kept) == len(self._rows):
            return
        self._logits = self._logits[to_device(torch.tensor(kept, dtype=torch.int64, device="cpu"), self._logits.device)]
        self._decoder.keep(kept)                         # may overwrite the logits, which have just been copied
        if self._drawn is not None:
            self._drawn = self._drawn[kept]
        self._rows = [self._rows[position] for position in kept]

    def _read_drawn(self) -> None:
        if self._drawn is not None:
            if self._rows:
                self._logits = self._decoder.step(self._drawn)
            self._drawn = None

    def _read_prompts(self) -> None:
        """Reads a part of each prompt in turn, the work of Chunks.budget tokens in all; rows whose prompt is read join the
        decoder."""
        budget = self._chunks.budget
        results = []
        while self._readings and self._readings[0].reading.next_cost <= budget:
            prompts = self._next_prompts(budget)
            budget -= sum(shared.reading.next_cost for shared in prompts)
            if len(prompts) > 1:
                read_together([shared.reading for shared in prompts])
            elif prompts and prompts[0].reading.next_cost:
                prompts[0].reading.advance()
                self._name_prompt_logprobs(prompts[0])
            for shared in prompts:
                result = shared.reading.result
                if result is None:
                    self._readings.append(shared)
                    continue
                for row in shared.rows:
                    row.prompt_read = True
                    row.prompt_logprobs = shared.logprobs
                    if row.request.pooling is not None:
                        row.embedding = pooled(shared.reading, row.request.pooling)
                self._rows += shared.rows
                results += [result] * len(shared.rows)
        if results:
            together = PrefillResult.cat(results)
            self._decoder.join(together.state)
            self._logits = torch.cat((self._logits, together.logits))

    def _next_prompts(self, budget: int) -> list["_Shared"]:
        """Takes the next prompt from the queue, and short ones behind it that are read together with it."""
        together: list[_Shared] = []
        tokens = 0
        while self._readings and self._readings[0].reading.next_cost <= budget:
            reading = self._readings[0].reading
            joined = tokens + reading.joinable
            if together and not (tokens and reading.joinable and joined <= SHORT_PROMPT and len(together) < SPARE):
                break
            shared = self._readings.popleft()
            shared.rows = [row for row in shared.rows if row.sample.finish_reason != CANCELLED]
            if shared.rows:
                together.append(shared)
                tokens = joined
                budget -= reading.next_cost
        return together

    def _keep_end(self, position: int) -> None:
        row, end = self._rows[position], self._end_of(position)
        if row.request.context is not None and not end.logits.amax().isfinite():
            row.end_damaged()
        else:
            row.final_context = end

    def _draw(self) -> list[int]:
        """The next token of each row; rows with equal options are drawn together.

        Rows whose logits are not finite because of their context, which may come from a damaged file, end and have token 0.
        """
        logits = self._of_grammars(self._logits[:, :self._tokenizer.vocab_size].to(self._draw_device))
        tokens = [0] * len(self._rows)
        groups: dict[Sampling, list[int]] = {}
        for position, row in enumerate(self._rows):
            groups.setdefault(row.request.sampling, []).append(position)
        queued = []
        for options, positions in groups.items():
            rows = [self._rows[position] for position in positions]
            penalties: Any = [row.penalties for row in rows if row.penalties is not None] or None
            places = to_device(torch.tensor(positions, device="cpu"), logits.device)
            of_group = logits if len(rows) == len(self._rows) else logits[places]
            uniform = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device="cpu")
            queued.append(queued_tokens(of_group, uniform, options, penalties, self._draw_by))
        for position, token in zip(chain.from_iterable(groups.values()), on_host(queued).tolist(), strict=True):
            row = self._rows[position]
            if token < 0 and row.request.context is None:
                raise not_finite()
            if token < 0:
                row.end_damaged()
                continue
            tokens[position] = token
            if row.penalties is not None:
                row.penalties.add(token)
        self._keep_logprobs(logits, tokens)
        return tokens

    def _of_grammars(self, logits: Tensor) -> Tensor:
        """The logits, or a copy of them with -inf for each token that a row's grammar forbids."""
        held = [(position, row.forbidden) for position, row in enumerate(self._rows) if row.forbidden is not None]
        if held:
            logits = logits.clone()
        for position, forbidden in held:
            logits[position].masked_fill_(to_device(forbidden, logits.device), -torch.inf)
        return logits

    def _keep_logprobs(self, logits: Tensor, tokens: list[int]) -> None:
        positions = [position for position, row in enumerate(self._rows)
                     if row.request.n_logprobs is not None and not row.damaged]
        if not positions:
            return
        n = max(self._rows[position].request.n_logprobs or 0 for position in positions)
        drawn = torch.tensor([tokens[position] for position in positions], device="cpu")
        own, ids, values = logprobs(logits[positions], drawn, n)
        for index, position in enumerate(positions):
            row = self._rows[position]
            row.sample.logprobs.append(entry(self._tokenizer, tokens[position], own[index], ids[index], values[index],
                                             row.request.n_logprobs, row.last_ids()))

    def _name_prompt_logprobs(self, shared: "_Shared") -> None:
        """Makes the entries for the part that was read last. Making those of a long prompt at once would take seconds."""
        for own, ids, values in shared.reading.logprobs:
            done = len(shared.logprobs) + 1
            following = shared.reading.tokens[done:done + len(own)]
            for token, its_own, its_ids, its_values in zip(following, own, ids, values, strict=True):
                place = len(shared.logprobs) + 1
                before = shared.reading.tokens[max(0, place - LAST_IDS):place]
                shared.logprobs.append(entry(self._tokenizer, token, its_own, its_ids, its_values,
                                             shared.request.n_logprobs, before))
        shared.reading.logprobs.clear()


@dataclass
class _Shared:
    """A prompt while it is read, once for all rows that continue it. request: of the first of them."""

    reading: Prefill
    request: Request
    rows: list[Row]
    logprobs: list[dict[str, Any]] = field(default_factory=list)         # of the prompt's tokens except the first

    def serves(self, request: Request, ids: list[int]) -> bool:
        return self.request.shares_prefill(request) and self.reading.tokens == ids
