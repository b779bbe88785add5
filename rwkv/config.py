"""What can be configured, with types and defaults: one dataclass per group of configs/. Knows nothing of Hydra.

Each checks its own values when built, so that a wrong one is a ValueError with one sentence, before any work starts.
"""

import math
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class KernelConfig:
    name: str = "auto"


@dataclass
class ModelConfig:
    """n_att and n_ffn, the widths inside time and channel mixing, are n_embd and 4 n_embd where they are None."""

    n_layer: int = 4
    n_embd: int = 192
    n_att: int | None = None
    n_ffn: int | None = None
    ctx_len: int = 128

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_embd", "ctx_len"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        for name in ("n_att", "n_ffn"):
            _at_least(f"model.{name}", getattr(self, name) or 1, 1)


@dataclass
class DataConfig:
    """name: stdlib | text | jsonl | binidx | hf.  tokenizer: byte | char | bpe | world | FILE.json | FILE.txt.

    path: a file, a folder, a pattern such as books/**/*.txt, NAME of NAME.bin and NAME.idx, or a Hugging Face dataset.
    field: of the text in jsonl and hf; split: of an hf dataset. vocab_size is for bpe alone. tokenize_workers: shards
    tokenised at a time, 0 for one per core to 4. What val_fraction means for each kind of data: rwkv/tokens.py.
    sample_prompt: what the sample shown after training continues; empty for a text from its beginning.
    """

    name: str = "stdlib"
    path: str | None = None
    field: str = "text"
    split: str = "train"
    tokenizer: str = "bpe"
    vocab_size: int = 2048
    batch_size: int = 8
    cache_dir: str = ".cache"
    val_fraction: float = 0.1
    num_workers: int = 0
    tokenize_workers: int = 0
    sample_prompt: str = ""

    def __post_init__(self) -> None:
        _one_of("data.name", self.name, ("stdlib", "text", "jsonl", "binidx", "hf"))
        _at_least("data.batch_size", self.batch_size, 1)
        _at_least("data.vocab_size", self.vocab_size, 257)
        _at_least("data.num_workers", self.num_workers, 0)
        _at_least("data.tokenize_workers", self.tokenize_workers, 0)
        _between("data.val_fraction", self.val_fraction, 0.0, 1.0)


SCALED = ("time_mix", "time_decay", "time_first")        # parameters whose rate has a scale of its own
ORTHOGONAL = ("muon", "normuon")                         # optimisers that take the blocks' matrices for themselves


@dataclass
class OptimConfig:
    """lr falls to min_lr over the run, by `schedule`, after warmup_steps of a linear rise. grad_clip 0 is off.

    name: adamw | adam; they differ in how weight_decay, which matrices alone have, acts. muon and normuon: rwkv/muon.py moves
    the matrices inside of blocks but receptance, at matrix_lr, which rises and falls with lr, each at one step of
    matrix_every and that many times as far, and adamw everything else. The rates of the parameters called time_mix_*,
    time_decay and time_first are lr times a scale of their own: 1, 2 and 3 in RWKV-LM (RWKV-v4neo/src/model.py). l2_wrap,
    confidence_penalty: rwkv/loss.py; they are in the gradient, and in no loss.
    """

    name: str = "adamw"
    lr: float = 3e-3
    min_lr: float = 1.5e-4
    schedule: str = "cosine"
    warmup_steps: int = 20
    matrix_lr: float = 0.02
    matrix_momentum: float = 0.95
    matrix_iterations: int = 3
    matrix_every: int = 1
    time_mix_lr_scale: float = 1.0
    time_decay_lr_scale: float = 2.0
    time_first_lr_scale: float = 3.0
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    l2_wrap: float = 1e-4
    confidence_penalty: float = 0.0

    def __post_init__(self) -> None:
        _one_of("optim.name", self.name, ("adamw", "adam", *ORTHOGONAL))
        _one_of("optim.schedule", self.schedule, ("cosine", "linear", "exponential", "constant"))
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        for name in ("weight_decay", "grad_clip", "l2_wrap", "confidence_penalty", "eps", "matrix_lr",
                     *(f"{name}_lr_scale" for name in SCALED)):
            _at_least(f"optim.{name}", getattr(self, name), 0)
        if not 0 <= self.matrix_momentum < 1:
            raise ValueError(f"optim.matrix_momentum is from 0 to below 1; got {self.matrix_momentum}")
        if self.matrix_iterations not in (2, 3):
            raise ValueError(f"optim.matrix_iterations is 2, for less time, or 3; got {self.matrix_iterations}")
        _at_least("optim.matrix_every", self.matrix_every, 1)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas are two numbers from 0 to below 1; got {list(self.betas)}")
        if not 0 < self.min_lr <= self.lr < math.inf:
            raise ValueError("optim.lr must be finite, and optim.min_lr above 0 and at most optim.lr; "
                             f"got {self.lr} and {self.min_lr}")


