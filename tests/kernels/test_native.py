"""Tests kernels/native: libraries match their sources, and results are correct at every level and number of threads.

make soak also runs the code for ARM under qemu.
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
from models import exact, in_format, small_model, tokens
from torch import Tensor

from kernels import __main__ as listing
from kernels import matvec, native, registry, wkv4, wkv7
from kernels.compare import errors, misses
from kernels.draw import NO_BIAS, Filters
from kernels.draw import c_v0 as c_draw
from kernels.matvec import c_v0
from kernels.matvec import cases as matvec_cases
from kernels.native import build
from kernels.registry import KernelUnavailable, why_not
from kernels.select import resolve, rule, why_auto
from kernels.wkv4 import cases as wkv4_cases
from kernels.wkv7 import cases as wkv7_cases
from rwkv.generation.decoder import CDecoder, Decoder
from rwkv.model import quantized
from rwkv.model.decoding.c_step import step_of
from rwkv.model.weights_watch import tensors_of

AVAILABLE = native.why_not() is None
in_c = pytest.mark.skipif(not AVAILABLE, reason=str(native.why_not()))
QEMU = "qemu-aarch64-static"
NATIVE_RUN = native.run


def zig() -> str | None:
    """Returns the Python that has zig's compiler: make native's, or this one, or None."""
    own = build.ROOT / ".venv-zig" / "bin" / "python"
    return str(own) if own.exists() else sys.executable if importlib.util.find_spec("ziglang") else None


with_zig = pytest.mark.skipif(zig() is None, reason="needs zig's compiler (make native installs it)")


@pytest.mark.parametrize("target", native.TARGETS, ids=lambda target: f"{target.system}-{target.machine}")
def test_a_library_matches_its_sources(target: native.Target) -> None:
    """After a change of a source, `make native` must be run again."""
    is_current = build.sources_id().encode() in target.path.read_bytes()
    assert is_current, "run make native"


@pytest.mark.soak
@with_zig
@pytest.mark.parametrize("target", native.TARGETS, ids=lambda target: f"{target.system}-{target.machine}")
def test_the_compiler_makes_the_same_bytes_in_another_folder(target: native.Target, tmp_path: Path) -> None:
    for package in ("kernels", "rwkv"):
        shutil.copytree(build.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    subprocess.run([sys.executable, "-m", "kernels.native.build", "--zig", str(zig()), f"{target.system}-{target.machine}"],
                   check=True, cwd=tmp_path)
    rebuilt = tmp_path / target.path.relative_to(build.ROOT)
    is_equal = rebuilt.read_bytes() == target.path.read_bytes()
    assert is_equal


@pytest.mark.soak
@pytest.mark.timeout(3600)
@with_zig
@in_c
def test_c_has_no_undefined_behaviour(tmp_path: Path) -> None:
    """Runs the tests of all C code with a library that ends the process at undefined behaviour (UBSan)."""
    for package in ("kernels", "rwkv", "tests"):
        shutil.copytree(build.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(build.ROOT / "pyproject.toml", tmp_path)
    here = native._here()
    subprocess.run([sys.executable, "-m", "kernels.native.build", "--sanitize", "--zig", str(zig()),
                    f"{here.system}-{here.machine}"], check=True, cwd=tmp_path)
    # UBSan stores the names of the sources in the library
    assert b"csrc/products.c" in (tmp_path / here.path.relative_to(build.ROOT)).read_bytes()
    tests = ("model/decoding/test_c_step.py", "model/fused/test_fused_c.py", "kernels/test_matvec.py",
             "kernels/test_conformance.py", "generation/test_sampling.py")
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not taichi and not triton",
                    *(f"tests/{test}" for test in tests)], check=True, cwd=tmp_path)


@pytest.mark.parametrize("arguments", [["linux-riscv64"], ["--zig", sys.executable + "-nowhere"]], ids=["target", "compiler"])
def test_a_build_that_fails_is_reported_in_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        build.main(arguments)
    assert status.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def wkv4_misses(dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Returns the errors above the tolerance, with partial vectors of channels and partial chunks of steps."""
    actual = {}
    for shape, spread in (((2, 70, 37), 5.0), ((1, 33, 3), 1.0)):
        inputs = wkv4_cases.inputs(*shape, spread)
        inputs = (*inputs[:2], inputs[2].to(dtype), inputs[3].to(dtype), inputs[4])
        expected = wkv4_cases.results(wkv4.WKV4("reference"), wkv4_cases.double(inputs))
        actual |= misses(errors(wkv4_cases.results(wkv4.WKV4("c_v0"), inputs), expected), wkv4_cases.tolerance(dtype))
    return actual


