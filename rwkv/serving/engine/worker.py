"""The engine's process, which loads the model, reports errors and generates. Only one thread uses torch.

Loading the model in one thread and generating in another would start two teams of OpenMP threads on the same cores.
"""

import signal
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import NamedTuple

from kernels.machine.allocator import keep_large_blocks
from rwkv.chat.thoughts import Think
from rwkv.checkpoint import time_states
from rwkv.config import MIB, ServeConfig
from rwkv.errors import UserError, memory_message
from rwkv.generation.draft import Draft
from rwkv.generation.engine import Engine
from rwkv.generation.grammar.matcher import cached_matchers
from rwkv.generation.prefix_cache import Key, PrefillResult, PrefixCache
from rwkv.generation.row import Row
from rwkv.generation.state_files import StateFormat, context_of_state
from rwkv.io.signals import STOPPING
from rwkv.model.base import Model, n_parameters
from rwkv.serving.log import say
from rwkv.serving.messages import (
    Cancel,
    Defaults,
    Download,
    Drop,
    Event,
    Failed,
    Generate,
    ModelInfo,
    Ready,
    Reply,
    SavedState,
    Step,
    SyncFolder,
    ToEngine,
    Upload,
)
from rwkv.serving.states.store import StateGone, StateStore
from rwkv.tokenizer.tokenizers import Tokenizer

COMPILING_S = 0.002                      # seconds between checks, in an idle engine, whether a grammar is compiled


class LoadedAdapter(NamedTuple):
    """A loaded adapter.

    Attributes:
        model: the checkpoint's model, or a model with the adapter's weights.
        start: the state from which the adapter's sequences begin; None for the empty state.
        tokens: the number of tokens that `start` has read; None if unknown.
        digest: a hash of the trained values.
    """

    model: Model
    start: PrefillResult | None
    tokens: int | None
    digest: str


class Loaded(NamedTuple):
    """The result of loading. The fields without a description are those of messages.Ready and messages.ModelInfo.

    Attributes:
        adapters: the adapters by name.
        draft: the draft for all models.
    """

    model: Model
    tokenizer: Tokenizer
    template: str
    plan: list[tuple[str, str]]
    state_bytes: int
    defaults: Mapping[tuple[Think, bool], Defaults]
    trained_tokens: int | None = None
    adapters: Mapping[str, LoadedAdapter] = MappingProxyType({})
    dtype: str = "float32"
    draft: Draft | None = None


Load = Callable[[ServeConfig], Loaded]


def main(connection: Connection, config: ServeConfig, load: Load) -> None:
    """Loads the model, warms it up, sends Ready or Failed, and generates until None arrives or the connection ends."""
    for number in STOPPING:              # the HTTP process decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    keep_large_blocks()
    try:
        loaded = load(config)
        cache = PrefixCache(config.cache_mib * MIB) if config.cache_mib else None
        adapters = {"": LoadedAdapter(loaded.model, None, 0, ""), **loaded.adapters}
        engines = {adapter.model: Engine(adapter.model, loaded.tokenizer, cache, loaded.draft, checks_weights=False)
                   for adapter in adapters.values()}
        for engine in engines.values():
            engine.warm_up(config.max_rows)
        formats = {name: StateFormat.of(adapter.model, loaded.tokenizer) for name, adapter in adapters.items()}
        states = StateStore(config, formats, {name: adapter.digest for name, adapter in adapters.items()})
        models = {name: _Model(adapter.model, engines[adapter.model], adapter.start) for name, adapter in adapters.items()}
        worker = _Worker(connection, models, loaded.tokenizer, cache, states)
        model = loaded.model
        model_info = ModelInfo(model.generation.NAME, n_parameters(model.config, model.vocab_size), loaded.dtype,
                               loaded.trained_tokens, model.config.n_embd, model.emb.weight.device.type)
        starts = {name: each.start and SavedState("", "", 0, each.tokens, each.start.nbytes(), each.start.last_ids, model=name)
                  for name, each in loaded.adapters.items()}
        connection.send(Ready(model_info, loaded.tokenizer.to_dict(), loaded.template, loaded.plan, states.initial,
                              loaded.state_bytes, loaded.defaults, starts))
        try:
            worker.run()
        finally:
            states.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        out_of_memory = memory_message(error)
        mistake = isinstance(error, (UserError, OSError)) or type(error).__module__ == "kernels.registry"
        message = str(error) if mistake else traceback.format_exc()
        if out_of_memory is not None:
            message = f"{out_of_memory}. Set a smaller max_rows=, or a smaller dtype="
        connection.send(Failed(message, mistake or out_of_memory is not None))


