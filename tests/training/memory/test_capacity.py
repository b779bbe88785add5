"""Tests how free memory and disk space are found, and which runs are refused before any work."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import Run, one_sentence
from training_runs import TEXT, configured

from kernels.machine.memory import resident_memory
from rwkv.config import ModelConfig, TrainConfig
from rwkv.errors import UserError
from rwkv.training.callbacks.metrics import peak_memory_mib
from rwkv.training.memory import capacity
from rwkv.training.memory import estimate as memory
from rwkv.training.memory.capacity import free_disk, free_memory, needs_here, require_capacity
from rwkv.training.run.resume import is_fixed

CPU = torch.device("cpu")
GB, MIB = 10 ** 9, 2 ** 20


# Host memory and disks


def write_files(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc__meminfo": "MemTotal: 16000000 kB\nMemFree: 1000000 kB\nMemAvailable:    8000000 kB\n"}
HERE, UP = "sys__fs__cgroup__job__", "sys__fs__cgroup__"


@pytest.mark.parametrize(("files", "free"), [
    ({}, 8_000_000 * 1024),
    ({"proc__self__cgroup": "0::/job\n", f"{HERE}memory.max": "max\n", f"{HERE}memory.current": "5\n"}, 8_000_000 * 1024),
    ({"proc__self__cgroup": "0::/job\n", f"{HERE}memory.max": "1000\n", f"{HERE}memory.current": "700\n",
      f"{HERE}memory.stat": "anon 600\ninactive_file 100\n"}, 400),
    ({"proc__self__cgroup": "0::/job\n", f"{HERE}memory.max": "1000\n", f"{HERE}memory.current": "700\n",
      f"{UP}memory.max": "900\n", f"{UP}memory.current": "800\n"}, 100),
    ({"proc__self__cgroup": "0::/out/of/sight\n", f"{UP}memory.max": "900\n", f"{UP}memory.current": "850\n"}, 50),
    ({"proc__self__cgroup": "5:cpu,memory:/job\n0::/\n", f"{UP}memory__job__memory.limit_in_bytes": "1000\n",
      f"{UP}memory__job__memory.usage_in_bytes": "900\n", f"{UP}memory__job__memory.stat": "total_inactive_file 30\n"}, 130),
    ({"proc__self__cgroup": "0::/job\n", f"{HERE}memory.max": "10\n", f"{HERE}memory.current": "700\n"}, 0),
], ids=["machine", "no limit", "limit", "parent's limit", "container", "version 1", "above its limit"])
def test_the_limit_of_a_container_applies(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert free_memory(CPU, write_files(tmp_path, **MEMINFO, **files)) == free


def test_free_memory_and_disk_space_of_this_machine_are_known(tmp_path: Path) -> None:
    free = free_memory(CPU)
    assert free is None or free > 10 * MIB
    assert free_disk(tmp_path / "not" / "there") > 0
    installed = free_memory(CPU, tmp_path)               # this folder has no /proc
    assert free is None or installed is None or installed >= free


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_the_memory_of_this_process_is_known(tmp_path: Path) -> None:
    block = torch.ones(64 * MIB // 4)
    assert block.nbytes + 100 * MIB < resident_memory() <= peak_memory_mib(CPU) * MIB
    assert resident_memory(tmp_path) == 0, "without /proc the result must be 0"


# The capacity check


def test_a_model_that_cannot_fit_is_refused_before_anything_is_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(8 * GB, 10 * GB, monkeypatch)
    one_sentence(run("train", "model=7b", "trainer=cpu"),
                 "GB of memory, 10.0 GB of it already in use", "8.0 GB free", "model=")
    assert not list(Path().iterdir())


@pytest.mark.programs
def test_the_plan_of_a_model_that_cannot_fit_comes_before_the_refusal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(8 * GB, GB, monkeypatch)
    Path("text.txt").write_text(TEXT)
    status, output, error = run("train", "debug=fast", "data=text", "data.path=text.txt", "data.val_fraction=0.1",
                                "data.cache_dir=cache", "trainer=cpu", "logger=csv", "plan=true", "model.n_embd=8192",
                                "model.n_layer=24")
    assert (status, output) == (2, "")
    *table, last = error.splitlines()
    assert last.startswith("error: training needs at least")
    for subject in ("data", "model", "memory", "disk", "training"):
        assert [line for line in table if line.startswith(f"{subject} ")], subject
    assert {path.name for path in Path().iterdir()} == {"cache", "text.txt"}


def capacity_error(config: TrainConfig, free: int, V: int, monkeypatch: pytest.MonkeyPatch,
                   is_fixed: Callable[[str], bool] | None = None) -> str | None:
    """Returns the error message if the configuration does not fit into `free` bytes, else None."""
    with_memory(free, GB // 10, monkeypatch)
    try:
        require_capacity(needs_here(config, V, CPU), Path("run"), is_fixed)
    except UserError as error:
        return str(error)
    return None


def with_memory(free: int, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, replacement in (("free_memory", lambda device: free), ("resident_memory", lambda: used)):
        monkeypatch.setattr(capacity, name, replacement)


@pytest.mark.parametrize(("free", "remedy"), [
    (7, "training needs only 3.4 GB with trainer.activation_checkpointing=true"),
    (2, "training needs only 1.9 GB with trainer.activation_checkpointing=true data.batch_size=4 trainer.accumulate=8"),
    (1, "training needs only 917 MB with trainer.activation_checkpointing=true optim=adamw8bit trainer.optim_in_backward=true "
        "optim.grad_clip=0 data.batch_size=1"),
    (0.5, "use a smaller model="),
])
def test_the_remedy_is_the_least_that_helps(free: float, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(12, 768, 32, 512)
    message = capacity_error(config, int(free * GB), 2048, monkeypatch)
    assert message is not None
    assert message.startswith("training needs at least 1")
    assert message.endswith(remedy)
    options = dict(option.split("=") for option in remedy.split() if "=" in option)
    if "model" not in options and "optim" not in options:
        B, accumulate = int(options.get("data.batch_size", 32)), int(options.get("trainer.accumulate", 1))
        smaller = configured(12, 768, B, 512, activation_checkpointing=True, accumulate=accumulate)
        assert capacity_error(smaller, int(free * GB), 2048, monkeypatch) is None
        assert smaller.tokens_per_step == config.tokens_per_step


@pytest.mark.parametrize(("free", "remedy"), [
    (7, "with trainer.activation_checkpointing=true"), (2, "on a machine with more free memory")])
def test_a_resumed_run_is_advised_to_change_only_what_may_change(free: int, remedy: str,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    message = str(capacity_error(configured(12, 768, 32, 512), free * GB, 2048, monkeypatch, is_fixed))
    assert remedy in message
    assert not [key for key in ("data.batch_size", "trainer.accumulate", "optim=", "model") if key in message]


def test_if_no_option_suffices_the_advice_names_what_to_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, busy = configured(1, 64, 1, 10**7), configured(1, 64, 1, 16)
    busy.data.num_workers = 1000
    assert str(capacity_error(wide, GB, 2048, monkeypatch)).endswith("use a smaller data.batch_size= or model.ctx_len=")
    assert str(capacity_error(busy, GB, 2048, monkeypatch)).endswith("use a smaller data.num_workers=")


def test_a_run_is_refused_only_if_three_quarters_of_the_estimate_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and optimiser count fully."""
    config = configured(2, 64, 8, 128)
    need = memory.estimate(config, 256)
    least = need.fixed + round(0.75 * (need.total - need.fixed))
    assert need.least == least
    assert capacity_error(config, least, 256, monkeypatch) is None
    assert capacity_error(config, least - 1, 256, monkeypatch) is not None


def test_checkpoints_that_the_disk_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Checkpoints that the run has already are replaced, so that their space is free."""
    need = 2 * free_disk(tmp_path)
    size = 12 * memory.n_parameters(ModelConfig(n_layer=2, n_embd=64), 256)
    config = configured(2, 64, 8, 128, keep_last=need // size)
    with pytest.raises(UserError):
        require_capacity(needs_here(config, 256, CPU), tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "last.ckpt").open("wb") as file:
        file.truncate(need)              # a sparse file takes no room
    require_capacity(needs_here(config, 256, CPU), tmp_path)
