"""Tests that texts without spaces are cut before a tokenizer is trained on them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv.tokenizer.split import LONGEST_RUN, without_long_runs
from rwkv.tokenizer.tokenizers import JsonTokenizer

RUNS = st.builds(lambda text, times: text * times, st.sampled_from(("a", "xyz", " ", "\n\t", "字", "=", "word ")),
                 st.integers(0, 2 * LONGEST_RUN))


@given(st.lists(RUNS, max_size=5))
def test_no_run_is_longer_than_the_limit(runs: list[str]) -> None:
    text = "".join(runs)
    parts = list(without_long_runs(text))
    assert "".join(parts) == text
    for part in parts:
        assert all(len(word) <= LONGEST_RUN for word in part.split())
        assert sum(map(str.isspace, part)) <= LONGEST_RUN or part.split()
    spaces = max(map(len, re.findall(r"\s+", text)), default=0)
    if max(map(len, text.split()), default=0) <= LONGEST_RUN and spaces < LONGEST_RUN:
        assert parts == [text] * bool(parts)


@pytest.mark.parametrize("letters", ["ACGT", "=", "字符"])
def test_a_tokenizer_can_be_trained_on_one_line_of_a_million_characters(letters: str) -> None:
    """As one word, the text would take hours."""
    text = "".join(letters[number * number % 97 % len(letters)] for number in range(1_000_000))
    tokenizer = JsonTokenizer.train([text], 300)
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]
    assert len(tokenizer.encode(text[:5000])) < len(text[:5000].encode()) / 2
