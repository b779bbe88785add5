"""Tests the plan of a run on GPUs that this machine lacks: measured, computed and assumed numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Run, compose
from training_runs import TEXT

from rwkv import config as options
from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig
from rwkv.errors import UserError
from rwkv.model.base import n_parameters
from rwkv.training.device import is_planned_elsewhere
from rwkv.training.memory.estimate import estimate, one_checkpoint_bytes
from rwkv.training.plan.other_gpus import (
    GIB,
    GPUS,
    MEASURED,
    MeasuredStep,
    exchanged_bytes,
    nearest_measurement,
    plan_on,
    with_whole_rows,
)
from rwkv.training.run.options import check_new_run

ROOT = Path(__file__).parents[3]
ROWS = json.loads((ROOT / "benchmarks/results/training-h200.json").read_text())["rows"]
H200 = GPUS["h200"]


def config_of(row: MeasuredStep, B: int, **trainer: Any) -> TrainConfig:
    return TrainConfig(model=ModelConfig(row.generation, n_layer=row.n_layer, n_embd=row.n_embd, ctx_len=row.T),
                       data=DataConfig(batch_size=B), trainer=TrainerConfig(precision=row.precision, **trainer))


def test_the_measured_rows_equal_those_of_the_results() -> None:
    stored = {MeasuredStep(row["generation"], row["precision"], row["n_layer"], row["n_embd"], row["vocab_size"],
                           row["batch_size"], row["ctx_len"], row["ms"], row["host_ms"])
              for row in ROWS if row["kernel"] == "auto"}
    assert set(MEASURED) <= stored
    assert tuple(GPUS) == options.GPUS


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_on_the_gpu_that_was_measured_the_plan_has_the_measured_speed(row: MeasuredStep) -> None:
    result = plan_on(config_of(row, row.B), row.vocab_size, H200)
    assert result.measured == row
    assert result.tokens_per_second == pytest.approx((row.tokens_per_second,) * 2, rel=1e-6)


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_the_formulas_of_memory_are_close_to_measurements_on_a_gpu(row: MeasuredStep) -> None:
    """The measured loop freed the gradients before the next forward pass, whereas a run frees its gradients after that pass."""
    stored = next(each for each in ROWS if each["kernel"] == "auto"
                  and (each["generation"], each["precision"], each["n_layer"]) == (row.generation, row.precision, row.n_layer))
    need = estimate(config_of(row, row.B), row.vocab_size, 1, round(H200.gib * GIB))
    measured = stored["peak_mib"] * 2 ** 20
    assert need.total - need.gradients <= 1.15 * measured
    assert need.total >= 0.95 * measured


def test_the_bytes_that_devices_send() -> None:
    base = config_of(MEASURED[0], 8)
    P = n_parameters(base.model, 65536)
    ddp, fsdp = (replace(base, trainer=TrainerConfig(strategy=strategy, devices=2, precision="bf16-mixed", accumulate=3))
                 for strategy in ("ddp", "fsdp"))
    assert exchanged_bytes(ddp, 65536, 2) == 4 * P                               # the same for any number of batches per step
    outside = 2 * 65536 * 768
    assert exchanged_bytes(fsdp, 65536, 2) == (3 * (2 * 2 * (P - outside) + 4 * outside) + 4 * P) / 2
    assert exchanged_bytes(ddp, 65536, 1) == 0
    assert exchanged_bytes(ddp, 65536, 256) == pytest.approx(8 * P, rel=0.01)
    tuned = replace(ddp, tune=replace(ddp.tune, method="lora"))
    assert exchanged_bytes(tuned, 65536, 2) < 0.1 * 4 * P


def test_a_slower_link_and_a_slower_gpu_are_slower() -> None:
    config = config_of(MEASURED[1], 64, strategy="ddp", devices=8, num_nodes=2)
    usual = plan_on(config, 65536, H200)
    assert usual.link_gbps == H200.between
    assert plan_on(replace(config, trainer=replace(config.trainer, num_nodes=1)), 65536, H200).link_gbps == H200.inside
    slow = plan_on(replace(config, trainer=replace(config.trainer, link_gbps=4.0)), 65536, H200)
    assert slow.exchange_s == pytest.approx(100 * usual.exchange_s)
    assert slow.tokens_per_second < usual.tokens_per_second
    low, high = usual.tokens_per_second
    assert low < high <= 16 * MEASURED[1].tokens_per_second * 1.001
    assert plan_on(config, 65536, GPUS["rtx3060"]).compute_s > 30 * usual.compute_s


def test_small_passes_wait_for_the_host() -> None:
    config = config_of(MEASURED[1], 1)
    few = plan_on(replace(config, model=replace(config.model, ctx_len=64)), 65536, H200)
    assert few.compute_s == pytest.approx(MEASURED[1].host_ms / 1000)


@pytest.mark.parametrize(("model", "n_embd"), [("rwkv7_0.1b", 768), ("rwkv7_0.4b", 768), ("rwkv7_1.5b", 2048),
                                               ("rwkv7_13.3b", 2048), ("7b", 768)])
def test_the_nearest_width_is_used(model: str, n_embd: int) -> None:
    config = compose("train", f"model={model}", "trainer.precision=bf16-mixed")
    assert (nearest_measurement(config).n_embd, nearest_measurement(config).generation) == (n_embd, config.model.generation)


@pytest.mark.parametrize(("arguments", "elsewhere"), [
    (("plan=true",), False), (("plan=h100",), True), (("trainer=fsdp", "trainer.num_nodes=4", "trainer.devices=8"), False),
    (("trainer=fsdp", "trainer.num_nodes=4", "trainer.devices=8", "plan=true"), True),
    (("trainer=ddp", "trainer.num_nodes=4", "trainer.devices=8", "plan=timed"), True),
    (("trainer=ddp", "trainer.devices=100000", "plan=true"), True),
    (("trainer=ddp", "trainer.devices=1", "plan=true"), False),
    (("trainer=ddp", "trainer.devices=100000", "trainer.accelerator=cpu", "plan=true"), False)])
def test_which_plans_are_for_other_machines(arguments: tuple[str, ...], elsewhere: bool) -> None:
    assert is_planned_elsewhere(compose("train", *arguments)) == elsewhere


def test_the_table_in_the_documentation_equals_that_of_the_plan() -> None:
    rows = {cells[0]: cells[1:] for line in (ROOT / "docs/scale.md").read_text(encoding="utf-8").splitlines()
            if line.startswith("| ") for cells in [[cell.strip() for cell in line.strip("|").split("|")]]}
    for column, (model, strategy, nodes) in enumerate((("1.5b", "ddp", 1), ("7.2b", "fsdp", 4), ("13.3b", "fsdp", 8))):
        config = compose("train", f"model=rwkv7_{model}", f"trainer={strategy}", "trainer.devices=8", "model.ctx_len=10240",
                         f"trainer.num_nodes={nodes}", f"data.batch_size={8 * nodes}", "trainer.precision=bf16-mixed",
                         "trainer.activation_checkpointing=true", "plan=h100")
        result = plan_on(config, 65536, GPUS["h100"])
        fixed = estimate(config, 65536, result.devices, round(GPUS["h100"].gib * GIB)).fixed
        size = one_checkpoint_bytes(config, 65536) / 1e9
        low, high = result.tokens_per_second
        assert rows[""][column] == model
        for row, expected in {
                "GPUs, `trainer=`": f"{result.devices}, {strategy}", "memory per GPU, GB": f"{result.memory / 1e9:.1f}",
                "of these for weights, gradients and moments, GB": f"{fixed / 1e9:.1f}",
                "sent per GPU and step, GB": f"{result.exchanged / 1e9:.1f}",
                "seconds per step, exchange / computation": f"{result.exchange_s:.2g} / {result.compute_s:.2g}",
                "thousand tokens/s, all GPUs": f"{low / 1000:.0f} to {high / 1000:.0f}",
                "size of a checkpoint, GB; seconds to write it": f"{size:.0f}; {size / nodes:.0f}"}.items():
            assert rows[row][column] == expected, row


def test_the_option_link_requires_a_plan() -> None:
    with pytest.raises(UserError) as error:
        check_new_run(compose("train", "trainer.link_gbps=100"), ["trainer.link_gbps"])
    assert "plan=true" in str(error.value)
    check_new_run(compose("train", "trainer.link_gbps=100", "plan=h100"), ["trainer.link_gbps"])


def test_rows_that_cannot_be_divided_are_planned_for_the_next_number_that_can() -> None:
    config = config_of(MEASURED[0], 10, strategy="ddp", devices=8, num_nodes=2)
    whole, warning = with_whole_rows(config)
    assert whole.data.batch_size == 16
    assert warning is not None
    assert "data.batch_size=16" in warning
    assert with_whole_rows(whole) == (whole, None)


def test_a_cpu_is_not_a_gpu() -> None:
    with pytest.raises(UserError):
        compose("train", "trainer=cpu", "plan=h100")


# The program

PLANNED = ("data=text", "data.path=text.txt", "data.tokenizer=byte", "data.cache_dir=cache", "logger=csv")


def plan_of(run: Run, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Returns the exit status, the lines by their subject, and the last line."""
    Path("text.txt").write_text(3 * TEXT)
    status, output, error = run("train", *PLANNED, *arguments)
    assert output == ""
    assert {path.name for path in Path().iterdir()} <= {"cache", "text.txt"}, "nothing is trained"
    lines, subject = dict[str, str](), ""
    for line in error.splitlines():
        subject = line.split(" ")[0] if line[:1].strip() else subject
        lines[subject] = f"{lines.get(subject, '')} {line.removeprefix(subject).strip()}"
    return status, lines, error.splitlines()[-1]


