"""kernels/native: the libraries are of their sources, every level and every number of threads computes the same operator.

The code for ARM runs under qemu, in make soak.
"""

import ctypes
import importlib.util
import multiprocessing
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import native, wkv4, wkv7
from kernels.compare import errors, misses
from kernels.native import build
from kernels.registry import why_not
from kernels.select import why_auto
from kernels.wkv4 import cases as wkv4_cases
from kernels.wkv7 import cases as wkv7_cases

HERE = native._here()
AVAILABLE = native.why_not() is None
in_c = pytest.mark.skipif(not AVAILABLE, reason=str(native.why_not()))
QEMU = "qemu-aarch64-static"


def zig() -> str | None:
    """The Python that has zig's compiler: that of make native, or this one."""
    own = build.ROOT / ".venv-zig" / "bin" / "python"
    return str(own) if own.exists() else sys.executable if importlib.util.find_spec("ziglang") else None


with_zig = pytest.mark.skipif(zig() is None, reason="needs zig's compiler (make native installs it)")


@pytest.mark.parametrize("target", native.TARGETS, ids=lambda target: f"{target.system}-{target.machine}")
def test_a_library_is_of_its_sources(target: native.Target) -> None:
    """Else `make native` has to be run again."""
    is_of_them = build.name_of_sources().encode() in target.path.read_bytes()
    assert is_of_them, "run make native"


