"""The comparison of a kernel with its operator's reference before a run; tests/report/ has a wrong kernel."""

import pytest
import torch

from kernels.select import select
from rwkv.training.kernel_check import check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "name"), [("wkv4", "conv1d"), ("wkv4", "torch_scan"), ("wkv4", "c_v0"),
                                                ("wkv4", "reference"), ("wkv7", "torch_chunk"), ("wkv7", "c_v0")])
def test_right_kernels_pass(operator: str, name: str, dtype: torch.dtype) -> None:
    assert check(select(operator, name), operator, torch.device("cpu"), dtype) is None