class _Model(NamedTuple):
    """A model that requests can name. If `start` is None, the model's sequences begin from the empty state."""

    model: Model
    engine: Engine
    start: PrefillResult | None


class _Job:
    """A running sequence. Counts how much of the engine's row has been sent."""

    def __init__(self, message: Generate, row: Row) -> None:
        self.message = message
        self.row = row
        self.text = ""                   # text not sent yet
        self._logprobs_sent = 0

    def event(self) -> Event | None:
        sample = self.row.sample
        finished = self.row.complete
        if not finished and not self.message.stream:
            return None
        # lm-evaluation-harness requests the prompt's log-probabilities and expects an entry for the token that ends the answer
        end = len(sample.logprobs) if self.row.request.prompt_logprobs else len(sample.tokens)
        logprobs = sample.logprobs[self._logprobs_sent:end]
        if not (self.text or logprobs or finished):
            return None
        if self.row.damaged:
            return Event(self.message.id, error="the logits after the state are not finite: either the model had diverged when "
                         "the state was saved, or the state's file has changed")
        event = Event(self.message.id, self.text, logprobs)
        self.text = ""
        self._logprobs_sent += len(logprobs)
        if finished:
            event.finish_reason = sample.finish_reason
            event.stop = self.row.stop
            context_tokens = (self.message.start and self.message.start.tokens) or 0
            event.prompt_tokens = context_tokens + len(self.row.prompt_ids)
            event.cached_tokens = context_tokens + self.row.cached_tokens
            event.completion_tokens = len(sample.tokens)
            event.proposed_tokens = self.row.proposed_tokens
            event.accepted_tokens = self.row.accepted_tokens
            event.prompt_logprobs = self.row.prompt_logprobs
            if self.row.request.pooling is not None and self.row.prompt_read:
                event.embedding = self.row.embedding.tolist()
        return event

    def saved_state(self) -> SavedState | None:
        save = self.message.save
        context = self.row.final_context
        start = self.message.start
        if save is None or context is None:
            return None
        tokens = len(self.row.prompt_ids) + len(self.row.sample.tokens)
        context_tokens = start.tokens if start else 0
        turn = save.turn and replace(save.turn, tail=save.turn.tail + self.row.read_after_text)
        return replace(save, tokens=None if context_tokens is None else context_tokens + tokens, bytes=context.nbytes(),
                       last_ids=context.last_ids, turn=turn)


