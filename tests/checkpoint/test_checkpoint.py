"""Tests which checkpoints of torch.save are read and which are refused, and what the errors name."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_model, tokens
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils import prune

from rwkv.checkpoint.files import read_checkpoint, require_tokenizer
from rwkv.checkpoint.location import follow, locate
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.generation.decoder import CDecoder, Decoder
from rwkv.model.base import is_linear_weight
from rwkv.model.decoding.c_step import why_not
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer
from rwkv.tools.list import main as list_models

BPE = JsonTokenizer.train([], 257)
Weights = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> RWKV:
    return small_model("conv1d", n_att=8, n_ffn=24)


@pytest.fixture
def saved_file(model: RWKV, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "model.pth")
    return tmp_path / "model.pth"


def same_weights(one: RWKV, other: RWKV) -> bool:
    expected = other.state_dict()
    return list(one.state_dict()) == list(expected) and all(
        torch.equal(weight, expected[name]) for name, weight in one.state_dict().items())


def test_saving_and_loading_do_not_change_the_original(model: RWKV, saved_file: Path) -> None:
    loaded = RWKV.from_pretrained(saved_file)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in loaded.parameters():
            weight.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert same_weights(RWKV.from_pretrained(saved_file), model)
    RWKV.from_pretrained(saved_file).save_pretrained(saved_file)       # overwrites the file from which the weights are mapped
    assert same_weights(RWKV.from_pretrained(saved_file), model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainable_model_learns_and_leaves_the_file_alone(dtype: str, model: RWKV, saved_file: Path) -> None:
    loaded = RWKV.from_pretrained(saved_file, "conv1d", dtype=dtype, trainable=True)
    assert loaded.training
    loaded(tokens(model))[0].square().mean().backward()
    assert all(weight.grad.isfinite().all() for weight in loaded.parameters())
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    assert not same_weights(loaded.float(), model)
    assert same_weights(RWKV.from_pretrained(saved_file), model)


def test_int8_is_not_trainable(saved_file: Path) -> None:
    with pytest.raises(UserError):
        RWKV.from_pretrained(saved_file, dtype="int8", trainable=True)
    with pytest.raises(UserError, match="requires a GPU"):
        RWKV.from_pretrained(saved_file, dtype="float16")
    with pytest.raises(UserError, match="device"):
        RWKV.from_pretrained(saved_file, device="gpu")


# Files of other programs


def older_shapes(name: str, weight: Tensor) -> Tensor:
    if "time_mix" in name:
        return weight.flatten()
    return weight[:, None] if name.endswith("time_decay") else weight


@pytest.mark.parametrize("change", [
    older_shapes, lambda name, weight: weight.bfloat16(), lambda name, weight: weight.half(),
    lambda name, weight: torch.nn.Parameter(weight)], ids=["older shapes", "bfloat16", "float16", "parameters"])
def test_official_files_come_in_several_forms(model: RWKV, tmp_path: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    weights = {name: change(name, weight) for name, weight in model.state_dict().items()}
    torch.save(weights, tmp_path / "official.pth")
    loaded = RWKV.from_pretrained(tmp_path / "official.pth")
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, weights[name].float().view(weight.shape))


def test_an_old_format_without_zip_is_read(model: RWKV, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same_weights(RWKV.from_pretrained(tmp_path / "old.pth"), model)


@torch.no_grad()
def test_bfloat16_keeps_the_decays_in_float32(model: RWKV, saved_file: Path) -> None:
    loaded = RWKV.from_pretrained(saved_file, dtype="bfloat16")
    dtypes = {name: weight.dtype for name, weight in loaded.state_dict().items()}
    assert {dtypes[name] for name in dtypes if name.endswith(("time_decay", "time_first"))} == {torch.float32}
    assert {dtypes[name] for name in dtypes if is_linear_weight(name, model.generation.group(name))} == {torch.bfloat16}
    assert (loaded(tokens(model))[0] - model(tokens(model))[0]).abs().max() < 0.3


@pytest.mark.parametrize(("generation", "file", "dtype"), [
    ("rwkv4", "model.pth", "bfloat16"), ("rwkv7", "model.pth", "float32"), ("rwkv7", "model.gguf", "q8_0")])
@torch.no_grad()
def test_without_bfloat16_instructions_activations_are_in_float32(
        generation: str, file: str, dtype: str, without_bfloat16: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's bfloat16 products would be a hundred times as slow."""
    small_model(generation=generation, n_embd=32, n_ffn=32, vocab_size=257).save_pretrained(tmp_path / file, BPE, dtype=dtype)
    loaded = RWKV.from_pretrained(tmp_path / file, dtype="bfloat16")
    rounded = RWKV.from_pretrained(tmp_path / file, dtype="float32")
    for name, weight in rounded.state_dict().items():
        if is_linear_weight(name, rounded.generation.group(name)) or name == "emb.weight":
            weight.copy_(weight.bfloat16())
            assert loaded.state_dict()[name].dtype == torch.bfloat16
    several = tokens(loaded, B=3, T=6)
    expected, _ = rounded.prefill(several)
    logits, _ = loaded.prefill(several)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for decoder_class in (Decoder, CDecoder)[:1 if why_not(loaded) else 2]:
        decoder = decoder_class(loaded, loaded.prefill(several[:, :-1])[1])
        torch.testing.assert_close(decoder.step(several[:, -1]), logits, rtol=0, atol=1e-5)


