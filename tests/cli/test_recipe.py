"""Tests recipes: files of options for experiment= and debug=, built-in or a user's own."""

import shutil
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from programs import Run, compose, one_sentence

from rwkv import cli
from rwkv.config import TrainConfig
from rwkv.errors import UserError
from rwkv.training.run.directory import as_plain

pytestmark = pytest.mark.thorough
BOM = "\ufeff"


@pytest.mark.parametrize(("path", "content"), [
    ("./mine.yaml", "# @package _global_\noptim: {lr: 1e-4}\nseed: 5\n"),
    ("mine.yml", "# mine\n# @package _global_\noptim: {lr: 1e-4}\nseed: 5\n"),
    ("folder/a, b='c' [1].yaml", f"{BOM}# @package _global_\r\noptim:\r\n  lr: 1e-4\r\nseed: 5\r\n"),
    ("~/mine.yaml", "optim.lr: 1e-4\nseed: 5\nmodel:\ndata: {}\n"),
    ("../mine.yaml", "---\n{optim: {lr: 1e-4}, seed: 5}\n...\n"),
    ("./mine.json", '{"optim": {"lr": 1e-4}, "seed": 5}'),
])
def test_a_user_s_recipe_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, content: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = Path(path).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode())
    config = compose("train", f"experiment={path}")
    assert (config.optim.lr, config.seed) == (1e-4, 5)
    line = cli.split([f"experiment={path}", "optim.lr=1e-3"], TrainConfig)
    assert set(line.chosen_keys) == {"optim.lr", "seed"}
    assert cli.compose(line, TrainConfig, "train").optim.lr == 1e-3


@pytest.mark.parametrize(("content", "option", "value"), [
    ("model: rwkv7_tiny\n", "model.generation", "rwkv7"),
    ("kernel: conv1d\n", "kernel.name", "conv1d"),
    ("defaults: [override /optim: muon]\nmodel: small\n", "optim.name", "muon"),
    ("defaults: [_self_, override /optim: muon]\nmodel: small\n", "optim.name", "muon"),
    ("defaults:\n- optim: muon\n- _self_\noptim: {lr: 1e-4}\n", "optim.lr", 1e-4),
    ("defaults: [{/optim: muon}]\nhydra:\n", "optim.name", "muon"),
    ("seed: 3\noptim.min_lr: ${optim.lr}", "optim.min_lr", 3e-3),
    ("data.path: ~/books", "data.path", str(Path.home() / "books")),
])
def test_a_recipe_chooses_and_refers_as_hydra_does(tmp_path: Path, content: str, option: str, value: object) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    assert attrgetter(option)(compose("train", f"experiment={tmp_path / 'mine.yaml'}")) == value


@pytest.mark.parametrize(("option", "value"), [
    ("logger.run_name", "no"), ("logger.run_name", "1.10"), ("logger.run_name", "12:30:45"), ("out_dir", "2026_01_01"),
    ("data.path", "2026-01-01"), ("data.field", "007"), ("logger.arguments", ["a=b", "010", "off"]),
])
def test_a_name_in_a_recipe_is_the_text_as_written(tmp_path: Path, option: str, value: str | list[str]) -> None:
    written = value if isinstance(value, str) else f"[{', '.join(value)}]"
    (tmp_path / "mine.yaml").write_text(f"{option}: {written}\n")
    assert attrgetter(option)(compose("train", f"experiment={tmp_path / 'mine.yaml'}")) == value


def test_sources_in_a_recipe_are_read_as_written_and_their_numbers_are_numbers(tmp_path: Path) -> None:
    """YAML reads 1e-1 as a string, no as False, and 1.10 as 1.1."""
    (tmp_path / "mine.yaml").write_text("data: mix\ndata.sources:\n- {path: no, weight: 1e-1, separator: 1.10, field: null}\n"
                                        "- {path: 2026-01-01, weight: 7, val_fraction: 5e-2}\n")
    assert compose("train", f"experiment={tmp_path}/mine.yaml").data.sources == [
        {"path": "no", "weight": 0.1, "separator": "1.10", "field": None},
        {"path": "2026-01-01", "weight": 7.0, "val_fraction": 0.05}]


def test_the_file_with_the_wrong_value_is_named(run: Run, tmp_path: Path) -> None:
    """The second file sets the same option to a good value."""
    (tmp_path / "mine.yaml").write_text("trainer: {max_steps: 1e2}\n")
    one_sentence(run("train", f"experiment={tmp_path}/mine.yaml", "debug=fast"), "mine.yaml: trainer.max_steps", "got 1e2")


def test_recipes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("optim.lr: 1e-4")
    Path("b.yaml").write_text("hydra: {sweeper: {params: {seed: '1,2'}}}")
    swept = cli.jobs(cli.split(["experiment=./a.yaml,./b.yaml"], TrainConfig), TrainConfig, "train")
    assert [(job.swept, job.config.optim.lr) for job in swept] == [({"experiment": "./a.yaml"}, 1e-4),
                                                                   ({"experiment": "./b.yaml"}, 3e-3)]
    swept = cli.jobs(cli.split(["experiment=./b.yaml"], TrainConfig), TrainConfig, "train")
    assert [job.config.seed for job in swept] == [1, 2]


def test_a_run_s_configuration_is_a_recipe(tmp_path: Path) -> None:
    """Texts stay verbatim, and the new run takes over neither out_dir nor resume."""
    options = ["data=jsonl", "data.path=C:\\${x} \\\\${y", "optim=muon", "optim.betas=[0.5,0.6]", "model=rwkv7_tiny", "seed=3",
               "trainer.max_tokens=1e6", "kernel=torch_scan"]
    before = compose("train", *options, "out_dir=there", "resume=auto")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(before)))
    for path in (tmp_path / "config.yaml", tmp_path):
        after = compose("train", f"experiment={path}")
        assert (after.out_dir, after.resume) == (None, None)
        assert as_plain(after) == as_plain(before) | {"out_dir": None, "resume": None}


