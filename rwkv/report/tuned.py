"""The part of a report on what tuning did: what was tuned of what, what it gained and lost, and answers before and after."""

from collections.abc import Iterable, Sequence
from html import escape

from rwkv.report.numbers import REWARDS
from rwkv.report.reading import Run

SUBJECTS = {"val": "the task, its held-out part", "guard": "general text"}
MEASURES = {"loss": "nats per token", "bpb": "bits per byte"}
WHEN = ("before", "after")
STYLE = """
.said td { white-space: pre-wrap; overflow-wrap: anywhere; text-align: left; min-width: 8em; }
"""


def changes(runs: Sequence[Run]) -> list[str]:
    """A heading, a sentence on each tuned run, and the table of losses before and after; nothing where no run was tuned."""
    tuned = [run for run in runs if run.tuned.get("before")]
    if not tuned:
        return []
    several = len(runs) > 1
    said = [f"<p>{escape(f'{run.name}: ' if several else '')}{escape(what_was_tuned(run))}</p>" for run in tuned
            if "tuned" in run.tuned]
    rows = [row for run in tuned for row in _rows(run, run.name if several else None)]
    measures = MEASURES | ({"loss": "loss"} if any(map(_learns_pairs, tuned)) else {})
    names = [f"{measure}, {when}" for measure in measures.values() for when in (*WHEN, "change")]
    return ["<h2>What tuning gained and lost</h2>", *said, _table([*(["run"] if several else []), "text", *names], rows)]


def answers(runs: Sequence[Run]) -> list[str]:
    """Held-out prompts of a single run, each with what follows it in the data and with the model's answers, side by side."""
    samples = runs[0].tuned.get("samples", []) if len(runs) == 1 else []
    rows = [[_text(sample.get(name)) for name in ("prompt", "reference", *WHEN)] for sample in samples]
    if not rows:
        return []
    return ["<h2>Held-out prompts, before and after</h2>",
            '<p class="quiet">Answers are the likeliest text (temperature 0), of trainer.sample_tokens at most.</p>',
            _table(["prompt", "in the data", *(f"model, {when}" for when in WHEN)], rows, "said")]


def what_was_tuned(run: Run) -> str:
    """A sentence: what was trained, how many values, of which file, and the dtype of what is frozen."""
    tuned = run.tuned["tuned"]
    values = f"{tuned['trained']:,} values"
    if tuned["method"] == "full":
        return f"Tuned were all weights of {tuned['base']}: {values}, in {tuned['dtype']}."
    what = "the state before the first token"
    if tuned["method"] == "lora":
        modules = tuned.get("modules")
        named = ", ".join(map(str, modules)) if isinstance(modules, list) else modules
        what = f"a LoRA of rank {tuned.get('rank')}, alpha {tuned.get('alpha')}, on {named}"
    return f"Tuned was {what}: {values} beside the frozen weights of {tuned['base']} in {tuned['dtype']}."


def _learns_pairs(run: Run) -> bool:
    """As numbers.learns_pairs, without metrics.csv."""
    return f"val/{REWARDS[0]}" in run.tuned.get("before", {})


def _rows(run: Run, name: str | None) -> list[list[str]]:
    """A row for each text: for each measure before, after and their difference; "" for what was not measured."""
    found = []
    of_pairs = _learns_pairs(run)
    units = {"val": ": the objective, per pair", "guard": ": nats per token"} if of_pairs else {"val": "", "guard": ""}
    for subject, said in SUBJECTS.items():
        of = f"{said} ({run.tuned.get('guard')})" if subject == "guard" else said
        of += units[subject]
        cells = [cell for measure in MEASURES for cell in _change(run, f"{subject}/{measure}")]
        if any(cells):
            found.append([*([_text(name)] if name else []), _text(of), *cells])
    return found


def _change(run: Run, metric: str) -> tuple[str, str, str]:
    before, after = (run.tuned.get(when, {}).get(metric) for when in WHEN)
    cells = [f"<td>{value:.4f}</td>" if value is not None else "" for value in (before, after)]
    if before is None or after is None:
        return cells[0], cells[1], ""
    change = after - before
    word = "gained" if change < 0 else "lost" if change > 0 else "the same"
    return cells[0], cells[1], f"<td{' class=bad' if change > 0 else ''}>{change:+.4f}<small>{word}</small></td>"


def _text(text: object) -> str:
    return "" if text is None else f'<td class="text">{escape(str(text))}</td>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """The columns in which some row has a cell. A cell is a <td>, or "" for none."""
    shown = [place for place in range(len(header)) if any(row[place] for row in rows)]
    head = "".join(f"<th>{escape(header[place])}</th>" for place in shown)
    body = "".join(f"<tr>{_cells(row[place] for place in shown)}</tr>" for row in rows)
    return f'<div class="scroll {style}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(cells: Iterable[str]) -> str:
    return "".join(cell or "<td></td>" for cell in cells)
