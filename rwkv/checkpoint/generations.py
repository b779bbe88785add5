"""Finds the generation of RWKV that a checkpoint belongs to, and checks that no tensor is missing or misshapen.

Each generation has a module rwkvN.py in this folder. Official names and shapes are those of the .pth files that RWKV-LM writes.
A generation's module has

    model                          the module of the same name in rwkv/model/, which states names and shapes
    official_name                  converts another program's tensor name to the official one
    recognises                     returns True if tensors with these official names belong to the generation
    to_official_layout             converts tensors of any format to the official layout
    to_format_layout               converts tensors of the official layout to a format's layout
    directory_factor               returns the official matrix divided by the matrix in a Hugging Face directory
    widths, has_several_shapes     infer sizes from tensors' shapes; tell whether a vector's shape varies between files
    EXTENSIONS                     later versions, which are not supported, each with a pattern that matches its tensors' names
    HUGGING_FACE_TYPE, HUGGING_FACE_SIZES, hugging_face_config          for config.json
    HUGGING_FACE_OTHER_TYPES       other values of model_type, written by other programs
    HUGGING_FACE_FEATURES          keys of config.json that enable unsupported features, with descriptions of these features
    HUGGING_FACE_CONSTANTS         keys of config.json that affect the computation, with the supported values
    HUGGING_FACE_UNUSED            keys that do not affect the computation
    GGUF_ARCHITECTURE              None if GGUF does not support the generation; otherwise also GGUF_SIZES,
                                   GGUF_CONSTANTS and GGUF_UNUSED, like those for config.json, and
                                   GGUF_FLOAT32 and GGUF_UNQUANTISED: tensors that are always float32, or not quantised

A configuration key that affects the computation is either used or rejected. A key in none of these lists is reported.
"""

import importlib
import json
import math
import pkgutil
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rwkv.checkpoint.lazy_tensors import DTYPES, Stored
from rwkv.checkpoint.location import SHARD
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.io.json_types import JsonMapping
from rwkv.model.base import TIME_STATE, without_wrappers

Shape = tuple[int, ...]

# The end of an error about a tensor without values
PARTITIONED = ("has no values. DeepSpeed's ZeRO-3 saves such files, with the values elsewhere: run zero_to_fp32.py in the "
               "folder of the training checkpoint, and pass the file that it writes")

HEAD = "head.weight"

# An unsupported version of RWKV is named in the error message if a tensor's name matches its pattern
OTHER_VERSIONS = {"RWKV-1": r"tok_emb\.weight|.*\.time_(w|alpha|beta|gamma)", "RWKV-2": r".*\.time_mix",
                  "RWKV-6": r".*\.time_(maa|decay_w)\w*", "RWKV-5": r".*\.(time_faaaa|time_mix_g|ln_x\.weight|gate\.weight)"}


def generations() -> list[ModuleType]:
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    return [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder)
            if re.fullmatch(r"rwkv\d+", module.name)]


def generation_of(config: ModelConfig) -> ModuleType:
    return importlib.import_module(f"{__name__.rpartition('.')[0]}.{config.generation}")


def supported_names() -> str:
    return " and ".join(generation.model.NAME for generation in generations())


def recognise(path: Path, tensors: Mapping[str, Stored],
              declared: JsonMapping) -> tuple[ModuleType, dict[str, Stored]]:
    """Returns the generation that a file's tensors belong to, and the tensors in the official layout, by official name.

    `declared` has the sizes that the file states. Raises CheckpointError if no generation recognises the tensors.
    """
    for generation in generations():
        official = _by_official_name(path, tensors, generation)
        if generation.recognises(official):
            return generation, generation.to_official_layout(official, declared)
    raise CheckpointError(_explain_unrecognised(path, tensors))


def _by_official_name(path: Path, tensors: Mapping[str, Stored], generation: ModuleType) -> dict[str, Stored]:
    """Returns the tensors by official name, without WRAPPERS and without the prefix that emb.weight has.

    Such prefixes are Lightning's "model.", Hugging Face's "rwkv." and PEFT's "base_model.model.".
    """
    names = {file_name: generation.official_name(without_wrappers(file_name)) for file_name in tensors}
    prefix = next((match[1] for name in names.values() if (match := re.fullmatch(r"((?:.*\.)?)emb\.weight", name))), "")
    official: dict[str, Stored] = {}
    for file_name, tensor in tensors.items():
        name = names[file_name].removeprefix(prefix)
        if name.endswith(".head.weight") and prefix.startswith(name.removesuffix("head.weight")):
            name = "head.weight"         # the head lies outside "rwkv.", but within the prefixes before it
        if name in official:
            raise CheckpointError(f"{path} contains the tensor {name} twice, once under the name {file_name}: the file is "
                                  "ambiguous")
        official[name] = tensor.rename(name)
    return official


