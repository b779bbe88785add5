"""Tests the names, arrangement, dtypes and unused tensors that other programs expect of RWKV-7 in each format."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from files import NAMES, OFFICIAL, SIZES, as_bytes, hugging_face_tensors
from gguf_files import add_fields, in_parts, write
from models import small_model, tokens, world_vocabulary
from refusals import refuses
from safetensors.torch import load_file, save_file
from tokenizer_files import chatml
from torch import Tensor

from rwkv.checkpoint.files import checkpoint_of, read_checkpoint, tokenizer_of, write_checkpoint
from rwkv.checkpoint.formats import gguf as our_gguf
from rwkv.errors import CheckpointError, UserError
from rwkv.model.rwkv7 import UNUSED
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, WorldTokenizer
from rwkv.tools import convert

TEXT = "Some text, and some more: it's 12 o'clock.\n\n\"Köln\"\t\\n 它 \N{GRINNING FACE}"
BPE = JsonTokenizer.train([TEXT] * 9, 300)
MORE = (b"\n\n", b"it's", b'"', b"'\"", b"\\n", "Köln".encode(), b"\xe5\xae", b" text", b"\\'x41")
WORLD = WorldTokenizer(world_vocabulary(MORE).to_text())


@pytest.fixture(scope="module")
def model() -> RWKV:
    model = small_model("reference", generation="rwkv7", **SIZES["rwkv7"])
    for name in UNUSED:
        model.state_dict()[name].normal_(generator=torch.Generator().manual_seed(2))
    return model


@pytest.fixture(scope="module")
def wide() -> RWKV:
    """Returns a model whose rows are whole blocks of 32, except the rows of ffn.value, which have 80 elements."""
    return small_model("reference", generation="rwkv7", n_embd=64, n_layer=2, n_ffn=80)


def gguf_tensors(path: Path) -> dict[str, Any]:
    """Returns the tensors by name, as the package gguf reads them."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def field(path: Path, key: str) -> Any:
    return gguf.GGUFReader(path).fields[key].contents()


# The official files


def test_sizes_are_read_off_the_tensors(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model.pth")
    assert read_checkpoint(tmp_path / "model.pth").config == replace(model.config, n_ffn=512, ctx_len=1024)


def test_vectors_come_in_two_shapes_and_layer_0_with_or_without_its_unused_tensors(model: RWKV, tmp_path: Path) -> None:
    weights = {name: weight.flatten() if weight.dim() == 3 else weight for name, weight in model.state_dict().items()}
    for name in UNUSED:
        del weights[name]
    torch.save(weights, tmp_path / "other.pth")
    loaded = RWKV.from_pretrained(tmp_path / "other.pth", "reference")
    assert not any(loaded.state_dict()[name].any() for name in UNUSED)
    assert [loaded.state_dict()[name].shape for name in UNUSED] == [model.state_dict()[name].shape for name in UNUSED]
    with torch.no_grad():
        assert torch.equal(loaded(tokens(model))[0], model(tokens(model))[0])


def test_each_format_has_the_unused_tensors_that_its_readers_want(model: RWKV, tmp_path: Path) -> None:
    for format, name in NAMES.items():
        model.save_pretrained(tmp_path / name)
        weights = read_checkpoint(tmp_path / name).weights
        assert all(torch.equal(weights[name], model.state_dict()[name]) == (format in OFFICIAL) for name in UNUSED)
    hugging_face = hugging_face_tensors(tmp_path / NAMES["huggingface"])
    assert not any("layers.0.attn.v_lora" in name for name in hugging_face)
    assert b"blocks.0.att.v0" not in (tmp_path / NAMES["ggmf"]).read_bytes()
    tensors = gguf_tensors(tmp_path / NAMES["gguf"])
    for part in "012":
        assert np.array_equal(tensors[f"blk.0.time_mix_v{part}.weight"].data, tensors[f"blk.0.time_mix_a{part}.weight"].data)


@pytest.mark.parametrize("format", [format for format in NAMES if format != "ggmf"])
def test_the_rank_of_v1_is_kept_in_a_model_of_one_layer(tmp_path: Path, format: str) -> None:
    model = small_model("reference", generation="rwkv7", n_layer=1, **SIZES["rwkv7"])
    model.save_pretrained(tmp_path / NAMES[format])
    assert read_checkpoint(tmp_path / NAMES[format]).config.v_low_rank_dim == model.config.v_low_rank_dim


@pytest.mark.parametrize("rank", ["three", [3], -3, True])
def test_a_rank_that_is_not_a_size_is_refused(tmp_path: Path, rank: Any) -> None:
    """A directory of one layer states the rank of v1 only in config.json, because v1 is unused there."""
    small_model("reference", generation="rwkv7", n_layer=1, **SIZES["rwkv7"]).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"v_low_rank_dim": rank}))
    refuses(tmp_path / "model", "v_low_rank_dim")


