"""Makes the section of a report on tuning, with the trained weights, and with losses and answers before and after."""

from collections.abc import Sequence
from functools import partial
from html import escape

from rwkv.io.lines import count_of
from rwkv.report.html_table import Column, cell, table, text
from rwkv.report.numbers import REWARDS
from rwkv.report.run_files import Run

SUBJECTS = {"val": "the task (held-out part)", "guard": "general text"}
MEASURES = {"loss": "nats per token", "bpb": "bits per byte"}
WHEN = ("before", "after")
UNITS_OF_PAIRS = {"val": ": the objective, per pair", "guard": ": nats per token"}
PLACES = 4                               # decimal places of losses
STYLE = """
.answers td { white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; min-width: 8em; }
"""


def changes(runs: Sequence[Run]) -> list[str]:
    """Returns a heading, a sentence on each tuned run, and the table of losses before and after tuning.

    Returns [] if no run was tuned.
    """
    tuned = [run for run in runs if run.tuned.get("before")]
    if not tuned:
        return []
    several = len(runs) > 1
    sentences = [f"<p>{escape(f'{run.name}: ' if several else '')}{escape(what_was_tuned(run))}</p>" for run in tuned
                 if "tuned" in run.tuned]
    rows = [(run, subject) for run in tuned for subject in SUBJECTS
            if any(f"{subject}/{measure}" in run.tuned.get(when, {}) for measure in MEASURES for when in WHEN)]
    measures = MEASURES | ({"loss": "loss"} if any(map(_learns_pairs, tuned)) else {})
    columns = [*([Column("run", lambda row: text(row[0].name), words=True)] if several else []),
               Column("text", _subject_cell, words=True)]
    for measure, words in measures.items():
        columns += [*(Column(f"{words}, {when}", partial(_loss_cell, measure, when)) for when in WHEN),
                    Column(f"{words}, change", partial(_change_cell, measure))]
    return ["<h2>What tuning gained and lost</h2>", *sentences, table(columns, rows)]


def answers(runs: Sequence[Run]) -> list[str]:
    """Returns a table of a single run's held-out prompts: the answer in the data, and the model's before and after tuning."""
    samples = runs[0].tuned.get("samples", []) if len(runs) == 1 else []
    headers = {"prompt": "prompt", "reference": "in the data", **{when: f"model, {when}" for when in WHEN}}
    columns = [Column(header, lambda sample, name=name: _text_cell(sample.get(name)), words=True)      # type: ignore[misc]
               for name, header in headers.items()]
    if not samples:
        return []
    return ["<h2>Held-out prompts, before and after</h2>",
            '<p class="quiet">Answers by the model are greedy (temperature 0), with at most trainer.sample_tokens tokens.</p>',
            table(columns, samples, "answers")]


def _text_cell(value: str | None) -> str:
    if value is None or str(value).strip():
        return text(value)
    return f'<td class="text"><small>{"white space" if value else "no text"}</small></td>'


def what_was_tuned(run: Run) -> str:
    """Returns a sentence on what a run trained: the kind and number of values, and the path and dtype of the base weights."""
    tuned = run.tuned["tuned"]
    values = count_of(tuned["trained"], "value")
    if tuned["method"] == "full":
        return f"Trained all weights of {tuned['base']}: {values}, in {tuned['dtype']}."
    weights = "the state before the first token"
    if tuned["method"] == "lora":
        modules = tuned.get("modules")
        names = ", ".join(map(str, modules)) if isinstance(modules, list) else modules
        weights = f"a LoRA of rank {tuned.get('rank')}, alpha {_number(tuned.get('alpha'))}, on {names}"
    return f"Trained {weights}: {values}. The weights of {tuned['base']} were frozen, in {tuned['dtype']}."


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _learns_pairs(run: Run) -> bool:
    """Returns True if the run learns from pairs. Unlike numbers.learns_pairs, this function reads only tuned.json."""
    return f"val/{REWARDS[0]}" in run.tuned.get("before", {})


def _subject_cell(row: tuple[Run, str]) -> str:
    run, subject = row
    label = f"{SUBJECTS[subject]} ({run.tuned.get('guard')})" if subject == "guard" else SUBJECTS[subject]
    return text(label + (UNITS_OF_PAIRS[subject] if _learns_pairs(run) else ""))


def _loss_cell(measure: str, when: str, row: tuple[Run, str]) -> str:
    run, subject = row
    return cell(run.tuned.get(when, {}).get(f"{subject}/{measure}"), f"{{:.{PLACES}f}}".format)


def _change_cell(measure: str, row: tuple[Run, str]) -> str:
    run, subject = row
    before, after = (run.tuned.get(when, {}).get(f"{subject}/{measure}") for when in WHEN)
    if before is None or after is None:
        return ""
    change = round(after - before, PLACES) + 0.0         # adding 0.0 turns -0.0 into 0.0, which is neither a gain nor a loss
    word = "gained" if change < 0 else "lost" if change > 0 else "the same"
    return f"<td{' class=bad' if change > 0 else ''}>{change:+.{PLACES}f}<small>{word}</small></td>"
