"""Tests conversion between all formats, and agreement with the formats' own libraries and documents."""

import copy
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from files import NAMES, OFFICIAL, SIZES, as_bytes, each_held, hugging_face_tensors, same_tensors, shard
from models import small_model, tokens, world_vocabulary
from refusals import refuses
from safetensors.torch import load_file, save_file
from tokenizer_files import chatml, sentencepiece_bpe
from torch import Tensor

from kernels.select import select
from rwkv.chat.metadata import generation_in, special_tokens_for, template_file, template_in, tool_template_in
from rwkv.chat.names import default_template, template_of_series
from rwkv.checkpoint import formats
from rwkv.checkpoint.files import WORLD_VOCABULARY, checkpoint_of, read_checkpoint, tokenizer_of, write_checkpoint
from rwkv.checkpoint.formats import ggmf
from rwkv.errors import CheckpointError, UserError
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer, WorldTokenizer
from rwkv.tools import convert

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def model() -> RWKV:
    return small_model("reference", n_att=8, n_ffn=24)


@pytest.fixture(scope="module")
def models(model: RWKV) -> dict[str, RWKV]:
    """Returns one model of each architecture."""
    return {"rwkv4": model, "rwkv7": small_model("reference", generation="rwkv7", n_ffn=24, **SIZES["rwkv7"])}


def test_the_folder_is_the_registry() -> None:
    files = {**NAMES, "st": "model.st"}
    assert set(formats.names()) == set(files)
    for name, file in files.items():
        assert formats.by_suffix(Path(file)) == name
    with pytest.raises(UserError):
        formats.load("onnx")


# Round trips


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "every"), [
    ("float32", False), *(pytest.param(name, True, marks=pytest.mark.soak) for name in ("float32", "bfloat16", "float16"))])
@each_held
def test_conversions_between_all_formats_change_no_bit(models: dict[str, RWKV], tmp_path: Path, generation: str, format: str,
                                                       dtype: str, every: bool) -> None:
    """Unless `every` is True, tests only conversions from pth, to pth, and of a format to itself."""
    if format == "ggmf" and dtype == "bfloat16":
        pytest.skip("ggmf holds no bfloat16")
    model = models[generation]
    model.save_pretrained(tmp_path / NAMES[format], dtype=dtype)
    first = read_checkpoint(tmp_path / NAMES[format])
    for target, name in NAMES.items():
        if (target, dtype) == ("ggmf", "bfloat16") or (target, generation) == ("gguf", "rwkv4"):
            continue
        if not every and "pth" not in (format, target) and format != target:
            continue
        (tmp_path / target).mkdir()
        write_checkpoint(first, tmp_path / target / name)
        second = read_checkpoint(tmp_path / target / name)
        write_checkpoint(second, tmp_path / target / NAMES["pth"])
        if target in OFFICIAL:
            assert same_tensors(first.weights, second.weights)
        else:
            common = [name for name in first.weights if name not in model.generation.UNUSED]
            assert all(same_stored_tensor(target, name, first.weights[name], second.weights[name]) for name in common)
        assert same_tensors(read_checkpoint(tmp_path / target / NAMES["pth"]).weights, second.weights)


