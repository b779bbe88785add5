"""The generations whose checkpoints are read, one file rwkvN.py each beside this one, and the checks that they share.

A generation offers

    model                          the file of the same name in rwkv/model/, which states names and shapes
    official_name, recognises      the official name for another program's; whether tensors by official names are its own
    arranged, laid_out             tensors from any format's arrangement to the official one; to that of a format
    widths, has_many_forms         the sizes that follow from the tensors' shapes; whether a vector has several shapes in files
    EXTENSIONS                     versions that go beyond it, which are refused by name, and their tensors' names
    HUGGING_FACE_TYPE, HUGGING_FACE_SIZES, hugging_face_config          for config.json
    HUGGING_FACE_OTHER_TYPES       other programs' model_type
    HUGGING_FACE_FEATURES          keys of config.json that are set for what this program does not have, with a name for it
    HUGGING_FACE_CONSTANTS         numbers of config.json that epsilons follow from, with the values of every released model
    GGUF_ARCHITECTURE              None where GGUF does not have it; else also GGUF_SIZES, gguf_sizes, GGUF_FLOAT32 and
                                   GGUF_UNQUANTISED, the names of tensors that are float32, or never quantised
"""

import importlib
import pkgutil
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rwkv.checkpoint.stored import DTYPES, Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError, UserError

if TYPE_CHECKING:                        # a generation that lacks something is an error of mypy
    from rwkv.model import rwkv4, rwkv7
    from rwkv.model.base import DeepEmbedGeneration, Generation

    _RWKV4: Generation = rwkv4
    _RWKV7: DeepEmbedGeneration = rwkv7

Shape = tuple[int, ...]

# Versions of RWKV-LM and names of tensors that only they have, for the message about a file that no generation recognises
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

    declared: the sizes that the file states, by their names in ModelConfig. Raises CheckpointError where there is none.
    """
    for generation in generations():
        official = _official(path, tensors, generation)
        if generation.recognises(official):
            return generation, generation.arranged(official, declared)
    raise CheckpointError(_why_none(path, tensors))


def _official(path: Path, tensors: Mapping[str, Stored], generation: ModuleType) -> dict[str, Stored]:
    """The tensors by official name, without the prefix that stands before emb.weight.

    DeepSpeed puts _forward_module. before each name, Lightning model., DataParallel module., Hugging Face rwkv.
    """
    names = {theirs: generation.official_name(theirs) for theirs in tensors}
    prefix = next((match[1] for name in names.values() if (match := re.fullmatch(r"((?:.*\.)?)emb\.weight", name))), "")
    official: dict[str, Stored] = {}
    for theirs, tensor in tensors.items():
        name = names[theirs].removeprefix(prefix)
        if name in official:
            raise CheckpointError(f"{path} holds the tensor {name} twice, the second time as {theirs}: the file is ambiguous")
        official[name] = tensor.renamed(name)
    return official


def _why_none(path: Path, tensors: Mapping[str, Stored]) -> str:
    extensions = {version: pattern for generation in generations() for version, pattern in generation.EXTENSIONS.items()}
    for version, pattern in {**extensions, **OTHER_VERSIONS}.items():
        for name in tensors:
            if re.fullmatch(pattern, name):
                return f"{path} is an {version} checkpoint (it has {name}): this program runs {supported()}"
    for name, tensor in tensors.items():
        if name.endswith(".time_first") and len(tensor.shape) == 2 and tensor.shape[1] == 1:
            return (f"{path} is an RWKV-3 checkpoint (its {name} is {tensor.shape}, not {tensor.shape[:1]}): this program runs "
                    f"{supported()}")
    return f"{path} is not a checkpoint of {supported()}: it holds {_some(tensors)}"


def config_of(path: Path, generation: ModuleType, tensors: Mapping[str, Stored], ctx_len: int) -> tuple[ModelConfig, int]:
    """The configuration and the vocabulary's size, read off the tensors."""
    def matrix(name: str) -> Shape:
        if name not in tensors:
            raise CheckpointError(f"{path} is not a whole {generation.model.NAME} checkpoint: it lacks {name}; it holds "
                                  f"{_some(tensors)}")
        if len(tensors[name].shape) != 2 or 0 in tensors[name].shape:
            raise CheckpointError(f"{path}: {name} is {tensors[name].shape}, expected a matrix: the file is damaged")
        return tensors[name].shape

    n_layer = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    sizes = {"n_layer": n_layer, **generation.widths(matrix, tensors), "ctx_len": ctx_len}
    try:
        config = ModelConfig(generation=generation.__name__.rpartition(".")[2], **sizes)
        generation.model.resolved(config)        # refuses sizes that do not go together
    except UserError as error:
        raise CheckpointError(f"{path} has tensors of sizes that no {generation.model.NAME} has: the file is damaged, or was "
                              f"converted wrongly ({error})") from error
    return config, matrix("emb.weight")[0]


def require_sizes(path: Path, stated: Mapping[str, Any], config: ModelConfig, vocab_size: int) -> None:
    """Raises CheckpointError where a size that a file states, by its name in ModelConfig, is not that of its tensors."""
    for name, found in {**vars(config), "vocab_size": vocab_size}.items():
        if name != "ctx_len" and name in stated and stated[name] != found:
            raise CheckpointError(f"{path} says {name}={stated[name]!r} and its tensors have {found}: they do not belong "
                                  "together, or the file is damaged")


def fit(path: Path, generation: ModuleType, tensors: Mapping[str, Stored], config: ModelConfig,
        vocab_size: int) -> dict[str, Stored]:
    """The tensors in the model's order and shapes. Raises CheckpointError for a missing or surplus one, or another shape."""
    expected: dict[str, Shape] = generation.model.shapes(config, vocab_size)
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"{path} lacks the tensor {missing[0]} {expected[missing[0]]}, and {len(missing)} of "
                              f"{len(expected)} in all: it is not a whole {generation.model.NAME} checkpoint, or one that was "
                              "converted wrongly")
    surplus = sorted(tensors.keys() - expected.keys())
    if surplus:
        more = f" and {len(surplus) - 1} more" if surplus[1:] else ""
        raise CheckpointError(f"{path} holds the tensor {surplus[0]}{more} which {generation.model.NAME} does not have: is it "
                              "another RWKV version, or an extension of it?")
    for name, shape in expected.items():
        _require_fit(path, tensors[name], shape, generation.has_many_forms(name))
    return {name: tensors[name].viewed(shape) for name, shape in expected.items()}


def _require_fit(path: Path, tensor: Stored, shape: Shape, many_forms: bool) -> None:
    if tensor.dtype not in DTYPES.values():
        raise CheckpointError(f"{path}: {tensor.name} holds {tensor.dtype}, expected one of {', '.join(DTYPES)}: quantised "
                              "weights are not read")
    if tensor.shape != shape and not (many_forms and _squeezed(tensor.shape) == _squeezed(shape)):
        raise CheckpointError(f"{path}: {tensor.name} is {tensor.shape}, expected {shape} beside the other tensors: the file "
                              "is damaged, or was converted wrongly")


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _some(names: Collection[str]) -> str:
    return f"{len(names)} tensors ({', '.join(list(names)[:3])}, ...)" if names else "nothing"
