"""Measures what saved states, tuned states and adapters cost in the server.

    python -m benchmarks.serving_states PART [--dtype int8 ...] [--turns 5] [--seconds 60] [--shape L,C,V] [--json FILE]

PART is one of

    first   measures the time to the first token after a context of 0, 1,000 and 20,000 tokens (--tokens) and a short question.
            The context is prefilled, cached, or a saved state, whose file is read after a restart (states_dir=).
            The table shows medians of the turns. With --llama-server PROGRAM, llama.cpp's server is measured on the same
            weights: prefilled, cached in a slot, and from a saved slot, before and after a restart.
    load    runs 64 clients (--clients) that connect, stream and leave. A third hang up in the middle; half continue a state,
            have a schema, or both. This load alternates with the same load without states and schemas. Prints errors, tokens
            per second, fairness (Jain's index of the rates of complete streams), and memory at start, middle and end.

The server is `python serve.py` with random weights in RWKV-7's 0.1b shape, each token an event, as in benchmarks/serving.py.
The last line of standard output is the result as JSON.
"""

import argparse
import http.client
import json
import random
import selectors
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._main import run_program
from benchmarks.serving import (
    LLAMA_FORMATS,
    VOCABULARY,
    Client,
    LlamaServer,
    Server,
    parse_arguments,
    read_for,
    run,
    serving,
    stopped_at_exit,
    write_gguf,
)
from kernels.arguments import Parser, above_zero, at_least

QUESTION = 8                             # tokens after the context
STATES = 8                               # states that the clients of `load` continue
HANG_UP = 0.3                            # fraction of clients that hang up
MIB = 2**20
LONG = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": {        # longer than any prompt here
    "type": "array", "items": {"type": "integer"}, "minItems": 400}}}
WAYS = ("read anew", "prefix cache", "state", "state after a restart")


def main(argv: list[str] | None = None) -> None:
    run(PARTS, _arguments(argv), "rwkv7")


def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Returns the parsed JSON response. Exits with the response if the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        sys.exit(f"{path} returned {answer.status}: {content[:500].decode(errors='replace')}")
    return json.loads(content)


def first_token(server: Server, prompt: list[int], **more: Any) -> float:
    """Returns the seconds from a request to its first token."""
    client = Client(server, 2, 0, prompt=prompt, **more)
    while not client.times:
        if not client.read() and not client.times:
            sys.exit(f"no token arrived; the HTTP status is {client.status.decode()}")
    while client.read():
        pass
    client.socket.close()
    return client.times[0] - client.began


class Texts:
    """Generates prompts of random ids, none of which is a prefix of another."""

    def __init__(self, vocabulary: int) -> None:
        self._chance = random.Random(0)
        self._most = vocabulary - 1

    def __call__(self, n: int) -> list[int]:
        return [self._chance.randint(1, self._most - 1) for _ in range(n)]


