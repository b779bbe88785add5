"""The endpoints: OpenAI's completions, chat completions and responses; states; vLLM's for the tokenizer; health, metrics, page.

A handler reads a request's body (schema.py), submits texts to the engine (remote.py), and returns an object that turns their
events into an answer (answers.py, responses.py).
"""

import asyncio
import email.message
import hmac
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rwkv.chat.calls import START, stop_of
from rwkv.chat.rendered import for_tokenizer
from rwkv.chat.template import ChatTemplate
from rwkv.chat.templates import chat_template
from rwkv.chat.thoughts import START as START_OF_THOUGHTS
from rwkv.chat.thoughts import Think, begun_by, end_of
from rwkv.config import MIB, Sampling, ServeConfig
from rwkv.errors import UserError
from rwkv.generation.grammar import Grammar
from rwkv.io.lines import counted
from rwkv.serving import openapi, responses
from rwkv.serving.answers import Answer, Shape, token_string
from rwkv.serving.compiling import Compilers
from rwkv.serving.errors import ApiError, json_response
from rwkv.serving.log import say_refused
from rwkv.serving.messages import About, Defaults, Generate, SavedState, Turn
from rwkv.serving.metrics import Metrics
from rwkv.serving.openapi import EVENTS, FILE, JSON, TEXT, Endpoint, Handler
from rwkv.serving.origins import check_origin
from rwkv.serving.remote import RemoteEngine, Ticket
from rwkv.serving.responses import ResponseAnswer, Responses
from rwkv.serving.schema import (
    MOST_ROWS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Options,
    ResponseRequest,
    StateRequest,
    TemplateOptions,
    Thinking,
    TokenizeRequest,
    Tool,
    read,
)
from rwkv.serving.states import FORMS, Keeper, owner_of, shown
from rwkv.tokenizer.decoders import LAST_IDS
from rwkv.tokenizer.tokenizers import Tokenizer