@pytest.mark.programs
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_the_plan_of_many_machines_comes_from_a_machine_without_gpus(strategy: str, run: Run) -> None:
    status, lines, _ = plan_of(run, "plan=true", f"trainer={strategy}", "trainer.devices=256", "trainer.num_nodes=32",
                               "data.batch_size=16384", "trainer.link_gbps=100")
    assert status == 0
    assert "8,192" in lines["devices"]
    assert "100 Gbit/s (trainer.link_gbps)" in lines["exchange"]
    assert "a measured step on one H200" in lines["speed"]
    assert "assumed" in lines["memory"]
    assert "assumed" in lines["checkpoint"]
    assert torch.cuda.is_available() or "assumed" in lines["devices"]
    assert "WARNING" not in lines


@pytest.mark.programs
def test_a_refused_plan_names_options_that_make_it_fit(run: Run) -> None:
    shape = ("model=rwkv7_1.5b", "model.ctx_len=1024", "data.batch_size=1", "plan=rtx3060")
    status, lines, last = plan_of(run, *shape)
    assert status == 2
    assert last.startswith("error: training needs ")
    remedies = re.findall(r"with (trainer\.\S+(?: \S+=\S+)*)", lines["would"])
    assert [remedy for remedy in remedies if "adamw8bit" in remedy]
    assert remedies[0] in last
    status, lines, _ = plan_of(run, *shape, *remedies[0].split())
    assert status == 0
    assert "would" not in lines


@pytest.mark.programs
def test_the_number_of_gpus_must_be_known(run: Run) -> None:
    status, _, last = plan_of(run, "plan=h100", "trainer=ddp")
    assert (status, "trainer.devices=8" in last) == (2, True) or torch.cuda.is_available()


