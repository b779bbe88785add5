"""Tests that merging adapters into weights of 16 bits or blocks keeps what they learnt, or a line says how much is kept."""

import warnings
from pathlib import Path

import pytest
import torch
from files import SIZES
from models import small_model, tokens
from torch import Tensor
from tuned_runs import write_run

from rwkv.checkpoint.files import read_checkpoint, with_adapter
from rwkv.checkpoint.tuned import is_exact, surviving_fraction
from rwkv.errors import CheckpointError
from rwkv.generation.decoder import decoder_of
from rwkv.model.decoding.c_step import is_plain
from rwkv.pretrained import RWKV, adapter_rounding_lines
from rwkv.tools import convert

pytestmark = pytest.mark.thorough
SCALE = 4.0                              # alpha / rank of write_run
NAMES = [f"blocks.{layer}.{module}.weight" for layer in range(3) for module in ("att.key", "ffn.value")]
BASES = ("float32", "float16", "bfloat16", "q8_0")


def adapters(base: Path, size: float, seed: int = 1) -> dict[str, Tensor]:
    """Returns adapters of the matrices `NAMES` with random A, and B so small that a change is about `size`."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name in NAMES:
        out, inputs = read_checkpoint(base).weights[name].shape
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.lora_A.weight"] = torch.randn(2, inputs, generator=random)
        tensors[f"{stem}.lora_B.weight"] = size / SCALE * torch.randn(out, 2, generator=random)
    return tensors


def expected(base: Path, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the merged weights W + alpha / rank * B A in float64."""
    weights = {name: tensor.double() for name, tensor in read_checkpoint(base).weights.items()}
    for name in NAMES:
        stem = name.removesuffix(".weight")
        weights[name] += SCALE * trained[f"{stem}.lora_B.weight"].double() @ trained[f"{stem}.lora_A.weight"].double()
    return weights


def assert_contains(path: Path, weights: dict[str, Tensor]) -> None:
    """Checks that the file contains these matrices to the precision of float32."""
    actual = read_checkpoint(path).weights
    for name in (*NAMES, "blocks.1.att.value.weight", "head.weight"):
        torch.testing.assert_close(actual[name].double(), weights[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a base in each of `BASES`, and tuned runs whose changes are small beside the base's rounding."""
    root = tmp_path_factory.mktemp("tuned")
    small_model(generation="rwkv7", **SIZES["rwkv7"]).save_pretrained(root / "float32.safetensors")
    for dtype in BASES[1:]:
        convert.convert(root / "float32.safetensors", base_of(root, dtype), dtype)
    for dtype in BASES:
        write_run(root / dtype, base_of(root, dtype), "lora", adapters(base_of(root, dtype), 1e-4))
    return root


def base_of(folder: Path, dtype: str) -> Path:
    return folder / (f"{dtype}.gguf" if dtype[0] == "q" else f"{dtype}.safetensors")


@pytest.mark.parametrize("alpha", [None, 8.0])
def test_a_run_without_its_alpha_is_not_an_adapter(folder: Path, alpha: float | None) -> None:
    """If such a run were accepted, any alpha would be, too, although the run had an alpha of its own."""
    with pytest.raises(CheckpointError, match=r"checkpoint=.*adapter"):
        with_adapter(read_checkpoint(base_of(folder, "float32")), folder / "float32", alpha)


@pytest.mark.parametrize("dtype", BASES)
def test_a_merged_sum_is_not_rounded_to_the_dtype_of_the_file(folder: Path, dtype: str) -> None:
    base = base_of(folder, dtype)
    weights = expected(base, adapters(base, 1e-4))
    assert_contains(folder / dtype, weights)
    for options in ({}, {"mmap": False}, {"trainable": True}):
        model = RWKV.from_pretrained(folder / dtype, **options)          # type: ignore[arg-type]
        for name in NAMES:
            torch.testing.assert_close(model.get_parameter(name).data.double(), weights[name], rtol=1e-6, atol=1e-7)


@torch.inference_mode()
def test_the_step_computes_with_the_sums(folder: Path) -> None:
    """The step in C copies matrices that are exact in bfloat16, but the sums are not."""
    model = RWKV.from_pretrained(folder / "bfloat16")
    exact = RWKV.from_pretrained(folder / "bfloat16", "reference", mmap=False).double()
    exact.load_state_dict(expected(folder / "bfloat16.safetensors", adapters(folder / "bfloat16.safetensors", 1e-4)))
    before = RWKV.from_pretrained(folder / "bfloat16.safetensors")
    assert is_plain(model)
    ids = tokens(model, B=1, T=12)
    whole = exact(ids)[0][0, -1].double()
    logits = {name: decoder_of(each, each.empty_state(1)) for name, each in (("after", model), ("before", before))}
    last = {name: [decoder.step(ids[:, t])[0] for t in range(12)][-1].double() for name, decoder in logits.items()}
    change = (last["before"] - whole).norm()
    assert (last["after"] - whole).norm() < 0.01 * change


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors", "out.ckpt", "out", "out.gguf"])
def test_a_converted_run_has_what_was_trained(folder: Path, tmp_path: Path, target: str) -> None:
    convert.convert(folder / "bfloat16", tmp_path / target)
    base = folder / "bfloat16.safetensors"
    assert_contains(tmp_path / target, expected(base, adapters(base, 1e-4)))
    if target == "out":
        assert '"torch_dtype": "float32"' in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.9), ("float16", 0.99), ("q8_0", 0.1), ("int4", 0.1)])
