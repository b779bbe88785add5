"""Tests RWKV-7 in Hugging Face directories of transformers (official), fla, transformers-rwkv and rwkv7-hf."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from files import NAMES, hugging_face_tensors
from models import RANKS, small_model, tokens, world_vocabulary
from numpy_rwkv7 import NumpyRWKV7
from refusals import refuses
from safetensors.torch import save_file
from torch import Tensor

from rwkv.chat.encoding import encode, for_tokenizer
from rwkv.chat.jinja import JinjaTemplate
from rwkv.checkpoint.files import read_checkpoint, write_checkpoint
from rwkv.errors import CheckpointError, UserError
from rwkv.pretrained import RWKV, template_choice
from rwkv.tokenizer import world_json
from rwkv.tokenizer.tokenizers import Tokenizer, WorldTokenizer
from rwkv.tokenizer.world import Vocabulary
from rwkv.tools import convert

TEXT = "It's a text | (of some) kind: \\s* 它 \N{GRINNING FACE}\n\n<|endoftext|> [a]{3}^$ + ? é"
MORE = ("\n\n", "It's", " text", "|", "(of", "\\s", "\\s*", "它", "]{", "^$", " + ?", "[a", "een", "é")
ONE_HEAD = pytest.param(256, marks=pytest.mark.thorough)
WORLD = WorldTokenizer(world_vocabulary(token.encode() for token in MORE).to_text())


@cache
def model_of(head_size: int = 64, vocab_size: int = WORLD.vocab_size) -> RWKV:
    return small_model("reference", vocab_size, generation="rwkv7", n_embd=256, head_size=head_size, n_layer=2)


def write_official(folder: Path, model: RWKV, config: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Writes a directory as transformers' Rwkv7ForCausalLM.save_pretrained does, and returns its tensors."""
    folder.mkdir()
    tensors = {name if name == "head.weight" else f"rwkv7.{name}": weight.clone()
               for name, weight in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    head_size = model.config.head_size
    settings = {"architectures": ["Rwkv7ForCausalLM"], "bos_token_id": 0, "dtype": "float32", "eos_token_id": 0,
                "head_dim": head_size, "hidden_size": 256, "intermediate_size": 1024, "max_position_embeddings": 8192,
                "model_type": "rwkv7", "norm_bias": True, "norm_eps": 1e-05, "num_heads": 256 // head_size,
                "num_hidden_layers": 2, "pad_token_id": 0, "tie_word_embeddings": False, "use_cache": True,
                "use_deep_embed": False, "vocab_size": model.vocab_size, "wkv_state_dtype": "float32", **RANKS}
    (folder / "config.json").write_text(json.dumps({**settings, **(config or {})}))
    return tensors


def in_float64(tensors: dict[str, Tensor], ids: Tensor, epsilon: float) -> np.ndarray:
    """Returns float64 logits of tensors with the names of the official layout, which begin with rwkv7."""
    weights = {name.removeprefix("rwkv7."): tensor.float().numpy() for name, tensor in tensors.items()}
    return NumpyRWKV7(weights, epsilon)(ids.numpy())[0]


def logits(model: RWKV, ids: Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(ids)[0].float().numpy()


def assert_near(actual: np.ndarray, expected: np.ndarray, relative: float = 2e-5) -> None:
    assert np.abs(actual - expected).max() < relative * np.abs(expected).max()


# The official layout


@pytest.mark.parametrize("head_size", [64, 128, ONE_HEAD])
def test_transformers_layout_is_read(tmp_path: Path, head_size: int) -> None:
    """The epsilon of the group norm is head_dim * norm_eps, even if the path names the file in the directory."""
    model = model_of(head_size)
    tensors = write_official(tmp_path / "model", model)
    ids = tokens(model, B=1, T=16)
    expected = in_float64(tensors, ids, head_size * 1e-5)
    for path in (tmp_path / "model", tmp_path / "model" / "model.safetensors"):
        assert_near(logits(RWKV.from_pretrained(path, "reference"), ids), expected)
    if head_size != 64:                  # a wrong epsilon would fail the test
        assert np.abs(in_float64(tensors, ids, 64e-5) - expected).max() > 1e-4 * np.abs(expected).max()


def test_one_of_two_weight_files_is_read_with_the_configuration(tmp_path: Path) -> None:
    """Neither file states the epsilon, the tokenizer or the chat template."""
    folder = tmp_path / "model"
    one = write_official(folder, model_of(128))
    other = {name: tensor * 1.25 if name.endswith("ln_x.bias") else tensor for name, tensor in one.items()}
    torch.save(other, folder / "pytorch_model.bin")
    (folder / "tokenizer.json").write_text(world_json.to_json(WORLD.to_dict()["vocabulary"]))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    ids = tokens(model_of(128), B=1, T=16)
    for name, tensors in (("model.safetensors", one), ("pytorch_model.bin", other)):
        assert_near(logits(RWKV.from_pretrained(folder / name, "reference"), ids), in_float64(tensors, ids, 128e-5))
        checkpoint = read_checkpoint(folder / name)
        assert checkpoint.tokenizer
        assert template_choice(checkpoint).template == str(folder / "chat_template.jinja")
    with pytest.raises(CheckpointError, match="different weights"):
        read_checkpoint(folder)


@pytest.mark.parametrize("head_size", [64, 128, ONE_HEAD])
@pytest.mark.parametrize("layout", ["official", "fla", "transformers-rwkv"])
def test_a_written_directory_computes_the_same_elsewhere(tmp_path: Path, head_size: int, layout: str) -> None:
    model = model_of(head_size)
    model.save_pretrained(tmp_path / "model.pth")
    if layout == "transformers-rwkv" and head_size != 64:
        with pytest.raises(UserError, match="head size of 64"):
            write_checkpoint(read_checkpoint(tmp_path / "model.pth"), tmp_path / "model", layout=layout)
        return
    convert.main([str(tmp_path / "model.pth"), str(tmp_path / "model"), "--layout", layout])
    ids = tokens(model, B=1, T=16)
    expected = logits(model, ids)
    assert_near(logits(RWKV.from_pretrained(tmp_path / "model", "reference"), ids), expected)
    tensors = hugging_face_tensors(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    if layout == "official":
        assert_near(in_float64(tensors, ids, head_size * 1e-5), expected)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert shapes == {name if name == "head.weight" else f"rwkv7.{name}": tuple(weight.shape)
                          for name, weight in model.state_dict().items()}
        assert config["num_heads"] == 256 // head_size
        assert config["architectures"] == ["Rwkv7ForCausalLM"]
    # Other programs write neither the metadata nor this key
    config.pop("group_norm_epsilon", None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model" / "model.safetensors")
    assert_near(logits(RWKV.from_pretrained(tmp_path / "model", "reference"), ids), expected)


@pytest.mark.parametrize("head_size", [128, ONE_HEAD])
@pytest.mark.parametrize("format", NAMES)
def test_wider_heads_are_stored_in_every_format(tmp_path: Path, head_size: int, format: str) -> None:
    model = model_of(head_size, vocab_size=40)
    model.save_pretrained(tmp_path / NAMES[format])
    ids = tokens(model, B=1, T=16)
    loaded = RWKV.from_pretrained(tmp_path / NAMES[format], "reference")
    assert loaded.config.head_size == head_size
    assert_near(logits(loaded, ids), logits(model, ids), 1e-6 if format != "huggingface" else 2e-5)
    loaded.save_pretrained(tmp_path / "again.pth", dtype="float32")
    assert_near(logits(RWKV.from_pretrained(tmp_path / "again.pth", "reference"), ids), logits(loaded, ids), 1e-6)


def write_transformers_rwkv(folder: Path, model: RWKV, **config: Any) -> dict[str, Tensor]:
    """Writes a directory as transformers-rwkv's converter does, and returns its tensors."""
    folder.mkdir()
    names = {"emb.weight": "model.embed_tokens.weight", "ln_out.weight": "model.norm.weight", "head.weight": "lm_head.weight",
             "ln_out.bias": "model.norm.bias", "blocks.0.ln0.weight": "model.embedding_norm.weight",
             "blocks.0.ln0.bias": "model.embedding_norm.bias"}
    parts = {"blocks": "layers", "ln1": "input_layernorm", "ln2": "post_attention_layernorm", "att": "linear_attn",
             "ffn": "mlp", "receptance": "r_proj", "output": "o_proj", "ln_x": "g_norm"}
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if name in model.generation.UNUSED:
            continue
        target = ".".join(parts.get(part, part) for part in name.split("."))
        target = target.replace("linear_attn.key", "linear_attn.k_proj").replace("linear_attn.value", "linear_attn.v_proj")
        flat = weight.flatten() if weight.dim() == 3 and "x_" not in name else weight
        tensors[names.get(name, f"model.{target}")] = flat.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "architecture_version": "rwkv7", "hidden_size": 256,
                "intermediate_size": 1024, "context_length": 8192, "num_hidden_layers": 2, "num_attention_heads": 4,
                "head_size": 64, "layer_norm_epsilon": 1e-05, "group_norm_epsilon": 64e-5, "embedding_layer_norm_fused": False,
                "number_of_conv_states": 2, "wkv_mode": "fp32io16", "wkv_state_dtype": "float32", "pad_token_id": None,
                "vocab_size": model.vocab_size, **RANKS, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return tensors


def test_transformers_rwkvs_layout_is_read_and_written(tmp_path: Path) -> None:
    model = model_of()
    expected = write_transformers_rwkv(tmp_path / "theirs", model)
    ids = tokens(model, B=1, T=16)
    checkpoint = read_checkpoint(tmp_path / "theirs")
    assert checkpoint.notes == []
    assert checkpoint.config.ctx_len == 8192
    assert_near(logits(RWKV.from_pretrained(tmp_path / "theirs", "reference"), ids), logits(model, ids), 1e-6)
    write_checkpoint(checkpoint, tmp_path / "ours", layout="transformers-rwkv")
    tensors = hugging_face_tensors(tmp_path / "ours")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name].flatten(), tensor.flatten()) for name, tensor in expected.items())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (config["model_type"], config["architecture_version"]) == ("rwkv", "rwkv7")


@pytest.mark.parametrize(("config", "word"), [
    ({"hidden_act": "gelu"}, "hidden_act"), ({"architecture_version": "rwkv6"}, "RWKV-6"),
    ({"embedding_layer_norm_fused": True}, "ln0"), ({"head_size": 32}, "head_size")])
def test_what_the_layout_of_transformers_rwkv_cannot_express(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    write_transformers_rwkv(tmp_path / "model", model_of(), **config)
    refuses(tmp_path / "model", word)


def test_transformers_rwkvs_tokenizer_is_world(tmp_path: Path) -> None:
    """The stock tokenizers library cannot load the trie in tokenizer.json. Some ids below 65,536 may be unused."""
    model = model_of()
    model.save_pretrained(tmp_path / "model.safetensors", WORLD)
    write_checkpoint(read_checkpoint(tmp_path / "model.safetensors"), tmp_path / "model", layout="transformers-rwkv")
    parsed = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    assert parsed["model"]["type"] == "RwkvTrie"
    assert parsed["model"]["vocab"]["<|endoftext|>"] == 0
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(parsed | {"post_processor": None, "decoder": None}))
    definition = read_checkpoint(tmp_path / "model").tokenizer
    assert definition is not None
    assert Tokenizer.from_dict(definition).encode(TEXT) == WORLD.encode(TEXT)


def test_a_stated_epsilon_is_used(tmp_path: Path) -> None:
    model = model_of(128)
    write_official(tmp_path / "model", model, {"group_norm_epsilon": 64e-5})
    ids = tokens(model, B=1, T=16)
    assert_near(logits(RWKV.from_pretrained(tmp_path / "model", "reference"), ids), logits(model, ids))


def test_an_earlier_branchs_keys_are_known(tmp_path: Path) -> None:
    config = {"head_dim": None, "head_size": 128, "norm_eps": None, "layer_norm_epsilon": 1e-5, "context_length": 10240,
              "max_position_embeddings": None}
    write_official(tmp_path / "model", model_of(128), config)
    assert read_checkpoint(tmp_path / "model").config.ctx_len == 10240


@pytest.mark.parametrize(("config", "word"), [
    ({"use_deep_embed": True}, "RWKV-8"), ({"embedding_layer_norm_fused": True}, "ln0"),
    ({"attn": {"layers": [1]}}, "attention"), ({"attention_hidden_size": 512}, "attention_hidden_size"),
    ({"head_dim": 32}, "head_size"), ({"norm_eps": 1e-3}, "norm_eps"), ({"group_norm_epsilon": "x"}, "group_norm_epsilon"),
    ({"decay_low_rank_dim": 7}, "decay_low_rank_dim")])
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    write_official(tmp_path / "model", model_of(), config)
    refuses(tmp_path / "model", "model", word)


def test_a_part_of_deep_embeddings_in_a_directory_is_refused(tmp_path: Path) -> None:
    tensors = write_official(tmp_path / "model", model_of())
    save_file(tensors | {"rwkv7.blocks.0.ffn.s_emb.weight": torch.zeros(3, 4)}, tmp_path / "model" / "model.safetensors")
    refuses(tmp_path / "model", "s1")


def test_rwkv7_hfs_directory_is_read(tmp_path: Path) -> None:
    """The tensors are fla's, and the vocabulary is a text file."""
    model = model_of(128)
    model.save_pretrained(tmp_path / "model", WORLD)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    native = {"model_type": "rwkv7_native", "num_heads": 2, "num_attention_heads": 2, "attention_hidden_size": 256,
              "value_dim": [256, 256], "bos_token_id": 1, "auto_map": {"AutoConfig": "configuration_rwkv7.RWKV7Config"}}
    path.write_text(json.dumps(config | native))
    ids = tokens(model, B=1, T=16)
    assert_near(logits(RWKV.from_pretrained(tmp_path / "model", "reference"), ids), logits(model, ids))
    assert Tokenizer.from_dict(read_checkpoint(tmp_path / "model").tokenizer or {}).hash == WORLD.hash
    path.write_text(json.dumps(config | native | {"attention_hidden_size": 512}))
    refuses(tmp_path / "model", "attention_hidden_size to 512")


def test_layouts_are_for_directories_of_rwkv_7(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "model.pth")
    small_model("reference").save_pretrained(tmp_path / "four.pth")
    for name, out in (("model.pth", "out.safetensors"), ("four.pth", "out")):
        with pytest.raises(UserError):
            write_checkpoint(read_checkpoint(tmp_path / name), tmp_path / out, layout="official")
    assert not (tmp_path / "out").exists()


# The World vocabulary in a directory's tokenizer.json


def world_json_with(**parts: Any) -> str:
    return json.dumps(json.loads(world_json.to_json(WORLD.to_dict()["vocabulary"])) | parts)


def test_the_written_tokenizer_json_gives_the_same_ids_in_its_library(tmp_path: Path) -> None:
    write_checkpoint(read_checkpoint(save_model(tmp_path)), tmp_path / "model", layout="official")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    library.encode_special_tokens = True
    assert library.encode(TEXT).ids == WORLD.encode(TEXT)
    assert library.decode(WORLD.encode(TEXT), skip_special_tokens=False) == TEXT
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 0
    assert not (tmp_path / "model" / "rwkv_vocab_v20230424.txt").exists()


def save_model(folder: Path) -> Path:
    model_of().save_pretrained(folder / "in.safetensors", WORLD)
    return folder / "in.safetensors"


def test_a_tokenizer_json_of_the_world_vocabulary_is_world(tmp_path: Path) -> None:
    write_official(tmp_path / "model", model_of())
    (tmp_path / "model" / "tokenizer.json").write_text(world_json_with())
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 5}')
    tokenizer = Tokenizer.from_dict(read_checkpoint(tmp_path / "model").tokenizer or {})
    assert (tokenizer.kind, tokenizer.hash, tokenizer.ends) == ("world", WORLD.hash, (0,))
    assert Tokenizer.named(str(tmp_path / "model" / "tokenizer.json")).hash == WORLD.hash
    write_checkpoint(read_checkpoint(tmp_path / "model"), tmp_path / "model.gguf")
    assert read_checkpoint(tmp_path / "model.gguf").tokenizer == WORLD.to_dict()


