"""A Hugging Face directory: config.json, weights by RwkvForCausalLM's names, whole or in shards, and tokenizer.json.

Source: huggingface/transformers, models/rwkv/modeling_rwkv.py and configuration_rwkv.py. RwkvConfig's rescale_every (6 by
default) halves the weights of the layers in memory, in its state_dict too, to keep float16 activations small; a directory
that was saved in that condition cannot be told from another. Ours say 0, which changes nothing, unless they hold float16.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rwkv.checkpoint.content import ENTRY, Content, Outgoing
from rwkv.checkpoint.formats import _torch_file, pth, safetensors
from rwkv.checkpoint.rwkv4 import to_hugging_face
from rwkv.checkpoint.stored import Stored
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import write_file, write_folder

SUFFIXES = ("",)
CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS = "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"
OURS = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS)
WHOLE, INDICES = (WEIGHTS, "pytorch_model.bin"), ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SIZES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "attention_hidden_size": "n_att",
         "intermediate_size": "n_ffn", "vocab_size": "vocab_size"}
LAYER_NORM_EPSILON = 1e-5                # torch's default, and what RWKV-4 was trained with
RESCALE_FLOAT16_EVERY = 6


def recognises(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read(path: Path) -> Content:
    config = _config(path / CONFIG)
    content = _weights(path)
    declared = {ours: config[theirs] for theirs, ours in SIZES.items() if config.get(theirs) is not None}
    if isinstance(length := config.get("context_length"), int) and length > 0:
        declared["ctx_len"] = length
    return replace(content, path=path, declared=declared, tokenizer=_tokenizer(path / TOKENIZER),
                   tied=config.get("tie_word_embeddings") is True)


def write(path: Path, outgoing: Outgoing) -> None:
    """Raises ValueError rather than replace a directory that holds anything but such a checkpoint."""
    _require_ours(path)
    write_folder(path, lambda folder: _write(folder, outgoing))


def _write(folder: Path, outgoing: Outgoing) -> None:
    tensors = [tensor.renamed(to_hugging_face(name)) for name, tensor in outgoing.tensors.items()]
    metadata = {ENTRY: json.dumps(outgoing.entry)}
    write_file(folder / WEIGHTS, lambda file: safetensors.write_tensors(file, tensors, metadata))
    for name, text in _texts(outgoing).items():
        write_file(folder / name, lambda file, text=text: file.write(text.encode()))     # type: ignore[misc]


def _texts(outgoing: Outgoing) -> dict[str, str]:
    texts = {CONFIG: json.dumps(_described(outgoing), indent=2) + "\n"}
    tokenizer = outgoing.entry.get("tokenizer") or {}
    if tokenizer.get("kind") == "json" and isinstance(tokenizer.get("definition"), str):
        texts[TOKENIZER] = tokenizer["definition"]
        texts[TOKENIZER_CONFIG] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
    return texts


def _described(outgoing: Outgoing) -> dict[str, Any]:
    config, dtype = outgoing.config, outgoing.tensors["emb.weight"].dtype
    return {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv", "vocab_size": outgoing.vocab_size,
            "context_length": config.ctx_len, "num_hidden_layers": config.n_layer, "hidden_size": config.n_embd,
            "attention_hidden_size": config.n_att or config.n_embd, "intermediate_size": config.n_ffn or 4 * config.n_embd,
            "layer_norm_epsilon": LAYER_NORM_EPSILON, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
            "rescale_every": RESCALE_FLOAT16_EVERY if dtype == torch.float16 else 0, "use_cache": True,
            "torch_dtype": str(dtype).removeprefix("torch.")}


def _require_ours(path: Path) -> None:
    if path.is_file():
        raise UserError(f"{path} is a file, and a Hugging Face checkpoint is a directory: choose another name")
    others = sorted(file.name for file in path.iterdir() if file.name not in OURS) if path.is_dir() else []
    if others:
        raise UserError(f"{path} holds {others[0]}, which is not part of what would be written there: choose an empty "
                        "directory")


def _config(path: Path) -> dict[str, Any]:
    config = _json(path)
    kind, epsilon = config.get("model_type"), config.get("layer_norm_epsilon", LAYER_NORM_EPSILON)
    if kind != "rwkv":
        version = f"an RWKV-{kind[4:]}" if isinstance(kind, str) and kind.startswith("rwkv") else "no RWKV-4"
        raise CheckpointError(f"{path.parent} is {version} checkpoint (config.json has model_type {kind!r}, expected 'rwkv'): "
                              "this program runs RWKV-4 alone")
    if epsilon != LAYER_NORM_EPSILON:
        raise CheckpointError(f"{path} has layer_norm_epsilon {epsilon}, expected {LAYER_NORM_EPSILON}, which RWKV-4 is "
                              "computed with")
    return config


def _weights(path: Path) -> Content:
    for name in WHOLE:
        if (path / name).is_file():
            return _read_file(path / name)
    for name in INDICES:
        if (path / name).is_file():
            return _shards(path / name)
    raise CheckpointError(f"{path} has no weights beside its config.json: expected {' or '.join((*WHOLE, *INDICES))}; is the "
                          "download incomplete?")


def _read_file(path: Path) -> Content:
    return pth.read(path) if _torch_file.recognises(path) else safetensors.read(path)


def _shards(index: Path) -> Content:
    """The tensors where the index says that they are."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files beside it: the file is damaged")
    shards = {file: _shard(index, file) for file in sorted(set(places.values()))}
    return Content(index.parent, {name: _tensor(index, shards[file], name) for name, file in places.items()})


def _shard(index: Path, file: str) -> Content:
    if not (index.parent / file).is_file():
        raise CheckpointError(f"{index.parent} lacks the shard {file}, which {index.name} names: is the download incomplete?")
    return _read_file(index.parent / file)


def _tensor(index: Path, shard: Content, name: str) -> Stored:
    if name not in shard.tensors:
        raise CheckpointError(f"{shard.path} lacks the tensor {name}, which {index.name} says is there: do the files belong "
                              "together?")
    return shard.tensors[name]


def _tokenizer(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    return {"kind": "json", "definition": _text(path)}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): the file is damaged or incomplete") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a JSON object: the file is damaged")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}): the file is damaged") from error


