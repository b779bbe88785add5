"""Prints the plan of a run before training starts: the settings, and the memory, disk and time that the run needs.

Sizes come from formulas (rwkv/training/memory/). The sizes are printed before the model is built, and before a run that does
not fit is refused. The duration comes from two timed training steps, which do not change the model. If the timed steps would
take longer than PATIENCE, the duration is estimated from the speed of a matrix product, except with plan=timed.
"""

import math
import os
from collections.abc import Iterator

import torch

from kernels.machine import threads
from kernels.machine.cpu import matrix_dtype, why_slow
from kernels.machine.memory import resident_memory
from rwkv.chat.names import Choice, choose_template
from rwkv.checkpoint.tuned import is_exact, surviving_fraction
from rwkv.config import ORTHOGONAL, OptimConfig, TrainConfig, TrainerConfig, TuneConfig
from rwkv.data import tbptt_segments
from rwkv.data.documents import separators
from rwkv.data.pairs import rows_of
from rwkv.data.prepare import Corpus
from rwkv.distributed import log, rank, world_size
from rwkv.io.lines import count_of
from rwkv.model.base import generation, n_parameters
from rwkv.model.fused import backend as fused_backend
from rwkv.training import graphs
from rwkv.training.device import dtype_for, why_precision
from rwkv.training.memory.capacity import Needs, free_disk
from rwkv.training.memory.estimate import checkpoint_bytes, format_bytes, n_checkpoints, n_trained
from rwkv.training.memory.lines import memory_lines
from rwkv.training.plan.duration import equivalent_steps, estimated_seconds, format_duration, print_lines, seconds_per_step
from rwkv.training.run.directory import Run, backup_folder
from rwkv.training.run.length import MAX_EPOCHS, steps_per_epoch
from rwkv.training.task import LanguageModel
from rwkv.training.tuning import guard
from rwkv.training.tuning.overlap import warn_of_split

EXCESS = 0.1                             # a validation split that exceeds data.val_fraction by more than this gets a warning
LONG_VALIDATION = 1 / 3                  # the plan mentions validation that takes more than this fraction of the time


def announce_needs(run: Run, needs: Needs, kernel: str, kernel_error: str | None, data: Corpus, timed: bool) -> None:
    """Prints the run's settings and the memory and disk that the run needs, before the model is built.

    Args:
        kernel: the kernel's name. If kernel=auto chose the kernel, the text also gives the reason.
        kernel_error: the message that kernel_check.check returned.
        timed: the result of is_timed.
    """
    if rank() > 0:
        return
    if run.config.resume is not None and run.resume_from is None:
        log(_why_from_the_start(run))
    print_lines(_needs(run, needs, kernel, kernel_error, data))
    if timed or not run.config.only_plans:
        print_lines([("building", f"the model{', and timing its first steps' if timed else ''}")])


def announce_training(run: Run, device: torch.device, data: Corpus, task: LanguageModel | None = None) -> None:
    """Prints how long the run will take. `task` has the model whose steps are timed. None means a rough estimate."""
    if rank() == 0:
        print_lines(_training(run, device, task, data))


def _why_from_the_start(run: Run) -> str:
    if not run.exists:
        return "resume=auto: there is no run to continue, so a new run starts"
    backup = backup_folder(run)
    return (f"WARNING    the run in {run.out_dir} ended before the first checkpoint and restarts at step 0"
            + (f"; the earlier output moves to {backup}" if backup else ""))


def _needs(run: Run, needs: Needs, kernel: str, kernel_error: str | None, data: Corpus) -> Iterator[tuple[str, str]]:
    config, V, device, _ = needs
    programs = resident_memory() if device.type == "cpu" else 0       # the code below will add pages of the data
    yield from _data(run, data)
    yield from _model(run, V)
    yield from _computation(config, kernel, kernel_error, device, bool(data.conversations))
    yield from memory_lines(needs, programs)
    checkpoints = count_of(n_checkpoints(config.trainer.keep_last), "checkpoint")
    yield "disk", (f"{format_bytes(checkpoint_bytes(config, V))} for {checkpoints}; "
                   f"{format_bytes(free_disk(run.out_dir))} is free")