def tuned_kind(names: Collection[str]) -> str | None:
    """Describes a file that contains only adapters or states, and how to use it. Returns None for other tensor names."""
    if names and all(name.endswith(TIME_STATE) for name in names):
        return ("a tuned state, which is an initial state for the weights that it was trained with. Pass those weights as "
                "checkpoint= and this file as state=; for serve.py, pass adapters=NAME=FILE; for train.py, pass the weights as "
                "init_from= and this file as tune.state=")
    if any(re.search(r"\.(lora_[AB]|lora_magnitude_vector|miss_block|disha|bone)\b|\.lora\.[01]$", name) for name in names):
        return ("an adapter such as LoRA, which changes the weights that it was trained with. Pass those weights as "
                "checkpoint= and the adapter as lora=; for serve.py, pass adapters=NAME=PATH; for training, merge the adapter "
                "with timemix convert --lora")
    if {"logits", "att_x", "ffn_x"} <= set(names):
        return ("a saved state, which continues a sequence with the weights that computed it. Pass those weights as "
                "checkpoint= and this file as state=; for training, pass as tune.state= the time_state.pth that a run with "
                "tune=state writes beside this file")
    return None


def _explain_unrecognised(path: Path, tensors: Mapping[str, Stored]) -> str:
    if SHARD.fullmatch(path.name):
        return _describe_shard(path)
    extensions = {version: pattern for generation in generations() for version, pattern in generation.EXTENSIONS.items()}
    has_later_names = any(name.endswith(".r_k") for name in tensors)     # RWKV-7 and later, under another program's names too
    for version, pattern in (extensions if has_later_names else {**extensions, **OTHER_VERSIONS}).items():
        for name in tensors:
            if re.fullmatch(pattern, name):
                return f"{path} is an {version} checkpoint, because it contains {name}. This program runs {supported_names()}"
    if kind := tuned_kind(tensors):
        return f"{path} is {kind}"
    for name, tensor in tensors.items():
        if name.endswith(".time_first") and len(tensor.shape) == 2 and tensor.shape[1] == 1:
            return (f"{path} is an RWKV-3 checkpoint, because {name} has shape {tensor.shape}, not {tensor.shape[:1]}. This "
                    f"program runs {supported_names()}")
    return (f"{path} is not an RWKV checkpoint: the file contains {_describe_names(tensors)}. This program runs "
            f"{supported_names()}")


def _describe_shard(path: Path) -> str:
    return f"{path} is one shard of a Hugging Face directory: pass the directory with all shards and their index"


def config_of(path: Path, generation: ModuleType, tensors: Mapping[str, Stored], ctx_len: int) -> tuple[ModelConfig, int]:
    """Infers the configuration and the vocabulary size from the tensors' shapes."""
    def matrix(name: str) -> Shape:
        if name not in tensors and SHARD.fullmatch(path.name):
            raise CheckpointError(_describe_shard(path))
        if name not in tensors:
            raise CheckpointError(f"{path} is not a complete {generation.model.NAME} checkpoint: {name} is missing. "
                                  f"The file contains {_describe_names(tensors)}")
        if tensors[name].count <= 1:
            raise CheckpointError(f"{path}: {name} {PARTITIONED}")
        if len(tensors[name].shape) != 2:
            raise CheckpointError(f"{path}: {name} must be a matrix; got shape {tensors[name].shape}. The file may have been "
                                  "converted incorrectly")
        return tensors[name].shape

    n_layer = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    sizes = {"n_layer": n_layer, **generation.widths(matrix, tensors), "ctx_len": ctx_len}
    try:
        config = ModelConfig(generation=generation.__name__.rpartition(".")[2], **sizes)
        generation.model.with_default_widths(config)     # rejects inconsistent sizes
    except UserError as error:
        raise CheckpointError(f"{path} has tensor sizes that are impossible in {generation.model.NAME} ({error}). The file may "
                              "have been converted incorrectly") from error
    return config, matrix("emb.weight")[0]


def require_supported(where: str | Path, stated: JsonMapping, constants: Mapping[str, tuple[object, ...]],
                      features: Mapping[str, str]) -> None:
    """Raises CheckpointError if a configuration describes a model that this program computes differently.

    Args:
        stated: the configuration; a constant may be a list with one value per layer.
        constants: the supported values of each key, as in HUGGING_FACE_CONSTANTS.
        features: unsupported features, as in HUGGING_FACE_FEATURES.
    """
    for name, expected in constants.items():
        value = stated.get(name)
        values = value if isinstance(value, list) else [value]
        if any(item is not None and not any(_equal_up_to_rounding(item, right) for right in expected) for item in values):
            raise CheckpointError(f"{where}: {name} must be {' or '.join(json.dumps(right) for right in expected)}; got "
                                  f"{json.dumps(value)[:60]}, which is not supported")
    for name, feature in features.items():
        if stated.get(name):
            raise CheckpointError(f"{where} sets {name} to {json.dumps(stated[name])[:60]}: the model uses {feature}, which "
                                  "this program does not support")


