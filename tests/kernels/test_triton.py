"""Tests the Triton kernels without a GPU: Triton's interpreter executes them, and Triton compiles them to cubins.

Both run in processes of their own, because an environment variable selects the interpreter before the kernels are imported. The
processes run triton_interpreted.py and triton_cubins.py. make soak compiles every set of constants, for older GPUs too.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton_resources
from triton_resources import ARCHS, Kernel, Resources

from kernels.registry import names, operators

pytestmark = [pytest.mark.programs, pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                                       reason="Triton is not installed (pip install -e '.[triton]')")]

TESTS = Path(__file__).parent
KERNELS = [(op, name) for op in operators() for name in names(op) if name.startswith("triton_")]
SHARED = {80: 163 * 1024, 90: 227 * 1024}        # bytes per block on an A100 and an H100
SHARED_ANYWHERE = 99 * 1024                      # bytes per block on every GPU since
REGISTERS = 65536                                # per multiprocessor
# The architecture; True if each kernel was compiled once; the resources of each cubin, by kernel and constants
Cubins = tuple[int, bool, dict[str, dict[str, Any]]]


def run_python(command: list[Any], folder: Path, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs Python with `command`, with Triton's cache in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    return subprocess.run([sys.executable, *map(str, command)], cwd=TESTS.parent.parent, env=environment, text=True,
                          capture_output=True, check=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for Triton's files, where the tests of this file find what another one of them has compiled."""
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(scope="module", params=[(90, True), *(pytest.param((arch, False), marks=pytest.mark.soak) for arch in SHARED)],
                ids=str)
def cubins(cache: Path, request: pytest.FixtureRequest) -> Cubins:
    arch, once = request.param
    process = run_python([TESTS / "triton_cubins.py", arch, *(["once"] if once else [])], cache)
    assert process.returncode == 0, process.stderr
    return arch, once, json.loads(process.stdout)


@pytest.mark.soak
@pytest.mark.parametrize("arch", ARCHS)
def test_wkv7_takes_the_resources_in_the_table(arch: int, cache: Path) -> None:
    """Measures triton_v1 for all head sizes and dtypes."""
    check_table(triton_resources.measure(arch, triton_resources.HEADS, cache))


def test_wkv7_takes_the_resources_in_the_table_for_the_most_common_head(cubins: Cubins) -> None:
    """Compares what has been compiled anyway: one variant of each kernel of triton_v1."""
    arch, once, needs_by_kernel = cubins
    if not once:
        pytest.skip("make soak compares all of them")
    table = triton_resources.read_table()[1]
    taken = triton_resources.by_kernel(needs_by_kernel, arch, "64,bfloat16")
    measured = {kernel: each for kernel, each in taken.items() if kernel in table}
    assert {kernel.name.partition("_")[0] for kernel in measured} == {"prepare", "scan", "gradients"}
    check_table(measured)


def check_table(resources: dict[Kernel, Resources]) -> None:
    version, table = triton_resources.read_table()
    for kernel, needs in resources.items():
        assert kernel in table, f"{kernel} is not in the table: {triton_resources.WRITE}"
        if version == triton_resources.version():
            exceeds = [now > before for now, before in zip(needs, table[kernel], strict=True)]
            assert not any(exceeds), f"{kernel}: {needs}, more than {table[kernel]}; if that is meant: {triton_resources.WRITE}"
        assert needs.shared <= SHARED_ANYWHERE, kernel
        assert needs.spilled == 0 or "float32" in kernel.head, kernel


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the output of a pytest process that interprets every kernel."""
    test = f"{TESTS / 'triton_interpreted.py'}::test_every_kernel"
    process = run_python(["-m", "pytest", test, "--no-header", "--tb=short", "-rA"], tmp_path_factory.mktemp("interpreted"),
                         interpret=True)
    return process.stdout + process.stderr


@pytest.mark.parametrize(("op", "name"), KERNELS, ids=["-".join(kernel) for kernel in KERNELS])
def test_a_kernel_under_the_interpreter(op: str, name: str, interpreted: str) -> None:
    """Results and gradients are correct; a new file is tested automatically and needs no GPU."""
    assert f"PASSED tests/kernels/triton_interpreted.py::test_every_kernel[{op}-{name}]\n" in interpreted, interpreted


@pytest.mark.soak
def test_under_the_interpreter(tmp_path: Path) -> None:
    process = run_python(["-m", "pytest", TESTS / "triton_interpreted.py", "--no-header"], tmp_path, interpret=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert " passed" in process.stdout.splitlines()[-1], process.stdout


def test_every_kernel_compiles(cubins: Cubins) -> None:
    arch, once, needs_by_kernel = cubins
    kernels = [name.split()[0] for name in needs_by_kernel]
    widths = 3 if arch == 90 else 2              # the widths and dtypes of `launches`
    constants = {"convolve": 6, "correlate": 2, "forward": widths, "backward": widths,
                 "softmax": 3, "gradient": 3, "softmax_in_blocks": 1, "gradient_in_blocks": 1,
                 "recurrence": 4, "rows": 2, "keys": 2, "prepare": 4, "scan": 6, "gradients": 2}
    if once:
        constants = dict.fromkeys(constants.keys() - {"backward"}, 1)        # make soak compiles "backward", in ten seconds
    assert {name: kernels.count(name) for name in set(kernels)} == constants


def test_registers_and_shared_memory_suffice(cubins: Cubins) -> None:
    arch, _, needs_by_kernel = cubins
    for name, needs in needs_by_kernel.items():
        if "P=tf32x3" not in name:                                   # triton_resources.txt states what that form spills
            assert needs["spilled"] <= 16, f"{name}: {needs}"        # bytes per thread: a few spills cost little time
        assert needs["shared"] <= min(SHARED_ANYWHERE, SHARED[arch]), f"{name}: {needs}"
        assert needs["registers"] * needs["warps"] * 32 <= REGISTERS, f"{name}: {needs}"


def test_a_scan_has_enough_blocks_to_hide_its_loads(cubins: Cubins) -> None:
    """At B = 32, C = 768 an H200 runs 768 blocks on 132 multiprocessors: with 3 on each, they take two even rounds."""
    *_, needs_by_kernel = cubins
    for name, needs in needs_by_kernel.items():
        if name.startswith(("forward", "backward")):
            assert 3 * needs["registers"] * needs["warps"] * 32 <= REGISTERS, f"{name}: {needs}"


def test_the_sums_of_tensor_cores_are_short(cubins: Cubins) -> None:
    """Three products give the accuracy of float32. The first is added to zeros, so that no loop carries a truncated sum."""
    *_, needs_by_kernel = cubins
    for name, needs in needs_by_kernel.items():
        if name.startswith(("convolve", "correlate")):
            assert needs["dots"] == ["zeros", "product", "product"], f"{name}: {needs}"
