"""Tests benchmarks/step_profile.py, which profiles a training step."""

import json

import pytest

from benchmarks import step_profile
from benchmarks.step_profile import KINDS, PARTS, kind_of

TINY = (2, 64, 2, 16, 64)


@pytest.mark.parametrize(("generation", "optim", "precision"), [
    ("rwkv4", "adamw", "32-true"), pytest.param("rwkv7", "normuon", "bf16-mixed", marks=pytest.mark.thorough)])
def test_every_operation_has_a_part_and_a_kind(generation: str, optim: str, precision: str) -> None:
    profile = step_profile.measure(generation, optim, precision, TINY, steps=2)
    shares = profile["shares"]
    total = {kind: sum(shares[part][kind] for part in PARTS) for kind in KINDS}
    assert sum(total.values()) == pytest.approx(1)
    assert all(total.values())
    assert all(shares[part]["wkv"] for part in ("forward", "backward"))
    assert not shares["loss"]["wkv"]
    assert bool(shares["optimiser"]["products"]) == (optim == "normuon")
    assert all(shares[part]["products"] for part in ("forward", "loss", "backward"))
    assert profile["products"] == pytest.approx(total["products"])
    assert all(profile["ms"][part] > 0 for part in PARTS)


def test_a_line_for_each_part_and_json_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    step_profile.main(["--generation", "rwkv4", "--optim", "muon", "--precision", "32-true", "--shape", "1,64,1,8,16",
                       "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith((*PARTS, "step"))] == [*PARTS, "step"]
    assert json.loads(lines[-1])["steps"][0]["optim"] == "muon"


@pytest.mark.parametrize(("name", "kind"), [
    ("aten::addmm", "products"), ("aten::bmm", "products"), ("timemix::wkv4_c_v0_backward", "wkv"),
    ("native::wkv7_forward_float32", "wkv"), ("native::rwkv7_gates_forward_float32", "pointwise"), ("aten::mul_", "pointwise"),
    ("aten::native_layer_norm_backward", "norm"), ("aten::copy_", "other"), ("aten::_fused_adamw_", "other"),
    ("MmBackward0", "between"), ("part: forward", "between")])
def test_the_kind_of_each_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind
