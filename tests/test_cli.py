"""The command line: every configuration composes, free text stays as it was typed, and a user's mistake is one sentence."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import small_model
from programs import PROGRAMS, Run, one_sentence

from benchmarks.tables import SHAPES
from kernels.select import select
from rwkv import cli
from rwkv.config import EvaluateConfig, GenerateConfig, TrainConfig
from rwkv.model import RWKV
from rwkv.run import as_plain

CHOICES = sorted(path.relative_to(cli.CONFIGS) for path in cli.CONFIGS.glob("*/*.yaml"))


def compose(program: str, *arguments: str) -> Any:
    schema = PROGRAMS[program][1]
    line = cli.split(list(arguments), schema)
    cli.ConfigStore.instance().store(name=f"{program}_schema", node=schema)
    cli.check(line, schema, program)
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        return cli.build(hydra.compose(program, line.overrides), line.verbatim)


# Composition


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_yaml_composes_to_the_schema(choice: Path) -> None:
    config = compose("train", f"{choice.parent}={choice.stem}")
    assert isinstance(config, TrainConfig)
    if choice.parent.name in ("kernel", "data", "optim", "logger"):
        assert getattr(config, choice.parent.name).name == choice.stem


def test_the_defaults_are_those_of_the_dataclasses() -> None:
    """A default is written down once, and what a YAML file repeats is the same; stdlib alone has its own split and sample."""
    defaults = as_plain(TrainConfig())
    defaults["data"] |= {"val_fraction": 0.05, "sample_prompt": "    def __init__(self"}
    assert as_plain(compose("train")) == defaults
    assert compose("generate") == GenerateConfig()
    assert compose("evaluate") == EvaluateConfig()


def test_the_recipe_of_the_log_is_the_experiment() -> None:
    config = compose("train", "experiment=shakespeare_char", "data.path=FILE", "optim.lr=1e-3")
    assert (config.model.n_layer, config.model.n_embd, config.model.ctx_len, config.data.batch_size) == (2, 192, 64, 12)
    assert (config.data.name, config.data.tokenizer, config.data.path) == ("text", "char", "FILE")
    assert (config.trainer.max_steps, config.optim.lr, config.optim.matrix_every) == (2000, 1e-3, 3)


def test_the_readme_says_how_large_the_experiment_s_model_is() -> None:
    config = compose("train", "experiment=shakespeare_char", "data.path=FILE").model
    model = RWKV(config, 66, select("reference"))                # tiny Shakespeare's 65 characters, and the end of text
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert f"the model has {config.n_layer} layers, {config.n_embd} wide, and {weights / 1e6:.2f} M weights" in SHAPES


def test_rwkv_lm_s_recipe_is_the_experiment() -> None:
    config = compose("train", "experiment=rwkv4_original", "data.path=enwik8")
    optim, trainer = config.optim, config.trainer
    assert (config.model.n_layer, config.model.n_embd, config.model.ctx_len, config.data.batch_size) == (6, 512, 1024, 12)
    assert (config.data.name, config.data.tokenizer) == ("text", "char")
    assert (optim.name, optim.schedule, optim.warmup_steps) == ("adam", "exponential", 0)
    assert (optim.lr, optim.min_lr, list(optim.betas), optim.eps) == (8e-4, 1e-5, [0.9, 0.99], 1e-8)
    assert (optim.time_mix_lr_scale, optim.time_decay_lr_scale, optim.time_first_lr_scale) == (1, 2, 3)
    assert (optim.weight_decay, optim.grad_clip, optim.l2_wrap) == (0, 1, 1e-4)
    assert (trainer.max_steps, trainer.val_every) == (5 * 833, 833)


def test_a_single_option_wins_over_an_experiment_and_debug() -> None:
    config = compose("train", "debug=fast", "model.n_layer=5", "trainer.max_steps=7")
    assert (config.model.n_layer, config.model.n_embd, config.trainer.max_steps) == (5, 32, 7)


# Free text

HARD = ("", "a,b", "a=b", "'", '"', "it's", "${seed}", "${x}", "$(ls) `ls`", "[1, 2", "{a: b}", "line\nline\n", " space ", "\\",
        "\\,", "@", "#", "--help", "+a=1", "~a", "1e3", "true", "你好 🙂", "\t", "a: b", "???", "%",
        "choice(a,b)", "prompt=", "null")


def as_one_example_each(test: Callable[..., None]) -> Callable[..., None]:
    for text in HARD:
        test = example(text)(test)
    return test


@settings(max_examples=300, deadline=None)
@as_one_example_each
@given(st.text())
def test_free_text_is_taken_as_it_is(text: str) -> None:
    line = cli.split([f"prompt={text}", "seed=3", f"stop={text}", "top_p=0.5", "-m"], GenerateConfig)
    assert (line.overrides, line.flags) == (["seed=3", "top_p=0.5"], ["-m"])
    assert line.keys == ["seed", "top_p", "prompt", "stop"]
    config = cli.build(cli.OmegaConf.structured(GenerateConfig), line.verbatim)
    assert (config.prompt, config.stop) == (text, [text])


@pytest.mark.parametrize(("arguments", "chosen"), [
    (["optim=adamw", "logger.name=csv"], {"optim.name"}),
    (["trainer=auto", "seed=1", "debug=null"], {"trainer.accelerator"}),
    (["+debug=overfit"], {
        "model.n_layer", "model.n_embd", "model.ctx_len", "data.tokenizer", "data.batch_size", "optim.warmup_steps",
        "trainer.max_steps", "trainer.val_every", "trainer.checkpoint_every", "trainer.overfit_batches"}),
])
def test_a_chosen_group_sets_what_is_in_its_file(arguments: list[str], chosen: set[str]) -> None:
    assert set(cli.split(arguments, TrainConfig).chosen) == chosen


def test_an_experiment_sets_what_its_groups_do_too() -> None:
    assert {"data.name", "optim.name", "optim.matrix_lr"} < set(cli.split(["experiment=shakespeare_char"], TrainConfig).chosen)
    assert not [key for key in cli.split(["experiment=kernel_ablation"], TrainConfig).chosen if key.startswith("hydra")]


@pytest.mark.parametrize("key", ["data.path", "out_dir", "data.tokenizer", "logger.run_name"])
def test_paths_and_names_are_free_text_too(key: str) -> None:
    config = compose("train", f"{key}=a,b=${{c}} 'd'")
    *parents, last = key.split(".")
    assert getattr(getattr(config, parents[0]) if parents else config, last) == "a,b=${c} 'd'"


def test_a_path_may_begin_at_the_home_folder() -> None:
    config = compose("train", "data.path=~/books", "data.cache_dir=a/~/b", "data.sample_prompt=~/books", "out_dir=~/runs")
    assert (config.data.path, config.out_dir) == (str(Path.home() / "books"), str(Path.home() / "runs"))
    assert (config.data.cache_dir, config.data.sample_prompt) == ("a/~/b", "~/books")


@pytest.mark.parametrize("key", cli.VERBATIM)
def test_every_verbatim_key_is_an_option(key: str) -> None:
    assert any(key in cli._options(schema) for _, schema in PROGRAMS.values())


def test_null_is_no_path_and_no_name_but_a_text() -> None:
    config = compose("train", "out_dir=null", "logger.run_name=null", "data.sample_prompt=null")
    assert (config.out_dir, config.logger.run_name, config.data.sample_prompt) == (None, None, "null")
    assert compose("generate", "prompt=null").prompt == "null"
    assert compose("evaluate", "start=null").start == "null"


# What is wrong is said in one sentence


@pytest.mark.parametrize(("argument", "said"), [
    ("kernel=nonsense", "unknown kernel 'nonsense'; on cpu there are: auto, conv1d, "),
    ("kernel.name=nonsense", "unknown kernel 'nonsense'; on cpu there are: auto, conv1d, "),
    ("kernel=fft", "fft cannot be used inside WKV: its error is relative to the largest e^k of a row"),
    ("kernel=conv1d,nonsense", "unknown kernel 'nonsense'; on cpu there are: auto, conv1d, "),
    ("model=huge", "unknown model 'huge'; there are: 169m, 1b5, 3b, 430m, 7b, small, tiny"),
    ("model=null", "unknown model 'null'; there are: 169m, 1b5, 3b, 430m, 7b, small, tiny"),
    ("experiment=nope", "unknown experiment 'nope'; there are: kernel_ablation, rwkv4_original, shakespeare_char"),
    ("model.n_layer=two", "model.n_layer: Value 'two'"),
    ("model.n_layer=1.5", "model.n_layer: Value '1.5'"),
    ("optim.lr=abc", "optim.lr: Value 'abc'"),
    ("optim.lr=null", "optim.lr"),
    ("optim.betas=0.9", "optim.betas"),
    ("optim.betas=[0.9]", "optim.betas are two numbers"),
    ("optim.betas=[0.9,1.5]", "optim.betas are two numbers"),
    ("model.n_layer=0", "model.n_layer is at least 1; got 0"),
    ("optim.matrix_every=0", "optim.matrix_every is at least 1; got 0"),
    ("optim.name=sgd", "optim.name is one of adamw, adam, muon, normuon; got 'sgd'"),
    ("optim.time_decay_lr_scale=-1", "optim.time_decay_lr_scale is at least 0"),
    ("trainer.max_tokens=0", "trainer.max_tokens is at least 1; got 0"),
    ("trainer.precision=16", "trainer.precision is one of 32-true, bf16-mixed, fp16-mixed, auto; got '16'"),
    ("optim.lr=1e-5", "optim.min_lr above 0 and at most optim.lr"),
    ("data.val_fraction=2", "data.val_fraction lies above 0 and below 1"),
    ("trainer.max_tokens=inf", "trainer.max_tokens is"),
    ("optim.weight_decay=inf", "optim.weight_decay is"),
    ("seed=-1", "seed is"),
    ("seed=4294967296", "seed is"),
    ("optim.lrr=1", "unknown option optim.lrr; did you mean optim.lr?"),
    ("n_layer=1", "unknown option n_layer; did you mean model.n_layer?"),
    ("nonsense=1", "unknown option nonsense; --help lists them all"),
    ("+model.nonsense=1", "unknown option model.nonsense"),
    ("++nonsense=1", "unknown option nonsense"),
    ("kernel", "cannot read 'kernel': options are written key=value"),
    ("trainer.max_steps=(3", "cannot read the options"),
    ("trainer.max_steps=1,2x", "trainer.max_steps: Value '2x'"),
    ("optim.lr=${nothing}", "nothing"),
    ("trainer=gpu", "trainer=gpu needs a CUDA device"),
])
def test_a_wrong_option_is_one_sentence(run: Run, tmp_path: Path, argument: str, said: str) -> None:
    if argument == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    one_sentence(run("train", argument), said)
    assert not list(tmp_path.iterdir()), "nothing was done before the mistake was found"


@pytest.mark.parametrize(("name", "content", "said"), [
    ("absent.txt", None, "cannot read data.path=absent.txt: No such file"),
    ("empty.txt", b"", "data.path=empty.txt is empty"),
    ("latin.txt", "é".encode("latin1") * 999, "data.path=latin.txt is not UTF-8: its byte 0 is 0xe9"),
    ("short.txt", b"just a few words", "the training text is shorter than one context"),
])
def test_a_wrong_data_file_is_one_sentence(run: Run, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    one_sentence(run("train", "data=text", f"data.path={name}", "data.cache_dir=cache", "data.tokenizer=byte"), said)
    assert not Path("runs").exists()


def test_text_without_a_file_says_what_is_missing(run: Run) -> None:
    one_sentence(run("train", "data=text"), "data=text needs data.path: a text file in UTF-8")


def test_a_directory_that_exists_is_not_overwritten(run: Run) -> None:
    Path("mine").mkdir()
    Path("mine", "thesis.txt").write_text("years of work")
    one_sentence(run("train", "out_dir=mine"), "out_dir mine exists already", "resume=auto")


@pytest.mark.parametrize("argument", ["resume=nowhere", "resume=nowhere.ckpt"])
def test_nothing_to_resume_is_one_sentence(run: Run, argument: str) -> None:
    one_sentence(run("train", argument), "nothing to resume from")


def test_a_foreign_file_to_resume_from_is_one_sentence(run: Run) -> None:
    Path("foreign.ckpt").write_text("hello")
    one_sentence(run("train", "resume=foreign.ckpt"), "foreign.ckpt cannot be read as a checkpoint")
    small_model().save_pretrained("weights.pth")
    one_sentence(run("train", "resume=weights.pth"), "weights.pth")


def test_a_bug_keeps_its_stack_trace() -> None:
    """Only what this program says on purpose is a sentence."""
    with pytest.raises(ValueError, match="Expecting value"):
        cli.with_sentences(lambda: print(json.loads("x")))
    with pytest.raises(ZeroDivisionError):
        cli.with_sentences(lambda: print(1 // 0))


# What is right


@pytest.fixture(scope="module")
def page() -> str:
    """What train.py --help shows, made as Hydra makes it."""
    cli.ConfigStore.instance().store(name="train_schema", node=TrainConfig)
    with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
        return str(hydra.compose("train", return_hydra_config=True).hydra.help.template)


def test_help_is_there(run: Run) -> None:
    status, output, _ = run("train", "model=small", "--help")
    assert status == 0
    assert "kernel: auto, conv1d, cuda_scan" in output
    assert "model.n_embd           width, in channels [384]" in output, "with the values of this command line"


@pytest.mark.parametrize("option", cli._options(TrainConfig))
def test_help_explains_every_option(page: str, option: str) -> None:
    assert re.search(rf"^  {re.escape(option)}  +\w+.* .*\w", page, re.MULTILINE)


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice.parent.name != "kernel"], ids=str)
def test_help_says_what_every_choice_is_for(page: str, choice: Path) -> None:
    choices = page[page.index("Choices, GROUP=NAME"):page.index("Options, OPTION=VALUE")]
    assert re.search(rf"\b{choice.parent}=[^\n=]*\b{choice.stem}\b", choices)


def test_help_fits_a_terminal_and_names_nothing_that_is_not_there(page: str) -> None:
    assert max(map(len, page.splitlines())) <= 80
    options = re.findall(r"^  ([a-z]+(?:[._][a-z0-9_]+)+)  ", page, re.MULTILINE)
    assert len(options) > 50
    assert set(options) <= {*cli._options(TrainConfig)}
