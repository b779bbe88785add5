"""Tests that a process forked after its parent has generated text does not wait for threads that only the parent has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.programs, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")]

CODE = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from models import small_model
from kernels.registry import KernelUnavailable
from rwkv.generation.engine import generate
from rwkv.tokenizer.tokenizers import ByteTokenizer

torch.set_num_threads(2)
model = small_model({kernel!r}, vocab_size=256, generation="rwkv7", n_embd=128).requires_grad_(False)

def text():
    return "".join(generate(model, ByteTokenizer(), "a prompt " * 20, max_new_tokens=9))

def in_child(do):
    process = os.fork()
    if process == 0:
        try:
            do()
            os._exit(0)
        except Exception:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

def same():
    assert text() == expected
    assert torch.get_num_threads() == 1      # of more, GNU OpenMP would wait for those that the parent had

def ended():
    sys.exit(0)                          # as a child that does not know that it is one: all objects are destroyed

def refused():
    try:
        text()
    except KernelUnavailable:
        return
    raise AssertionError

expected = text() if {before} else None
for does in ({does}):
    in_child(does)
    in_child(lambda: in_child(does))
"""


@pytest.mark.parametrize(("kernel", "before", "does"), [
    pytest.param("torch_chunk", True, "same,", id="the same text"),
    pytest.param("torch_chunk", False, "text,", id="a text where only a model was made", marks=pytest.mark.soak),
    pytest.param("taichi_v3", True, "ended, refused", id="an end, and a sentence where the kernel needs Taichi's threads",
                 marks=[pytest.mark.implementation("wkv7", "taichi_v3", device="cpu"), pytest.mark.compiles])])
def test_a_forked_child_answers(kernel: str, before: bool, does: str) -> None:
    code = CODE.format(root=str(ROOT), tests=str(ROOT / "tests"), kernel=kernel, before=before, does=does)
    result = subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, capture_output=True,
                            text=True, timeout=100, check=False)               # spinning threads are slow on few cores
    assert result.returncode == 0, result.stderr