def same_stored_tensor(format: str, name: str, one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are bit-identical, except vectors in float32 (ggmf, GGUF) and rounded decays (ggmf)."""
    if format == "ggmf" and name.endswith("time_decay"):
        return torch.equal(ggmf.stored_decay(one.float()), ggmf.stored_decay(other.float()))
    widened = format in ("ggmf", "gguf") and other.dtype == torch.float32
    return torch.equal(one.float(), other.float()) and (widened or one.dtype == other.dtype)


@each_held
def test_a_loaded_model_computes_the_same(models: dict[str, RWKV], tmp_path: Path, generation: str, format: str) -> None:
    model = models[generation]
    model.save_pretrained(tmp_path / NAMES[format])
    loaded = RWKV.from_pretrained(tmp_path / NAMES[format], "reference")
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[format]]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens(model))[0], model(tokens(model))[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("abü"), JsonTokenizer.train(["some text"] * 9, 280)])
@pytest.mark.parametrize("name", [NAMES["ckpt"], NAMES["safetensors"], NAMES["huggingface"]])
def test_tokenizer_and_configuration_survive_a_conversion(tmp_path: Path, tokenizer: Any, name: str) -> None:
    model = small_model("reference", tokenizer.vocab_size)
    model.save_pretrained(tmp_path / name, tokenizer)
    checkpoint = read_checkpoint(tmp_path / name)
    actual = checkpoint.config, checkpoint.tokenizer, checkpoint.tokenizer_hash
    assert actual == (model.config, tokenizer.to_dict(), tokenizer.hash)


@pytest.mark.parametrize("targets", [("out",), ("out.gguf",), ("out.gguf", "out"), ("model",)], ids="-".join)
def test_the_chat_template_and_the_sampling_options_survive_a_conversion(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """The last target replaces the source itself."""
    source = tmp_path / "model"
    small_model(generation="rwkv7", vocab_size=300, **SIZES["rwkv7"]).save_pretrained(source)
    save_file(hugging_face_tensors(source), source / "model.safetensors")        # as another program writes the directory
    (source / "tokenizer.json").write_text(chatml())
    (source / "chat_template.jinja").write_text("{{ messages }}{{ unk_token }}")
    (source / "tokenizer_config.json").write_text('{"unk_token": "<unknown>", "mask_token": "<mask>"}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (source / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.5, "top_k": 7,
                                                               "eos_token_id": [2], "pad_token_id": 0}))
    ends = tokenizer_of(read_checkpoint(source)).ends
    for target in targets:
        convert.convert(source, tmp_path / target)
        source = tmp_path / target
    file = template_file(source)
    assert file is not None
    assert (template_in(file), tool_template_in(file)) == ("{{ messages }}{{ unk_token }}", "{{ tools }}")
    if targets in (("out",), ("model",)):
        assert special_tokens_for(file)["unk_token"] == "<unknown>"
    assert generation_in(source).sampling == {"temperature": 0.5, "top_k": 7}
    assert tokenizer_of(read_checkpoint(source)).ends == ends == (2,)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_loaded_and_saved_model_keeps_its_chat_template_and_sampling_options(tmp_path: Path, trainable: bool) -> None:
    model = small_model(generation="rwkv7", vocab_size=300, **SIZES["rwkv7"])
    source = tmp_path / "RWKV7-G1d-20260129"
    model.save_pretrained(source)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text(json.dumps({"stop_strings": ["###"], "repetition_penalty": 1.5}))
    for target in ("out.gguf", "out", "out"):            # the last target replaces the source itself
        loaded = RWKV.from_pretrained(source, "reference", trainable=trainable)
        tokenizer = JsonTokenizer(chatml()) if target == "out.gguf" else None
        copy.deepcopy(loaded).save_pretrained(tmp_path / target, tokenizer)
        if target == "out.gguf":
            assert template_in(tmp_path / target) == "{{ messages }}"
            assert generation_in(tmp_path / target).sampling == {"repetition_penalty": 1.5}
            continue
        assert template_in(tmp_path / target / "chat_template.jinja") == "{{ messages }}"
        assert generation_in(tmp_path / target).stop == ("###",)
        source = tmp_path / target
    assert template_of_series(str(source)).template == "g1"


@pytest.mark.parametrize("target", ["out.gguf", "out"])
def test_a_converted_model_still_belongs_to_its_series(tmp_path: Path, target: str) -> None:
    source = tmp_path / "rwkv7-g1d-0.1b-20260129-ctx8192.pth"
    small_model(generation="rwkv7", vocab_size=300, **SIZES["rwkv7"]).save_pretrained(source)
    assert default_template(str(tmp_path / target)).template == "world"
    convert.convert(source, tmp_path / target)
    (tmp_path / target).rename(tmp_path / f"model{Path(target).suffix}")
    assert default_template(str(tmp_path / f"model{Path(target).suffix}")).template == "g1"


@pytest.mark.parametrize("target", ["out.gguf", "out"])
def test_a_file_for_other_programs_gets_the_tokenizer_that_our_programs_assume(tmp_path: Path, target: str,
                                                                               capsys: pytest.CaptureFixture[str]) -> None:
    """llama.cpp and transformers cannot use a file without a tokenizer. Programs here assume the World vocabulary."""
    pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer, which carries the vocabulary, is not installed")
    sizes = {"n_layer": 1, "n_embd": 64}
    small_model(generation="rwkv7", vocab_size=WORLD_VOCABULARY, **sizes).save_pretrained(tmp_path / "model.pth")
    small_model(generation="rwkv7", vocab_size=300, **sizes).save_pretrained(tmp_path / "small.pth")
    convert.convert(tmp_path / "model.pth", tmp_path / target)
    assert "tokenizer: world" in capsys.readouterr().err
    converted = read_checkpoint(tmp_path / target)
    assert converted.tokenizer is not None
    assert tokenizer_of(converted).kind == "world"
    convert.convert(tmp_path / "small.pth", tmp_path / f"small-{target}")
    assert "--tokenizer" in capsys.readouterr().err


def test_a_chat_template_that_nobody_else_has_is_not_replaced(model: RWKV, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """The converter reports a template that the format cannot store."""
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    convert.convert(tmp_path / "model", tmp_path / "model.safetensors")
    assert "chat_template.jinja" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"chat_template\.jinja"):
        convert.convert(tmp_path / "model.safetensors", tmp_path / "model")


@pytest.mark.parametrize(("names", "end"), [(["<|endoftext|>"], 0), (["<pad>", "<|endoftext|>"], 1), (["</s>"], 0)], ids=str)
def test_a_directory_names_the_token_that_ends_a_text(tmp_path: Path, names: list[str], end: int) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.train_from_iterator(["some text"], tokenizers.trainers.BpeTrainer(special_tokens=names, show_progress=False))
    tokenizer = JsonTokenizer(library.to_str())
    small_model("reference", tokenizer.vocab_size).save_pretrained(tmp_path / "model", tokenizer)
    config, tokenizer_config = (json.loads((tmp_path / "model" / name).read_text())
                                for name in ("config.json", "tokenizer_config.json"))
    assert config["eos_token_id"] == config["bos_token_id"] == tokenizer.end_of_text == end
    assert tokenizer_config["eos_token"] == tokenizer_config["bos_token"] == names[end]


STATED: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (2,)),                                          # </s> is the only known name
    ({"tokenizer_config.json": {"eos_token": "<s>"}}, (1,)),
    ({"tokenizer_config.json": {"eos_token": {"content": "<s>"}}, "special_tokens_map.json": {"eos_token": "</s>"}}, (1,)),
    ({"special_tokens_map.json": {"eos_token": "<s>"}}, (1,)),
    ({"config.json": {"eos_token_id": 1}, "tokenizer_config.json": {"eos_token": "</s>"}}, (1,)),
    ({"config.json": {"eos_token_id": [1, 2]}}, (1, 2)),
    ({"generation_config.json": {"eos_token_id": [2, 1]}, "config.json": {"eos_token_id": 0}}, (2, 1)),
    ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 1}}, (1,)),
    ({"config.json": {"eos_token_id": 9}}, (2,)),        # configuration classes have such an id, of a byte, by default
    ({"config.json": {"eos_token_id": 10 ** 6}, "tokenizer_config.json": {"eos_token": "<none>"}}, (2,)),
    ({"config.json": {"eos_token_id": True}, "generation_config.json": {"eos_token_id": "2"}}, (2,))]


@pytest.mark.parametrize(("declared", "ends"), [pytest.param(*each, marks=[pytest.mark.thorough] * (number % 2), id=str(each))
                                                for number, each in enumerate(STATED)])
def test_a_directory_says_what_ends_a_text(tmp_path: Path, declared: dict[str, Any], ends: tuple[int, ...]) -> None:
    """The files have the precedence that transformers gives them. A conversion keeps one end token or a list."""
    folder = tmp_path / "model"
    vocab_size = JsonTokenizer(sentencepiece_bpe()).vocab_size
    small_model("reference", vocab_size).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    for name, content in ({"config.json": {}} | declared).items():
        (folder / name).write_text(json.dumps((config if name == "config.json" else {}) | content))
    (folder / "tokenizer.json").write_text(sentencepiece_bpe())
    tokenizer = tokenizer_of(read_checkpoint(folder))
    assert tokenizer.ends == ends
    for name in ("again", "again.safetensors", "again.ckpt"):
        convert.convert(folder, tmp_path / name)
        again = tokenizer_of(read_checkpoint(tmp_path / name))
        assert (again.ends, again.hash) == (ends, tokenizer.hash)
    new_config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert new_config["eos_token_id"] == (list(ends) if len(ends) > 1 else ends[0])
    assert tokenizer_of(read_checkpoint(folder), str(folder / "tokenizer.json")).ends == ends
    assert tokenizer_of(read_checkpoint(folder), end_of_text="<s>").ends == (1,)


@each_held
def test_the_storage_of_a_weight_is_not_the_whole_mapped_file(tmp_path: Path, generation: str, format: str) -> None:
    """torch.save and pickle write the whole storage of each tensor."""
    path = tmp_path / NAMES[format]
    small_model("reference", generation=generation, **SIZES[generation]).save_pretrained(path)
    for name, weight in RWKV.from_pretrained(path, "reference").state_dict().items():        # some formats join vectors
        assert weight.untyped_storage().nbytes() <= 10 * weight.nbytes, name


def test_a_folder_of_other_files_is_refused_for_its_own_files_before_those_of_its_folders(tmp_path: Path) -> None:
    """A home folder has millions of files."""
    for name in ("a/b/file", "z"):
        (tmp_path / "home" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "home" / name).touch()
    with pytest.raises(UserError, match=r"home contains z,"):
        small_model().save_pretrained(tmp_path / "home")
    (tmp_path / "home" / "z").unlink()
    with pytest.raises(UserError, match=r"home contains a/b/file,"):
        small_model().save_pretrained(tmp_path / "home")


def test_edits_of_the_tokenizer_in_a_written_directory_are_read(tmp_path: Path) -> None:
    """The tokenizer in the file of weights is used only if nobody has edited the tokenizer's own files."""
    folder = tmp_path / "model"
    tokenizer = JsonTokenizer(sentencepiece_bpe(), end_of_text="</s>")
    small_model("reference", tokenizer.vocab_size + 1).save_pretrained(folder, tokenizer)
    config, written = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    (folder / "tokenizer.json").write_text(json.dumps(written, indent=2))
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.notes, checkpoint.tokenizer_hash) == ([], tokenizer.hash)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 2]}))
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.notes, checkpoint.tokenizer_hash) == ([], tokenizer.hash)
    assert tokenizer_of(checkpoint).ends == (1, 2)
    written["added_tokens"].append({**written["added_tokens"][0], "id": tokenizer.vocab_size, "content": "<|im_end|>"})
    (folder / "tokenizer.json").write_text(json.dumps(written))
    checkpoint = read_checkpoint(folder)
    assert tokenizer_of(checkpoint).special["<|im_end|>"] == tokenizer.vocab_size
    assert "tokenizer" in checkpoint.notes[0]


