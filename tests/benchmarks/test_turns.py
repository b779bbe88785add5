"""Tests that benchmarks/_turns.py runs two programs alternately and never at the same time.

The tables of docs/benchmarks.md and the errors for invalid options of benchmarks are tested as well.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import _main, _turns, generations, tables, training
from rwkv.errors import UserError

SECONDS = 0.3
ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGSTOP")
CLOCK = "import time\nfor _ in range({}):\n    print(time.monotonic(), flush=True, file={}); time.sleep(0.01)"

HOLD_LOCK = [sys.executable, "-c", "import fcntl, os, time\nwith open(str(os.getpid()), 'w') as file:\n"
             "    fcntl.flock(file, fcntl.LOCK_EX); file.write('.'); file.flush(); time.sleep(600)"]


def clock(ticks: int, to: str = "sys.stdout") -> list[str]:
    return [sys.executable, "-c", "import sys\n" + CLOCK.format(ticks, to)]


@pytest.mark.thorough
def test_the_two_programs_never_run_at_the_same_time(tmp_path: Path) -> None:
    output = _turns.run_alternately(clock(100, f"open({str(tmp_path / 'main')!r}, 'a')"), tmp_path, clock(10**6), tmp_path,
                                    SECONDS)
    main, other = ([float(time) for time in text.split()] for text in ((tmp_path / "main").read_text(), output))
    assert len(main) == 100
    assert other
    runs = "".join(program for _, program in sorted([(time, "m") for time in main] + [(time, "o") for time in other]))
    assert runs.count("mo") + runs.count("om") < len(runs) / 3       # a turn has many ticks, so single ticks do not alternate


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.thorough), "SIGKILL"])
def test_no_process_survives_the_benchmark(name: str, tmp_path: Path) -> None:
    """One of the two processes runs, the other is suspended; each holds a lock as long as it is alive."""
    code = ("from benchmarks import _turns\n"
            f"_turns.run_alternately({HOLD_LOCK}, {str(tmp_path)!r}, {HOLD_LOCK}, {str(tmp_path)!r}, {SECONDS})")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as benchmark:
        while sum(path.stat().st_size for path in tmp_path.iterdir()) < 2:
            time.sleep(0.02)
        benchmark.send_signal(getattr(signal, name))
    fcntl = pytest.importorskip("fcntl")
    for path in tmp_path.iterdir():
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.parametrize(("main", "other"), [(["-c", "import no_such_thing"], ["-c", "import time; time.sleep(60)"]),
                                             (["-c", "import time; time.sleep(60)"], ["-c", "import no_such_thing"])])
def test_the_error_of_a_program_that_fails_is_shown(main: list[str], other: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no_such_thing"):
        _turns.run_alternately([sys.executable, *main], tmp_path, [sys.executable, *other], tmp_path, SECONDS)


@pytest.mark.parametrize(("program", "args"), [
    (training, "--only foo"), (training, "--only head,losses"), (training, "--losses 0"),
    (generations, "--only shakespeare"), (generations, "--shakespeare missing.txt"), (generations, "--only foo"),
    (generations, "--seeds a"), (generations, "--nanogpt ."),
])
def test_a_wrong_option_is_reported_in_one_sentence(program: ModuleType, args: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        program.main(args.split())
    assert status.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"caf\xe9"])
def test_an_empty_or_binary_text_is_reported_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(UserError, match=r"^[^\n]*text [^\n]*$"):
        _main.read_text(tmp_path / "text")


def test_the_page_contains_the_committed_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """docs/benchmarks.md equals the output of python -m benchmarks.tables."""
    page = tmp_path / "benchmarks.md"
    page.write_bytes(tables.PAGE.read_bytes())
    monkeypatch.setattr(tables, "PAGE", page)
    tables.main()
    assert page.read_text(encoding="utf-8") == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