@dataclass
class TrainerConfig:
    """Steps are optimiser steps; max_tokens stands in the place of max_steps, in the tokens that all steps read. malloc: tuned
    keeps large freed blocks in the process (glibc), default does not.

    strategy: single | ddp | fsdp, over devices processes on each of num_nodes machines (0: one per GPU); data.batch_size is
    what all of them read together. keep_last: the number of checkpoints kept beside the best. activation_checkpointing: a
    block's activations are computed anew in its backward pass. compile: blocks go through torch.compile. tbptt: segments of
    ctx_len tokens in a step, gradients through the state between them, which is carried on through each document; 0 for
    windows, each from an empty state.

    probe: the kernel's share of the time and its errors on the run's own numbers are measured (rwkv/probe.py); sweeps do so.
    sample_every: steps between two texts of sample_tokens that continue data.sample_prompt, in samples.jsonl: val_every where
    it is null, 0 for none. grad_norms: of each part of the model, before clipping, among the metrics of every log_every steps.
    """

    accelerator: str = "auto"
    strategy: str = "single"
    devices: int = 1
    num_nodes: int = 1
    max_steps: int = 1000
    max_tokens: float | None = None      # so that 1e9 can be written
    val_every: int = 500
    checkpoint_every: int = 500
    log_every: int = 10
    precision: str = "32-true"
    accumulate: int = 1
    tbptt: int = 0
    keep_last: int = 2
    activation_checkpointing: bool = False
    compile: bool = False
    overfit_batches: int = 0
    malloc: str = "tuned"
    sample_tokens: int = 200
    sample_every: int | None = None
    grad_norms: bool = False
    probe: bool = False

    def __post_init__(self) -> None:
        _one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        _one_of("trainer.strategy", self.strategy, ("single", "ddp", "fsdp"))
        _one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed", "fp16-mixed", "auto"))
        _one_of("trainer.malloc", self.malloc, ("tuned", "default"))
        for name in ("max_steps", "val_every", "checkpoint_every", "log_every", "accumulate", "keep_last", "num_nodes"):
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("overfit_batches", "sample_tokens", "devices", "tbptt"):
            _at_least(f"trainer.{name}", getattr(self, name), 0)
        _at_least("trainer.max_tokens", 1 if self.max_tokens is None else self.max_tokens, 1)
        _at_least("trainer.sample_every", self.sample_every or 0, 0)
        if self.strategy == "single" and (self.devices, self.num_nodes) != (1, 1):
            raise ValueError("trainer.devices and trainer.num_nodes are for trainer=ddp and trainer=fsdp")
        if self.strategy == "fsdp" and self.tbptt:
            raise ValueError("trainer=fsdp gathers a block's weights for one pass through it, and trainer.tbptt makes one for "
                             "each segment: use trainer=ddp")
        if self.strategy == "fsdp" and (self.grad_norms or self.sample_every):
            raise ValueError("trainer=fsdp gives each process a share of the weights, and trainer.grad_norms and "
                             "trainer.sample_every need them whole: leave these out")


@dataclass
class LoggerConfig:
    """name: wandb | csv | none. The CSV file is always written, unless none."""

    name: str = "wandb"
    project: str = "timemix"
    group: str | None = None
    run_name: str | None = None

    def __post_init__(self) -> None:
        _one_of("logger.name", self.name, ("wandb", "csv", "none"))


