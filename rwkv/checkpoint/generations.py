"""The generations whose checkpoints are read, each in a file rwkvN.py beside this one, and the checks that they share.

A generation's file has

    model                          the file of the same name in rwkv/model/, which states names and shapes
    official_name                  turns another program's name of a tensor into the official one
    recognises                     whether tensors by official names are of this generation
    arranged, laid_out             turn tensors of any format into the official arrangement, and that into a format's
    directory_factor               a matrix's factor beside that of a Hugging Face directory
    widths, has_many_forms         the sizes that follow from the tensors' shapes; whether a vector has several shapes in files
    EXTENSIONS                     later versions, which are refused by name, each with a pattern of its tensors' names
    HUGGING_FACE_TYPE, HUGGING_FACE_SIZES, hugging_face_config          for config.json
    HUGGING_FACE_OTHER_TYPES       other values of model_type, written by other programs
    HUGGING_FACE_FEATURES          keys of config.json for features that this program lacks, and what the features are
    HUGGING_FACE_CONSTANTS         keys of config.json that say how the model computes, with the values that are supported
    HUGGING_FACE_UNUSED            keys that change nothing that is computed
    GGUF_ARCHITECTURE              None if GGUF does not have the generation; otherwise there are also GGUF_SIZES,
                                   GGUF_CONSTANTS and GGUF_UNUSED, as above, and
                                   GGUF_FLOAT32 and GGUF_UNQUANTISED: names of tensors that are float32, or not quantised

A key of a configuration that changes what is computed is used or refused; one that is in none of these lists is reported.
"""

import importlib
import json
import math
import pkgutil
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from rwkv.checkpoint.stored import DTYPES, Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.model.base import TIME_STATE

if TYPE_CHECKING:                        # mypy reports a generation that lacks something
    from rwkv.model import rwkv4, rwkv7
    from rwkv.model.base import DeepEmbedGeneration, Generation

    _RWKV4: Generation = rwkv4
    _RWKV7: DeepEmbedGeneration = rwkv7

Shape = tuple[int, ...]

# Parts of names from wrappers for training: torch.compile, activation checkpointing, FSDP, DeepSpeed, data parallelism
WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module", "_forward_module",
                      "module"))

# For the message about an unrecognised file: versions of RWKV-LM, and names of tensors that only they have
OTHER_VERSIONS = {"RWKV-1": r"tok_emb\.weight|.*\.time_(w|alpha|beta|gamma)", "RWKV-2": r".*\.time_mix",
                  "RWKV-6": r".*\.time_(maa|decay_w)\w*", "RWKV-5": r".*\.(time_faaaa|time_mix_g|ln_x\.weight|gate\.weight)"}


def generations() -> list[ModuleType]:
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    return [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder)
            if re.fullmatch(r"rwkv\d+", module.name)]


def generation_of(config: ModelConfig) -> ModuleType:
    return importlib.import_module(f"{__name__.rpartition('.')[0]}.{config.generation}")


def supported() -> str:
    return " and ".join(generation.model.NAME for generation in generations())


def recognise(path: Path, tensors: Mapping[str, Stored],
              declared: Mapping[str, Any]) -> tuple[ModuleType, dict[str, Stored]]:
    """The generation of a file's tensors, and the tensors by official name and in the official arrangement.

    declared: as in Content. Raises CheckpointError where no generation recognises the tensors.
    """
    for generation in generations():
        official = _official(path, tensors, generation)
        if generation.recognises(official):
            return generation, generation.arranged(official, declared)
    raise CheckpointError(_why_none(path, tensors))


