"""Tests of the installed package: the contents of the wheel, and the command timemix run from another folder."""

import importlib.util
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from programs import one_sentence
from training_runs import ENVIRONMENT, SMALL, TEXT

from rwkv.tools.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent


def test_every_folder_of_the_product_is_a_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["setuptools"]["packages"]
    folders = {str(path.parent.relative_to(ROOT)) for name in ("kernels", "rwkv") for path in (ROOT / name).rglob("*.py")}
    assert set(packages) == {folder.replace("/", ".") for folder in folders} | {"rwkv.configs"}


def test_only_programs_are_commands() -> None:
    assert set(COMMANDS) == {"bench", "chat", "completion", "convert", "doctor", "evaluate", "generate", "kernels", "list",
                             "lm_eval", "pull", "report", "serve", "smoke", "train"}


@pytest.mark.programs
@pytest.mark.parametrize(("arguments", "status"), [((), 0), (("--help",), 0), (("nope",), 2)])
def test_the_command_lists_the_programs(arguments: tuple[str, ...], status: int) -> None:
    command = [sys.executable, "-m", "rwkv.tools", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == status
    assert all(name in result.stdout + result.stderr for name in COMMANDS)


@pytest.mark.programs
@pytest.mark.parametrize(("command", "module"), [
    ("train", "rwkv.programs.train"), ("evaluate", "rwkv.tools.evaluate"), ("convert", "rwkv.tools.convert"),
    pytest.param("bench", "kernels.bench", marks=pytest.mark.soak)])     # imports torch
def test_help_names_the_program_as_typed(command: str, module: str) -> None:
    def help_of(*words: str) -> str:
        result = subprocess.run([sys.executable, "-m", *words, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
        return result.stdout

    in_a_clone = f"python {command}.py" if command == "train" else f"python -m {module}"
    help_text = help_of("rwkv.tools", command)
    assert f"timemix {command}" in help_text
    assert f"{in_a_clone} " not in help_text
    assert in_a_clone in help_of(module)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel without a network, from a copy of the source, because setuptools writes into it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "kernels", "rwkv", "configs", "*.py", "pyproject.toml", "README.md", "LICENSE"],
                            cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
                    "--disable-pip-version-check", "-w", str(target), str(source)], check=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def timemix(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the command timemix in an environment with the wheel. Dependencies come from the current environment's
    site-packages.
    """
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    here = sysconfig.get_path("purelib")
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    subprocess.run([sys.executable, "-m", "pip", "--python", str(environment), "install", "-q", "--no-deps", "--no-index",
                    "--disable-pip-version-check", str(wheel)], check=True)
    (site / "dependencies.pth").write_text(here + "\n")          # a path, without import hooks of an editable installation
    return Path(sysconfig.get_path("scripts", "venv", {"base": str(environment), "platbase": str(environment)})) / "timemix"


def run(timemix: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(timemix), *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.soak
def test_the_wheel_contains_configurations_and_no_top_level_programs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"rwkv/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs | {"rwkv/py.typed", "kernels/py.typed", "kernels/wkv4/csrc/scan.cu"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"kernels", "rwkv", "timemix"}


@pytest.mark.soak
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(timemix: Path, tmp_path: Path, command: str) -> None:
    if command == "lm_eval" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("the library `lm_eval` is missing: pip install -e '.[lm-eval]'")
    result = run(timemix, tmp_path, command, "--help")
    assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
    assert result.stdout


@pytest.mark.soak
def test_an_installed_package_trains_sweeps_and_generates(timemix: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    for arguments in (("train", *SMALL, "logger=none", "out_dir=run", "kernel=torch_scan"),
                      ("train", "-m", *SMALL, "logger=csv", "out_dir=sweep", "kernel=torch_scan,conv1d"),
                      ("generate", "checkpoint=run", "max_new_tokens=5", "kernel=torch_scan"),
                      ("evaluate", "checkpoint=run", "data.path=text.txt", "kernel=torch_scan"),
                      ("convert", "run", "weights.pth"), ("report", "sweep")):
        result = run(timemix, tmp_path, *arguments)
        assert result.returncode == 0, result.stderr
        if arguments[0] == "train":
            assert "more: timemix generate checkpoint=" in result.stderr
    assert (tmp_path / "sweep" / "report.html").is_file()


@pytest.mark.soak
def test_a_user_s_mistake_is_reported_in_one_sentence_when_installed(timemix: Path, tmp_path: Path) -> None:
    for arguments in (("train", "optim.lrr=1"), ("train", "data=text"), ("generate", "checkpoint=nowhere")):
        result = run(timemix, tmp_path, *arguments)
        one_sentence((result.returncode, result.stdout, result.stderr))
