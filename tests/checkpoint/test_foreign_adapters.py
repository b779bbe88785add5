"""Tests adapters of PEFT and RWKV-PEFT under each layout of names: the merge equals float64's, or an error names the adapter.

The tests compute the expected weights in the adapter's layout, from its formula and the file's own matrices.
"""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from files import SIZES
from models import small_model
from parity.exchange import PYTHON, in_peers_environment
from programs import caller, one_sentence
from safetensors.torch import load_file, save_file
from torch import Tensor

from rwkv.checkpoint import formats, time_states
from rwkv.checkpoint.files import read_checkpoint, with_adapter
from rwkv.config import ServeConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.model.rwkv7 import UNUSED
from rwkv.pretrained import RWKV, open_checkpoint
from rwkv.programs.adapters import read_adapters
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools import convert

pytestmark = pytest.mark.thorough
R = 2                                    # the rank
C = SIZES["rwkv7"]["n_embd"]
Weights = dict[str, Tensor]
LAYERS = {"fla": ("model.layers.1.attn.r_proj", "model.layers.2.ffn.key", "model.layers.0.attn.w_lora.lora.0", "lm_head"),
          "official": ("rwkv7.blocks.1.att.receptance", "rwkv7.blocks.2.ffn.key", "head"),
          "transformers-rwkv": ("model.layers.1.linear_attn.r_proj", "model.layers.2.mlp.key", "lm_head")}
WIDE = "transformers-rwkv"               # this layout requires heads of 64
LAYOUTS = [layout for layout in formats.LAYOUTS if layout in LAYERS]
NAMES = ("blocks.0.att.key", "blocks.1.att.receptance", "blocks.2.ffn.value", "head")


