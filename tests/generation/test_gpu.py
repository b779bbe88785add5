"""Decoding on a GPU, without one: gpu_interpreted.py in a process of its own, since Triton is told before it is imported."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 99 * 1024                       # bytes that a block can have on every GPU since sm_86
SPILLED = 16                             # bytes a thread: two or three words are no matter
HERE = Path(__file__).parent
pytestmark = [pytest.mark.programs, pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                       reason="Triton is not installed (pip install -e '.[triton]')")]


@pytest.mark.compiles
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.soak) for arch in (80, 100, 120))])
def test_cubins_do_not_spill(arch: int, tmp_path: Path) -> None:
    done = run(tmp_path, [str(HERE / "gpu_cubins.py"), str(arch)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = {name.split()[0] for name in found}
    assert kernels == {"norm_and_mixes", "products", "wkv", "draw", "penalize"}
    assert {name: facts for name, facts in found.items() if facts["spilled"] > SPILLED or facts["shared"] > SHARED} == {}


@pytest.mark.parametrize("marked", ["not soak", pytest.param("soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_under_the_interpreter(marked: str, tmp_path: Path) -> None:
    done = run(tmp_path, ["-m", "pytest", str(HERE / "gpu_interpreted.py"), "--no-header", "-m", marked], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


def run(cache: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    tests = HERE.parent
    paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "kernels")))
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
    return subprocess.run([sys.executable, *command], cwd=HERE.parent.parent, env=environment, text=True, capture_output=True,
                          check=False)
