"""Tests that lm-evaluation-harness finds the numbers of rwkv.tools.evaluate through the server.

The harness runs in an environment of its own.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from models import saying
from serving_runs import Running

from rwkv.tokenizer.tokenizers import ByteTokenizer

PROGRAM = shutil.which("lm_eval")
pytestmark = [pytest.mark.programs, pytest.mark.soak,
              pytest.mark.skipif(PROGRAM is None, reason="needs lm_eval on the PATH: pip install 'lm-eval[api]' elsewhere")]
ROOT = Path(__file__).parent.parent.parent
START = "\n"                             # precedes each text, because the harness sends no token that begins a text
TASK = {"task": "last_words", "dataset_path": "json", "test_split": "test", "output_type": "loglikelihood",
        "doc_to_text": START + "{{text.rsplit(' ', 1)[0]}}", "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True},
                        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]}


def test_the_harness_finds_the_numbers_of_evaluate(start: Callable[..., Running], tmp_path: Path) -> None:
    """The model predicts some of the last words.

    No token is as likely as the likeliest one, because the harness would count both as right.
    """
    model, chance = saying("x cat"), random.Random(0)
    model.head.weight.data *= 0.05
    model.save_pretrained(tmp_path / "model.pth", ByteTokenizer(), format="pth")
    endings = ("x cat", "z dog", "x car", "x ca", "y cat", "é naïve")
    texts = ["".join(chance.choices("abcdef é", k=chance.randint(1, 300))) + endings[number % 6] for number in range(36)]
    data = tmp_path / "words.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "task.yaml").write_text(json.dumps({**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}))

    server = start(f"checkpoint={tmp_path / 'model.pth'}")
    assert PROGRAM is not None
    _run([PROGRAM, "run", "--model", "local-completions", "--include_path", str(tmp_path), "--tasks", "last_words",
          "--model_args", f"model=model,base_url={server.url}/v1/completions,tokenizer_backend=remote,max_length=4096",
          "--batch_size", "4", "--output_path", str(tmp_path / "found")],
         {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""})
    path, = (tmp_path / "found").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]["last_words"]
    printed = _run([sys.executable, "-m", "rwkv.tools.evaluate", f"checkpoint={tmp_path / 'model.pth'}", "tokenizer=byte",
                    "kernel=reference", f"data.path={data}", f"start={START}"], {})
    expected = json.loads(printed.splitlines()[-1])
    assert 0 < results["acc,none"] < 1
    assert results["acc,none"] == pytest.approx(expected["accuracy"])
    assert results["perplexity,none"] == pytest.approx(expected["perplexity"], rel=1e-4)


def _run(command: list[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout
