"""Copies tensors asynchronously from host memory to a GPU."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. A copy to a GPU is queued behind the GPU's pending work, and the host does not wait.

    The copy reads page-locked memory, because torch would wait for all earlier work before a copy from pageable memory.
    """
    if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
