"""The plan of a run: parameters, memory and disk from formulas, what the machine has, and what is refused before it begins."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from models import OPERATORS
from programs import Run, one_sentence
from training_runs import TEXT

from kernels.bench.profiler import extra_bytes
from kernels.machine import threads
from kernels.machine.memory import resident_memory
from kernels.select import select
from rwkv import cli
from rwkv.config import LENGTHS, DataConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig
from rwkv.data.segments import Segments
from rwkv.errors import UserError
from rwkv.pretrained import RWKV
from rwkv.training import memory, plan, setup
from rwkv.training.callbacks.metrics import peak_memory_mib
from rwkv.training.length import with_default_length, with_max_steps
from rwkv.training.memory import free_disk, free_memory
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

CPU = torch.device("cpu")
VOCABULARIES = {"rwkv4": 50277, "rwkv7": 65536}          # of released files; tiny and small have 2,048 tokens
PRESETS = {"tiny": 2_712_576, "small": 13_101_312, "169m": 169_342_464, "430m": 430_397_440, "1b5": 1_515_106_304,
           "3b": 2_984_627_200, "7b": 7_392_649_216, "rwkv7_tiny": 2_817_024, "rwkv7_small": 13_414_656,
           "rwkv7_0.1b": 191_084_544, "rwkv7_0.4b": 450_834_432, "rwkv7_1.5b": 1_527_668_736, "rwkv7_2.9b": 2_948_065_280,
           "rwkv7_7.2b": 7_199_932_416, "rwkv7_13.3b": 13_238_317_056}
GB, MIB = 10 ** 9, 2 ** 20
KERNELS = {"rwkv4": "torch_scan", "rwkv7": "torch_chunk"}


def parameters_on_meta(config: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RWKV(config, vocab_size, select("wkv4", "reference")).parameters())


# Parameters


def test_every_preset_is_known() -> None:
    assert {path.stem for path in (cli.CONFIGS / "model").glob("*.yaml")} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    text = (cli.CONFIGS / "model" / f"{name}.yaml").read_text()
    config = ModelConfig(**yaml.safe_load(text))
    V = 2048 if "tiny" in name or "small" in name else VOCABULARIES[config.generation]
    assert memory.n_parameters(config, V) == PRESETS[name]
    assert f"{PRESETS[name]:,} " in text, "the file says so itself"


WIDTHS = st.integers(1, 90)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), WIDTHS, st.none() | WIDTHS, st.none() | WIDTHS, WIDTHS)
def test_the_formula_counts_any_model(L: int, C: int, A: int | None, F: int | None, V: int) -> None:
    config = ModelConfig(n_layer=L, n_embd=C, n_att=A, n_ffn=F)
    assert memory.n_parameters(config, V) == parameters_on_meta(config, V)


# Memory


def configured(L: int, C: int, B: int, T: int, generation: str = "rwkv4", **trainer: Any) -> TrainConfig:
    return TrainConfig(model=ModelConfig(generation=generation, n_layer=L, n_embd=C, ctx_len=T), data=DataConfig(batch_size=B),
                       trainer=TrainerConfig(**trainer))


def measured_peak(config: TrainConfig, V: int, kernel: str) -> int:
    """The peak of building and two steps, in Lightning's order: gradients live until the next backward pass."""
    batch, half = batch_of(config, V), config.trainer.precision == "bf16-mixed"

    def train() -> tuple[()]:
        model = prepare_blocks(RWKV(config.model, V, select(OPERATORS[config.model.generation], kernel)), config.trainer)
        task = LanguageModel(model, config.optim, 10, 1.0)
        optimizer = task.configure_optimizers()["optimizer"]
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = task.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return ()

    return extra_bytes(train, "cpu")


def batch_of(config: TrainConfig, V: int) -> tuple[torch.Tensor, torch.Tensor] | Segments:
    B, T, K = config.data.batch_size, config.model.ctx_len, config.trainer.tbptt
    x = torch.randint(V, (B, max(1, K), T))
    return Segments(x, x, torch.arange(K).expand(B, K) == 0, 0, 1.0, x.numel()) if K else (x[:, 0], x[:, 0])


