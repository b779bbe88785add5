"""Tests the options of a dataclass: true and false beside other choices, limits, and what an option requires."""

from collections.abc import Callable

import pytest

from rwkv.config import (
    ChatConfig,
    DataConfig,
    EvaluateConfig,
    GenerateConfig,
    LoggerConfig,
    OptimConfig,
    TrainConfig,
    TuneConfig,
    options,
    require_effect,
)
from rwkv.errors import UserError


@pytest.mark.parametrize(("config", "name", "expected"), [
    (DataConfig(think=True), "think", "true"), (DataConfig(think="False"), "think", "false"),      # type: ignore[arg-type]
    (ChatConfig(think="FAKE"), "think", "fake"), (TrainConfig(plan=True), "plan", "true"),          # type: ignore[arg-type]
    (TrainConfig(plan="H100"), "plan", "h100")])
def test_true_and_false_beside_other_choices_are_lower_case(config: object, name: str, expected: str) -> None:
    assert getattr(config, name) == expected


def test_only_options_that_allow_true_are_changed() -> None:
    with pytest.raises(UserError, match=r"data\.name must be one of"):
        TrainConfig(data=DataConfig(name="STDLIB"))


def test_every_requirement_names_an_option_and_values_that_it_allows() -> None:
    schema = options(TrainConfig)
    for key, item in schema.items():
        if item.metadata["needs"]:
            required, *values = item.metadata["needs"]
            allowed = schema[required].metadata["one_of"]
            assert allowed is None or {*values} <= {*allowed}, key


def test_an_option_without_its_requirement_is_refused_only_if_the_user_set_it() -> None:
    config = TrainConfig()
    require_effect(config, ["seed"])
    with pytest.raises(UserError, match=r"optim\.matrix_lr requires optim=muon or normuon; got optim=adamw"):
        require_effect(config, ["optim.matrix_lr"])
    with pytest.raises(UserError, match=r"data\.vocab_size requires data\.tokenizer=bpe; got data\.tokenizer=world"):
        require_effect(TrainConfig(data=DataConfig(tokenizer="world")), ["data.vocab_size"])
    with pytest.raises(UserError, match=r"logger\.arguments requires logger\._target_="):
        require_effect(config, ["logger.arguments"])
    require_effect(TrainConfig(logger=LoggerConfig(name="own", _target_="a.Logger")), ["logger.arguments"])


def test_an_error_names_the_option_with_its_group() -> None:
    with pytest.raises(UserError, match=r"^data\.batch_size must be at least 1; got 0$"):
        DataConfig(batch_size=0)
    with pytest.raises(UserError, match=r"^data\.shuffle_buffer must be at most 1"):
        DataConfig(shuffle_buffer=10**20)
    assert GenerateConfig(checkpoint="model.pth", seed=2**62).seed == 2**62      # a limit of its own


@pytest.mark.parametrize(("config", "key"), [
    *((TrainConfig, key) for key in ("out_dir", "resume", "init_from")), (TuneConfig, "tune.state"), (TuneConfig, "tune.guard"),
    *((DataConfig, f"data.{name}") for name in ("cache_dir", "template", "end_of_text")),
    *((EvaluateConfig, key) for key in ("checkpoint", "lora", "tokenizer")),
    *((GenerateConfig, key) for key in ("prompts", "out", "save_state", "state", "grammar", "json_schema", "regex"))])
def test_the_value_of_a_shell_variable_that_is_not_set_is_refused(config: Callable[..., object], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key} is empty"):
        config(**{key.rpartition(".")[2]: ""})


def test_an_epsilon_that_float32_rounds_to_zero_is_refused() -> None:
    """With epsilon 0, a weight whose gradient is 0 becomes 0 / 0 in the first step."""
    assert OptimConfig(eps=1e-18).eps == 1e-18
    for eps in (0.0, 1e-60):
        with pytest.raises(UserError, match=r"optim\.eps"):
            OptimConfig(eps=eps)
