"""A conversation with a model: the state is carried from turn to turn, and each turn prefills only its new words.

After each prompt and each answer, Chat saves the text read so far and its result. The template always renders the whole
conversation, and prefill continues from the longest saved prefix of the rendered text: usually the end of the last answer,
after /undo an earlier one. An answer that the template renders differently from what was generated is read again.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rwkv.chat.messages import Message, check_messages
from rwkv.chat.rendered import encode, for_tokenizer, marked
from rwkv.chat.template import ChatTemplate
from rwkv.chat.thoughts import Think, answer_message
from rwkv.config import Sampling
from rwkv.errors import UserError
from rwkv.generation.draft import Draft
from rwkv.generation.engine import Engine
from rwkv.generation.prefill import PrefillResult
from rwkv.generation.request import Request
from rwkv.generation.row import Row
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import Model
from rwkv.model.weights_watch import WeightsWatch
from rwkv.tokenizer.tokenizers import Tokenizer


@dataclass
class Stats:
    """Of one answer: prompt tokens read, tokens written, seconds to the first token, and seconds in all; tokens that the draft
    proposed, and those accepted."""

    read: int = 0
    written: int = 0
    first_s: float = 0.0
    all_s: float = 0.0
    proposed: int = 0
    accepted: int = 0


@dataclass
class Chat:
    """messages: the conversation so far. context: the result of the text before it, as from a state file; or None.

    stop: strings that end an answer, besides the template's. think: how answers begin, as in thoughts.py. A message keeps its
    thoughts as reasoning_content; the template decides whether later turns show them. kept_bytes: the most memory of saved
    results; the oldest are evicted first. draft: as for Engine.
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
    draft: Draft | None = None
    messages: list[Message] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    _saved_results: list[tuple[str, PrefillResult]] = field(default_factory=list)
    _weights: WeightsWatch | None = None        # the weights that _saved_results were computed with

    def __post_init__(self) -> None:
        self.template = for_tokenizer(self.template, self.tokenizer)

    def say(self, text: str) -> Iterator[str]:
        """Adds a user turn, and yields the answer piece by piece.

        The answer is added to the messages when the iterator ends or is closed. Raises UserError for a text that cannot be
        encoded, and for thoughts that the template lacks. After that, and after a KeyboardInterrupt during prefill, the turn is
        not part of the conversation.
        """
        before = [*self.messages]
        self.messages.append({"role": "user", "content": text})
        return self._answer_after(before)

    def retry(self) -> Iterator[str]:
        """Another answer to the last user turn. Raises UserError if there is none."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("no answer to retry")
        before = [*self.messages]
        self.messages.pop()
        return self._answer_after(before)

    def undo(self) -> None:
        """Removes the last user turn and its answer. Raises UserError if there is none."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            raise UserError("no turn to undo")
        del self.messages[turns[-1]:]

    def reset(self, system: str | None = None) -> None:
        """Starts a new conversation with this system message; "" for none; None keeps the present one."""
        before = [message for message in self.messages if message["role"] == "system"][:1]
        self.messages = before if system is None else [{"role": "system", "content": system}] if system else []

    def load(self, messages: object) -> None:
        """Replaces the conversation. Raises UserError for wrong messages."""
        self.messages = list(check_messages(messages))

    def _answer_after(self, before: list[Message]) -> Iterator[str]:
        """The answer to the messages. If prefill fails, the messages are reset to `before`."""
        try:
            engine, row, prompt, started = self._prepare()
        except BaseException:
            self.messages = before
            raise
        return self._answer(engine, row, prompt, started)

    def _prepare(self) -> tuple[Engine, Row, str, float]:
        """An engine after prefill of the conversation, the row that will hold the answer, the conversation's text with marks
        (rendered.py), and the time at which prefill began."""
        started = time.perf_counter()
        if self._weights is None or not self._weights.unchanged():
            self._saved_results = []
            self._weights = WeightsWatch(self.model)
        prompt = self.template.render(self.messages, think=self.think)
        prefix, context = max(((text, result) for text, result in self._saved_results if prompt.startswith(text)),
                              key=lambda saved: len(saved[0]), default=("", self.context))
        before = prefix or self.tokenizer.decode(context.last_ids if context else ())
        # Penalties count the whole conversation, so that an answer does not depend on the saved prefix; a draft reads it, too
        needs_earlier = self.sampling.repetition_penalty != 1 or self.draft is not None
        earlier = encode(self.tokenizer, [prompt])[0] if needs_earlier else ()
        engine = Engine(self.model, self.tokenizer, draft=self.draft)
        ids, = encode(self.tokenizer, [prompt[len(prefix):]], before)
        stopping = StoppingCriteria(self.max_new_tokens, (*self.template.stop, *self.stop))
        row, = engine.add_all([Request(ids, self.seed, stopping, self.sampling, context=context, earlier=earlier)])
        self.seed += 1
        self.stats = Stats(len(row.prompt_ids))
        self._save_result(prompt, engine.context())
        return engine, row, prompt, started

    def _answer(self, engine: Engine, row: Row, prompt: str, started: float) -> Iterator[str]:
        sample = row.sample
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
            self._save_result(prompt + marked(self.tokenizer, answer), engine.context())
            if self.template.thinks:
                self.messages.append(answer_message(self.template.answer_start(think), sample.text))
            else:
                self.messages.append({"role": "assistant", "content": sample.text.strip()})
            stats.written = len(sample.tokens)
            stats.proposed, stats.accepted = row.proposed_tokens, row.accepted_tokens
            stats.all_s = time.perf_counter() - started

    def _save_result(self, text: str, result: PrefillResult) -> None:
        results = [saved for saved in self._saved_results if saved[0] != text] + [(text, result)]
        while len(results) > 1 and sum(saved[1].nbytes() for saved in results) > self.kept_bytes:
            results.pop(0)
        self._saved_results = results
