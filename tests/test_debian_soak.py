"""Runs `make quick` and `make train` with Debian's Python 3.14, in a Debian system that debootstrap installs.

The system's folder is temporary, or that of `make soak ARGS="--chroot FOLDER"`, which is reused the next time.
Requires root on Linux, debootstrap, a Debian mirror, and the package index that this system's pip uses.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
SUITE, PYTHON = "forky", "python3.14"
PACKAGES = "python3.14,python3.14-venv,python3-pip,make,git,ca-certificates"
SOURCE = "timemix"                       # the project's folder inside the chroot
CHROOT = 'root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; ' \
         'while [ "$1" != -- ]; do mount --bind "$1" "$root$1"; shift; done; shift; exec chroot "$root" "$@"'

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


def why_not() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "debootstrap needs root on Linux"
    missing = [program for program in ("debootstrap", "unshare", "git") if shutil.which(program) is None]
    return f"needs {missing[0]}" if missing else None


@pytest.fixture(scope="module")
def debian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields the root folder of a Debian system that contains the project's files that git tracks."""
    if reason := why_not():
        pytest.skip(reason)
    chroot = request.config.getoption("--chroot")
    folder = Path(chroot).resolve() if chroot else tmp_path_factory.mktemp(SUITE)
    if not (folder / "usr" / "bin" / PYTHON).exists():
        result = subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(folder)],
                                capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"debootstrap cannot make {SUITE}: {(result.stdout + result.stderr).strip().splitlines()[-1]}")
    if subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path_factory.mktemp("pip")),
                       "packaging"], capture_output=True, check=False).returncode:
        pytest.skip("pip finds no packages here")
    (folder / "etc" / "resolv.conf").write_bytes(Path("/etc/resolv.conf").read_bytes())
    _copy_project(folder / SOURCE)
    yield folder
    if not chroot:
        shutil.rmtree(folder)            # the system has gigabytes


def _copy_project(target: Path) -> None:
    """Copies the project with the files' times, so that make sees which files have changed.

    An existing .venv stays.
    """
    for path in target.glob("*"):        # hidden entries, such as .venv, are not in the list
        if path.name[0] != ".":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    output = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, output.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def _pip_options() -> dict[str, str]:
    """Returns this system's pip configuration as environment variables, such as PIP_INDEX_URL."""
    output = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    variables = {}
    for line in output.splitlines():
        name, _, value = line.partition("=")
        variable = "PIP_" + name.rpartition(".")[2].upper().replace("-", "_")
        variables[variable] = os.environ.get(variable) or ast.literal_eval(value)
    return variables


def _local(options: dict[str, str]) -> set[str]:
    """Returns the local files and folders that pip's options name, and for a local index its whole folder."""
    words = [urlsplit(word) for value in options.values() for word in shlex.split(value)]
    paths = [Path(word.path) for word in words if word.scheme in ("", "file") and word.path.startswith("/")]
    return {str(path.parent if path.name == "simple" else path) for path in paths if path.exists()}


def inside(debian: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the project's folder in the chroot. The mounts are removed when the command ends."""
    options = _pip_options()
    mounts = sorted(_local(options))
    for path in mounts:
        place = debian / path[1:]
        if Path(path).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    variables = {**proxies, **options, "HOME": "/root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    return subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-ec", CHROOT, "sh", str(debian), *mounts,
                           "--", "env", "-C", f"/{SOURCE}", *command], env=variables, capture_output=True, text=True,
                          check=False)


def test_make_quick(debian: Path) -> None:
    result = inside(debian, "make", "quick", f"PYTHON={PYTHON}")
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
    assert "requires the package taichi, which" in result.stdout, "Taichi's kernels are skipped with the reason"


def test_make_train_trains_and_samples(debian: Path) -> None:
    result = inside(debian, "make", "train", f"PYTHON={PYTHON}", "ARGS=debug=fast trainer.max_steps=3 logger=none")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-10_000:]
    assert result.stdout.strip()
    assert "report.html" in result.stderr