@pytest.mark.parametrize(("changed", "part"), [
    ({"blocks.1.att.r_k": torch.zeros(128)}, "blocks.1.att.r_k"), ({"blocks.0.att.r_k": torch.zeros(4, 3)}, "head_size"),
    ({"blocks.0.att.w1": torch.zeros(3, 128)}, "blocks.0.att.w1"),
    ({"blocks.2.att.w2": torch.zeros(4, 128)}, "blocks.2.att.w2"),
    ({"blocks.0.att.a0": torch.zeros(())}, "blocks.0.att.a0"), ({"blocks.0.att.v1": torch.zeros(128, 9)}, "blocks.0.att.v"),
    ({"blocks.0.att.x_rwkvag": torch.zeros(5, 1, 128)}, "x_rwkvag"), ({"blocks.0.att.x_g": torch.zeros(6, 128)}, "x_g")])
def test_wrong_shapes_are_named(model: RWKV, tmp_path: Path, changed: dict[str, Tensor], part: str) -> None:
    torch.save({**model.state_dict(), **changed}, tmp_path / "odd.pth")
    refuses(tmp_path / "odd.pth", part)


# Hugging Face directories and ggmf


def test_a_directory_has_the_layout_of_fla(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    tensors, own = hugging_face_tensors(tmp_path / "model"), model.state_dict()
    assert torch.equal(tensors["model.layers.1.attn.w_lora.lora.0.weight"], own["blocks.1.att.w1"].T)
    assert torch.equal(tensors["model.layers.1.attn.v_lora.lora.2.weight"], own["blocks.1.att.v2"].T)
    assert torch.equal(tensors["model.layers.1.attn.a_lora.lora.2.bias"], own["blocks.1.att.a0"].flatten())
    assert "model.layers.1.attn.g_lora.lora.2.bias" not in tensors
    shapes = {"embeddings.weight": (50, 128), "layers.0.pre_norm.bias": (128,), "layers.2.attn.x_g": (1, 1, 128),
              "layers.2.attn.k_a": (128,), "layers.2.attn.r_k": (2, 64), "layers.2.ffn.x_k": (128,), "norm.weight": (128,),
              "layers.2.attn.g_norm.weight": (128,), "layers.0.attn.o_proj.weight": (128, 128),
              "layers.1.ffn_norm.bias": (128,)}
    assert {name: tuple(tensors[f"model.{name}"].shape) for name in shapes} == shapes
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    fields = {"model_type": "rwkv7", "hidden_size": 128, "num_hidden_layers": 3, "head_dim": 64, "intermediate_size": 512,
              "decay_low_rank_dim": 5, "a_low_rank_dim": 4, "v_low_rank_dim": 3, "gate_low_rank_dim": 6, "norm_eps": 1e-5,
              "vocab_size": 50, "max_position_embeddings": 32, "architectures": ["RWKV7ForCausalLM"]}
    assert fields.items() <= config.items()


def test_flas_file_without_its_directory_is_read(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    save_file({f"module.{name}": tensor for name, tensor in hugging_face_tensors(tmp_path / "model").items()},
              tmp_path / "alone.safetensors")
    weights = read_checkpoint(tmp_path / "alone.safetensors").weights
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items() if name not in UNUSED)


@pytest.mark.parametrize("shape", [(6, 128), (6, 1, 1, 128)])
def test_flas_first_version_joined_the_mixes(model: RWKV, tmp_path: Path, shape: tuple[int, ...]) -> None:
    model.save_pretrained(tmp_path / "model")
    tensors = hugging_face_tensors(tmp_path / "model")
    for layer in range(3):
        parts = [tensors.pop(f"model.layers.{layer}.attn.x_{letter}") for letter in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = torch.cat(parts).view(shape)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    weights = read_checkpoint(tmp_path / "model").weights
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items() if name not in UNUSED)


def test_mlxs_vectors_have_a_row_per_head(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    by_head = ("attn.k_k", "attn.k_a", "attn.g_norm.weight", "attn.g_norm.bias")
    tensors = {name: tensor.view(-1, 64) if name.endswith(by_head) else tensor
               for name, tensor in hugging_face_tensors(tmp_path / "model").items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "mlx"})
    weights = read_checkpoint(tmp_path / "model").weights
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items() if name not in UNUSED)


