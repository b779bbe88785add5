"""A Hugging Face directory: config.json, weights in one file or in shards, and the tokenizer. That is a tokenizer.json, or the
World vocabulary in the file that fla's directories and llama.cpp's converter use.

Tensors have transformers' names. RWKV-7's directories have fla's form or that of transformers' branch for RWKV-7, in which the
World vocabulary is a tokenizer.json too (rwkv/tokenizer/world_json.py). fla's is written unless form=official asks for the
other one. Directories of rwkv7-hf (model_type rwkv7_native) have fla's tensors.

With a tokenizer.json the ends of text come from the first of generation_config.json, config.json, tokenizer_config.json and
special_tokens_map.json that names a token which can end a text, or else from ends_by_rule of rwkv/tokenizer/special.py. The
World vocabulary ends texts with id 0, whatever these files say.

Source: huggingface/transformers, models/rwkv/modeling_rwkv.py and configuration_rwkv.py, generation/configuration_utils.py
(eos_token_id: an id or a list of ids) and the branch's models/rwkv7; flash-linear-attention, fla/models/rwkv7;
rwkv-rs/hf-adapter.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rwkv.chat.stated import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG
from rwkv.checkpoint import card
from rwkv.checkpoint.content import ENTRY, Content, Outgoing
from rwkv.checkpoint.formats import FORMS, _torch_file, pth, safetensors
from rwkv.checkpoint.generations import generation_of, generations, supported
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import write_file, write_folder
from rwkv.model.base import MATRICES
from rwkv.tokenizer import special, world_json

TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
SPECIAL_TOKENS = "special_tokens_map.json"
WORLD = "rwkv_vocab_v20230424.txt"
OURS = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, WORLD)
WHOLE = (WEIGHTS, "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def recognises(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read(path: Path) -> Content:
    config, generation = _config(path / CONFIG)
    content = _weights(path)
    for name, expected in generation.HUGGING_FACE_CONSTANTS.items():
        if config.get(name) not in (None, expected):
            raise CheckpointError(f"{path / CONFIG} has {name} {config[name]}, expected {expected}: its norms have another "
                                  "epsilon than this program's")
    for name, feature in generation.HUGGING_FACE_FEATURES.items():
        if config.get(name):
            raise CheckpointError(f"{path / CONFIG} has {name} {json.dumps(config[name])[:60]}: the model uses {feature}, "
                                  "which this program does not have")
    declared = _declared(path / CONFIG, config, generation.HUGGING_FACE_SIZES)
    length = declared.pop("ctx_len", None)
    if isinstance(length, int) and length > 0:
        declared["ctx_len"] = length
    declared |= _epsilon(path / CONFIG, config, generation, content.entry is not None)
    return replace(content, path=path, declared=declared, tokenizer=_tokenizer(path),
                   tied=config.get("tie_word_embeddings") is True)


def _declared(path: Path, config: dict[str, Any], sizes: dict[str, str]) -> dict[str, Any]:
    """The sizes by our names. Raises CheckpointError where the file states two values of one size."""
    declared: dict[str, Any] = {}
    for theirs, ours in sizes.items():
        value = config.get(theirs)
        if value is None:
            continue
        if declared.setdefault(ours, value) != value:
            raise CheckpointError(f"{path} has {theirs} {value}, which is {declared[ours]} by another key: a model of such a "
                                  "shape is not supported, or the file is damaged")
    return declared


def _epsilon(path: Path, config: dict[str, Any], generation: ModuleType, ours: bool) -> dict[str, float]:
    """The epsilon of the group norm, under its key in config.json; {} if it is the generation's own. ours: this program wrote
    the file; without the key it then means the generation's own epsilon."""
    key = getattr(generation, "GROUP_NORM", None)
    head_size = config.get("head_dim") or config.get("head_size")
    if key is None or (key not in config and (ours or not isinstance(head_size, int) or head_size < 1)):
        return {}
    epsilon = config.get(key, generation.group_norm_epsilon(head_size))
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise CheckpointError(f"{path} has {key} {epsilon!r}, expected a small positive number: the file is damaged")
    return {key: epsilon}


def write(path: Path, outgoing: Outgoing) -> None:
    """Writes the directory. Raises UserError where it holds anything that is not part of such a checkpoint, and for a form
    that the generation does not have."""
    if outgoing.form not in (None, *FORMS):
        raise UserError(f"the form of a Hugging Face directory is one of {', '.join(FORMS)}; got {outgoing.form!r}")
    generation = generation_of(outgoing.config)
    if outgoing.form is not None and not hasattr(generation, "OFFICIAL_PREFIX"):
        raise UserError(f"{generation.model.NAME} has one form of Hugging Face directory: leave the form out")
    _require_ours(path)
    write_folder(path, lambda folder: _write(folder, outgoing))


def _write(folder: Path, outgoing: Outgoing) -> None:
    arrangement = "official" if outgoing.form == "official" else "huggingface"
    tensors = generation_of(outgoing.config).laid_out(outgoing.tensors, arrangement)
    metadata = {ENTRY: json.dumps(outgoing.entry)}
    write_file(folder / WEIGHTS, lambda file: safetensors.write_tensors(file, tensors.values(), metadata))
    for name, text in _texts(outgoing).items():
        write_file(folder / name, lambda file, text=text: file.write(text.encode()))     # type: ignore[misc]


