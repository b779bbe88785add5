"""Tests the comparison of a kernel with its operator's reference before a run. tests/report/ has a wrong kernel."""

from typing import Any

import pytest
import torch
from stubs import selectable_stub

from kernels.select import select
from kernels.timex import conv1d
from kernels.wkv4 import cases
from rwkv.errors import UserError
from rwkv.training.kernel_check import PARTS, check

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "name"), [("wkv4", "conv1d"), ("wkv4", "torch_scan"), ("wkv4", "c_v0"),
                                                ("wkv4", "reference"), ("wkv7", "torch_chunk"), ("wkv7", "c_v0")])
def test_correct_kernels_pass(operator: str, name: str, dtype: torch.dtype) -> None:
    assert check(select(operator, name), operator, torch.device("cpu"), dtype) is None


@pytest.mark.parametrize("spoilt", ["nothing", "the second run", "the last block"])
def test_a_kernel_whose_threads_race_is_named(spoilt: str) -> None:
    """A kernel may be wrong only in its second run, or only in the last block, which small cases do not have."""
    shapes: list[torch.Size] = []

    def forward(*inputs: Any) -> torch.Tensor:
        out = conv1d.forward(*inputs)
        shapes.append(out.shape)
        if spoilt == "the last block":
            out[:, 128:] = 0
        elif spoilt == "the second run" and len(shapes) > calls:
            out[0, 0, 0] += 100
        return out

    calls = len(shapes_of_a_run())
    with selectable_stub("timex", forward, conv1d.backward) as name:
        message = check(select("wkv4", name), "wkv4", torch.device("cpu"), torch.float32)
        assert len(shapes) == 2 * calls
        assert (message is None) == (spoilt == "nothing")
        assert message is None or f"kernel={name} is wrong: in {1 + (spoilt == 'the last block')} of 2 runs" in message


@pytest.mark.parametrize("part", PARTS)
def test_an_operator_whose_cases_lack_a_part_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cases, part)
    with pytest.raises(UserError, match=rf"wkv4/cases\.py does not define {part}\. "):
        check(select("wkv4", "reference"), "wkv4", torch.device("cpu"), torch.float32)


def shapes_of_a_run() -> list[torch.Size]:
    """Returns the shapes of timex's results in one run of the case."""
    shapes: list[torch.Size] = []

    def forward(*inputs: Any) -> torch.Tensor:
        out = conv1d.forward(*inputs)
        shapes.append(out.shape)
        return out

    with selectable_stub("timex", forward, conv1d.backward) as name:
        cases.results(select("wkv4", name), cases.inputs(*cases.CHECKED))
    return shapes
