"""OpenAI's endpoint /v1/chat/completions, and chat_sequences(), which translates a ChatRequest for the engine.

The other chat APIs translate their requests into a ChatRequest.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request

from rwkv.chat.calls import START, call_stop
from rwkv.chat.encoding import for_tokenizer
from rwkv.chat.messages import check_messages
from rwkv.chat.thoughts import START as START_OF_THOUGHTS
from rwkv.chat.thoughts import parser_arguments, thoughts_at_end, thoughts_end
from rwkv.chat.turn_templates import chat_template
from rwkv.errors import UserError
from rwkv.generation.grammar import Grammar
from rwkv.generation.request import Request as EngineRequest
from rwkv.io.json_types import JsonObject
from rwkv.serving.answers import Answer, ResponseSpec
from rwkv.serving.http.errors import ApiError
from rwkv.serving.messages import Generate
from rwkv.serving.openapi import GENERATION, Endpoint
from rwkv.serving.schema import NO_LIMIT, AllowedToolsChoice, ChatRequest, TemplateOptions, Thinking, Tool, read
from rwkv.serving.service import Service, default_max_tokens, handle_body, owner, resolve_adapter
from rwkv.serving.submission import answer, include_usage, make_sequences, message_ids, prompt_ids, stopping_criteria

TEMPLATE_NAMES = {"bot": "flower", "assistant": "g1", "function_calling": "g1"}          # by rwkv_prompt_template


async def chat_completions(service: Service, request: Request) -> Answer:
    return await answer(service, *await handle_body(service, request, partial(_translate, owner=owner(request))))


def _translate(service: Service, raw_body: bytes, owner: str) -> tuple[list[Generate], ResponseSpec, ChatRequest]:
    body = read(raw_body, ChatRequest)
    return *chat_sequences(service, body, owner), body


def chat_sequences(service: Service, body: ChatRequest, owner: str,
                   before: Sequence[int] = ()) -> tuple[list[Generate], ResponseSpec]:
    """Returns the sequences that answer a chat request, and how to present them.

    `before` has the token ids of earlier turns, the last of which must be an answer. Raises ApiError or UserError with field
    names of a ChatRequest.
    """
    model = resolve_adapter(service, body.model)
    service = _with_template(service, body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs=true", "top_logprobs")
    tools, call_start = tools_and_call(service, body)
    thinking = _thinking(service, body, bool(call_start))
    answer_start = service.template.answer_start(thinking.think)
    start = service.states.start_state(body.state, owner, model)
    context = service.states.context_of_ids(before, tools, start) if before else start
    continues = False
    if body.continues():
        answer_start, continues = parser_arguments(_answer_to_continue(body, call_start), service.template.thinks)
        prompt = service.states.continued_prompt(context, body.messages, tools, thinking.think, thinking.effort)
    else:
        prompt = service.states.prompt(context, body.messages, tools, thinking.think, thinking.effort)
    if call_start and answer_start:      # a call must not be inside the thoughts that answer_start begins
        end = thoughts_end(answer_start)
        prompt = f"{prompt}{end}"
        answer_start = f"{answer_start}{end}"
        call_start = call_start.lstrip()
    prompt += call_start
    maximum = body.max_tokens if body.max_completion_tokens in (None, NO_LIMIT) else body.max_completion_tokens
    usual = service.defaults[thinking.think, bool(tools)]
    maximum = default_max_tokens(service, usual)["chat"] if maximum in (None, NO_LIMIT) else maximum
    one_call = bool(call_start) or (bool(tools) and body.parallel_tool_calls is False)
    requested_stops = usual.stop if body.stop is None else body.stops()
    template_stops = () if body.ignore_eos else service.template.stop    # they end an answer as an end-of-text token does
    stops = (*template_stops, *requested_stops, *((call_stop(call_start),) if one_call else ()))
    n = body.n or 1
    n_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ids = prompt_ids(service, [*before, *message_ids(service, prompt, context)], "messages", start)
    thoughts_start = answer_start or ("" if continues else thoughts_at_end(prompt))
    in_text = continues and not thoughts_start
    grammar = _grammar(service, body, bool(tools), call_start, thoughts_start, thinking.think is True, in_text)
    first = EngineRequest(ids, body.first_seed(), stopping_criteria(service, maximum, stops),
                          body.sampling(usual.sampling, service.tokenizer), n_logprobs, grammar=grammar)
    sequences = make_sequences(service, body, first, n, start, owner, model, service.states.turn_of_answer(tools, start))
    functions = [function.name for _, function in body.callable_tools()] if tools else []
    spec = ResponseSpec("chatcmpl", model or service.model, include_usage(body), bool(body.logprobs),
                        [answer_start] * n, n, service.tokenizer, functions=functions, call_start=call_start.lstrip(),
                        most_calls=1 if one_call else None, thinks=service.template.thinks,
                        continues=continues, after=start.last_ids if start else (), saves=bool(body.save_state))
    return sequences, spec


def _answer_to_continue(body: ChatRequest, call_start: str) -> str:
    """Returns the content of the last message. Raises ApiError or UserError if the answer cannot continue this message.

    `call_start` is the beginning of a required tool call, or "".
    """
    messages = check_messages(body.messages)
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        where = f"messages[{len(messages) - 1}]"
        raise ApiError(400, f"{where} must have the role assistant, some text and no tool calls, because the request asks the "
                            "model to continue this message", where)
    if call_start:
        raise ApiError(400, "tool_choice must be auto or none when the answer continues the last message", "tool_choice")
    answer: str = last["content"]
    return answer


def _with_template(service: Service, body: ChatRequest) -> Service:
    """Returns the service with a chat template of the kind that rwkv_prompt_template names.

    The template is the server's own if the kind matches, otherwise the one in TEMPLATE_NAMES.
    """
    kwargs = body.chat_template_kwargs or TemplateOptions()
    name = kwargs.rwkv_prompt_template
    default = service.template
    without_thoughts = kwargs.rwkv_generation_prompt in (None, "no_think")
    fits = {"bot": default.name == "flower",
            "assistant": default.name == "g1" or (default.name == "world" and without_thoughts),
            "function_calling": default.supports_tools}
    if name is None or fits[name]:
        return service
    template = for_tokenizer(chat_template(TEMPLATE_NAMES[name]), service.tokenizer)
    return replace(service, template=template, states=replace(service.states, template=template))


def _thinking(service: Service, body: ChatRequest, calls: bool) -> Thinking:
    """Returns how the answer begins. `calls` says whether the answer must begin with a tool call, and thus without thoughts.

    Raises ApiError if the template does not support the requested thinking. Ignores an unsupported effort.
    """
    thinking = body.requested_thinking(service.template.thinks)
    try:
        service.template.answer_start(thinking.think)
        if calls and thinking.think is True:
            raise UserError("think: reasoning conflicts with a tool_choice that requires a tool call. Send tool_choice=auto, "
                            "or turn reasoning off")
    except UserError as error:
        if thinking.wish:
            return thinking._replace(think=False)
        raise ApiError(400, f"{thinking.field}: {str(error).partition(': ')[2]}", thinking.field) from None
    return thinking


def tools_and_call(service: Service, body: ChatRequest) -> tuple[list[JsonObject] | None, str]:
    """Returns the tools for the template, and the beginning of a required tool call, or "" if tool_choice requires no call.

    Raises ApiError for a tool_choice that the tools or the template do not allow.
    """
    choice = body.tool_choice
    template = service.template
    if not body.tools:
        if choice not in (None, "none", "auto"):         # without tools, auto has no effect; some clients always send auto
            raise ApiError(400, "tool_choice requires tools", "tool_choice")
        return None, ""
    tools = template_tools(service, body.tools)
    if choice == "none":
        return None, ""
    names = [function.name for _, function in body.callable_tools()]
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice
    if mode in (None, "auto"):
        return tools, ""
    if template.call_start is None:
        raise ApiError(400, "tool_choice must be auto or none, because the format of tool calls is unknown for the chat "
                            f"template {template.name}. The format is known only for g1 and for templates that contain {START}",
                       "tool_choice")
    before, after = template.call_start
    return tools, f"{before}{names[0]}{after}" if len(names) == 1 else before


def template_tools(service: Service, tools: list[Tool] | None) -> list[JsonObject] | None:
    """Returns the tools as the template expects them. Raises ApiError if the template does not support tools.

    A tool without parameters gets an empty schema.
    """
    if not tools:
        return None
    if not service.template.supports_tools:
        raise ApiError(400, f"tools: {service.template.no_tools}", "tools")
    result: list[JsonObject] = msgspec.to_builtins(tools)
    for tool in result:
        del tool["cache_control"]
        parameters = tool["function"].setdefault("parameters", {})
        parameters.setdefault("type", "object")
        parameters.setdefault("properties", {})
    return result


def _grammar(service: Service, body: ChatRequest, tools: bool, call_start: str, thoughts_start: str, think: bool,
             in_text: bool) -> Grammar | None:
    """Returns the grammar of the answer, or None if the answer may be any text.

    Raises ApiError if the template's format of tool calls is unknown, and for a JSON format if the text has already begun.

    Args:
        tools: whether the answer may call tools.
        call_start: the beginning of a required tool call, or "".
        thoughts_start: the beginning of the answer's thoughts, if the prompt ends with such a beginning.
        think: whether the answer may begin with thoughts.
        in_text: whether the prompt contains the beginning of the answer's text; the grammar then constrains only the rest.
    """
    constraint = body.constraint()
    answer = constraint.grammar() if constraint else None
    if constraint and in_text and constraint.kind == "json":
        raise ApiError(400, f"{constraint.option} conflicts with continuing the last message, because JSON cannot begin inside "
                            "a text", constraint.option)
    callable_tools = body.callable_tools() if tools else []
    functions = [(function.name, function.parameters or {}, f"tools[{place}].function.parameters")
                 for place, function in callable_tools]
    if tools and (call_start or answer):
        if service.template.call_start is None:
            field = constraint.option if constraint else "tool_choice"
            raise ApiError(400, f"tools conflicts with {field}, because the format of tool calls is unknown for the chat "
                                f"template {service.template.name}. Send tool_choice=none", "tools")
        form = service.template.call_start[0].lstrip(), service.template.call_start[1]
        calls = Grammar.calls(form, functions, f"\n{call_stop(form[0]).lstrip()}", call_start.lstrip())
        if call_start:
            return calls
        answer = answer.or_else(calls) if answer else None
    if answer is None:
        strict = [named for named, (_, function) in zip(functions, callable_tools, strict=True) if function.strict]
        # A grammar allows no special token, so it cannot allow a call that begins with a special token.
        can_hold = START not in service.tokenizer.special and service.tokenizer.has_bytes
        return Grammar.text_with_calls(strict) if tools and strict and can_hold else None
    if "</think" in thoughts_start:      # the prompt ends with empty thoughts, of which the last ">" may be missing
        return answer.after_space() if thoughts_start.rstrip().endswith(">") else answer.after_space().after(">")
    if in_text:
        return answer
    if thoughts_start:
        return answer.after_thoughts()
    return answer.after_thoughts(START_OF_THOUGHTS) if think else answer.after_space()


ENDPOINTS = (Endpoint("/v1/chat/completions", "POST", chat_completions, ChatRequest, **GENERATION),)