def first(checkpoint: Path, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = Texts(_vocabulary(checkpoint))
    lengths = sorted({0, *args.tokens})
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    options = (f"states_dir={checkpoint.with_name(f'states-{dtype}')}", f"max_prompt_tokens={max(lengths) + QUESTION}")
    states: dict[int, list[str]] = {}
    with serving(checkpoint, dtype, *options) as server:
        first_token(server, texts(QUESTION))
        read = {n: texts(n) for n in lengths if n}
        for n, prompt in read.items():
            ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
            states[n] = [ask(server, "/v1/states", {"prompt": prompt})["id"] for _ in range(args.turns)]
        for turn in range(args.turns):
            for n in lengths:
                times["read anew", n].append(first_token(server, texts(n + QUESTION)))
                if n:
                    times["prefix cache", n].append(first_token(server, read[n] + texts(QUESTION)))
                    times["state", n].append(first_token(server, texts(QUESTION), state=states[n][turn]))
    with serving(checkpoint, dtype, *options) as server:
        first_token(server, texts(QUESTION))
        for turn in range(args.turns):           # each turn reads each state from its file once
            for n, ids in states.items():
                times["state after a restart", n].append(first_token(server, texts(QUESTION), state=ids[turn]))
    yield from _table("timemix", dtype, lengths, times)
    for name in LLAMA_FORMATS[dtype] if args.llama_server else ():
        yield from _first_of_llama(args.llama_server, write_gguf(checkpoint, name), name, lengths, args.turns, texts)


def _first_of_llama(program: Path, weights: Path, name: str, lengths: list[int], turns: int,
                    texts: Texts) -> Iterator[dict[str, Any]]:
    """Measures llama.cpp. Its states are slot files: the slot is restored, and the same prompt is sent again."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    folder = weights.with_name(f"slots-{name}")
    folder.mkdir()
    read = {n: texts(n) for n in lengths if n}

    def seconds_restored(server: Server, n: int) -> float:
        began = time.perf_counter()
        ask(server, "/slots/0?action=restore", {"filename": f"{n}.bin"})
        took = time.perf_counter() - began
        return took + first_token(server, read[n] + texts(QUESTION), id_slot=0, cache_prompt=True)

    def start_server() -> LlamaServer:
        return LlamaServer(program, weights, 1, "--slot-save-path", f"{folder}/")

    with stopped_at_exit(start_server()) as server:
        first_token(server, texts(QUESTION))
        for n, prompt in read.items():
            ask(server, "/completion", {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True})
            ask(server, "/slots/0?action=save", {"filename": f"{n}.bin"})
        for _ in range(turns):
            for n in lengths:
                times["read anew", n].append(first_token(server, texts(n + QUESTION), cache_prompt=False))
                if n:
                    ask(server, "/completion", {"prompt": read[n], "n_predict": 1, "id_slot": 0, "cache_prompt": True})
                    times["prefix cache", n].append(
                        first_token(server, read[n] + texts(QUESTION), id_slot=0, cache_prompt=True))
                    times["state", n].append(seconds_restored(server, n))
    with stopped_at_exit(start_server()) as server:
        first_token(server, texts(QUESTION))
        for _ in range(turns):
            for n in read:
                times["state after a restart", n].append(seconds_restored(server, n))
    yield from _table("llama.cpp", name, lengths, times)


def _table(of: str, dtype: str, lengths: list[int], seconds: dict[tuple[str, int], list[float]]) -> Iterator[dict[str, Any]]:
    """Prints milliseconds to the first token and, in brackets, their ratio to the case without a context. Yields the rows."""
    empty = median(seconds["read anew", 0])
    print(f"\n{of}, {dtype}: milliseconds to the first token, and as a multiple of that after 0 tokens")
    print(f"{'tokens before':24}" + "".join(f"{n:>18,}" for n in lengths))
    for way in WAYS:
        times = {n: median(seconds[way, n]) for n in lengths if seconds[way, n]}
        print(f"{way:24}" + "".join(f"{1000 * times[n]:10.1f} ({times[n] / empty:5.2f})" if n in times else " " * 18
                                    for n in lengths), flush=True)
        yield from ({"of": of, "dtype": dtype, "way": way, "tokens": n, "seconds": s, "of_empty": s / empty}
                    for n, s in times.items())


def load(checkpoint: Path, dtype: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    texts = Texts(_vocabulary(checkpoint))
    chance = random.Random(0)
    with serving(checkpoint, dtype, f"max_rows={args.clients}", "cache_mib=64", "states_mib=64") as server:
        states = [ask(server, "/v1/states", {"prompt": texts(200)})["id"] for _ in range(STATES)]
        _run_load(server, args.clients, min(5.0, args.seconds), chance, states)      # warm-up of memory and threads
        memory = {"start": server.resident() / MIB}
        counted: dict[bool, list[float]] = {True: [], False: []}
        ended_clients: dict[bool, list[Client]] = {True: [], False: []}
        for turn in range(args.turns):
            for mixed in (True, False):
                rate, clients = _run_load(server, args.clients, args.seconds / args.turns, chance, states if mixed else [])
                counted[mixed].append(rate)
                ended_clients[mixed] += clients
            if turn == args.turns // 2:
                memory["middle"] = server.resident() / MIB
        memory["end"] = server.resident() / MIB
    for mixed, clients in ended_clients.items():
        wrong = [client for client in clients if client.status != b"200"
                 or (client.hang_up_after is None and not client.finished)]
        # rates are counted from the request, because a slow client may read all events of a stream together
        finished = [client for client in clients if client.finished and client.n >= 32]
        rates = [len(client.times) / (client.times[-1] - client.began) for client in finished]
        row = {"dtype": dtype, "load": "states, schemas, streams, hang-ups" if mixed else "streams, hang-ups",
               "texts": len(clients), "errors": len(wrong), "tokens_per_second": median(counted[mixed]),
               "jain": jain(rates) if rates else None, "memory_mib": memory}
        yield row
        print(f"{dtype}, {row['load']}: {row['texts']} texts, {row['errors']} errors, {row['tokens_per_second']:.0f} tokens/s, "
              f"Jain {row['jain'] or 0:.3f}", flush=True)
    ratio = median(mixed_rate / plain_rate for mixed_rate, plain_rate in zip(counted[True], counted[False], strict=True))
    shown = ", ".join(f"{size:.0f} MiB at the {name}" for name, size in memory.items())
    print(f"{dtype}: {ratio:.1%} of the tokens/s without states and schemas; memory {shown}", flush=True)
    yield {"dtype": dtype, "ratio": ratio}


def jain(rates: list[float]) -> float:
    """Returns Jain's index of fairness of n rates: 1 if all are equal, 1 / n if all but one are 0."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def _run_load(server: Server, n_clients: int, seconds: float, chance: random.Random,
              states: list[str]) -> tuple[float, list[Client]]:
    """Runs `n_clients` concurrent clients, and replaces clients that leave. Returns tokens per second and all clients.

    Half of the clients continue a state, have a schema, or both. If `states` is empty, none of them does.
    """
    over: list[Client] = []
    clients: list[Client] = []
    with selectors.DefaultSelector() as selector:
        began = time.perf_counter()
        until = began + seconds
        while time.perf_counter() < until or selector.get_map():
            while len(selector.get_map()) < n_clients and time.perf_counter() < until:
                client = _client(server, len(clients), chance, states)
                selector.register(client.socket, selectors.EVENT_READ, client)
                clients.append(client)
            over += read_for(selector, 0.05)
    events = sum(began <= at < until for client in clients for at in client.times)
    return events / seconds, over


