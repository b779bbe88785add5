"""Recognises RWKV-4's checkpoints, converts names from and to Hugging Face's, and infers sizes from shapes.

Official names and shapes are those of rwkv/model/rwkv4. GGUF does not support RWKV-4: llama.cpp runs only RWKV-6 and 7.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import ModelConfig
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.model import rwkv4 as model
from rwkv.model.base import Generation

if TYPE_CHECKING:                        # so that mypy reports missing names
    _GENERATION: Generation = model

FOREIGN = r".*\.(time_mix_g|(gate|ln_x)\.weight)"       # only RWKV-5 has these names; RWKV-5 also has time_first and time_mix_k

GGUF_ARCHITECTURE = None
HUGGING_FACE_TYPE = "rwkv"               # model_type in config.json
HUGGING_FACE_SIZES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "attention_hidden_size": "n_att",
                      "intermediate_size": "n_ffn", "vocab_size": "vocab_size", "context_length": "ctx_len"}
HUGGING_FACE_OTHER_TYPES: tuple[str, ...] = ()
HUGGING_FACE_FEATURES: dict[str, str] = {}
HUGGING_FACE_CONSTANTS = {"layer_norm_epsilon": (1e-5,)}
HUGGING_FACE_UNUSED = ("rescale_every",)         # see hugging_face_config
EXTENSIONS: dict[str, str] = {}
HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward", "time_mix_k": "time_mix_key",
                "time_mix_v": "time_mix_value", "time_mix_r": "time_mix_receptance"}
OFFICIAL = {hugging_face: official for official, hugging_face in HUGGING_FACE.items()}


def recognises(tensors: Mapping[str, Stored]) -> bool:
    """Returns True if the tensors are RWKV-4's: they include time_first and time_mix_k, but no name unique to RWKV-5.

    RWKV-3 has the same names, but its time_first is [C,1]. In RWKV-4 only time_decay has that shape, in some files.
    """
    first = [tensor for name, tensor in tensors.items() if name.endswith(".att.time_first")]
    mixed = any(name.endswith(".att.time_mix_k") for name in tensors)
    foreign = any(re.fullmatch(FOREIGN, name) for name in tensors)
    return bool(first) and mixed and not foreign and all(len(tensor.shape) != 2 for tensor in first)


def official_name(name: str) -> str:
    """Converts a Hugging Face name to the official one. Keeps a prefix, and returns an official name unchanged."""
    return ".".join(OFFICIAL.get(part, part) for part in name.split("."))


def to_official_layout(tensors: dict[str, Stored], declared: JsonMapping) -> dict[str, Stored]:
    return tensors


def to_format_layout(tensors: Mapping[str, Stored], format: str) -> dict[str, Stored]:
    """Returns the tensors under the names that `format` uses: RwkvForCausalLM's for huggingface, otherwise official names."""
    if format != "huggingface":
        return dict(tensors)
    names = {name: ".".join(HUGGING_FACE.get(part, part) for part in name.split(".")) for name in tensors}
    names = {name: new if name.startswith("head.") else f"rwkv.{new}" for name, new in names.items()}
    return {names[name]: tensor.rename(names[name]) for name, tensor in tensors.items()}


def hugging_face_config(config: ModelConfig, vocab_size: int, dtype: torch.dtype) -> JsonObject:
    """Returns the part of config.json that describes the architecture.

    With rescale_every=6, RwkvConfig's default, transformers halves weights in memory after every 6 layers, which keeps float16
    activations small. A state_dict that such a model saves contains halved weights without saying so. 0 disables rescaling.
    """
    C, A, F = model.sizes(config)
    return {"architectures": ["RwkvForCausalLM"], "model_type": HUGGING_FACE_TYPE, "vocab_size": vocab_size,
            "context_length": config.ctx_len, "num_hidden_layers": config.n_layer, "hidden_size": C,
            "attention_hidden_size": A, "intermediate_size": F, "rescale_every": 6 if dtype == torch.float16 else 0,
            **{name: values[0] for name, values in HUGGING_FACE_CONSTANTS.items()}}


def widths(matrix: Callable[[str], tuple[int, ...]], names: Collection[str]) -> dict[str, int]:
    """Returns the model's widths, by their names in ModelConfig. `matrix` returns a matrix's shape (rows, columns) by name."""
    return {"n_embd": matrix("emb.weight")[1], "n_att": matrix("blocks.0.att.key.weight")[0],
            "n_ffn": matrix("blocks.0.ffn.key.weight")[0]}


def has_several_shapes(name: str) -> bool:
    """Returns True if the tensor is a vector that some files store as [C] and others as [C,1] or [1,1,C]."""
    return ".time_" in name


def directory_factor(name: str, config: ModelConfig) -> float:
    """Returns the official matrix divided by the matrix in a Hugging Face directory, which is always 1."""
    return 1.0