def _equal_up_to_rounding(value: object, right: Any) -> bool:
    if isinstance(right, bool | str) or isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) is type(right) and bool(value == right)
    return math.isclose(value, right, rel_tol=1e-6)


def unknown_key_notes(where: str | Path, others: JsonMapping) -> list[str]:
    """Returns a list with one message about unknown configuration keys that are set; [] if there are none."""
    names = [name for name, value in others.items() if value not in (None, False, 0, "", [], {})]
    return [f"{where} has {', '.join(names)}, which this program ignores"] if names else []


def require_sizes(path: Path, stated: JsonMapping, config: ModelConfig, vocab_size: int) -> None:
    """Raises CheckpointError if a size in `stated`, by its name in ModelConfig, contradicts the tensors' shapes."""
    sizes = {**vars(config), "vocab_size": vocab_size, "n_heads": config.n_embd // config.head_size}
    for name, size in sizes.items():
        if name != "ctx_len" and name in stated and stated[name] != size:
            raise CheckpointError(f"{path} states {name}={stated[name]!r}, but the shapes of the tensors imply {size}. The "
                                  "configuration and the weights may come from different models")


def fit(path: Path, generation: ModuleType, tensors: Mapping[str, Stored], config: ModelConfig,
        vocab_size: int) -> dict[str, Stored]:
    """Returns the tensors in the model's order and shapes. Raises CheckpointError for missing, surplus or misshapen tensors."""
    expected: dict[str, Shape] = generation.model.shapes(config, vocab_size)
    missing = [name for name in expected if name not in tensors]
    if missing and SHARD.fullmatch(path.name):
        raise CheckpointError(_describe_shard(path))
    if missing == [HEAD]:
        remedy = "set tie_word_embeddings to true in config.json" if path.is_dir() else \
            "pass the directory with the config.json that sets tie_word_embeddings to true"
        raise CheckpointError(f"{path} has no output head ({HEAD}), so it is not a language model. If the embedding is also "
                              f"the head, {remedy}")
    if missing:
        raise CheckpointError(f"{path} lacks {len(missing)} of {len(expected)} tensors, such as {missing[0]} "
                              f"{expected[missing[0]]}: the file is not a complete {generation.model.NAME} checkpoint, or was "
                              "converted incorrectly")
    surplus = sorted(tensors.keys() - expected.keys())
    if surplus:
        more = f" and {len(surplus) - 1} more" if surplus[1:] else ""
        if kind := tuned_kind(surplus):
            raise CheckpointError(f"{path} contains weights and also {kind}")
        raise CheckpointError(f"{path} has the tensor {surplus[0]}{more}, unknown in {generation.model.NAME}. The file may be "
                              "from another RWKV version or from an extension")
    for name, shape in expected.items():
        _require_fit(path, tensors[name], shape, generation.has_several_shapes(name))
    stored = {name: tensors[name].view(shape) for name, shape in expected.items()}
    return {name: tensor.cast(torch.float32) if tensor.dtype == torch.float64 else tensor for name, tensor in stored.items()}


def require_dtype(path: Path, tensor: Stored) -> None:
    """Raises CheckpointError if the tensor does not have the dtype of an unquantised weight."""
    if tensor.dtype not in (*DTYPES.values(), torch.float64):
        raise CheckpointError(f"{path}: the dtype of {tensor.name} must be one of {', '.join(DTYPES)}; got {tensor.dtype}. "
                              "Quantised weights of this kind are not supported")


def _require_fit(path: Path, tensor: Stored, shape: Shape, several_shapes: bool) -> None:
    require_dtype(path, tensor)
    if tensor.shape != shape and not (several_shapes and squeeze(tensor.shape) == squeeze(shape)):
        raise CheckpointError(f"{path}: the shape of {tensor.name} must be {shape} to match the other tensors; got "
                              f"{tensor.shape}. The file may have been converted incorrectly")


def squeeze(shape: Shape) -> Shape:
    """Returns the shape without sizes of 1."""
    return tuple(size for size in shape if size != 1)


def _describe_names(names: Collection[str]) -> str:
    return f"{len(names)} tensors ({', '.join(list(names)[:3])}, ...)" if names else "nothing"
