"""A kernel that computes something else than its operator's reference is a WARNING in the terminal."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import ENVIRONMENT, ROOT, TEXT

from kernels.select import select
from rwkv.training.kernel_check import check

SMALL = ("logger=none", "data=text", "data.path=text.txt", "data.tokenizer=byte", "trainer.sample_tokens=0", "model.n_layer=1",
         "model.n_embd=32", "model.ctx_len=16", "trainer.max_steps=3", "trainer.val_every=3", "trainer=cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("operator", "name"), [("wkv4", "conv1d"), ("wkv4", "torch_scan"), ("wkv4", "c_v0"),
                                                ("wkv4", "reference"), ("wkv7", "torch_chunk"), ("wkv7", "c_v0")])
def test_right_kernels_pass(operator: str, name: str, dtype: torch.dtype) -> None:
    assert check(select(operator, name), operator, torch.device("cpu"), dtype) is None


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with the kernel mistaken, whose gradient of w is a tenth too small."""
    folder = tmp_path_factory.mktemp("clone")
    for part in ("kernels", "rwkv", "configs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    right = (ROOT / "kernels" / "timex" / "formula.py").read_text(encoding="utf-8")
    wrong = right.replace("    return grad_w, grad_k", "    return 0.9 * grad_w, grad_k")
    assert wrong != right
    (folder / "kernels" / "timex" / "mistaken.py").write_text(wrong, encoding="utf-8")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def trained(clone: Path, *options: str) -> list[str]:
    """The warnings of a run."""
    done = subprocess.run([sys.executable, "train.py", *SMALL, *options], cwd=clone, env=ENVIRONMENT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.split("\n") if line.startswith("WARNING")]


@pytest.mark.programs
def test_a_wrong_gradient_is_named_before_the_run(clone: Path) -> None:
    warning, = trained(clone, "kernel=mistaken", "plan=true")
    assert "mistaken" in warning
    assert "gradient of time_decay" in warning
    assert "gradient of k" not in warning


@pytest.mark.programs
def test_the_probe_s_finding_is_a_warning_too(clone: Path) -> None:
    before, at_start, at_end, of_report = trained(clone, "kernel=mistaken", "trainer.probe=true", "out_dir=probed")
    assert "small case" in before
    assert "at step 2" in at_start
    assert "at step 3" in at_end
    assert "mistaken is wrong" in of_report
    measured = json.loads((clone / "probed" / "kernel.json").read_text(encoding="utf-8"))
    layer, = measured["errors"]["start"]["layers"]
    assert layer["errors"]["grad time_decay"]["err_ratio"] > measured["errors"]["start"]["allowed"]["grad time_decay"]


@pytest.mark.programs
def test_a_wrong_kernel_is_named_again_at_the_end_and_on_the_page(clone: Path) -> None:
    before, at_end = trained(clone, "kernel=mistaken", "out_dir=wrong")
    assert at_end.removesuffix(".") == before
    assert "gradient of time_decay" in (clone / "wrong" / "report.html").read_text(encoding="utf-8")


@pytest.mark.programs
def test_a_right_kernel_gives_no_warning(clone: Path) -> None:
    assert trained(clone, "kernel=formula", "trainer.probe=true", "out_dir=right") == []
