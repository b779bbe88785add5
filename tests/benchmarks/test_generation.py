"""Tests that benchmarks.generation measures the other programs if one of them crashes."""

import sys

import pytest

from benchmarks import generation

HEADER = '{"tasks": {"decode, batch 1": 1}, "load_s": 1, "first_token_s": 1, "peak_mib": 1}'
ANSWERS = f"print('{HEADER}', flush=True)\nwhile input(): print(0.5, flush=True)"
AFTER_ONE_TURN = f"print('{HEADER}', flush=True)\ninput()\nprint(0.5, flush=True)"
AT_ONCE = "raise SystemExit(7)"
BEFORE_IT_READS = f"import os\nos.close(0)\nprint('{HEADER}', flush=True)"      # a request always breaks the pipe


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.parametrize("program", [AT_ONCE, AFTER_ONE_TURN, BEFORE_IT_READS])
def test_a_crash_of_another_program_loses_only_its_rows(program: str) -> None:
    commands = {("timemix", "int8"): command(ANSWERS), ("llama.cpp", "Q8_0"): command(program),
                ("rwkv.cpp", "Q8_0"): command(ANSWERS)}
    rows, errors = generation.compare(commands)
    assert [(row["of"], row["tokens_per_s"]) for row in rows] == [("timemix", 2.0), ("rwkv.cpp", 2.0)]
    assert len(errors) == 1
    assert program in errors[0]


@pytest.mark.parametrize("program", [AT_ONCE, AFTER_ONE_TURN, BEFORE_IT_READS])
def test_a_crash_of_timemix_ends_the_benchmark(program: str) -> None:
    with pytest.raises(SystemExit, match="ended with status"):
        generation.compare({("timemix", "int8"): command(program)})
