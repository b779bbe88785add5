"""A conversation with a model: the state is carried from turn to turn, and each turn reads only its new words.

After each prompt and each answer, the text read so far and the result of reading it are kept. The template always renders the
whole conversation, and reading continues from the longest kept text with which the rendered text begins: usually the end of the
last answer, after /undo an earlier one. An answer that the template renders otherwise than it was generated is read again.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rwkv.chat.messages import Message, check_messages
from rwkv.chat.rendered import encode, for_tokenizer, marked
from rwkv.chat.template import ChatTemplate
from rwkv.chat.thoughts import Think, answer_message
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.generation.engine import Engine
from rwkv.generation.prefill import PrefillResult
from rwkv.generation.request import Request
from rwkv.generation.row import Sample
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import Model
from rwkv.model.weights_watch import WeightsWatch
from rwkv.tokenizer.tokenizers import Tokenizer


@dataclass
class Stats:
    """For one answer: tokens read before it, tokens written, seconds until the first token, and seconds in all."""

    read: int = 0
    written: int = 0
    first_s: float = 0.0
    all_s: float = 0.0


@dataclass
class Chat:
    """messages: the conversation so far. context: the result of reading the text before it, as from a state file; or None.

    stop: strings that end an answer, beside the template's. think: how answers begin, as in thoughts.py. A message keeps its
    thoughts as reasoning_content; the template decides whether later turns show them. kept_bytes: the most that kept results
    take; the oldest are dropped first.
    """

    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: Sampling
    max_new_tokens: int
    seed: int = 0
    think: Think = False
    context: PrefillResult | None = None
    kept_bytes: int = 2**30
    stop: tuple[str, ...] = ()
    messages: list[Message] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    _points: list[tuple[str, PrefillResult]] = field(default_factory=list)
    _weights: WeightsWatch | None = None        # the weights that _points were computed with

    def __post_init__(self) -> None:
        self.template = for_tokenizer(self.template, self.tokenizer)

    def say(self, text: str) -> Iterator[str]:
        """Adds a turn of the user, and yields the answer piece by piece.

        The answer is added to the messages when the iterator ends or is closed. Raises UserError for a text that cannot be
        encoded, and for thoughts that the template lacks. After that, and after a KeyboardInterrupt while the turn is read, the
        turn is not part of the conversation.
        """
        before = [*self.messages]
        self.messages.append({"role": "user", "content": text})
        return self._answer_after(before)

    def retry(self) -> Iterator[str]:
        """Another answer to the last turn of the user. Raises UserError where there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("there is no answer to try again")
        before = [*self.messages]
        self.messages.pop()
        return self._answer_after(before)

    def undo(self) -> None:
        """Takes back the last turn of the user and its answer. Raises UserError where there is none."""
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise UserError("there is no turn to take back")
        del self.messages[places[-1]:]

    def reset(self, system: str | None = None) -> None:
        """Begins a new conversation with this system message; "" for none; None keeps the present one."""
        before = [message for message in self.messages if message["role"] == "system"][:1]
        self.messages = before if system is None else [{"role": "system", "content": system}] if system else []

    def load(self, messages: Any) -> None:
        """Continues another conversation. Raises UserError for wrong messages."""
        self.messages = list(check_messages(messages))

    def _answer_after(self, before: list[Message]) -> Iterator[str]:
        """The answer to the messages. If they cannot be read, they become `before` again."""
        try:
            engine, sample, prompt, started = self._prepared()
        except BaseException:
            self.messages = before
            raise
        return self._answer(engine, sample, prompt, started)

    def _prepared(self) -> tuple[Engine, Sample, str, float]:
        """An engine that has read the conversation, the sample that it will fill with the answer, the conversation's text with
        marks (rendered.py), and the time at which reading began."""
        started = time.perf_counter()
        if self._weights is None or not self._weights.unchanged():
            self._points = []
            self._weights = WeightsWatch(self.model)
        prompt = self.template.render(self.messages, think=self.think)
        read, context = max(((text, result) for text, result in self._points if prompt.startswith(text)),
                            key=lambda point: len(point[0]), default=("", self.context))
        before = read or self.tokenizer.decode(context.last_ids if context else ())
        # Penalties count the whole conversation, so that an answer does not depend on how much of it is read now
        earlier = encode(self.tokenizer, [prompt])[0] if self.sampling.repetition_penalty != 1 else ()
        engine = Engine(self.model, self.tokenizer)
        ids, = encode(self.tokenizer, [prompt[len(read):]], before)
        stopping = StoppingCriteria(self.max_new_tokens, (*self.template.stop, *self.stop))
        row, = engine.add_all([Request(ids, self.seed, stopping, self.sampling, context=context, earlier=earlier)])
        self.seed += 1
        self.stats = Stats(len(row.prompt_ids))
        self._keep(prompt, engine.context())
        return engine, row.sample, prompt, started

    def _answer(self, engine: Engine, sample: Sample, prompt: str, started: float) -> Iterator[str]:
        stats = self.stats
        think = self.think
        before = engine.context().last_ids
        begun = False
        try:
            for _, piece in engine:
                if not begun:
                    stats.first_s = time.perf_counter() - started
                    begun = True
                if piece:
                    yield piece
        finally:
            answer = self.tokenizer.decode(sample.tokens, before)
            self._keep(prompt + marked(self.tokenizer, answer), engine.context())
            if self.template.thinks:
                self.messages.append(answer_message(self.template.answer_start(think), sample.text))
            else:
                self.messages.append({"role": "assistant", "content": sample.text.strip()})
            stats.written = len(sample.tokens)
            stats.all_s = time.perf_counter() - started

    def _keep(self, text: str, result: PrefillResult) -> None:
        self._points = [point for point in self._points if point[0] != text] + [(text, result)]
        while len(self._points) > 1 and sum(point[1].nbytes() for point in self._points) > self.kept_bytes:
            self._points.pop(0)
