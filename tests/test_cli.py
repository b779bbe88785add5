"""The command line: choices compose, free text is taken verbatim, --help is complete, a user's mistake is one sentence."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from models import small_model
from omegaconf import OmegaConf
from programs import PROGRAMS, Run, composed, one_sentence

from kernels import arguments as program_arguments
from kernels.registry import KernelUnavailable, UnknownKernel
from kernels.select import selectable
from rwkv import cli
from rwkv.cli.help import WIDTH
from rwkv.config import EvaluateConfig, GenerateConfig, TrainConfig, free_text, options
from rwkv.errors import UserError
from rwkv.model.operators import operator_for
from rwkv.tools import convert
from rwkv.training.run.directory import as_plain, require_unused
from rwkv.training.run.length import with_max_steps

CHOICES = [(path.parent.name, path.stem) for path in sorted(cli.CONFIGS.glob("*/*.yaml"))]


# Composition


@pytest.mark.thorough
@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_composes_to_the_schema(group: str, name: str) -> None:
    program = "generate" if group == "sampling" else "train"
    config = composed(program, f"{group}={name}")
    assert isinstance(config, PROGRAMS[program][1])
    if group in ("kernel", "data", "optim", "logger"):
        assert getattr(config, group).name == name


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["auto", *selectable("wkv4")])
def test_every_kernel_can_be_chosen(name: str) -> None:
    assert composed("generate", f"kernel={name}").kernel.name == name


def test_a_name_that_a_kernel_had_before_is_taken_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = composed("train", "kernel=taichi_v4", "model=rwkv7_tiny")
    wkv = operator_for(config.model, config.kernel.name, "cpu", torch.float32)
    assert wkv.name == "c_v0"
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "taichi_v4" in told
    assert "c_v0" in told


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    """A default is written down once, and what a YAML file repeats is the same; stdlib alone has its own split and sample."""
    defaults = as_plain(TrainConfig())
    defaults["data"] |= {"val_fraction": 0.05, "sample_prompt": "    def __init__(self"}
    assert as_plain(composed("train")) == defaults
    assert composed("generate") == GenerateConfig()
    assert composed("evaluate") == EvaluateConfig()


def test_the_last_rate_follows_the_first() -> None:
    assert composed("train").optim.last_lr == 1.5e-4
    assert composed("train", "optim.lr=1e-4").optim.last_lr == 5e-6
    assert composed("train", "optim.lr=1e-4", "optim.min_lr=1e-5").optim.last_lr == 1e-5


def test_a_single_option_wins_over_an_experiment_and_debug() -> None:
    config = composed("train", "debug=fast", "model.n_layer=5", "trainer.max_steps=7")
    assert (config.model.n_layer, config.model.n_embd, config.trainer.max_steps) == (5, 64, 7)


@pytest.mark.parametrize(("name", "steps"), [("fast", 5), ("overfit", 200)])
def test_a_debugs_steps_win_over_an_experiments_tokens(name: str, steps: int) -> None:
    config = composed("train", "experiment=rwkv7_minipile", f"debug={name}", "data.path=minipile")
    assert with_max_steps(config, []).trainer.max_steps == steps


# Recipes


BOM = "\ufeff"


@pytest.mark.parametrize(("path", "content"), [
    ("./mine.yaml", "# @package _global_\noptim: {lr: 1e-4}\nseed: 5\n"),
    ("mine.yml", "# mine\n# @package _global_\noptim: {lr: 1e-4}\nseed: 5\n"),
    ("folder/a, b='c' [1].yaml", f"{BOM}# @package _global_\r\noptim:\r\n  lr: 1e-4\r\nseed: 5\r\n"),
    ("~/mine.yaml", "optim.lr: 1e-4\nseed: 5\nmodel:\ndata: {}\n"),
    ("../mine.yaml", "---\n{optim: {lr: 1e-4}, seed: 5}\n...\n"),
    ("./mine.json", '{"optim": {"lr": 1e-4}, "seed": 5}'),
])
def test_a_recipe_of_one_s_own_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str,
                                                    content: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = Path(path).expanduser()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode())
    config = composed("train", f"experiment={path}")
    assert (config.optim.lr, config.seed) == (1e-4, 5)
    line = cli.split([f"experiment={path}", "optim.lr=1e-3"], TrainConfig)
    assert set(line.chosen) == {"optim.lr", "seed"}
    assert cli.compose(line, TrainConfig, "train").optim.lr == 1e-3


@pytest.mark.parametrize(("content", "option", "value"), [
    ("model: rwkv7_tiny\n", "model.generation", "rwkv7"),
    ("kernel: conv1d\n", "kernel.name", "conv1d"),
    ("defaults: [override /optim: muon]\nmodel: small\n", "optim.name", "muon"),
    ("seed: 3\noptim.min_lr: ${optim.lr}", "optim.min_lr", 3e-3),
    ("data.path: ~/books", "data.path", str(Path.home() / "books")),
])
def test_a_recipe_chooses_and_refers_as_hydra_does(tmp_path: Path, content: str, option: str, value: object) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    assert attrgetter(option)(composed("train", f"experiment={tmp_path / 'mine.yaml'}")) == value


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
    """Its texts were verbatim, and its directory is its own."""
    options = ["data=jsonl", "data.path=C:\\${x} \\\\${y", "optim=muon", "optim.betas=[0.5,0.6]", "model=rwkv7_tiny", "seed=3",
               "trainer.max_tokens=1e6", "kernel=torch_scan"]
    before = composed("train", *options, "out_dir=there", "resume=auto")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_plain(before)))
    for named in (tmp_path / "config.yaml", tmp_path):
        after = composed("train", f"experiment={named}")
        assert (after.out_dir, after.resume) == (None, None)
        assert as_plain(after) == as_plain(before) | {"out_dir": None, "resume": None}


@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("content", "words"), [
    (b"", ["sets no option"]),
    (b"# @package _global_\n", ["sets no option"]),
    (b"optim:\n\tlr: 1e-4\n", ["line 2", "tab"]),
    (b"optim: {lr: 1e-4}\noptim: {eps: 1e-6}\n", ["line 2", "optim"]),
    (b"optim: {lr: 1e-4}\noptim.lr: 1e-3\n", ["optim.lr twice"]),
    (b"optim: {lr: 1e-4, learning_rate: 3}\n", ["optim.learning_rate", "did you mean"]),
    (b"learning_rate: 3\n", ["learning_rate"]),
    (b"optim: {lr: {max: 3}}\n", ["optim.lr.max"]),
    (b"optim: &all {lr: *all}\n", ["optim.lr"]),
    (b"optim: {lr: abc}\n", ["optim.lr must be a number; got abc"]),
    (b"optim: {betas: [0.9, x]}\n", ["optim.betas must be"]),
    (b"seed: null\n", ["seed cannot be null"]),
    (b"model: huge\n", ["'huge'; there are"]),
    (b"defaults: [override /model: huge]\n", ["'huge'; there are"]),
    (b"defaults: small\n", ["defaults must be a list"]),
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
def test_a_wrong_recipe_is_one_sentence(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes,
                                        words: list[str], ours: bool) -> None:
    """One of the folder of experiments, too."""
    choice = "mine" if ours else "./mine.yaml"
    if ours:
        shutil.copytree(cli.CONFIGS, tmp_path / "configs")
        monkeypatch.setattr(cli, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "experiment" / "mine.yaml" if ours else tmp_path / "mine.yaml").write_bytes(content)
    one_sentence(run("train", f"experiment={choice}"), "mine.yaml", *words)
    with pytest.raises(UserError):
        cli.jobs(cli.split([f"experiment={choice}", "seed=0,1"], TrainConfig), TrainConfig, "train")


@pytest.mark.parametrize(("choice", "words"), [
    ("./missing.yaml", ["missing.yaml"]), ("./", ["Is a directory"]), ("./mine.ckpt", ["not UTF-8"]),
    ("mine", ["shakespeare_char", "./mine.yaml"])])
def test_an_experiment_that_is_no_file_is_one_sentence(run: Run, choice: str, words: list[str]) -> None:
    Path("mine.ckpt").write_bytes(b"\x80\x02PK")
    one_sentence(run("train", f"experiment={choice}"), *words)


def test_a_wrong_file_of_a_group_is_one_sentence(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cli.CONFIGS, tmp_path / "configs")
    monkeypatch.setattr(cli, "CONFIGS", tmp_path / "configs")
    for group, content, word in (("model", "n_layers: 3", "model.n_layers"), ("optim", "lr: 1\nlr: 2", "line 2"),
                                 ("debug", "seed:\n\t3", "tab")):
        (tmp_path / "configs" / group / "mine.yaml").write_text(content)
        one_sentence(run("train", f"{group}=mine"), f"{group}/mine.yaml", word)


# Free text

HARD = ("", "a,b", "a=b", "'", '"', "it's", "${seed}", "${x}", "$(ls) `ls`", "[1, 2", "{a: b}", "line\nline\n", " space ", "\\",
        "\\,", "@", "#", "--help", "+a=1", "~a", "1e3", "true", "你好 🙂", "\t", "a: b", "???", "%",
        "choice(a,b)", "prompt=", "null")


def as_one_example_each(test: Callable[..., None]) -> Callable[..., None]:
    for text in HARD:
        test = example(text)(test)
    return test


@as_one_example_each
@given(st.text())
def test_free_text_is_taken_as_it_is(text: str) -> None:
    line = cli.split([f"prompt={text}", "seed=3", f"stop={text}", "top_p=0.5", "-m"], GenerateConfig)
    assert (line.overrides, line.flags) == (["seed=3", "top_p=0.5"], ["-m"])
    assert line.keys == ["seed", "top_p", "prompt", "stop"]
    config = cli.build(OmegaConf.structured(GenerateConfig), line.verbatim)
    assert (config.prompt, config.stop) == (text, [text])


TEXTS = [(program, key) for program, (_, schema) in PROGRAMS.items() for key, item in options(schema).items()
         if free_text(item)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_text_without_choices_is_free(program: str) -> None:
    texts = {key for key, item in options(PROGRAMS[program][1]).items() if str in (item.type, *get_args(item.type))}
    grammar = {key for key, item in options(PROGRAMS[program][1]).items() if item.metadata["one_of"]}
    grammar |= {"kernel.name", "logger.name", "tune.modules", "sampling"}
    assert texts - grammar == {key for name, key in TEXTS if name == program}


@pytest.mark.parametrize("text", ["007", "🙂 'a\"b', c={d} $x", " a,b "])
def test_every_free_text_of_every_program_is_taken_as_it_is(text: str) -> None:
    for program, (_, schema) in PROGRAMS.items():
        keys = [key for name, key in TEXTS if name == program]
        line = cli.split([f"{key}={text}" for key in keys], schema)
        assert (line.overrides, list(line.verbatim)) == ([], keys)
    config = composed("train", f"data.field={text}", f"data.split={text}", f"+logger.project={text}", "data=hf")
    assert (config.data.field, config.data.split, config.logger.project) == (text,) * 3
    swept = cli.jobs(cli.split([f"data.field={text}", "seed=0,1"], TrainConfig), TrainConfig, "train")
    assert [job.config.data.field for job in swept] == [text, text]


@pytest.mark.programs
@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_a_range_is_a_sweep_without_asserts_too(flag: str) -> None:
    """Hydra's parser reads inside assert statements; --help is the docstring."""
    code = ("from rwkv import cli; from rwkv.config import TrainConfig; from rwkv.programs.train import train\n"
            "line = cli.split(['seed=range(0,3)', 'optim.lr=choice(1e-3,2e-3)'], TrainConfig)\n"
            "print(len(cli.jobs(line, TrainConfig, 'train')))\n"
            "import sys; sys.argv[1:] = ['--help']; cli.run(train, TrainConfig, 'train', None)")
    done = subprocess.run([sys.executable, flag, "-c", code], cwd=cli.CONFIGS.parent, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6\nTrains an RWKV language model")


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
    assert set(cli.split(arguments, TrainConfig).chosen) == chosen


def test_an_experiment_sets_what_its_groups_do_too() -> None:
    assert {"data.name", "optim.name", "optim.matrix_lr"} < set(cli.split(["experiment=shakespeare_char"], TrainConfig).chosen)
    assert not [key for key in cli.split(["experiment=kernel_ablation"], TrainConfig).chosen if key.startswith("hydra")]


def test_a_path_may_begin_at_the_home_folder() -> None:
    config = composed("train", "data.path=~/books", "data.cache_dir=a/~/b", "data.sample_prompt=~/books", "out_dir=~/runs")
    assert (config.data.path, config.out_dir) == (str(Path.home() / "books"), str(Path.home() / "runs"))
    assert (config.data.cache_dir, config.data.sample_prompt) == ("a/~/b", "~/books")


def test_null_is_no_path_and_no_name_but_a_text() -> None:
    config = composed("train", "out_dir=null", "logger.run_name=null", "data.sample_prompt=null")
    assert (config.out_dir, config.logger.run_name, config.data.sample_prompt) == (None, None, "null")
    assert composed("generate", "prompt=null").prompt == "null"
    assert composed("evaluate", "start=null").start == "null"


# What is wrong is said in one sentence


@pytest.mark.parametrize(("argument", "said"), [
    ("kernel=nonsense", "'nonsense'; there are: auto, c_v0, conv1d, "),
    ("kernel=conv1d,nonsense", "'nonsense'; there are: auto, c_v0, conv1d, "),
    ("kernel=fft", "fft"),
    ("model=huge", "'huge'; there are: 169m, 1b5, 3b, 430m, 7b, rwkv7_"),
    ("model.generation=rwkv5", "rwkv4, rwkv7; got 'rwkv5'"),
    ("model.head_size=32", "model.head_size is an option of rwkv7"),
    ("model.n_layer=two", "model.n_layer must be a whole number, such as 1000; got two"),
    ("tune.modules=att.key", "tune.modules must be a list"),
    ("tune.rank=4", "tune.rank requires tune=lora; got tune=full"),
    ("model.n_layer=0", "model.n_layer"),
    ("optim.min_lr=1e-2", "optim.min_lr"),
    ("optim.lr=${nothing}", "nothing"),
    ("trainer.max_steps=(3", "cannot read"),
    ("trainer.precision=16", "32-true, tf32, bf16-mixed, fp16-mixed, auto; got '16'"),
    ("seed=1,2", "-m"),
    ("data.field=", "data.field is empty"),
    ("data.tokenizer=null", "data.tokenizer cannot be null"),
    ("optim.lrr=1", "optim.lrr; did you mean optim.lr?"),
    ("n_layer=1", "n_layer; did you mean model.n_layer?"), ("max_stepz=3", "did you mean trainer.max_steps?"),
    ("model.layers=1", "did you mean model.n_layer?"), ("trainr.max_stepz=1", "did you mean trainer.max_steps?"),
    ("optim.batch_size=1", "did you mean data.batch_size?"), ("trainer.optim.lr=1", "did you mean optim.lr?"),
    ("modle=small", "did you mean model?"), ("kernel=taichi_v33", "did you mean taichi_v3?"),
    ("nonsense=1", "nonsense; --help"),
    ("+model.nonsense=1", "model.nonsense"),
    ("kernel", "'kernel'"),
    ("--seed=1", "--seed=1; options are written without dashes: seed=1"),
    ("--plan", "--plan; options are written without dashes: plan="),
    ("--max_steps", "trainer.max_steps=VALUE"), ("--batch-size=4", "data.batch_size=4"), ("--kernel=conv1d", ": kernel=conv1d"),
    ("max_steps", "trainer.max_steps=VALUE"), ("book.txt", "data=text data.path=book.txt"),
    ("trainer=gpu", "trainer=gpu"),
    *(pytest.param(*more, marks=pytest.mark.thorough) for more in (
        ("optim.betas=[0.9,1.5]", "optim.betas"),
        ("optim.matrix_lr=0.1", "optim.matrix_lr requires optim=muon or normuon"),
        ("data.template=world", "data.template requires data=chat"),
        ("model.n_layer=1000000", "model.n_layer must be at most 10000"),
        ("seed=4294967296", "seed"),
        ("logger.project=a/b", "logger.project"),
        ("optim.name=sgd", "adamw, adam, muon, normuon, adamw8bit; got 'sgd'"),
        ("trainer.max_steps=1,2x", "trainer.max_steps"),
        ("plan=maybe", "plan must be one of false, true, timed, a100"),
        ("optim.lr=abc", "optim.lr must be a number; got abc"),
        ("experiment=nope", "'nope'; there are: kernel_ablation, rwkv4_original"))),
])
def test_a_wrong_option_is_one_sentence(run: Run, tmp_path: Path, argument: str, said: str) -> None:
    if argument == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    one_sentence(run("train", argument), said)
    assert not list(tmp_path.iterdir()), "nothing was done before the mistake was found"


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_argument_that_is_not_utf8_is_one_sentence(run: Run, program: str) -> None:
    option = "data.path" if program in ("train", "evaluate") else "checkpoint"
    one_sentence(run(program, f"{option}=Latin-\udce9.txt"), option, r"Latin-\xe9.txt")


@pytest.mark.parametrize(("arguments", "said"), [
    (["model.n_att=8"], "model.n_att is an option of rwkv4"),
    (["optim.time_first_lr_scale=2"], "optim.time_first_lr_scale is an option of rwkv4"),
    (["model.head_size=50", "kernel=reference"], "model.head_size, which is 50"),
    (["kernel=conv1d"], "conv1d computes the operator of RWKV-4; for RWKV-7 there are: auto, "),
])
def test_what_is_of_another_generation_is_one_sentence(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    one_sentence(run("train", "model=rwkv7_tiny", *arguments), said)
    assert not list(tmp_path.iterdir()), "nothing was done before the mistake was found"


HEAVY = ("torch", "lightning", "hydra", "wandb", "taichi")


@pytest.mark.programs
@pytest.mark.parametrize(("program", "argument", "status", "heavy"), [
    ("train", "kernel=nope", 2, HEAVY), ("train", "optim.lrr=1", 2, HEAVY), ("train", "--help", 0, ("torch", "lightning")),
])
def test_an_answer_needs_no_heavy_import(program: str, argument: str, status: int, heavy: tuple[str, ...]) -> None:
    code = (f"import sys; from rwkv.programs.{program} import main\ntry: main()\n"
            f"finally: assert not {set(heavy)} & set(sys.modules), sorted({set(heavy)} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code, argument], cwd=cli.CONFIGS.parent, capture_output=True, text=True,
                          check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


def test_a_directory_that_exists_is_not_overwritten(run: Run) -> None:
    Path("mine").mkdir()
    Path("mine", "thesis.txt").write_text("years of work")
    one_sentence(run("train", "out_dir=mine"), "out_dir mine contains files")
    Path("mine", "config.yaml").write_text("seed: 0")
    one_sentence(run("train", "out_dir=mine"), "out_dir mine exists already", "resume=auto")
    one_sentence(run("train", "out_dir=mine/thesis.txt"), "out_dir mine/thesis.txt is a file")


def test_a_new_run_may_find_logs_and_what_a_system_puts_on_a_disk(tmp_path: Path) -> None:
    for name in ("train.log", "slurm-12.out", "nohup.out", "stderr", "log", ".lock", ".nfs0001", ".DS_Store"):
        (tmp_path / name).write_text("line")
    for name in ("lost+found", ".Trash-1000"):
        (tmp_path / name).mkdir()
    require_unused(tmp_path)
    for name in ("metrics.csv", "notes.md", "checkpoints", ".git", "photos.out"):
        path = tmp_path / name
        path.write_text("") if "." in name[1:] and name != "photos.out" else path.mkdir()
        with pytest.raises(UserError, match="contains files"):
            require_unused(tmp_path)
        path.unlink() if path.is_file() else path.rmdir()
    require_unused(tmp_path)


def test_what_cannot_be_resumed_is_one_sentence(run: Run) -> None:
    for name in ("nowhere", "nowhere.ckpt"):
        one_sentence(run("train", f"resume={name}"), "nothing to resume from")
    Path("foreign.ckpt").write_text("hello")
    small_model().save_pretrained("weights.pth")
    for name in ("foreign.ckpt", "weights.pth"):
        one_sentence(run("train", f"resume={name}"), name)


@pytest.mark.programs
@pytest.mark.skipif(sys.platform == "win32", reason="its pipes report other errors")
@pytest.mark.parametrize("command", [("train.py", "--help"), ("-m", "rwkv.tools", "--help")])
def test_a_reader_that_goes_away_ends_a_program_quietly(command: tuple[str, ...]) -> None:
    with subprocess.Popen([sys.executable, *command], cwd=cli.PACKAGE.parent, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, b"")


def test_a_bug_keeps_its_stack_trace(tmp_path: Path) -> None:
    """A ValueError of the program itself is no user's mistake; a UserError is one wherever the package is installed."""
    with pytest.raises(json.JSONDecodeError), cli.exit_on_user_error():
        json.loads("x")
    (tmp_path / "site-packages").mkdir()
    installed = tmp_path / "site-packages" / "installed.py"
    installed.write_text("from rwkv.errors import UserError\n\n\ndef fail():\n    raise UserError('a')\n")
    spec = importlib.util.spec_from_file_location("installed", installed)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
        module.fail()
    assert stop.value.code == cli.USER_ERROR


@pytest.mark.parametrize("error", [UserError("a"), KernelUnavailable("a"), UnknownKernel("a"), OSError("a")])
def test_a_user_s_mistake_is_its_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
        raise error
    assert (stop.value.code, capsys.readouterr().err) == (cli.USER_ERROR, "error: a\n")


# --help


def help_of(program: str, *arguments: str) -> str:
    main, schema = PROGRAMS[program]
    about = importlib.import_module(main.__module__).__doc__
    return cli.help_page(cli.split(list(arguments), schema), schema, program, about or "")


def test_help_shows_the_values_of_this_command_line(run: Run) -> None:
    status, output, _ = run("train", "model=small", "data.path=a,b", "--help")
    assert status == 0
    assert re.search(r"^  model\.n_embd .* \[384\]$", output, re.MULTILINE)
    assert "[a,b]" in output


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_fits_a_terminal(program: str) -> None:
    assert max(map(len, help_of(program).splitlines())) <= WIDTH


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_explains_every_option(program: str) -> None:
    page = help_of(program)
    words = " ".join(page.split())
    for option, item in options(PROGRAMS[program][1]).items():
        assert re.search(rf"^  {re.escape(option)}\b", page, re.MULTILINE), option
        assert f"{option} {item.metadata['help']}" in words


@pytest.mark.parametrize(("argument", "hinted"), [
    (r"stop=\n", True), (r"stop=User:\n\n", True), ("stop=\n", False), ("stop=User:", False), (r"prompt=C:\name", True),
    (r"checkpoint=C:\new", False)])
def test_a_backslash_and_an_n_are_told_from_a_line_end(run: Run, argument: str, hinted: bool) -> None:
    _, _, error = run("generate", "checkpoint=missing.pth", argument)
    assert ("line end" in error) == hinted


def test_help_describes_every_choice() -> None:
    page = help_of("train") + help_of("generate")
    assert not [f"{group}={name}" for group, name in CHOICES if not re.search(rf"^  {group}={name}  +\S", page, re.MULTILINE)]
    assert all(re.search(rf"\b{name}\b", page) for name in cli.KERNELS)


@pytest.mark.parametrize("flag", ["--cfg", "-c"])
def test_the_whole_configuration_as_yaml(run: Run, flag: str) -> None:
    options = ("seed=7", "data.path=a b,c", "logger.project=内容", "optim.betas=[0.5,0.6]")
    status, output, error = run("train", flag, "job", *options)
    assert status == 0, error
    shown = yaml.safe_load(output)
    assert (shown["seed"], shown["data"]["path"], shown["logger"]["project"]) == (7, "a b,c", "内容")
    assert shown["optim"]["betas"] == [0.5, 0.6]


@pytest.mark.parametrize(("program", "arguments", "said"), [
    ("generate", ("-m", "seed=0,1"), "-m"), ("serve", ("-m", "port=0,1"), "-m"), ("train", ("--cfg", "hydra"), "--cfg job")])
def test_a_flag_that_does_nothing_here_is_one_sentence(run: Run, program: str, arguments: tuple[str, ...], said: str) -> None:
    one_sentence(run(program, *arguments), said)


@pytest.mark.parametrize("option", ["api_key=", "host=", "checkpoint=null"])
def test_an_address_or_a_key_that_is_empty_is_refused(run: Run, option: str) -> None:
    """An empty key would open the server to whoever sends an empty one."""
    one_sentence(run("serve", option), option.partition("=")[0])


@pytest.mark.parametrize("text", ["~/x", "~"])
def test_a_path_begins_at_home_in_every_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Also where the shell expands nothing: behind an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").touch()
    expected = tmp_path / "x" if text == "~/x" else tmp_path
    assert composed("generate", f"checkpoint={text}").checkpoint == str(expected)
    assert program_arguments.existing(text) == expected
    options = convert._parser().parse_args(["in", "out", f"--tokenizer={text}"])
    assert options.tokenizer == str(expected)
    assert program_arguments.from_home("~x/y") == "~x/y"
    assert program_arguments.from_home("a~/y") == "a~/y"