@dataclass
class TrainConfig:
    """resume: auto, or the run to continue. init_from: a checkpoint of any format, for its weights, sizes and tokenizer.

    plan: say what would happen, and end there.
    """

    kernel: KernelConfig = field(default_factory=KernelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: int = 0
    out_dir: str | None = None
    resume: str | None = None
    init_from: str | None = None
    plan: bool = False

    def __post_init__(self) -> None:
        whole_number("seed", self.seed, most=2**32 - 1)          # which NumPy's generator takes
        if self.trainer.strategy == "fsdp" and (self.optim.name in ORTHOGONAL or self.optim.weight_decay):
            raise ValueError(f"optim.name={' or '.join(ORTHOGONAL)} and optim.weight_decay are for matrices, and with "
                             "trainer=fsdp each process has a share of them without their shape: use optim.name=adamw "
                             "optim.weight_decay=0, or trainer=ddp")

    @property
    def tokens_per_step(self) -> int:
        """What all processes read for one optimiser step."""
        segments = max(1, self.trainer.tbptt)
        return self.data.batch_size * self.model.ctx_len * segments * self.trainer.accumulate


@dataclass
class GenerateConfig:
    """checkpoint: a file or a run's directory. tokenizer: byte | world | FILE.json | FILE.txt, where it carries none.

    prompts: a file with a prompt on each line; num_samples of each, with seeds from `seed` on, batch_size texts at a time.
    stop and logit_bias=ID:NUMBER may be given several times. state: a file that save_state= wrote. out: a file for the
    texts as lines of JSON, with the log-probabilities of the `logprobs` likeliest tokens. The options of choosing a token:
    rwkv/sampling.py.
    """

    checkpoint: str = "runs/latest"
    tokenizer: str | None = None
    prompt: str | None = None
    prompts: str | None = None
    kernel: KernelConfig = field(default_factory=KernelConfig)
    device: str = "auto"
    dtype: str = "float32"
    max_new_tokens: int = 200
    stop: list[str] = field(default_factory=list)
    stop_tokens: list[int] = field(default_factory=list)
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)
    order: str = "hf"
    logprobs: int = 0
    seed: int = 0
    num_samples: int = 1
    batch_size: int = 16
    state: str | None = None
    save_state: str | None = None
    stream: bool = True
    out: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("float32", "bfloat16", "int8"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        for name in ("max_new_tokens", "seed", "logprobs"):
            _at_least(name, getattr(self, name), 0)
        for name in ("num_samples", "batch_size"):
            _at_least(name, getattr(self, name), 1)


@dataclass
class EvaluateDataConfig:
    path: str | None = None


@dataclass
class EvaluateConfig:
    """checkpoint: a file or a run's directory. tokenizer: as in GenerateConfig. data.path: a text, or FILE.jsonl of texts.

    chunk_len: tokens per pass. batch_size: texts per pass (FILE.jsonl alone). start: text to stand before what is predicted,
    in the place of the end-of-text token. out: a file for the result.
    """

    checkpoint: str = "runs/latest"
    tokenizer: str | None = None
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    device: str = "auto"
    dtype: str = "float32"
    chunk_len: int = 1024
    batch_size: int = 16
    start: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("float32", "bfloat16", "int8"))
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _at_least("chunk_len", self.chunk_len, 1)
        _at_least("batch_size", self.batch_size, 1)


def whole_number(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """`value` as an int. Raises ValueError, with the option's name, where it is not a whole number from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is a whole number; got {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {f'{least} or more' if most == math.inf else f'from {least} to {most}'}; got {number}")
    return number


def whole_numbers(name: str, values: Iterable[Any], most: float = math.inf) -> tuple[int, ...]:
    """`values` as ints from 0 to `most`. Raises ValueError, with the option's name, for anything else."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is a list of whole numbers; got {values!r}")
    return tuple(whole_number(name, value, most=most) for value in values)


def strings(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """`values`, which are strings. Raises ValueError, with the option's name, for anything else, a single string included."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is a list of strings; got one {type(values).__name__}: put it into a list")
    values = tuple(values)
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{name} holds strings alone; got {value!r}")
    return values


def _one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}; got {value!r}")


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} is at least {least}; got {value}")
    if value == math.inf:
        raise ValueError(f"{name} is a finite number; got {value}")


def _between(name: str, value: float, low: float, high: float, closed: bool = False) -> None:
    if not (low < value < high or (closed and value == high)):
        raise ValueError(f"{name} lies above {low:g} and {'at most' if closed else 'below'} {high:g}; got {value:g}")
