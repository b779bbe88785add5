"""Compares the model under every kernel with RWKV in NumPy and float64, on random checkpoints.

Every parameter of these checkpoints affects the output. `make parity` also compares the model with PyPI's `rwkv` and
transformers, which need a separate environment.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from implementations import compiled_in_soak
from models import kernels
from numpy import ndarray
from numpy_rwkv4 import NumpyRWKV4
from numpy_rwkv7 import NumpyRWKV7
from parity import author, cases, training
from parity.cases import STATE, TO_FLOAT64, TO_PEER, Case, random_tokens, random_weights
from parity.comparison import Cell, Row, forms_apart, greedy_apart, logits_apart, state_apart, table, worst
from parity.files import CASES as KINDS
from parity.files import Kind, deep_embed, official, row
from parity.files import passed as in_bounds
from parity.ours import float64, ours
from parity.report import passed

from kernels.wkv4 import WKV4
from kernels.wkv7 import WKV7

CASES = {name: case for name, case in cases.CASES.items() if case.L < 12}          # all twelve layers take 1 s per kernel
CASES["one layer"] = Case(L=1, C=24, A=24, F=96, V=30, T=9, chunks=(8, 1))
SMALL = Case(L=2, C=24, A=20, F=56, V=30, T=12, chunks=())
KERNELS = ("reference", "c_v0")   # kernels with all cases in make test; the others have them in make soak
exact = cache(float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes one .pth in the author's format for each case, and returns the folder."""
    folder = tmp_path_factory.mktemp("parity")
    for name, case in CASES.items():
        torch.save({name: torch.from_numpy(tensor) for name, tensor in random_weights(case).items()}, folder / f"{name}.pth")
    return folder


@pytest.mark.parametrize(("kernel", "name"), [
    pytest.param(*kernel.values, name, id=f"{kernel.values[0]}-{name}", marks=[
        *kernel.marks, *[pytest.mark.thorough] * (name != "usual"),
        *[pytest.mark.soak] * (name != "usual" and kernel.values[0] not in KERNELS)])
    for kernel in compiled_in_soak(kernels()) for name in CASES])
def test_logits_state_and_continuation_equal_those_of_float64(kernel: str, name: str, folder: Path) -> None:
    """The tokens are read in one call, in chunks, and one by one."""
    actual, expected = ours(CASES[name], folder / f"{name}.pth", kernel), exact(CASES[name])
    assert logits_apart(actual, expected) <= TO_FLOAT64
    assert state_apart(actual, expected) <= STATE
    assert all(cell.ok for cell in forms_apart(actual).values())
    assert greedy_apart(actual, expected).value == 0


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_small_compared_with_the_values(name: str) -> None:
    """Checks that logits and states are of order 1 to 10, and that float64 evaluations agree far better than the bounds."""
    result = exact(CASES[name])
    assert all(0.3 < result[f"whole: {part}"].std() < 5 for part in ("logits", "att_x", "a/b", "p + log b", "ffn_x"))
    assert np.abs(result["whole: logits"]).max() < 20
    assert max(logits_apart(result, result), state_apart(result, result)) < 1e-12
    assert len(np.unique(result["greedy"])) > 3, "a continuation of few tokens says little"


# Every parameter matters


def logits(weights: dict[str, ndarray]) -> ndarray:
    return NumpyRWKV4(weights)(random_tokens(SMALL))[0]


def test_a_tensor_off_by_a_thousandth_is_noticed() -> None:
    weights = random_weights(SMALL)
    expected, random = logits(weights), np.random.default_rng(2)
    for name in cases.sizes(SMALL):
        changed = weights[name] + random.choice([-1e-3, 1e-3], weights[name].shape)
        assert np.abs(logits(weights | {name: changed}) - expected).max() > 5 * TO_PEER, name


SMALL_7 = cases.Case7(L=2, H=2, N=16, ranks=(5, 4, 3, 6), V=30, T=12, chunks=())


def test_a_kind_of_tensor_with_channels_off_by_a_hundredth_is_noticed() -> None:
    weights = random_weights(SMALL_7)
    assert not any(bool(((weight == 0) | (weight == 1)).any()) for weight in weights.values())
    expected = NumpyRWKV7(weights)(random_tokens(SMALL_7))[0]
    for kind in cases.kinds(SMALL_7):
        changed = NumpyRWKV7(cases.scaled(weights, kind, 1.01))(random_tokens(SMALL_7))[0]
        assert np.abs(changed - expected).max() > 5 * TO_PEER, kind