def wkv7_misses(dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Returns the errors above the tolerance, with full chunks and a partial one; heads of 24 channels are padded."""
    actual = {}
    for N in (24, 64):
        inputs = wkv7_cases.inputs(2, 37, 2, N, dtype=dtype)
        expected = wkv7_cases.results(wkv7.WKV7("reference"), wkv7_cases.double(inputs))
        actual |= misses(errors(wkv7_cases.results(wkv7.WKV7("c_v0"), inputs), expected), wkv7_cases.tolerance(dtype))
    return actual


def rounded_as_by_torch() -> bool:
    """Returns True if bfloat16 outputs that are sums of two numbers are rounded as by PyTorch; one output is NaN."""
    r, log_w, k, v, a, b = torch.zeros(6, 1, 1, 1, 64)
    r[..., 0] = k[..., 0] = 1.0
    state = torch.zeros(1, 1, 64, 64)
    v[0, 0, 0], state[0, 0, :, 0] = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    state[0, 0, 5, 0] = float("nan")
    half = [tensor.bfloat16() for tensor in (r, k, v, a, b)]
    y, _ = wkv7.WKV7("c_v0")(half[0], log_w, *half[1:], state)
    expected = (state[0, 0, :, 0] + half[2][0, 0, 0].float()).bfloat16()
    return torch.allclose(y[0, 0, 0], expected, rtol=0, atol=0, equal_nan=True)


def check_time_mixing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not wkv4_misses(dtype)
        assert not wkv7_misses(dtype)
    assert rounded_as_by_torch()


@pytest.mark.parametrize("level", native.levels())
def test_every_level_computes_the_operators(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "level", lambda: level)
    check_time_mixing()


def results_of_both() -> list[Tensor]:
    actual = [wkv4_cases.results(wkv4.WKV4("c_v0"), wkv4_cases.inputs(3, 70, 100)),
              wkv7_cases.results(wkv7.WKV7("c_v0"), wkv7_cases.inputs(2, 37, 3, 16))]
    return [tensor for results in actual for tensor in results.values()]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@in_c
def test_any_number_of_threads_gives_the_bits_of_one(threads: Callable[[int], None]) -> None:
    threads(1)
    single = results_of_both()
    for n in (2, 5, 3):
        threads(n)
        assert all(all(map(torch.equal, results_of_both(), single)) for _ in range(20))


@in_c
def test_two_callers_at_once_do_not_disturb_each_other(threads: Callable[[int], None]) -> None:
    threads(1)
    expected, actual = results_of_both(), []
    threads(3)

    def work() -> None:
        torch.set_num_threads(3)         # torch has this setting per thread
        actual.extend(all(map(torch.equal, results_of_both(), expected)) for _ in range(20))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(actual) == 60
    assert all(actual)


def in_child(queue: Any) -> None:
    """Runs a kernel on three threads, without PyTorch's threads, because these do not survive a fork."""
    torch.set_num_threads(1)
    inputs = wkv4_cases.inputs(3, 70, 100)
    native.threads_for = lambda tasks: 3  # type: ignore[assignment]
    y, _ = wkv4.WKV4("c_v0")(*inputs)
    queue.put(y.double().sum().item())


@in_c
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_starts_its_own_threads(threads: Callable[[int], None]) -> None:
    threads(3)
    y, _ = wkv4.WKV4("c_v0")(*wkv4_cases.inputs(3, 70, 100))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == y.double().sum().item()
    child.join(timeout=60)
    assert child.exitcode == 0


def next_choice(operator: str) -> str:
    """Returns the first kernel in the rule's order, after the C kernel, that can run here."""
    in_c, *others = rule(operator, "cpu", torch.float32).order
    assert in_c == "c_v0"
    return next(name for name in others if why_not(operator, name) is None)


@in_c
def test_a_kernel_that_the_library_lacks_is_named(tmp_path: Path) -> None:
    """not_built() reads the name from the call in the kernel's file, even if the name begins an f-string."""
    file = tmp_path / "c_v9.py"
    for called, missing in (('"wkv7_forward_float32"', None), ('f"wkv7_{direction}_{FORMS[r.dtype]}"', None),
                            ('"timex_c_v9"', "timex_c_v9"), ('\n        f"timex_c_v9_{kind}"', "timex_c_v9_")):
        file.write_text(f"native.run({called}, 1)\n")
        assert native.not_built(file) == missing


@in_c
def test_a_kernel_that_is_not_built_is_listed_as_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(listing.not_built(op, name) is None for op in registry.operators() for name in registry.names(op))
    monkeypatch.setattr(native, "not_built", lambda file: "softmax_c_v9" if file.name == "c_v0.py" else None)
    assert listing.runnable_devices("wkv7", "c_v0", ["cpu"]) == "no"
    described = listing.describe("wkv7", "c_v0", ["cpu"])
    assert described.endswith("Not here: the kernel is not built: the library does not contain softmax_c_v9 (run make native).")


def test_the_build_needs_no_torch(tmp_path: Path) -> None:
    """make native runs the build in an environment that has only ziglang."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    code = (f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']\n"
            "from kernels.native import build; print(len(build.sources()))")
    process = subprocess.run([sys.executable, "-c", code], cwd=build.ROOT, capture_output=True, text=True, check=True)
    assert int(process.stdout) == len(build.sources())


@pytest.mark.parametrize("here", [native.Target("riscv64", "linux"), native.Target("x86_64", "plan9")], ids=str)
def test_a_system_without_a_library_uses_another_kernel(here: native.Target, unavailable: pytest.MonkeyPatch) -> None:
    unavailable.setattr(native, "_here", lambda: here)
    reason = why_not("wkv4", "c_v0")
    assert reason is not None
    assert here.machine in reason
    assert here.system in reason
    for operator in ("wkv4", "wkv7"):
        assert resolve(operator, "auto") == next_choice(operator)
        assert reason.partition(": ")[2] in why_auto(operator)


@in_c
def test_a_library_that_cannot_be_opened_is_reported_in_one_sentence(unavailable: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unavailable.setattr(native, "FOLDER", tmp_path)
    reason = why_not("wkv7", "c_v0")
    assert reason is not None
    assert "cannot be loaded" in reason
    assert "\n" not in reason


@in_c
def test_c_that_is_not_built_is_reported_in_one_sentence() -> None:
    with pytest.raises(KernelUnavailable, match="timex_of_tomorrow"):
        native.run("timex_of_tomorrow", 1, 3)


@in_c
def test_every_function_exports_the_size_of_its_struct() -> None:
    library = native._here().path.read_bytes()
    suffix = str(native.level()).encode()
    exported = {name.decode() for name in re.findall(rb"\0(\w+)_%s(?=\0)" % suffix, library)}
    functions = {name for name in exported if not name.startswith("size_of_")}
    assert {"draw", "matvec", "rwkv4_step", "rwkv7_step", "wkv4_forward_float32", "wkv7_backward_bfloat16"} <= functions
    for name in functions:
        assert native.size_of(name) % 8 == 0
        assert native.size_of(name) > 0


@in_c
def test_an_argument_that_only_python_has_is_refused() -> None:
    x, y = torch.arange(-2.0, 2.0), torch.empty(4)
    native.run("squared_relu_float32", 1, 4, x, None, y)
    assert y.tolist() == [0, 0, 0, 1]
    for arguments in ((4, x, None), (4, x, None, y, None)):
        with pytest.raises(AssertionError, match="squared_relu_float32 must have the same fields"):
            native.run("squared_relu_float32", 1, *arguments)


@in_c
def test_a_size_that_is_not_exported_is_reported_in_one_sentence() -> None:
    with pytest.raises(KernelUnavailable, match=r"EXPORT_SIZE\(tomorrow"):
        native.size_of("tomorrow")


@pytest.mark.compiles
@with_zig
@in_c
@torch.no_grad()
def test_a_field_that_only_c_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument struct, and a struct inside a model's struct, are compiled with an additional field, without products."""
    model = small_model("reference", generation="rwkv7")
    level = str(native.level())
    for source in build.sources():
        copy = tmp_path / source
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (build.ROOT / source).read_text()
        for struct in ("relu_call", "layer"):
            text = text.replace(f"struct {struct} {{\n", f"struct {struct} {{\n    int64_t extra;\n")
        copy.write_text(text)
    here = native._here()
    header = "kernels/matvec/csrc/products.h"
    prototypes = re.findall(r"^void [^;{]+(?=;)", (build.ROOT / header).read_text(), re.MULTILINE)
    (tmp_path / "no_products.c").write_text(f'#include "{header}"\n' + "".join(f"{each} {{}}\n" for each in prototypes))
    sources = (*build.PER_LIBRARY, "kernels/matvec/csrc/pack.c", "no_products.c", "rwkv/model/fused/csrc/fused.c",
               "rwkv/model/rwkv7/csrc/step.c")
    subprocess.run([str(zig()), "-m", "ziglang", "cc", "-target", f"{here.machine}-{build.SYSTEMS[here.system]}", "-shared",
                    *build.FLAGS, *build.LEVEL_FLAGS[level], f"-DLEVEL={level}", '-DSOURCES=""', "-Wno-unused-parameter",
                    *sources, "-o", "extended"], check=True, cwd=tmp_path)
    library = ctypes.CDLL(str(tmp_path / "extended"))
    native._size.cache_clear()
    monkeypatch.setattr(native, "level", lambda: level)
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(native, "_library", lambda: library)
    try:
        with pytest.raises(AssertionError, match="squared_relu_float32 must"):
            native.run("squared_relu_float32", 1, 4, torch.ones(4), None, torch.ones(4))
        with pytest.raises(AssertionError, match="rwkv7_layer must"):
            step_of(model)
    finally:
        native._size.cache_clear()


def test_a_level_may_lack_the_one_before_it(unavailable: pytest.MonkeyPatch) -> None:
    """Many CPUs with AVX-512 have no AVX-VNNI."""
    class Library:
        def timemix_levels(self) -> int:
            return 0b1101

    unavailable.setattr(native, "_library", Library)
    unavailable.setattr(native, "_here", lambda: native.Target("x86_64", "linux"))
    assert native.levels() == ("avx2", "avx512", "avx512bf16")


def test_a_cpu_without_the_instructions_uses_another_kernel(unavailable: pytest.MonkeyPatch) -> None:
    class Old:
        def timemix_levels(self) -> int:
            return 0

    unavailable.setattr(native, "_library", Old)
    assert native.level() is None
    assert "AVX2" in str(why_not("wkv4", "c_v0"))
    assert resolve("wkv7", "auto") == next_choice("wkv7")


# The code for ARM runs in an emulator, in a static program of the same sources, so that no C library for ARM is required.


def entries(level: str) -> list[str]:
    """Returns the names of the functions that the library for ARM exports for Python."""
    library = native.Target("aarch64", "linux").path.read_bytes()
    names = {name.decode() for name in re.findall(rb"\0(\w+_%s)(?=\0)" % level.encode(), library)}
    return sorted(name for name in names if not name.startswith("size_of_"))


class Emulator:
    """Executes calls of native.run on ARM. `reachable` has the tensors whose addresses an int64 argument may contain."""

    def __init__(self, folder: Path, level: str) -> None:
        self._program, self._file, self._level = folder / "native_calls", folder / "call", level
        self.reachable: list[Tensor] = []
        names = entries(level)
        listed = "".join(f'{{"{name}", {name}}}, ' for name in names)
        (folder / "entries.h").write_text("".join(f"function {name};\n" for name in names)
                                          + f"static const struct entry ENTRIES[] = {{{listed}}};\n")
        sources = [source for source in build.sources() if source.endswith(".c")]
        harness = Path(__file__).parent / "native_calls.c"
        subprocess.run([str(zig()), "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", *build.FLAGS,
                        *build.LEVEL_FLAGS[level], f"-DLEVEL={level}", '-DSOURCES=""', f"-I{folder}", str(harness), *sources,
                        "-o", str(self._program)], check=True, cwd=build.ROOT)

    def __call__(self, name: str, threads: int, *arguments: int | float | Tensor | None) -> None:
        known = [tensor for tensor in self.reachable if tensor.numel()]
        tables = [argument for argument in arguments if isinstance(argument, Tensor) and argument.dtype == torch.int64]
        all_arguments = [*arguments, *(known if tables else [])]
        places, pointers = {}, []
        with self._file.open("wb") as out:
            out.write(f"{name}_{self._level}".encode().ljust(64, b"\0") + integers(threads, len(all_arguments)))
            for i, argument in enumerate(all_arguments):
                if not isinstance(argument, Tensor):
                    out.write(integers(0, native.number(argument)))
                    continue
                argument = argument if argument.numel() else torch.zeros(1)
                out.write(integers(1, argument.nbytes))
                places[i] = out.tell()
                out.write(ctypes.string_at(argument.data_ptr(), argument.nbytes))
                if i < len(arguments) and argument.dtype == torch.int64:
                    for at, number in enumerate(argument.flatten().tolist()):
                        pointers += [(i, 8 * at, len(arguments) + j) for j, tensor in enumerate(known)
                                     if number == tensor.data_ptr()]
            out.write(integers(len(pointers), *(number for pointer in pointers for number in pointer)))
        subprocess.run([QEMU, str(self._program), str(self._file)], check=True)
        after = self._file.read_bytes()
        for i, at in places.items():
            tensor = all_arguments[i]
            assert isinstance(tensor, Tensor)
            ctypes.memmove(tensor.data_ptr(), after[at:at + tensor.nbytes], tensor.nbytes)


def integers(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)


@pytest.fixture(scope="module", params=native.LEVELS["aarch64"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("arm"), request.param)


@pytest.fixture
def on_arm(emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    for module, name, ours in ((native, "run", emulated), (native, "why_not", lambda: None),
                               (native, "threads_for", lambda tasks: min(tasks, 3)),
                               (quantized, "multiplies_natively", lambda dtype: False)):
        monkeypatch.setattr(module, name, ours)
    return emulated


with_qemu = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU} (qemu-user-static)")


def arm_test(test: Any) -> Any:
    return pytest.mark.soak(with_zig(with_qemu(test)))


@arm_test
def test_arm_computes_time_mixing(on_arm: Emulator) -> None:
    check_time_mixing()


@arm_test
def test_arm_computes_products(on_arm: Emulator) -> None:
    """Every format is tested, and a row alone has the same bits as among other rows."""
    for format in matvec.FORMATS:
        for shape in ((1, 7, 13), (5, 9, 100), (9, 20, 600)):
            x, packed = matvec_cases.inputs(*shape, format=format)
            y = matvec.MatVec("c_v0")(x, packed)
            assert not misses(errors({"y": y}, {"y": matvec_cases.expected(x, packed)}), matvec_cases.tolerance("c_v0", format))
            assert torch.equal(matvec.MatVec("c_v0")(x[-1:], packed)[0], y[-1])
    packed = matvec.pack(torch.randn(7, 300), "int4")
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(matvec.MatVec("c_v0").dense(packed, dtype), packed.dense(dtype))
    x, packed = matvec_cases.inputs(70, 35, 300, "bfloat16")
    y, expected = c_v0.bfloat16_product(packed.weight, x), x.double() @ packed.weight.double().T
    assert not misses(errors({"y": y}, {"y": expected}), matvec_cases.tolerance("c_v0", "bfloat16"))
    by_output = matvec.Int8.of(torch.randn(136, 520), non_negative=True)
    for rows in (1, 3, 9):
        x = torch.randn(1, rows, 520).relu()
        y, expected = (matvec.MatVec("c_v0").bind(packed)(x)[0] for packed in (by_output.stored_by_input(), by_output))
        assert torch.equal(y, expected)


@arm_test
@torch.no_grad()
@pytest.mark.parametrize("generation", ["rwkv4", "rwkv7"])
@pytest.mark.parametrize("format", matvec.FORMATS)
def test_arm_computes_steps(on_arm: Emulator, generation: str, format: str) -> None:
    """Steps are compared with the reference in float64.

    A row alone has the same bits as among other rows, and three tokens in one call have the same bits as in three calls.
    """
    widths = {"n_embd": matvec_cases.width(format, 64), "n_ffn": matvec_cases.width(format, 96)}
    model = in_format(small_model("reference", generation=generation, **widths), format)
    step = step_of(model)
    on_arm.reachable = [*step.own_tensors, *tensors_of(model)]
    together, alone = (CDecoder(model, model.empty_state(rows)) for rows in (5, 1))
    reference, several = Decoder(exact(model), model.empty_state(5)), tokens(model, B=5, T=3)
    some_rows_are_off = format == "bfloat16" or issubclass(matvec.FORMATS[format], matvec.Blocks)
    for t in range(3):
        logits = together.step(several[:, t])
        off = (logits - reference.step(several[:, t])).abs().amax(-1)
        assert (off.min() if some_rows_are_off else off.median()) <= 2e-5
        assert torch.equal(alone.step(several[:1, t])[0], logits[0])
    assert torch.equal(CDecoder(model, model.empty_state(5)).read(several), logits)


@arm_test
@torch.no_grad()
@pytest.mark.parametrize("generation", ["rwkv4", "rwkv7"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_arm_reads_prompts(on_arm: Emulator, without_fbgemm: None, generation: str, dtype: str) -> None:
    """Logits of few and of many rows are near those of the float32 model, without PyTorch's int8 products."""
    model = small_model("reference", generation=generation, n_embd=64, n_ffn=96).requires_grad_(False).eval()
    several = tokens(model, B=2, T=20)
    exact = [model(several[:, :T])[0] for T in (3, 20)]
    model = in_format(model, dtype)
    for logits in exact:
        actual = model(several[:, :logits.shape[1]])[0]
        assert (actual - logits).norm() / logits.norm() < {"int8": 0.1, "int4": 0.3}[dtype]
        if dtype == "int8":
            torch.testing.assert_close(model(several[1:, :logits.shape[1]])[0][0], actual[1], rtol=0, atol=1e-5)


@arm_test
def test_arm_draws(on_arm: Emulator) -> None:
    """The tokens equal those of the C code for this machine."""
    logits = 3 * torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for filters in (Filters(), Filters(0.7, top_k=40), Filters(1.2, top_p=0.9), Filters(min_p=0.1),
                    Filters(2.0, 50, 0.8, 0.05, True)):
        arm_tokens = c_draw.draw(logits, uniform, filters, NO_BIAS)
        with pytest.MonkeyPatch.context() as here:
            here.setattr(native, "run", NATIVE_RUN)
            assert torch.equal(arm_tokens, c_draw.draw(logits, uniform, filters, NO_BIAS))
