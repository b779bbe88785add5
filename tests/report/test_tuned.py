"""Tests the part of a report about a tuned run, with files that the tests write."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rwkv import report
from rwkv.report.run_files import Run, read
from rwkv.report.tuning import answers, changes, what_was_tuned

LORA = {"method": "lora", "base": "base.pth", "dtype": "int8", "trained": 1234, "rank": 4, "alpha": 8.0,
        "modules": ["att.key", "ffn.value"]}
TUNED: dict[str, Any] = {
    "tuned": LORA, "guard": "<mine>.txt", "before": {"step": 0, "val/loss": 2.0, "val/bpb": 3.0, "guard/loss": 1.0},
    "after": {"step": 9, "val/loss": 1.5, "val/bpb": 2.25, "guard/loss": 1.25},
    "samples": [{"prompt": "User: <a>", "reference": "b & c", "before": "d", "after": "e"}]}


def tuned_run(**changed: Any) -> Run:
    return Run("one", "conv1d", 0, tuned=TUNED | changed)


@pytest.mark.parametrize("after", [1.00004, 0.99996, 1.0])
def test_a_change_that_is_shown_as_zero_is_neither_gained_nor_lost(after: float) -> None:
    table = changes([tuned_run(after={"step": 9, "val/loss": 1.5, "guard/loss": after})])[-1]
    assert "+0.0000<small>the same" in table
    assert "class=bad" not in table


def test_gains_and_losses_are_in_the_first_table(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"kernel": {"name": "conv1d"}, "seed": 0}))
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss,grad_norm\n0,,2.0,\n9,1.4,,0.5\n9,,1.5,\n")
    (tmp_path / "tuned.json").write_text(json.dumps(TUNED))
    page = report.write(tmp_path).page.read_text(encoding="utf-8")
    table = page[page.index("<table"):page.index("</table>")]
    assert "-0.5000<small>gained" in table
    assert "+0.2500<small>lost" in table
    assert "&lt;mine&gt;.txt" in table
    assert "<mine>" not in page
    for part in ("rank 4", "alpha 8", "att.key, ffn.value", "1,234", "base.pth", "int8"):
        assert part in page[:page.index("<table")]
    assert page.index("b &amp; c") < page.index("Summary")
    assert page.count("<polyline") == 1, "only the validation loss has more than one step"


@pytest.mark.parametrize(("answer", "cell_text"), [(" \n ", "white space"), ("", "no text"), ("a b", "a b")])
def test_an_invisible_answer_is_not_an_empty_cell(answer: str, cell_text: str) -> None:
    sample = {"prompt": "User: a", "reference": "b", "before": "c", "after": answer}
    assert cell_text in "".join(answers([tuned_run(samples=[sample])]))


@pytest.mark.parametrize(("method", "expected_text"), [("full", "all weights of base.pth"),
                                                       ("state", "state before the first token")])
def test_other_ways_of_tuning(method: str, expected_text: str) -> None:
    description = what_was_tuned(tuned_run(tuned={"method": method, "base": "base.pth", "dtype": "float32", "trained": 5}))
    assert expected_text in description
    assert "rank" not in description


def test_a_damaged_description_of_tuning_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"kernel": {"name": "conv1d"}, "seed": 0}))
    (tmp_path / "tuned.json").write_text(json.dumps(TUNED | {"tuned": {"method": 3}}))
    heading, table = changes(read(tmp_path))
    assert "<h2>" in heading
    assert "-0.5000" in table


def test_there_are_no_empty_columns() -> None:
    unfinished = "".join(changes([tuned_run(after={})]))
    assert "after" not in unfinished
    assert "change" not in unfinished
    no_bytes = tuned_run(before={"val/loss": 2.0}, after={"val/loss": 1.0})
    assert "bits per byte" not in "".join(changes([no_bytes]))
    assert "general text" not in "".join(changes([no_bytes]))
    assert not any("<td></td>" in part for part in changes([no_bytes]))
    without_texts = tuned_run(samples=[{"prompt": "a", "reference": "b", "before": "c"}])
    assert "after</th>" not in "".join(answers([without_texts]))
    assert answers([tuned_run(samples=[])]) == changes([tuned_run(before={})]) == []


def test_runs_of_a_sweep_have_a_row_each() -> None:
    rows = "".join(changes([tuned_run(), Run("two", "conv1d", 1, tuned=TUNED), Run("untuned", "conv1d", 2)]))
    assert rows.count('<td class="text">two</td>') == 2
    assert "untuned" not in rows


@pytest.mark.parametrize("damaged", [{"tuned": {}}, {"tuned": LORA | {"modules": 3}}, {"before": {"val/loss": "x"}},
                                     {"samples": [{}]}, {"samples": [{"prompt": "a", "reference": "b", "after": [1]}]},
                                     {"guard": 3}, {"after": {"val/loss": float("nan")}}])
def test_damage_does_not_stop_the_report(tmp_path: Path, damaged: dict[str, Any]) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"kernel": {"name": "conv1d"}, "seed": 0}))
    (tmp_path / "tuned.json").write_text(json.dumps(TUNED | damaged))
    assert report.write(tmp_path).page.is_file()
    (tmp_path / "tuned.json").write_text("{")
    assert "tuned.json" in read(tmp_path)[0].damaged[0]
    assert report.write(tmp_path).page.is_file()
