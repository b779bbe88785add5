"""The operator that a kernel's name means for a model. Models are given theirs; programs and from_pretrained choose it here."""

from typing import Any

import torch

from kernels.registry import UnknownKernel, all_names
from kernels.select import AUTO, select, selectable
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.model.base import generation


def operator_for(config: ModelConfig, kernel: str, device: str | torch.device, dtype: torch.dtype) -> Any:
    """The operator of a model of `config` under the kernel of that name, for inputs of `dtype`.

    Raises UnknownKernel where the kernel is of another generation's operator alone, and as kernels.select.select does.
    """
    model = generation(config)
    if kernel != AUTO and kernel not in all_names(model.OPERATOR):
        others = [generation(ModelConfig(generation=name)) for name in GENERATIONS]
        owners = [other.NAME for other in others if kernel in all_names(other.OPERATOR)]
        if owners:
            raise UnknownKernel(f"{kernel} computes the operator of {' and '.join(owners)}; for {model.NAME} there are: "
                                f"{', '.join([AUTO, *selectable(model.OPERATOR)])}")
    return select(model.OPERATOR, kernel, device, dtype)
