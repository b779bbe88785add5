"""Turns a request's options into sequences, with token ids, seeds and states, and submits them to the engine's queue."""

from collections.abc import Callable
from dataclasses import replace

from rwkv.errors import UserError
from rwkv.generation.request import Request
from rwkv.generation.stopping import StoppingCriteria
from rwkv.serving.answers import Answer, ResponseSpec
from rwkv.serving.engine.queue import Ticket
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Generate, SavedState, Turn
from rwkv.serving.schema import Options
from rwkv.serving.service import Service


async def answer(service: Service, sequences: list[Generate], spec: ResponseSpec, body: Options) -> Answer:
    return Answer(service.engine, await submit(service, sequences), spec, bool(body.stream), service.config.timeout_s)


async def submit(service: Service, sequences: list[Generate], begun: bool = False) -> Ticket:
    """Queues sequences, and returns their ticket. Raises ApiError, such as 429 if the queue is full.

    `begun` is True for a request that has begun: its further sequences are queued even if the queue is full or the server
    is stopping.
    """
    if (grammar := sequences[0].request.grammar) is not None:
        await service.compilers.check(grammar, sequences[0].owner)
    if service.stopping and not begun:
        raise ApiError(503, "the server is stopping", code="stopping")
    ticket = service.engine.submit(sequences, begun)
    service.metrics.begin([sequence.id for sequence in ticket.sequences])
    return ticket


def stopping_criteria(service: Service, max_tokens: int, stops: tuple[str, ...]) -> StoppingCriteria:
    """Returns the stopping criteria, with the server's limit if the request asks for more tokens.

    Agents always ask for tens of thousands of tokens. The answer's finish_reason "length" shows that a limit ended it.
    """
    return StoppingCriteria(min(max_tokens, service.config.max_tokens), stops)


def make_sequences(service: Service, body: Options, first: Request, n: int, start: SavedState | None, owner: str, model: str,
                   turn: Turn | None = None) -> list[Generate]:
    """Returns `n` sequences that continue `start`, with consecutive seeds from the seed of `first`.

    Each sequence saves its final state if the body has save_state.
    """
    return [Generate(replace(first, seed=first.seed + number), model, owner, start,
                     service.states.new_state(owner, turn, model) if body.save_state else None, bool(body.stream))
            for number in range(n)]


def prompt_ids(service: Service, prompt: str | list[int], param: str = "prompt", start: SavedState | None = None) -> list[int]:
    if isinstance(prompt, str):
        context = start.last_ids if start else ()
        ids = encode_field(lambda text: service.tokenizer.encode_after(text, context), prompt, param)
    else:
        ids = prompt
        if max(ids, default=0) >= service.tokenizer.vocab_size:
            last = service.tokenizer.vocab_size - 1
            raise ApiError(400, f"{param} must contain token ids from 0 to {last}; got {max(ids)}", param)
    limit = service.config.max_prompt_tokens
    if len(ids) > limit:                 # clients that find these phrases of Anthropic and OpenAI send a shorter prompt
        raise ApiError(400, f"{param}: the prompt is too long: {len(ids)} tokens > {limit} maximum. This model's maximum "
                            f"context length is {limit} tokens on this server (max_prompt_tokens=)", param,
                       "context_length_exceeded")
    has_context = start is not None and start.tokens != 0        # a trained initial state has read no tokens
    return ids if ids or has_context else [service.tokenizer.end_of_text]


def message_ids(service: Service, rendered: str, start: SavedState | None) -> list[int]:
    ids = encode_field(lambda text: service.states.encode_text(text, start), rendered, "messages")
    return prompt_ids(service, ids, "messages", start)


def encode_field(encoder: Callable[[str], list[int]], text: str, param: str) -> list[int]:
    try:
        return encoder(text)
    except UserError as error:
        raise ApiError(400, str(error), param) from None


def include_usage(body: Options) -> bool:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options requires stream=true", "stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)
