"""Constructs a model's operator from the name of a kernel, for training and from_pretrained."""

from typing import Any

import torch

from kernels.registry import UnknownKernel, all_names
from kernels.select import AUTO, Size, runnable_on, select
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.model.base import generation


def size_for(config: ModelConfig, rows: int, steps: int) -> Size | None:
    """Returns the Size on which kernel=auto bases its choice, or None if the operator has no heads.

    The size is that of `rows` sequences of `steps` tokens.
    """
    if "head_size" not in generation(config).OPTIONS:
        return None
    return Size(rows * max(1, config.n_embd // config.head_size), steps, config.head_size)


def operator_for(config: ModelConfig, kernel: str, device: str | torch.device, dtype: torch.dtype,
                 size: Size | None = None) -> Any:
    """Returns the operator of a model with `config`, computed by the kernel named `kernel`.

    Raises UnknownKernel for a kernel of another generation's operator, and the errors of kernels.select.select.

    Args:
        dtype: the dtype of the operator's inputs.
        size: the size for kernel=auto; the default is one sequence of the context length.
    """
    model = generation(config)
    if kernel != AUTO and kernel not in all_names(model.OPERATOR):
        others = [generation(ModelConfig(generation=name)) for name in GENERATIONS]
        owners = [other.NAME for other in others if kernel in all_names(other.OPERATOR)]
        if owners:
            raise UnknownKernel(f"{kernel} computes the operator of {' and '.join(owners)}, but the model is {model.NAME}. "
                                f"Choose a kernel from {', '.join(runnable_on(model.OPERATOR, torch.device(device).type))}")
    return select(model.OPERATOR, kernel, device, dtype, size or size_for(config, 1, config.ctx_len))
