"""Compares every implementation of brick padding with the formula, pixel by pixel; DataLoader workers run the transform.

Every file in kernels/pad/ is tested automatically. The tests require only torch, pytest, hypothesis and the back ends.
"""

import math
import multiprocessing
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import implementation, implementations, in_soak
from torch import Tensor
from torch.utils.data import DataLoader

from kernels.bench.case import case_of
from kernels.pad import BrickPad, BrickPadding, cases, sides
from kernels.pad.cases import Case
from kernels.registry import KernelUnavailable

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROOT = Path(__file__).parent.parent.parent
FORMULA = BrickPadding("formula")
GUARD = 256                           # bytes on each side of a tensor that an implementation allocates
MARK = 85                            # the value of these bytes


@pytest.fixture(params=implementations("pad"), scope="module")
def pad(request: pytest.FixtureRequest) -> BrickPadding:
    return BrickPadding(request.param)


@pytest.fixture
def taichi_on_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("Taichi has one arch per process, and runs on the GPU in this one")


def expected(tile: Tensor, case: Case) -> Tensor:
    left, top, right, bottom = case.padding
    return cases.one_line(tile, case.offset, top, left, top + tile.shape[-2] + bottom, left + tile.shape[-1] + right)


@pytest.mark.thorough
@settings(deadline=None, max_examples=40)
@given(h=st.integers(1, 20), w=st.integers(1, 90), height=st.integers(0, 40), width=st.integers(0, 150),
       offset=st.integers(-200, 200), top=st.integers(-10**12, 10**12) | st.integers(-50, 50),
       left=st.integers(-10**12, 10**12) | st.integers(-200, 200), dtype=st.sampled_from(cases.DTYPES))
def test_any_part_of_the_wall(pad: BrickPadding, device: str, h: int, w: int, height: int, width: int, offset: int, top: int,
                              left: int, dtype: torch.dtype) -> None:
    """The first tile may be anywhere, even so far outside that all coordinates are negative, or that none is."""
    tile = cases.tile((2, h, w), dtype, device)
    where = offset, top, left, height, width
    assert torch.equal(pad.wall(tile, *where), cases.one_line(tile, *where))


def test_a_high_wall_of_a_wide_tile(pad: BrickPadding, device: str) -> None:
    """The shift of the last course exceeds 32 bits before it is reduced modulo the width."""
    tile = cases.tile((1, 300_000), device=device)
    where = 299_999, 0, 0, 8000, 1
    assert torch.equal(pad.wall(tile, *where), cases.one_line(tile, *where))


def page_formula(tile: Tensor, offset: int, pad_x: int, pad_y: int) -> Tensor:
    """Computes the formula as the Taichi page states it: rows count from below, and (w, 0) and (offset, h) span the bricks."""
    h, w = tile.shape
    height, width = h + 2 * pad_y, w + 2 * pad_x
    image = torch.empty(height, width)
    for row in range(height):
        for column in range(width):
            x, y = column - pad_x, height - 1 - row + pad_y
            v = math.floor(y / h)
            u = math.floor((x - v * offset) / w)
            image[row, column] = tile[h - 1 - (y - v * h), x - u * w - v * offset]
    return image


