"""Tests files of other programs: wrappers in names, directories with several weights, configurations of other models, and
files without weights. Each is read, or refused with a sentence that says what it is."""

import copy
import errno
import json
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files import NAMES
from models import small_model, tokens
from refusals import refuses
from safetensors.torch import load_file, save_file
from test_rwkv7_files import rewrite
from tokenizer_files import chatml
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.optim.swa_utils import AveragedModel

from rwkv.checkpoint.files import checkpoint_of, read_checkpoint, tokenizer_of, write_checkpoint
from rwkv.checkpoint.formats import safetensors
from rwkv.errors import CheckpointError
from rwkv.pretrained import RWKV

pytestmark = pytest.mark.thorough
gguf = pytest.importorskip("gguf")
ONNX = b"\x08\x08\x12\x07pytorch\x1a\x062.13.0:\xb0\x01" + bytes(99)
Weights = dict[str, Tensor]
SIZES = {"rwkv4": {"n_embd": 16}, "rwkv7": {"n_embd": 64, "head_size": 64}}


@pytest.fixture(scope="module")
def models() -> dict[str, RWKV]:
    return {generation: small_model("reference", generation=generation, vocab_size=40, n_layer=2, **sizes)
            for generation, sizes in SIZES.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, RWKV]) -> RWKV:
    return models["rwkv7"]


def assert_same(path: Path, model: RWKV) -> None:
    loaded = RWKV.from_pretrained(path, "reference")
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items()
               if name not in model.generation.UNUSED)


# Names


WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "blocks compiled": lambda name: re.sub(r"blocks\.(\d+)", r"blocks.\1._orig_mod", name),
    "layers compiled": lambda name: re.sub(r"\.(weight|bias)$", r"._orig_mod.\1", name),
    "activation checkpointing": lambda name: re.sub(r"blocks\.(\d+)", r"blocks.\1._checkpoint_wrapped_module", name),
    "fsdp": lambda name: "_fsdp_wrapped_module." + re.sub(r"(\.\d+)", r"\1._fsdp_wrapped_module", name),
    "data parallel": lambda name: f"module.{name}",
    "several": lambda name: "model._orig_mod.module." + re.sub(r"(\.\d+)", r"\1._fsdp_wrapped_module._orig_mod", name),
    "deepspeed": lambda name: f"_forward_module.model.{name}",
    "peft": lambda name: f"base_model.model.{name}"}