class _Worker:
    """Runs the engines. Handles new messages before each step, and sends the events after the step."""

    def __init__(self, connection: Connection, models: Mapping[str, _Model], tokenizer: Tokenizer, cache: PrefixCache | None,
                 states: StateStore) -> None:
        self._connection = connection
        self._models = models
        self._tokenizer = tokenizer
        self._cache = cache
        self._states = states
        # Maps each engine's row indices to the running sequences
        self._jobs: dict[Engine, dict[int, _Job]] = {model.engine: {} for model in models.values()}
        self._refused: list[Event] = []
        self._compiler = ThreadPoolExecutor(1)           # one thread, so that no running sequence waits for a grammar
        self._compiling: list[tuple[Future[object], list[Generate]]] = []
        self._cancelled: set[int] = set()                # ids of sequences cancelled while their grammar compiles

    def run(self) -> None:
        while True:
            idle = not (any(engine.unfinished or jobs for engine, jobs in self._jobs.items()) or self._refused)
            wait = (COMPILING_S if self._compiling else None) if idle else 0
            while self._connection.poll(wait):
                message = self._connection.recv()
                if message is None:
                    return
                self._handle(message)
                wait = 0
            for pair in [pair for pair in self._compiling if pair[0].done()]:
                self._compiling.remove(pair)
                for sequence in pair[1]:
                    self._begin(sequence)
            events = self._refused
            self._refused = []
            for engine, jobs in self._jobs.items():
                for index, text in engine.step():
                    jobs[index].text += text
                events += [event for job in jobs.values() if (event := self._event(job))]
                self._jobs[engine] = {index: job for index, job in jobs.items() if not job.row.complete}
            gone = self._states.take_gone()
            if events or gone:
                cached = (self._cache.bytes, len(self._cache)) if self._cache else (0, 0)
                self._connection.send(Step(events, *cached, self._states.nbytes, tuple(gone)))

    def _event(self, job: _Job) -> Event | None:
        """Returns the event to send for a sequence, if any. Saves the final state, if requested, before the last event."""
        event = job.event()
        saved = job.saved_state()
        if event is not None and saved is not None:
            assert job.row.final_context is not None
            self._states.put(saved, job.row.final_context)
            event.state = saved
        return event

    def _handle(self, message: ToEngine) -> None:
        """Handles one message. The sequences of a request arrive in one message and begin at the same step.

        So a shared prompt is read only once. The last bits of log-probabilities depend on the number of rows, but not on the
        time at which each sequence arrived.
        """
        if isinstance(message, Cancel):
            for job in (job for jobs in self._jobs.values() for job in jobs.values()):
                if job.message.id == message.id:
                    job.row.cancel()
            if any(sequence.id == message.id for _, sequences in self._compiling for sequence in sequences):
                self._cancelled.add(message.id)
        elif isinstance(message, Drop):
            self._states.drop(message.state)
        elif isinstance(message, (Upload, Download, SyncFolder)):
            self._connection.send(self._reply(message))
        elif (grammar := message[0].request.grammar) is not None:
            self._compiling.append((self._compiler.submit(cached_matchers, grammar, self._tokenizer), message))
        else:
            for sequence in message:
                self._begin(sequence)

    def _reply(self, message: Upload | Download | SyncFolder) -> Reply:
        try:
            if isinstance(message, SyncFolder):
                return Reply(message.id, self._states.sync(message.new, message.lost))
            if isinstance(message, Upload):
                return Reply(message.id, self._upload(message))
            return Reply(message.id, self._states.content(message.state))
        except UserError as error:
            return Reply(message.id, error=str(error), state_gone=isinstance(error, StateGone))

    def _upload(self, message: Upload) -> SavedState:
        """Saves an uploaded state file, and returns the state's record.

        The file of a trained initial state does not name a model. The server takes such a state for the checkpoint's model.
        """
        if not time_states.is_content(message.content):
            if message.layout is not None:
                raise UserError("state_layout requires a file with a trained initial state. Omit state_layout for this file")
            return self._states.upload(message.state, message.content)
        model = self._models[""].model
        tuned = time_states.read_content(message.content, model.config, message.layout)
        context = context_of_state(model, self._tokenizer, tuned.state(model.config))
        say("states", f"{message.state.id}: {tuned.line}")
        state = replace(message.state, bytes=context.nbytes(), last_ids=context.last_ids, tokens=0)
        self._states.put(state, context)
        return state

    def _begin(self, message: Generate) -> None:
        _, engine, context = self._models[message.model]
        key: Key | None = Key(model=message.model, owner=message.owner)
        try:
            if message.start and message.start.id:
                context = self._states.get(message.start)
                key = None
            row = engine.add(replace(message.request, context=context, context_key=key, keep_context=message.save is not None))
        except ValueError as error:
            self._refused.append(Event(message.id, error=str(error), state_gone=isinstance(error, StateGone)))
        else:
            self._jobs[engine][row.index] = _Job(message, row)
            if message.id in self._cancelled:
                row.cancel()
        self._cancelled.discard(message.id)