def test_the_world_vocabulary_lies_in_a_directory(tmp_path: Path) -> None:
    model = small_model("reference", WORLD.vocab_size, generation="rwkv7", **SIZES["rwkv7"])
    model.save_pretrained(tmp_path / "model", WORLD)
    tensors = {name: tensor.clone() for name, tensor in hugging_face_tensors(tmp_path / "model").items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")     # removes the entry of timemix
    assert Tokenizer.from_dict(read_checkpoint(tmp_path / "model").tokenizer).hash == WORLD.hash


def test_web_rwkvs_file_is_read(model: RWKV, tmp_path: Path) -> None:
    """The file is in float16, and its low-rank matrices are transposed."""
    low_rank = tuple(f".att.{name}{part}" for name in "wavg" for part in "12")
    weights = {name: (weight.T if name.endswith(low_rank) else weight).half().contiguous()
               for name, weight in model.state_dict().items()}
    save_file(weights, tmp_path / "model.st")
    loaded = RWKV.from_pretrained(tmp_path / "model.st", "reference")
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float()), name


def test_web_rwkvs_file_is_written(model: RWKV, tmp_path: Path) -> None:
    """The file is in float16, as web-rwkv's converter writes it. Reading it and writing it again changes no bit."""
    model.save_pretrained(tmp_path / "model.st")
    low_rank = tuple(f".att.{name}{part}" for name in "wavg" for part in "12")
    tensors = load_file(tmp_path / "model.st")
    weights = model.state_dict()
    assert tensors.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(tensors[name], (weight.T if name.endswith(low_rank) else weight).half()), name
    checkpoint = read_checkpoint(tmp_path / "model.st")
    assert all(torch.equal(checkpoint.weights[name], weight.half()) for name, weight in weights.items())
    write_checkpoint(checkpoint, tmp_path / "again.st", "float16")
    assert (tmp_path / "again.st").read_bytes() == (tmp_path / "model.st").read_bytes()
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(UserError, match="float16"):
            model.save_pretrained(tmp_path / "other.st", dtype=dtype)
    with pytest.raises(UserError, match=r"head\.weight"):
        write_checkpoint(checkpoint_of({**weights, "head.weight": weights["head.weight"] * 1e6}), tmp_path / "other.st")
    assert not (tmp_path / "other.st").exists()


def test_ggmf_is_rwkv_cpps(model: RWKV, tmp_path: Path) -> None:
    """Names, shapes and types are those of rwkv.cpp's converter, python/convert_pytorch_to_ggml.py."""
    model.save_pretrained(tmp_path / "model.bin", dtype="float16")
    content, own = (tmp_path / "model.bin").read_bytes(), model.state_dict()
    joined = torch.cat([own[f"blocks.1.att.x_{letter}"] for letter in "rwkvag"])
    for name, tensor in {"x_rwkvag": joined, "k_k": own["blocks.1.att.k_k"], "r_k": own["blocks.1.att.r_k"],
                         "w1": own["blocks.1.att.w1"].T.half(), "g2": own["blocks.1.att.g2"].T.half()}.items():
        key = f"blocks.1.att.{name}".encode()
        header = struct.pack("=3i", tensor.dim(), len(key), tensor.dtype == torch.float16)
        assert header + struct.pack(f"={tensor.dim()}i", *reversed(tensor.shape)) + key + as_bytes(tensor) in content
    assert b"att.x_r\0" not in content


# GGUF


