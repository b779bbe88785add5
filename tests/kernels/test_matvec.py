"""Tests every implementation of matvec in every format, its independence of the number of rows, and the packed formats."""

from itertools import product

import gguf
import pytest
import torch
from implementations import implementations

from kernels import native
from kernels.compare import errors, misses
from kernels.matvec import BLOCKS, FORMATS, GROUP, Int4, Int8, MatVec, _packing, c_v0, cases, exact_copy, pack
from kernels.registry import runnable

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PACKED = [format for format in FORMATS if format not in BLOCKS]
in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
each_level = pytest.mark.parametrize("level", [
    pytest.param(level, marks=() if level == native.level() else pytest.mark.thorough) for level in native.levels()])


@pytest.fixture(params=implementations("matvec"))
def matvec(request: pytest.FixtureRequest) -> MatVec:
    return MatVec(request.param)


def formats_of(matvec: MatVec) -> list[str]:
    return list(matvec.requires.formats)


def test_every_format_at_every_shape(matvec: MatVec) -> None:
    for format in formats_of(matvec):
        for shape in cases.SHAPES:
            x, packed = cases.inputs(*shape, format=format)
            actual = errors({"y": matvec(x, packed)}, {"y": cases.expected(x, packed)})
            assert not misses(actual, cases.tolerance(matvec.name, format)), (format, shape)


def test_a_row_does_not_depend_on_the_other_rows(matvec: MatVec) -> None:
    for format in formats_of(matvec):
        for shape in ((8, 33, 100), (5, 9, 4100), (17, 64, 768)):
            x, packed = cases.inputs(*shape, format=format)
            together = matvec(x, packed)
            for row, alone in zip(x, together, strict=True):
                assert torch.equal(matvec(row.unsqueeze(0), packed)[0], alone), (format, shape)


@in_c
@each_level
@pytest.mark.parametrize("format", FORMATS)
def test_tiles_of_every_size_have_the_bits_of_single_rows(format: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases have one to eight rows in a tile, several tiles, and rows so long that a tile reads them in pieces.

    The last case has more outputs than a thread saves sums for.
    """
    monkeypatch.setattr(native, "level", lambda: level)
    monkeypatch.setattr(native, "threads_for", lambda tasks: 1)
    matvec = MatVec("c_v0")
    for N, K, sizes in ((50, 768, (*range(2, 10), 13, 19)), (7, 5000, (*range(2, 10), 13, 19)), (160, 9000, (4, 8, 9))):
        x, packed = cases.inputs(max(sizes), N, K, format)
        alone = torch.cat([matvec(row.unsqueeze(0), packed) for row in x])
        for rows in sizes:
            assert torch.equal(matvec(x[:rows], packed), alone[:rows]), (N, K, rows)


def test_several_products_at_once_have_the_same_bits(matvec: MatVec) -> None:
    for format in formats_of(matvec):
        weights = [cases.inputs(1, N, 96, format, seed=N)[1] for N in (5, 64, 7, 33, 1)]
        x = torch.randn(5, 3, weights[0].K)
        for y, rows, packed in zip(matvec.bind(*weights)(x), x, weights, strict=True):
            assert torch.equal(y, matvec(rows, packed))


def test_a_row_that_is_not_finite_gives_no_finite_output(matvec: MatVec) -> None:
    for format, bad in product(formats_of(matvec), (float("nan"), float("inf"), -float("inf"))):
        x, packed = cases.inputs(3, 20, 768, format=format)
        x[1, 700] = bad
        assert matvec(x, packed).isfinite().sum(1).tolist() == [20, 0, 20], format


def test_a_format_that_an_implementation_lacks_is_reported_in_one_sentence() -> None:
    x, packed = cases.inputs(2, 3, 64, "int4")
    with pytest.raises(ValueError, match="int4"):
        MatVec("torch_linear")(x, packed)


def test_int8_has_the_same_bits_in_all_implementations() -> None:
    """All integers are as large as possible, so that a sum in float32 would round and a sum in 16 bits would overflow."""
    for non_negative in (True, False):
        packed = Int8.of(torch.full((3, 9000), -0.5), non_negative=non_negative)
        able = [name for name in runnable("matvec") if "int8" in MatVec(name).requires.formats]
        for x in (torch.ones(5, 9000), torch.rand(2, 9000), torch.ones(1, 9000)):
            first, *others = (MatVec(name)(x, packed) for name in able)
            assert all(torch.equal(first, other) for other in others)


@in_c
@each_level
@pytest.mark.parametrize("rows", [1, 9])
def test_signed_8_bit_inputs_do_not_overflow(level: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    for K in (64, 9000, 9005):
        for value in (-0.5, 0.5):
            packed = Int8.of(torch.full((3, K), value), bits=8)
            x = torch.randn(rows, K, generator=torch.Generator().manual_seed(0))
            for inputs in (torch.ones(rows, K), -torch.ones(rows, K), x):
                assert torch.equal(MatVec("c_v0")(inputs, packed), MatVec("reference")(inputs, packed))


@pytest.mark.parametrize("rows", [1, 5])
def test_int4_of_the_largest_numbers_does_not_overflow(rows: int) -> None:
    x, weight = torch.ones(rows, 512), torch.ones(3, 512)
    weight[:, ::GROUP] = 0.0             # gives each group a range, in which all other elements are the largest integer
    packed = pack(weight, "int4")
    for signed in (x, -x):
        torch.testing.assert_close(MatVec("c_v0")(signed, packed), MatVec("reference")(signed, packed))


def rounding(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Returns a bound of the norm of the rounding errors, for each row (K,) of W.

    Rounding to bfloat16 changes an element by at most 2^-8 of its value. Rounding to steps of size s causes an RMS error of
    s / sqrt(12) if all places within a step are equally likely. The sum of K such squares exceeds its mean by at most five
    standard deviations; a standard deviation is sqrt(0.8 / K) of the mean.
    """
    K = weight.shape[1]
    if format in ("float32", "bfloat16"):
        return {"float32": 0.0, "bfloat16": 2**-8}[format] * weight.norm(dim=1)
    if format == "int8":
        steps = weight.abs().amax(1, keepdim=True).expand(-1, K) / 127
    else:
        groups = torch.nn.functional.pad(weight, (0, -K % GROUP)).view(len(weight), -1, GROUP)
        steps = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(GROUP, 1)[:, :K]
    return (steps.square().sum(1) / 12 * (1 + 5 * (0.8 / K) ** 0.5)).sqrt()


@pytest.mark.parametrize("format", PACKED)
def test_a_packed_matrix_is_close_to_the_original(format: str) -> None:
    weight = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 40).unsqueeze(1)
    stands_for = pack(weight, format).dense()
    assert ((stands_for - weight).norm(dim=1) <= rounding(weight, format)).all()


