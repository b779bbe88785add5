"""Tests decoding on a GPU without a GPU.

gpu_interpreted.py runs in a process of its own, because TRITON_INTERPRET must be set before Triton is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 99 * 1024                       # bytes that a block can have on every GPU since sm_86
SPILLED = 16                             # bytes per thread: a few spills cost little time
HERE = Path(__file__).parent
pytestmark = [pytest.mark.programs, pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                       reason="Triton is not installed (pip install -e '.[triton]')")]


@pytest.mark.compiles
@pytest.mark.parametrize(("arch", "formats"), [
    (90, ["int4"]), *(pytest.param(arch, [], marks=pytest.mark.soak) for arch in (80, 90, 100, 120))], ids=str)
def test_cubins_do_not_spill(arch: int, formats: list[str], tmp_path: Path) -> None:
    """Compiles every form of the kernels in make soak, and otherwise the largest for int4."""
    proc = run(tmp_path, [str(HERE / "gpu_cubins.py"), str(arch), *formats])
    assert proc.returncode == 0, proc.stderr
    resources = json.loads(proc.stdout)
    kernels = {name.split()[0] for name in resources}
    assert kernels == {"norm_and_mixes", "products", "wkv", "draw", "penalize"}
    assert {name: facts for name, facts in resources.items() if facts["spilled"] > SPILLED or facts["shared"] > SHARED} == {}


@pytest.mark.parametrize("marked", ["not soak", pytest.param("soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_under_the_interpreter(marked: str, tmp_path: Path) -> None:
    proc = run(tmp_path, ["-m", "pytest", str(HERE / "gpu_interpreted.py"), "--no-header", "-m", marked], TRITON_INTERPRET="1")
    assert proc.returncode == 0, proc.stdout + proc.stderr


def run(cache: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    tests = HERE.parent
    paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "kernels")))
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
    return subprocess.run([sys.executable, *command], cwd=HERE.parent.parent, env=environment, text=True, capture_output=True,
                          check=False)
