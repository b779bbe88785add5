"""Decoding on a GPU, without one: gpu_interpreted.py in a process of its own, since Triton is told before it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.programs, pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                       reason="Triton is not installed (pip install -e '.[triton]')")]


@pytest.mark.parametrize("marked", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_under_the_interpreter(marked: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", str(HERE / "gpu_interpreted.py"), "--no-header", "-m", marked],
                          cwd=HERE.parent.parent, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