def _data(run: Run, data: Corpus) -> Iterator[tuple[str, str]]:
    config = run.config
    yield "data", data.describe()
    lost = data.describe_lost()
    if lost:
        yield "WARNING", lost
    yield from _sources(config, data)
    yield from _documents(config, data)
    if run.resume_from is None and (overlap := warn_of_split(config.data, data.sha256, run.init_checkpoint)):
        yield "WARNING", overlap
    if data.val_share > config.data.val_fraction + EXCESS:
        unit = "whole documents, with all their copies" if data.copies else "whole documents"
        yield "WARNING", (f"validation has {100 * data.val_share:.3g} % of the text, but data.val_fraction is "
                          f"{100 * config.data.val_fraction:g} %, because the split is by {unit}. Divide the longest "
                          "documents, or change the documents' order or names")
    if end := data.tokenizer.end_line():
        yield "sequences", f"end with {end}"
    if config.trainer.tbptt:
        streams = config.data.batch_size * config.trainer.accumulate
        yield "streams", tbptt_segments.describe(data, config.model.ctx_len, streams, config.trainer.tbptt)
    elif data.conversations:
        yield "rows", rows_of(data.conversations[0], config.model.ctx_len).describe()
    if data.conversations:
        yield "chat", f"template {_template(run)}"


def _model(run: Run, V: int) -> Iterator[tuple[str, str]]:
    config = run.config
    yield "model", (f"{generation(config.model).NAME}, {count_of(config.model.n_layer, 'layer')}, {config.model.n_embd} wide, "
                    f"{n_parameters(config.model, V):,} parameters, vocabulary {V}")
    if run.init_checkpoint is not None and run.resume_from is None:
        yield "weights", f"weights, sizes and tokenizer come from {run.init_checkpoint.path}; the optimiser state is new"
        if run.init_checkpoint.time_states:
            yield "state", run.init_checkpoint.state_note or f"tuned state of {run.init_checkpoint.path}"
    if config.tune.method != "full":
        yield from _tuning(run, n_trained(config, V))
    if config.tune.prefers:
        yield "objective", _objective(config.tune)
    if guard.is_compared(config):
        yield "guard", guard.describe(config)
    yield from run.notes


def _computation(config: TrainConfig, kernel: str, kernel_error: str | None, device: torch.device,
                 conversations: bool) -> Iterator[tuple[str, str]]:
    yield "blocks", _blocks(config.trainer.compile, config.tune.method, conversations, device.type)
    if graphs_line := graphs.describe(config, device, kernel.partition(" ")[0]):
        yield "graphs", graphs_line
    yield "kernel", (f"{kernel} on {device.type}, precision {config.trainer.precision}, processes {world_size()}, "
                     f"{', '.join([f'threads per process {torch.get_num_threads()}', *threads.settings()])}")
    if kernel_error:
        yield "WARNING", kernel_error
    if device.type == "cpu" and world_size() == 1 and (hint := _thread_hint()):
        yield "hint", hint
    if slow := why_slow(dtype_for(config.trainer.precision), device):
        yield "WARNING", f"trainer.precision={config.trainer.precision}: {slow}. Omit trainer.precision=, or use auto"
    if why := why_precision(str(config.trainer.precision), device):
        yield "precision", f"{config.trainer.precision}: {why}"
    if config.optim.name in ORTHOGONAL and config.tune.method != "full":
        yield "optimiser", (f"AdamW for everything, because tune={config.tune.method} freezes the matrices whose updates "
                            f"{config.optim.name} would orthogonalise")
    elif config.optim.name in ORTHOGONAL:
        dtype = matrix_dtype(device)
        why = "" if dtype == torch.bfloat16 else ": this CPU has no bfloat16 instructions"
        yield "optimiser", f"{config.optim.name}, orthogonalised in {str(dtype).removeprefix('torch.')}{why}"