def test_the_formula_equals_that_of_the_taichi_page(device: str) -> None:
    """On the page, rows start 2 pad_y lower than in a padding, which has the tile in its middle."""
    tile = cases.tile((4, 3))
    page = page_formula(tile, 2, 8, 7)
    assert torch.equal(FORMULA.wall(tile, 2, 3 * 7, 8, *page.shape), page)
    assert torch.equal(FORMULA(tile, 2, (8, 7))[7:11, 8:11], tile)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_nothing_is_written_outside_the_allocated_memory(pad: BrickPadding, dtype: torch.dtype, device: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty, guards = Tensor.new_empty, []

    def with_guards(like: Tensor, *shape: int) -> Tensor:
        out = new_empty(like, *shape)
        memory = torch.full((out.nbytes + 2 * GUARD,), MARK, dtype=torch.uint8, device=like.device)
        guards.append((memory[:GUARD], memory[GUARD + out.nbytes:]))
        return memory[GUARD:GUARD + out.nbytes].view(like.dtype).view(out.shape).copy_(out)

    monkeypatch.setattr(Tensor, "new_empty", with_guards)
    for case in cases.CASES:
        tile = cases.tile(case.tile, dtype, device)
        assert torch.equal(pad(tile, case.offset, case.padding), expected(tile, case))
    assert pad.name == "torch_index" or len(guards) >= len(cases.CASES), "torch_index allocates by what it computes"
    assert all(bool((guard == MARK).all()) for both in guards for guard in both)


@pytest.mark.implementation("pad", "taichi_v0", device="cpu")
@pytest.mark.usefixtures("taichi_on_cpu")
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_gpu_kernel_executed_on_the_cpu(dtype: torch.dtype) -> None:
    from kernels.backends.taichi import launch
    from kernels.pad.taichi_v0 import origin, rows_cuda

    for case in cases.CASES:
        tile = cases.tile(case.tile, dtype)
        (h, w), right = tile.shape[-2:], expected(tile, case)
        out = torch.empty_like(right)
        left, top, *_ = case.padding
        launch(rows_cuda(dtype), tile.view(-1), out.view(-1), h, w, *out.shape[-2:], *origin(h, w, case.offset, top, left))
        assert torch.equal(out, right)


def test_a_tile_with_requires_grad_is_accepted_without_a_backward_pass() -> None:
    with torch.no_grad():
        assert FORMULA(torch.ones(3, 4, requires_grad=True), 1, 1).shape == (5, 6)


def test_padding_is_one_two_or_four_numbers() -> None:
    assert sides(3) == (3, 3, 3, 3)
    assert sides((1, 2)) == (1, 2, 1, 2)
    assert sides([1, 2, 3, 4]) == (1, 2, 3, 4)
    assert FORMULA(torch.ones(3, 4), 0, (1, 2, 3, 4)).shape == (3 + 2 + 4, 4 + 1 + 3)


# The transform


def test_an_image_in_the_middle_of_a_wall() -> None:
    tile, image = cases.tile((3, 4, 5), torch.uint8), cases.tile((3, 7, 6), torch.uint8, seed=1)
    out = BrickPad(tile, 2, (10, 8))(image)
    wall = FORMULA.wall(tile, 2, 8, 10, 7 + 16, 6 + 20)
    assert torch.equal(out[:, 8:15, 10:16], image)
    wall[:, 8:15, 10:16] = image
    assert torch.equal(out, wall)


def test_one_brick_on_each_side_unless_asked() -> None:
    tile, image = cases.tile((4, 5)), cases.tile((7, 6), seed=1)
    assert torch.equal(BrickPad(tile, 2)(image), BrickPad(tile, 2, (5, 4))(image))


def test_images_may_be_their_own_bricks() -> None:
    images = cases.tile((2, 3, 4, 5), torch.uint8)
    assert torch.equal(BrickPad(None, 2, 9)(images), FORMULA(images, 2, 9))


@pytest.mark.parametrize("tile", [(4, 5), (3, 4, 5), (1, 4, 5), (2, 1, 4, 5)], ids=str)
def test_a_tile_for_images_of_more_dimensions(tile: tuple[int, ...]) -> None:
    brick, images = cases.tile(tile), cases.tile((2, 3, 7, 6), seed=1)
    one_each = FORMULA.wall(brick.expand(2, 3, -1, -1), 2, 1, 1, 9, 8)
    one_each[..., 1:-1, 1:-1] = images
    assert torch.equal(BrickPad(brick, 2, 1)(images), one_each)


@pytest.mark.parametrize(("image", "sentence"), [
    (torch.ones(3, 5, 5, dtype=torch.uint8), "dtype and device, torch.float32 on cpu; got torch.uint8"),
    (torch.ones(3, 5, 5, device="meta"), "got torch.float32 on meta"),
    (torch.ones(5, 5), r"a tile of shape \(3, 2, 2\) does not fit an image of shape \(5, 5\)"),
    (torch.ones(4, 5, 5), r"fit an image of shape \(4, 5, 5\)"),
])
def test_images_that_do_not_fit_the_tile(image: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BrickPad(torch.ones(3, 2, 2), 1)(image)


def test_a_transform_survives_pickling() -> None:
    transform, image = BrickPad(cases.tile((4, 5)), 2, 3, kernel="torch_index"), cases.tile((7, 6), seed=1)
    again = pickle.loads(pickle.dumps(transform))
    assert torch.equal(again(image), transform(image))
    assert repr(again) == "BrickPad(tile (4, 5), offset=2, padding=(3, 3, 3, 3), kernel='torch_index')"


def run_in_worker(transform: Callable[[Tensor], Tensor], method: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields eight images transformed by a worker that was started by `method`, each with the original image."""
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system does not {method}")
    images = [cases.tile((3, 8, 6), torch.uint8, seed=seed) for seed in range(8)]
    loader = DataLoader(images, batch_size=None, collate_fn=transform, num_workers=1, multiprocessing_context=method,
                        timeout=200)
    return zip(loader, images, strict=True)


@pytest.mark.programs
@pytest.mark.parametrize(("kernel", "method"), [("torch_strips", "fork"),
                                                *in_soak(implementation("pad", "taichi_v0", "taichi_v0", "spawn"))])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader(kernel: str, method: str) -> None:
    """The default kernel runs in a forked worker, as on Linux before Python 3.14, and Taichi in a worker that is spawned."""
    assert BrickPad(None, 5)._pad.name == "torch_strips"
    for padded, image in run_in_worker(BrickPad(None, 5, 9, kernel), method):
        assert torch.equal(padded, FORMULA(image, 5, 9))


@pytest.mark.programs
@pytest.mark.implementation("pad", "taichi_v0", device="cpu")
@pytest.mark.usefixtures("taichi_on_cpu")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_worker_forked_from_a_running_taichi_says_so_and_does_not_hang() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system does not fork")
    transform, image = BrickPad(None, 5, 9, "taichi_v0"), cases.tile((3, 8, 6))
    transform(image)
    with (ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as workers,        # a DataLoader would take 5 s to end
          pytest.raises(KernelUnavailable)):      # after any error
        workers.submit(transform, image).result(timeout=60)


# The benchmark and the example


def test_the_benchmark_notices_one_wrong_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("pad")(3, 6, 5, 2, 9, 7, "cpu", torch.uint8)
    assert case.errors("torch_strips") == ({"out": 0.0}, {})
    forward = BrickPadding.forward

    def with_wrong_pixel(*inputs: object) -> Tensor:
        out = forward(*inputs)
        out[1, 2, 3] = 255
        return out

    monkeypatch.setattr(BrickPadding, "forward", with_wrong_pixel)
    assert case.errors("torch_strips")[1] == {"out": "0.07% of the pixels"}


def test_the_example_writes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image", reason="reading the picture back needs pillow")
    monkeypatch.setattr(sys, "argv", ["brick_padding.py", str(tmp_path / "wall.png")])
    example = runpy.run_path(str(ROOT / "examples" / "brick_padding.py"), run_name="__main__")
    with image.open(tmp_path / "wall.png") as picture:
        assert (picture.mode, picture.size) == ("RGB", (32 + 256, 48 + 256))
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(48 + 256, 32 + 256, 3)
    assert torch.equal(pixels.permute(2, 0, 1), cases.one_line(example["brick"](), 10, 128, 128, *pixels.shape[:2]))
