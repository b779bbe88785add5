"""What a run will do and need, printed before it begins; plan=true ends the program there.

Sizes come from formulas (rwkv/training/memory.py) and are printed before the model is built. The duration comes from two timed
training steps of it, which change nothing.
"""

import sys
import time
from collections.abc import Iterable, Iterator

import torch

from kernels.machine import threads
from kernels.machine.cpu import matrix_dtype, why_slow
from kernels.machine.memory import resident_memory
from rwkv.chat.names import Choice, choose_template
from rwkv.config import ORTHOGONAL, TrainConfig
from rwkv.data import documents
from rwkv.data.conversations import ConversationRows
from rwkv.data.pairs import rows_of
from rwkv.data.prepare import Corpus
from rwkv.distributed import log, rank, world_size
from rwkv.io.lines import labelled
from rwkv.model.base import generation, n_parameters
from rwkv.training.device import dtype_for
from rwkv.training.length import MANY, steps_per_epoch
from rwkv.training.memory import (
    checkpoint_bytes,
    estimate,
    free_disk,
    free_memory,
    n_checkpoints,
    n_trained,
    readable,
    with_options,
)
from rwkv.training.run.directory import Run, folder_apart
from rwkv.training.task import LanguageModel
from rwkv.training.tuning import defaults, guard

TIMED_STEPS = 2                          # after one that warms up
EXCESS = 0.1                             # warn if validation has more of the text than data.val_fraction plus this
MUCH = 1 / 3                             # of the time: more for validation is said
FORWARD = 1 / 3                          # forward pass as a fraction of a training step
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60))       # a duration is given in the first of which it has two
SECONDS = 60                             # below which it is given in whole seconds


def announce_needs(run: Run, kernel: str, device: torch.device, data: Corpus) -> None:
    """Prints on standard error what the run is and the memory and disk that it needs, before its model is built."""
    if rank() > 0:
        return
    if run.config.resume is not None and run.resume_from is None:
        log(_why_from_the_start(run))
    _show(_needs(run, kernel, device, data))


def announce_training(run: Run, device: torch.device, task: LanguageModel, data: Corpus) -> None:
    """Prints how long the run will take; with plan=true the program ends here."""
    if rank() == 0:
        _show([("training", _training(run.config, run.resume_step or 0, device, task, data)),
               *_many_epochs(run.config, data),
               *_warm_up_alone(run.config),
               *_validation(run.config, run.resume_step or 0, data),
               ("run", f"{run.out_dir}" + (f", continued from {run.resume_from}" if run.resume_from else ""))])
    if run.config.plan:
        sys.exit(0)


def _why_from_the_start(run: Run) -> str:
    if not run.exists:
        return "resume=auto: no run to continue, starting a new one"
    apart = folder_apart(run)
    return (f"WARNING    the run in {run.out_dir} ended before it saved a checkpoint: it begins again at step 0"
            + (f", and what it had written goes to {apart}" if apart else ""))


def _show(lines: Iterable[tuple[str, str]]) -> None:
    for subject, text in lines:
        log(labelled(subject, text, sys.stderr))


def _needs(run: Run, kernel: str, device: torch.device, data: Corpus) -> Iterator[tuple[str, str]]:
    config = run.config
    V = run.init_checkpoint.vocab_size if run.init_checkpoint else data.tokenizer.vocab_size
    programs = resident_memory() if device.type == "cpu" else 0       # before the data's pages, which are read below, count too
    yield "data", data.describe()
    lost = data.describe_lost()
    if lost:
        yield "WARNING", lost
    if data.val_share > config.data.val_fraction + EXCESS:
        yield "WARNING", (f"validation has {100 * data.val_share:.3g} % of the text, and data.val_fraction asks for "
                          f"{100 * config.data.val_fraction:g} %: whole documents are chosen, whatever their length; split the "
                          "longest ones, or change their order or names")
    if end := data.tokenizer.end_line():
        yield "texts", f"end with {end}"
    if config.trainer.tbptt:
        yield "streams", documents.describe(config, data)
    elif data.conversations:
        yield "rows", _rows(config, data).describe()
    if data.conversations:
        yield "chat", f"template {_template(run)}"
    yield "model", (f"{generation(config.model).NAME}, {config.model.n_layer} layers, {config.model.n_embd} wide, "
                    f"{n_parameters(config.model, V):,} parameters, vocabulary {V}")
    if run.init_checkpoint is not None and run.resume_from is None:
        yield "weights", f"from {run.init_checkpoint.path}, which gives the sizes and the tokenizer; the optimiser is new"
    if config.tune.method != "full":
        yield "tuning", (f"{config.tune.method}: {n_trained(config, V):,} trained values beside frozen weights in "
                         f"{config.tune.base}")
    if config.tune.prefers:
        yield "objective", _objective(config)
    if run.tuning_defaults:
        yield "rate", defaults.describe(config, run.tuning_defaults)
    if guard.is_compared(config):
        yield "guard", guard.describe(config)
    for line in run.saved_memory:
        yield "memory", line
    yield "blocks", _blocks(config, bool(data.conversations))
    yield "kernel", (f"{kernel} on {device.type}, precision {config.trainer.precision}, processes {world_size()}, "
                     f"{', '.join([f'threads per process {torch.get_num_threads()}', *threads.settings()])}")
    if slow := why_slow(dtype_for(config.trainer.precision), device):
        yield "WARNING", f"trainer.precision={config.trainer.precision}: {slow}; leave it out, or take auto"
    if config.optim.name in ORTHOGONAL:
        yield "optimiser", _orthogonal(config.optim.name, device)
    yield from _memory(config, V, device, programs)
    yield "disk", (f"{readable(checkpoint_bytes(config, V))} for {n_checkpoints(config.trainer.keep_last)} checkpoints; "
                   f"{readable(free_disk(run.out_dir))} is free")