def test_a_special_token_is_added_to_the_world_vocabulary_of_a_written_directory(tmp_path: Path) -> None:
    vocabulary = world_vocabulary([b"ab"])
    world = WorldTokenizer(vocabulary.to_text())
    free = len(vocabulary.tokens)
    small_model("reference", world.vocab_size).save_pretrained(tmp_path / "model", world)
    listed = {str(free): {"content": "<|im_end|>", "special": True}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    checkpoint = read_checkpoint(tmp_path / "model")
    assert (checkpoint.notes, checkpoint.tokenizer_hash) == ([], world.hash)
    assert tokenizer_of(checkpoint).special == {"<|im_end|>": free}


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_that_says_what_ends_a_text_is_named(tmp_path: Path, name: str) -> None:
    small_model("reference", 300).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(sentencepiece_bpe())
    (tmp_path / "model" / name).write_text('{"eos_token')
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "model")
    assert name in str(error.value)


def test_a_directory_that_leaves_the_end_of_a_text_open_needs_the_option(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    definition = chatml(["<x>", "<pad>"], first=False)
    small_model("reference", 280).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(definition)
    with pytest.raises(UserError):
        tokenizer_of(read_checkpoint(folder))
    named = tokenizer_of(read_checkpoint(folder), end_of_text="<x>")
    assert named.ends == (named.special["<x>"],)
    convert.convert(folder, tmp_path / "again", end_of_text="<x>")
    assert tokenizer_of(read_checkpoint(tmp_path / "again")).ends == named.ends


# .pth


def test_a_pth_is_what_torch_and_unzip_expect(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "one.pth", dtype="bfloat16")
    model.save_pretrained(tmp_path / "two.pth", dtype="bfloat16")
    assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "one.pth", weights_only=True, mmap=mmap)
        assert list(loaded) == list(model.state_dict())
        assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in loaded.values())
        assert torch.equal(loaded["head.weight"], model.head.weight.bfloat16())
    with zipfile.ZipFile(tmp_path / "one.pth") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("prefix", ["_forward_module.", "module.", "model.", "_forward_module.model."])
