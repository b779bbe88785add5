"""RWKV-4 in other people's files: the names they give its tensors, and how other versions are recognised.

Official names and shapes are those of rwkv/model/rwkv4.py.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rwkv.checkpoint.stored import DTYPES, Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError
from rwkv.model.rwkv4 import Shape

HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward", "time_mix_k": "time_mix_key",
                "time_mix_v": "time_mix_value", "time_mix_r": "time_mix_receptance"}
OFFICIAL = {theirs: ours for ours, theirs in HUGGING_FACE.items()}

# A tensor's name that no RWKV-4 has, per version: RWKV-LM's RWKV-v1 to RWKV-v7, and rwkv.cpp's joined x_rwkvag
OTHER_VERSIONS = (("RWKV-1", r"tok_emb\.weight|.*\.time_(w|alpha|beta|gamma)"), ("RWKV-2", r".*\.time_mix"),
                  ("RWKV-7", r".*\.(x_r|r_k|k_k|x_rwkvag)"), ("RWKV-6", r".*\.time_(maa|decay_w)\w*"),
                  ("RWKV-5", r".*\.(time_faaaa|time_mix_g|ln_x\.weight|gate\.weight)"))


def to_hugging_face(name: str) -> str:
    translated = ".".join(HUGGING_FACE.get(part, part) for part in name.split("."))
    return translated if name.startswith("head.") else f"rwkv.{translated}"


def to_official(path: Path, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """By official name: what stands before emb.weight is taken off, and Hugging Face's names are translated."""
    translate = _translation(tensors)
    found: dict[str, Stored] = {}
    for theirs, tensor in tensors.items():
        name = translate(theirs)
        if name in found:
            raise CheckpointError(f"{path} holds {name} twice, the second time as {theirs}: which of them counts cannot be "
                                  "known")
        found[name] = tensor.renamed(name)
    return found


def _translation(names: Collection[str]) -> Callable[[str], str]:
    """DeepSpeed puts _forward_module. before each name, Lightning model., DataParallel module."""
    if any(part in OFFICIAL for name in names for part in name.split(".")):
        return _from_hugging_face
    prefix = next((match[1] for name in names if (match := re.fullmatch(r"((?:.*\.)?)emb\.weight", name))), "")
    return lambda name: name.removeprefix(prefix)


def _from_hugging_face(name: str) -> str:
    return ".".join(OFFICIAL.get(part, part) for part in name.removeprefix("rwkv.").split("."))


def refuse_other_versions(path: Path, tensors: Mapping[str, Stored]) -> None:
    """RWKV-3 has RWKV-4's names, but time_first is [C,1] there, while a [C,1] of RWKV-4 is time_decay alone."""
    for version, pattern in OTHER_VERSIONS:
        for name in tensors:
            if re.fullmatch(pattern, name):
                raise CheckpointError(f"{path} is an {version} checkpoint (it has {name}): this program runs RWKV-4 alone")
    for name, tensor in tensors.items():
        if name.endswith(".time_first") and len(tensor.shape) == 2 and tensor.shape[1] == 1:
            raise CheckpointError(f"{path} is an RWKV-3 checkpoint (its {name} is {tensor.shape}, not {tensor.shape[:1]}): "
                                  "this program runs RWKV-4 alone")


def sizes(path: Path, tensors: Mapping[str, Stored], ctx_len: int) -> tuple[ModelConfig, int]:
    """The configuration and the vocabulary's size, read off the tensors."""
    vocab_size, n_embd = _matrix(path, tensors, "emb.weight")
    n_att, _ = _matrix(path, tensors, "blocks.0.att.key.weight")
    n_ffn, _ = _matrix(path, tensors, "blocks.0.ffn.key.weight")
    n_layer = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    return ModelConfig(n_layer=n_layer, n_embd=n_embd, n_att=n_att, n_ffn=n_ffn, ctx_len=ctx_len), vocab_size


def _matrix(path: Path, tensors: Mapping[str, Stored], name: str) -> tuple[int, int]:
    if name not in tensors:
        raise CheckpointError(f"{path} is not an RWKV-4 checkpoint: it lacks {name}; it holds {_some(tensors)}")
    if len(tensors[name].shape) != 2 or 0 in tensors[name].shape:
        raise CheckpointError(f"{path}: {name} is {tensors[name].shape}, expected a matrix; the file is damaged, or no RWKV-4")
    rows, columns = tensors[name].shape
    return rows, columns


def require_sizes(path: Path, stated: Mapping[str, Any], config: ModelConfig, vocab_size: int) -> None:
    """What a file says of its sizes must be what its tensors have."""
    for name, found in {**vars(config), "vocab_size": vocab_size}.items():
        if name != "ctx_len" and name in stated and stated[name] != found:
            raise CheckpointError(f"{path} says {name}={stated[name]!r} and its tensors have {found}: they do not belong "
                                  "together, or the file is damaged")


def fit(path: Path, tensors: Mapping[str, Stored], expected: Mapping[str, Shape]) -> dict[str, Stored]:
    """The tensors in the model's order and shapes. Raises CheckpointError for one missing, surplus or of another shape."""
    _require_names(path, tensors, expected)
    return {name: _fit(path, tensors[name], shape) for name, shape in expected.items()}


def _require_names(path: Path, tensors: Mapping[str, Stored], expected: Mapping[str, Shape]) -> None:
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"{path} lacks the tensor {missing[0]} {expected[missing[0]]}, and {len(missing)} of "
                              f"{len(expected)} in all: it is not a whole RWKV-4 checkpoint, or one that was converted wrongly")
    surplus = sorted(tensors.keys() - expected.keys())
    if surplus:
        raise CheckpointError(f"{path} holds {_list(surplus)} which RWKV-4 does not have: another RWKV version, or an "
                              "extension of it?")


def _fit(path: Path, tensor: Stored, shape: Shape) -> Stored:
    """Vectors come as [C], [C,1] or [1,1,C]; matrices in their own shape alone."""
    found = tensor.shape
    if tensor.dtype not in DTYPES.values():
        raise CheckpointError(f"{path}: {tensor.name} holds {tensor.dtype}, expected one of {', '.join(DTYPES)}: quantised "
                              "weights are not read")
    if found == shape or (".time_" in tensor.name and _squeezed(found) == _squeezed(shape)):
        return tensor.viewed(shape)
    raise CheckpointError(f"{path}: {tensor.name} is {found}, expected {shape} beside the other tensors: the file is damaged, "
                          "or was converted wrongly")


def _squeezed(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _some(names: Collection[str]) -> str:
    return f"{len(names)} tensors ({', '.join(list(names)[:3])}, ...)" if names else "nothing"


def _list(names: Iterable[str]) -> str:
    first, *more = names
    return f"the tensor {first}" + (f" and {len(more)} more" if more else "")