def test_reserved_ids_beyond_the_vocabulary_are_no_tokens() -> None:
    parsed = json.loads(world_json_with())
    parsed["model"]["vocab"]["\ue000rwkv_reserved_65530"] = 65530
    assert world_json.vocabulary_in(json.dumps(parsed)) == WORLD.to_dict()["vocabulary"]


LISTED: dict[int, dict[str, Any]] = {
    0: {"content": "<|begin|>", "special": True}, 311: {"content": "<|im_end|>", "special": True},
    312: {"content": "<extra>", "special": False}, 65: {"content": "<|other|>", "special": True},
    65000: {"content": "<|beyond|>", "special": True}}


@pytest.mark.parametrize("layout", [None, "official", "transformers-rwkv", "model.gguf"])
def test_special_tokens_beside_the_world_vocabulary(tmp_path: Path, layout: str | None) -> None:
    """Special tokens are saved with the model, only templates write them, and those that cannot be added are named."""
    model = model_of()
    model.save_pretrained(tmp_path / "world", WORLD)
    folder = tmp_path / "model"
    write_official(folder, model)
    assert len(Vocabulary.parse(WORLD.to_dict()["vocabulary"], "").tokens) <= 311 < model.vocab_size
    (folder / "rwkv_vocab_v20230424.txt").write_text(WORLD.to_dict()["vocabulary"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": LISTED}))
    checkpoint = read_checkpoint(folder)
    assert [word in checkpoint.notes[0] for word in ("<extra>", "<|other|>", "<|beyond|>", "<|im_end|>")] == [1, 1, 1, 0]
    if layout == "model.gguf":
        write_checkpoint(checkpoint, tmp_path / layout)
        folder = tmp_path / layout
    elif layout is not None:
        write_checkpoint(checkpoint, tmp_path / "again", layout=layout)
        folder = tmp_path / "again"
        save_file({name: tensor.clone() for name, tensor in hugging_face_tensors(folder).items()}, folder / "model.safetensors")
    tokenizer = Tokenizer.from_dict(read_checkpoint(folder).tokenizer or {})
    assert tokenizer.special == {"<|begin|>": 0, "<|im_end|>": 311}
    assert tokenizer.hash == WORLD.hash
    text = f"a<|im_end|>{TEXT}"
    assert tokenizer.encode(text) == WORLD.encode(text)
    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    template = for_tokenizer(JinjaTemplate(source, "a.jinja"), tokenizer)
    ids, = encode(tokenizer, [template.render([{"role": "user", "content": text}])])
    assert ids == [*WORLD.encode(text), 311]
    assert tokenizer.decode(ids) == text
    assert tokenizer.starting(template.stop) == {311}


def test_a_json_of_ids_and_tokens_is_world(tmp_path: Path) -> None:
    """web-rwkv and ai00 have the vocabulary in this file. Tokens that are not UTF-8 are lists of bytes."""
    tokens = {}
    for index, token in enumerate(Vocabulary.parse(WORLD.to_dict()["vocabulary"], "a test").tokens):
        if token:
            tokens[index] = token.decode() if token.isascii() else [*token]
    (tmp_path / "rwkv_vocab.json").write_text(json.dumps(tokens, indent=4))
    assert Tokenizer.named(str(tmp_path / "rwkv_vocab.json")).hash == WORLD.hash
    for wrong in ({**tokens, 3: 5}, {**tokens, 3: None}, {**tokens, "x": "x"}, {65: "A"}):
        assert world_json.vocabulary_in(json.dumps(wrong)) is None


def split_by(expression: str) -> str:
    parsed = json.loads(world_json_with())
    parsed["pre_tokenizer"]["pretokenizers"][1]["pattern"]["Regex"] = expression
    return json.dumps(parsed)


EXPRESSION = json.loads(world_json_with())["pre_tokenizer"]["pretokenizers"][1]["pattern"]["Regex"]


@pytest.mark.parametrize("text", [
    split_by("(?:a|" + EXPRESSION[3:]), split_by(EXPRESSION[:-1] + "|)"), split_by(EXPRESSION.replace("\\|", "\\s", 1)),
    split_by(EXPRESSION.replace("\\|", ".", 1)), split_by(EXPRESSION[:-1] + "|unknown)"),
    world_json_with(normalizer={"type": "NFC"}), world_json_with(added_tokens=[{"id": 3, "content": "<x>", "special": True}]),
    world_json_with(model={"type": "BPE"}), world_json_with(pre_tokenizer=None), "[]", '{"WordLevel": ', '"WordLevel"'])
def test_another_rule_or_vocabulary_is_not_world(text: str) -> None:
    """Each text has another order of tokens, an empty token, a class of characters, a token without an id or another part."""
    assert world_json.vocabulary_in(world_json_with()) is not None
    assert world_json.vocabulary_in(text) is None