def test_a_prefix_is_removed(model: RWKV, tmp_path: Path, prefix: str) -> None:
    torch.save({prefix + name: tensor for name, tensor in model.state_dict().items()}, tmp_path / "model.pth")
    assert list(read_checkpoint(tmp_path / "model.pth").weights) == list(model.state_dict())


def test_a_foreign_lightning_checkpoint_is_read(model: RWKV, tmp_path: Path) -> None:
    content = {"state_dict": {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, "global_step": 7}
    torch.save(content, tmp_path / "model.ckpt")
    checkpoint = read_checkpoint(tmp_path / "model.ckpt")
    assert (checkpoint.step, checkpoint.tokenizer, checkpoint.vocab_size) == (7, None, 50)


def test_a_flipped_bit_is_found_by_the_checksum(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model.pth")
    content = bytearray((tmp_path / "model.pth").read_bytes())
    content[content.index(model.head.weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "model.pth").write_bytes(content)
    refuses(tmp_path / "model.pth", "CRC-32")


def test_a_few_bytes_that_claim_terabytes_are_refused(model: RWKV, tmp_path: Path) -> None:
    weights = dict(model.state_dict()) | {"emb.weight": torch.zeros(1).expand(2 ** 21, 2 ** 20)}
    torch.save(weights, tmp_path / "model.pth")
    refuses(tmp_path / "model.pth", "emb.weight", "(2097152, 1048576)")


def test_a_compressed_zip_is_refused(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model.pth")
    with zipfile.ZipFile(tmp_path / "model.pth") as archive, \
            zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in archive.namelist():
            bomb.writestr(name, archive.read(name))
    refuses(tmp_path / "bomb.pth", "compressed")


# .safetensors and Hugging Face directories


def test_safetensors_own_library_agrees(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "ours.safetensors", dtype="float16")
    weights = read_checkpoint(tmp_path / "ours.safetensors").weights
    theirs = load_file(tmp_path / "ours.safetensors")
    assert theirs.keys() == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in theirs.items())
    save_file(theirs, tmp_path / "theirs.safetensors")
    assert same_tensors(read_checkpoint(tmp_path / "theirs.safetensors").weights, weights)


def test_a_directory_has_the_names_and_the_configuration_of_transformers(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    names = set(hugging_face_tensors(tmp_path / "model"))
    assert {"rwkv.embeddings.weight", "rwkv.blocks.0.pre_ln.bias", "rwkv.blocks.2.attention.time_mix_receptance",
            "rwkv.blocks.1.feed_forward.time_mix_key", "rwkv.ln_out.weight", "head.weight"} < names
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    sizes = {"vocab_size": 50, "context_length": 32, "hidden_size": 16, "num_hidden_layers": 3, "attention_hidden_size": 8,
             "intermediate_size": 24, "rescale_every": 0, "model_type": "rwkv", "torch_dtype": "float32"}
    assert sizes.items() <= config.items()
    model.save_pretrained(tmp_path / "half", dtype="float16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["rescale_every"] == 6


@pytest.mark.parametrize(("save", "suffix", "stem"), [
    (save_file, ".safetensors", "model"), (torch.save, ".bin", "pytorch_model")])
def test_shards_are_put_together(model: RWKV, tmp_path: Path, save: Callable[..., None], suffix: str, stem: str) -> None:
    model.save_pretrained(tmp_path / "model")
    expected = {name: tensor.clone() for name, tensor in read_checkpoint(tmp_path / "model").weights.items()}
    shard(tmp_path / "model", save, suffix, stem)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_checkpoint(tmp_path / "model").weights.items())
    (tmp_path / "model" / f"{stem}-00002-of-00002{suffix}").unlink()
    refuses(tmp_path / "model", "00002-of-00002")


def test_a_bin_and_a_tied_head_are_read(model: RWKV, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    tensors, config = hugging_face_tensors(tmp_path / "model"), tmp_path / "model" / "config.json"
    del tensors["head.weight"]
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    refuses(tmp_path / "model", "head.weight")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    assert torch.equal(read_checkpoint(tmp_path / "model").weights["head.weight"], model.emb.weight)


@pytest.mark.parametrize(("generation", "change", "part"), [
    ("rwkv4", {"model_type": "rwkv5"}, "RWKV-5"), ("rwkv4", {"model_type": "llama"}, "llama"),
    ("rwkv4", {"hidden_size": 17}, "n_embd=17"), ("rwkv4", {"vocab_size": 51}, "vocab_size=51"),
    ("rwkv4", {"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon"), ("rwkv7", {"norm_eps": 1e-3}, "norm_eps"),
    ("rwkv7", {"hidden_size": 64}, "n_embd=64"), ("rwkv7", {"v_low_rank_dim": 32}, "v_low_rank_dim=32"),
    ("rwkv7", {"model_type": "rwkv8"}, "RWKV-8")])
def test_a_configuration_that_does_not_fit_is_refused(models: dict[str, RWKV], tmp_path: Path, generation: str,
                                                      change: dict[str, Any], part: str) -> None:
    models[generation].save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    refuses(tmp_path / "model", part)


# ggmf


def test_ggmf_is_laid_out_as_documented(tmp_path: Path) -> None:
    model = small_model("reference", vocab_size=3, n_layer=1, n_embd=2)
    model.save_pretrained(tmp_path / "model.bin", dtype="float16")
    content = (tmp_path / "model.bin").read_bytes()
    emb, ln = as_bytes(model.emb.weight.half()), as_bytes(model.blocks[0].ln0.weight)
    start = struct.pack("=6i", 0x67676D66, 101, 3, 2, 1, 1) + struct.pack("=5i", 2, 10, 1, 2, 3) + b"emb.weight" + emb
    assert content.startswith(start + struct.pack("=4i", 1, 19, 0, 2) + b"blocks.0.ln0.weight" + ln)
    decay = as_bytes(-torch.exp(model.blocks[0].att.time_decay))
    assert struct.pack("=4i", 1, 23, 0, 2) + b"blocks.0.att.time_decay" + decay in content


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_ggmf_comes_back_byte_for_byte(model: RWKV, tmp_path: Path, dtype: str) -> None:
    model.save_pretrained(tmp_path / "one.bin", dtype=dtype)
    write_checkpoint(read_checkpoint(tmp_path / "one.bin"), tmp_path / "two.bin")
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()
    old = bytearray((tmp_path / "one.bin").read_bytes())
    old[4] = 100                             # the version
    (tmp_path / "old.bin").write_bytes(old)
    assert same_tensors(read_checkpoint(tmp_path / "old.bin").weights, read_checkpoint(tmp_path / "one.bin").weights)


@pytest.mark.thorough
@pytest.mark.parametrize(("low", "high"), [(-1, 1), (-5, 3), (-80, 80)])
def test_a_stored_decay_is_read_back_bit_for_bit(low: float, high: float) -> None:
    """Tests a million values, because a plain logarithm is off by one rounding for some hundreds of them."""
    raw = torch.empty(1_000_000).uniform_(low, high, generator=torch.Generator().manual_seed(0))
    stored = ggmf.stored_decay(raw)
    back = ggmf.raw_decay(stored)
    assert torch.equal(ggmf.stored_decay(back), stored)
    assert bool(((back - raw).abs() < 1e-7 * raw.abs().clamp(1)).all())


@pytest.mark.parametrize(("place", "value", "part"), [
    (4, 99, "99"), (20, 8, "Q5_1"), (24, 9, "header"), (36, 10 ** 9, "emb.weight"), (12, 17, "n_embd=17")])
def test_a_ggmf_header_that_is_wrong_is_refused(model: RWKV, tmp_path: Path, place: int, value: int, part: str) -> None:
    model.save_pretrained(tmp_path / "model.bin")
    content = bytearray((tmp_path / "model.bin").read_bytes())
    content[place:place + 4] = struct.pack("=i", value)
    (tmp_path / "model.bin").write_bytes(content)
    refuses(tmp_path / "model.bin", part)


# Other versions, and weights that are refused


@pytest.mark.parametrize(("version", "name"), [
    ("RWKV-1", "blocks.0.attn.time_w"), ("RWKV-1", "tok_emb.weight"), ("RWKV-2", "blocks.0.att.time_mix"),
    ("RWKV-5", "blocks.0.att.ln_x.weight"), ("RWKV-5", "blocks.0.att.time_faaaa"), ("RWKV-6", "blocks.0.att.time_maa_w1"),
    ("RWKV-5", "rwkv.blocks.0.attention.gate.weight"), ("RWKV-7b (DEA) ", "blocks.0.qkv.k_emb.weight"),
    ("RWKV-8 ", "blocks.0.ffn.enn.weight"), ("RWKV-8 ", "blocks.0.ffn.ennk"), ("RWKV-8 ", "blocks.0.rosa.x_q"),
    ("RWKV-8 ", "blocks.0.rosa_qkv.weight")])
@pytest.mark.parametrize("save", [torch.save, save_file], ids=["torch", "safetensors"])
def test_other_versions_and_extensions_are_refused_by_name(models: dict[str, RWKV], tmp_path: Path, save: Callable[..., None],
                                                           version: str, name: str) -> None:
    weights = {"emb.weight": torch.zeros(5, 4)}
    if version.endswith(" "):            # an extension of RWKV-7: all of its tensors, deep embeddings and one more
        weights = {**models["rwkv7"].state_dict(), "blocks.0.ffn.s_emb.weight": torch.zeros(3)}
    save({**weights, name: torch.zeros(4)}, tmp_path / "other.pth")
    refuses(tmp_path / "other.pth", version, "RWKV-4 and RWKV-7")


def test_rwkv3_is_recognised_by_the_shape_of_time_first(model: RWKV, tmp_path: Path) -> None:
    weights = {name: tensor[:, None] if name.endswith(("time_first", "time_decay")) else tensor
               for name, tensor in model.state_dict().items()}
    torch.save(weights, tmp_path / "three.pth")
    refuses(tmp_path / "three.pth", "RWKV-3")


@each_held
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(models: dict[str, RWKV], tmp_path: Path, generation: str, format: str,
                                              value: float) -> None:
    model, name = models[generation], NAMES[format]
    model.save_pretrained(tmp_path / name)
    path = tmp_path / name / "model.safetensors" if name == NAMES["huggingface"] else tmp_path / name
    content, old = path.read_bytes(), model.blocks[1].ffn.value.weight.detach().numpy().tobytes()
    assert content.count(old) == 1
    content = content.replace(old, old[:40] + struct.pack("<f", value) + old[44:])
    path.write_bytes(content)
    checked = name.endswith(("pth", "ckpt"))
    refuses(tmp_path / name, "CRC-32" if checked else "blocks.1.ffn.value.weight")


def test_values_beyond_float16_are_refused_and_leave_no_file(model: RWKV, tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["ln_out.weight"][3] = 7e4
    with pytest.raises(CheckpointError):
        write_checkpoint(checkpoint_of(weights), tmp_path / "model.pth", "float16")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_unsuitable_for_weights_is_named(model: RWKV, tmp_path: Path, dtype: torch.dtype) -> None:
    for save, name in ((torch.save, "model.pth"), (save_file, "model.safetensors")):
        save(dict(model.state_dict()) | {"head.weight": torch.zeros(50, 16, dtype=dtype)}, tmp_path / name)
        refuses(tmp_path / name, "head.weight")


# Writing


@each_held
def test_a_save_that_fails_leaves_what_was_there(models: dict[str, RWKV], tmp_path: Path, generation: str,
                                                 format: str) -> None:
    model, name = models[generation], NAMES[format]
    model.save_pretrained(tmp_path / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    broken = checkpoint_of(model.state_dict())
    broken.weights.stored["head.weight"] = replace(broken.weights.stored["head.weight"], data=disk_full)
    with pytest.raises(OSError):         # noqa: PT011  `disk_full` raises this one
        write_checkpoint(broken, tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def disk_full() -> Tensor:
    raise OSError(28, "No space left on device")


@pytest.mark.thorough
@each_held
def test_a_checkpoint_is_replaced_even_by_itself(models: dict[str, RWKV], tmp_path: Path, generation: str, format: str) -> None:
    model, name = models[generation], NAMES[format]
    model.save_pretrained(tmp_path / name)
    write_checkpoint(read_checkpoint(tmp_path / name), tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert same_tensors(read_checkpoint(tmp_path / name).weights, read_checkpoint(tmp_path / name).weights)
    small_model("reference", 60, generation=generation, **SIZES[generation]).save_pretrained(tmp_path / name)
    assert read_checkpoint(tmp_path / name).vocab_size == 60


@pytest.mark.skipif(sys.platform == "win32", reason="links require privileges there")
@pytest.mark.parametrize(("generation", "format"), [("rwkv4", "pth"), ("rwkv4", "huggingface"), ("rwkv7", "gguf")])
def test_a_link_stays_a_link(models: dict[str, RWKV], tmp_path: Path, generation: str, format: str) -> None:
    model, name = models[generation], NAMES[format]
    (tmp_path / "disk").mkdir()
    model.save_pretrained(tmp_path / "disk" / name)
    (tmp_path / name).symlink_to(Path("disk") / name)
    small_model("reference", 60, generation=generation, **SIZES[generation]).save_pretrained(tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert read_checkpoint(tmp_path / "disk" / name).vocab_size == 60
    assert {path.name for path in tmp_path.iterdir()} == {"disk", name}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [name]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="requires named pipes")
def test_a_device_is_not_replaced_by_a_directory(model: RWKV, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")         # stands for /dev/null, which root could replace
    with pytest.raises(UserError, match="directory"):
        model.save_pretrained(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert len([*tmp_path.iterdir()]) == 1


def test_a_directory_with_other_files_is_left_alone(model: RWKV, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError):
        model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


SAVING = """
import sys, torch; sys.path[:0] = [{root!r}, {tests!r}]
from models import small_model
models = [small_model("reference", size) for size in (50, 60)]
for path in {paths!r}: models[0].save_pretrained(path)
print("ready", flush=True)
while True:
    for model in models:
        for path in {paths!r}: model.save_pretrained(path)
"""


@pytest.mark.programs
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_kill_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    paths = [str(tmp_path / NAMES["pth"]), str(tmp_path / NAMES["safetensors"])]
    code = SAVING.format(root=str(ROOT), tests=str(ROOT / "tests"), paths=paths)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(10):                  # a file is whole even while it is replaced
            assert read_checkpoint(paths[0]).vocab_size in (50, 60)
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    assert [read_checkpoint(path).vocab_size in (50, 60) for path in paths] == [True, True]


def test_weights_in_use_are_not_released(tmp_path: Path) -> None:
    """A second load, in another dtype, does not undo changes to a model whose weights are mapped from the file."""
    small_model("reference", n_embd=64).save_pretrained(tmp_path / "model.pth")
    checkpoint = read_checkpoint(tmp_path / "model.pth")
    used = RWKV.from_checkpoint(checkpoint, select("wkv4", "reference"))
    used.head.weight.zero_()
    used.blocks[0].ffn.key.weight.zero_()
    RWKV.from_checkpoint(checkpoint, select("wkv4", "reference"), dtype="bfloat16")
    write_checkpoint(checkpoint, tmp_path / "other.pth")
    assert not used.head.weight.any()
    assert not used.blocks[0].ffn.key.weight.any()


# python -m rwkv.tools.convert


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["model.pth", "model.safetensors"])
def test_a_model_that_is_not_mapped_outlives_its_file(tmp_path: Path, name: str, dtype: str) -> None:
    """The test overwrites the file in place, as cp does."""
    path = tmp_path / name
    small_model("reference", n_embd=64).save_pretrained(path)
    loaded = RWKV.from_pretrained(path, "reference", dtype=dtype, mmap=False)
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.state_dict().items())


def test_convert_reports_what_it_does(model: RWKV, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model("reference", 50).save_pretrained(tmp_path / "in.ckpt", CharTokenizer("abc"))
    convert.main([str(tmp_path / "in.ckpt"), str(tmp_path / "out.pth"), "--dtype", "bfloat16"])
    output, errors = capsys.readouterr()
    assert output == ""
    for part in ("3 layers, 16 wide", "vocabulary 50", "written:", "does not contain the tokenizer"):
        assert part in errors
    assert read_checkpoint(tmp_path / "out.pth").weights["emb.weight"].dtype == torch.bfloat16
    with pytest.raises(SystemExit):
        convert.main([str(tmp_path / "in.ckpt"), str(tmp_path / "out.bin"), "--dtype", "bfloat16"])
    assert "bfloat16" in capsys.readouterr().err.splitlines()[-1]