def random(*shape: int, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(W: Tensor, scale: float, rank: int = R) -> tuple[Weights, Tensor]:
    A, B = random(rank, W.shape[1], seed=1), random(W.shape[0], rank, seed=2)
    return {"lora_A.weight": A, "lora_B.weight": B}, W + scale * B.double() @ A.double()


def dora(W: Tensor, scale: float) -> tuple[Weights, Tensor]:
    parts, merged = lora(W, scale)
    m = 1 + random(W.shape[0], seed=3)
    return {**parts, "lora_magnitude_vector": m}, m.double()[:, None] * merged / merged.norm(dim=1, keepdim=True)


def pissa(W: Tensor, scale: float) -> tuple[Weights, Tensor]:
    parts, merged = lora(W, scale)
    U, S, Vh = torch.linalg.svd(W)
    return parts, merged - U[:, :R] @ torch.diag(S[:R]) @ Vh[:R]


def miss(W: Tensor, scale: float, width: int | None = None, rank: int = 3) -> tuple[Weights, Tensor]:
    M = random(rank, width or W.shape[0], seed=4)
    out, inputs = W.shape
    change = torch.tensor([[M[c % rank, o % M.shape[1]] for c in range(inputs)] for o in range(out)])
    return {"miss_block": M}, W + change.double()


def bat(W: Tensor, scale: float) -> tuple[Weights, Tensor]:
    M = random(W.shape[0] // R, R, R, seed=5)
    changed = W.clone()
    for i in range(W.shape[0] // R):
        for j in range(W.shape[1] // R):
            rows, columns = slice(R * i, R * i + R), slice(R * j, R * j + R)
            changed[rows, columns] += W[rows, columns] @ M[i].double() + M[i].double()
    return {"miss_block": M}, changed


def whole(W: Tensor, scale: float) -> tuple[Weights, Tensor]:
    weight = random(*W.shape, seed=6)
    return {"weight": weight}, weight.double()


def lora_beside_its_base(W: Tensor, scale: float) -> tuple[Weights, Tensor]:
    """Returns an adapter of the head as PEFT writes it."""
    weight = random(*W.shape, seed=7)
    parts, merged = lora(weight.double(), scale)
    return {**parts, "base_layer.weight": weight}, merged


MISS: dict[str, Any] = {"peft_type": "MISS", "r": 3}
KINDS: dict[str, tuple[Callable[..., tuple[Weights, Tensor]], dict[str, Any], float]] = {
    "lora": (lora, {}, 2.5), "rslora": (lora, {"use_rslora": True}, 5 / math.sqrt(R)), "dora": (dora, {"use_dora": True}, 2.5),
    "pissa": (pissa, {"init_lora_weights": "pissa"}, 2.5), "miss": (miss, MISS, 1.0),
    "mini": (lambda W, scale: miss(W, scale, 2), {**MISS, "init_weights": "mini", "mini_r": 2}, 1.0),
    "bat": (bat, {**MISS, "init_weights": "bat"}, 1.0), "whole": (whole, {"modules_to_save": ["lm_head"]}, 1.0),
    "base": (lora_beside_its_base, {}, 2.5)}


def write_peft(folder: Path, tensors: Weights, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": R, "lora_alpha": 5, **config}))
    return folder


def weights_of(path: Path) -> Weights:
    return {name: tensor.double() for name, tensor in read_checkpoint(path).weights.items()}


def assert_weights(actual: Any, expected: Weights, atol: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name].double(), weight, rtol=1e-5, atol=atol,
                                   msg=f"{name}: {(actual[name].double() - weight).abs().max()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with base.pth, wide.pth and a directory of each layout. wide.pth is the base of the layout `WIDE`."""
    root = tmp_path_factory.mktemp("adapters")
    small_model(generation="rwkv7", **SIZES["rwkv7"]).save_pretrained(root / "base.pth")
    small_model(generation="rwkv7", **{**SIZES["rwkv7"], "head_size": 64}).save_pretrained(root / "wide.pth")
    for layout in LAYOUTS:
        convert.convert(base_of(root, layout), root / layout, layout=layout)
    return root


def base_of(folder: Path, layout: str) -> Path:
    return folder / ("wide.pth" if layout == WIDE else "base.pth")


@pytest.mark.parametrize(("kind", "layout"), [
    pytest.param(kind, layout, marks=[] if kind == "lora" or layout == "official" else pytest.mark.soak)
    for kind in KINDS for layout in LAYOUTS])
def test_peft_over_each_layout_of_names(folder: Path, tmp_path: Path, layout: str, kind: str) -> None:
    """make test merges LoRA under the names of each layout, and each kind under the official names."""
    make, settings, scale = KINDS[kind]
    raw = load_file(folder / layout / "model.safetensors")
    trained: Weights = {}
    for layer in LAYERS[layout]:
        if kind in ("bat", "mini") and raw[f"{layer}.weight"].shape[0] % R:
            continue                     # these kinds require sizes divisible by R
        parts, merged = make(raw[f"{layer}.weight"].double(), scale)
        trained |= {f"base_model.model.{layer}.{part}": tensor for part, tensor in parts.items()}
        raw[f"{layer}.weight"] = merged.float().contiguous()
    adapter = write_peft(tmp_path / "adapter", trained, base_model_name_or_path=str(folder / layout), **settings)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_bytes((folder / layout / "config.json").read_bytes())
    save_file(raw, tmp_path / "merged" / "model.safetensors")
    expected = weights_of(tmp_path / "merged")
    atol = 1e-4 if kind == "pissa" else 1e-6             # PEFT computes close singular values in float32
    assert_weights(read_checkpoint(adapter).weights, expected, atol)     # the adapter's config names the base
    actual = with_adapter(read_checkpoint(base_of(folder, layout)), adapter).weights
    assert_weights({name: actual[name] for name in actual if name not in UNUSED},
                   {name: weight for name, weight in expected.items() if name not in UNUSED}, atol)


@pytest.mark.parametrize("kind", ["rslora", "dora", "pissa", "bat"])
def test_the_file_of_a_peft_directory_is_merged_as_the_directory_says(folder: Path, tmp_path: Path, kind: str) -> None:
    """A trainer may also write the base's config.json into the directory. Without adapter_config.json the file is refused."""
    make, settings, scale = KINDS[kind]
    expected = weights_of(folder / "base.pth")
    parts, expected["blocks.1.att.key.weight"] = make(expected["blocks.1.att.key.weight"], scale)
    trained = {f"base_model.model.blocks.1.att.key.{part}": tensor for part, tensor in parts.items()}
    adapter = write_peft(tmp_path / "adapter", trained, base_model_name_or_path=str(folder / "base.pth"), **settings)
    atol = 1e-4 if kind == "pissa" else 1e-6
    base = read_checkpoint(folder / "base.pth")
    assert_weights(with_adapter(base, adapter / "adapter_model.safetensors").weights, expected, atol)
    (adapter / "config.json").write_bytes((folder / "fla" / "config.json").read_bytes())
    for path in (adapter, adapter / "adapter_model.safetensors"):
        assert_weights(read_checkpoint(path).weights, expected, atol)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(UserError):
        with_adapter(base, adapter / "adapter_model.safetensors")
    if kind in ("dora", "bat"):          # alpha alone does not determine the merge
        with pytest.raises(CheckpointError, match="adapter_config"):
            with_adapter(base, adapter / "adapter_model.safetensors", 5.0 if kind == "dora" else None)


def test_author_names_wrapper_prefixes_and_patterns(folder: Path, tmp_path: Path) -> None:
    """alpha_pattern matches the end of a layer's name, and the tensors' shapes give the rank."""
    base = read_checkpoint(folder / "base.pth").weights
    expected, trained = weights_of(folder / "base.pth"), {}
    for number, (name, prefix) in enumerate(zip(NAMES, ("", "model.", "_orig_mod.module.", ""), strict=True)):
        rank, alpha = (4, 7.0) if name == "blocks.2.ffn.value" else (R, 5.0)
        parts, merged = lora(base[f"{name}.weight"].double(), alpha / rank, rank)
        trained |= {f"base_model.model.{prefix}{name}.{part.replace('.', '.default.') if number == 0 else part}": tensor
                    for part, tensor in parts.items()}
        expected[f"{name}.weight"] = merged
    adapter = write_peft(tmp_path / "adapter", trained, rank_pattern={r"2\.ffn\.value": 4}, alpha_pattern={r"2\.ffn\.value": 7})
    assert_weights(with_adapter(read_checkpoint(folder / "base.pth"), adapter).weights, expected)


def test_an_embedding(folder: Path, tmp_path: Path) -> None:
    expected = weights_of(folder / "base.pth")
    V, C = expected["emb.weight"].shape
    A, B = random(R, V), random(C, R, seed=1)
    stem = "base_model.model.emb.lora_embedding"
    adapter = write_peft(tmp_path / "adapter", {f"{stem}_A": A, f"{stem}_B": B})
    expected["emb.weight"] = expected["emb.weight"] + 2.5 * (B.double() @ A.double()).T
    assert_weights(with_adapter(read_checkpoint(folder / "base.pth"), adapter).weights, expected)


def test_the_adapter_and_not_the_base_is_named_if_their_sum_is_infinite(folder: Path, tmp_path: Path) -> None:
    base = read_checkpoint(folder / "base.pth")
    stem = f"base_model.model.{NAMES[0]}.lora"
    out, inputs = base.weights[f"{NAMES[0]}.weight"].shape
    huge = {f"{stem}_A.weight": torch.full((R, inputs), 1e30), f"{stem}_B.weight": torch.full((out, R), 1e30)}
    adapter = write_peft(tmp_path / "adapter", huge)
    with pytest.raises(CheckpointError, match="not finite") as error:
        dict(with_adapter(base, adapter).weights)
    assert str(adapter) in str(error.value)
    assert "base.pth" not in str(error.value)


# RWKV-PEFT


def test_a_lora_of_rwkv_peft_takes_alpha_by_option(folder: Path, tmp_path: Path) -> None:
    """The file may also contain whole trained weights."""
    base = read_checkpoint(folder / "base.pth")
    expected, trained = weights_of(folder / "base.pth"), {"blocks.1.att.x_r": random(*base.weights["blocks.1.att.x_r"].shape)}
    for name in NAMES:
        parts, expected[f"{name}.weight"] = lora(expected[f"{name}.weight"], 16.0)
        trained |= {f"{name}.{part.removesuffix('.weight')}": tensor for part, tensor in parts.items()}
    expected["blocks.1.att.x_r"] = trained["blocks.1.att.x_r"].double()
    torch.save(trained, tmp_path / "rwkv-0.pth")
    assert_weights(with_adapter(base, tmp_path / "rwkv-0.pth", 32).weights, expected)
    with pytest.raises(UserError, match=r"lora_alpha.*--lora-alpha"):
        with_adapter(base, tmp_path / "rwkv-0.pth")
    with pytest.raises(UserError, match="requires lora="):
        RWKV.from_pretrained(folder / "base.pth", lora_alpha=32)
    with pytest.raises(CheckpointError, match="lora="):
        read_checkpoint(tmp_path / "rwkv-0.pth")
    model = RWKV.from_pretrained(folder / "base.pth", lora=tmp_path / "rwkv-0.pth", lora_alpha=32)
    assert_weights(model.state_dict(), expected)
    convert.main([str(folder / "base.pth"), str(tmp_path / "out.safetensors"), "--lora", str(tmp_path / "rwkv-0.pth"),
                  "--lora-alpha", "32"])
    assert_weights(read_checkpoint(tmp_path / "out.safetensors").weights, expected)


def test_a_lora_beside_all_weights_of_its_model(folder: Path, tmp_path: Path) -> None:
    """RWKV-LM-LoRA saves such files."""
    weights = {name: weight + 0.1 for name, weight in weights_of(folder / "base.pth").items()}
    parts, merged = lora(weights[f"{NAMES[0]}.weight"], 16.0)
    adapter = {f"{NAMES[0]}.{part.removesuffix('.weight')}": tensor for part, tensor in parts.items()}
    torch.save({name: weight.float() for name, weight in weights.items()} | adapter, tmp_path / "rwkv-0.pth")
    actual = with_adapter(read_checkpoint(folder / "base.pth"), tmp_path / "rwkv-0.pth", 32).weights
    assert_weights(actual, weights | {f"{NAMES[0]}.weight": merged})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_adapter_or_state_is_refused(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    parts, _ = lora(torch.zeros(C, C).double(), 1.0)
    torch.save({f"{NAMES[0]}.{part.removesuffix('.weight')}": tensor.to(dtype) for part, tensor in parts.items()},
               tmp_path / "rwkv-0.pth")
    base = read_checkpoint(folder / "base.pth")
    with pytest.raises(CheckpointError, match="the dtype of"):
        with_adapter(base, tmp_path / "rwkv-0.pth", 32)
    state = {f"blocks.{layer}.att.time_state": torch.zeros(2, 64, 64).to(dtype) for layer in range(3)}
    torch.save(state, tmp_path / "state.pth")
    with pytest.raises(CheckpointError, match="the dtype of"):
        time_states.read(tmp_path / "state.pth", base.config)


def test_a_lora_that_web_rwkvs_converter_has_written(folder: Path, tmp_path: Path) -> None:
    expected = weights_of(folder / "base.pth")
    parts, expected[f"{NAMES[2]}.weight"] = lora(expected[f"{NAMES[2]}.weight"], 16.0)
    expected["blocks.1.ln1.weight"] = norm = random(*expected["blocks.1.ln1.weight"].shape).double()
    expected["blocks.1.att.g1"] = gate = random(*expected["blocks.1.att.g1"].shape).double()
    save_file({f"{NAMES[2]}.lora.0": parts["lora_A.weight"].T.contiguous(), f"{NAMES[2]}.lora.1": parts["lora_B.weight"],
               "blocks.1.ln1.weight": norm.float(), "blocks.1.att.g1": gate.float().T.contiguous()}, tmp_path / "adapter.lora")
    assert_weights(with_adapter(read_checkpoint(folder / "base.pth"), tmp_path / "adapter.lora", 32).weights, expected)
    with pytest.raises(CheckpointError, match="lora="):
        read_checkpoint(tmp_path / "adapter.lora")


@pytest.mark.parametrize("prefix", ["model.", "_forward_module."])
def test_prefixes_in_a_file_of_rwkv_peft_are_removed(folder: Path, tmp_path: Path, prefix: str) -> None:
    expected = weights_of(folder / "base.pth")
    parts, expected[f"{NAMES[0]}.weight"] = lora(expected[f"{NAMES[0]}.weight"], 16.0)
    trained = {f"{NAMES[0]}.{part.removesuffix('.weight')}": tensor for part, tensor in parts.items()}
    trained["blocks.1.ln1.weight"] = random(*expected["blocks.1.ln1.weight"].shape)
    expected["blocks.1.ln1.weight"] = trained["blocks.1.ln1.weight"].double()
    torch.save({f"{prefix}{name}": tensor for name, tensor in trained.items()}, tmp_path / "rwkv-0.pth")
    assert_weights(with_adapter(read_checkpoint(folder / "base.pth"), tmp_path / "rwkv-0.pth", 32).weights, expected)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_pissa_of_rwkv_peft_requires_the_file_of_its_initial_adapter(folder: Path, tmp_path: Path, prefix: str) -> None:
    """RWKV-PEFT of 2025 removes the prefix only from the names in the adapter."""
    base = read_checkpoint(folder / "base.pth")
    expected, trained, first = weights_of(folder / "base.pth"), {}, {}
    for name in NAMES:
        parts, merged = lora(expected[f"{name}.weight"], 1.0)
        trained |= {f"{name}.{part.removesuffix('.weight')}": tensor for part, tensor in parts.items()}
        A, B = random(*parts["lora_A.weight"].shape, seed=8), random(*parts["lora_B.weight"].shape, seed=9)
        first |= {f"{prefix}{name}.init_lora_A": A, f"{prefix}{name}.init_lora_B": B}
        expected[f"{name}.weight"] = merged - B.double() @ A.double()
    torch.save(trained, tmp_path / "rwkv-0.pth")
    torch.save(first, tmp_path / "init_pissa.pth")
    assert_weights(with_adapter(base, tmp_path / "rwkv-0.pth").weights, expected)
    with pytest.raises(UserError, match=r"init_pissa\.pth"):
        with_adapter(base, tmp_path / "rwkv-0.pth", 32)
    torch.save({}, tmp_path / "init_pissa.pth")
    with pytest.raises(UserError, match=r"lora_alpha.*--lora-alpha"):
        with_adapter(base, tmp_path / "rwkv-0.pth")


@pytest.mark.parametrize("name", ["disha", "bone"])
def test_miss_of_rwkv_peft(folder: Path, tmp_path: Path, name: str) -> None:
    """In RWKV-PEFT's bone, unlike PEFT's bat, M[j] belongs to a column of W's blocks."""
    base = read_checkpoint(folder / "base.pth")
    expected = weights_of(folder / "base.pth")
    W = expected["blocks.2.ffn.value.weight"]
    parts, merged = miss(W, 1.0) if name == "disha" else bat(W.T, 1.0)
    block = next(iter(parts.values()))
    if name == "bone":
        merged = W.clone()
        for j, M in enumerate(block.double()):
            for i in range(W.shape[0] // R):
                part = slice(R * i, R * i + R), slice(R * j, R * j + R)
                merged[part] += W[part] @ M + M
    expected["blocks.2.ffn.value.weight"] = merged
    torch.save({f"blocks.2.ffn.value.{name}": block}, tmp_path / "rwkv-0.pth")
    assert_weights(with_adapter(base, tmp_path / "rwkv-0.pth").weights, expected)


@pytest.mark.parametrize(("name", "shape", "word"), [
    ("blocks.0.att.key.lora_M", (1, C), "lora_M"), ("blocks.0.att.time_state", (2, 64, 64), "state="),
    ("blocks.0.att.key.lora_A", (0,), "zero_to_fp32")])
def test_other_tensors_in_a_file_of_rwkv_peft_are_named(folder: Path, tmp_path: Path, name: str, shape: tuple[int, ...],
                                                        word: str) -> None:
    parts = {"blocks.0.att.key.lora_A": random(R, C), "blocks.0.att.key.lora_B": random(C, R), name: random(*shape)}
    torch.save(parts, tmp_path / "rwkv-0.pth")
    with pytest.raises(CheckpointError, match=word) as error:
        with_adapter(read_checkpoint(folder / "base.pth"), tmp_path / "rwkv-0.pth", 32)
    assert "different model" not in str(error.value)


# Refused by name


@pytest.mark.parametrize(("described", "word"), [
    ({"peft_type": None}, "no peft_type"), ({"peft_type": "IA3"}, "IA3"), ({"peft_type": "ADALORA"}, "ADALORA"),
    ({"init_lora_weights": "olora"}, "olora"), ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ({"init_lora_weights": "corda"}, "corda"), ({"fan_in_fan_out": True}, "fan_in_fan_out"), ({"bias": "all"}, "bias"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"), ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"use_dora": True}, "lora_magnitude_vector"), ({"lora_alpha": None}, "lora_alpha"), ({"lora_alpha": "x"}, "lora_alpha"),
    ({"alpha_pattern": {"*.key": 4}}, "alpha_pattern"), ({"alpha_pattern": ["key"]}, "alpha_pattern")])
def test_what_is_not_merged_is_refused_by_name(folder: Path, tmp_path: Path, described: dict[str, Any], word: str) -> None:
    parts, _ = lora(torch.zeros(C, C).double(), 1.0)
    trained = {f"base_model.model.blocks.0.att.key.{part}": tensor for part, tensor in parts.items()}
    adapter = write_peft(tmp_path / "adapter", trained, **described)
    with pytest.raises(CheckpointError, match=word):
        with_adapter(read_checkpoint(folder / "base.pth"), adapter)


@pytest.mark.parametrize(("name", "shape", "word"), [
    ("blocks.9.att.key.lora_A", (R, C), "blocks.9.att.key"), ("blocks.0.att.key.lora_A", (R, C + 1), "different model"),
    ("blocks.0.att.key.lora_A", (R + 1, C), "do not match"), ("blocks.0.att.gate.lora_A", (R, C), "blocks.0.att.gate"),
    ("blocks.0.att.key.original_module", (C, C), "original_module"), ("emb", (9, C), "does not fit"),
    ("blocks.0.ln1", (C,), "neither a linear layer")])
def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path, name: str, shape: tuple[int, ...],
                                                word: str) -> None:
    trained = {f"base_model.model.{name}.weight": random(*shape)}
    if name.endswith("lora_A"):
        trained[f"base_model.model.{name.replace('lora_A', 'lora_B')}.weight"] = random(C, R)
    adapter = write_peft(tmp_path / "adapter", trained)
    with pytest.raises(CheckpointError, match=word):
        with_adapter(read_checkpoint(folder / "base.pth"), adapter)


def test_half_an_adapter_and_a_damaged_description_are_refused(folder: Path, tmp_path: Path) -> None:
    base = read_checkpoint(folder / "base.pth")
    adapter = write_peft(tmp_path / "adapter", {"base_model.model.blocks.0.att.key.lora_A.weight": random(R, C)})
    with pytest.raises(CheckpointError, match="the adapter is incomplete"):
        with_adapter(base, adapter)
    with pytest.raises(CheckpointError, match="pass the base model as checkpoint"):
        read_checkpoint(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        with_adapter(base, adapter)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "./nowhere"}')
    with pytest.raises(CheckpointError, match=r"\./nowhere"):
        read_checkpoint(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        with_adapter(base, adapter)


def test_a_file_that_is_not_an_adapter_is_identified(folder: Path, tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    empty, cloned = write_peft(tmp_path / "empty", {}), write_peft(tmp_path / "cloned", {})
    (cloned / "adapter_model.safetensors").write_text(pointer)
    torch.save({"blocks.0.att.key.disha": torch.empty(0, 128)}, tmp_path / "partitioned.pth")
    factors = {"blocks.0.att.key.lora_A": torch.ones(2, 128), "blocks.0.att.key.lora_B": torch.ones(128, 2)}
    torch.save(factors, tmp_path / "pissa.pth")
    (tmp_path / "init_pissa.pth").write_text(pointer)
    small_model(generation="rwkv7", **SIZES["rwkv7"]).save_pretrained(tmp_path / "model.safetensors")
    torch.save({"blocks.0.att.time_state": torch.zeros(2, 64, 64)}, tmp_path / "state.pth")
    for lora, part in ((tmp_path / "state.pth", "as state="), (empty, "contains no tensors"), (cloned, "Git LFS pointer"),
                       (tmp_path / "partitioned.pth", "ZeRO-3"), (tmp_path / "pissa.pth", "Git LFS pointer"),
                       (cloned / "adapter_config.json", "Pass the directory"),
                       (folder / LAYOUTS[0], "is not an adapter"), (tmp_path / "model.safetensors", "as checkpoint=")):
        with pytest.raises(CheckpointError, match=part):
            RWKV.from_pretrained(folder / "base.pth", "reference", lora=lora)


@pytest.mark.soak
def test_peft_s_own_adapters_are_merged_as_peft_does(folder: Path, tmp_path: Path) -> None:
    if not PYTHON.exists() or subprocess.run([PYTHON, "-I", "-c", "import peft"], capture_output=True).returncode:
        pytest.skip(f"no peft in {PYTHON.parent.parent.name}: `make peers` installs it")
    in_peers_environment(str(Path(__file__).with_name("peft_writer.py")), str(folder / "base.pth"), str(tmp_path), cwd=tmp_path)
    kinds = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert len(kinds) == 8
    for kind in kinds:
        actual = with_adapter(read_checkpoint(folder / "base.pth"), tmp_path / kind)
        assert len(actual.unadapted) == 9, kind
        for name, weight in torch.load(tmp_path / f"{kind}.pth", weights_only=True).items():
            torch.testing.assert_close(actual.weights[name], weight, rtol=0, atol=2e-4 if kind == "pissa" else 1e-6, msg=kind)


@pytest.mark.programs
def test_programs_and_the_server_take_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    """Programs report the merged adapter. lora_alpha changes the digest of RWKV-PEFT's adapter, but not that of PEFT's."""
    monkeypatch.chdir(tmp_path)
    model = small_model(generation="rwkv7", vocab_size=256)
    model.save_pretrained("base.safetensors", ByteTokenizer())
    parts, _ = lora(model.head.weight.detach().double(), 1.0)
    torch.save({f"head.{part.removesuffix('.weight')}": 9 * tensor for part, tensor in parts.items()}, "rwkv-0.pth")
    write_peft(tmp_path / "peft", {f"base_model.model.head.{part}": 9 * tensor for part, tensor in parts.items()}, lora_alpha=2,
               base_model_name_or_path="base.safetensors")
    run = caller(monkeypatch, capsys)
    request = ("prompt=a", "max_new_tokens=8", "temperature=0", "kernel=reference", "tokenizer=byte")
    texts = []
    for options in (("checkpoint=base.safetensors",), ("checkpoint=base.safetensors", "lora=rwkv-0.pth", "lora_alpha=2"),
                    ("checkpoint=base.safetensors", "lora=peft"), ("checkpoint=peft",)):
        status, output, error = run("generate", *options, *request)
        assert status == 0, error
        assert ("adapter: LoRA of " in error) == (options[0].endswith("peft") or len(options) > 1)
        texts.append(output)
    assert texts[0] != texts[1] == texts[2] == texts[3]
    one_sentence(run("generate", "checkpoint=base.safetensors", "lora=rwkv-0.pth", *request), "lora_alpha=32")
    one_sentence(run("generate", "checkpoint=base.safetensors", "lora_alpha=2", *request), "lora=")
    one_sentence(run("generate", "checkpoint=base.safetensors", "lora=nowhere.pth", *request), "nowhere.pth")
    digests = []
    for alpha in (2.0, 3.0):
        config = ServeConfig(checkpoint="base.safetensors", adapters=["one=rwkv-0.pth,two=peft"], lora_alpha=alpha)
        one, two = read_adapters(config, open_checkpoint(config))
        assert one.merged
        assert two.merged
        assert "PEFT" in two.about
        digests.append((one.digest, two.digest))
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1]
