"""Reads checkpoints of runs with tune=lora or tune=state, which have the trained values and the path of the frozen weights.

Adapters are merged when a matrix is read. The sum is float32, even if the frozen weights are stored in 16 bits. Rounding the
sum to bfloat16 or int8 loses part of the adapters' change (`surviving_fraction`).
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kernels.matvec import pack
from rwkv.checkpoint.content import Content
from rwkv.checkpoint.formats._gguf_types import round_to_blocks
from rwkv.checkpoint.lazy_tensors import DTYPES, Stored
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError
from rwkv.io.json_types import JsonObject
from rwkv.model.base import MATRICES, TIME_STATE, generation
from rwkv.model.lora import merge_adapter

MEASURED = 8                             # `surviving_fraction` reads at most this many adapted matrices
ADAPTER = re.compile(r".*?(blocks\.\d+\..+)\.lora_([AB])\.weight")


def is_tuned(entry: JsonObject | None) -> bool:
    """Returns True if the entry `timemix` describes a run with tune=lora or tune=state."""
    run = (entry or {}).get("run")
    tune = run.get("tune") if isinstance(run, dict) else None
    return isinstance(tune, dict) and tune.get("method", "full") != "full"


def without_base(run: JsonObject) -> JsonObject:
    """Returns a run's configuration as it is stored with merged weights: without tune and init_from."""
    return {name: value for name, value in run.items() if name not in ("tune", "init_from")} if is_tuned({"run": run}) else run


def without_tune(run: JsonObject) -> JsonObject:
    """Returns a run's configuration without tune, for weights into which another adapter is merged.

    init_from stays, because its name selects the default chat template.
    """
    return {name: value for name, value in run.items() if name != "tune"}


def digest(content: Content) -> str:
    """Returns a hash of the trained tensors. The server tells adapters apart by this hash."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(content.tensors.items()):
        hashed.update(f"{name} {tensor.shape}".encode())
        hashed.update(tensor.get().float().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def apply_trained_values(content: Content, base: Mapping[str, Stored],
                         config: ModelConfig) -> tuple[dict[str, Stored], list[Stored] | None]:
    """Applies trained values to the base. Returns the weights, with adapters merged on reading, and each layer's state or None.

    Merged matrices are float32, whatever the base's dtype. Raises CheckpointError if a tensor is missing or has a wrong shape.
    """
    states = {name.rpartition("blocks.")[2]: tensor for name, tensor in content.tensors.items() if name.endswith(TIME_STATE)}
    if states:
        missing = [layer for layer in range(config.n_layer) if f"{layer}.{TIME_STATE}" not in states]
        if missing:
            raise CheckpointError(f"{content.path} is damaged: the file lacks blocks.{missing[0]}.{TIME_STATE}")
        shape = tuple(generation(config).empty_state(config, 1, "meta").named()["wkv"].shape[2:])
        for name, tensor in states.items():
            _require_shape(content.path, f"blocks.{name}", tensor, shape)
        return dict(base), [states[f"{layer}.{TIME_STATE}"] for layer in range(config.n_layer)]
    tune = (content.entry or {})["run"]["tune"]
    pairs: dict[str, dict[str, Stored]] = {}
    for name, tensor in content.tensors.items():
        if match := ADAPTER.fullmatch(name):
            pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
    if not pairs or any(pair.keys() != {"A", "B"} or name not in base for name, pair in pairs.items()):
        raise CheckpointError(f"{content.path} is damaged: the adapters for these weights are incomplete")
    for name, pair in pairs.items():
        rows, columns = base[name].shape
        _require_shape(content.path, f"{name.removesuffix('.weight')}.lora_A.weight", pair["A"], (tune["rank"], columns))
        _require_shape(content.path, f"{name.removesuffix('.weight')}.lora_B.weight", pair["B"], (rows, tune["rank"]))
    scale = tune["alpha"] / tune["rank"]
    return dict(base) | {name: _merge_on_read(base[name], pair["A"], pair["B"], scale) for name, pair in pairs.items()}, None


def is_exact(weights: Mapping[str, Stored], config: ModelConfig, dtype: str) -> bool:
    """Returns True if all matrices already have this dtype, so that converting to it rounds nothing."""
    group = generation(config).group
    matrices = (tensor for name, tensor in weights.items() if group(name) in MATRICES)
    return all(tensor.dtype == DTYPES.get(dtype) for tensor in matrices)


def surviving_fraction(weights: Mapping[str, Stored], unadapted: Mapping[str, Stored], dtype: str) -> float:
    """Returns the fraction of the adapters' change that survives rounding the merged matrices to `dtype`, from 0 to 1.

    The fraction is 1 - |(round(W + D) - round(W)) - D| / |D|, over at most MEASURED matrices W of `unadapted`, W + D of
    `weights`. Without adapters it is 1. `dtype` is a name in lazy_tensors.DTYPES, int8, int4, or one of GGUF's block types.
    """
    rounded, names = _rounding_function(dtype), sorted(unadapted)
    changed = lost = 0.0
    with torch.no_grad():
        for name in names[::-(-len(names) // MEASURED) or 1]:
            after = weights[name].get().float()
            before = unadapted[name].get().float()
            change = after - before
            changed += float(change.square().sum())
            lost += float((rounded(after) - rounded(before) - change).square().sum())
    return max(0.0, 1 - math.sqrt(lost / changed)) if changed else 1.0


def _rounding_function(dtype: str) -> Callable[[Tensor], Tensor]:
    if dtype in DTYPES:
        return lambda matrix: matrix.to(DTYPES[dtype]).float()
    if dtype in ("int8", "int4"):
        return lambda matrix: pack(matrix, dtype).dense()
    return lambda matrix: round_to_blocks(matrix, dtype.upper())


def _require_shape(path: Path, name: str, tensor: Stored, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(f"{path} is damaged: the shape of {name} must be {list(shape)} to match the base weights; got "
                              f"{list(tensor.shape)}")


def _merge_on_read(weight: Stored, A: Stored, B: Stored, scale: float) -> Stored:
    def data() -> Tensor:
        with torch.no_grad():
            return merge_adapter(weight.get(), A.get(), B.get(), scale)

    return replace(weight, dtype=torch.float32, data=data, mapped=False)