def _orthogonal(name: str, device: torch.device) -> str:
    dtype = matrix_dtype(device)
    why = "" if dtype == torch.bfloat16 else ": this CPU has no instructions for products of bfloat16"
    return f"{name}, with directions computed in {str(dtype).removeprefix('torch.')}{why}"


def _template(run: Run) -> str:
    """The chat template of the conversations, and what it was chosen by."""
    given, base = run.config.data.template, run.init_checkpoint
    choice = Choice("world", "that of a new model")
    if base is not None:
        choice = choose_template(None, str(run.config.init_from), base.run)
    return f"{choice.template} ({choice.why})" if given in (None, choice.template) else str(given)


def _objective(config: TrainConfig) -> str:
    """What is learnt from pairs of answers, and where the reference comes from."""
    tune = config.tune
    smoothed = f", tune.label_smoothing={tune.label_smoothing:g}" if tune.objective == "dpo" else ""
    reference = ("computed once before the first step" if tune.method == "full" else
                 f"from a pass of its own in each step, without what tune={tune.method} trains")
    return (f"{tune.objective}, tune.beta={tune.beta:g}{smoothed}, tune.sft_weight={tune.sft_weight:g}; the log-probabilities "
            f"of the model of init_from= are {reference}")


def _blocks(config: TrainConfig, conversations: bool) -> str:
    """Which of its forms a block trains in; fused.can_fuse chooses it."""
    if config.trainer.compile:
        return "plain formulas: trainer.compile=true fuses them"
    reasons = {f"tune={config.tune.method} freezes weights": config.tune.method != "full",
               "rows of conversations are read text by text": conversations}
    why = next((reason for reason, holds in reasons.items() if holds), None)
    return "fused, with gradients of their own" + ("" if why is None else f", and what is between the products twice: {why}")


def _memory(config: TrainConfig, vocab_size: int, device: torch.device, programs: int) -> Iterator[tuple[str, str]]:
    """The memory of one process. `programs`: the bytes that it uses by now, its program and libraries; 0 on a GPU."""
    need = estimate(config, vocab_size, world_size())
    checkpointing = config.trainer.activation_checkpointing
    other = estimate(with_options(config, activation_checkpointing=not checkpointing), vocab_size, world_size())
    already = f", of which {readable(programs)} are in use already" if programs else ""
    yield "memory", (f"about {readable(programs + need.total)} for each process{already}; {readable(free_memory(device))} "
                     "is free")
    yield "", ((f"program and libraries {readable(programs)}, " if programs else "")
               + f"weights {readable(need.weights)}, gradients {readable(need.gradients)}, "
               + f"optimiser {readable(need.optimiser)}, loss {readable(need.loss)}"
               + (f", data workers {readable(need.workers)}" if need.workers else ""))
    yield "", (f"activations {readable(need.activations)}; {readable(other.activations)} with "
               f"trainer.activation_checkpointing={str(not checkpointing).lower()}")


def _training(config: TrainConfig, first_step: int, device: torch.device, task: LanguageModel, data: Corpus) -> str:
    steps = config.trainer.max_steps - first_step
    tokens = steps * config.tokens_per_step
    passes = steps / steps_per_epoch(config, data)
    read = f"{passes:.1f} epochs" if passes >= 1 else f"{100 * passes:.2g} % of the training data"
    said = f"of {config.tokens_per_step:,} tokens: {tokens:,} tokens, {_duration(config, steps, device, task, data)}"
    if not config.trainer.epochs:
        return f"{steps:,} steps {said}; {read}"
    whole = f"{config.trainer.epochs:g} epochs = {config.trainer.max_steps:,} steps"
    return f"{whole}, of which {steps:,} are left, {said}" if first_step else f"{whole} {said}"


