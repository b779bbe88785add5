"""Writes small models as files of each format that can store them, and checks what every loaded checkpoint must satisfy."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import small_model
from torch import Tensor

from rwkv.checkpoint.files import Weights, read_checkpoint
from rwkv.config import GENERATIONS
from rwkv.errors import CheckpointError
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

NAMES = {"pth": "model.pth", "ckpt": "model.ckpt", "safetensors": "model.safetensors", "huggingface": "model",
         "ggmf": "model.bin", "gguf": "model.gguf"}                      # formats that store float32
HELD = [(generation, format) for generation in GENERATIONS for format in NAMES if (generation, format) != ("rwkv4", "gguf")]
OFFICIAL = ("pth", "ckpt", "safetensors")        # these formats store every tensor of a .pth in the author's format
SIZES: dict[str, dict[str, int]] = {"rwkv4": {}, "rwkv7": {"n_embd": 128, "head_size": 64}}      # sizes for every format
each_held = pytest.mark.parametrize(("generation", "format"), HELD)


def byte_model(path: Path, generation: str = "rwkv7", seed: int = 0, **sizes: int) -> None:
    """Writes a model with a vocabulary of bytes and its tokenizer. Without `sizes`, every format supports its size."""
    model = small_model(generation=generation, vocab_size=256, seed=seed, **{**SIZES[generation], **sizes})
    model.save_pretrained(path, ByteTokenizer())


def same_tensors(one: Weights, other: Weights) -> bool:
    """Returns True if names, shapes, dtypes and values are equal, bit for bit."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


def shard(folder: Path, save: Callable[[dict[str, Tensor], Path], None], suffix: str, stem: str) -> None:
    """Splits a Hugging Face directory's model.safetensors into two files and an index."""
    tensors = {name: tensor.clone() for name, tensor in hugging_face_tensors(folder).items()}
    parts = list(tensors)[::2], list(tensors)[1::2]
    places = {}
    for number, names in enumerate(parts, start=1):
        file = f"{stem}-{number:05}-of-00002{suffix}"
        save({name: tensors[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors").unlink()
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def hugging_face_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def loads(path: Path) -> bool:
    """Returns True if the file loads as a complete model, and False if loading raises CheckpointError.

    The error must be one sentence that names the file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged key of config.json may be an unknown key
        try:
            model = RWKV.from_pretrained(path, "reference")
        except CheckpointError as error:
            sentence = str(error)
        else:
            assert whole(model, path)
            return True
    assert "\n" not in sentence
    assert path.name in sentence
    return False


def whole(model: RWKV, path: Path) -> bool:
    """Checks that every weight is present, in memory and finite."""
    assert all(weight.device.type == "cpu" and bool(weight.isfinite().all()) for weight in model.parameters())
    return model.state_dict().keys() == set(read_checkpoint(path).weights)
