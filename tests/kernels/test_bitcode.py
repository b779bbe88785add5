"""kernels/backends/bitcode.py: the files are of their sources, and a CPU without the instructions is told so in a sentence."""

import shutil
from pathlib import Path

import pytest
import torch

from kernels import registry
from kernels.backends import bitcode
from kernels.registry import why_not
from kernels.select import resolve

FILES = [(source, level) for source in bitcode.sources() for level in registry.LEVELS]


@pytest.mark.parametrize(("source", "level"), FILES, ids=lambda part: part if isinstance(part, str) else part.name)
def test_a_file_is_of_its_source(source: Path, level: str) -> None:
    """Else `make bitcode` has to be run again."""
    assert bitcode.name_of(source).encode() in bitcode.path_of(source, level).read_bytes()


@pytest.mark.compiles
@pytest.mark.skipif(shutil.which("clang-15") is None, reason="needs clang-15")
@pytest.mark.parametrize(("source", "level"), FILES, ids=lambda part: part if isinstance(part, str) else part.name)
def test_clang_makes_the_file(source: Path, level: str, tmp_path: Path) -> None:
    bitcode.compile_source(source, level, tmp_path / "made.bc")
    assert (tmp_path / "made.bc").read_bytes() == bitcode.path_of(source, level).read_bytes()


def test_an_unknown_operator_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        bitcode.main(["convolution"])
    assert status.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_level_is_the_best_that_a_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, expected in ((registry.LEVELS["avx512bf16"], "avx512bf16"), (registry.AVX512, "avx512"),
                          (registry.AVX2, "avx2"), (("avx2",), None), ((), None)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: dict.fromkeys(has, True), raising=False)
        assert registry.level.__wrapped__() == expected
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    for has, expected in (("AVX512", "avx2"), ("AVX2", "avx2"), ("DEFAULT", None)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda has=has: has)
        assert registry.level.__wrapped__() == expected


def test_a_cpu_without_the_instructions_takes_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "level", lambda: None)
    why_not.cache_clear()
    try:
        reason = why_not("decoding", "taichi_v2")
        assert reason is not None
        assert "avx512bf16 or avx512 or avx2" in reason
        assert resolve("decoding", "auto") == "taichi_v0"
    finally:
        why_not.cache_clear()