@pytest.mark.thorough
@pytest.mark.parametrize(("generation", "sizes", "V", "options"), [
    ("rwkv4", (2, 192, 2, 64), 8192, {}),                                  # weights, and the loss
    ("rwkv4", (2, 64, 8, 128), 256, {"precision": "bf16-mixed"}),
    ("rwkv4", (2, 64, 2, 64), 256, {"tbptt": 4}),
    ("rwkv7", (2, 64, 8, 128), 256, {}),
    ("rwkv7", (4, 64, 4, 128), 256, {"activation_checkpointing": True}),
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (
        ("rwkv4", (2, 64, 8, 128), 256, {}), ("rwkv4", (4, 64, 4, 128), 256, {"activation_checkpointing": True}),
        ("rwkv7", (2, 64, 8, 128), 256, {"precision": "bf16-mixed"}), ("rwkv7", (2, 64, 2, 64), 256, {"tbptt": 4})))], ids=str)
def test_the_estimate_is_near_the_measured_peak(generation: str, sizes: tuple[int, ...], V: int,
                                                options: dict[str, Any]) -> None:
    config = configured(*sizes, generation=generation, **options)
    assert memory.estimate(config, V).total == pytest.approx(measured_peak(config, V, KERNELS[generation]), rel=0.25)


def test_processes_share_a_batch_and_fsdp_the_weights() -> None:
    config = configured(2, 64, 8, 128)
    alone = memory.estimate(config, 256)
    ddp, fsdp = (memory.estimate(replace(config, trainer=TrainerConfig(strategy=strategy)), 256, processes=4)
                 for strategy in ("ddp", "fsdp"))
    assert (ddp.fixed, 4 * fsdp.fixed) == (alone.fixed, alone.fixed)
    assert 4 * ddp.activations == pytest.approx(alone.activations, rel=0.1)
    several = TrainerConfig(strategy="fsdp", accumulate=2)       # the gradients of the first batch are not divided
    assert memory.estimate(replace(config, trainer=several), 256, processes=4).gradients == alone.gradients


# Host memory and disks


def written(root: Path, **files: str) -> Path:
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
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert free_memory(CPU, written(tmp_path, **MEMINFO, **files)) == free


