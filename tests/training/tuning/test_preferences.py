"""Tests tune.objective=dpo: loss, gradients, metrics, and runs that learn to prefer the shorter of two right answers."""

import json
import math
import random
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from files import SIZES, byte_model
from models import small_model
from programs import Run, one_sentence
from safetensors.torch import load_file
from training_runs import assert_same_training, content, done_here, fork_run, kill_after, losses, same

from rwkv.chat.turn_templates import chat_template
from rwkv.config import DataConfig, TuneConfig
from rwkv.data.conversations import Tokenised
from rwkv.data.pairs import PairRows, Pairs
from rwkv.data.prepare import Corpus, prepare
from rwkv.generation.engine import generate_batch
from rwkv.model.lora import add_adapters
from rwkv.model.loss import IGNORED
from rwkv.pretrained import RWKV
from rwkv.report import numbers
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.training.tuning import preferences
from rwkv.training.tuning.preferences import Preferences, answers, without_tuning

BASE = "init_from=base7.safetensors"
OPTIONS = ("data=chat", "data.path=pairs.jsonl", "data.batch_size=2", "data.cache_dir=cache", "trainer=cpu", "logger=csv",
           "model.ctx_len=128", "optim.lr=1e-2", "optim.warmup_steps=0", "trainer.sample_tokens=4", "trainer.log_every=1",
           "trainer.malloc=default", "tune.guard=null", "tune.objective=dpo", BASE)
