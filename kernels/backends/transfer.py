"""Copies from host memory to a GPU for which the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A copy to a GPU is queued behind what the GPU still computes, and the host goes on.

    The copy reads page-locked memory: from other memory torch waits until the GPU has done all that was queued before.
    """
    if device.type != "cuda" or tensor.is_cuda or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
