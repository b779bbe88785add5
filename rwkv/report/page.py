"""Renders the report as an HTML page without scripts or external resources. Every text is escaped.

The style sheet is light or dark as the system prefers, and suits screens of any width, including a phone's.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of
from rwkv.report import svg, tuning, units
from rwkv.report.findings import BAD, NOTE, Finding
from rwkv.report.html_table import Column, cell, table, text
from rwkv.report.numbers import EARLY, REWARDS, WHEN, Comparison, Kernel, column, columns, learns_pairs, unit_of_loss
from rwkv.report.run_files import Curve, Run
from rwkv.report.verdict import speed_ratio, verdict

LABELS = {BAD: "<b>Problem:</b>", NOTE: "<b>Note:</b>"}
PARTS = (("forward_ms", "WKV forward"), ("backward_ms", "WKV backward"), ("rest_ms", "the rest"))        # parts of a step
MACHINE = ("cpu", "gpu", "threads", "system", "python", "torch", "taichi", "triton", "cuda-core", "cuda", "numpy",
           "commit", "date")
SETTINGS = ("model.n_layer", "model.n_embd", "model.ctx_len", "data.name", "data.tokenizer", "data.batch_size", "optim.lr",
            "trainer.max_steps", "trainer.precision")
SAMPLES_SHOWN = 3                        # the page shows the first sample and the latest samples
SPLITS = {"val": "held-out pairs", "train": "last logged step"}
RUN_COLUMNS = (("steps", "steps", units.count), ("val/loss", "val_loss", "{:.4f}".format),  # header, number, format
               ("train/loss", "train_loss", "{:.4f}".format), ("tokens/s", "tok_per_sec", units.count),
               ("largest difference", "difference", units.small_number), ("at step", "difference_step", units.count))


def render(folder: Path, comparison: Comparison, findings: Sequence[Finding]) -> str:
    title = f"{'Run' if comparison.is_single else 'Ablation'} {folder.resolve().name}"
    sentences = [f'<p class="verdict">{escape(sentence)}</p>' for sentence in verdict(comparison)]
    body = [f"<h1>{escape(title)}</h1>", _lead(comparison), *sentences, *map(_finding, findings),
            *tuning.changes(comparison.runs), *tuning.answers(comparison.runs), *_summary(comparison),
            *_reward_table(comparison), *_curves_section(comparison), *_published_table(comparison),
            *_error_table(comparison), *_runs(comparison), *_samples(comparison), *_setting(comparison), _method(comparison)]
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{STYLE}{svg.STYLE}{tuning.STYLE}</style></head>\n<body>\n"
            + "\n".join(body) + "\n</body></html>\n")


def _lead(comparison: Comparison) -> str:
    config = comparison.config
    keys = [key for key in SETTINGS if key in config]
    if config.get("init_from") and "data.tokenizer" in keys:
        keys.remove("data.tokenizer")    # the run used the tokenizer of init_from= instead
    settings = ", ".join(f"{key}\u00a0{config[key]}" for key in keys)
    n = config.get("trainer.val_tokens")
    if n is not None:
        settings += f"; validation of the first {format(n, ',') if isinstance(n, int) else n} tokens of its split"
    if comparison.is_single:
        subject = f"{comparison.runs[0].kernel}, seed {comparison.runs[0].seed}"
    else:
        seeds = len({run.seed for run in comparison.runs})
        kernels = len(comparison.kernels)
        subject = (f"{count_of(kernels, 'kernel')}, {count_of(seeds, 'seed')}, {count_of(len(comparison.runs), 'run')}, "
                   "each in its own process")
        if comparison.reference:
            subject += f"; compared with {comparison.reference}"
    return f'<p>{escape(subject)}.</p><p class="quiet">{escape(settings)}</p>'


def _finding(finding: Finding) -> str:
    label = LABELS.get(finding.kind, "")
    return f'<div class="finding {finding.kind}">{label}{escape(finding.text)}</div>'


def _summary(comparison: Comparison) -> list[str]:
    loss = f"val/loss, {unit_of_loss(comparison.runs)[0]}"
    compared = comparison.reference is not None
    ratio = Column(f"times {comparison.reference}",
                   lambda kernel: cell(speed_ratio(_finished_or_all(kernel), comparison) or None, "{:.2f}".format))
    columns = [Column("kernel", _kernel_cell if len(comparison.runs) > 1 else lambda kernel: cell(kernel.label)),
               _median_column(loss, "val_loss", "{:.4f}".format),
               *([Column("difference", lambda kernel: _difference_cell(_finished_or_all(kernel)))] if compared else []),
               _median_column("tokens/s", "tok_per_sec", units.count),
               *([ratio] if compared else []),
               *(_median_column(name, key, units.time) for key, name in (("step_ms", "step"), *PARTS)),
               _median_column("memory", "peak_mib", units.memory)]
    return ["<h2>Summary</h2>", table(columns, comparison.kernels, message_for=_missing_reason)]


def _kernel_cell(kernel: Kernel) -> str:
    finished = f"{len(kernel.only_finished().runs)} of {len(kernel.runs)} finished"
    return f"<td>{escape(kernel.label)}<small>{finished}</small></td>"


def _missing_reason(kernel: Kernel) -> str | None:
    """Returns the reason or the status of a kernel without numbers, or None for a kernel with numbers."""
    if any(kernel.numbers):
        return None
    return next((run.reason for run in kernel.runs if run.reason), None) or kernel.status()


def _finished_or_all(kernel: Kernel) -> Kernel:
    finished = kernel.only_finished()
    return finished if finished.runs else kernel


def _median_column(header: str, name: str, formatter: Callable[[float], str]) -> Column:
    """Returns a column with the median over a kernel's runs, and with the minimum and the maximum on a second line."""
    def median(kernel: Kernel) -> str:
        values = _finished_or_all(kernel).values(name)
        if not values:
            return ""
        low = formatter(min(values))
        high = formatter(max(values))
        same_unit = low.partition(" ")[2] == high.partition(" ")[2]
        least = low.partition(" ")[0] if same_unit else low
        limits = f"<small>{_non_breaking(least)} to {_non_breaking(high)}</small>" if low != high else ""
        return f"<td>{formatter(statistics.median(values))}{limits}</td>"

    return Column(header, median)


