"""Turns the engine's events for one request into OpenAI's objects, and sends them whole or as server-sent events."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rwkv.chat.calls import CallParser
from rwkv.chat.thoughts import ThoughtParser
from rwkv.generation.request import Entry
from rwkv.io.json_types import JsonObject
from rwkv.serving.engine.queue import Ticket
from rwkv.serving.engine.remote import RemoteEngine
from rwkv.serving.http.errors import ApiError, json_response
from rwkv.serving.logprobs import REPLACEMENT_CHARACTER, ShownTokens, replace_text
from rwkv.serving.messages import Event
from rwkv.tokenizer.decoders import Decoder
from rwkv.tokenizer.tokenizers import Tokenizer

REASONS = {"length": "length", "stop": "stop", "end_of_text": "stop", "cancelled": "length", "no_token": "length"}
LINE_END = "\n"
# Some clients split lines at these characters, as Python's str.splitlines does. JSON has unescaped "\n" and "\r" only between
# values, so a space can replace them.
LINE_ENDS = {character.encode(): escape.encode() for character, escape in {
    "\n": " ", "\r": " ", "\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}.items()}
SEND_TIMEOUT = 30                        # seconds after which a client that reads nothing is disconnected
# A stream is silent while its request is queued, while a long prompt is prefilled, and while a tool call is generated. Proxies
# and clients close a connection that is silent for 30 seconds or more, so the server sends comments, which clients ignore.
COMMENT_S = 10                           # seconds of silence before a comment; at most twice this time passes
COMMENT = b": waiting\n\n"


@dataclass
class ResponseSpec:
    """A description of how to present a request's sequences to the client.

    Attributes:
        before: for each sequence, the echoed prompt or, in a chat, the beginning of the answer that the prompt contains.
        n: the number of sequences per prompt; the sequences of a prompt are adjacent.
        functions: names of the functions that the answer may call.
        call_start: the beginning of a tool call, if the prompt ends with one.
        most_calls: the number of tool calls to show; further calls are dropped.
        thinks: whether answers may begin with thoughts; the first characters of these may be in `before`.
        continues: whether the sequences continue thoughts or text, as in ThoughtParser.
        after: the last token ids of the context before the prompts.
        saves: whether each sequence's final state is saved.
    """

    kind: str                            # "cmpl" or "chatcmpl"
    model: str
    include_usage: bool
    logprobs: bool
    before: list[str]
    n: int
    tokenizer: Tokenizer
    echo_logprobs: bool = False
    functions: Sequence[str] = ()
    call_start: str = ""
    most_calls: int | None = None
    thinks: bool = False
    continues: bool = False
    after: Sequence[int] = ()
    saves: bool = False
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return self.kind == "chatcmpl"

    def envelope(self, choices: list[JsonObject], stream: bool) -> JsonObject:
        kind = ("chat.completion" + ".chunk" * stream) if self.chat else "text_completion"
        return {"id": f"{self.kind}-{self.id}", "object": kind, "created": self.created, "model": self.model,
                "choices": choices}


class Answer:
    """Sends the sequences of a ticket as an ASGI response, and cancels the sequences when the client disconnects."""

    content_type = "text/event-stream; charset=utf-8"            # the type of streamed answers

    def __init__(self, engine: RemoteEngine, ticket: Ticket, spec: ResponseSpec, stream: bool, timeout_s: float) -> None:
        self._engine = engine
        self._ticket = ticket
        self._spec = spec
        self._stream = stream
        self._timeout_s = timeout_s
        self._choices = [_Choice(spec, number, sequence.request.prompt_ids) for number, sequence in enumerate(ticket.sequences)]
        self._complete = False           # all events have arrived
        self._abandoned = False          # the client disconnected before the last event
        self._silent = True              # no chunk was sent since the last check
        self._sending = asyncio.Lock()   # two messages must not be sent at the same time
        self._stream_error: ApiError | None = None       # the error with which a stream has ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._cancel)
        try:
            await (self._send_stream(scope, send) if self._stream else self._send_full(scope, receive, send))
        except (TimeoutError, asyncio.CancelledError):           # a server that exits immediately cancels this task
            scope["state"]["abort"]()
        finally:
            deadline.cancel()
            watcher.cancel()
            self._cancel()
            if self._abandoned:
                for choice in self._choices:
                    if choice.last.state is not None:
                        self._engine.drop(choice.last.state)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel()
        self._abandoned = not self._complete

    def _cancel(self) -> None:
        self._engine.cancel(self._ticket)

    async def _send_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._whole_response()
        except ApiError as error:
            if self._abandoned:          # the client is gone: the log need not report a failure
                return
            client_error = self._client_error(error)
            scope["state"]["refusal"] = str(client_error)
            response = self._error_response(client_error)
        await self._send(response, scope, receive, send)

    async def _whole_response(self) -> Response:
        """Waits for all events, and returns the response. Raises ApiError."""
        async for number, event in self._ticket:
            self._add_event(number, event)
        self._complete = True
        await self._finish()
        # An answer with the prompt's log-probabilities takes megabytes. A thread encodes it, so that no other request waits.
        return await asyncio.to_thread(self._full_response) if self._spec.echo_logprobs else self._full_response()

    async def _send(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(SEND_TIMEOUT):
            await response(scope, receive, send)

    async def _finish(self) -> None:
        """Does nothing. Subclasses may override this hook, which is called before the end of the answer is sent."""

    def _client_error(self, error: ApiError) -> ApiError:
        """Returns the error to send to the client for `error`. Subclasses may override this hook."""
        return error

    def _end_stream(self, error: ApiError) -> ApiError:
        """Records that a stream ends with an error, and returns the error to send to the client."""
        self._stream_error = self._client_error(error)
        return self._stream_error

    def _error_response(self, error: ApiError) -> Response:
        return error.response()

    def _add_event(self, number: int, event: Event) -> None:
        self._choices[number].add(event)

    def _full_response(self) -> Response:
        content = self._spec.envelope([choice.whole() for choice in self._choices], stream=False)
        return json_response({**content, "usage": self._usage()})

    async def _send_stream(self, scope: Scope, send: Send) -> None:
        headers = [(b"content-type", self.content_type.encode()), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        comments = asyncio.create_task(self._send_comments(send)) if self.content_type.startswith("text/event-stream") else None
        try:
            async for chunk in self._chunks():
                self._silent = False
                async with asyncio.timeout(SEND_TIMEOUT), self._sending:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            if comments is not None:
                comments.cancel()
        if self._stream_error is not None and not self._abandoned:
            scope["state"]["stream_error"] = self._stream_error              # for the log
        async with asyncio.timeout(SEND_TIMEOUT):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(COMMENT_S)
            if self._silent:
                async with self._sending:
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def _chunks(self) -> AsyncIterator[bytes]:
        usage = {"usage": None} if self._spec.include_usage else {}
        first = b"".join(sse({**self._spec.envelope([piece], stream=True), **usage})
                         for choice in self._choices for piece in choice.first())
        if first:
            yield first
        try:
            async for number, event in self._ticket:
                for piece in self._choices[number].pieces(event):
                    yield sse({**self._spec.envelope([piece], stream=True), **usage})
        except ApiError as error:
            yield sse(self._end_stream(error).body)
        else:
            self._complete = True
            if self._spec.include_usage:
                yield sse({**self._spec.envelope([], stream=True), "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _usage(self) -> JsonObject:
        """Returns the token counts in OpenAI's format. A prompt with n sequences counts once."""
        prompt_events = [choice.last for choice in self._choices[::self._spec.n]]
        prompt_tokens = sum(event.prompt_tokens for event in prompt_events)
        new_tokens = sum(choice.last.completion_tokens for choice in self._choices)
        cached = sum(event.cached_tokens for event in prompt_events)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": prompt_tokens + new_tokens,
                "prompt_tokens_details": {"cached_tokens": cached}}


