"""Tests the parsers and checks of single values."""

import math
from typing import Any

import pytest

from rwkv.config.values import (
    biases,
    require_at_least,
    require_between,
    strings,
    texts_and_ids,
    texts_or_whole_numbers,
    whole_number,
    whole_numbers,
)
from rwkv.errors import UserError


def test_biases_are_numbers_by_token() -> None:
    assert biases(["198:-5", "3:1e-2"]) == {198: -5.0, 3: 0.01}


@pytest.mark.parametrize("text", ["198", "a:1", "1:b", ":", "1.5:2"])
def test_other_biases_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="logit_bias must be TOKEN_ID:NUMBER"):
        biases([text])


def test_texts_may_be_lists_of_ids() -> None:
    assert texts_and_ids(["a", "[1, 2]", "[3]", "[x]", "[]", "[1,]"]) == ["a", 1, 2, 3, "[x]", "[]", "[1,]"]


@pytest.mark.parametrize(("value", "accepted"), [(0, True), (7, True), (True, True), (8, False), (-1, False), (1.0, False),
                                                 ("1", False), (None, False)])
def test_a_whole_number_is_within_its_limits(value: Any, accepted: bool) -> None:
    if accepted:
        assert whole_number("n", value, most=7) == value
    else:
        with pytest.raises(UserError, match=r"^n must be"):
            whole_number("n", value, most=7)


@pytest.mark.parametrize(("check", "values"), [
    (whole_numbers, "12"), (whole_numbers, 3), (whole_numbers, [1, "2"]), (strings, "ab"), (strings, ["a", 1]), (strings, None),
    (texts_or_whole_numbers, ["a", ""]), (texts_or_whole_numbers, [-1]), (texts_or_whole_numbers, 3)])
def test_a_list_of_other_values_is_refused(check: Any, values: Any) -> None:
    with pytest.raises(UserError, match=r"^name must be"):
        check("name", values)


def test_a_single_text_is_a_list_of_one() -> None:
    assert texts_or_whole_numbers("name", "ab") == ("ab",)


@pytest.mark.parametrize(("value", "least", "most", "accepted"), [
    (1, 1, 2, True), (2, 1, 2, True), (0, 1, 2, False), (3, 1, 2, False), (math.inf, 1, math.inf, False),
    (math.nan, 1, 2, False)])
def test_at_least_includes_its_ends(value: float, least: float, most: float, accepted: bool) -> None:
    if accepted:
        require_at_least("n", value, least, most)
    else:
        with pytest.raises(UserError, match=r"^n must be"):
            require_at_least("n", value, least, most)


@pytest.mark.parametrize(("value", "accepted"), [(0.5, True), (0, False), (1, False), (math.nan, False)])
def test_between_excludes_its_ends(value: float, accepted: bool) -> None:
    if accepted:
        require_between("n", value, 0, 1)
    else:
        with pytest.raises(UserError, match=r"^n must be above 0 and below 1"):
            require_between("n", value, 0, 1)