def test_gguf_is_llama_cpps(model: RWKV, tmp_path: Path) -> None:
    """Names and arrangement are those of llama.cpp's conversion/rwkv.py. The package gguf lists the innermost axis first."""
    model.save_pretrained(tmp_path / "model.gguf")
    tensors, own = gguf_tensors(tmp_path / "model.gguf"), model.state_dict()
    joined = torch.stack([own[f"blocks.1.att.x_{letter}"] for letter in "rwkvag"])
    expected = {"blk.1.time_mix_lerp_fused.weight": joined, "blk.1.time_mix_w1.weight": own["blocks.1.att.w1"].T,
                "blk.1.time_mix_r_k.weight": own["blocks.1.att.r_k"].flatten(), "output.weight": own["head.weight"],
                "blk.1.time_mix_w0.weight": own["blocks.1.att.w0"].flatten(), "token_embd_norm.bias": own["blocks.0.ln0.bias"],
                "blk.1.channel_mix_lerp_k.weight": own["blocks.1.ffn.x_k"].flatten(),
                "blk.1.attn_norm_2.weight": own["blocks.1.ln2.weight"], "blk.1.time_mix_ln.bias": own["blocks.1.att.ln_x.bias"],
                "blk.1.time_mix_receptance.weight": own["blocks.1.att.receptance.weight"]}
    for name, tensor in expected.items():
        assert tuple(tensors[name].shape) == tuple(reversed(tensor.shape)), name
        assert np.array_equal(tensors[name].data, tensor), name
    fields = {"block_count": 3, "embedding_length": 128, "feed_forward_length": 512, "wkv.head_size": 64,
              "context_length": 1 << 20, "attention.head_count": 0, "attention.decay_lora_rank": 5,
              "attention.iclr_lora_rank": 4, "attention.value_residual_mix_lora_rank": 3, "attention.gate_lora_rank": 6}
    assert {key: field(tmp_path / "model.gguf", f"rwkv7.{key}") for key in fields} == fields
    assert field(tmp_path / "model.gguf", "general.architecture") == "rwkv7"


def test_a_merged_file_is_whole_and_a_part_is_not(model: RWKV, tmp_path: Path) -> None:
    """llama-gguf-split --merge writes split.count 0."""
    model.save_pretrained(tmp_path / "model.gguf")
    rewrite(tmp_path / "model.gguf", tmp_path / "merged.gguf", "split.count", 0, gguf.GGUFValueType.UINT16)
    assert read_checkpoint(tmp_path / "merged.gguf").config == read_checkpoint(tmp_path / "model.gguf").config
    rewrite(tmp_path / "model.gguf", tmp_path / "part.gguf", "split.count", 2, gguf.GGUFValueType.UINT16)
    refuses(tmp_path / "part.gguf", "2 parts", "00002.gguf")


@pytest.mark.parametrize("options", [{}, {"small_first_shard": True}])
def test_a_model_in_parts_is_read_from_any_of_them(model: RWKV, tmp_path: Path, options: dict[str, Any]) -> None:
    model.save_pretrained(tmp_path / "model.gguf", dtype="q8_0")
    whole = read_checkpoint(tmp_path / "model.gguf")
    parts = in_parts(tmp_path / "model.gguf", tmp_path / "parts", 40, **options)
    assert len(parts) > 2
    for part in parts:
        actual = read_checkpoint(part)
        assert actual.config == whole.config
        assert all(torch.equal(actual.weights[name], whole.weights[name]) for name in whole.weights)


