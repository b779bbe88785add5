"""A Chat keeps the states after the turns of a conversation, for /undo and /retry, and prefills only new text.

After each prompt and each answer, Chat saves the text read so far with its prefill result. The template always renders the
whole conversation, and prefill continues from the longest saved prefix of the rendered text. This prefix usually ends with the
last answer, or with an earlier answer after /undo. If the template renders an answer differently from the generated text, the
answer is prefilled again.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rwkv.chat.encoding import encode, for_tokenizer, mark_special_names
from rwkv.chat.interface import ChatTemplate
from rwkv.chat.messages import Message, check_messages
from rwkv.chat.thoughts import Think, answer_message
from rwkv.config import Sampling, require_type
from rwkv.errors import UserError
from rwkv.generation.draft import Draft
from rwkv.generation.engine import Engine, require_model
from rwkv.generation.prefix_cache import PrefillResult
from rwkv.generation.request import Request
from rwkv.generation.row import Row
from rwkv.generation.stopping import StoppingCriteria
from rwkv.io.utf8 import without_surrogates
from rwkv.model.base import Model
from rwkv.model.weights_watch import WeightsWatch
from rwkv.tokenizer.tokenizers import Tokenizer, require_tokenizer_type


@dataclass
class Stats:
    """The token counts and the times of one answer."""

    read: int = 0                        # prompt tokens prefilled
    written: int = 0                     # tokens generated
    first_s: float = 0.0                 # seconds to the first token
    all_s: float = 0.0                   # total seconds
    proposed: int = 0                    # draft tokens proposed
    accepted: int = 0                    # draft tokens accepted


@dataclass
class Chat:
    """A conversation with its messages, and with the saved prefill results from which the next turn continues.

    A message stores its thoughts as reasoning_content. The template decides whether later turns show these thoughts. If the
    model's weights change, the next turn uses the new weights; they must not change during an answer.

    Attributes:
        think: the way in which a prompt asks for thoughts (rwkv/chat/thoughts.py).
        context: the prefill result of the text before the conversation, for example from a state file.
        kept_bytes: the memory limit of the saved results, in bytes. The oldest results are evicted first.
        stop: strings that end an answer, in addition to those of the template.
        draft: as for Engine.
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
    _weights: WeightsWatch | None = None        # watches the weights that _saved_results depend on

    def __post_init__(self) -> None:
        require_model(self.model)
        require_tokenizer_type(self.tokenizer)
        require_type("template", self.template, ChatTemplate, 'a ChatTemplate, such as chat_template("g1")')
        require_type("sampling", self.sampling, Sampling, "a Sampling, such as Sampling(temperature=0.5)")
        self.template = for_tokenizer(self.template, self.tokenizer)
        self.sampling.check_ids(self.tokenizer.vocab_size)

    def say(self, text: str) -> Iterator[str]:
        """Adds and prefills a user turn, and returns an iterator that yields the answer piece by piece.

        The answer is added to the messages when the iterator ends or is closed. Raises UserError if the text cannot be
        encoded, or if `think` is set and the template does not support thoughts. An error or a KeyboardInterrupt during prefill
        leaves the conversation unchanged.
        """
        before = [*self.messages]
        self.messages.append({"role": "user", "content": text})
        return self._answer_after(before)

    def retry(self) -> Iterator[str]:
        """Replaces the last answer, and returns an iterator that yields the new answer piece by piece.

        Raises UserError if there is no answer.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("there is no answer to retry")
        before = [*self.messages]
        self.messages.pop()
        return self._answer_after(before)

    def undo(self) -> None:
        """Removes the last user turn and its answer. Raises UserError if there is no user turn."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not turns:
            raise UserError("there is no turn to undo")
        del self.messages[turns[-1]:]

    def reset(self, system: str | None = None) -> None:
        """Starts a new conversation with a system message. None keeps the current system message, and "" removes it.

        Half a surrogate pair, as a terminal gives for a byte that is not UTF-8, becomes U+FFFD.
        """
        before = [message for message in self.messages if message["role"] == "system"][:1]
        new: list[Message] = [{"role": "system", "content": without_surrogates(system)}] if system else []
        self.messages = before if system is None else new

    def load(self, messages: object) -> None:
        """Replaces the messages of the conversation; the list may be empty. Raises UserError if the messages are malformed.

        Half a surrogate pair, which UTF-8 cannot encode, becomes U+FFFD.
        """
        self.messages = list(check_messages(without_surrogates(messages))) if messages != [] else []

    def _answer_after(self, before: list[Message]) -> Iterator[str]:
        try:
            engine, row, prompt, started = self._prepare()
        except BaseException:
            self.messages = before
            raise
        return self._answer(engine, row, prompt, started)

    def _prepare(self) -> tuple[Engine, Row, str, float]:
        """Prefills the conversation. Returns the engine, the answer's row, the marked prompt, and the time of the start."""
        started = time.perf_counter()
        if self._weights is None or not self._weights.is_unchanged():
            self._saved_results = []
            self._weights = WeightsWatch(self.model)
        prompt = self.template.render(self.messages, think=self.think)
        prefix, context = max(((text, result) for text, result in self._saved_results if prompt.startswith(text)),
                              key=lambda saved: len(saved[0]), default=("", self.context))
        before = prefix or self.tokenizer.decode(context.last_ids if context else ())
        # Penalties and drafts read the whole conversation, so an answer does not depend on which prefix was saved
        needs_earlier = self.sampling.repetition_penalty != 1 or self.draft is not None
        earlier = encode(self.tokenizer, [prompt])[0] if needs_earlier else ()
        engine = Engine(self.model, self.tokenizer, draft=self.draft, checks_weights=False)
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
        has_output = False
        try:
            for _, piece in engine:
                if not has_output:
                    stats.first_s = time.perf_counter() - started
                    has_output = True
                if piece:
                    yield piece
        finally:
            answer = self.tokenizer.decode(sample.tokens, before)
            self._save_result(prompt + mark_special_names(self.tokenizer, answer), engine.context())
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
