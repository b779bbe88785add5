"""Collects the metrics that /metrics shows in Prometheus's format."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kernels.machine.memory import resident_memory
from rwkv.serving.messages import Step

SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counts and times the engine's events.

    Args:
        rows: returns the number of running sequences.
        queue: returns the number of queued sequences.
    """

    def __init__(self, rows: Callable[[], int], queue: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self._prompt = Counter("timemix_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter("timemix_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry)
        self._generated = Counter("timemix_generated_tokens", "Generated tokens", registry=registry)
        self._proposed = Counter("timemix_proposed_tokens", "Tokens that the draft proposed", registry=registry)
        self._accepted = Counter("timemix_accepted_tokens", "Proposed tokens that were accepted", registry=registry)
        self._finished = Counter("timemix_texts", "Finished sequences, by reason", ["reason"], registry=registry)
        self._gaps = Histogram("timemix_step_gap_seconds", "Time between two events of a streamed sequence", buckets=SECONDS,
                               registry=registry)
        self._first = Histogram("timemix_first_event_seconds", "Time from a request to its first event", buckets=SECONDS,
                                registry=registry)
        self._cache_bytes = Gauge("timemix_cache_bytes", "Memory of the prefix cache", registry=registry)
        self._cache_entries = Gauge("timemix_cache_entries", "Number of cached prefixes", registry=registry)
        self._state_bytes = Gauge("timemix_state_bytes", "Memory of saved states", registry=registry)
        Gauge("timemix_rows", "Running sequences", registry=registry).set_function(rows)
        Gauge("timemix_queue", "Queued sequences", registry=registry).set_function(queue)
        Gauge("timemix_http_resident_bytes", "Memory of the HTTP process", registry=registry).set_function(resident_memory)
        # Maps a sequence's id to the time of its last event. Before the first event, the value is the request's negated time.
        self._last: dict[int, float] = {}

    def begin(self, ids: list[int]) -> None:
        self._last |= dict.fromkeys(ids, -time.monotonic())

    def observe(self, step: Step) -> None:
        now = time.monotonic()
        for event in step.events:
            last = self._last.pop(event.id, now)
            (self._first if last < 0 else self._gaps).observe(now - abs(last))
            if event.finish_reason is None and event.error is None:
                self._last[event.id] = now
                continue
            self._finished.labels(event.finish_reason or "refused").inc()
            self._prompt.inc(event.prompt_tokens)
            self._cached.inc(event.cached_tokens)
            self._generated.inc(event.completion_tokens)
            self._proposed.inc(event.proposed_tokens)
            self._accepted.inc(event.accepted_tokens)
        self._cache_bytes.set(step.cache_bytes)
        self._cache_entries.set(step.cache_entries)
        self._state_bytes.set(step.state_bytes)

    def page(self) -> bytes:
        return generate_latest(self._registry)