# The location of a checkpoint


def test_a_run_directory_means_its_last_checkpoint(model: RWKV, tmp_path: Path) -> None:
    last = tmp_path / "runs" / "one" / "checkpoints" / "last.ckpt"
    model.save_pretrained(last)
    assert locate(tmp_path / "runs" / "one") == last
    (tmp_path / "runs" / "latest").write_text("one\n")       # a text file replaces the link where links require privileges
    assert locate(tmp_path / "runs" / "latest") == last
    (tmp_path / "runs" / "latest").unlink()
    (tmp_path / "runs" / "latest").symlink_to("one", target_is_directory=True)
    assert locate(tmp_path / "runs" / "latest").samefile(last)


@pytest.mark.parametrize("latest", ["link", "file", "none"])
def test_the_newest_run_takes_the_place_of_a_deleted_latest_run(model: RWKV, tmp_path: Path, latest: str,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    """The run may have been deleted, with its temporary folder or alone, or its disk may not be mounted."""
    runs = tmp_path / "runs"
    for age, name in enumerate(("sweep/one", "mine", "older")):
        last = runs / name / "checkpoints" / "last.ckpt"
        model.save_pretrained(last)
        os.utime(last, (1e9 - age, 1e9 - age))
    (runs / "unsaved").mkdir()
    if latest == "link":
        (runs / "latest").symlink_to(tmp_path / "gone", target_is_directory=True)
    elif latest == "file":
        (runs / "latest").write_text(f"{tmp_path / 'gone'}\n")
    for _ in range(2):
        assert locate(runs / "latest") == runs / "sweep" / "one" / "checkpoints" / "last.ckpt"
    (line,) = capsys.readouterr().err.splitlines()
    assert str(runs / "sweep" / "one") in line
    shutil.rmtree(runs / "sweep")
    assert follow(runs / "latest") == runs / "mine"


def test_runs_of_sweeps_are_listed_with_the_others(model: RWKV, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "sweep/seed=0", "sweep/seed=1"):
        model.save_pretrained(Path("runs", name, "checkpoints", "last.ckpt"))
    Path("runs", "latest").symlink_to("sweep/seed=1", target_is_directory=True)
    list_models([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("a run")] == ["runs/mine", "runs/sweep/seed=0",
                                                                            "runs/sweep/seed=1"]
    shutil.rmtree("runs/mine")
    with pytest.raises(CheckpointError, match=r"folder of runs.*seed=0"):
        locate("runs")


def test_a_deleted_latest_run_is_named_if_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "gone", target_is_directory=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*latest"):
        locate(tmp_path / "latest")


@pytest.mark.parametrize("content", [b"\x93NUMPY\0", b"GGUF\x03\0\0\0", b"", b"\xff\xfe", b"one\ntwo\n", b"a" * 5000])
def test_a_file_called_latest_that_contains_no_path_is_itself_the_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    assert locate(tmp_path / "latest") == tmp_path / "latest"
    with pytest.raises(CheckpointError, match="latest"):
        read_checkpoint(tmp_path / "latest")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_link_to_a_missing_file_is_named(model: RWKV, tmp_path: Path, file: str) -> None:
    """A copy of the Hub's cache without its blobs contains such links."""
    folder = tmp_path / "org" / "repository"
    model.save_pretrained(folder)
    (folder / ".#config.json").symlink_to("editor@host")         # an editor's lock
    assert locate(folder) == folder
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("../../blobs/abc")
    for path in (folder, folder / file):
        with pytest.raises(CheckpointError, match=rf"{file} is a link to \.\./\.\./blobs/abc"):
            locate(path)


# Files that are not checkpoints


class Harmful:
    """An object that creates the file `executed` in the current directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_the_error_for_a_missing_file_says_what_to_pass(tmp_path: Path) -> None:
    refuses(tmp_path / "absent.pth", "a file, a Hugging Face directory, a run directory of train.py")
    refuses(tmp_path, "last.ckpt")


@pytest.mark.parametrize("content", [b"", b"hello world\n", b"PK", b"PK\x03\x04" + 50 * b"x", "Köln".encode(), b"\x80\x02.",
                                     b"\x80\x04K\x05.", pickle.dumps([1, 2]), b"{\"a\": 1}", bytes(range(256)) * 40])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign.ckpt").write_bytes(content)
    refuses(tmp_path / "foreign.ckpt")


@pytest.mark.parametrize("content", [Harmful(), {"emb.weight": Harmful()}], ids=["alone", "among weights"])
def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "harmful.pkl").write_bytes(pickle.dumps(content))
    torch.save(content, tmp_path / "harmful.pth")
    torch.save(content, tmp_path / "harmful.old.pth", _use_new_zipfile_serialization=False)
    for path in tmp_path.glob("harmful*"):
        refuses(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_later_pickle_protocol_is_named(model: RWKV, tmp_path: Path, zipped: bool) -> None:
    torch.save(model.state_dict(), tmp_path / "model.pth", pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    refuses(tmp_path / "model.pth", "protocol 2")


def without(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.pop(name)


def with_values(**changed: Any) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name.replace("__", "."): value for name, value in changed.items()})


def like_rwkv5(weights: Weights) -> None:
    """Renames and reshapes the weights of time mixing as in RWKV-5, which has heads, time_faaaa and a gate."""
    for layer in range(3):
        att = f"blocks.{layer}.att."
        weights[f"{att}time_faaaa"] = weights.pop(f"{att}time_first").view(2, 4)
        weights[f"{att}time_decay"] = weights[f"{att}time_decay"].view(2, 4)
        weights[f"{att}gate.weight"] = weights[f"{att}key.weight"].clone()


def test_a_missing_path_is_answered_with_the_nearest_name(model: RWKV, tmp_path: Path) -> None:
    """Other programs add the suffix .pth themselves."""
    model.save_pretrained(tmp_path / "RWKV-4-World-3B-ctx4096.pth")
    for name in ("RWKV-4-World-3B-ctx4096", "rwkv-4-world-3B-ctx4096.pth"):
        refuses(tmp_path / name, f"did you mean {tmp_path / 'RWKV-4-World-3B-ctx4096.pth'}?")
    for name in ("other.pth", "no/folder.pth"):
        with pytest.raises(CheckpointError) as error:
            read_checkpoint(tmp_path / name)
        assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(("change", "part"), [
    (lambda weights: weights.clear(), "RWKV-4"),
    (without("emb.weight"), "emb.weight"),
    (without("head.weight"), "head.weight"),
    (without("blocks.2.ffn.time_mix_r"), "blocks.2.ffn.time_mix_r"),
    (without("blocks.0.att.time_first"), "blocks.0.att.time_first"),
    (without("blocks.0.ln0.bias"), "blocks.0.ln0.bias"),
    (with_values(blocks__1__att__gate__weight=torch.zeros(3)), "blocks.1.att.gate.weight"),
    (with_values(step=torch.zeros(3)), "step"),
    (with_values(head__weight=torch.zeros(50, 15)), "head.weight"),
    (with_values(emb__weight=torch.zeros(50)), "emb.weight"),
    (with_values(blocks__1__att__time_mix_k=torch.zeros(15)), "blocks.1.att.time_mix_k"),
    (with_values(blocks__0__att__key__weight=torch.zeros(())), "blocks.0.att.key.weight"),
    (with_values(blocks__0__ln1__weight="a word"), "blocks.0.ln1.weight"),
    (with_values(blocks__0__att__time_mix_k=7), "blocks.0.att.time_mix_k"),
    (like_rwkv5, "RWKV-5"),
])
def test_weights_that_do_not_fit_are_named(model: RWKV, tmp_path: Path, change: Callable[[Weights], None], part: str) -> None:
    weights = dict(model.state_dict())
    change(weights)
    torch.save(weights, tmp_path / "odd.pth")
    refuses(tmp_path / "odd.pth", part)


@pytest.mark.parametrize("change", [
    lambda content: content.pop("state_dict"), lambda content: content["timemix"].pop("run"),
    lambda content: content.update(timemix="a word"), lambda content: content["timemix"]["run"]["model"].update(n_head=3),
    lambda content: content.update(state_dict=[]), lambda content: content["state_dict"].update(step=3),
    lambda content: content["state_dict"].pop("model.head.weight"), lambda content: content["timemix"].update(vocab_size=51)])
def test_an_entry_that_cannot_be_understood_is_refused(model: RWKV, tmp_path: Path, change: Callable[[Weights], None]) -> None:
    model.save_pretrained(tmp_path / "model.ckpt", CharTokenizer("abc"))
    content = torch.load(tmp_path / "model.ckpt", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "odd.ckpt")
    refuses(tmp_path / "odd.ckpt")


# Saving


@pytest.mark.parametrize("name", ["model.pt", "model.onnx", "model.pth.gz"])
def test_another_suffix_is_refused_before_anything_is_written(model: RWKV, tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError):
        model.save_pretrained(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_configuration_of_a_pth_is_inferred_from_its_tensors(saved_file: Path) -> None:
    assert read_checkpoint(saved_file).config == ModelConfig(n_layer=3, n_embd=16, n_att=8, n_ffn=24, ctx_len=1024)


def test_added_weights_are_not_saved(tmp_path: Path) -> None:
    model = small_model()
    prune.l1_unstructured(model.head, "weight", 0.5)
    with pytest.raises(UserError, match=r"head\.weight_(mask|orig)"):
        model.save_pretrained(tmp_path / "model.pth")
    prune.remove(model.head, "weight")
    model.save_pretrained(tmp_path / "model.pth")


class Sharded(Tensor):
    """A tensor whose numbers are in other tensors, like a DTensor, which is a weight of a model after fully_shard."""

    def __tensor_flatten__(self) -> Any: ...


def test_a_sharded_model_says_how_to_save_it(tmp_path: Path) -> None:
    model = small_model()
    model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(Sharded))
    with pytest.raises(UserError, match=r"head\.weight is a Sharded.*full_state_dict=True"):
        model.save_pretrained(tmp_path / "model.pth")


def test_a_tokenizer_larger_than_the_model_is_not_saved_with_it(model: RWKV, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        model.save_pretrained(tmp_path / "model.ckpt", ByteTokenizer())
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_other_than_the_files_is_refused(tmp_path: Path) -> None:
    model, own = small_model("conv1d"), CharTokenizer("abc")
    model.save_pretrained(tmp_path / "own.ckpt", own)
    model.save_pretrained(tmp_path / "none.pth")
    with_own, with_none = read_checkpoint(tmp_path / "own.ckpt"), read_checkpoint(tmp_path / "none.pth")
    require_tokenizer(with_own, own, "it")
    require_tokenizer(with_none, own, "it")
    small_model("conv1d", 600).save_pretrained(tmp_path / "large.pth")
    with_more = read_checkpoint(tmp_path / "large.pth")
    for checkpoint, other in ((with_own, CharTokenizer("abd")), (with_none, ByteTokenizer()), (with_more, ByteTokenizer())):
        with pytest.raises(UserError):
            require_tokenizer(checkpoint, other, "it")
