"""Defines the options and fixtures of all tests, such as `pytest --device cuda`, and memory full of NaN for tests of kernels.

A test fails if it changes the clone's runs/, where its run would become the user's runs/latest.

`make test` starts a process of pytest-xdist for every core. Each of them, and each process that it starts, has one thread,
because more threads than cores would mostly wait for each other.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cuda_host import Host

    from kernels.registry import Requires

if hasattr(signal, "SIGHUP"):            # under nohup the tests' processes would ignore this signal
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without byte code, each of the many processes would compile every module again. PYTHONPYCACHEPREFIX would keep the byte code
# out of the checkout, but each module of each library would be compiled once more: a minute in a new environment.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# cuBLAS reads this variable when it starts, and fails without it in deterministic mode, which poisoned_memory uses.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    import torch  # imported here and below, because the process that starts the others does not need torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

if importlib.util.find_spec("hypothesis"):               # hypothesis is often missing on machines with GPUs
    from hypothesis import settings

    settings.register_profile("timemix", deadline=None)  # no test depends on timing
    settings.load_profile("timemix")


CLONE_RUNS = Path(__file__).parent.parent / "runs"
# Each of these files takes about 15 seconds, whatever its number of tests
LONGEST = ("kernels/test_conformance.py", "training/sharding/test_fsdp.py", "training/test_ddp.py", "generation/test_gpu.py",
           "checkpoint/test_kinds.py", "kernels/test_triton.py", "serving/test_limits.py", "kernels/test_cuda_wkv7.py",
           "training/tuning/test_tune.py", "training/run/test_resume.py", "model/fused/test_fused_triton.py",
           "report/test_report.py", "kernels/test_cuda_host.py")
# Files whose tests compile the same kernels, by Taichi and by g++ (tests/cuda_host). One process runs those of a row
TOGETHER = (("test_conformance.py", "test_wkv4.py", "test_wkv7.py", "test_timex.py", "test_softmax.py", "test_pad.py"),
            ("test_cuda_wkv7.py", "test_cuda_host.py", "test_cuda_scan.py", "test_cuda_softmax.py"))
RUNS_BEFORE = pytest.StashKey[set[tuple[str, int]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="device for the tests of kernels")
    parser.addoption("--chroot", metavar="FOLDER", help="folder for a Debian system; default: a temporary one")
    parser.addoption("--neox", metavar="FILE", help="GPT-NeoX's 20B_tokenizer.json, whose ids a test compares")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes the hundreds of thousands of objects that collecting the tests creates from later garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[RUNS_BEFORE] = runs_in(CLONE_RUNS)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fails a test if the clone's runs/ has changed. With several processes, a concurrent test may have changed it."""
    before, now = item.config.stash[RUNS_BEFORE], runs_in(CLONE_RUNS)
    item.config.stash[RUNS_BEFORE] = now
    changed = sorted(name for name, _ in before ^ now)
    assert not changed, f"tests must write into temporary folders only: {', '.join(changed)} of {CLONE_RUNS} changed"


def runs_in(folder: Path) -> set[tuple[str, int]]:
    """Returns the name and modification time of each entry of a folder, without following links.

    The result is empty if there is no folder.
    """
    if not folder.is_dir():
        return set()
    return {(entry.name, entry.stat(follow_symlinks=False).st_mtime_ns) for entry in os.scandir(folder)}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns a scheduler for --dist loadfile that gives the files of a row of TOGETHER to one process."""
    from xdist.scheduler import LoadFileScheduling

    first_of_row = {f"tests/kernels/{name}": row[0] for row in TOGETHER for name in row}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return first_of_row.get(file, file)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_unconfigure() -> None:
    gc.unfreeze()                        # otherwise libraries report objects that are not freed when the interpreter ends


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps only the first test of an implementation that cannot run here, and skips it with the reason.

    Tests of an implementation that torch or another package compiles when it is called, which takes seconds, get the mark
    `compiles`. The longest files come first, then those with many slow tests, so that no process still runs one of them when
    the others have finished.
    """
    from kernels.registry import load, why_not

    chosen, deselected, unavailable = [], [], set()
    for item in items:
        mark = item.get_closest_marker("implementation")
        reason = mark and why_not(*mark.args, mark.kwargs.get("device", config.getoption("--device")))
        if mark and not reason and _is_compiled(load(*mark.args).REQUIRES):
            item.add_marker(pytest.mark.compiles)
        if reason and mark.args in unavailable:
            deselected.append(item)
            continue
        if reason:
            unavailable.add(mark.args)
            item.add_marker(pytest.mark.skip(reason=reason))
        chosen.append(item)
    slow = Counter(item.path for item in chosen if {"programs", "compiles"} & {mark.name for mark in item.iter_markers()})
    longest = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    together = {Path(__file__).parent / "kernels" / name for row in TOGETHER for name in row}
    assert all(path.is_file() for path in longest.keys() | together), "a file of LONGEST or TOGETHER has moved"
    items[:] = sorted(chosen, key=lambda item: (longest.get(item.path, len(longest)), -slow[item.path]))
    config.hook.pytest_deselected(items=deselected)


def _is_compiled(requires: "Requires") -> bool:
    return requires.compiled or bool(requires.packages)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the signal handlers after a test."""
    from rwkv.io.signals import STOPPING

    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Makes torch lack int8 matrix products, as on ARM."""
    import torch

    from kernels.registry import why_not
    from rwkv.model.quantized import matvec_for

    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    yield from _with_cleared_caches(monkeypatch, why_not, matvec_for)


@pytest.fixture
def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Makes torch report a CPU without instructions for bfloat16."""
    import torch

    from kernels.machine.cpu import multiplies_natively

    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    yield from _with_cleared_caches(monkeypatch, multiplies_natively)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    import torch

    from kernels.registry import why_not

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield from _with_cleared_caches(monkeypatch, why_not)


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Yields a MonkeyPatch for tests that make the C libraries unavailable, and clears the caches that depend on them."""
    from kernels import native
    from kernels.registry import why_not

    yield from _with_cleared_caches(monkeypatch, native._library, native.levels, why_not)


def _with_cleared_caches(patch: pytest.MonkeyPatch, *caches: Any) -> Iterator[pytest.MonkeyPatch]:
    """Clears the caches before and after the test, because `patch` changes the values in them."""
    for cached in caches:
        cached.cache_clear()
    yield patch
    patch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> "Host":
    """Returns a host that executes CUDA kernels on the CPU, and keeps its compiled programs for the whole test session."""
    from cuda_host import Host, why_not

    reason = why_not()
    if reason:
        pytest.skip(reason)
    return Host(tmp_path_factory.mktemp("cuda_host"))


@pytest.fixture(scope="module")
def poisoned_memory() -> Iterator[None]:
    """Makes torch.empty return NaN, so that a test fails if a kernel does not write an element."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Returns a function that runs programs in an empty directory.

    tests/programs.py is imported here, because the tests of kernels do not need it.
    """
    from programs import caller

    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)
