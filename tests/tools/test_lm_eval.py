"""Tests rwkv.tools.lm_eval: the options it passes on, and scores that equal those of the harness's own model `hf`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens
from parity.exchange import ENVIRONMENT, PYTHON, in_peers_environment
from tokenizers import Tokenizer as Definition
from tokenizers import decoders, models, pre_tokenizers, trainers

from rwkv.errors import UserError
from rwkv.evaluation import EvaluatedSequence, score_batch, score_endings
from rwkv.tokenizer.tokenizers import ByteTokenizer, JsonTokenizer
from rwkv.tools import lm_eval
from rwkv.tools._lm_eval_options import engine_options, seeds_of
from rwkv.tools.lm_eval import command_line

ROOT = Path(__file__).parent.parent.parent
END = "<|endoftext|>"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box", "in",
         "silence", "and", "nobody", "knows", "why"]
COMMON = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
               "doc_to_target": "{{answer}}",
               "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True}
                               for name in ("acc", "acc_norm")]},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
                "metric_list": [{"metric": "bits_per_byte"}]},
    "until": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
              "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False},
              "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]},
    "short": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[0]}}",
              "generation_kwargs": {"until": ["\n\n"], "max_new_tokens": 5},
              "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]},
}


def test_the_default_model_is_ours() -> None:
    assert command_line(["--tasks", "piqa"]) == ["run", "--model", "timemix", "--tasks", "piqa"]
    assert command_line(["run", "--tasks", "piqa"]) == ["run", "--model", "timemix", "--tasks", "piqa"]
    assert command_line(["--model", "hf", "--tasks", "piqa"]) == ["run", "--model", "hf", "--tasks", "piqa"]


def test_help_needs_no_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setattr(sys, "argv", ["timemix lm_eval", "--help"])
    lm_eval.main()
    assert "--model_args" in capsys.readouterr().out


@pytest.mark.parametrize(("task", "tokens"), [
    ({}, 256), ({"max_gen_toks": 5}, 5), ({"max_new_tokens": 5}, 5), ({"max_tokens": "5"}, 5),
    ({"max_completion_tokens": 5}, 5), ({"max_tokens": 7, "max_new_tokens": 5}, 5),
    ({"max_gen_toks": None, "max_tokens": 5}, 5), ({"max_length": 15}, 5), ({"max_length": 15, "max_gen_toks": 3}, 5)])
def test_a_task_limits_its_answers_under_each_name_of_the_length(task: dict[str, Any], tokens: int) -> None:
    assert engine_options(task, lambda: 10)["max_new_tokens"] == tokens


@pytest.mark.parametrize("task", [{"max_length": 10}, {"max_gen_toks": "many"}, {"max_tokens": [3]},
                                  {"temperature": "hot"}])
def test_an_invalid_value_is_refused(task: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(task))):
        engine_options(task, lambda: 10)


@pytest.mark.parametrize(("task", "sampling"), [
    ({}, {"temperature": 0}), ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, {"temperature": 0}),
    ({"temperature": 0}, {"temperature": 0}), ({"temperature": None}, {"temperature": 0}),
    ({"do_sample": True}, {"temperature": 1, "top_p": 1}),
    ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 1}),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
])
def test_a_task_is_sampled_from_the_model_s_own_distribution_unless_it_asks_otherwise(task: dict[str, Any],
                                                                                      sampling: dict[str, Any]) -> None:
    options = engine_options({"until": "\n\n", "max_gen_toks": 9} | task, lambda: 10)
    assert options == {"max_new_tokens": 9, "stop": ["\n\n"]} | sampling


def test_options_of_generation_that_are_not_known_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        engine_options({"num_beams": 4, "until": ["a"], "typical_p": 0.3, "penalty_alpha": None}, lambda: 10)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" num_beams, typical_p")


def test_repetitions_of_a_request_have_different_seeds() -> None:
    assert seeds_of(["a", "b", "a", "a"], 1234) == [1234, 1234, 1235, 1236]


@each_generation
@pytest.mark.parametrize("length", [1, 2, 9])
def test_endings_of_one_context_are_scored_like_each_alone(generation: str, length: int) -> None:
    model = small_model(generation=generation)
    context, *endings = [tokens(model, 1, T, seed)[0].tolist() for seed, T in enumerate((length, 3, 1, 5))]
    nats, right = score_endings(model, context, endings, chunk_len=4, batch_size=2)
    for ending, one, whole in zip(endings, nats, right, strict=True):
        text = EvaluatedSequence(context + ending, [False] * len(context) + [True] * len(ending))
        alone, alone_right = score_batch(model, [text], chunk_len=100)
        torch.testing.assert_close(one, alone[0], rtol=0, atol=1e-4)
        assert whole == alone_right[0]


@pytest.fixture
def harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("no lm_eval here: pip install -e '.[lm-eval]'")
    if not PYTHON.exists() or subprocess.run([PYTHON, "-I", "-c", "import lm_eval.models.huggingface"],
                                             capture_output=True).returncode:
        pytest.skip(f"no lm_eval in {PYTHON.parent.parent.name}: pip install 'lm-eval[hf]' there")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with an RWKV-4 directory for transformers, a file of questions, and tasks that use the questions."""
    definition = Definition(models.BPE())
    definition.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    definition.decoder = decoders.ByteLevel()
    definition.train_from_iterator([" ".join(WORDS)] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = JsonTokenizer(definition.to_str())
    model = small_model(vocab_size=tokenizer.vocab_size)
    model.save_pretrained(tmp_path / "model", tokenizer)
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}))
    questions = [{"question": " ".join(WORDS[start:start + 3 + start % 4]), "answer": start % 3,
                  "choices": [f" {WORDS[start - other]} {WORDS[other]}" for other in (1, 2, 5)]} for start in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(tmp_path / "questions.jsonl")}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **COMMON, "dataset_kwargs": files, **task}))
    return tmp_path


