"""Tests of the processes that benchmarks send requests to."""

import sys

import pytest

from benchmarks._main import ProcessEnded, answering_process


def test_an_answering_process_answers_each_request() -> None:
    with answering_process([sys.executable, "-c", "while True: print(input(), flush=True)"]) as ask:
        assert [ask({"text": "a\nb"}), ask([1, 2])] == [{"text": "a\nb"}, [1, 2]]


@pytest.mark.parametrize("program", ["raise SystemExit(7)", "input(); raise SystemExit(7)",
                                     "import os, time; os.close(0); time.sleep(0.3); raise SystemExit(7)"])
def test_a_request_to_a_process_that_has_ended_names_its_status(program: str) -> None:
    with pytest.raises(ProcessEnded, match="ended with status 7"), answering_process([sys.executable, "-c", program]) as ask:
        ask("request")
