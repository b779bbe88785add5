"""Tests that one client's grammar delays no other client.

A compile that takes too long is ended with its process, and the API keys take turns.
"""

import asyncio
import mmap
import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from serving_runs import Running

from rwkv.errors import UserError
from rwkv.generation.grammar import Grammar
from rwkv.serving.engine.compiling import PROCESSES, Compilers, _resident_bytes
from rwkv.serving.http.errors import ApiError
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.programs
SHORT = Grammar.json_schema({"type": "boolean"})


def slow_grammar(n: int = 0) -> Grammar:
    """Returns a grammar that takes minutes and gigabytes to compile, with a state for each remainder of 4999 * 4993."""
    return Grammar.json_schema({"type": "integer", "title": str(n), "allOf": [{"multipleOf": 4999}, {"multipleOf": 4993}]})


def with_compilers(work: Callable[[Compilers], Awaitable[Any]], seconds: float = 1.5) -> Any:
    async def main() -> Any:
        compilers = Compilers(ByteTokenizer().to_dict(), seconds)
        try:
            return await work(compilers)
        finally:
            compilers.close()

    return asyncio.run(main())


def test_a_compilation_beyond_its_time_limit_ends_and_others_continue() -> None:
    async def work(compilers: Compilers) -> None:
        await compilers.check(SHORT, "a")
        with pytest.raises(UserError, match=r"json_schema must .*seconds"):
            await compilers.check(slow_grammar(), "a")
        with pytest.raises(UserError):                   # the error is remembered, so nothing is compiled again
            await asyncio.wait_for(compilers.check(slow_grammar(), "b"), 0.1)
        await compilers.check(Grammar.json_schema({"type": "null"}), "a")

    before = {*multiprocessing.active_children()}        # servers that are forked from this process
    with_compilers(work)
    assert not {*multiprocessing.active_children()} - before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts memory in pages")
def test_memory_is_counted_in_the_systems_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """If pages of 64 KiB counted as 4 KiB, the limit on addresses would end a process before its first compilation."""
    before = _resident_bytes()
    monkeypatch.setattr(mmap, "PAGESIZE", 16 * mmap.PAGESIZE)
    assert _resident_bytes() > 8 * before > 0


def test_a_process_that_does_not_start_is_not_an_error_of_the_grammar() -> None:
    """The same grammar is tried again later: the machine may have lacked memory for the process."""
    async def work() -> None:
        compilers = Compilers({"kind": "unknown"})
        try:
            for _ in range(2):
                with pytest.raises(ApiError) as error:
                    await compilers.check(SHORT, "a")
                assert error.value.status == 503
        finally:
            compilers.close()

    asyncio.run(work())


def test_a_process_that_was_killed_while_idle_is_started_again() -> None:
    """The system may have killed the process for lack of memory, which is not the next grammar's fault."""
    before = {*multiprocessing.active_children()}        # servers that are forked from this process

    async def work(compilers: Compilers) -> None:
        await compilers.check(SHORT, "a")
        (process,) = {*multiprocessing.active_children()} - before
        process.kill()
        process.join()
        await compilers.check(Grammar.json_schema({"type": "null"}), "a")

    with_compilers(work)


def test_a_grammar_that_a_busy_machine_did_not_compile_is_compiled_later() -> None:
    """The process gets no CPU time at all here, so the grammar has not used up its own."""
    before = {*multiprocessing.active_children()}        # servers that are forked from this process

    async def work(compilers: Compilers) -> None:
        await compilers.check(SHORT, "a")
        (process,) = {*multiprocessing.active_children()} - before
        os.kill(process.pid or 0, signal.SIGSTOP)
        other = Grammar.json_schema({"type": "null"})
        with pytest.raises(ApiError) as error:
            await compilers.check(other, "a")
        assert (error.value.status, error.value.retry_after is not None) == (503, True)
        await compilers.check(other, "a")

    with_compilers(work, seconds=0.2)


def test_each_key_has_its_turn() -> None:
    """A grammar of another key, sent after many slow grammars of one key, is compiled before the first key's second round."""
    async def work(compilers: Compilers) -> list[str]:
        ended: list[str] = []

        async def check(name: str, grammar: Grammar, owner: str) -> None:
            with suppress(UserError):
                await compilers.check(grammar, owner)
            ended.append(name)

        many = [asyncio.create_task(check("slow", slow_grammar(n), "a")) for n in range(3 * PROCESSES)]
        await asyncio.sleep(0)
        await asyncio.create_task(check("short", SHORT, "b"))
        for task in many:
            task.cancel()
        return ended

    ended = with_compilers(work)
    assert len(ended) <= PROCESSES + 1


def test_a_grammar_that_cannot_be_compiled_is_named_by_its_field() -> None:
    async def work(compilers: Compilers) -> None:
        for grammar, place in ((Grammar.json_schema({"properties": {"a": {"type": "strin"}}}), "json_schema.properties.a: "),
                               (Grammar.lark("start: missing"), "grammar: "),
                               (Grammar.lark('start: "a" B\nB: /x/ & /y/'), "grammar: ")):
            with pytest.raises(UserError, match=f"^{place}"):
                await compilers.check(grammar, "a")

    with_compilers(work)


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def ask(server: Running, schema: dict[str, Any], **options: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "response_format": form(schema), **options}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def test_a_server_answers_others_while_it_compiles(g1: Running) -> None:
    bomb = {"type": "integer", "allOf": [{"multipleOf": 4993}, {"multipleOf": 4999}]}
    long = {"anyOf": [{"type": "string", "const": f"number {i}"} for i in range(1400)]}          # the schema has 65 kB
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(ask, g1, bomb)
        large = threads.submit(ask, g1, long, max_tokens=1)
        assert ask(g1, {"type": "boolean"}).json()["choices"][0]["message"]["content"].strip() in ("true", "false")
        assert httpx.get(f"{g1.url}/health").status_code == 200
        assert not slow.done()
        assert slow.result().status_code == 400
        assert slow.result().json()["error"]["param"] == "response_format.json_schema.schema"
        assert large.result().status_code == 200


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"],
     "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"type": "object", "properties": {"a": {"type": "integer", "required": True}}, "additionalProperties": False},
    {"type": "integer", "multipleOf": 2000003}, {"oneOf": [{"type": "number"}, {"type": "integer"}]}])
def test_a_schema_that_cannot_be_enforced_is_a_400(g1: Running, schema: dict[str, Any]) -> None:
    answer = ask(g1, schema)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("response_format.json_schema.schema")


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def test_many_tools_and_a_schema(g1: Running) -> None:
    answer = ask(g1, {"type": "boolean"}, tools=[tool(f"f{i}") for i in range(25)], temperature=0)
    assert answer.status_code == 200, answer.text


def test_names_with_a_line_end_and_calls_with_half_a_surrogate_pair(g1: Running) -> None:
    for name in ("f\n", "\n", "f\r", "f\u2028"):
        answer = httpx.post(f"{g1.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}],
                                                                  "tools": [tool(name)], "max_tokens": 1})
        assert answer.status_code == 400, name
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":"\\ud800"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "x"}]
    answer = httpx.post(f"{g1.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