def arguments(folder: Path, out: str) -> list[str]:
    return ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / out), "--log_samples",
            "--device", "cpu"]


def read_results(folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Returns the results of each task, and the answers to each request of a task."""
    (results,) = folder.rglob("results_*.json")
    answers = {}
    for name in TASKS:
        (file,) = folder.rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        answers[name] = [sample["resps"] for sample in samples]
    return json.loads(results.read_text())["results"], answers


def numbers(value: Any) -> list[Any]:
    """Returns the leaves of nested lists, as floats where possible, because the harness writes some numbers as texts."""
    if isinstance(value, list):
        return [leaf for item in value for leaf in numbers(item)]
    try:
        return [float(value)]
    except ValueError:
        return [value]


@pytest.mark.parametrize(("options", "words"), [
    ({"lora": "x"}, "unknown name lora; the names are checkpoint"), ({"pretrained": "x"}, "unknown name pretrained"),
    ({"chunk_len": "many"}, "chunk_len .* got many"), ({"chunk_len": 0}, "chunk_len .* got 0"),
    ({"batch_size": "auto"}, "--batch_size .* got auto"), ({"device": "gpu0"}, "--device .* got gpu0")])
def test_a_wrong_argument_of_the_model_is_reported_in_one_sentence(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="no lm_eval here: pip install -e '.[lm-eval]'")
    from rwkv.tools._harness import Timemix

    small_model(vocab_size=256).save_pretrained(tmp_path / "model.safetensors", ByteTokenizer())
    arguments = {"checkpoint": str(tmp_path / "model.safetensors"), "device": "cpu"}
    with pytest.raises(UserError, match=words):
        Timemix(**arguments | options)
    with pytest.raises(UserError, match="--apply_chat_template"):
        Timemix(**arguments).apply_chat_template([])


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_numbers_equal_those_of_the_harness_s_own_model(harness: None, folder: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    environment = os.environ | ENVIRONMENT | {"HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, "-m", "rwkv.tools.lm_eval", "--model_args", f"checkpoint={folder / 'model'}",
                              "--batch_size", "5", *arguments(folder, "ours")], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    in_peers_environment("-m", "lm_eval", "run", "--model", "hf", "--batch_size", "1", "--model_args",
                         f"pretrained={folder / 'model'},dtype=float32", *arguments(folder, "theirs"), cwd=folder)
    (ours, our_answers), (theirs, their_answers) = read_results(folder / "ours"), read_results(folder / "theirs")
    for name in TASKS:
        for metric, value in theirs[name].items():
            if isinstance(value, float):
                assert ours[name][metric] == pytest.approx(value, abs=1e-4), (name, metric)
        one, other = numbers(our_answers[name]), numbers(their_answers[name])
        assert len(one) == len(other) >= 12
        for mine, expected in zip(one, other, strict=True):
            assert mine == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)
