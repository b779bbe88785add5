"""Tests that a new run takes its rates from the model's width, or with init_from= from tune=, unless the user sets others."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from files import byte_model

from rwkv import cli
from rwkv.config import ModelConfig, OptimConfig, TrainConfig, TuneConfig
from rwkv.errors import UserError
from rwkv.training.run.directory import as_plain
from rwkv.training.run.opening import open_run
from rwkv.training.run.rates import TUNING_DEFAULTS, WIDEST, with_default_rates


@pytest.fixture
def base(tmp_path: Path) -> str:
    byte_model(tmp_path / "base.safetensors")
    return str(tmp_path / "base.safetensors")


@pytest.mark.parametrize("method", TUNING_DEFAULTS)
def test_a_new_run_takes_the_rates_of_its_method(base: str, tmp_path: Path, method: str) -> None:
    config = TrainConfig(tune=TuneConfig(method=method), init_from=base, out_dir=str(tmp_path / "run"))
    run = open_run(config, ["tune", "init_from"], ["tune.method"])
    assert {name: getattr(run.config.optim, name) for name in TUNING_DEFAULTS[method]} == TUNING_DEFAULTS[method]
    (note,) = [note for note in run.notes if note.subject == "rate"]
    assert all(f"optim.{name}=" in note.text for name in TUNING_DEFAULTS[method])


@pytest.mark.parametrize(("width", "lr"), [(64, 3e-3), (384, 3e-3), (768, 1.5e-3), (4096, 2.8e-4)])
def test_a_wide_model_trained_from_scratch_has_a_lower_rate(tmp_path: Path, width: int, lr: float) -> None:
    run = open_run(TrainConfig(model=ModelConfig(n_embd=width), out_dir=str(tmp_path / "run")), ["model.n_embd"], [])
    assert run.config.optim.lr == lr
    assert [note.subject for note in run.notes] == ([] if lr == OptimConfig.lr else ["rate"])


def test_a_model_is_wide_from_385_channels_on() -> None:
    configs = [TrainConfig(model=ModelConfig(n_embd=width)) for width in (384, 385)]
    assert [with_default_rates(config, ())[1] for config in configs] == [(), ("lr",)]


@pytest.mark.parametrize(("optim", "chosen"), [(OptimConfig(lr=2e-3), "optim.lr"), (OptimConfig(name="normuon"), "optim.name")])
def test_a_wide_model_keeps_the_user_s_rates(optim: OptimConfig, chosen: str) -> None:
    config = TrainConfig(model=ModelConfig(n_embd=2 * WIDEST), optim=optim)
    assert with_default_rates(config, [chosen]) == (config, ())


@pytest.mark.parametrize("method", TUNING_DEFAULTS)
def test_the_user_s_options_stay_and_a_rate_has_its_own_last_rate(method: str) -> None:
    request = TrainConfig(tune=TuneConfig(method=method), init_from="FILE", optim=OptimConfig(lr=7e-3, warmup_steps=0))
    optim = with_default_rates(request, {"optim.lr", "optim.warmup_steps"})[0].optim
    assert (optim.lr, optim.warmup_steps, optim.min_lr) == (7e-3, 0, None)
    assert optim.schedule == TUNING_DEFAULTS[method]["schedule"]


@pytest.mark.parametrize(("method", "options", "refused"), [
    ("full", {}, True), ("lora", {}, True), ("state", {}, False), ("full", {"schedule": "cosine"}, False)])
def test_a_last_rate_that_the_default_schedule_would_ignore_is_refused(method: str, options: dict[str, str],
                                                                       refused: bool) -> None:
    request = TrainConfig(tune=TuneConfig(method=method), init_from="FILE", optim=OptimConfig(min_lr=1e-7, **options))
    with pytest.raises(UserError, match=r"optim\.schedule") if refused else nullcontext():
        with_default_rates(request, {"optim.min_lr", *(f"optim.{name}" for name in options)})
    with_default_rates(request, (), {"optim.min_lr"})    # a recipe for a new model may set this option


def test_the_options_of_an_experiment_and_of_a_debug_run_stay() -> None:
    line = cli.split(["experiment=shakespeare_char", "debug=overfit", "init_from=FILE"], TrainConfig)
    config = TrainConfig(init_from="FILE", optim=OptimConfig(lr=3e-3, min_lr=1e-6, schedule="linear", warmup_steps=0))
    assert with_default_rates(config, {*line.keys, *line.chosen_keys}) == (config, ())


@pytest.mark.parametrize("method", TUNING_DEFAULTS)
def test_a_run_of_an_earlier_version_keeps_its_rate_and_length(base: str, tmp_path: Path, method: str) -> None:
    """The old config.yaml has no epochs, and the rate for training from scratch. The same command continues the run."""
    before = as_plain(TrainConfig(tune=TuneConfig(method=method), init_from=base))
    before["data"]["name"] = "chat"
    del before["trainer"]["epochs"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(before), encoding="utf-8")
    request = TrainConfig(tune=TuneConfig(method=method), resume="auto", out_dir=str(tmp_path / "run"))
    request = replace(request, data=replace(request.data, name="chat"))
    config = open_run(request, ["tune", "data", "out_dir", "resume"], ["tune.method", "data.name"]).config
    assert config.optim == OptimConfig()
    assert (config.trainer.max_steps, config.trainer.epochs) == (before["trainer"]["max_steps"], None)