def test_parts_that_do_not_belong_together_are_refused(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model.gguf")
    parts = in_parts(tmp_path / "model.gguf", tmp_path / "parts", 40)
    other = in_parts(tmp_path / "model.gguf", tmp_path / "other", 20)
    original = parts[1].read_bytes()
    parts[1].write_bytes(other[1].read_bytes())
    assert len(other) != len(parts)
    refuses(parts[1], f"{len(other)} parts")
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointError):
        read_checkpoint(parts[0])
    parts[1].write_bytes(b"<html>404 Not Found</html>")
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(parts[0])
    assert f"{parts[1].name} is not a GGUF file" in str(error.value)
    parts[1].write_bytes(original)
    parts[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(parts[0])
    assert parts[2].name in str(error.value)
    refuses(tmp_path / "elsewhere.gguf", f"{len(parts)} parts")


def test_an_architecture_that_is_not_a_string_is_refused(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model.gguf")
    rewrite(tmp_path / "model.gguf", tmp_path / "odd.gguf", "general.architecture", [1, 2], gguf.GGUFValueType.ARRAY)
    refuses(tmp_path / "odd.gguf", "[1, 2]", "rwkv7")


def rewrite(path: Path, target: Path, key: str, value: Any, kind: gguf.GGUFValueType) -> None:
    """Copies the file with the package gguf, and adds or changes `key`."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(target, "rwkv7")
    add_fields(writer, reader, but=(key,))
    del writer.kv_data[0]["general.architecture"]
    if key != "general.architecture":
        writer.add_architecture()
    writer.add_key_value(key, value, kind, gguf.GGUFValueType.INT32 if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write(writer)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0"])
def test_the_types_in_gguf_are_those_of_llama_cpps_quantizer(wide: RWKV, tmp_path: Path, dtype: str) -> None:
    wide.save_pretrained(tmp_path / "model.gguf", dtype=dtype)
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    low_rank = "F32" if dtype == "q8_0" else kind
    types = {"token_embd.weight": kind, "output.weight": kind, "blk.1.time_mix_key.weight": kind, "output_norm.weight": "F32",
             "blk.1.channel_mix_value.weight": "F16" if dtype == "q8_0" else kind, "blk.1.time_mix_lerp_fused.weight": "F32",
             "blk.1.time_mix_w1.weight": "F32", "blk.1.time_mix_w2.weight": "F32", "blk.1.time_mix_a1.weight": low_rank,
             "blk.1.time_mix_g2.weight": low_rank, "blk.1.time_mix_r_k.weight": "F32", "blk.1.time_mix_w0.weight": "F32"}
    tensors = gguf_tensors(tmp_path / "model.gguf")
    assert {name: tensors[name].tensor_type.name for name in types} == types
    assert field(tmp_path / "model.gguf", "general.file_type") == gguf.LlamaFileType[
        {"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")].value


def test_q8_0_is_read_as_the_package_reads_it_and_rewritten_bit_for_bit(wide: RWKV, tmp_path: Path) -> None:
    wide.save_pretrained(tmp_path / "model.gguf", dtype="q8_0")
    checkpoint = read_checkpoint(tmp_path / "model.gguf")
    tensors = gguf_tensors(tmp_path / "model.gguf")["blk.1.channel_mix_key.weight"]
    assert np.array_equal(checkpoint.weights["blocks.1.ffn.key.weight"], gguf.dequantize(tensors.data, tensors.tensor_type))
    for name, weight in checkpoint.weights.items():
        if name not in UNUSED:
            assert (weight - wide.state_dict()[name]).abs().max() <= wide.state_dict()[name].abs().max() / 127 * 0.51
    write_checkpoint(checkpoint, tmp_path / "again.gguf", "q8_0")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize("tokenizer", [BPE, WORLD], ids=["bpe", "world"])
@pytest.mark.parametrize("spare", [0, 7])
def test_a_tokenizer_is_stored_in_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer,
                                       spare: int) -> None:
    """The tokenizer is also read from a file without the keys that llama.cpp's converter does not write."""
    model = small_model("reference", tokenizer.vocab_size + spare, generation="rwkv7", n_layer=1)
    model.save_pretrained(tmp_path / "model.gguf", tokenizer)
    checkpoint = read_checkpoint(tmp_path / "model.gguf")
    assert (checkpoint.config, Tokenizer.from_dict(checkpoint.tokenizer).hash) == (model.config, tokenizer.hash)
    content = (tmp_path / "model.gguf").read_bytes()
    for key in (b"tokenizer.huggingface.json", b"timemix"):
        content = content.replace(key, key[::-1])
    (tmp_path / "theirs.gguf").write_bytes(content)
    theirs = Tokenizer.from_dict(read_checkpoint(tmp_path / "theirs.gguf").tokenizer)
    assert theirs.hash == tokenizer.hash
    assert theirs.decode(theirs.encode(TEXT)) == TEXT
    texts = field(tmp_path / "model.gguf", "tokenizer.ggml.tokens")
    assert len(texts) == len(set(texts)) == model.vocab_size


def test_a_directory_with_the_world_vocabulary_ends_texts_with_0(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    small_model("reference", WORLD.vocab_size).save_pretrained(folder, WORLD)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 2}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert tokenizer_of(read_checkpoint(folder)).ends == (0,)


def test_the_tokens_that_end_a_text_are_stored_in_gguf(tmp_path: Path) -> None:
    """The end-of-turn token is read as well, even from a file of llama.cpp's converter."""
    definition = {"kind": "json", "definition": chatml(["<|bos|>", "<|end_of_text|>", "<|eot_id|>"]), "end_of_text": [1, 2]}
    tokenizer = Tokenizer.from_dict(definition)
    model = small_model("reference", tokenizer.vocab_size, generation="rwkv7", n_layer=1)
    model.save_pretrained(tmp_path / "model.gguf", tokenizer)
    assert [field(tmp_path / "model.gguf", f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")] == [1, 2]
    content = (tmp_path / "model.gguf").read_bytes()
    theirs = content.replace(b"timemix", b"xxxxxxx").replace(b"huggingface.json", b"other_tokenizer.")
    (tmp_path / "theirs.gguf").write_bytes(theirs)
    for name in ("model.gguf", "theirs.gguf"):
        assert tokenizer_of(read_checkpoint(tmp_path / name)).ends == (1, 2)
    assert tokenizer_of(read_checkpoint(tmp_path / "model.gguf")).to_dict() == tokenizer.to_dict()
    content = content.replace(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.sep_token_id")
    (tmp_path / "open.gguf").write_bytes(content.replace(b"tokenizer.ggml.eot_token_id", b"tokenizer.ggml.cls_token_id"))
    assert tokenizer_of(read_checkpoint(tmp_path / "open.gguf")).ends == (1,)


def bpe_with(**parts: Any) -> JsonTokenizer:
    return JsonTokenizer(json.dumps(json.loads(BPE.definition) | parts))


@pytest.mark.parametrize(("tokenizer", "part"), [
    (ByteTokenizer(), "byte"), (bpe_with(normalizer={"type": "NFC"}), "normalizer"),
    (bpe_with(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
     "pre_tokenizer"), (bpe_with(pre_tokenizer=None), "pre_tokenizer")])
def test_other_tokenizers_are_refused_before_anything_is_written(tmp_path: Path, tokenizer: Tokenizer, part: str) -> None:
    model = small_model("reference", tokenizer.vocab_size, generation="rwkv7", n_layer=1)
    with pytest.raises(UserError) as error:
        model.save_pretrained(tmp_path / "model.gguf", tokenizer)
    assert part in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("old", "new", "part"), [
    (b"GGUF\3", b"GGUF\4", "got 4"), (b"\5\0\0\0\0\0\0\0rwkv7", b"\5\0\0\0\0\0\0\0llama", "llama"),
    (b"gpt2", b"bert", "bert"), (b"gpt-2", b"llama", "llama"),
    (b"wkv.head_size\4\0\0\0\x08", b"wkv.head_size\4\0\0\0\x04", "head_size=8"),
    (b"blk.1.time_mix_w0.weight", b"blk.1.time_mix_w9.weight", "blocks.1.att.w0"),
    (b"token_embd.weight\2\0\0\0\x10", b"token_embd.weight\2\0\0\0\x11", "got 17"),
    (b"output_norm.bias\1\0\0\0", b"output_norm.bias\x09\0\0\0", "got 9"),
    (b"output_norm.bias\1\0\0\0\x10\0\0\0\0\0\0\0\0", b"output_norm.bias\1\0\0\0\x10\0\0\0\0\0\0\0\x0c", "Q4_K"),
    (b"tokenizer.ggml.tokens\x09\0\0\0\x08\0\0\0", b"tokenizer.ggml.tokens\x09\0\0\0\x0d\0\0\0", "type 13")])
def test_a_gguf_header_that_is_wrong_is_refused(tmp_path: Path, old: bytes, new: bytes, part: str) -> None:
    model = small_model("reference", BPE.vocab_size, generation="rwkv7")
    model.save_pretrained(tmp_path / "model.gguf", BPE)
    content = (tmp_path / "model.gguf").read_bytes().replace(b"huggingface.json", b"other_tokenizer.")
    assert old in content
    (tmp_path / "model.gguf").write_bytes(content.replace(old, new))
    refuses(tmp_path / "model.gguf", part)


def test_gguf_has_no_rwkv4(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        small_model("reference").save_pretrained(tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_remedy(model: RWKV, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model.save_pretrained(tmp_path / "model.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError) as error:
        model.save_pretrained(tmp_path / "other.gguf")
    assert "pip install" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert our_gguf.read(tmp_path / "model.gguf").tensors            # reading needs no package


def test_convert_quantises_and_adds_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model("reference", WORLD.vocab_size, generation="rwkv7").save_pretrained(tmp_path / "in.pth")
    (tmp_path / "vocabulary.txt").write_text(WORLD.to_dict()["vocabulary"])
    convert.main([str(tmp_path / "in.pth"), str(tmp_path / "out.gguf"), "--dtype", "q8_0",
                  "--tokenizer", str(tmp_path / "vocabulary.txt")])
    assert read_checkpoint(tmp_path / "out.gguf").tokenizer == WORLD.to_dict()
    with pytest.raises(SystemExit):
        convert.main([str(tmp_path / "in.pth"), str(tmp_path / "out.safetensors"), "--dtype", "q8_0"])
    assert "q8_0" in capsys.readouterr().err.splitlines()[-1]
