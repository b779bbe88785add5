"""Tests that weights which do not fit into memory are refused before loading. The error names a fitting dtype, if any."""

from pathlib import Path

import pytest
import torch

from rwkv import pretrained
from rwkv.checkpoint.files import Checkpoint, Weights
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.checkpoint.memory import GIB, require_memory, weights_nbytes
from rwkv.config import ModelConfig
from rwkv.errors import UserError
from rwkv.model.base import generation
from rwkv.pretrained import RWKV


def unreadable_checkpoint(n_layer: int, n_embd: int) -> Checkpoint:
    """Returns a mapped bfloat16 checkpoint, whose weights raise AssertionError when they are read."""
    config = ModelConfig(generation="rwkv7", n_layer=n_layer, n_embd=n_embd)

    def data() -> torch.Tensor:
        raise AssertionError

    tensors = {name: Stored(name, "", shape, torch.bfloat16, data, mapped=True)
               for name, shape in generation(config).shapes(config, 65536).items()}
    return Checkpoint(Path("large.pth"), generation(config).with_default_widths(config), 65536, Weights(tensors))


@pytest.mark.parametrize(("dtype", "free", "message"), [
    ("bfloat16", 22, "requires 24.1 GiB of memory, but only 22.0 GiB are free: pass dtype=int8, which requires 12.4 GiB"),
    ("bfloat16", 10, "dtype=int4"), ("float32", 30, "dtype=bfloat16"), ("int4", 6, "no dtype fits")])
def test_the_error_names_the_largest_dtype_that_fits(dtype: str, free: int, message: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "available_memory", lambda: free * GIB)
    with pytest.raises(UserError, match=message):
        RWKV.from_checkpoint(unreadable_checkpoint(61, 4096), None, dtype=dtype)


def test_what_fits_is_not_refused() -> None:
    large, small = unreadable_checkpoint(61, 4096), unreadable_checkpoint(2, 64)
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        require_memory(large, dtype, weights_nbytes(large, dtype))
        require_memory(large, dtype, None)
        require_memory(small, dtype, 0)