def test_a_conversion_that_rounds_reports_how_much_is_kept(folder: Path, tmp_path: Path, dtype: str, most: float,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / ("out.gguf" if dtype[0] == "q" else "out.safetensors")
    convert.convert(folder / "bfloat16", target, dtype)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "survives" in line)
    base, trained = folder / "bfloat16.safetensors", adapters(folder / "bfloat16.safetensors", 1e-4)
    sums, weights = expected(base, trained), read_checkpoint(base).weights
    convert.convert(base, tmp_path / f"base{target.suffix}", dtype)
    merged, rounded = read_checkpoint(target).weights, read_checkpoint(tmp_path / f"base{target.suffix}").weights
    change = torch.cat([(sums[name] - weights[name].double()).flatten() for name in NAMES])
    surviving = torch.cat([(merged[name].double() - rounded[name].double()).flatten() for name in NAMES])
    expected_fraction = max(0.0, 1 - ((surviving - change).norm() / change.norm()).item())
    assert f": {expected_fraction:.0%} of" in line
    assert expected_fraction < most


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_a_model_in_a_dtype_that_rounds_reports_how_much_is_kept(folder: Path, dtype: str) -> None:
    checkpoint = read_checkpoint(folder / "bfloat16")
    (line,) = adapter_rounding_lines(checkpoint, dtype)
    assert f"{surviving_fraction(checkpoint.weights.stored, checkpoint.unadapted, dtype):.0%}" in line
    with pytest.warns(UserWarning, match=dtype):
        RWKV.from_pretrained(folder / "bfloat16", dtype=dtype)


def test_nothing_is_reported_if_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    base = folder / "bfloat16.safetensors"
    write_run(tmp_path / "nothing", base, "lora", adapters(base, 0.0))
    write_run(tmp_path / "much", base, "lora", adapters(base, 30.0))
    assert adapter_rounding_lines(read_checkpoint(folder / "bfloat16"), "float32") == []
    for path in (base, tmp_path / "nothing", tmp_path / "much"):
        assert adapter_rounding_lines(read_checkpoint(path), "bfloat16") == [], path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RWKV.from_pretrained(folder / "bfloat16")


def test_adapters_on_adapters_are_all_merged(folder: Path, tmp_path: Path) -> None:
    """The weights contain the changes of both runs, and the surviving fraction counts both."""
    base = folder / "bfloat16.safetensors"
    first, second = adapters(base, 1e-4), adapters(base, 1e-6, seed=2)
    write_run(tmp_path / "second", folder / "bfloat16", "lora", second)
    weights, more = expected(base, first), expected(base, second)
    for name in NAMES:
        weights[name] += more[name] - read_checkpoint(base).weights[name].double()
    assert_contains(tmp_path / "second", weights)
    checkpoints = [read_checkpoint(path) for path in (folder / "bfloat16", tmp_path / "second")]
    fractions = [surviving_fraction(each.weights.stored, each.unadapted, "bfloat16") for each in checkpoints]
    assert fractions[1] == pytest.approx(fractions[0], abs=0.02)


def test_matrices_are_exact_in_the_dtype_of_their_file_alone(folder: Path) -> None:
    files = ("bfloat16.safetensors", "float32.safetensors", "bfloat16")
    checkpoints = [read_checkpoint(folder / name) for name in files]
    assert [is_exact(each.weights.stored, each.config, "bfloat16") for each in checkpoints] == [True, False, False]