def test_what_there_is_here_can_be_told(tmp_path: Path) -> None:
    found = free_memory(CPU)
    assert found is None or found > 10 * MIB
    assert free_disk(tmp_path / "not" / "there") > 0
    installed = free_memory(CPU, tmp_path)               # where there is no /proc
    assert found is None or installed is None or installed >= found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_the_memory_of_this_process_can_be_told(tmp_path: Path) -> None:
    held = torch.ones(64 * MIB // 4)
    assert held.nbytes + 100 * MIB < resident_memory() <= peak_memory_mib(CPU) * MIB
    assert resident_memory(tmp_path) == 0, "where there is no /proc"


# The capacity check


def test_a_model_that_cannot_fit_is_refused_before_anything_is_done(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(8 * GB, 10 * GB, monkeypatch)
    one_sentence(run("train", "model=7b", "trainer=cpu"),
                 "GB of memory, 10.0 GB of it already in use", "8.0 GB free", "model=")
    assert not list(Path().iterdir())


def fits(config: TrainConfig, free: int, V: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The error message if the configuration does not fit into `free` bytes, else None."""
    with_memory(free, GB // 10, monkeypatch)
    try:
        setup.require_capacity(config, Path("run"), CPU, V)
    except UserError as error:
        return str(error)
    return None


def with_memory(free: int, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("free_memory", lambda device: free), ("resident_memory", lambda: used)):
        monkeypatch.setattr(setup, name, found)


@pytest.mark.parametrize(("free", "remedy"), [
    (7, "with trainer.activation_checkpointing=true it would be 3.4 GB"),
    (2, "with trainer.activation_checkpointing=true data.batch_size=4 trainer.accumulate=8 it would be 1.9 GB"),
    (1, "with trainer.activation_checkpointing=true optim=adamw8bit trainer.optim_in_backward=true optim.grad_clip=0 "
        "data.batch_size=1 it would be 917 MB"),
    (0.5, "take a smaller model="),
])
def test_the_remedy_is_the_least_that_helps(free: float, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(12, 768, 32, 512)
    said = fits(config, int(free * GB), 2048, monkeypatch)
    assert said is not None
    assert said.startswith("training needs at least 1")
    assert said.endswith(remedy)
    options = dict(option.split("=") for option in remedy.split() if "=" in option)
    if "model" not in options and "optim" not in options:
        B, accumulate = int(options.get("data.batch_size", 32)), int(options.get("trainer.accumulate", 1))
        changed = configured(12, 768, B, 512, activation_checkpointing=True, accumulate=accumulate)
        assert fits(changed, int(free * GB), 2048, monkeypatch) is None
        assert changed.tokens_per_step == config.tokens_per_step


def test_where_no_option_suffices_the_advice_is_what_to_lessen(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, busy = configured(1, 64, 1, 10**7), configured(1, 64, 1, 16)
    busy.data.num_workers = 1000
    assert str(fits(wide, GB, 2048, monkeypatch)).endswith("take a smaller data.batch_size or model.ctx_len")
    assert str(fits(busy, GB, 2048, monkeypatch)).endswith("take fewer data.num_workers")


def test_a_run_is_refused_only_if_three_quarters_of_the_estimate_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, gradients and optimiser count fully."""
    config = configured(2, 64, 8, 128)
    need = memory.estimate(config, 256)
    least = need.fixed + round(0.75 * (need.total - need.fixed))
    assert need.least == least
    assert fits(config, least, 256, monkeypatch) is None
    assert fits(config, least - 1, 256, monkeypatch) is not None


def test_checkpoints_that_the_disk_cannot_hold_are_refused(tmp_path: Path) -> None:
    """Checkpoints that the run has already are replaced, so that their space is free."""
    need = 2 * free_disk(tmp_path)
    size = 12 * memory.n_parameters(ModelConfig(n_layer=2, n_embd=64), 256)
    config = configured(2, 64, 8, 128, keep_last=need // size)
    with pytest.raises(UserError):
        setup.require_capacity(config, tmp_path, CPU, 256)
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "last.ckpt").open("wb") as file:
        file.truncate(need)              # it takes no room
    setup.require_capacity(config, tmp_path, CPU, 256)


# Tokens and steps


@given(st.floats(1, 1e12), st.integers(1, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 4))
def test_max_tokens_is_the_fewest_steps_that_read_them(tokens: float, B: int, T: int, accumulate: int, tbptt: int) -> None:
    config = configured(1, 8, B, T, max_tokens=tokens, accumulate=accumulate, tbptt=tbptt)
    steps = with_max_steps(config, ["trainer.max_tokens"]).trainer.max_steps
    assert config.tokens_per_step == B * T * accumulate * max(1, tbptt)
    assert (steps - 1) * config.tokens_per_step < tokens <= steps * config.tokens_per_step


def test_the_length_that_is_given_replaces_the_others() -> None:
    config = configured(1, 8, 4, 10, max_tokens=1000.0, max_steps=7, epochs=2.0)
    found = [with_max_steps(config, [key]).trainer for key in LENGTHS]
    assert [(each.max_steps, each.max_tokens, each.epochs) for each in found] == [(7, None, None), (25, 1000.0, None),
                                                                                  (7, None, 2.0)]


def test_conversations_are_read_twice_where_nothing_gives_a_length() -> None:
    chat, text = (TrainConfig(data=DataConfig(name=name)) for name in ("chat", "text"))
    assert with_default_length(chat, ["data"]).trainer.epochs == 2
    assert with_default_length(text, ["data"]).trainer.epochs is None
    for key in LENGTHS:                  # by the user, an experiment or debug=fast
        assert with_default_length(chat, [key]).trainer.epochs is None


# The plan

PLANNED = ("debug=fast", "data=text", "data.val_fraction=0.1", "data.cache_dir=cache", "trainer=cpu", "kernel=torch_scan",
           "logger=csv", "plan=true")


@pytest.mark.programs
def test_plan_says_what_will_happen_and_does_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is the whole process's: the program and its libraries need more than a small model does."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    Path("text.txt").write_text(TEXT)
    status, output, error = run("train", *PLANNED, "data.path=text.txt", "trainer.max_tokens=1e3")
    assert (status, output) == (0, ""), error
    for said in ("140,928 parameters, vocabulary 256", "torch_scan on cpu, precision 32-true", "GOMP_SPINCOUNT=77",
                 "weights 0.6 MB, gradients 0.6 MB, optimiser 1.1 MB", "6.8 MB for 4 checkpoints",
                 "8 steps of 128 tokens: 1,024 tokens, about "):
        assert said in error
    assert "data.val_fraction" not in error
    assert {path.name for path in Path().iterdir()} == {"cache", "text.txt"}
    size, unit = re.findall(r"^memory +about ([\d,.]+) ([MG]B) for each process", error, re.MULTILINE)[0]
    promised = float(size.replace(",", "")) * {"MB": 10 ** 6, "GB": GB}[unit]
    assert sys.platform != "linux" or promised == pytest.approx(resident_memory(), rel=0.2)


@pytest.mark.programs
def test_validation_that_holds_most_of_the_text_is_said(run: Run) -> None:
    """Here the first document, which is always for validation, is much longer than the others."""
    lines = [json.dumps({"text": text}) + "\n" for text in (TEXT * 99, *[TEXT[:999]] * 30)]
    Path("long.jsonl").write_text("".join(lines))
    status, _, error = run("train", *PLANNED, "data=jsonl", "data.path=long.jsonl")
    assert status == 0, error
    assert "data.val_fraction" in error


@pytest.mark.programs
def test_the_plan_of_a_model_that_cannot_fit_comes_before_the_refusal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(8 * GB, GB, monkeypatch)
    Path("text.txt").write_text(TEXT)
    status, output, error = run("train", *PLANNED, "data.path=text.txt", "model.n_embd=8192", "model.n_layer=24")
    assert (status, output) == (2, "")
    *table, last = error.splitlines()
    assert last.startswith("error: training needs at least")
    for subject in ("data", "model", "memory", "disk", "training"):
        assert [line for line in table if line.startswith(f"{subject} ")], subject
    assert {path.name for path in Path().iterdir()} == {"cache", "text.txt"}


@pytest.mark.parametrize(("width", "options", "timed"), [
    (16, {}, True), (4096, {}, False), (4096, {"plan": "false"}, False), (4096, {"plan": "timed"}, True),
    (16, {"compiled": True}, False), (16, {"compiled": True, "plan": "timed"}, True), (16, {"strategy": "fsdp"}, False)])
def test_steps_are_timed_where_they_are_quick_or_asked_for(width: int, options: dict[str, Any], timed: bool) -> None:
    config = configured(24, width, 8, 1024, compile=options.get("compiled", False), strategy=options.get("strategy", "single"))
    assert plan.is_timed(replace(config, plan=options.get("plan", "true")), 256, CPU) == timed


@pytest.mark.programs
def test_the_plan_tells_of_copies_marks_and_another_split(run: Run) -> None:
    """Ten tales three times, in one text with a mark between them, and as JSON lines."""
    tales = [f"Tale {number} is of {number * number % 97} hens who sat on walls.\n" for number in range(10)]
    Path("text.txt").write_text("<|endoftext|>\n".join(3 * tales))
    Path("tales.jsonl").write_text("".join(json.dumps({"text": tale}) + "\n" for tale in 3 * tales))
    unseparated = run("train", *PLANNED, "data.path=text.txt")[2]
    assert "<|endoftext|> occurs 2" in unseparated
    assert "data.separator='<|endoftext|>'" in unseparated
    assert "100 % of the validation text" in unseparated
    separated = run("train", *PLANNED, "data.path=text.txt", "data.separator=<|endoftext|>")[2]
    assert "20 documents repeat others" in separated
    assert "WARNING" not in separated
    assert run("train", *PLANNED[:-1], "data=jsonl", "data.path=tales.jsonl", "data.val_fraction=0.3", "trainer.max_steps=1",
               "out_dir=base")[0] == 0
    tuned = (*PLANNED, "data=jsonl", "init_from=base")
    Path("tales.jsonl").rename("moved.jsonl")
    Path("other.jsonl").write_text(json.dumps({"text": "Another tale of hens."}) + "\n" + json.dumps({"text": TEXT}) + "\n")
    Path("tales.jsonl").write_text(Path("moved.jsonl").read_text())
    assert "data.val_fraction=0.3" in run("train", *tuned, "data.path=tales.jsonl", "data.val_fraction=0.2")[2]
    assert "data.val_fraction=0.3" not in run("train", *tuned, "data.path=tales.jsonl", "data.val_fraction=0.3")[2]
    assert "data.val_fraction=0.3" not in run("train", *tuned, "data.path=other.jsonl", "data.val_fraction=0.2")[2]


@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc/loadavg")
def test_another_program_that_computes_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        assert any(threads.competing() for _ in range(100))
        other.kill()


def fresh(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python process without environment variables for how long threads wait, those of `environment` aside."""
    inherited = {name: value for name, value in os.environ.items() if name not in threads.SETTINGS}
    return subprocess.run([sys.executable, *arguments], env=inherited | environment, capture_output=True, text=True,
                          check=False, cwd=Path(__file__).parent.parent.parent)


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP on Linux alone")
@pytest.mark.parametrize("program", [("train.py", "kernel=fft"), pytest.param(
    ("-m", "rwkv.tools", "train", "kernel=fft"), marks=pytest.mark.soak)])
def test_the_programs_set_how_long_threads_wait_before_openmp_starts(program: tuple[str, ...]) -> None:
    """libgomp prints the value that it has read. Both command lines are refused after torch is imported."""
    assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in fresh(*program, OMP_DISPLAY_ENV="VERBOSE").stderr


@pytest.mark.programs
@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP on Linux alone")
@pytest.mark.parametrize("set_by_user", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_how_long_threads_wait_is_the_users_to_say(set_by_user: dict[str, str]) -> None:
    code = "from kernels.machine import threads; threads.wait_briefly(); print(threads.settings())"
    found = fresh("-c", code, **set_by_user).stdout
    expected = set_by_user or {"GOMP_SPINCOUNT": threads.SPINS}
    assert found == f"{[f'{name}={value}' for name, value in expected.items()]}\n"


@pytest.mark.parametrize(("init_from", "steps", "said"), [("base.pth", 3, True), ("base.pth", 10, True),
                                                          ("base.pth", 11, False), (None, 3, False)])
def test_tuning_that_ends_in_its_warm_up_is_said(init_from: str | None, steps: int, said: bool) -> None:
    config = configured(1, 8, 4, 10)
    config = replace(config, init_from=init_from, optim=replace(config.optim, warmup_steps=10),
                     trainer=replace(config.trainer, max_steps=steps))
    assert bool(list(plan._length_warnings(config, 1.0, False))) == said


@pytest.mark.parametrize(("seconds", "said"), [(0.001, "1 s"), (0.9, "54 s"), (1.5, "1.5 minutes"), (60, "60.0 minutes"),
                                               (150, "2.5 hours"), (2900, "2.0 days")])
def test_a_duration_has_a_unit_of_its_size(seconds: float, said: str) -> None:
    assert plan.in_words(60 * seconds) == f"about {said}"


def test_segments_that_are_computed_twice_take_their_time() -> None:
    """All but the last of four go forward again, which is a third of their time."""
    assert [plan.equivalent_steps(configured(1, 8, 4, 10, tbptt=K), 60, 0) for K in (0, 1, 4)] == [(60, 0), (60, 0), (75, 0)]


def test_the_estimate_leaves_nothing_behind() -> None:
    """It draws no random numbers and changes neither gradients nor weights, so that training is the same to the bit."""
    config = configured(2, 16, 2, 8)
    task = LanguageModel(RWKV(config.model, 50, select("wkv4", "torch_scan")).init_weights(), OptimConfig(), 10, 1.0)
    before = {name: weight.clone() for name, weight in task.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert plan._seconds_per_step(task, config, CPU, conversations=None) > 0
    assert (torch.get_rng_state().equal(drawn[0]), random.getstate(), np.random.get_state()[1].tolist()) == (True, *drawn[1:])
    assert all(weight.equal(before[name]) for name, weight in task.state_dict().items())
    assert all(parameter.grad is None for parameter in task.parameters())


# Validation of a part, and validation that takes long


@pytest.mark.parametrize(("val_tokens", "time_share", "said"), [
    (None, 0.3, []),
    (None, 0.5, ["30 times", "all 120 tokens", "50 %"]),
    (30, 0.2, ["30 times", "the first 30 of 120 tokens"]),
    (999, 0.5, ["30 times", "all 120 tokens", "50 %"]),
])
def test_validation_of_a_part_or_of_more_than_a_third_of_the_time_is_a_line(val_tokens: int | None, time_share: float,
                                                                            said: list[str]) -> None:
    lines = list(plan._validation(val_tokens, 120, 30, time_share))
    assert len(lines) == bool(said)
    assert not [part for part in said if part not in lines[0][1]]


@pytest.mark.programs
def test_a_debug_run_validates_a_part_and_says_so(run: Run) -> None:
    """However large the validation split: with 30,000 tokens in it, at most 512 are read at a time."""
    Path("text.txt").write_text(TEXT * 10)
    status, _, error = run("train", *PLANNED[:-1], "data.path=text.txt", "data.val_fraction=0.3", "trainer.max_steps=2",
                           "trainer.val_every=1", "out_dir=run")
    assert status == 0, error
    (planned,) = [line for line in error.splitlines() if line.startswith("validation ") and " times " in line]
    (told,) = [line for line in error.splitlines() if line.startswith("validation used")]
    assert "the first 512 of " in planned
    assert "the first 512 of " in told
    assert "512 tokens" in Path("run/report.html").read_text()
    status, _, refused = run("train", "resume=auto", "out_dir=run", "trainer.max_steps=3", "trainer.val_tokens=64")
    assert (status, "trainer.val_tokens" in refused) == (2, True), "the losses are compared for best.ckpt"