def _reward_table(comparison: Comparison) -> list[str]:
    rows = [(run, numbers, split) for kernel in comparison.kernels
            for run, numbers in zip(kernel.runs, kernel.numbers, strict=True) if learns_pairs(run)
            for split in SPLITS]
    if not rows:
        return []
    headers = ("margin", "accuracy", "reward of chosen", "reward of rejected")
    columns = [Column("run", lambda row: _run_name_cell(row[0])), Column("pairs", lambda row: text(SPLITS[row[2]]), words=True),
               *(Column(header, lambda row, name=name: cell(row[1].get(f"{row[2]}_{name}"), "{:.4f}".format))     # type: ignore[misc]
                 for header, name in zip(headers, REWARDS, strict=True))]
    return ["<h2>Preferences</h2>",
            '<p class="quiet">The reward of an answer is tune.beta times the logarithm of p / p0. Here, p is the answer\'s '
            "probability under the tuned model, and p0 is the answer's probability under the model of init_from=. In this "
            "report, a loss is the objective per pair.</p>",
            table(columns, rows)]


def _difference_cell(kernel: Kernel) -> str:
    """Returns a cell with the largest difference in any run, and with the largest in the first EARLY steps on a second line."""
    largest = kernel.values("difference")
    early = kernel.values("difference_early")
    if not largest or not early:
        return ""
    return (f"<td>{units.small_number(max(largest))}<small>{units.small_number(max(early))} in "
            f"{_non_breaking(f'{EARLY} steps')}</small></td>")