@pytest.mark.soak
@with_zig
@pytest.mark.parametrize("target", native.TARGETS, ids=lambda target: f"{target.system}-{target.machine}")
def test_the_compiler_makes_the_same_bytes_in_another_folder(target: native.Target, tmp_path: Path) -> None:
    shutil.copytree(build.ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    subprocess.run([sys.executable, "-m", "kernels.native.build", "--zig", str(zig()), f"{target.system}-{target.machine}"],
                   check=True, cwd=tmp_path)
    made = tmp_path / target.path.relative_to(build.ROOT)
    is_the_same = made.read_bytes() == target.path.read_bytes()
    assert is_the_same


@pytest.mark.parametrize("arguments", [["linux-riscv64"], ["--zig", sys.executable + "-nowhere"]], ids=["target", "compiler"])
def test_what_cannot_be_built_is_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        build.main(arguments)
    assert status.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def wkv4_misses(dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """More channels than whole vectors, more steps than whole chunks."""
    found = {}
    for shape, spread in (((2, 70, 37), 5.0), ((1, 33, 3), 1.0)):
        inputs = wkv4_cases.inputs(*shape, spread)
        inputs = (*inputs[:2], inputs[2].to(dtype), inputs[3].to(dtype), inputs[4])
        expected = wkv4_cases.results(wkv4.WKV4("reference"), wkv4_cases.double(inputs))
        found |= misses(errors(wkv4_cases.results(wkv4.WKV4("c_v0"), inputs), expected), wkv4_cases.tolerance(dtype))
    return found


def wkv7_misses(dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Over whole chunks and a piece of one; 24 channels are padded."""
    found = {}
    for N in (24, 64):
        inputs = wkv7_cases.inputs(2, 37, 2, N, dtype=dtype)
        expected = wkv7_cases.results(wkv7.WKV7("reference"), wkv7_cases.double(inputs))
        found |= misses(errors(wkv7_cases.results(wkv7.WKV7("c_v0"), inputs), expected), wkv7_cases.tolerance(dtype))
    return found


def rounded_as_by_torch() -> bool:
    """Whether y of a step that adds two numbers, to a state of one column, is what PyTorch has in bfloat16; one y is NaN."""
    r, log_w, k, v, a, b = torch.zeros(6, 1, 1, 1, 64)
    r[..., 0] = k[..., 0] = 1.0
    state = torch.zeros(1, 1, 64, 64)
    v[0, 0, 0], state[0, 0, :, 0] = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    state[0, 0, 5, 0] = float("nan")
    half = [tensor.bfloat16() for tensor in (r, k, v, a, b)]
    y, _ = wkv7.WKV7("c_v0")(half[0], log_w, *half[1:], state)
    expected = (state[0, 0, :, 0] + half[2][0, 0, 0].float()).bfloat16()
    return torch.allclose(y[0, 0, 0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("level", native.levels())
def test_every_level_computes_the_operators(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    for dtype in (torch.float32, torch.bfloat16):
        assert not wkv4_misses(dtype)
        assert not wkv7_misses(dtype)
    assert rounded_as_by_torch()


def of_both() -> list[Tensor]:
    found = [wkv4_cases.results(wkv4.WKV4("c_v0"), wkv4_cases.inputs(3, 70, 100)),
             wkv7_cases.results(wkv7.WKV7("c_v0"), wkv7_cases.inputs(2, 37, 3, 16))]
    return [tensor for results in found for tensor in results.values()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@in_c
def test_any_number_of_threads_gives_the_bits_of_one(threads: Callable[[int], None]) -> None:
    threads(1)
    of_one = of_both()
    for n in (2, 5, 3):
        threads(n)
        assert all(same(of_both(), of_one) for _ in range(20))


@in_c
def test_two_callers_at_once_do_not_disturb_each_other(threads: Callable[[int], None]) -> None:
    threads(1)
    expected, found = of_both(), []
    threads(3)

    def work() -> None:
        torch.set_num_threads(3)         # of this thread, in torch
        found.extend(same(of_both(), expected) for _ in range(20))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 60
    assert all(found)


def in_child(queue: Any) -> None:
    """With the kernels alone: torch's own threads do not survive a fork."""
    torch.set_num_threads(1)
    inputs = wkv4_cases.inputs(3, 70, 100)
    native.threads_for = lambda tasks: 3  # type: ignore[assignment]
    y, _ = wkv4.WKV4("c_v0")(*inputs)
    queue.put(y.double().sum().item())


@in_c
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own(threads: Callable[[int], None]) -> None:
    threads(3)
    y, _ = wkv4.WKV4("c_v0")(*wkv4_cases.inputs(3, 70, 100))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == y.double().sum().item()
    child.join(timeout=60)
    assert child.exitcode == 0


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    caches = (native._library, native.levels, why_not)
    for cached in caches:
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("here", [native.Target("riscv64", "linux"), native.Target("x86_64", "plan9")], ids=str)
def test_a_system_without_a_library_takes_another_kernel(here: native.Target, unavailable: pytest.MonkeyPatch) -> None:
    unavailable.setattr(native, "_here", lambda: here)
    reason = why_not("wkv4", "c_v0")
    assert reason is not None
    assert here.machine in reason
    assert here.system in reason
    for operator in ("wkv4", "wkv7"):
        assert why_auto(operator).startswith("taichi")
        assert reason.partition(": ")[2] in why_auto(operator)


@in_c
def test_a_library_that_cannot_be_opened_is_a_sentence(unavailable: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unavailable.setattr(native, "FOLDER", tmp_path)
    reason = why_not("wkv7", "c_v0")
    assert reason is not None
    assert "cannot be opened" in reason
    assert "\n" not in reason


@pytest.mark.skipif(HERE.machine != "x86_64" or not AVAILABLE, reason="needs a library for x86-64")
def test_a_cpu_without_the_instructions_takes_another_kernel(unavailable: pytest.MonkeyPatch) -> None:
    class Old:
        def timemix_level(self) -> int:
            return 0

    unavailable.setattr(native, "_library", Old)
    assert native.level() is None
    assert "AVX2" in str(why_not("wkv4", "c_v0"))
    assert why_auto("wkv7").startswith("taichi_v3")


# The code for ARM, in an emulator. The calls of c_v0.py go to a program of the same sources, which has no need of a C library.

ENTRY = re.compile(r"^ENTRY\((\w+)\)", re.MULTILINE)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """native.run on ARM."""
    folder = tmp_path_factory.mktemp("arm")
    sources = [source for source in build.sources() if source.endswith(".c")]
    names = [f"{name}_neon" for source in sources for name in ENTRY.findall((build.ROOT / source).read_text(encoding="ascii"))]
    listed = "".join(f'{{"{name}", {name}}}, ' for name in names)
    (folder / "entries.h").write_text("".join(f"function {name};\n" for name in names)
                                      + f"static const struct entry ENTRIES[] = {{{listed}}};\n")
    program, harness = folder / "native_calls", Path(__file__).parent / "native_calls.c"
    subprocess.run([str(zig()), "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", *build.FLAGS, "-DLEVEL=neon",
                    '-DSOURCES=""', f"-I{folder}", str(harness), *sources, "-o", str(program)], check=True, cwd=build.ROOT)

    def run(name: str, threads: int, *arguments: int | Tensor | None) -> None:
        file = folder / "call"
        tensors: list[tuple[Tensor, int]] = []
        with file.open("wb") as out:
            out.write(f"{name}_neon".encode().ljust(64, b"\0"))
            out.write(integers(threads, len(arguments)))
            for argument in arguments:
                if isinstance(argument, Tensor):
                    out.write(integers(1, argument.nbytes))
                    tensors.append((argument, out.tell()))
                    out.write(ctypes.string_at(argument.data_ptr(), argument.nbytes))
                else:
                    out.write(integers(0, argument or 0))
        subprocess.run([QEMU, str(program), str(file)], check=True)
        after = file.read_bytes()
        for tensor, at in tensors:
            ctypes.memmove(tensor.data_ptr(), after[at:], tensor.nbytes)

    return run


def integers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)


@pytest.mark.soak
@with_zig
@pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU} (qemu-user-static)")
def test_arm_computes_the_operators(emulated: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "run", emulated)
    monkeypatch.setattr(native, "threads_for", lambda tasks: min(tasks, 3))
    for dtype in (torch.float32, torch.bfloat16):
        assert not wkv4_misses(dtype)
        assert not wkv7_misses(dtype)
    assert rounded_as_by_torch()