def _sources(config: TrainConfig, data: Corpus) -> Iterator[tuple[str, str]]:
    total = config.trainer.max_steps * config.tokens_per_step
    for part in data.parts:
        stream = part.corpus.stream
        tokens = part.corpus.sizes.train_tokens if stream is None else stream.tokens
        epochs = total * part.share / tokens if tokens else 0
        documents = count_of(len(part.corpus.train.starts) + len(part.corpus.val.starts), "document")
        split = f"{documents}, {tokens:,} training and " if stream is None else ""
        passes = f", {'' if stream is None else 'about '}{count_of(float(f'{epochs:.3g}'), 'epoch')}" if tokens else ""
        yield "source", (f"{part.name}: {part.corpus.source}; {split}{part.corpus.sizes.val_tokens:,} validation tokens; "
                         f"{100 * part.share:.3g} % of the training tokens{passes}")
        if epochs > MAX_EPOCHS:
            yield "WARNING", (f"{part.name} is used for {epochs:,.1f} epochs, but a model learns little after {MAX_EPOCHS}: "
                              "give this source a smaller weight or more text")


def _documents(config: TrainConfig, data: Corpus) -> Iterator[tuple[str, str]]:
    if data.copies:
        kind = "document"
        if data.conversations:
            kind = "pair" if data.conversations[0].paired else "conversation"
        number = (len(data.train.starts) + len(data.val.starts)) // (2 if kind == "pair" else 1)
        if data.copies == number - 1:
            yield "WARNING", f"all {kind}s have the same text, so val/loss measures memorisation"
        else:
            yield "copies", f"{count_of(data.copies, kind)} repeat others; the copies of a {kind} are all in the same split"
    if data.repeated > EXCESS:
        yield "WARNING", (f"{100 * data.repeated:.0f} % of the validation text, line by line, is in the training text too, so "
                          "val/loss measures memorisation. Remove the copies"
                          + ("" if config.data.separator else ", or set data.separator= to the text between documents"))
    if data.marks:
        yield "WARNING", separators.describe(data.marks, config.data.name in ("text", "jsonl", "hf"))


def _thread_hint() -> str | None:
    others = threads.competing_threads()
    cores = os.cpu_count() or 1
    free = max(1, cores - others)
    if others == 0 or torch.get_num_threads() <= free:
        return None
    return f"other programs use {min(others, cores)} of {count_of(cores, 'core')}: try OMP_NUM_THREADS={free}"


def _template(run: Run) -> str:
    option = run.config.data.template
    choice = Choice("world", "the default of a new model")
    if run.init_checkpoint is not None:
        choice = choose_template(None, str(run.config.init_from), run.init_checkpoint.run)
    return f"{choice.template} ({choice.why})" if option in (None, choice.template) else str(option)


def _tuning(run: Run, trained: int) -> Iterator[tuple[str, str]]:
    tune, base = run.config.tune, run.init_checkpoint
    line = f"{tune.method}: {trained:,} trained values with frozen weights in {tune.base}"
    if base is None or tune.base == "float32" or is_exact(base.weights.stored, base.config, tune.base):
        yield "tuning", line
        return
    yield "tuning", (f"{line}; losses are measured with the rounded weights, but programs load the original weights from "
                     f"{run.config.init_from}")
    if (remaining := surviving_fraction(base.weights.stored, base.unadapted, tune.base)) < 1:
        yield "WARNING", (f"tune.base={tune.base} also rounds the adapters of {run.config.init_from} and keeps only "
                          f"{remaining:.0%} of what the adapters have learnt. tune.base=float32 keeps everything")


def _objective(tune: TuneConfig) -> str:
    smoothed = f", tune.label_smoothing={tune.label_smoothing:g}" if tune.objective == "dpo" else ""
    reference = ("computed once before the first step" if tune.method == "full" else
                 "from an extra forward pass in each step, with the frozen weights alone")
    return (f"{tune.objective}, tune.beta={tune.beta:g}{smoothed}, tune.sft_weight={tune.sft_weight:g}; reference "
            f"log-probabilities {reference}")


def _blocks(compiled: bool, method: str, conversations: bool, device: str) -> str:
    """Returns a line on how training computes blocks, as fused.can_fuse and fused.backend choose."""
    if compiled:
        return "plain formulas: trainer.compile=true fuses them"
    why = ""
    if method != "full":
        why = f"tune={method} freezes the weights"
    elif conversations:
        why = "conversations are packed into rows"
    recomputed = f"; recomputes activations, because {why}" if why else ""
    return f"fused {fused_backend.describe(device)}, with a custom backward pass{recomputed}"


