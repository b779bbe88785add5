"""Which model this is: a hash of its weights that is the same in every dtype that they are run in."""

import hashlib

import torch

from rwkv.model.rwkv4 import RWKV

SAMPLED = 4096                           # elements of each tensor that the hash reads: evenly spaced ones


def fingerprint(model: RWKV) -> str:
    """SHA-256 of names, shapes and evenly spaced elements rounded to bfloat16; of an int8 model, what it had before."""
    if model.fingerprint is not None:
        return model.fingerprint
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        spaced = tensor.detach().flatten()[::max(1, tensor.numel() // SAMPLED)]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(spaced.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