def _non_breaking(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _run_name_cell(run: Run) -> str:
    return f"<td>{escape(run.name).replace(',', ',<wbr>')}</td>"


def _error_table(comparison: Comparison) -> list[str]:
    kernels = [kernel for kernel in comparison.kernels if kernel.values("err_start_y")]
    if not kernels:
        return []
    rows = [(kernel, when) for kernel in kernels for when in WHEN if kernel.values(column("err", when, "y"))]
    columns = [Column("kernel", lambda row: cell(row[0].label)), Column("when", lambda row: cell(row[1])),
               *(Column(result, partial(_error_cell, result)) for result in comparison.results)]
    return ["<h2>Error of the operator on this run's own data</h2>",
            '<p class="quiet">The operator is compared with the float64 reference on the inputs and upstream gradients that '
            "the model had at the start and at the end of training. A cell has RMS error / RMS and, on a second line, the "
            f"largest absolute error, in the worst layer and run. {escape(_input_ranges_sentence(kernels[0].runs[0]))}</p>",
            table(columns, rows)]


def _error_cell(result: str, row: tuple[Kernel, str]) -> str:
    kernel, when = row
    errors = kernel.values(column("err", when, result))
    if not errors:
        return ""
    absolute = kernel.values(column("max", when, result))
    limit = min(run.tolerances(when).get(result, float("inf")) for run in kernel.runs)
    wrong = ' class="bad"' if max(errors) > limit else ""
    return f"<td{wrong}>{max(errors):.1e}<small>{max(absolute):.1e}</small></td>"


def _input_ranges_sentence(run: Run) -> str:
    bounds: dict[str, list[tuple[float, float]]] = {}
    for layer in run.layers("end"):
        for name, (low, high) in layer["ranges"].items():
            bounds.setdefault(name, []).append((low, high))
    if not bounds:
        return ""
    ranges = [f"{name} {min(low for low, _ in pairs):.3g} to {max(high for _, high in pairs):.3g}"
              for name, pairs in bounds.items()]
    return f"In {run.name}, at the end: {', '.join(ranges)}."


def _runs(comparison: Comparison) -> list[str]:
    if comparison.is_single:
        return []
    rows = [row for kernel in comparison.kernels for row in zip(kernel.runs, kernel.numbers, strict=True)]
    columns = [Column("run", lambda row: _run_name_cell(row[0])), Column("order", lambda row: cell(row[0].order)),
               Column("status", lambda row: cell(row[0].status, bad=row[0].status == "failed")),
               *(Column(header, lambda row, key=key, formatter=formatter: cell(row[1].get(key), formatter))      # type: ignore[misc]
                 for header, key, formatter in RUN_COLUMNS),
               Column("reason", lambda row: text(row[0].reason or None), words=True)]
    return ["<h2>Runs</h2>", table(columns, rows)]


def _curves_section(comparison: Comparison) -> list[str]:
    unit = " per ".join(unit_of_loss(comparison.runs))
    figures = [_curves(comparison, f"Training loss, {unit}", "training loss", _column("train/loss"), statistics.fmean),
               _curves(comparison, f"Difference from the loss of {comparison.reference} with the same seed, in nats",
                       "difference of the losses", lambda run: comparison.differences.get(run.name, {}), logarithmic=True),
               _curves(comparison, f"Validation loss, {unit}", "validation loss", _column("val/loss"), statistics.fmean,
                       marked=True),
               _curves(comparison, "Norm of the gradients, before clipping", "gradient norm", _column("grad_norm"),
                       logarithmic=True),
               _curves(comparison, "Tokens per second", "tokens per second", _column("tok_per_sec"), statistics.fmean),
               _times(comparison)]         # this low figure comes last, because it would leave a gap elsewhere
    if not any(figures):
        return []
    names = [f"<span>{svg.swatch(colour)}{escape(kernel.label)}</span>" for colour, kernel in enumerate(comparison.kernels)
             if any(kernel.numbers)]
    legend = f'<div class="legend">{"".join(names)}</div>' if len(names) > 1 else ""
    return ["<h2>Curves</h2>", legend, f'<div class="plots">{"".join(figures)}</div>']


def _figure(caption: str, figure: str, note: str = "") -> str:
    """Returns a figure with an HTML caption and a note, or "" if `figure` is empty."""
    paragraph = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{caption}</figcaption>{figure}{paragraph}</figure>" if figure else ""


def _curves(comparison: Comparison, caption: str, title: str, curve: Callable[[Run], Curve],
            merge: Callable[[Iterable[float]], float] = max, logarithmic: bool = False, marked: bool = False) -> str:
    """Returns a figure with a line for each run in the kernel's colour, and a note about kernels with overlapping lines."""
    series = [svg.Line(run.name, colour, list(curve(run).items()), merge, marked)
              for colour, kernel in enumerate(comparison.kernels) for run in kernel.runs]
    names = [kernel.label for kernel in comparison.kernels]
    overlaps = {tuple(dict.fromkeys(names[line.colour] for line in group))
                for group in svg.overlapping_lines(series, logarithmic)}
    notes = [f"{', '.join(labels[:-1])} and {labels[-1]} overlap: their dashes alternate."
             for labels in sorted(overlaps) if len(labels) > 1]
    return _figure(escape(caption), svg.lines(title, "step", series, logarithmic, names), " ".join(notes))


def _published_table(comparison: Comparison) -> list[str]:
    rows = [row for run in comparison.runs for row in _published_rows(run)]
    columns = [Column(header, lambda row, index=index: cell(row[index]))      # type: ignore[misc]
               for index, header in enumerate(("run", "steps", "published", "this run", "difference"))]
    return ["<h2>Training loss compared with the published run</h2>", table(columns, rows)] if rows else []


def _published_rows(run: Run) -> Iterator[tuple[str, ...]]:
    losses = run.curve("train/loss")
    all_published, every = run.published_losses
    for number, published in enumerate(all_published):
        first = number * every
        last = first + every
        within = [loss for step, loss in losses.items() if first < step <= last]
        if not within or last > max(losses):
            break
        mean = statistics.fmean(within)
        yield run.name, f"{first + 1} to {last}", f"{published:.4f}", f"{mean:.4f}", f"{mean - published:+.4f}"


def _column(name: str) -> Callable[[Run], Curve]:
    """Returns a function that returns a run's curve, or {} for a curve with only one point."""
    return lambda run: run.curve(name) if len(run.curve(name)) > 1 else {}


def _times(comparison: Comparison) -> str:
    rows = [(kernel.label, _step_parts(kernel, step)) for kernel in map(_finished_or_all, comparison.kernels)
            if (step := kernel.median("step_ms")) is not None]
    legend = " ".join(f'<span><span class="box b{n}"></span>{escape(name)}</span>' for n, (_, name) in enumerate(PARTS))
    return _figure(f"Time of a step: {legend}", svg.bars("time of a step", units.time, rows))


def _step_parts(kernel: Kernel, step: float) -> list[tuple[str, float]]:
    """Divides the time of a step in ms into PARTS. Medians do not add up, so the last part is the remainder."""
    *measured, (_, rest) = PARTS
    parts = [(name, kernel.median(key) or 0.0) for key, name in measured]
    return [*parts, (rest, max(0.0, step - sum(time for _, time in parts)))]


def _samples(comparison: Comparison) -> list[str]:
    if not comparison.is_single or not comparison.runs[0].samples:
        return []
    samples = comparison.runs[0].samples
    shown = samples if len(samples) <= SAMPLES_SHOWN else [samples[0], *samples[1 - SAMPLES_SHOWN:]]
    return ["<h2>Samples</h2>",
            *(f'<p class="quiet">step {escape(str(sample.get("step")))}</p>'
              f'<pre><b>{escape(str(sample.get("prompt", "")))}</b>{escape(str(sample.get("text", "")))}</pre>'
              for sample in shown)]


def _setting(comparison: Comparison) -> list[str]:
    measured = next((run for run in comparison.runs if run.machine), None)
    machine = {key: measured.machine[key] for key in MACHINE if key in measured.machine} if measured else {}
    return ["<h2>Machine and versions</h2>", _definition_list(machine) if machine else '<p class="quiet">not recorded</p>',
            f"<details><summary>Options of {'the run' if comparison.is_single else 'the first run'}</summary>"
            f"{_definition_list(comparison.config)}</details>"]


def _definition_list(values: JsonObject) -> str:
    return "<dl>" + "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in values.items()) + "</dl>"


def _method(comparison: Comparison) -> str:
    probed = next((run.measured for run in comparison.runs if run.measured.get("steps")), {})
    warm_up = probed.get("warm_up", 0)
    sentences = [f"Throughput is the median of the logged steps{f' after the first {warm_up}' if warm_up else ''}."]
    if not comparison.is_single:
        sentences.insert(0, "Numbers are medians over a kernel's runs. The minimum and the maximum are below each median.")
    if probed:
        sampled = count_of(len(probed["steps"]), "sampled step")
        sentences.append(f"Times are medians of {sampled} of each run after the same warm-up. A training step begins with the "
                         "arrival of the batch and ends with the optimiser's step.")
    if comparison.runs[0].order is not None:
        sentences.append("The runs were trained one after the other, each in its own process, in an order shuffled with "
                         "seed 0.")
    return (f'<h2>Method</h2><p class="quiet">{escape(" ".join(sentences))}</p>'
            f"<details><summary>Columns of report.csv</summary>{_definition_list(columns(comparison.results))}</details>")


COLOURS_OF_LINES = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --text: #1c1d1f; --quiet: #62666d; --rule: #dcdee2; --shadow: #c3c7cd;
  --bad: #b3261e; --bad-card: #fdecea; --note: #8a5a00; --note-card: #fff5e0; --good: #1b6e37; --good-card: #e8f5ec;
  --c0: #0b62b8; --c1: #d1570a; --c2: #1c8a4b; --c3: #b3268f; --c4: #6a4fc4;
  --c5: #9a7500; --c6: #00838f; --c7: #c62f3e; --c8: #5d6670; --c9: #7a4a26;
  --b0: #0b62b8; --b1: #5fa3e6; --b2: #c9ced6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141518; --card: #1d1f23; --text: #e8e9eb; --quiet: #a2a7af; --rule: #363a41; --shadow: #4d535d;
    --bad: #ff9d94; --bad-card: #3b1d1b; --note: #f0c468; --note-card: #352a12; --good: #82d69d; --good-card: #17301f;
    --c0: #6bb0ff; --c1: #ff9a57; --c2: #5fd08f; --c3: #f084d3; --c4: #b19cff;
    --c5: #e0bd4a; --c6: #4fd0db; --c7: #ff7f8b; --c8: #aab2bd; --c9: #d3a076;
    --b0: #6bb0ff; --b1: #2f6db0; --b2: #474c55;
  }
}
"""
COLOURS_OF_LINES += "\n".join([*(f".c{n} {{ stroke: var(--c{n}); }} .c{n} circle:not(.ring) {{ fill: var(--c{n}); }}"
                                 for n in range(svg.COLOURS)), ""])
STYLE = COLOURS_OF_LINES + """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 20px 16px 48px; background: var(--page); color: var(--text);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 32px 0 8px; }
p { margin: 6px 0; max-width: 100ch; }
.quiet { color: var(--quiet); }
.verdict { font-size: 1.12rem; font-weight: 600; margin: 10px 0; }
.finding { border-left: 4px solid; border-radius: 4px; padding: 8px 12px; margin: 8px 0; overflow-wrap: anywhere; }
.finding.bad { border-color: var(--bad); background: var(--bad-card); }
.finding.note { border-color: var(--note); background: var(--note-card); }
.finding.good { border-color: var(--good); background: var(--good-card); }
.finding b { margin-right: 4px; }
.bad b, td.bad { color: var(--bad); } .note b { color: var(--note); } .good b { color: var(--good); }
td.bad { font-weight: 600; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px;     /* shadows where more is to the side */
  background: linear-gradient(to right, var(--card) 24px, transparent) 0 0 / 48px 100% no-repeat local,
              linear-gradient(to left, var(--card) 24px, transparent) 100% 0 / 48px 100% no-repeat local,
              linear-gradient(to right, var(--shadow), transparent) 0 0 / 14px 100% no-repeat,
              linear-gradient(to left, var(--shadow), transparent) 100% 0 / 14px 100% no-repeat, var(--card); }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 5px 8px; text-align: right; vertical-align: top; white-space: nowrap; border-bottom: 1px solid var(--rule); }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; font-size: 0.86rem; color: var(--quiet); vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child, .text { text-align: left; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 10.5em; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 12em; }
figure p { margin: 4px 0 0; font-size: 0.86rem; }
td small { display: block; white-space: normal; color: var(--quiet); font-size: 0.76rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 14px;
         align-items: start; }
figure { margin: 0; padding: 10px 12px; border: 1px solid var(--rule); border-radius: 6px; background: var(--card); }
figcaption { font-size: 0.9rem; margin-bottom: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0; font-size: 0.9rem; }
.swatch { width: 26px; height: 10px; margin-right: 6px; vertical-align: middle; }
.box { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
pre { overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; padding: 10px 12px; border: 1px solid var(--rule);
      border-radius: 6px; background: var(--card); font-size: 0.86rem; }
summary { cursor: pointer; color: var(--quiet); margin: 8px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; font-size: 0.9rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
"""
STYLE += "".join(f".box.b{n} {{ background: var(--b{n}); }}\n" for n in range(3))