def _official(path: Path, tensors: Mapping[str, Stored], generation: ModuleType) -> dict[str, Stored]:
    """The tensors by official name, without wrappers anywhere and without the prefix that stands before emb.weight.

    Lightning puts model. before each name, Hugging Face rwkv., PEFT base_model.model.
    """
    names = {theirs: generation.official_name(".".join(part for part in theirs.split(".") if part not in WRAPPERS))
             for theirs in tensors}
    prefix = next((match[1] for name in names.values() if (match := re.fullmatch(r"((?:.*\.)?)emb\.weight", name))), "")
    official: dict[str, Stored] = {}
    for theirs, tensor in tensors.items():
        name = names[theirs].removeprefix(prefix)
        if name in official:
            raise CheckpointError(f"{path} holds the tensor {name} twice, the second time as {theirs}: the file is ambiguous")
        official[name] = tensor.renamed(name)
    return official


def tuned_kind(names: Collection[str]) -> str | None:
    """What a file with tensors of these names is, and what takes it, where it holds only what tuning has trained."""
    if names and all(name.endswith(TIME_STATE) for name in names):
        return ("a tuned state, which begins a text on the weights that it was trained with: name these as checkpoint=, and "
                "this file as state=, to serve.py as adapters=NAME=FILE, or to train.py with init_from= as tune.state=")
    if any(re.search(r"\.(lora_[AB]|lora_magnitude_vector|miss_block|disha|bone)\b", name) for name in names):
        return ("an adapter such as LoRA, which changes the weights that it was trained with: name these as checkpoint= and "
                "the adapter as lora=, or to serve.py as adapters=NAME=PATH; timemix convert --lora merges them for training")
    if {"logits", "att_x", "ffn_x"} <= set(names):
        return ("a saved state, which continues a text on the weights that it was made with: name these as checkpoint=, and "
                "this file as state=")
    return None


def _why_none(path: Path, tensors: Mapping[str, Stored]) -> str:
    extensions = {version: pattern for generation in generations() for version, pattern in generation.EXTENSIONS.items()}
    for version, pattern in {**extensions, **OTHER_VERSIONS}.items():
        for name in tensors:
            if re.fullmatch(pattern, name):
                return f"{path} is an {version} checkpoint (it has {name}): this program runs {supported()}"
    if kind := tuned_kind(tensors):
        return f"{path} is {kind}"
    for name, tensor in tensors.items():
        if name.endswith(".time_first") and len(tensor.shape) == 2 and tensor.shape[1] == 1:
            return (f"{path} is an RWKV-3 checkpoint (its {name} is {tensor.shape}, not {tensor.shape[:1]}): this program runs "
                    f"{supported()}")
    return f"{path} is not a checkpoint of {supported()}: it holds {_some(tensors)}"


def config_of(path: Path, generation: ModuleType, tensors: Mapping[str, Stored], ctx_len: int) -> tuple[ModelConfig, int]:
    """The configuration and the vocabulary's size, found from the tensors' shapes."""
    def matrix(name: str) -> Shape:
        if name not in tensors:
            raise CheckpointError(f"{path} is not a whole {generation.model.NAME} checkpoint: it lacks {name}; it holds "
                                  f"{_some(tensors)}")
        if len(tensors[name].shape) != 2 or 0 in tensors[name].shape:
            raise CheckpointError(f"{path}: {name} is {tensors[name].shape}, expected a matrix: was it converted wrongly?")
        return tensors[name].shape

    n_layer = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    sizes = {"n_layer": n_layer, **generation.widths(matrix, tensors), "ctx_len": ctx_len}
    try:
        config = ModelConfig(generation=generation.__name__.rpartition(".")[2], **sizes)
        generation.model.resolved(config)        # refuses sizes that do not go together
    except UserError as error:
        raise CheckpointError(f"{path} has tensors of sizes that no {generation.model.NAME} has: was it converted wrongly? "
                              f"({error})") from error
    return config, matrix("emb.weight")[0]