def _many_epochs(config: TrainConfig, data: Corpus) -> Iterator[tuple[str, str]]:
    """A line where the answers of conversations are read so often that they are learnt by heart."""
    epochs = config.trainer.max_steps / steps_per_epoch(config, data)
    if data.conversations and epochs > MANY and not config.trainer.overfit_batches:
        yield "WARNING", (f"every conversation is read {epochs:,.1f} times, and beyond {MANY} times a model learns answers by "
                          "heart: take trainer.epochs=2, or more conversations")


def _warm_up_alone(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """A line where tuning ends before its learning rate has risen, as it does on a few conversations."""
    steps, rising = config.trainer.max_steps, config.optim.warmup_steps
    if config.init_from is not None and steps <= rising:
        yield "WARNING", (f"little is learnt: the learning rate rises over optim.warmup_steps={rising} steps, and the run has "
                          f"{steps}; take more data, a smaller data.batch_size, or a lower optim.warmup_steps")


def _rows(config: TrainConfig, data: Corpus) -> ConversationRows:
    assert data.conversations is not None
    return rows_of(data.conversations[0], config.model.ctx_len)


def _duration(config: TrainConfig, steps: int, device: torch.device, task: LanguageModel, data: Corpus) -> str:
    """The time of all steps and validations. Under fsdp it is not measured: one process may have no room for a whole model."""
    if config.trainer.strategy == "fsdp":
        return "duration unknown (not timed under fsdp)"
    seconds = _seconds_per_step(task, config, device, data) * sum(_equivalent_steps(config, steps, data))
    if seconds < SECONDS:
        return f"about {max(1, round(seconds))} s"
    name, unit = next(((name, unit) for name, unit in UNITS if seconds >= 2 * unit), UNITS[-1])
    return f"about {seconds / unit:.1f} {name}"


def _equivalent_steps(config: TrainConfig, steps: int, data: Corpus) -> tuple[float, float]:
    """The time of all steps and that of all validations, in training steps of one pass."""
    recomputed = 1 - 1 / max(1, config.trainer.tbptt)        # the fraction of segments whose forward pass runs twice
    reference = config.tune.prefers and config.tune.method != "full"             # a forward pass more
    validation = FORWARD * (1 + reference) * _validated_tokens(config, data) / config.tokens_per_step
    return steps * (1 + FORWARD * recomputed + FORWARD * reference), validation * _validations(config, steps)


def _validations(config: TrainConfig, steps: int) -> int:
    first = guard.is_compared(config) and steps == config.trainer.max_steps      # before training
    return -(-steps // config.trainer.val_every) + first


def _validated_tokens(config: TrainConfig, data: Corpus) -> int:
    """What one validation reads."""
    return min(data.sizes.val_tokens, config.trainer.val_tokens or data.sizes.val_tokens)


def validated_part(config: TrainConfig, data: Corpus) -> str | None:
    """Which part of the validation split trainer.val_tokens chooses, in words; None for all of it."""
    read, whole = _validated_tokens(config, data), data.sizes.val_tokens
    return f"the first {read:,} of {whole:,} tokens (trainer.val_tokens)" if read < whole else None


def _validation(config: TrainConfig, first_step: int, data: Corpus) -> Iterator[tuple[str, str]]:
    """A line where validation is of a part, or takes more than MUCH of the time."""
    steps = config.trainer.max_steps - first_step
    training, validation = _equivalent_steps(config, steps, data)
    share = validation / max(training + validation, 1e-9)
    part = validated_part(config, data)
    if part is None and share <= MUCH:
        return
    count = _validations(config, steps)
    line = f"{count:,} time{'s' * (count != 1)} {part or f'all {data.sizes.val_tokens:,} tokens'}"
    if share > MUCH:
        line += f", {100 * share:.0f} % of the time; less with a lower trainer.val_tokens or a higher trainer.val_every"
    yield "validation", line


def _seconds_per_step(task: LanguageModel, config: TrainConfig, device: torch.device, data: Corpus | None = None) -> float:
    """The time of an optimiser step's forward and backward passes. It compiles the kernels and changes nothing.

    Of conversations, the first rows are read, where only the answers are targets.
    """
    rows = config.data.batch_size // world_size()
    x = torch.zeros(rows, config.model.ctx_len, dtype=torch.long, device=device)
    batch: tuple[torch.Tensor, ...] = (x, x)
    if data is not None and data.conversations and not config.trainer.tbptt:
        batch = tuple(part.to(device) for part in _rows(config, data).__getitems__(list(range(rows)))[:3])
    dtype = dtype_for(config.trainer.precision)
    task.to(device)
    start = 0.0
    for step in range(1 + TIMED_STEPS):
        if step == 1:
            start = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = task.loss(*batch)
        loss.backward()
    loss.item()                          # waits for the device
    task.zero_grad(set_to_none=True)
    batches = config.tokens_per_step / (x.numel() * world_size())
    return (time.perf_counter() - start) / TIMED_STEPS * batches