def _stated_dtype(outgoing: Outgoing) -> torch.dtype:
    """The widest dtype of the matrices. A program that loads all in it then keeps merged adapters, which are float32."""
    group = generation_of(outgoing.config).model.group
    dtypes = (tensor.dtype for name, tensor in outgoing.tensors.items() if group(name) in MATRICES)
    return functools.reduce(torch.promote_types, dtypes)


def _texts(outgoing: Outgoing) -> dict[str, str]:
    """The text of each file beside the weights."""
    tokenizer = outgoing.entry.get("tokenizer") or {}
    in_json = tokenizer.get("kind") == "json" and isinstance(tokenizer.get("definition"), str)
    ends = (special.ends_of(tokenizer) if in_json else []) or [0]
    ids = {"bos_token_id": ends[0], "eos_token_id": ends if len(ends) > 1 else ends[0]}
    dtype = _stated_dtype(outgoing)
    form = {} if outgoing.form is None else {"form": outgoing.form}
    config = {**generation_of(outgoing.config).hugging_face_config(outgoing.config, outgoing.vocab_size, dtype, **form), **ids,
              "tie_word_embeddings": False, "use_cache": True, "torch_dtype": str(dtype).removeprefix("torch.")}
    texts = {CONFIG: json.dumps(config, indent=2) + "\n"}
    if outgoing.card:
        texts[card.FILE] = outgoing.card
    if in_json:
        texts[TOKENIZER] = tokenizer["definition"]
        parsed = json.loads(tokenizer["definition"])
        end = next((name for name, index in special.vocabulary(parsed).items() if index == ends[0]), None)
        names = {} if end is None else {"bos_token": end, "eos_token": end}
        texts[TOKENIZER_CONFIG] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=2) + "\n"
    if tokenizer.get("kind") == "world" and outgoing.form == "official":
        texts[TOKENIZER] = world_json.to_json(tokenizer["vocabulary"])
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), world_json.END)
        texts[TOKENIZER_CONFIG] = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names,
                                              "split_special_tokens": True}, indent=2) + "\n"
    elif tokenizer.get("kind") == "world":
        texts[WORLD] = tokenizer["vocabulary"]
    if outgoing.form == "official":
        texts[GENERATION_CONFIG] = json.dumps({**ids, "pad_token_id": ends[0]}, indent=2) + "\n"
    return texts


def _require_ours(path: Path) -> None:
    if path.is_file():
        raise UserError(f"{path} is a file, and a Hugging Face checkpoint is a directory: choose another name")
    others = sorted(file.name for file in path.iterdir() if file.name not in OURS and not card.is_ours(file)) \
        if path.is_dir() else []
    if others:
        raise UserError(f"{path} holds {others[0]}, which is not part of what would be written there: choose an empty "
                        "directory")


def _config(path: Path) -> tuple[dict[str, Any], ModuleType]:
    config = _json(path)
    kind = config.get("model_type")
    generation = next((module for module in generations()
                       if kind in (module.HUGGING_FACE_TYPE, *module.HUGGING_FACE_OTHER_TYPES)), None)
    if generation is None:
        known = " or ".join(repr(module.HUGGING_FACE_TYPE) for module in generations())
        version = f"an RWKV-{kind[4:]}" if isinstance(kind, str) and kind.startswith("rwkv") else "no RWKV"
        raise CheckpointError(f"{path.parent} is {version} checkpoint (config.json has model_type {kind!r}, expected {known}): "
                              f"this program runs {supported()}")
    return config, generation


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
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files beside it: the file is damaged")
    shards: dict[str, Content] = {}
    for file in sorted({*places.values()}):
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent} lacks the shard {file}, which {index.name} names: is the download "
                                  "incomplete?")
        shards[file] = _read_file(index.parent / file)
    for name, file in places.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{shards[file].path} lacks the tensor {name}, which {index.name} says is there: do the "
                                  "files belong together?")
    return Content(index.parent, {name: shards[file].tensors[name] for name, file in places.items()})


def _tokenizer(folder: Path) -> dict[str, Any] | None:
    if (folder / TOKENIZER).is_file():
        text = _text(folder / TOKENIZER)
        stated = [*_stated_ends(folder)]
        if (vocabulary := world_json.vocabulary_in(text)) is not None:
            return {"kind": "world", "vocabulary": vocabulary}
        return special.definition_with_ends(text, stated)
    if (folder / WORLD).is_file():
        return {"kind": "world", "vocabulary": _text(folder / WORLD)}
    return None


def _stated_ends(folder: Path) -> Iterator[list[int | str]]:
    """For each file that may state tokens that end a text, in transformers' order, their ids or names."""
    for name in (GENERATION_CONFIG, CONFIG):
        ids = _json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        ids = ids if isinstance(ids, list) else [ids]
        yield [each for each in ids if isinstance(each, int) and not isinstance(each, bool)]
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        token = _json(folder / name).get("eos_token") if (folder / name).is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        yield [token] if isinstance(token, str) else []


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