LONG = 2**16                             # a body of more bytes is handled in a thread, not in the event loop
COMPLETION_TOKENS = 16                   # max_tokens of a completion, OpenAI's
ANY = -1                                 # max_tokens of clients that set no limit
CHARSETS = {"utf-8", "us-ascii", "iso-8859-1", "windows-1252", "utf-16", "utf-16le", "utf-16be"}       # of bodies
TEMPLATE_NAMES = {"bot": "flower", "assistant": "g1", "function_calling": "g1"}          # by rwkv_prompt_template
OF_SAMPLING = tuple(item.name for item in fields(Sampling))
OPEN_PATHS = ("/", "/health", "/ready")  # these need no key
PAGE_HEADERS = {"content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                                           "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


@dataclass
class Service:
    """What the handlers share. defaults: as in Ready. model: the id of the checkpoint's model. stopping: refuse new texts."""

    config: ServeConfig
    about: About
    defaults: Mapping[tuple[Think, bool], Defaults]
    engine: RemoteEngine
    tokenizer: Tokenizer
    template: ChatTemplate
    metrics: Metrics
    states: Keeper
    responses: Responses
    compilers: Compilers
    model: str
    created: int
    stopping: bool = False


Result = TypeVar("Result")


def application(service: Service) -> ASGIApp:
    paths: dict[str, dict[str, Handler]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = endpoint.handler
    routes = [Route(path, _endpoint(service, handlers), methods=[*handlers]) for path, handlers in paths.items()]
    cors = [Middleware(CORSMiddleware, allow_origins=service.config.cors, allow_methods=["GET", "POST", "DELETE"],
                       allow_headers=["*"], expose_headers=["x-request-id"])] if service.config.cors else []
    return _logged(Starlette(routes=routes, middleware=cors,
                             exception_handlers={HTTPException: _http_error, Exception: _internal_error}))


def _logged(app: ASGIApp) -> ASGIApp:
    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        """Paths with slashes at the end or twice, as of a base address that ends with one, are those without."""
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                request = f"{scope['method']} {scope['raw_path'].decode('ascii')}"       # %0A stays: the log gets no line end
                say_refused(message["status"], request, scope["state"]["request_id"], scope["state"].get("refusal", ""))
            await send(message)

        await app({**scope, "path": re.sub("/+", "/", scope["path"]).rstrip("/") or "/"}, receive, noted)

    return logged


def _endpoint(service: Service, handlers: Mapping[str, Handler]) -> Callable[[Request], Awaitable[Any]]:
    """handlers: by method. The one of GET also answers HEAD."""
    async def endpoint(request: Request) -> Any:
        try:
            check_origin(service.config, request.headers)
            _authorize(service, request)
            handler = handlers["GET" if request.method == "HEAD" else request.method]
            return await handler(service, request)
        except ApiError as error:
            return _refusal(request, error)
        except UserError as error:
            return _refusal(request, ApiError(400, str(error), _field_in(str(error))))
        except RecursionError:
            return _refusal(request, ApiError(400, "the body has too many objects or lists inside each other"))
        except ClientDisconnect:
            return Response(status_code=400)

    return endpoint


def _refusal(request: Request, error: ApiError) -> Response:
    """The answer; its message is also for the log."""
    request.scope["state"]["refusal"] = str(error)
    return error.response()


def _field_in(message: str) -> str | None:
    """The request's field with which an error message begins, such as messages[1].content or banned; None for no field."""
    word = message.split(maxsplit=1)[0].rstrip(":,")
    held = ("messages", "tools", "response_format", "grammar")
    return word if word.startswith(held) or word in OF_SAMPLING else None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        answer = ApiError(405, f"{request.url.path} has no method {request.method}").response()
        answer.headers.update(error.headers or {})               # Allow
        return answer
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {request.url.path[:200]}").response()
    return ApiError(error.status_code, error.detail).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server has failed; its log says more").response()


def _authorize(service: Service, request: Request) -> None:
    """Checks the key, and notes the request's owner."""
    keys = service.config.api_key
    request.scope["state"]["owner"] = owner_of("")
    if not keys or request.url.path in OPEN_PATHS:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip().encode("latin-1", "replace")
    matching = [key for key in keys if hmac.compare_digest(sent, key.encode())]
    if scheme.lower() != "bearer" or not matching:
        raise ApiError(401, "the header Authorization: Bearer KEY is missing or holds another key", code="invalid_api_key")
    request.scope["state"]["owner"] = owner_of(matching[0])


def _owner(request: Request) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner


async def _body(service: Service, request: Request, least: int = 0) -> bytes:
    """The request's body, decompressed. least: bytes that are allowed whatever max_body_mib is.

    Raises ApiError where it is too large, or compressed by anything but gzip.
    """
    limit = max(service.config.max_body_mib * MIB, least)
    too_large = ApiError(413, f"the body is larger than {limit // MIB} MiB", code="body_too_large")
    codings = ",".join(request.headers.getlist("content-encoding")).lower().replace("x-gzip", "gzip").split(",")
    codings = [coding.strip() for coding in codings if coding.strip() not in ("", "identity")]
    if codings not in ([], ["gzip"]):
        raise ApiError(415, f"content-encoding must be gzip, or there must be none; got {', '.join(codings)[:100]}",
                       code="unsupported_encoding")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large
    sent = b"".join(parts)
    if not codings:
        return sent
    content = await asyncio.to_thread(_decompressed, sent, limit)
    if len(content) > limit:
        raise too_large
    return content


def _decompressed(sent: bytes, limit: int) -> bytes:
    """The content of a gzip file, cut after limit + 1 bytes. Raises ApiError where it is not whole."""
    inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = inflate.decompress(sent, limit + 1)
        whole = len(content) > limit or (inflate.eof and not inflate.unused_data)
    except zlib.error:
        whole = False
    if not whole:
        raise ApiError(400, "content-encoding is gzip, and the body is not one whole gzip file")
    return content


def _as_utf8(request: Request, sent: bytes) -> bytes:
    """A JSON body in UTF-8. Raises ApiError where content-type names an unknown charset, or one that the bytes are not in."""
    header = email.message.Message()
    header["content-type"] = request.headers.get("content-type", "")
    charset = header.get_content_charset() or "utf-8"
    if charset in ("utf-8", "utf8", "us-ascii"):
        return sent
    if charset not in CHARSETS:
        raise ApiError(415, f"the charset of content-type must be utf-8; got {charset[:100]}", code="unsupported_charset")
    try:
        return sent.decode(charset).encode()
    except UnicodeError:
        raise ApiError(400, f"the body is not in {charset}, which content-type names as its charset") from None


async def _worked(service: Service, request: Request, work: Callable[[Service, bytes], Result]) -> Result:
    """work(service, body). A long body is handled in a thread, so that no other request waits."""
    sent = _as_utf8(request, await _body(service, request))
    return await asyncio.to_thread(work, service, sent) if len(sent) > LONG else work(service, sent)


# Generation


async def completions(service: Service, request: Request) -> Answer:
    return await _answer(service, *await _worked(service, request, partial(_completion, owner=_owner(request))))


async def chat_completions(service: Service, request: Request) -> Answer:
    return await _answer(service, *await _worked(service, request, partial(_chat_completion, owner=_owner(request))))


async def _answer(service: Service, texts: list[Generate], shape: Shape, body: Options) -> Answer:
    return Answer(service.engine, await _submitted(service, texts), shape, bool(body.stream), service.config.timeout_s)


def _completion(service: Service, sent: bytes, owner: str) -> tuple[list[Generate], Shape, Options]:
    body = read(sent, CompletionRequest)
    model = _model(service, body.model)
    if body.suffix:
        raise ApiError(400, "suffix is not supported: an RWKV model reads in one direction", "suffix")
    if body.best_of not in (None, 1):
        raise ApiError(400, "best_of is 1 on this server; use n, and choose by logprobs", "best_of")
    start = service.states.start(body.state, owner, model)
    prompts = [_ids(service, prompt, start=start) for prompt in _prompts(body)]
    usual = service.defaults[False, False]
    maximum = _most_tokens(service, usual)["completions"] if body.max_tokens in (None, ANY) else body.max_tokens
    n = body.n or 1
    echoed = bool(body.echo and body.logprobs is not None)
    if echoed and n * sum(map(len, prompts)) > service.config.max_prompt_tokens:
        raise ApiError(400, f"echo with logprobs is for at most {service.config.max_prompt_tokens} tokens of prompts in one "
                            "request, each prompt counted n times", "echo")
    if echoed and not all(prompts):
        raise ApiError(400, "echo with logprobs needs a prompt, also after a state", "echo")
    stops = usual.stop if body.stop is None else body.stops()
    grammar = body.answer_grammar()
    texts = [text for ids in prompts
             for text in _texts(service, body, usual, ids, n, maximum, stops, body.logprobs, echoed, grammar)]
    texts = _with_states(service, body, texts, start, owner, model)
    before = [service.tokenizer.decode_start(ids) if body.echo else "" for ids in prompts for _ in range(n)]
    shape = Shape("cmpl", model or service.model, _include_usage(body), body.logprobs is not None, before, n, service.tokenizer,
                  echoed, after=start.last_ids if start else (), saves=bool(body.save_state))
    return texts, shape, body


def _chat_completion(service: Service, sent: bytes, owner: str) -> tuple[list[Generate], Shape, ChatRequest]:
    body = read(sent, ChatRequest)
    return *_chat_texts(service, body, owner), body


def _chat_texts(service: Service, body: ChatRequest, owner: str) -> tuple[list[Generate], Shape]:
    model = _model(service, body.model)
    service = _with_template(service, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    tools, call_start = _tools(service, body)
    thinking = _thinking(service, body, bool(call_start))
    answer_start = service.template.answer_start(thinking.think)
    start = service.states.start(body.state, owner, model)
    prompt = service.states.prompt(start, body.messages, tools, thinking.think, thinking.effort)
    if call_start and answer_start:      # thoughts, which end before the call
        end = end_of(answer_start)
        prompt = f"{prompt}{end}"
        answer_start = f"{answer_start}{end}"
        call_start = call_start.lstrip()
    prompt += call_start
    limit = "max_tokens"
    maximum = body.max_tokens
    if body.max_completion_tokens is not None:
        limit = "max_completion_tokens"
        maximum = body.max_completion_tokens
    usual = service.defaults[thinking.think, bool(tools)]
    maximum = _most_tokens(service, usual)["chat"] if maximum in (None, ANY) else maximum
    one_call = bool(call_start) or (bool(tools) and body.parallel_tool_calls is False)
    asked = usual.stop if body.stop is None else body.stops()
    stops = (*service.template.stop, *asked, *((stop_of(call_start),) if one_call else ()))
    n = body.n or 1
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ids = _ids_of_messages(service, prompt, start)
    begun = answer_start or begun_by(prompt)
    grammar = _grammar(service, body, bool(tools), call_start, begun, thinking.think is True)
    texts = _texts(service, body, usual, ids, n, maximum, stops, n_logprobs, False, grammar, limit)
    texts = _with_states(service, body, texts, start, owner, model, service.states.turn_of_answer(tools, start))
    functions = [tool.function.name for tool in body.tools or ()] if tools else []
    shape = Shape("chatcmpl", model or service.model, _include_usage(body), bool(body.logprobs),
                  [answer_start] * n, n, service.tokenizer, functions=functions, call_start=call_start.lstrip(),
                  most_calls=1 if one_call else None, thinks=service.template.thinks,
                  after=start.last_ids if start else (), saves=bool(body.save_state))
    return texts, shape


def _with_template(service: Service, body: ChatRequest) -> Service:
    """The service with the chat template that rwkv_prompt_template names, if the server's own has another form."""
    kwargs = body.chat_template_kwargs or TemplateOptions()
    asked = kwargs.rwkv_prompt_template
    own = service.template
    without_thoughts = kwargs.rwkv_generation_prompt in (None, "no_think")
    fits = {"bot": own.name == "flower", "assistant": own.name == "g1" or (own.name == "world" and without_thoughts),
            "function_calling": own.supports_tools}
    if asked is None or fits[asked]:
        return service
    template = for_tokenizer(chat_template(TEMPLATE_NAMES[asked]), service.tokenizer)
    return replace(service, template=template, states=replace(service.states, template=template))


def _thinking(service: Service, body: ChatRequest, calls: bool) -> Thinking:
    """How the answer is to begin. calls: it must begin with a call, and so without thoughts.

    Raises ApiError where the template has no form for what is asked; an effort without a form is ignored.
    """
    thinking = body.thinking(service.template.thinks)
    try:
        service.template.answer_start(thinking.think)
        if calls and thinking.think is True:
            raise UserError("think: tool_choice demands that the answer begins with a call; send auto, or ask for no thoughts")
    except UserError as error:
        if thinking.wish:
            return thinking._replace(think=False)
        raise ApiError(400, f"{thinking.field}: {str(error).partition(': ')[2]}", thinking.field) from None
    return thinking


def _tools(service: Service, body: ChatRequest) -> tuple[list[dict[str, Any]] | None, str]:
    """The tools for the template (None for no tools), and the answer's first text where tool_choice demands a call ("" else).

    Raises ApiError for a choice that the tools or the template do not allow.
    """
    choice = body.tool_choice
    template = service.template
    if not body.tools:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        return None, ""
    tools = _shown_tools(service, body.tools)
    if choice == "none":
        return None, ""
    if choice in (None, "auto"):
        return tools, ""
    if template.call_start is None:
        raise ApiError(400, f"tool_choice is auto or none with the chat template {template.name}: how a call begins is known "
                            f"for g1 and for templates with {START} alone", "tool_choice")
    names = [tool.function.name for tool in body.tools]
    before, after = template.call_start
    if isinstance(choice, str):          # required
        return tools, f"{before}{names[0]}{after}" if len(names) == 1 else before
    if choice.function.name not in names:
        raise ApiError(400, f"tool_choice names a function that tools lacks; there are {', '.join(names)[:200]}", "tool_choice")
    return tools, f"{before}{choice.function.name}{after}"


def _shown_tools(service: Service, tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools for the template. Templates expect parameters, which a tool may lack: it gets empty ones. Raises ApiError."""
    if not tools:
        return None
    if not service.template.supports_tools:
        raise ApiError(400, f"tools: {service.template.no_tools}", "tools")
    found: list[dict[str, Any]] = msgspec.to_builtins(tools)
    for tool in found:
        parameters = tool["function"].setdefault("parameters", {})
        parameters.setdefault("type", "object")
        parameters.setdefault("properties", {})
    return found


def _grammar(service: Service, body: ChatRequest, tools: bool, call_start: str, begun: str, think: bool) -> Grammar | None:
    """The grammar of the answer; None for any text. tools: the answer may call them. call_start: as _tools returns it. begun:
    the beginning of thoughts with which the prompt ends. think: the answer may begin with thoughts.

    Raises ApiError where the form of a call is not known.
    """
    answer = body.answer_grammar()
    functions = [(function.name, function.parameters or {}, f"tools[{i}].function.parameters")
                 for i, function in enumerate(tool.function for tool in body.tools or ())]
    if tools and (call_start or answer):
        if service.template.call_start is None:
            raise ApiError(400, "response_format and grammar do not go with tools and the chat template "
                                f"{service.template.name}, of which it is not known how a call begins: send tool_choice=none",
                           "tools")
        form = service.template.call_start[0].lstrip(), service.template.call_start[1]
        calls = Grammar.calls(form, functions, f"\n{stop_of(form[0]).lstrip()}", call_start.lstrip())
        if call_start:
            return calls
        answer = answer.or_else(calls) if answer else None
    if answer is None:
        strict = [function for function, tool in zip(functions, body.tools or (), strict=True) if tool.function.strict]
        # A grammar allows no special token, and so it cannot allow a call that begins with one
        can_hold = START not in service.tokenizer.special and service.tokenizer.has_bytes
        return Grammar.text_with_calls(strict) if tools and strict and can_hold else None
    if "</think" in begun:               # an empty thought, perhaps without the last ">"
        return answer.after_space() if begun.rstrip().endswith(">") else answer.after_space().after(">")
    if begun:
        return answer.after_thoughts()
    return answer.after_thoughts(START_OF_THOUGHTS) if think else answer.after_space()


async def _submitted(service: Service, texts: list[Generate]) -> Ticket:
    if texts[0].grammar is not None:
        await service.compilers.check(texts[0].grammar, texts[0].owner)
    if service.stopping:
        raise ApiError(503, "the server is stopping", code="stopping")
    ticket = service.engine.submit(texts)
    service.metrics.begin([text.id for text in ticket.texts])
    return ticket


def _texts(service: Service, body: Options, usual: Defaults, ids: list[int], n: int, maximum: int, stops: tuple[str, ...],
           n_logprobs: int | None, prompt_logprobs: bool, grammar: Grammar | None,
           limit: str = "max_tokens") -> list[Generate]:
    """The n texts that continue a prompt, with consecutive seeds. limit: the name of the field that holds `maximum`."""
    if maximum > service.config.max_tokens:
        raise ApiError(400, f"{limit} is at most {service.config.max_tokens} on this server; got {maximum}", limit)
    seed = body.first_seed()
    sampling = body.sampling(usual.sampling, service.tokenizer)
    return [Generate(-1, ids, seed + number, maximum, stops, sampling, bool(body.stream), n_logprobs, prompt_logprobs,
                     grammar)
            for number in range(n)]


def _with_states(service: Service, body: Options, texts: list[Generate], start: SavedState | None, owner: str, model: str,
                 turn: Turn | None = None) -> list[Generate]:
    """The texts as continuations of `start`; if the request asks for it, each is to save its end as a new state."""
    return [replace(text, start=start, save=service.states.new(owner, turn, model) if body.save_state else None, model=model,
                    owner=owner) for text in texts]


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt:
        raise ApiError(400, "prompt is an empty list", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [list(prompt)]                                    # type: ignore[arg-type]
    if len(prompt) * (body.n or 1) > MOST_ROWS:
        raise ApiError(400, f"one request is for at most {MOST_ROWS} texts", "prompt")
    if not (all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) and item for item in prompt)):
        raise ApiError(400, "prompt is a text, a list of texts, a list of token ids, or a list of such lists that are not "
                            "empty", "prompt")
    return list(prompt)                                          # type: ignore[arg-type]


def _ids(service: Service, prompt: str | list[int], param: str = "prompt", start: SavedState | None = None) -> list[int]:
    if isinstance(prompt, str):
        before = start.last_ids if start else ()
        ids = _encoded(lambda text: service.tokenizer.encode_after(text, before), prompt, param)
    else:
        ids = prompt
        if max(ids, default=0) >= service.tokenizer.vocab_size:
            raise ApiError(400, f"{param} has token ids from 0 to {service.tokenizer.vocab_size - 1}; got {max(ids)}", param)
    if len(ids) > service.config.max_prompt_tokens:
        raise ApiError(400, f"{param} has {counted(len(ids), 'token')}, and this server reads at most "
                            f"{service.config.max_prompt_tokens}", param, "context_length_exceeded")
    follows = start is not None and start.tokens != 0            # a state that was trained has read no token
    return ids if ids or follows else [service.tokenizer.end_of_text]


def _ids_of_messages(service: Service, rendered: str, start: SavedState | None) -> list[int]:
    return _ids(service, _encoded(lambda text: service.states.ids(text, start), rendered, "messages"), "messages", start)


def _encoded(encoder: Callable[[str], list[int]], text: str, param: str) -> list[int]:
    try:
        return encoder(text)
    except UserError as error:
        raise ApiError(400, str(error), param) from None


def _include_usage(body: Options) -> bool:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)


def _model(service: Service, name: str | None) -> str:
    """The adapter that a request names; "" for the checkpoint's own model. Raises ApiError for an unknown name.

    A name may have a prefix, such as gateways add: openai/NAME.
    """
    if name is None:
        return ""
    by_id = {service.model: "", **{adapter: adapter for adapter in service.engine.adapters}}
    for known, adapter in by_id.items():
        if name == known or (name not in by_id and name.endswith(f"/{known}")):
            return adapter
    raise ApiError(404, f"there is no model {name[:100]!r} here; there is {', '.join(map(repr, by_id))}", "model",
                   "model_not_found")


# States


class StateAnswer(Answer):
    """The state at the end of the ticket's only text."""

    def _whole(self) -> Response:
        state = self._texts[0].last.state
        if state is None:
            return ApiError(503, "the prompt was not read in time: the server's timeout_s= ended it", code="timeout").response()
        return json_response({**shown(state, self._shape.model), "usage": self._usage()})


async def make_state(service: Service, request: Request) -> Any:
    """Makes a state from the content of a state file, or by reading a prompt or messages."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() in FORMS:
        content = await _body(service, request, least=2 * service.states.state_bytes + MIB)
        return _state(service, await service.engine.upload(service.states.new(_owner(request)), content))
    text = await _worked(service, request, partial(_state_text, owner=_owner(request)))
    shape = Shape("state", service.model, False, False, [""], 1, service.tokenizer, saves=True)
    return StateAnswer(service.engine, await _submitted(service, [text]), shape, False, service.config.timeout_s)


def _state_text(service: Service, sent: bytes, owner: str) -> Generate:
    """A text of 0 new tokens, whose end is saved as the state."""
    body = read(sent, StateRequest)
    model = _model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "a state is made of a prompt or of messages: send one of them, or a file with the content type "
                            f"{FORMS[0]}", "prompt")
    start = service.states.start(body.state, owner, model)
    turn = None
    if body.messages is None:
        if body.tools:
            raise ApiError(400, "tools are shown in messages, and not in a prompt", "tools")
        ids = _ids(service, body.prompt or "", start=start)
    else:
        tools = _shown_tools(service, body.tools)
        prompt = service.states.prompt(start, body.messages, tools, add_generation_prompt=False)
        turn = service.states.turn_of_messages(body.messages, tools, start)
        ids = _ids_of_messages(service, prompt, start)
    return Generate(-1, ids, 0, 0, (), service.defaults[False, False].sampling, False, start=start,
                    save=service.states.new(owner, turn, model), model=model, owner=owner)


async def list_states(service: Service, request: Request) -> Response:
    states = [shown(state, service.model) for state in service.states.of(_owner(request))]
    return json_response({"object": "list", "data": states, "has_more": False})


async def one_state(service: Service, request: Request) -> Response:
    return _state(service, service.states.get(request.path_params["id"], _owner(request)))


async def state_content(service: Service, request: Request) -> Response:
    state = service.states.usable(request.path_params["id"], _owner(request))
    headers = {"content-disposition": f'attachment; filename="{state.id}.safetensors"'}
    return Response(await service.engine.download(state), media_type=FORMS[0], headers=headers)


async def delete_state(service: Service, request: Request) -> Response:
    state = service.states.get(request.path_params["id"], _owner(request))
    service.engine.drop(state)
    return json_response({"id": state.id, "object": "state.deleted", "deleted": True})


def _state(service: Service, state: SavedState) -> Response:
    return json_response(shown(state, service.model))


# Responses


async def make_response(service: Service, request: Request) -> Answer:
    texts, shape, asked = await _worked(service, request, partial(_response_texts, owner=_owner(request)))
    try:
        ticket = await _submitted(service, texts)
    except ApiError as error:
        raise responses.renamed(error) from None
    return ResponseAnswer(service.engine, ticket, shape, service.config.timeout_s, asked, service.responses)


def _response_texts(service: Service, sent: bytes, owner: str) -> tuple[list[Generate], Shape, responses.Asked]:
    asked = read(sent, ResponseRequest)
    return responses.ask(asked, owner, _model(service, asked.model), service.responses, service.states,
                         lambda body: _tools(service, body)[0], lambda body: _chat_texts(service, body, owner))


async def one_response(service: Service, request: Request) -> Response:
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "stream is for a new response: this one has ended", "stream")
    return json_response(_stored(service, request).response)


async def delete_response(service: Service, request: Request) -> Response:
    stored = _stored(service, request)
    service.responses.drop(stored.response["id"])
    return json_response({"id": stored.response["id"], "object": "response", "deleted": True})


async def cancel_response(service: Service, request: Request) -> Response:
    _stored(service, request)
    raise ApiError(400, "this response has ended: a running one is cancelled by closing its connection, and this server runs "
                        "none in the background")


async def response_input(service: Service, request: Request) -> Response:
    return json_response(responses.listed(_stored(service, request).input, request.query_params))


def _stored(service: Service, request: Request) -> responses.Stored:
    return service.responses.get(request.path_params["id"], _owner(request))


# Models, tokenizer, state of the server


async def models(service: Service, request: Request) -> Response:
    shown = [_shown_model(service, name) for name in (service.model, *service.engine.adapters)]
    return json_response({"object": "list", "data": shown})


async def one_model(service: Service, request: Request) -> Response:
    return json_response(_shown_model(service, _model(service, request.path_params["id"]) or service.model))


def _shown_model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's object for a model, with vLLM's max_model_len; meta has facts and defaults, and state_bytes is None where there
    is no room for a state."""
    states, usual = service.states, service.defaults[False, False]
    meta = {**vars(service.about), "template": service.template.name,
            "state_bytes": states.state_bytes if states.has_room else None,
            "defaults": {**vars(usual.sampling), "max_tokens": _most_tokens(service, usual)}}
    return {"id": name, "object": "model", "created": service.created, "owned_by": "timemix",
            "max_model_len": service.config.max_prompt_tokens, "meta": meta}


def _most_tokens(service: Service, usual: Defaults) -> dict[str, int]:
    most = service.config.max_tokens
    return {"completions": min(usual.max_tokens or COMPLETION_TOKENS, most), "chat": min(usual.max_tokens or most, most)}


async def tokenizer_info(service: Service, request: Request) -> Response:
    """The tokenizer in vLLM's form, which local-completions of lm-evaluation-harness asks for."""
    end = service.tokenizer.end_of_text
    name = token_string({"token": end, "text": service.tokenizer.decode([end])})
    return json_response({"tokenizer_class": service.tokenizer.kind, "vocab_size": service.tokenizer.vocab_size,
                          "model_max_length": service.config.max_prompt_tokens, "eos_token": name, "eos_token_id": end,
                          "bos_token": name, "bos_token_id": end, "pad_token": name, "chat_template": None})


async def tokenize(service: Service, request: Request) -> Response:
    return await _worked(service, request, _tokens)


def _tokens(service: Service, sent: bytes) -> Response:
    body = read(sent, TokenizeRequest)
    _model(service, body.model)
    ids = _encoded(service.tokenizer.encode, body.prompt, "prompt")
    content = {"tokens": ids, "count": len(ids), "max_model_len": service.config.max_prompt_tokens}
    if body.return_token_strs:
        content["token_strs"] = [token_string({"token": token, "text": name})
                                 for place, token in enumerate(ids)
                                 for name in service.tokenizer.names([token], ids[max(0, place - LAST_IDS):place])]
    return json_response(content)


async def detokenize(service: Service, request: Request) -> Response:
    return await _worked(service, request, _text)


def _text(service: Service, sent: bytes) -> Response:
    body = read(sent, DetokenizeRequest)
    _model(service, body.model)
    try:
        return json_response({"prompt": service.tokenizer.decode(body.tokens)})
    except UserError as error:
        raise ApiError(400, str(error), "tokens") from None


async def health(service: Service, request: Request) -> Response:
    service.engine.require_engine()
    return json_response({"status": "ok"})


async def ready(service: Service, request: Request) -> Response:
    if service.stopping:
        raise ApiError(503, "the server is stopping", code="stopping")
    return await health(service, request)


async def metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi_document(service: Service, request: Request) -> Response:
    return json_response(openapi.document(ENDPOINTS))


async def page(service: Service, request: Request) -> Response:
    text = (resources.files("rwkv.serving") / "page.html").read_text(encoding="utf-8")
    return Response(text, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)


OPENAI: dict[str, Any] = {"answers": (JSON, EVENTS), "errors": (400, 401, 404, 413, 415, 429, 503)}
ENDPOINTS = (
    Endpoint("/v1/completions", "POST", completions, CompletionRequest, **OPENAI),
    Endpoint("/v1/chat/completions", "POST", chat_completions, ChatRequest, **OPENAI),
    Endpoint("/v1/responses", "POST", make_response, ResponseRequest, **OPENAI),
    Endpoint("/v1/responses/{id}", "GET", one_response),
    Endpoint("/v1/responses/{id}", "DELETE", delete_response),
    Endpoint("/v1/responses/{id}/cancel", "POST", cancel_response),
    Endpoint("/v1/responses/{id}/input_items", "GET", response_input),
    Endpoint("/v1/states", "POST", make_state, StateRequest, upload=FILE, errors=OPENAI["errors"]),
    Endpoint("/v1/states", "GET", list_states),
    Endpoint("/v1/states/{id}", "GET", one_state),
    Endpoint("/v1/states/{id}", "DELETE", delete_state),
    Endpoint("/v1/states/{id}/content", "GET", state_content, answers=(FILE,)),
    Endpoint("/v1/models", "GET", models),
    Endpoint("/v1/models/{id:path}", "GET", one_model),
    Endpoint("/tokenizer_info", "GET", tokenizer_info),
    Endpoint("/tokenize", "POST", tokenize, TokenizeRequest, errors=OPENAI["errors"]),
    Endpoint("/detokenize", "POST", detokenize, DetokenizeRequest, errors=OPENAI["errors"]),
    Endpoint("/health", "GET", health),
    Endpoint("/ready", "GET", ready),
    Endpoint("/metrics", "GET", metrics, answers=(TEXT,)),
    Endpoint("/openapi.json", "GET", openapi_document),
    Endpoint("/", "GET", page, answers=("text/html",)),
)
