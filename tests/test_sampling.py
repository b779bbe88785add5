"""Drawing the next token: which tokens can come, how often, and in which order the options act."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rwkv.sampling import sample

PROBABILITIES = (0.1, 0.4, 0.2, 0.3)         # most likely first: 1, 3, 2, 0
DRAWS = 20_000


def draws(logits: Tensor, n: int = DRAWS, seed: int = 0, **options: float) -> Tensor:
    return sample(logits.expand(n, -1), torch.Generator().manual_seed(seed), **options)


def support(**options: float) -> set[int]:
    return set(draws(torch.tensor(PROBABILITIES).log(), **options).tolist())


def test_temperature_zero_takes_the_most_likely() -> None:
    assert support(temperature=0) == {1}
    assert sample(torch.tensor([[0.0, 2.0], [3.0, -1.0]]), torch.Generator(), temperature=0).tolist() == [1, 0]


@pytest.mark.parametrize(("top_k", "kept"), [(0, {0, 1, 2, 3}), (1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}),
                                             (9, {0, 1, 2, 3})])
def test_top_k_keeps_so_many(top_k: int, kept: set[int]) -> None:
    assert support(top_k=top_k) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3}),
                                             (0.91, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert support(top_p=top_p) == kept


def test_temperature_acts_first_then_top_k_then_top_p() -> None:
    """At temperature 0.5 token 1 has 0.53 of the mass; of the two most likely it has 0.57: both cover a top_p of 0.5."""
    assert support(top_p=0.5) == {1, 3}
    assert support(top_p=0.5, temperature=0.5) == {1}
    assert support(top_p=0.5, top_k=2) == {1}


@pytest.mark.parametrize(("options", "expected"), [
    ({}, PROBABILITIES), ({"temperature": 0.5}, (1 / 30, 16 / 30, 4 / 30, 9 / 30)), ({"top_k": 2}, (0, 4 / 7, 0, 3 / 7)),
    ({"top_p": 0.8}, (0, 4 / 9, 2 / 9, 3 / 9))])
def test_tokens_come_as_often_as_they_should(options: dict[str, float], expected: tuple[float, ...]) -> None:
    """Chi-square, at most 3 degrees of freedom: below 16.3 with probability 0.999; the seed is fixed."""
    counts = np.bincount(draws(torch.tensor(PROBABILITIES).log(), **options), minlength=4)
    wanted = DRAWS * np.array(expected)
    assert not counts[wanted == 0].any()
    assert (((counts - wanted) ** 2)[wanted > 0] / wanted[wanted > 0]).sum() < 16.3


def test_rows_are_drawn_independently() -> None:
    logits = torch.eye(4).mul(1000)
    assert sample(logits, torch.Generator().manual_seed(0), top_k=2, top_p=0.9).tolist() == [0, 1, 2, 3]


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20), st.floats(1e-30, 1e30), st.integers(0, 25),
       st.floats(1e-6, 1.0), st.integers(0, 5))
def test_any_options_give_a_token_again_for_the_same_seed(values: list[float], temperature: float, top_k: int, top_p: float,
                                                          seed: int) -> None:
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    logits = torch.tensor(values)
    before = logits.clone()
    first, second = (draws(logits, 3, seed, **options) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(logits, before)
    assert first.dtype == torch.int64
    assert all(0 <= token < len(values) for token in first)


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    assert set(draws(torch.zeros(300, dtype=torch.bfloat16), n=30_000).tolist()) == set(range(300))