def _client(server: Server, seed: int, chance: random.Random, states: list[str]) -> Client:
    n = chance.randint(8, 128)
    hang_up = chance.randint(1, max(1, n // 2)) if chance.random() < HANG_UP else None
    kind = chance.random()               # is drawn in both loads, so that both use the same random numbers
    state = chance.randrange(STATES)
    more: dict[str, Any] = {}
    if states and kind < 0.35:
        more |= {"state": states[state], "save_state": kind < 0.1}
    if states and 0.25 < kind < 0.5:
        more["response_format"] = LONG
    # all prompts differ, so that none is in the prefix cache: both loads prefill the same tokens
    return Client(server, n, seed, hang_up, f"{seed} " + "word " * chance.randint(2, 12), **more)


def _vocabulary(checkpoint: Path) -> int:
    return len(checkpoint.with_name(VOCABULARY).read_text(encoding="utf-8").splitlines())


PARTS = {"first": first, "load": load}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("benchmarks.serving_states", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tokens", nargs="+", type=at_least(1), default=[1000, 20_000], metavar="N")
    parser.add_argument("--clients", type=at_least(1), default=64, metavar="N")
    parser.add_argument("--seconds", type=above_zero, default=60, metavar="S", help="duration of each load, over all turns")
    parser.add_argument("--turns", type=at_least(1), default=5, metavar="N")
    return parse_arguments(parser, argv)


if __name__ == "__main__":
    run_program(main)