def test_int4_keeps_zeros_and_values_that_fit_exactly() -> None:
    assert Int4.of(torch.zeros(3, 64)).dense().abs().max() < 1e-20
    steps = torch.arange(64.0).remainder(16).expand(2, 64)
    assert torch.equal(Int4.of(0.25 * steps).dense(), 0.25 * steps)
    uneven = torch.linspace(0, 3.3, 64).expand(2, 64)
    assert (Int4.of(uneven, symmetric=True).dense()[:, 0] == 0).all()


@pytest.mark.parametrize("name", implementations("matvec"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_implementation_unpacks_int4_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    packed = pack(torch.randn(37, 600, generator=torch.Generator().manual_seed(0)), "int4")
    assert torch.equal(MatVec(name).dense(packed, dtype), packed.dense(dtype))


def test_a_copy_of_a_packed_matrix_gives_the_same_products() -> None:
    x, packed = cases.inputs(2, 9, 64, "int4")
    copied = packed.map(torch.clone)
    assert torch.equal(MatVec("c_v0")(x, copied), MatVec("c_v0")(x, packed))


def test_a_matrix_that_has_the_format_already_is_not_copied() -> None:
    weight = torch.randn(4, 8)
    assert pack(weight, "float32").weight.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(("weight", "format"), [(torch.ones(3), "int8"), (torch.ones(3, 4), "int5"),
                                                (torch.ones(3, 256), "q4_k"), (torch.ones(1, 133_145), "int8")])
def test_a_matrix_that_cannot_be_packed_is_reported_in_one_sentence(weight: torch.Tensor, format: str) -> None:
    with pytest.raises(ValueError, match=r"W \(N,K\)"):
        pack(weight, format)


def test_a_product_without_inputs_is_0(matvec: MatVec) -> None:
    for format in formats_of(matvec):
        x, packed = cases.inputs(2, 3, 0, format)
        assert torch.equal(matvec(x, packed), torch.zeros(2, 3))


@in_c
@each_level
def test_c_packs_as_pytorch_does(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    for dtype, shape in product((torch.float32, torch.bfloat16, torch.float16),
                                ((5, 32), (7, 37), (300, 1000), (3, 8), (0, 32), (5, 0))):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        weight[:1] = 0.0
        for symmetric in (False, True):
            expected = _packing.int4_in_torch(weight.float(), symmetric)
            assert all(map(torch.equal, _packing.int4(weight, symmetric), expected)), (dtype, shape)
        assert all(map(torch.equal, _packing.int8(weight), _packing.int8_in_torch(weight.float()))), (dtype, shape)


@in_c
def test_nonfinite_values_stay_nonfinite_in_c() -> None:
    for bad, place, format in product((float("nan"), float("inf"), -float("inf")), (0, 36), (Int8, Int4)):
        weight = torch.randn(3, 37)
        weight[1, place] = bad
        finite = format.of(weight).dense().isfinite()
        assert not finite[1, place]
        assert finite[[0, 2]].all()


@in_c
def test_a_copy_in_bfloat16_is_exact_or_none() -> None:
    weight = torch.randn(9, 33).bfloat16().float()
    copy = exact_copy(weight)
    assert copy is not None
    assert torch.equal(copy.float(), weight)
    weight[8, 32] = 1 + 2.0 ** -20
    assert exact_copy(weight) is None


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_packing_does_not_depend_on_torch_s_default_dtype(default: torch.dtype) -> None:
    weight = torch.randn(33, 70)
    expected = [_packing.int8(weight), _packing.int4(weight, False)]
    torch.set_default_dtype(default)
    try:
        actual = [_packing.int8(weight), _packing.int4(weight, False)]
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(actual, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@in_c
@each_level
@pytest.mark.parametrize("rows", [1, 3, 9, 16, 70])
def test_int8_by_input_has_the_bits_of_int8_by_output(rows: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few rows skip zeros; products of many do not. The sizes have partial groups, tiles and chunks of inputs."""
    monkeypatch.setattr(native, "level", lambda: level)
    matvec = MatVec("c_v0")
    for N, K in ((8, 8), (136, 1048), (520, 264)):
        by_output = Int8.of(torch.randn(N, K), non_negative=True)
        by_input = by_output.stored_by_input()
        assert by_input.by_input
        assert torch.equal(by_input.weight, by_output.weight)
        for zeros in (0.0, 0.9, 1.0):
            x = torch.randn(1, rows, K).abs() * (torch.rand(rows, K) >= zeros)
            assert torch.equal(matvec.bind(by_input)(x)[0], matvec.bind(by_output)(x)[0])


@in_c
@each_level
@pytest.mark.parametrize("non_negative", [False, True])
def test_many_rows_of_int8_have_the_bits_of_single_rows(non_negative: bool, level: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, products of many rows use tiles. The sizes have incomplete tiles, groups of outputs and pieces of inputs."""
    monkeypatch.setattr(native, "level", lambda: level)
    monkeypatch.setattr(native, "threads_for", lambda tasks: min(tasks, 3))
    matvec = MatVec("c_v0")
    for N, K, sizes in ((7, 64, (32, 33)), (130, 1000, (32, 47, 65)), (200, 9005, (95,)), (72, 72, (513,)), (20, 40, (40,))):
        packed = Int8.of(torch.randn(N, K), 8, non_negative)
        x = torch.randint(0 if non_negative else -127, 128, (max(sizes), K)).float()
        alone = torch.cat([matvec(row.unsqueeze(0), packed) for row in x])
        for rows in sizes:
            assert torch.equal(matvec(x[:rows], packed), alone[:rows]), (N, K, rows)
            if non_negative and K % 8 == 0:
                assert torch.equal(matvec(x[:rows], packed.stored_by_input()), alone[:rows]), (N, K, rows)


@in_c
def test_bfloat16_products_of_float32_rows_have_the_same_bits_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes have incomplete tiles, panels and pieces of K. The bits of a row do not depend on the other rows."""
    for R, N, K in ((c_v0.MANY_ROWS, 7, 13), (200, 33, 300), (77, 150, 768), (70, 64, 2050), (c_v0.TILED_ROWS + 5, 20, 70),
                    (9, 40, 72), (0, 3, 8)):
        x, packed = cases.inputs(R, N, K, "bfloat16")
        by_level = []
        for level in native.levels():
            monkeypatch.setattr(native, "level", lambda level=level: level)
            by_level.append(c_v0.bfloat16_product(packed.weight, x))
            expected = x.double() @ packed.weight.double().T
            assert not misses(errors({"y": by_level[-1]}, {"y": expected}), cases.tolerance("c_v0", "bfloat16")), (R, level)
            among_others = c_v0.bfloat16_product(packed.weight, torch.cat([torch.randn(2, K), x[2:]]))
            assert torch.equal(among_others[2:], by_level[-1][2:])
        if R >= c_v0.MANY_ROWS:
            assert all(torch.equal(y, by_level[0]) for y in by_level)


def test_int8_stays_by_output_if_inputs_are_signed_or_c_requires_it() -> None:
    for packed in (Int8.of(torch.randn(16, 24)), Int8.of(torch.randn(16, 20), non_negative=True)):
        assert packed.stored_by_input() is packed
        assert not packed.by_input


# GGUF's blocks


def gguf_values(packed: torch.Tensor, format: str) -> torch.Tensor:
    """Returns W (N,K) as dequantised by gguf, the package of llama.cpp's authors."""
    return torch.from_numpy(gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[format.upper()]))


@in_c
@each_level
@pytest.mark.parametrize("format", BLOCKS)
def test_blocks_are_unpacked_to_the_bits_of_the_package_gguf(format: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    for N, K in ((1, 32), (33, 768), (7, 2048)):
        _, packed = cases.inputs(1, N, K, format)
        expected = gguf_values(packed.weight, format)
        assert torch.equal(packed.dense(), expected)
        in_c = MatVec("c_v0").dense(packed, torch.float32)
        assert torch.equal(in_c, expected)
        assert torch.equal(in_c.view(torch.int32), packed.dense().view(torch.int32))      # distinguishes -0 from 0
        assert torch.equal(MatVec("c_v0").dense(packed, torch.bfloat16), expected.bfloat16())


@in_c
@each_level
@pytest.mark.parametrize("format", BLOCKS)
def test_products_with_blocks_at_every_level(format: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are also compared with float64 products of unrounded inputs, which the kernel rounds to 8 bits."""
    monkeypatch.setattr(native, "level", lambda: level)
    matvec = MatVec("c_v0")
    for R, N, K in ((1, 7, 32), (15, 33, 736), (70, 5, 2048)):
        x, packed = cases.inputs(R, N, K, format)
        y = matvec(x, packed)
        assert not misses(errors({"y": y}, {"y": cases.expected(x, packed)}), cases.tolerance("c_v0", format)), (R, N, K)
        exact = x.double() @ packed.dense(torch.float64).T
        assert (y - exact).norm() < 1e-2 * exact.norm()
        for row in (0, R // 2, R - 1):
            assert torch.equal(matvec(x[row:row + 1], packed)[0], y[row])


@in_c
@each_level
@pytest.mark.parametrize("rows", [1, 9])
def test_the_largest_integers_of_blocks_do_not_overflow(level: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    x, one = torch.ones(rows, 512), torch.tensor([1.0], dtype=torch.float16).view(torch.uint8).tolist()
    for format, block, largest in (("q4_k", [*one, 0, 0, *[255] * 140], 15 * 63), ("q5_k", [*one, 0, 0, *[255] * 172], 31 * 63),
                                   ("q6_k", [*[255] * 192, *[127] * 16, *one], 31 * 127),
                                   ("q6_k", [*[0] * 192, *[128] * 16, *one], 32 * 128),
                                   ("q8_0", [*one, *[128] * 32], -128), ("q8_0", [*one, *[127] * 32], 127),
                                   ("q4_0", [*one, *[0] * 16], -8), ("q5_0", [*one, *[255] * 20], 15),
                                   ("q5_1", [*one, *one, *[255] * 20], 32)):
        packed = BLOCKS[format](torch.tensor(block, dtype=torch.uint8).repeat(3, 512 // BLOCKS[format].elements))
        assert packed.dense().eq(largest).all()
        for signed in (x, -x):
            torch.testing.assert_close(MatVec("c_v0")(signed, packed), signed.sum(1, keepdim=True).expand(-1, 3) * largest)


@pytest.mark.parametrize("in_c", [pytest.param(True, marks=in_c), False])
def test_a_scale_that_is_not_finite_is_noticed(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_c:
        monkeypatch.setattr(native, "why_not", lambda: "no C kernels")
    for format, kind in BLOCKS.items():
        _, packed = cases.inputs(1, 5, 512, format)
        assert packed.is_finite()                                        # type: ignore[attr-defined]
        for half, bad in product(kind.halves, (float("inf"), -float("inf"), float("nan"))):
            weight = packed.weight.clone()
            at = weight.shape[1] - kind.bytes_per_block + half
            weight[4, at:at + 2] = torch.tensor([bad], dtype=torch.float16).view(torch.uint8)
            assert not kind(weight).is_finite()


@in_c
def test_blocks_are_read_in_place_at_any_address() -> None:
    """A mapped file's tensors begin at multiples of 32 bytes, but its blocks begin anywhere."""
    for format in BLOCKS:
        x, packed = cases.inputs(3, 5, 512, format)
        for offset in (1, 2, 6):
            memory = torch.empty(packed.weight.numel() + offset, dtype=torch.uint8)
            moved = memory[offset:].view_as(packed.weight).copy_(packed.weight)
            assert torch.equal(MatVec("c_v0")(x, BLOCKS[format](moved)), MatVec("c_v0")(x, packed)), format