@pytest.mark.parametrize("generation", SIZES)
@pytest.mark.parametrize("rename", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_in_names_are_removed(models: dict[str, RWKV], tmp_path: Path, generation: str,
                                       rename: Callable[[str], str]) -> None:
    weights = {rename(name): weight for name, weight in models[generation].state_dict().items()}
    torch.save(weights, tmp_path / "model.pth")
    assert_same(tmp_path / "model.pth", models[generation])


@pytest.mark.parametrize(("generation", "layout"), [("rwkv4", None), ("rwkv7", "fla"), ("rwkv7", "official"),
                                                    ("rwkv7", "transformers-rwkv")])
@pytest.mark.parametrize("rename", [WRAPPED["compiled"], WRAPPED["data parallel"], WRAPPED["peft"], "model.{}".format])
def test_wrappers_in_the_names_of_a_directory(models: dict[str, RWKV], tmp_path: Path, generation: str, layout: str | None,
                                              rename: Callable[[str], str]) -> None:
    model = models[generation]
    write_checkpoint(checkpoint_of(model.state_dict(), None, model.config), tmp_path / "model", layout=layout)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    save_file({rename(name): weight for name, weight in weights.items()}, tmp_path / "model" / "model.safetensors")
    assert_same(tmp_path / "model", model)


@pytest.mark.parametrize("content", [
    lambda weights: {"module": weights, "ds_version": "0.14", "dp_world_size": 2},
    lambda weights: {"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}, "step": 7},
    lambda weights: {"model_state_dict": weights, "loss": 3.0, "rng": torch.ones(3)},
    lambda weights: {"state_dict": weights, "epoch": 3},
    lambda weights: {"checkpoint": {"model": weights}},
    lambda weights: {**weights, "step": 5, "lr": 1e-4, "name": "mine", "best": None, "args": {"n_layer": 3}},
    lambda weights: {"params": {f"module.{name}": nn.Parameter(weight) for name, weight in weights.items()}}],
    ids=["module", "model", "model_state_dict", "state_dict", "nested", "beside", "params"])
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt"])
def test_weights_inside_a_trainers_dictionary(model: RWKV, tmp_path: Path, suffix: str,
                                              content: Callable[[Weights], Any]) -> None:
    torch.save(content(model.state_dict()), tmp_path / f"model{suffix}")
    assert_same(tmp_path / f"model{suffix}", model)


@pytest.mark.parametrize("file", ["model.pth", "model.safetensors"])
def test_the_state_dict_of_an_averaged_model_is_read(model: RWKV, tmp_path: Path, file: str) -> None:
    """The state dict also contains the number of updates, in a tensor without dimensions."""
    averaged = AveragedModel(model).state_dict()
    assert averaged["n_averaged"].dim() == 0
    (torch.save if file.endswith("pth") else save_file)(averaged, tmp_path / file)
    assert_same(tmp_path / file, model)


def test_the_step_of_another_trainer_may_be_a_tensor(model: RWKV, tmp_path: Path) -> None:
    torch.save({"state_dict": model.state_dict(), "global_step": torch.tensor(7)}, tmp_path / "model.ckpt")
    assert_same(tmp_path / "model.ckpt", model)


def test_deepspeeds_folders(model: RWKV, tmp_path: Path) -> None:
    """The weights of ZeRO-1 and 2 are in one file, beside the optimiser's state."""
    step = tmp_path / "global_step7"
    step.mkdir()
    (tmp_path / "zero_to_fp32.py").touch()
    torch.save({"module": model.state_dict(), "global_steps": 7}, step / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert_same(step, model)
    refuses_undamaged(tmp_path, "zero_to_fp32.py")


def test_other_weights_beside_lightnings_state_dict(model: RWKV, tmp_path: Path) -> None:
    """Lightning's WeightAveraging saves the average as state_dict, and the current weights beside it."""
    current = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    counts = {"n_averaged": torch.ones(())}
    torch.save({"state_dict": model.state_dict(), "current_model_state": current, "averaging_state": counts},
               tmp_path / "model.ckpt")
    assert_same(tmp_path / "model.ckpt", model)


def test_the_parts_of_torchs_distributed_checkpoint_say_what_to_do(model: RWKV, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")          # torch warns about the missing process group
        distributed_checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "model", no_dist=True)
    for path in (tmp_path / "model", *(tmp_path / "model").glob("*.distcp")):
        refuses(path, "dcp_to_torch")


def test_the_error_names_both_sets_of_weights_in_a_file(model: RWKV, tmp_path: Path) -> None:
    torch.save({"model": model.state_dict(), "ema": model.state_dict()}, tmp_path / "model.pth")
    refuses(tmp_path / "model.pth", "model, ema")
    torch.save({**model.state_dict(), "ema": model.state_dict()}, tmp_path / "model.pth")
    refuses(tmp_path / "model.pth", "ema")


def test_a_torch_file_called_safetensors_is_not_damaged(model: RWKV, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"rename it to \.pth"):
        read_checkpoint(tmp_path / "model.safetensors")


def test_tensors_with_numbers_as_keys_are_not_weights(model: RWKV, tmp_path: Path) -> None:
    torch.save(dict(enumerate(model.state_dict().values())), tmp_path / "model.pth")
    refuses(tmp_path / "model.pth", "names of tensors must be strings; got 0")


@pytest.mark.parametrize("format", ["pth", "safetensors", "huggingface", "ckpt"])
def test_float64_is_read_in_float32(model: RWKV, tmp_path: Path, format: str) -> None:
    path = tmp_path / NAMES[format]
    model.save_pretrained(path)
    if format in ("safetensors", "huggingface"):
        file = path / "model.safetensors" if path.is_dir() else path
        save_file({name: weight.double() for name, weight in load_file(file).items()}, file)
    else:
        torch.save({name: weight.double() for name, weight in model.state_dict().items()}, path)
    assert_same(path, model)
    RWKV.from_pretrained(path, "reference").save_pretrained(tmp_path / "again.pth")
    assert_same(tmp_path / "again.pth", model)


def test_a_model_whose_blocks_are_compiled_is_saved_under_its_own_names(models: dict[str, RWKV], tmp_path: Path) -> None:
    for model in models.values():
        compiled = copy.deepcopy(model)
        for layer, block in enumerate(compiled.blocks):
            compiled.blocks[layer] = torch.compile(block, backend="eager")
        assert compiled.fingerprint() == model.fingerprint()
        compiled.save_pretrained(tmp_path / "model.safetensors")
        assert_same(tmp_path / "model.safetensors", model)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "model"])
def test_zeros_in_place_of_a_file_s_end_are_named(model: RWKV, tmp_path: Path, name: str) -> None:
    """Some programs reserve the whole file before they download it."""
    path = tmp_path / name
    model.save_pretrained(path)
    file = path / "model.safetensors" if path.is_dir() else path
    assert not read_checkpoint(path).notes
    content = file.read_bytes()
    file.write_bytes(content[:len(content) // 2] + bytes(len(content) - len(content) // 2))
    assert ["only zeros" in note for note in read_checkpoint(path).notes] == [True]


@pytest.mark.parametrize(("name", "module", "function"), [("model.pth", zipfile, "ZipFile"),
                                                          ("model.safetensors", safetensors, "safe_open")])
def test_an_error_of_the_file_system_does_not_mean_damage(model: RWKV, tmp_path: Path, name: str, module: Any, function: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems lose their connection, and some cannot map files into memory."""
    def fails(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENODEV, "No such device")

    model.save_pretrained(tmp_path / name)
    monkeypatch.setattr(module, function, fails)
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: No such device"):
        read_checkpoint(tmp_path / name)


# Files without weights


@pytest.mark.parametrize(("content", "words"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 381\n", "Git LFS"),
    (b"# xet version 0\n", "Xet"), (b"<!DOCTYPE html>\n<html><body>Not Found</body>", "web page"),
    (b"Entry not found, and more of such text\n", "text"), (b'{"error": "Repository not found"}', "text"),
    (b"\x1f\x8b\x08" + bytes(20), "gzip"), (b"7z\xbc\xaf\x27\x1c" + bytes(20), "7z")])
@pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "model.gguf", "model.ckpt", "model.bin"])
def test_a_placeholder_for_a_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    refuses_undamaged(tmp_path / name, words)


@pytest.mark.parametrize("part", ["model.safetensors", "config.json", "tokenizer.json", "rwkv_vocab_v20230424.txt"])
def test_a_pointer_in_a_directory_is_named(model: RWKV, tmp_path: Path, part: str) -> None:
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / part).write_text("version https://git-lfs.github.com/spec/v1\n")
    refuses_undamaged(tmp_path / "model", part, "Git LFS")


def as_state(model: RWKV) -> Weights:
    return {f"blocks.{layer}.att.time_state": torch.zeros(1, 64, 64) for layer in range(2)}


def as_lora(model: RWKV) -> Weights:
    return {f"blocks.0.att.key.lora_{part}": torch.zeros(2, 64) for part in "AB"}


def as_peft(model: RWKV) -> Weights:
    return {f"base_model.model.model.layers.0.attn.k_proj.lora_{part}.weight": torch.zeros(2, 64) for part in "AB"}


def unmerged(model: RWKV) -> Weights:
    return model.state_dict() | as_lora(model)


def partitioned(model: RWKV) -> Weights:
    return {name: torch.zeros(0) for name in model.state_dict()}


def saved_state(model: RWKV) -> Weights:
    return {"logits": torch.zeros(1, 40)} | model.empty_state(1).named()


@pytest.mark.parametrize(("content", "words"), [(as_state, "adapters="), (as_lora, "adapters="), (as_peft, "adapters="),
                                                (unmerged, "LoRA"), (saved_state, "state="),
                                                (partitioned, "zero_to_fp32")])
def test_a_state_or_an_adapter_says_which_option_takes_it(model: RWKV, tmp_path: Path, content: Callable[[RWKV], Weights],
                                                          words: str) -> None:
    torch.save(content(model), tmp_path / "file.pth")
    save_file({name: tensor.contiguous() for name, tensor in content(model).items()}, tmp_path / "file.safetensors")
    for path in tmp_path.iterdir():
        refuses_undamaged(path, words)


def test_other_files_say_what_they_are(model: RWKV, tmp_path: Path) -> None:
    torch.save(model, tmp_path / "whole.pth")
    refuses_undamaged(tmp_path / "whole.pth", "objects of", "state_dict()")
    torch.save({"model": model.state_dict(), "args": Namespace(lr=1)}, tmp_path / "args.pth")
    refuses_undamaged(tmp_path / "args.pth", "argparse.Namespace")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("model.pth", b"x")
    refuses_undamaged(tmp_path / "archive.zip", "unpack")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:         # what torch.jit.save writes
        for name in ("data.pkl", "code/__torch__.py", "constants.pkl", "version"):
            archive.writestr(f"script/{name}", b"x")
    refuses_undamaged(tmp_path / "script.pt", "TorchScript")
    torch.save(model, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    refuses_undamaged(tmp_path / "old.pth", "state_dict()")
    torch.save(model.state_dict() | {"_strategy": "cuda fp16i8", "_version": "0.8.32"}, tmp_path / "converted.pth")
    refuses_undamaged(tmp_path / "converted.pth", "cuda fp16i8")
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "rwkv7")
    writer.add_type("adapter")
    writer.add_tensor("blk.0.time_mix_key.weight.lora_a", np.zeros((2, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuses_undamaged(tmp_path / "adapter.gguf", "adapter")
    save_file({}, tmp_path / "nothing.safetensors")
    refuses_undamaged(tmp_path / "nothing.safetensors", "contains nothing")
    save_file({"ids": torch.zeros(3, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    refuses_undamaged(tmp_path / "ids.safetensors", "got I64")
    np.savez(tmp_path / "arrays.npz", a=np.zeros(3))
    refuses_undamaged(tmp_path / "arrays.npz", "unpack")
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name, content, words in (("array.safetensors", (tmp_path / "array.npy").read_bytes(), "NUMPY"),
                                 ("empty.safetensors", b"", "empty (0 bytes)"), ("model.onnx", ONNX, "pytorch"),
                                 ("early.gguf", b"GGUF" + bytes([1, 0, 0, 0]) + bytes(60), "got 1"),
                                 ("big.gguf", b"GGUF" + bytes([0, 0, 0, 3]) + bytes(60), "big-endian"),
                                 ("page.pth", b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "text")):
        (tmp_path / name).write_bytes(content)
        refuses_undamaged(tmp_path / name, words)
    torch.save([1, 2], tmp_path / "list.pth")
    refuses_undamaged(tmp_path / "list.pth", "list")
    torch.save({"a.weight": torch.zeros(2, 2)}, tmp_path / "other.pth")
    refuses_undamaged(tmp_path / "other.pth", "a.weight")


def refuses_undamaged(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    assert "damaged" not in str(error.value)
    refuses(path, *words)


# Tokens that tokenizer.json lacks, or that the model does not know


def test_tokens_that_only_tokenizer_config_lists_are_added_to_the_tokenizer(tmp_path: Path) -> None:
    """transformers adds them when it loads the tokenizer."""
    parsed = json.loads(chatml())
    free = 1 + max(parsed["model"]["vocab"].values())
    small_model(vocab_size=free + 1).save_pretrained(tmp_path)
    named = {**parsed["added_tokens"][0], "content": "<|tool|>", "id": free}
    listed = {str(token.pop("id")): token for token in [named, *parsed["added_tokens"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**parsed, "added_tokens": json.loads(chatml())["added_tokens"][:1]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    checkpoint = read_checkpoint(tmp_path)
    assert not checkpoint.notes
    assert tokenizer_of(checkpoint).special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<|tool|>": free}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_tokens_without_a_row_of_the_embedding_are_ignored_with_a_note(tmp_path: Path, file: str) -> None:
    """Some programs add a token for padding without resizing the model."""
    parsed = json.loads(chatml())
    free = 1 + max(parsed["model"]["vocab"].values())
    small_model(vocab_size=free).save_pretrained(tmp_path)
    pad = {**parsed["added_tokens"][0], "content": "[PAD]", "id": free}
    if file == "tokenizer.json":
        parsed["added_tokens"].append(pad)
    else:
        (tmp_path / file).write_text(json.dumps({"added_tokens_decoder": {str(free): pad}}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    checkpoint = read_checkpoint(tmp_path)
    note, = checkpoint.notes
    assert "[PAD]" in note
    assert tokenizer_of(checkpoint).vocab_size == free


def test_another_models_tokenizer_is_refused_whatever_its_added_tokens(tmp_path: Path) -> None:
    small_model(vocab_size=100).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(chatml())
    with pytest.raises(CheckpointError, match="100"):
        tokenizer_of(read_checkpoint(tmp_path))


# Several weights in one place


def save_directory(model: RWKV, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def shard(folder: Path, stem: str = "model", suffix: str = ".safetensors", change: float = 0) -> None:
    """Adds a second copy of the weights, in two shards with an index."""
    weights = {name: weight + change for name, weight in load_file(folder / "model.safetensors").items()}
    names = sorted(weights)
    places = {name: f"{stem}-0000{1 + (i % 2)}-of-00002{suffix}" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: weights[name] for name in names if places[name] == file}
        if suffix == ".bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(("stem", "suffix"), [("model", ".safetensors"), ("pytorch_model", ".bin")])
def test_the_same_weights_twice_are_read_and_others_refused(model: RWKV, tmp_path: Path, stem: str, suffix: str) -> None:
    folder = save_directory(model, tmp_path / "model")
    shard(folder, stem, suffix)
    assert_same(folder, model)
    shard(folder, stem, suffix, change=0.001)
    refuses_undamaged(folder, "model.safetensors", f"{stem}{suffix}.index.json", "differ")


def test_bin_beside_safetensors(model: RWKV, tmp_path: Path) -> None:
    folder = save_directory(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    torch.save({name: weight.bfloat16() for name, weight in weights.items()}, folder / "pytorch_model.bin")
    assert_same(folder, model)           # the same numbers, rounded
    torch.save({name: weight * 1.001 for name, weight in weights.items()}, folder / "pytorch_model.bin")
    refuses_undamaged(folder, "pytorch_model.bin", "differ")


def test_the_error_for_shards_names_the_missing_index_or_config(model: RWKV, tmp_path: Path) -> None:
    folder = save_directory(model, tmp_path / "model")
    shard(folder)
    (folder / "model.safetensors").unlink()
    weights = [weight for file in folder.glob("model-*") for weight in load_file(file).items()]
    embedding, *others = sorted(weights, key=lambda item: "embeddings" not in item[0])
    for part in ([embedding], others, [embedding, *others[1:]], [embedding, *others[:-1]]):      # each lacks another part
        save_file(dict(part), folder / "model-00009-of-00009.safetensors")
        refuses_undamaged(folder / "model-00009-of-00009.safetensors", "one shard", "directory")
    (folder / "model-00009-of-00009.safetensors").unlink()
    refuses_undamaged(folder / "model-00001-of-00002.safetensors", "shard", "directory")
    for name in ("model.safetensors.index.json", "config.json"):
        refuses_undamaged(folder / name, f"directory, {folder}")
    (folder / "model.safetensors.index.json").unlink()
    refuses_undamaged(folder, "index")
    (folder / "config.json").unlink()
    refuses_undamaged(folder, "config.json")


@pytest.mark.parametrize(("stem", "suffix"), [("pytorch_model", ".bin"), ("model", ".safetensors")])
def test_shards_of_the_author_s_tensors_need_no_config(model: RWKV, tmp_path: Path, stem: str, suffix: str) -> None:
    """DeepSpeed's zero_to_fp32.py and Accelerate write such folders; each of the directory's layouts requires config.json."""
    save_file({name: weight.contiguous() for name, weight in model.state_dict().items()}, tmp_path / "model.safetensors")
    shard(tmp_path, stem, suffix)
    (tmp_path / "model.safetensors").unlink()
    assert_same(tmp_path, model)
    for layout in (None, "official"):
        folder = tmp_path / f"{layout}"
        model.save_pretrained(tmp_path / "model.pth")
        write_checkpoint(read_checkpoint(tmp_path / "model.pth"), folder, format="huggingface", layout=layout)
        shard(folder, stem, suffix)
        for name in ("model.safetensors", "config.json"):
            (folder / name).unlink()
        refuses_undamaged(folder, "lacks the config.json")


def test_the_error_lists_models_in_subfolders(model: RWKV, tmp_path: Path) -> None:
    """transformers' Trainer writes checkpoint-1, checkpoint-2 and so on."""
    for number in (1, 2):
        save_directory(model, tmp_path / "out" / f"checkpoint-{number}")
    refuses_undamaged(tmp_path / "out", "checkpoint-2")


def test_the_state_of_a_trainer_is_not_a_second_file_with_weights(model: RWKV, tmp_path: Path) -> None:
    """transformers' Trainer writes no config.json for a model class that transformers lacks."""
    model.save_pretrained(tmp_path / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin"):
        torch.save({"state": {}}, tmp_path / name)
    assert_same(tmp_path, model)
    model.save_pretrained(tmp_path / "rwkv-1.pth")
    refuses_undamaged(tmp_path, "2 files", "rwkv-1.pth")


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_model_without_a_head_is_refused_unless_its_embedding_is_the_head(model: RWKV, tmp_path: Path, prefix: str) -> None:
    folder = save_directory(model, tmp_path / "model")
    weights = {name.replace("model.", prefix, 1): weight for name, weight in load_file(folder / "model.safetensors").items()
               if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors")
    refuses_undamaged(folder, "output head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert torch.equal(RWKV.from_pretrained(folder).head.weight, model.emb.weight)


def test_a_link_without_its_file_is_not_a_file_with_weights(model: RWKV, tmp_path: Path) -> None:
    folder = save_directory(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")           # as in the Hub's cache
    refuses_undamaged(folder, "download")


def test_unknown_names_of_rwkv_7_are_not_called_rwkv_5(model: RWKV, tmp_path: Path) -> None:
    torch.save({name.replace(".att.", ".attention."): weight for name, weight in model.state_dict().items()},
               tmp_path / "model.pth")
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path / "model.pth")
    assert "RWKV-5" not in str(error.value)


def test_an_index_without_its_shards(model: RWKV, tmp_path: Path) -> None:
    folder = save_directory(model, tmp_path / "model")
    shard(folder)
    for file in folder.glob("model-*"):
        file.unlink()
    refuses_undamaged(folder, "model.safetensors.index.json", "without the shards")
    (folder / "model.safetensors.index.json").rename(folder / "pytorch_model.bin.index.json")
    assert_same(folder, model)           # a download of *.safetensors and *.json leaves this index
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    refuses(folder, "lacks the shard")
    (folder / "pytorch_model.bin.index.json").unlink()
    refuses_undamaged(folder, "other.safetensors")


def test_an_adapter_beside_weights_is_ambiguous(model: RWKV, tmp_path: Path) -> None:
    folder = save_directory(model, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    refuses_undamaged(folder, "adapter")
    (folder / "config.json").unlink()
    refuses_undamaged(folder, "LoRA adapter", "checkpoint=")


def test_the_adapter_of_a_run_names_the_run(tmp_path: Path) -> None:
    adapter = tmp_path / "run/adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "run/checkpoints").mkdir()
    (tmp_path / "run/checkpoints/last.ckpt").touch()
    refuses_undamaged(adapter, "LoRA adapter", str(tmp_path / "run"))


def test_a_folder_with_one_checkpoint_is_read_and_with_two_is_ambiguous(model: RWKV, tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    refuses(folder, "no checkpoint")
    model.save_pretrained(folder / "one.pth")
    assert_same(folder, model)
    model.save_pretrained(folder / "two.safetensors")
    refuses_undamaged(folder, "one.pth, two.safetensors")


# Configurations


def save_with_config(model: RWKV, folder: Path, **keys: Any) -> Path:
    path = save_directory(model, folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


REFUSED: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"), ("hidden_act", "relu"), ("hidden_act", "silu"), ("norm_bias", False), ("norm_first", False),
    ("layer_norm_eps", 1e-3), ("num_attention_heads", 2), ("value_dim", [64, 32]), ("value_dim", 32),
    ("wkv_state_dtype", "float16"), ("layer_types", ["linear_attention", "full_attention"]), ("rescale_every", 6),
    ("quantization_config", {"quant_method": "bitsandbytes"}), ("quantization", {"bits": 4}),
    ("final_logit_softcapping", 30.0), ("attn", {"layers": [0]}),
    ("architecture_version", "rwkv6"), ("number_of_conv_states", 4)]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_a_key_that_changes_what_is_computed_is_refused(model: RWKV, tmp_path: Path, key: str, value: Any) -> None:
    refuses(save_with_config(model, tmp_path / "model", **{key: value}), "RWKV-6" if key == "architecture_version" else "")
    refuses_undamaged(tmp_path / "model",
                      "RWKV-6" if key == "architecture_version" else key if key in ("hidden_act", "attn") else "")


@pytest.mark.parametrize("key", ["hidden_act", "layer_norm_epsilon", "quantization_config"])
def test_rwkv_4_has_the_same_rule(models: dict[str, RWKV], tmp_path: Path, key: str) -> None:
    refuses_undamaged(save_with_config(models["rwkv4"], tmp_path / "model", **{key: "gelu"}), key)


@pytest.mark.parametrize("keys", [
    {"hidden_act": "relu2"}, {"hidden_act": None}, {"num_heads": None, "value_dim": [64, 64], "attn": None}, {"value_dim": []},
    {"num_heads": 32},
    {"layer_types": ["linear_attention"] * 2, "fuse_norm": True, "attn_mode": "fused_recurrent", "hidden_ratio": 4.0},
    {"norm_eps": 0.00001, "bos_token_id": 1, "hidden_dropout": 0.1, "transformers_version": "5.0", "rope_scaling": None}])
def test_keys_that_change_nothing_are_silent(model: RWKV, tmp_path: Path, keys: dict[str, Any]) -> None:
    assert read_checkpoint(save_with_config(model, tmp_path / "model", **keys)).notes == []


def test_an_unknown_key_is_reported(model: RWKV, tmp_path: Path) -> None:
    folder = save_with_config(model, tmp_path / "model", mix_scale=0.5, nothing=None)
    (note,) = read_checkpoint(folder).notes
    assert "mix_scale" in note
    assert "nothing" not in note
    with pytest.warns(UserWarning, match="mix_scale"):
        RWKV.from_pretrained(folder, "reference")


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_head_beside_another_head(model: RWKV, tmp_path: Path, differs: bool) -> None:
    folder = save_with_config(model, tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    if not differs:
        weights["lm_head.weight"] = weights["model.embeddings.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    if differs:
        refuses_undamaged(folder, "tie_word_embeddings")
    else:
        loaded = RWKV.from_pretrained(folder, "reference")
        assert torch.equal(loaded.head.weight, loaded.emb.weight)


def save_gguf_with_key(model: RWKV, folder: Path, key: str, value: Any, kind: Any) -> Path:
    model.save_pretrained(folder / "plain.gguf")
    rewrite(folder / "plain.gguf", folder / "model.gguf", key, value, kind)
    return folder / "model.gguf"


@pytest.mark.parametrize(("key", "value"), [
    ("attention.layer_norm_epsilon", 1e-3), ("token_shift_count", 1), ("rescale_every_n_layers", 6), ("logit_scale", 0.5),
    ("attention.group_norm_epsilon", 1e-5), ("expert_count", 8)])
def test_a_key_of_gguf_that_changes_what_is_computed_is_refused(model: RWKV, tmp_path: Path, key: str, value: Any) -> None:
    kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
    refuses_undamaged(save_gguf_with_key(model, tmp_path, f"rwkv7.{key}", value, kind), key)


@torch.no_grad()
def test_a_gguf_without_the_size_of_a_head_has_the_usual_one(model: RWKV, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model.save_pretrained(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"rwkv7.wkv.head_size", b"rwkv7.wkv.head_sizf"))
    with pytest.warns(UserWarning, match="head_siz"):
        loaded = RWKV.from_pretrained(path, "reference")
    ids = tokens(model, B=1, T=4)
    torch.testing.assert_close(loaded(ids)[0], model(ids)[0])
