"""OpenAI's endpoint /v1/completions, which completes prompts without a chat template."""

from dataclasses import replace
from functools import partial

from starlette.requests import Request

from rwkv.generation.request import Request as EngineRequest
from rwkv.serving.answers import Answer, ResponseSpec
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Generate
from rwkv.serving.openapi import GENERATION, Endpoint
from rwkv.serving.schema import MOST_ECHO_LOGPROBS, MOST_ROWS, NO_LIMIT, CompletionRequest, Options, read
from rwkv.serving.service import Service, default_max_tokens, handle_body, owner, resolve_adapter
from rwkv.serving.submission import answer, include_usage, make_sequences, prompt_ids, stopping_criteria


async def completions(service: Service, request: Request) -> Answer:
    return await answer(service, *await handle_body(service, request, partial(_translate, owner=owner(request))))


def _translate(service: Service, raw_body: bytes, owner: str) -> tuple[list[Generate], ResponseSpec, Options]:
    body = read(raw_body, CompletionRequest)
    return *completion_sequences(service, body, owner), body


def completion_sequences(service: Service, body: CompletionRequest, owner: str) -> tuple[list[Generate], ResponseSpec]:
    model = resolve_adapter(service, body.model)
    if body.suffix:
        raise ApiError(400, "suffix is not supported, because an RWKV model reads text only from left to right", "suffix")
    if body.best_of not in (None, 1, body.n or 1):
        raise ApiError(400, "best_of must be 1 or equal n, because this server does not rank answers. Request several answers "
                            "with n and logprobs, and choose the best one in your program", "best_of")
    start = service.states.start_state(body.state, owner, model)
    prompts = [prompt_ids(service, prompt, start=start) for prompt in _prompts(body)]
    usual = service.defaults[False, False]
    maximum = default_max_tokens(service, usual)["completions"] if body.max_tokens in (None, NO_LIMIT) else body.max_tokens
    n = body.n or 1
    echoed = bool(body.echo and body.logprobs is not None)
    if echoed and (body.logprobs or 0) > MOST_ECHO_LOGPROBS:
        raise ApiError(400, f"logprobs must be at most {MOST_ECHO_LOGPROBS} with echo", "logprobs")
    if echoed and n * sum(map(len, prompts)) > service.config.max_prompt_tokens:
        raise ApiError(400, "echo with logprobs requires that all prompts together, each counted n times, have at most "
                            f"{service.config.max_prompt_tokens} tokens", "echo")
    if echoed and not all(prompts):
        raise ApiError(400, "echo with logprobs requires a prompt with at least one token, even if state is set", "echo")
    stops = usual.stop if body.stop is None else body.stops()
    constraint = body.constraint()
    first = EngineRequest("", body.first_seed(), stopping_criteria(service, maximum, stops),
                          body.sampling(usual.sampling, service.tokenizer), body.logprobs, echoed,
                          constraint.grammar() if constraint else None)
    sequences = [sequence for ids in prompts
                 for sequence in make_sequences(service, body, replace(first, prompt=ids), n, start, owner, model)]
    before = [service.tokenizer.decode_start(ids) if body.echo else "" for ids in prompts for _ in range(n)]
    spec = ResponseSpec("cmpl", model or service.model, include_usage(body), body.logprobs is not None, before, n,
                        service.tokenizer, echoed, after=start.last_ids if start else (), saves=bool(body.save_state))
    return sequences, spec


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt:
        raise ApiError(400, "prompt must not be empty", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [list(prompt)]                                    # type: ignore[arg-type]
    if len(prompt) * (body.n or 1) > MOST_ROWS:
        raise ApiError(400, f"a request must have at most {MOST_ROWS} sequences (the number of prompts times n)", "prompt")
    if not (all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) and item for item in prompt)):
        raise ApiError(400, "prompt must be a string, a list of strings, a list of token ids, or a list of non-empty lists of "
                            "token ids", "prompt")
    return list(prompt)                                          # type: ignore[arg-type]


ENDPOINTS = (Endpoint("/v1/completions", "POST", completions, CompletionRequest, **GENERATION),)