def require_supported(where: str | Path, stated: Mapping[str, Any], constants: Mapping[str, tuple[Any, ...]],
                      features: Mapping[str, str]) -> None:
    """Raises CheckpointError where a configuration says that the model computes something else than this program.

    constants, features: as in HUGGING_FACE_CONSTANTS and HUGGING_FACE_FEATURES. A value may be one for each layer.
    """
    for name, expected in constants.items():
        value = stated.get(name)
        values = value if isinstance(value, list) else [value]
        if any(each is not None and not any(_equal(each, right) for right in expected) for each in values):
            raise CheckpointError(f"{where} has {name} {json.dumps(value)[:60]}, expected "
                                  f"{' or '.join(json.dumps(right) for right in expected)}: such a model computes something "
                                  "else than this program")
    for name, feature in features.items():
        if stated.get(name):
            raise CheckpointError(f"{where} has {name} {json.dumps(stated[name])[:60]}: the model uses {feature}, which this "
                                  "program does not have")


def _equal(value: Any, right: Any) -> bool:
    """Whether they are one value; numbers may differ by float32's rounding."""
    if isinstance(right, bool | str) or isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) is type(right) and bool(value == right)
    return math.isclose(value, right, rel_tol=1e-6)


def unread(where: str | Path, others: Mapping[str, Any]) -> list[str]:
    """A sentence about the keys that this program does not know and that have a value; none where there are none."""
    names = [name for name, value in others.items() if value not in (None, False, 0, "", [], {})]
    return [f"{where} has {', '.join(names)}, which this program does not know and does not use"] if names else []


def require_sizes(path: Path, stated: Mapping[str, Any], config: ModelConfig, vocab_size: int) -> None:
    """Raises CheckpointError where a size in `stated`, by its name in ModelConfig, differs from that of the tensors."""
    sizes = {**vars(config), "vocab_size": vocab_size, "n_heads": config.n_embd // config.head_size}
    for name, size in sizes.items():
        if name != "ctx_len" and name in stated and stated[name] != size:
            raise CheckpointError(f"{path} says {name}={stated[name]!r} and its tensors have {size}: they do not belong "
                                  "together")


def fit(path: Path, generation: ModuleType, tensors: Mapping[str, Stored], config: ModelConfig,
        vocab_size: int) -> dict[str, Stored]:
    """The tensors in the model's order and shapes. Raises CheckpointError for a missing or surplus tensor or a wrong shape."""
    expected: dict[str, Shape] = generation.model.shapes(config, vocab_size)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"{path} lacks the tensor {missing[0]} {expected[missing[0]]}, and {len(missing)} of "
                              f"{len(expected)} in all: it is not a whole {generation.model.NAME} checkpoint, or one that was "
                              "converted wrongly")
    surplus = sorted(tensors.keys() - expected.keys())
    if surplus:
        more = f" and {len(surplus) - 1} more" if surplus[1:] else ""
        if kind := tuned_kind(surplus):
            raise CheckpointError(f"{path} holds weights and, beside them, {kind}")
        raise CheckpointError(f"{path} holds the tensor {surplus[0]}{more} which {generation.model.NAME} does not have: is it "
                              "another RWKV version, or an extension of it?")
    for name, shape in expected.items():
        _require_fit(path, tensors[name], shape, generation.has_many_forms(name))
    stored = {name: tensors[name].viewed(shape) for name, shape in expected.items()}
    return {name: tensor.cast(torch.float32) if tensor.dtype == torch.float64 else tensor for name, tensor in stored.items()}


def _require_fit(path: Path, tensor: Stored, shape: Shape, many_forms: bool) -> None:
    if tensor.dtype not in (*DTYPES.values(), torch.float64):
        raise CheckpointError(f"{path}: {tensor.name} holds {tensor.dtype}, expected one of {', '.join(DTYPES)}: quantised "
                              "weights are not read")
    if tensor.shape != shape and not (many_forms and _squeezed(tensor.shape) == _squeezed(shape)):
        raise CheckpointError(f"{path}: {tensor.name} is {tensor.shape}, expected {shape} beside the other tensors: was "
                              "the file converted wrongly?")


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _some(names: Collection[str]) -> str:
    return f"{len(names)} tensors ({', '.join(list(names)[:3])}, ...)" if names else "nothing"
