"""Tests the Triton forms without a GPU: Triton's interpreter executes them, and Triton compiles them to cubins.

Processes of their own run fused_triton_interpreted.py and fused_triton_cubins.py. make soak compiles for all head sizes and
other GPUs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                       reason="Triton is not installed (pip install -e '.[triton]')")]
TESTS = Path(__file__).parent
REGISTERS = 65536                        # per multiprocessor


def run_python(folder: Path, *command: Any, **variables: str) -> str:
    """Runs Python with these environment variables and Triton's cache in `folder`, and returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.run([sys.executable, *map(str, command)], cwd=TESTS.parents[2], env=environment, text=True,
                             capture_output=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("marked", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_under_the_interpreter(marked: str, tmp_path: Path) -> None:
    """Values and gradients of each function and of whole models of both generations are correct."""
    output = run_python(tmp_path, "-m", "pytest", TESTS / "fused_triton_interpreted.py", "--no-header", "-m", marked,
                        TRITON_INTERPRET="1")
    assert " passed" in output.splitlines()[-1] or "100%" in output, output


@pytest.mark.parametrize(("arch", "once"), [(90, True), *(pytest.param(arch, False, marks=pytest.mark.soak)
                                                          for arch in (80, 90, 100, 120))], ids=str)
def test_every_kernel_fits_its_registers(arch: int, once: bool, tmp_path: Path) -> None:
    cubins = json.loads(run_python(tmp_path, TESTS / "fused_triton_cubins.py", arch, *(["once"] if once else [])))
    assert {name.split()[0] for name in cubins} == {"mix", "mix_backward", "squared_relu", "gates", "gates_backward", "gated",
                                                    "gated_backward", "cross_entropy"}
    for name, needs in cubins.items():
        assert needs["spilled"] <= 16, f"{name}: {needs}"            # bytes per thread: a few spills cost little time
        assert needs["registers"] * needs["warps"] * 32 <= REGISTERS, f"{name}: {needs}"