@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("content", "words"), [
    (b"", ["sets no option"]),
    (b"# @package _global_\n", ["sets no option"]),
    (b"optim:\n\tlr: 1e-4\n", ["line 2", "tab"]),
    (b"optim: {lr: 1e-4}\noptim: {eps: 1e-6}\n", ["line 2", "optim"]),
    (b"optim: {lr: 1e-4}\noptim.lr: 1e-3\n", ["optim.lr twice"]),
    (b"optim: {lr: 1e-4, warmup: 3}\n", ["optim.warmup", "did you mean"]),
    (b"learning_rate: 3\n", ["learning_rate"]),
    (b"optim: {lr: {max: 3}}\n", ["optim.lr.max"]),
    (b"optim: &all {lr: *all}\n", ["optim.lr"]),
    (b"optim: {lr: abc}\n", ["optim.lr must be a number; got abc"]),
    (b"optim: {betas: [0.9, x]}\n", ["optim.betas must be"]),
    (b"seed: null\n", ["seed cannot be null"]),
    (b"model: huge\n", ["'huge'; the choices are"]),
    (b"defaults: [override /model: huge]\n", ["'huge'; the choices are"]),
    (b"defaults: small\n", ['"defaults" must be a list']),
    (b"defaults: [small]\n", ['"defaults" must be a list of choices', "'small'"]),
    (b"defaults: [override /model: small, 5]\n", ['"defaults" must be a list of choices', "5"]),
    (b"defaults: [{1: 2}]\nseed: 1\n", ["1"]),
    (b"defaults: [[override /model: small]]\n", ['"defaults" must be a list of choices']),
    (b"defaults: [override /model: null]\n", ['"defaults" must be a list of choices']),
    (b"defaults: [override /model: [small, tiny]]\n", ['"defaults" must be a list of choices']),
    (b"defaults: [override /model: small]\nmodel: tiny\n", ["model twice"]),
    (b"defaults: [override /hydra/launcher: joblib]\n", ['"defaults" must be a list of choices']),
    (b"hydra: {run: {dir: x}}\nseed: 1\n", ["hydra.run.dir has no effect"]),
    (b"hydra: x\n", ["hydra has no effect"]),
    (b"hydra: {sweeper: {params: 3}}\n", ["hydra.sweeper.params has no effect"]),
    (b"hydra: {sweeper: {params: {model: {n_layer: '2,4'}}}}\n", ["hydra.sweeper.params.model", "full name"]),
    (b"hydra: {sweeper: {params: {seed: [0, 1]}}}\n", ["hydra.sweeper.params.seed", '"0,1"']),
    (b"hydra.run.dir: x\n", ["hydra.run.dir has no effect"]), (b"seed: 2020-13-45\n", ["cannot read"]),
    (b"defaults: [seed: 5]\n", ['seed in "defaults" is not a group']),
    (b"seed: ???\n", ["seed has no value"]),
    (b"logger: {run_name: '???'}\n", ["logger.run_name has no value"]),
    (b"experiment: shakespeare_char\n", ["experiment="]),
    (b"data.path: ${x\n", ["'${x'"]),
    (b"- seed\n", ["must be a mapping"]),
    (b"seed\n", ["must be a mapping"]),
    (b"optim: {lr: 1e-4\n", ["line 2"]),
    (b"seed: 1\n---\nseed: 2\n", ["line 2"]),
    (b"seed: 1\0", ["#x0000"]),
    ("seed: 1".encode("utf-16"), ["UTF-16"]),
    (b"x: !!python/object:os.system {}\n", ["line 1"]),
])
def test_a_wrong_recipe_is_reported_in_one_sentence(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes,
                                                    words: list[str], ours: bool) -> None:
    """The recipe is a user's own file or, if `ours` is True, a built-in experiment."""
    choice = "mine" if ours else "./mine.yaml"
    if ours:
        shutil.copytree(cli.CONFIGS, tmp_path / "configs")
        monkeypatch.setattr(cli.configs, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "experiment" / "mine.yaml" if ours else tmp_path / "mine.yaml").write_bytes(content)
    one_sentence(run("train", f"experiment={choice}"), "mine.yaml", *words)
    with pytest.raises(UserError):
        cli.jobs(cli.split([f"experiment={choice}", "seed=0,1"], TrainConfig), TrainConfig, "train")


@pytest.mark.parametrize(("choice", "words"), [
    ("./missing.yaml", ["missing.yaml"]), ("./", ["Is a directory"]), ("./mine.ckpt", ["not UTF-8"]),
    ("mine", ["shakespeare_char", "./mine.yaml"])])
def test_an_experiment_that_is_not_a_file_is_reported_in_one_sentence(run: Run, choice: str, words: list[str]) -> None:
    Path("mine.ckpt").write_bytes(b"\x80\x02PK")
    one_sentence(run("train", f"experiment={choice}"), *words)


def test_a_wrong_file_of_a_group_is_reported_in_one_sentence(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cli.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(cli.configs, "CONFIGS", tmp_path / "configs")
    for group, content, word in (("model", "n_layers: 3", "model.n_layers"), ("optim", "lr: 1\nlr: 2", "line 2"),
                                 ("debug", "seed:\n\t3", "tab")):
        (tmp_path / "configs" / group / "mine.yaml").write_text(content)
        one_sentence(run("train", f"{group}=mine"), f"{group}/mine.yaml", word)


def test_a_run_s_directory_that_looks_like_a_choice_is_suggested_as_a_path(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    one_sentence(run("train", "experiment=mine"), "such as ./mine\n")