class Part(NamedTuple):
    """A piece of the answer that follows the thoughts: a text with its tokens' log-probabilities, or a tool call."""

    text: str
    logprobs: list[Entry]
    call: JsonObject | None = None


class _Choice:
    """One sequence of an answer, presented as a choice of a completion or a chat completion.

    A chat message has one content string. A newline separates text before a tool call from text after the call.
    """

    def __init__(self, spec: ResponseSpec, number: int, prompt: Sequence[int]) -> None:
        self._spec = spec
        self._number = number
        self._prompt = prompt
        self._content = "" if spec.chat else spec.before[number]
        self._logprobs: list[Entry] = []
        self._thoughts = ""
        self._answer = ThoughtParser(spec.before[number], spec.thinks, spec.continues) if spec.chat else None
        self._n_chars = 0                # number of characters generated
        before = [*spec.after, *prompt]
        self._tokens = ShownTokens(spec.tokenizer.decoder(before)) if spec.logprobs else None
        self._parser = CallParser(spec.functions, spec.call_start, spec.most_calls) if spec.functions else None
        self._calls: list[JsonObject] = []
        self._has_text = False
        self._after_call = False         # a tool call has ended, and no text has followed yet
        self._line_end = ""              # a newline that was added to the text, but not yet to a token's string
        self._decoder = spec.tokenizer.decoder(
            spec.after if spec.echo_logprobs else before if spec.logprobs else ())
        self._offset = 0                 # the text offset of the next token, in characters
        self.last = Event(-1)

    def add(self, event: Event) -> None:
        thoughts, parts = self.parse(event)
        self._thoughts += thoughts
        for part in parts:
            if part.call:
                self._calls.append(part.call)
                self._after_call = True
                continue
            text, logprobs, _ = self._with_line_end(part)
            self._content += text
            self._logprobs += logprobs
        if event.finish_reason is not None:
            self.last = event

    def whole(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": self._content, "refusal": None}
        if self._thoughts:
            message["reasoning_content"] = self._thoughts
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        content = {"message": message} if self._spec.chat else {"text": self._content}
        return {"index": self._number, **content, "logprobs": self._format_logprobs(self._logprobs),
                "finish_reason": self.reason(self.last), **self._state()}

    def first(self) -> list[JsonObject]:
        """Returns the chunks to send before the first event."""
        if self._spec.chat:
            return [self._piece({"role": "assistant", "content": self._content}, None, None)]
        if self._content and not self._spec.echo_logprobs:
            return [self._piece(self._content, None, None)]
        return []

    def pieces(self, event: Event) -> list[JsonObject]:
        finished = event.finish_reason is not None
        if self._spec.echo_logprobs:     # the last event brings the prompt's log-probabilities, which the client gets first
            self.add(event)
            if not finished:
                return []
            return [{**self._piece(self._content, self._format_logprobs(self._logprobs), self.reason(event)), **self._state()}]
        thoughts, parts = self.parse(event)
        pieces = []
        if thoughts:
            pieces.append(self._piece({"reasoning_content": thoughts}, None, None))
        for part in parts:
            if part.call:
                pieces.append(self._piece({"tool_calls": [{"index": len(self._calls), **part.call}]}, None, None))
                self._calls.append(part.call)
                self._after_call = True
                continue
            text, logprobs, _ = self._with_line_end(part)
            pieces.append(self._piece({"content": text} if self._spec.chat else text, self._format_logprobs(logprobs), None))
        if finished:
            self.last = event
            pieces.append({**self._piece({} if self._spec.chat else "", None, self.reason(event)), **self._state()})
        return pieces

    def _with_line_end(self, part: Part) -> Part:
        """Returns the part, with a newline before its text if a tool call separates the text from earlier text.

        The first token's string gets the newline too, so that the concatenated tokens equal the content.
        """
        text = part.text
        logprobs = part.logprobs
        if text and self._has_text and self._after_call:
            text = f"{LINE_END}{text}"
            self._line_end = LINE_END
        if text:
            self._has_text = True
            self._after_call = False
        if self._line_end and logprobs:
            logprobs = [replace_text(logprobs[0], f"{self._line_end}{logprobs[0]['text']}"), *logprobs[1:]]
            self._line_end = ""
        return Part(text, logprobs)

    def parse(self, event: Event) -> tuple[str, list[Part]]:
        """Returns the thoughts that an event adds, and the event's texts and calls in the order in which the model wrote them.

        A token's log-probability belongs to the part whose text contains the token's first character.
        """
        last = event.finish_reason is not None
        self._n_chars += len(event.text)
        thoughts = ""
        text = event.text
        offset = 0                       # offset in the answer at which the text after the thoughts begins
        decided = self._n_chars
        if self._answer:
            thoughts, text = self._answer.push(event.text, last)
            offset = self._answer.text_place
            decided = self._answer.decided
        if not self._parser and not self._tokens:        # the usual case, reached for every token
            return thoughts, [Part(text, [])] if text else []
        pieces: list[tuple[str, int] | JsonObject] = [(text, self._n_chars - len(text))]
        spans = [(self._n_chars - len(text), self._n_chars)]
        if self._parser:
            self._parser.push(text, last)
            pieces = [piece if isinstance(piece, dict) else (piece[0], piece[1] + offset) for piece in self._parser.parts]
            spans = [(start + offset, end + offset) for start, end in self._parser.spans]
            decided = min(decided, self._parser.decided + offset)
        if self._tokens:
            self._tokens.add(event.logprobs)
            self._tokens.show(spans)
        return thoughts, [part for part in self._parts(pieces, decided, last) if part.text or part.logprobs or part.call]

    def _parts(self, pieces: list[tuple[str, int] | JsonObject], decided: int, last: bool) -> Iterator[Part]:
        """Yields each piece with the log-probabilities of its tokens.

        Tokens after the offset `decided` wait for a later call, unless `last` is set.
        """
        starts = [piece[1] for piece in pieces if isinstance(piece, tuple)]

        def logprobs() -> list[Entry]:
            if self._tokens is None:
                return []
            if starts:
                return self._tokens.take(starts.pop(0))
            return self._tokens.take_rest() if last else self._tokens.take(decided)

        if not pieces or isinstance(pieces[0], dict):
            yield Part("", logprobs())   # tokens before the call may have waited for this event
        else:
            starts.pop(0)
        for piece in pieces:
            yield Part("", [], piece) if isinstance(piece, dict) else Part(piece[0], logprobs())

    def reason(self, event: Event) -> str:
        reason = REASONS[event.finish_reason or "length"]
        if self._parser and self._parser.n_calls and (reason == "stop" or self._parser.full):
            return "tool_calls"
        return reason

    def _piece(self, content: object, logprobs: object, reason: str | None) -> JsonObject:
        return {"index": self._number, "delta" if self._spec.chat else "text": content, "logprobs": logprobs,
                "finish_reason": reason}

    def _state(self) -> JsonObject:
        """Returns the field `state` if the request asked for a saved state, otherwise no field.

        The field holds the final state's id, or null for a cancelled sequence.
        """
        return {"state": self.last.state and self.last.state.id} if self._spec.saves else {}

    def _format_logprobs(self, entries: list[Entry]) -> JsonObject | None:
        if not self._spec.logprobs:
            return None
        if self._spec.chat:
            return {"content": [chat_entry(entry, self._decoder) for entry in entries], "refusal": None}
        return self._completion_logprobs(entries)

    def _completion_logprobs(self, entries: list[Entry]) -> JsonObject:
        """Returns the log-probabilities in the format of completions, which has parallel lists.

        With echo, the prompt's tokens come first, and the first of them has no log-probability.
        """
        lists: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._spec.echo_logprobs:
            first = self._prompt[0]
            name = self._spec.tokenizer.names([first])[0]
            entries = [{"token": first, "text": name, "logprob": None}, *self.last.prompt_logprobs, *entries]
        for entry in entries:
            top = {token_string(entry): entry["logprob"]}
            for alternative in entry.get("top", ()):
                if alternative["token"] != entry["token"]:
                    name = token_string(alternative)
                    top[name if name not in top else f"token_id:{alternative['token']}"] = alternative["logprob"]
            lists["tokens"].append(token_string(entry))
            lists["token_logprobs"].append(entry["logprob"])
            lists["top_logprobs"].append(None if entry["logprob"] is None else top)
            piece = self._decoder.push(entry["token"])           # a piece may begin inside a character of earlier tokens
            lists["text_offset"].append(self._offset + max(piece.find(entry["text"]), 0))
            self._offset += len(piece)
        return lists


def chat_entry(entry: Entry, decoder: Decoder) -> JsonObject:
    return {**_chat_token(entry, decoder), "top_logprobs": [_chat_token(token, decoder) for token in entry["top"]]}


def _chat_token(entry: Entry, decoder: Decoder) -> JsonObject:
    whole = bool(entry["text"]) and REPLACEMENT_CHARACTER not in entry["text"]
    content = entry["text"].encode() if whole else decoder.bytes_of(entry["token"])
    return {"token": token_string(entry), "logprob": entry["logprob"], "bytes": list(content) if content else None}


def token_string(entry: Entry) -> str:
    """Returns the token's text, or token_id:ID if the text is not whole characters, so that no two tokens share a string."""
    text = entry["text"]
    return text if text and REPLACEMENT_CHARACTER not in text else f"token_id:{entry['token']}"


def one_line(content: JsonObject) -> bytes:
    """Returns the content as one line of JSON without a final newline. Newlines inside a msgspec.Raw are replaced."""
    line = msgspec.json.encode(content)
    for character, escape in LINE_ENDS.items():
        line = line.replace(character, escape)
    return line


def sse(content: JsonObject) -> bytes:
    """Returns the content as a server-sent event. The event's name is content["type"], if present."""
    name = b"event: %s\n" % content["type"].encode() if "type" in content else b""
    return b"%sdata: %s\n\n" % (name, one_line(content))
