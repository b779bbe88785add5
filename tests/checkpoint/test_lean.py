"""Tests peak memory: loading peaks at 1.3 times the weights or the file at most, and converting holds one tensor at a time.

A separate process takes each measurement. Linux reports the peak resident set, with the pages of mapped files, as VmHWM.
RssAnon is the current memory without these pages.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rwkv.checkpoint.files import checkpoint_of, write_checkpoint
from rwkv.config import ModelConfig
from rwkv.model.base import n_parameters
from rwkv.model.rwkv4 import shapes

ROOT = Path(__file__).parent.parent.parent
MIB = 2 ** 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")

MEASURED = """
import json, sys, threading, time
sys.path.insert(0, {root!r})
import torch
from rwkv import RWKV
from rwkv.checkpoint.files import read_checkpoint, write_checkpoint
from rwkv.generation.decoder import decoder_of

def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def action(source):
    for target in {targets!r}:
        write_checkpoint(read_checkpoint(source), target, {dtype!r})
    if {targets!r}:
        return None
    model = RWKV.from_pretrained(source, "reference", dtype={dtype!r})
    if {decodes}:
        model.fingerprint()
        decoder_of(model, model.empty_state(1)).step(torch.zeros(1, dtype=torch.int64))
    return model

action({small!r})                                                     # imports are not measured
open("/proc/self/clear_refs", "w").write("5")                         # resets VmHWM
before, private, most, done = memory("VmRSS"), memory("RssAnon"), 0, False

def watch():
    global most
    while not done:
        most = max(most, memory("RssAnon"))
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
kept, done = action({source!r}), True
watcher.join()
print(json.dumps({{"peak": memory("VmHWM") - before, "private": max(most, memory("RssAnon")) - private}}))
"""


def weights(n_layer: int, n_embd: int, vocab_size: int) -> dict[str, torch.Tensor]:
    sizes = ModelConfig(n_layer=n_layer, n_embd=n_embd)
    return {name: torch.full(shape, 0.01) for name, shape in shapes(sizes, vocab_size).items()}


def measure(folder: Path, source: Path, dtype: str, *targets: str, decodes: bool = False) -> dict[str, int]:
    write_checkpoint(checkpoint_of(weights(1, 8, 8)), folder / "small.pth", "float16")
    code = MEASURED.format(root=str(ROOT), source=str(source), small=str(folder / "small.pth"), dtype=dtype,
                           targets=[str(folder / target) for target in targets], decodes=decodes)
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}      # malloc returns freed memory immediately
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a float16 file of a model, which has 60 MiB in float32. No tensor exceeds a tenth of the model."""
    path = tmp_path_factory.mktemp("lean") / "model.pth"
    write_checkpoint(checkpoint_of(weights(8, 384, 2000)), path, "float16")
    return path


def bytes_in(dtype: str) -> int:
    return n_parameters(ModelConfig(n_layer=8, n_embd=384), 2000) * getattr(torch, dtype).itemsize


@pytest.mark.programs
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16", "int8"])
def test_loading_peaks_at_little_more_than_the_weights_or_the_file(source: Path, tmp_path: Path, dtype: str) -> None:
    memory = measure(tmp_path, source, dtype)
    assert 0.8 * bytes_in(dtype) <= memory["private"], "the new weights may reuse some memory that the first call has freed"
    assert memory["peak"] <= 1.3 * max(bytes_in(dtype), source.stat().st_size)


@pytest.mark.programs
def test_weights_of_the_right_dtype_are_mapped_from_the_file(source: Path, tmp_path: Path) -> None:
    write_checkpoint(checkpoint_of(weights(8, 384, 2000)), tmp_path / "model.safetensors")
    memory = measure(tmp_path, tmp_path / "model.safetensors", "float32")
    assert memory["private"] < 0.1 * bytes_in("float32")
    assert memory["peak"] <= 1.3 * bytes_in("float32")


@pytest.mark.programs
def test_a_step_reads_weights_by_input_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_checkpoint(checkpoint_of(weights(8, 384, 2000)), path, "bfloat16", by_input=True)
    assert measure(tmp_path, path, "bfloat16", decodes=True)["private"] < 0.1 * bytes_in("bfloat16")


@pytest.mark.programs
def test_converting_holds_one_tensor_at_a_time(source: Path, tmp_path: Path) -> None:
    memory = measure(tmp_path, source, "float32", "out.pth", "out.safetensors", "out", "out.bin")
    assert memory["peak"] < 0.4 * bytes_in("float32")