METHODS = ("lora", "state", "full")
FULL = ["full", *(pytest.param(name, marks=pytest.mark.soak) for name in ("lora", "state"))]  # full has most code of its own
VALUES = ((-3.0, -5.5), (-2.0, -1.0), (-40.0, -7.25), (0.0, -100.0))     # log p of the chosen and the rejected answers
REFERENCES = ((-3.5, -5.0), (-2.0, -1.5), (-30.0, -9.0), (-1.0, -2.0))
LENGTHS = ((2, 3), (1, 1), (10, 4), (5, 9))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a folder with base7.safetensors and pairs.jsonl."""
    byte_model(tmp_path / "base7.safetensors")
    pairs = [{"prompt": f"{n} and one?", "chosen": f"{n + 1}", "rejected": f"it is {n + 1}" + "!" * (n % 5)} for n in range(24)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def corpus(folder: Path) -> Corpus:
    config = DataConfig(name="chat", path="pairs.jsonl", cache_dir=str(folder / "cache"), batch_size=2)
    return prepare(config, 128, ByteTokenizer(), pairs=True)


def training_split(folder: Path) -> Tokenised:
    splits = corpus(folder).conversations
    assert splits is not None
    return splits[0]


def batch(folder: Path) -> Pairs:
    split = training_split(folder)
    return PairRows(split.tokens, split.learnt, 128).__getitems__([0, 1, 2])


def formula(log_p: np.ndarray, reference: np.ndarray, lengths: np.ndarray, tune: TuneConfig) -> np.ndarray:
    """Returns the losses of the papers in float64, pair by pair."""
    results = []
    for (c, d), (rc, rd), (nc, nd) in zip(log_p, reference, lengths, strict=True):
        margin = tune.beta * ((c - rc) - (d - rd))
        right, wrong = (1 / (1 + math.exp(sign * margin)) for sign in (-1, 1))
        value = -(1 - tune.label_smoothing) * math.log(right) - tune.label_smoothing * math.log(wrong)
        if tune.objective == "ipo":
            value = ((c - rc) / nc - (d - rd) / nd - 1 / (2 * tune.beta)) ** 2
        results.append(value - tune.sft_weight * c / nc)
    return np.array(results, np.float64)


OBJECTIVES = (TuneConfig(objective="dpo"), TuneConfig(objective="dpo", beta=0.5, label_smoothing=0.1, sft_weight=0.3),
              TuneConfig(objective="ipo", beta=0.2, sft_weight=1.5))


@pytest.mark.parametrize("tune", OBJECTIVES)
def test_the_losses_equal_the_formulas_in_float64(tune: TuneConfig) -> None:
    inputs = (VALUES, REFERENCES, LENGTHS)
    actual = preferences.losses(*(torch.tensor(each, dtype=torch.float32) for each in inputs), tune)
    expected = formula(*map(np.array, inputs), tune)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tune", [pytest.param(OBJECTIVES[1], marks=pytest.mark.thorough), OBJECTIVES[2]])
def test_loss_and_gradient_of_packed_pairs_equal_those_of_single_answers(folder: Path, tune: TuneConfig) -> None:
    """The expected log-probabilities come from each text in a row of its own, in float64."""
    model = small_model(generation="rwkv7", vocab_size=256, **SIZES["rwkv7"])
    packed = batch(folder)
    stored = torch.randn(len(corpus(folder).train.starts) // 2, 2) - 20
    loss, _ = Preferences(tune, {"train": stored}).loss(model, packed, "train")
    gradient = torch.autograd.grad(loss, [model.head.weight, model.emb.weight])
    log_p, lengths = [], []
    for text in range(2 * len(packed.numbers)):
        positions = (packed.answers == text).nonzero()
        row, first, last = int(positions[0, 0]), int(positions[0, 1]), int(positions[-1, 1])
        x, y = packed.x[row:row + 1, first:last + 1], packed.y[row, first:last + 1]
        own = torch.log_softmax(model(x)[0][0].double(), -1)[y != IGNORED, y[y != IGNORED]]
        log_p.append(own.sum())
        lengths.append(len(own))
    pairs = torch.stack(log_p).view(-1, 2)
    reference, sizes = stored[packed.numbers].double(), torch.tensor(lengths).view(-1, 2)
    alone = preferences.losses(pairs, reference, sizes, tune).mean()
    expected = formula(pairs.detach().numpy(), reference.numpy(), sizes.numpy(), tune).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for one, other in zip(gradient, torch.autograd.grad(alone, [model.head.weight, model.emb.weight]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_reference_is_the_frozen_model(folder: Path) -> None:
    model = small_model(generation="rwkv7", vocab_size=256, **SIZES["rwkv7"])
    packed = batch(folder)
    before = answers(model, packed).log_p
    add_adapters(model, (), 2, 4.0)
    model.set_time_states([torch.randn_like(layer.wkv[0]) for layer in model.empty_state(1).layers()])
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter)
    tuned_log_p = answers(model, packed).log_p
    with torch.no_grad(), without_tuning(model):
        assert torch.equal(answers(model, packed).log_p, answers(model, packed).log_p)
        torch.testing.assert_close(answers(model, packed).log_p, before, rtol=0, atol=1e-4)
    torch.testing.assert_close(answers(model, packed).log_p, tuned_log_p, rtol=0, atol=0)
    assert not torch.allclose(tuned_log_p, before, atol=0.1)


def test_the_report_reads_the_metrics_that_training_writes() -> None:
    assert preferences.REWARDS == numbers.REWARDS
    assert preferences.reward_metrics() == numbers.reward_names()


# Whole runs


@pytest.mark.programs
@pytest.mark.parametrize(("method", "more"), [("lora", ("tune.sft_weight=0.1", "trainer.accumulate=2")),
                                              pytest.param("state", (), marks=pytest.mark.soak),
                                              ("full", ("tune.objective=ipo", "trainer.precision=bf16-mixed"))])
def test_a_run_begins_at_its_reference_and_then_prefers_the_chosen_answers(folder: Path, run: Run, method: str,
                                                                          more: tuple[str, ...]) -> None:
    rate = {"lora": "1e-2", "state": "0.3", "full": "1e-3"}[method]
    status, _, error = run("train", *OPTIONS, f"tune={method}", f"optim.lr={rate}", "out_dir=out", "trainer.max_steps=12",
                           "tune.beta=0.5", "trainer.val_every=6", *more)
    assert status == 0, error
    first, *_, last = losses(Path("out"), "train/rewards_margin").values()
    assert abs(first) < (0.05 if method == "full" else 1e-5)
    assert last > first + 0.1
    held_out = losses(Path("out"), "val/rewards_margin")
    assert list(held_out) == [0, 6, 12]
    assert abs(held_out[0]) < (0.05 if method == "full" else 1e-5)
    for split, step in (("train", 12), ("val", 12)):
        chosen, rejected, margin, accuracy = (losses(Path("out"), f"{split}/rewards_{name}")[step]
                                              for name in ("chosen", "rejected", "margin", "accuracy"))
        assert chosen - rejected == pytest.approx(margin, abs=1e-5)
        assert 0 <= accuracy <= 1
    report = Path("out/report.html").read_text(encoding="utf-8")
    assert "Preferences" in report
    assert f"{held_out[12]:.4f}" in report
    if method == "full":
        stored = load_file("out/reference.safetensors")
        assert stored["train"].shape == (22, 2)
        assert not torch.stack([*stored["train"], *stored["val"]]).isnan().any()


@pytest.mark.programs
@pytest.mark.parametrize("method", FULL)
def test_a_step_read_in_passes_is_the_same_step(folder: Path, run: Run, method: str) -> None:
    """Each pair has the same weight, whatever the number of pairs in its pass."""
    results = {}
    for rows, parts in ((2, 2), (4, 1)):
        status, _, error = run("train", *OPTIONS, f"tune={method}", f"data.batch_size={rows}", f"trainer.accumulate={parts}",
                               f"out_dir={rows}", "trainer.max_steps=3", "optim.lr=1e-3")
        assert status == 0, error
        results[rows] = [losses(Path(str(rows)), name) for name in ("train/loss", "train/rewards_margin", "val/loss")]
    for one, other in zip(results[2], results[4], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("method", FULL)
def test_a_killed_run_continues_bit_for_bit(folder: Path, method: str) -> None:
    arguments = (*OPTIONS[:-1], f"tune={method}", "trainer.max_steps=20", "trainer.val_every=10", "trainer.checkpoint_every=5")
    assert done_here(folder, "train", *arguments, BASE, "out_dir=whole").status == 0
    kill_after(fork_run(folder, *arguments, BASE, "out_dir=killed"), folder / "killed", 8, 0.05)
    result = done_here(folder, "train", *arguments, "resume=auto", "out_dir=killed")
    assert result.status == 0, result.error
    assert "continued from" in result.error
    assert_same_training(folder / "whole", folder / "killed")
    for name in ("train/rewards_margin", "val/rewards_accuracy"):
        assert losses(folder / "whole", name) == losses(folder / "killed", name)
    if method == "full":
        whole, killed = ((folder / name / "reference.safetensors").read_bytes() for name in ("whole", "killed"))
        assert whole == killed


@pytest.mark.programs
def test_a_run_without_its_reference_is_not_continued(folder: Path, run: Run) -> None:
    assert run("train", *OPTIONS, "tune=full", "out_dir=out", "trainer.max_steps=2")[0] == 0
    before = content(Path("out/checkpoints/last.ckpt"))
    Path("out/reference.safetensors").unlink()
    status, _, error = run("train", *OPTIONS[:-1], "tune=full", "resume=out", "trainer.max_steps=4")
    assert status == 2
    assert "error: the reference log-probabilities in out/reference.safetensors" in error.replace(str(folder) + "/", "")
    after = content(Path("out/checkpoints/last.ckpt"))
    assert all(same(before[key], after[key]) for key in before)


@pytest.mark.programs
@pytest.mark.parametrize(("options", "words"), [
    (("data=text",), ("data=chat",)), (("trainer.tbptt=2",), ("trainer.tbptt",)),
    (("optim.l2_wrap=1e-3",), ("tune.objective=likelihood",)), (("tune.label_smoothing=0.5",), ("label_smoothing",)),
    (("tune.objective=ipo", "tune.label_smoothing=0.1"), ("tune.objective=dpo",)),
    (("tune.objective=likelihood", "tune.beta=0.2"), ("tune.objective=dpo",)),
    (("tune.objective=likelihood",), ("tune.objective=dpo",)),
])
def test_impossible_options_are_reported_in_one_sentence(folder: Path, run: Run, options: tuple[str, ...],
                                                         words: tuple[str, ...]) -> None:
    other_options = [option for option in OPTIONS if option.split("=")[0] not in {each.split("=")[0] for each in options}]
    one_sentence(run("train", *other_options, *options, "out_dir=out", "trainer.max_steps=2"), *words)
    assert not Path("out/checkpoints").exists()


@pytest.mark.programs
def test_a_validation_split_in_which_no_pair_fits_is_an_error_before_any_work(folder: Path, run: Run) -> None:
    long_pair = json.dumps({"prompt": "long", "chosen": "x" * 200, "rejected": "no"})
    Path("pairs.jsonl").write_text(f"{long_pair}\n{Path('pairs.jsonl').read_text()}")
    one_sentence(run("train", *OPTIONS, "tune=lora", "data.val_fraction=0.01", "out_dir=out"), "validation split has 1 pair")
    assert not Path("out").exists()


# A task whose preferred answers can be checked: of two right answers, the shorter one


def short_answers(model: RWKV, questions: list[str]) -> float:
    """Returns the share of right and short answers, of eight to each question at temperature 1."""
    template = chat_template("world")
    repeated = [question for question in questions for _ in range(8)]
    prompts = [template.render([{"role": "user", "content": question}]) for question in repeated]
    answers = generate_batch(model, ByteTokenizer(), prompts, 8, seeds=range(len(prompts)), temperature=1.0, top_p=1.0)
    return fmean(answer.text.strip() == question[0] for question, answer in zip(repeated, answers, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_the_shorter_of_two_right_answers_is_preferred_to_new_questions(folder: Path, run: Run, method: str) -> None:
    """The base has seen both answers equally often: the letter, and the letter after a word."""
    questions = [f"{one}{two}?" for one in "abcdefgh" for two in "abcdefgh"]
    random.Random(0).shuffle(questions)
    conversations = [{"prompt": question, "completion": answer} for question in questions
                     for answer in (question[0], f"the {question[0]}")]
    pairs = [{"prompt": question, "chosen": question[0], "rejected": f"the {question[0]}"} for question in questions]
    Path("conversations.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    common = ("data=chat", "data.cache_dir=cache", "trainer=cpu", "logger=csv", "model.ctx_len=128", "trainer.sample_tokens=0",
              "trainer.sample_every=0", "trainer.malloc=default")
    status, _, error = run("train", *common, "model=rwkv7_tiny", "model.n_layer=2", "model.n_embd=64",
                           "data.path=conversations.jsonl", "data.tokenizer=byte",
                           "optim.lr=3e-3", "trainer.max_steps=200", "out_dir=base")
    assert status == 0, error
    rate = {"full": "3e-4", "lora": "2e-4", "state": "0.3"}[method]
    status, _, error = run("train", *common, "init_from=base", "data.path=pairs.jsonl", f"tune={method}", "tune.objective=dpo",
                           f"optim.lr={rate}", "trainer.max_steps=60", "out_dir=out")
    assert status == 0, error
    held_out = questions[:1] + questions[10::10]
    before, after = (short_answers(RWKV.from_pretrained(name), held_out) for name in ("base", "out"))
    print(f"{method}: {before:.3f} of the answers are short and right before, {after:.3f} after")
    assert 0.2 < before < 0.8
    assert after > 0.9
    assert losses(Path("out"), "val/rewards_accuracy")[60] == 1