# The output of make parity


def test_an_error_in_one_form_is_found() -> None:
    good = exact(CASES["usual"])
    for name, values in good.items():
        off = values.copy()
        off[(-1,) * off.ndim] += 1
        bad = {**good, name: off}
        distances = logits_apart(bad, good), state_apart(bad, good), greedy_apart(bad, good).value
        assert sorted(distances) == pytest.approx([0, 0, 1], abs=1e-9), name


@pytest.mark.parametrize(("value", "text"), [(2e-5, "2.0e-05 > 1.0e-05 !"), (float("nan"), "nan > 1.0e-05 !"),
                                             (float("inf"), "inf > 1.0e-05 !"), (1e-5, "1.0e-05")])
def test_a_broken_bound_is_marked(value: float, text: str) -> None:
    row = Row(("usual", "conv1d"), {"float64": Cell(value, 1e-5)})
    assert row.ok == ("!" not in text)
    assert table(("case", "kernel"), [row]).endswith(text)


def test_a_broken_bound_or_a_control_that_is_not_broken_fails() -> None:
    good, bad = Row((), {"float64": Cell(0, 1e-5)}), Row((), {"float64": Cell(1, 1e-5)})
    assert passed({"kernels": [good], "files": [good], "control": [bad]})
    assert not passed({"kernels": [good, bad], "files": [good], "control": [bad]})
    assert not passed({"kernels": [good], "files": [bad], "control": [bad]})
    assert not passed({"kernels": [good], "files": [good], "control": [bad, good]})


def test_the_worst_row_is_out_of_bounds_if_any_row_is() -> None:
    rows = [Row((), {"float64": Cell(value, 1e-5)}) for value in (1e-6, float("nan"), 1e-7)]
    assert not worst(("the worst",), rows).ok
    assert worst(("the worst",), rows[::2]).cells["float64"].value == 1e-6


# The table of docs/files.md


@pytest.mark.thorough
def test_a_row_of_the_table_of_files_exceeds_its_bounds_if_a_weight_differs(tmp_path: Path) -> None:
    """Other programs are not needed. A row whose file another program would write is marked as absent."""
    np.save(tmp_path / "small.npy", random_tokens(KINDS["small"])[0, :8])
    path, weights = official(tmp_path, "rwkv7a.pth", "small", deep_embed(KINDS["small"]))
    table_row = row(tmp_path, Kind("7a", path, weights))
    assert in_bounds(table_row), table_row
    assert table_row["read back"]["difference"] == 0
    other = {name: value + 1e-3 * (name == "blocks.1.ffn.s1") for name, value in weights().items()}
    assert not in_bounds(row(tmp_path, Kind("7a", path, lambda: other)))
    assert "absent" in row(tmp_path, Kind("fla's directory", tmp_path / "none", weights, "fla"))


# Training compared with the author's code, whose compiled operators are replaced


def test_the_operators_in_the_authors_code_equal_the_references() -> None:
    """Results and gradients are compared in float64. The author's RWKV-7 operator takes the decay before the sigmoid."""
    torch.manual_seed(0)
    B, T, C = 2, 5, 2 * author.N
    w, u = torch.randn(2, C, dtype=torch.float64, requires_grad=True).unbind()
    k, v, raw, r, a, b = (torch.randn(B, T, C, dtype=torch.float64, requires_grad=True) for _ in range(6))
    heads = [x.view(B, T, 2, author.N) for x in (r, -math.exp(-0.5) * torch.sigmoid(raw), k, v, a, b)]
    for actual, expected, inputs in (
            (author.wkv4(B, T, C, w, u, k, v), WKV4("reference")(w, u, k, v)[0], (k, v)),
            (author.wkv7(r, raw, k, v, a, b), WKV7("reference")(*heads)[0].flatten(2), (r, raw, k, v, a, b))):
        torch.testing.assert_close(actual, expected)
        upstream = torch.randn_like(actual)
        torch.testing.assert_close(*(torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (actual, expected)))


def test_differences_between_training_runs_are_noticed() -> None:
    expected = {"gradient: a": np.ones(3), "rate: a": np.ones(2), "rate: unused": np.ones(2)}
    assert training.apart({"rate: a": np.full(2, 1.5)}, expected, "rate: ") == 0.5
    assert training.apart({"rate: a": np.ones(2)}, expected, "rate: ") == 0
    assert training.apart({}, expected, "gradient: ") == math.inf
    assert training.relative(np.full(2, 1e-9), np.zeros(2)) == math.inf
