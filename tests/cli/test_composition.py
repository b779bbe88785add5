"""Tests that every choice composes, that a single option wins over groups, and that a sweep has all combinations."""

import subprocess
import sys

import pytest
import yaml
from programs import PROGRAMS, Run, compose

from kernels.select import selectable
from rwkv import cli
from rwkv.config import EvaluateConfig, GenerateConfig, TrainConfig
from rwkv.training.run.directory import as_plain
from rwkv.training.run.length import with_max_steps

CHOICES = [(path.parent.name, path.stem) for path in sorted(cli.CONFIGS.glob("*/*.yaml"))]


@pytest.mark.thorough
@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_to_the_schema(group: str, name: str) -> None:
    program = "generate" if group == "sampling" else "train"
    single = ("kernel=auto", "seed=0") if name == "kernel_ablation" else ()      # the file sweeps these options
    config = compose(program, f"{group}={name}", *single)
    assert isinstance(config, PROGRAMS[program][1])
    if group in ("kernel", "data", "optim", "logger"):
        assert getattr(config, group).name == name


@pytest.mark.parametrize("name", ["auto", *(pytest.param(name, marks=() if name == "conv1d" else pytest.mark.soak)
                                           for name in selectable("wkv4"))])
def test_every_kernel_can_be_chosen(name: str) -> None:
    assert compose("generate", f"kernel={name}").kernel.name == name


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    """The YAML files repeat the defaults of the dataclasses, except the split and the sample prompt of data=stdlib."""
    defaults = as_plain(TrainConfig())
    defaults["data"] |= {"val_fraction": 0.05, "sample_prompt": "    def __init__(self"}
    assert as_plain(compose("train")) == defaults
    assert compose("generate") == GenerateConfig()
    assert compose("evaluate") == EvaluateConfig()


@pytest.mark.parametrize("mark", ["+", "++"])
def test_hydra_s_mark_of_an_addition_changes_nothing(mark: str) -> None:
    config = compose("train", f"{mark}optim.lr=1e-4", f"{mark}model=small", f"{mark}data.path=a,b")
    assert config == compose("train", "optim.lr=1e-4", "model=small", "data.path=a,b")


def test_the_last_rate_follows_the_first() -> None:
    assert compose("train").optim.last_lr == 1.5e-4
    assert compose("train", "optim.lr=1e-4").optim.last_lr == 5e-6
    assert compose("train", "optim.lr=1e-4", "optim.min_lr=1e-5").optim.last_lr == 1e-5


def test_a_single_option_wins_over_an_experiment_and_debug() -> None:
    config = compose("train", "debug=fast", "model.n_layer=5", "trainer.max_steps=7")
    assert (config.model.n_layer, config.model.n_embd, config.trainer.max_steps) == (5, 64, 7)


@pytest.mark.parametrize(("name", "steps"), [("fast", 5), ("overfit", 200)])
def test_a_debugs_steps_win_over_an_experiments_tokens(name: str, steps: int) -> None:
    config = compose("train", "experiment=rwkv7_minipile", f"debug={name}", "data.path=minipile")
    assert with_max_steps(config, []).trainer.max_steps == steps


@pytest.mark.programs
@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_a_range_is_a_sweep_without_asserts_too(flag: str) -> None:
    """-O removes assert statements, in which Hydra's parser consumes tokens; -OO removes the docstrings that --help prints."""
    code = ("from rwkv import cli; from rwkv.config import TrainConfig; from rwkv.programs.train import train\n"
            "line = cli.split(['seed=range(0,3)', 'optim.lr=choice(1e-3,2e-3)'], TrainConfig)\n"
            "print(len(cli.jobs(line, TrainConfig, 'train')))\n"
            "import sys; sys.argv[1:] = ['--help']; cli.run(train, TrainConfig, 'train', None)")
    process = subprocess.run([sys.executable, flag, "-c", code], cwd=cli.CONFIGS.parent, capture_output=True, text=True,
                             check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("6\nTrains an RWKV language model")


@pytest.mark.parametrize(("arguments", "chosen"), [
    (["optim=adamw", "logger.name=csv"], {"optim.name"}),
    (["kernel=conv1d"], {"kernel.name"}),
    (["trainer=auto", "seed=1", "debug=null"], {"trainer.accelerator"}),
    (["+debug=overfit"], {
        "model.n_layer", "model.n_embd", "model.ctx_len", "data.tokenizer", "data.batch_size", "optim.warmup_steps",
        "trainer.max_steps", "trainer.max_tokens", "trainer.val_every", "trainer.val_tokens", "trainer.checkpoint_every",
        "trainer.overfit_batches"}),
])
def test_a_chosen_group_sets_what_is_in_its_file(arguments: list[str], chosen: set[str]) -> None:
    assert set(cli.split(arguments, TrainConfig).chosen_keys) == chosen


def test_an_experiment_sets_what_its_groups_do_too() -> None:
    line = cli.split(["experiment=shakespeare_char"], TrainConfig)
    assert {"data.name", "optim.name", "optim.matrix_lr"} < set(line.chosen_keys)
    assert not [key for key in cli.split(["experiment=kernel_ablation"], TrainConfig).chosen_keys if key.startswith("hydra")]


@pytest.mark.parametrize("flag", ["--cfg", "-c"])
def test_the_whole_configuration_as_yaml(run: Run, flag: str) -> None:
    options = ("seed=7", "data.path=a b,c", "logger.project=内容", "optim.betas=[0.5,0.6]")
    status, output, error = run("train", flag, "job", *options)
    assert status == 0, error
    config = yaml.safe_load(output)
    assert (config["seed"], config["data"]["path"], config["logger"]["project"]) == (7, "a b,c", "内容")
    assert config["optim"]["betas"] == [0.5, 0.6]