def _training(run: Run, device: torch.device, task: LanguageModel | None, data: Corpus) -> Iterator[tuple[str, str]]:
    config = run.config
    trainer = config.trainer
    first_step = run.resume_step or 0
    steps = trainer.max_steps - first_step
    per_epoch = steps_per_epoch(config, data)
    val_tokens = min(data.sizes.val_tokens, trainer.val_tokens or data.sizes.val_tokens)
    # A tuned run also validates before the first step
    validations = -(-steps // trainer.val_every) + (guard.is_compared(config) and not first_step)
    training, validation = equivalent_steps(config, steps, val_tokens * validations)
    if task is not None:
        duration = format_duration((training + validation) * seconds_per_step(task, config, device, data.conversations))
    elif trainer.strategy == "fsdp":
        duration = "of unknown duration (with fsdp steps are not timed)"
    else:
        seconds = estimated_seconds(config, run.vocab_size(data.tokenizer), device)
        estimated = format_duration((training + validation) * seconds).removeprefix("about ")
        duration = f"very roughly {estimated} (from the speed of a matrix product; plan=timed measures steps)"

    passes = steps / per_epoch
    about = "about " if data.streams else ""
    part = count_of(float(f"{passes:.1f}"), "epoch") if passes >= 1 else f"{about}{100 * passes:.2g} % of the training data"
    if per_epoch == math.inf:
        part = "of a stream of unknown length"
    yield "training", (f"{_length(trainer, steps)} of {count_of(config.tokens_per_step, 'token')}: "
                       f"{count_of(steps * config.tokens_per_step, 'token')}, {duration}"
                       + ("" if trainer.epochs else f"; {part}"))
    yield from _length_warnings(config, trainer.max_steps / per_epoch, bool(data.conversations))
    time_share = validation / max(training + validation, 1e-9)
    yield from _validation(trainer.val_tokens, data.sizes.val_tokens, validations, time_share)
    yield "run", f"{run.out_dir}" + (f", continued from {run.resume_from}" if run.resume_from else "")


def _length(trainer: TrainerConfig, steps: int) -> str:
    if not trainer.epochs:
        return count_of(steps, "step")
    total = f"{count_of(trainer.epochs, 'epoch')}, {count_of(trainer.max_steps, 'step')}"
    return total if steps == trainer.max_steps else f"{total}, of which {steps:,} are left,"


def _length_warnings(config: TrainConfig, epochs: float, conversations: bool) -> Iterator[tuple[str, str]]:
    steps = config.trainer.max_steps
    warmup = config.optim.warmup_steps
    if conversations and epochs > MAX_EPOCHS and not config.trainer.overfit_batches:
        yield "WARNING", (f"training runs for {epochs:,.1f} epochs, but a model memorises answers after {MAX_EPOCHS}: use "
                          "trainer.epochs=2 or more conversations")
    if config.init_from is None and steps <= warmup and warmup > OptimConfig.warmup_steps:       # the default suits a trial run
        yield "WARNING", (f"the learning rate never reaches optim.lr, because the run has only {count_of(steps, 'step')} and "
                          f"optim.warmup_steps={warmup}: lower optim.warmup_steps= or train longer")
    if config.init_from is not None and steps <= warmup:
        yield "WARNING", (f"the model will learn little, because the run has {count_of(steps, 'step')} and "
                          f"optim.warmup_steps={warmup}: use more data, a smaller data.batch_size= or lower "
                          "optim.warmup_steps=")


def validated_part(val_tokens: int | None, whole: int) -> str | None:
    """Describes the part of the validation split that trainer.val_tokens selects. Returns None if the whole split is used."""
    if val_tokens is None or val_tokens >= whole:
        return None
    return f"the first {val_tokens:,} of {count_of(whole, 'token')} (trainer.val_tokens)"


def _validation(val_tokens: int | None, whole: int, times: int, time_share: float) -> Iterator[tuple[str, str]]:
    part = validated_part(val_tokens, whole)
    if part is None and time_share <= LONG_VALIDATION:
        return
    line = f"{'once' if times == 1 else f'{times:,} times'} {part or 'all ' + count_of(whole, 'token')}"
    if time_share > LONG_VALIDATION:
        line += f", {100 * time_share:.0f} % of the time; less with a lower trainer.val_tokens or a higher trainer.val_every"
    yield "validation", line
