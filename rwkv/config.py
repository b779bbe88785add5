"""The options of all programs, with type, default, help and allowed values: a dataclass per group of configs.

A dataclass checks its values when it is built and raises UserError with the option's name. rwkv/cli/help.py prints the help
texts. No Hydra here.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from rwkv.errors import UserError

SCALED = ("time_mix", "time_decay", "time_first")        # each has a learning-rate factor, optim.NAME_lr_scale
GENERATIONS = tuple(sorted(path.stem for path in (Path(__file__).parent / "model").glob("rwkv*.py") if path.stem[4:].isdigit()))
SOURCES = tuple(sorted(path.stem for path in (Path(__file__).parent / "data" / "sources").glob("[!_]*.py")))      # of text
TOKENS = ("binidx", "datatrove")         # kinds of data that are token ids already
STREAMED = ("jsonl", "hf")               # kinds of data that data.streaming reads
ORTHOGONAL = ("muon", "normuon")                         # optimisers that orthogonalise the updates of the blocks' matrices
EIGHT_BITS = "adamw8bit"                 # the optimiser with 8-bit moments
GPUS = ("a100", "h100", "h200", "rtx3060", "rtx4090", "rtx5090")         # known to plan=
LENGTHS = ("trainer.max_steps", "trainer.max_tokens", "trainer.epochs")      # set the training length
LARGEST_SEED = 2**63 - 1                 # for torch's generators
MIB = 2**20                              # bytes; the unit of options named *_mib
BLOCKS = "blocks"                        # the dtype of a GGUF file's quantised blocks as they are
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 5, BLOCKS: 8}     # per matrix weight, about
DTYPES = ("auto", *BITS)
BASES = ("float32", "bfloat16", "int8", "int4")          # dtypes of frozen weights (tune.base)
LATEST = Path("runs") / "latest"         # a link to the latest run; for a sweep, to its latest
PREFERENCES = ("dpo", "ipo")             # objectives that train on pairs of answers
LIKELIHOOD = ("tune.objective", "likelihood")
NEXT_PAIR = re.compile(r",(?=[^,=/\\]+=)")              # the comma before the next NAME=; paths may contain other commas
TEMPLATES = "world, g1, flower or a jinja2 file"        # chat templates, for help
MODEL_TEMPLATE = f"{TEMPLATES}; null: that of the run's data, else the checkpoint's, else guessed from its name"
THINK = ("false", "true", "fake")        # how answers begin: rwkv/chat/thoughts.py
Pooling = Literal["mean", "last"]        # of hidden states, for embeddings
PATH = "path"                            # kinds of free text, taken verbatim from the command line
NAME = "name"
TEXT = "text"
GRAMMAR = "grammar"                      # for values in Hydra's grammar


def option(default: Any, help: str, *, one_of: Collection[str] | None = None, least: float | None = None,
           most: float = math.inf, above: float | None = None, below: float = math.inf, verbatim: str | None = None,
           filled: bool = False, needs: tuple[Any, ...] = (), heading: str | None = None, or_zero: bool = False,
           served: tuple[float, float] | None = None, typed: Any = None, read: Callable[[Any], Any] | None = None) -> Any:
    """A dataclass field for one option.

    default: the value, or a factory such as list. help: its text in --help. heading: the title in --help above this option and
    those after it. one_of, least, most, above and below: the allowed values; None is always allowed. With least, a number must
    be finite. verbatim: PATH (~/ is the home folder), NAME, TEXT (null is a text) or GRAMMAR; None for the rule of `free_text`.
    filled: an empty text is refused. needs: (option, values) that this option requires.

    For Sampling: or_zero: 0 is allowed too. served: the range in requests, if OpenAI's API has another. typed: the type on the
    command line, if it differs from the field's. read: converts a typed value to the field's type.
    """
    metadata = {"help": help, "heading": heading, "one_of": one_of, "least": least, "most": most, "above": above,
                "below": below, "verbatim": verbatim, "filled": filled, "needs": needs, "or_zero": or_zero, "served": served,
                "typed": typed, "read": read}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options(schema: type, prefix: str = "") -> dict[str, Field]:
    """The options of a dataclass and of those inside it, by dotted key."""
    result: dict[str, Field] = {}
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            result |= options(item.type, f"{prefix}{item.name}.")
        else:
            result[prefix + item.name] = item
    return result


def free_text(item: Field) -> str | None:
    """PATH, NAME or TEXT for an option that takes free text verbatim; None for one in Hydra's grammar.

    A string without a list of choices is free text, unless its option says otherwise.
    """
    kind: str | None = item.metadata["verbatim"]
    if kind is None and item.type in (str, str | None, list[str]) and not item.metadata["one_of"]:
        return NAME
    return None if kind == GRAMMAR else kind


def check_options(config: Any, group: str = "") -> None:
    """Raises UserError for the first value that its option does not allow. group: the prefix of option names, "model."."""
    for item in fields(config):
        value = getattr(config, item.name)
        limits = item.metadata
        if value is None or not limits:
            continue
        if limits["filled"] and "" in (value if isinstance(value, list) else [value]):
            raise UserError(f"{group}{item.name} is empty (an unset shell variable?): give a value, or leave "
                            f"{group}{item.name}= out")
        if limits["one_of"]:
            _one_of(group + item.name, value, limits["one_of"])
        if limits["least"] is not None:
            _at_least(group + item.name, value, limits["least"], limits["most"])
        if limits["above"] is not None:
            _between(group + item.name, value, limits["above"], limits["below"])


def require_effect(config: Any, user_keys: Iterable[str]) -> None:
    """Raises UserError for the first option of the user that has no effect in this configuration."""
    schema = options(type(config))
    for key in user_keys:
        needs = schema[key].metadata["needs"] if key in schema else ()
        if not needs:
            continue
        required, *allowed = needs
        value = operator.attrgetter(required)(config)
        if value not in allowed:
            group, _, name = required.rpartition(".")
            shown = group if name in ("name", "method") else required        # these two are set by their group
            value, *allowed = (str(each).lower() if isinstance(each, bool) else each for each in (value, *allowed))
            raise UserError(f"{key} requires {shown}={' or '.join(allowed)}; got {shown}={value}: leave {key} out, or give "
                            f"{shown}={allowed[0]}")


def given_length(config: "TrainConfig", user_keys: Collection[str]) -> str | None:
    """The option of LENGTHS that the user has set to a value; None for none. Raises UserError for two of them."""
    lengths = [key for key in LENGTHS if key in user_keys and operator.attrgetter(key)(config) is not None]
    if len(lengths) > 1:
        raise UserError(f"{lengths[0]} conflicts with {lengths[1]}: both set the training length; give one of them")
    return lengths[0] if lengths else None


@dataclass
class KernelConfig:
    name: str = option("auto", "set by kernel=", verbatim=GRAMMAR)


@dataclass
class ModelConfig:
    """The sizes of a model. rwkv/model/GENERATION.py lists the options of one generation and resolves null."""

    generation: str = option("rwkv4", "architecture; set by model=", one_of=GENERATIONS, heading="Model")
    n_layer: int = option(4, "number of blocks", least=1, most=10_000)
    n_embd: int = option(192, "embedding width (channels)", least=1)
    n_att: int | None = option(None, "width of time mixing; null: n_embd (rwkv4)", least=1)
    n_ffn: int | None = option(None, "width of channel mixing; null: 4 n_embd", least=1)
    head_size: int = option(64, "head size (rwkv7)", least=1)
    decay_low_rank_dim: int | None = option(None, "rank of the decay's LoRA, w1 and w2; null: RWKV-LM's for n_embd (rwkv7)",
                                            least=1)
    a_low_rank_dim: int | None = option(None, "rank of a1 and a2 (rwkv7)", least=1)
    v_low_rank_dim: int | None = option(None, "rank of v1 and v2 (rwkv7)", least=1)
    gate_low_rank_dim: int | None = option(None, "rank of the gate, g1 and g2 (rwkv7)", least=1)
    deep_embed_dim: int | None = option(None, "DeepEmbed's width per token, 32 in RWKV-7a; null: none (rwkv7)", least=1)
    ctx_len: int = option(128, "context length: tokens per training window", least=1)

    def __post_init__(self) -> None:
        check_options(self, "model.")


@dataclass
class DataConfig:
    """How val_fraction splits each kind of data: rwkv/data/prepare.py."""

    name: str = option("stdlib", "set by data=", one_of=(*SOURCES, *TOKENS, "mix"), heading="Data")
    path: str | None = option(None, "file, folder, pattern such as books/**/*.txt, or data set name", verbatim=PATH)
    sources: list[dict[str, Any]] = option(list, "for data=mix: {path: A.jsonl, weight: 0.7} per source; weight: its share of "
                                           "the tokens; also name, data, field, separator, split, val_fraction",
                                           needs=("data.name", "mix"))
    field: str = option("text", "field with the text, in jsonl and hf", verbatim=TEXT, filled=True,
                        needs=("data.name", "jsonl", "hf"))
    separator: str | None = option(None, "string between the documents of a file, such as <|endoftext|>; null: each file, or "
                                   "each row of jsonl and hf, is one document", verbatim=NAME, filled=True,
                                   needs=("data.name", "text", "jsonl", "hf"))
    template: str | None = option(None, f"chat template: {TEMPLATES}; null: that of init_from", verbatim=PATH,
                                  needs=("data.name", "chat"))
    think: str = option("false", "how trained answers begin: true: answers with thoughts follow the prompt that asks for "
                        "thoughts; fake: the last answer follows an empty thought; false: as in the conversation",
                        one_of=THINK, needs=("data.name", "chat"))
    preview: bool = option(False, "true: show two conversations, with trained text marked, and exit",
                           needs=("data.name", "chat"))
    split: str = option("train", "split of the Hugging Face data set", filled=True, needs=("data.name", "hf"))
    streaming: bool = option(False, "tokenise jsonl and hf while training, instead of before",
                             needs=("data.name", "jsonl", "hf", "mix"))
    shuffle_buffer: int = option(10_000, "size of the shuffle buffer of a stream, in documents", least=1,
                                 needs=("data.streaming", True))
    val_documents: int = option(256, "validation documents, the first of the stream", least=1, needs=("data.streaming", True))
    tokenizer: str = option("bpe", "byte, char, bpe (trained on the text), world, FILE.json or FILE.txt", verbatim=PATH)
    vocab_size: int = option(2048, "vocabulary size of a bpe tokenizer", least=257, most=2**24)
    end_of_text: str | None = option(None, "end-of-text token of FILE.json; null: as FILE.json says", verbatim=NAME)
    batch_size: int = option(8, "batch size: windows per backward pass, over all processes", least=1)
    cache_dir: str = option(".cache", "cache folder for tokenised data", verbatim=PATH)
    val_fraction: float = option(0.1, "fraction of the data for validation", above=0.0, below=1.0,
                                 needs=("data.streaming", False))
    num_workers: int = option(0, "data-loader processes; 0: load in the training process", least=0)
    tokenize_workers: int = option(0, "shards tokenised in parallel; 0: one per core, up to 4", least=0)
    sample_prompt: str = option("", "prompt of the samples; empty: none", verbatim=TEXT)

    def __post_init__(self) -> None:
        self.think = str(self.think).lower()             # Hydra reads true and false as booleans
        check_options(self, "data.")


@dataclass
class OptimConfig:
    """The learning-rate factors of time_mix_*, time_decay and time_first are 1, 2 and 3 in RWKV-LM (RWKV-v4neo/src/model.py).
    Muon: rwkv/training/optim.py. l2_wrap and confidence_penalty (rwkv/model/loss.py) change gradients, not reported losses.
    """

    name: str = option("adamw", "set by optim=", one_of=("adamw", "adam", *ORTHOGONAL, EIGHT_BITS),
                       heading="Optimiser")
    lr: float = option(3e-3, "peak learning rate; lower for models wider than 384 channels; default with init_from=: 1e-5 for "
                       "tune=full, 2e-4 for lora, 0.1 for state")
    min_lr: float | None = option(None, "final learning rate; null: lr / 20")
    schedule: str = option("cosine", "learning-rate schedule: cosine, linear, exponential or constant; default with "
                           "init_from=: constant, unless tune=state", one_of=("cosine", "linear", "exponential", "constant"))
    warmup_steps: int = option(20, "learning-rate warm-up steps; default with init_from=: 10", least=0)
    matrix_lr: float = option(0.02, "learning rate of the blocks' matrices (muon, normuon)", least=0,
                              needs=("optim.name", *ORTHOGONAL))
    matrix_momentum: float = option(0.95, "momentum of the blocks' matrices (muon, normuon)",
                                    needs=("optim.name", *ORTHOGONAL))
    time_mix_lr_scale: float = option(1.0, "learning-rate factor of time_mix_* (rwkv4)", least=0)
    time_decay_lr_scale: float = option(2.0, "learning-rate factor of the decays: rwkv4's time_decay, rwkv7's w0", least=0)
    time_first_lr_scale: float = option(3.0, "learning-rate factor of time_first (rwkv4)", least=0)
    betas: tuple[float, float] = option((0.9, 0.99), "Adam's beta1 and beta2")
    eps: float = option(1e-8, "Adam's epsilon", least=0)
    weight_decay: float = option(0.0, "weight decay, of matrices only", least=0)
    grad_clip: float = option(1.0, "gradient clipping: maximum norm; 0: off", least=0)
    l2_wrap: float = option(1e-4, "penalty on each position's largest logit, as in RWKV-LM; 0: off", least=0, needs=LIKELIHOOD)
    confidence_penalty: float = option(0.0, "weight of the penalty on low-entropy predictions; 0: off", least=0,
                                       needs=LIKELIHOOD)

    def __post_init__(self) -> None:
        check_options(self, "optim.")
        if not 0 <= self.matrix_momentum < 1:
            raise UserError(f"optim.matrix_momentum must be from 0 to below 1; got {self.matrix_momentum}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas must be two numbers from 0 to below 1; got {list(self.betas)}")
        if not 0 < self.lr < math.inf:
            raise UserError(f"optim.lr must be a positive finite number; got {self.lr}")
        if not 0 < self.last_lr <= self.lr:
            raise UserError(f"optim.min_lr must be positive and at most optim.lr, {self.lr}; got {self.min_lr}")

    @property
    def last_lr(self) -> float:
        """The final learning rate. The rounding makes 3e-3 / 20 exactly 1.5e-4."""
        return float(f"{self.lr / 20:.6g}") if self.min_lr is None else self.min_lr


FSDP = ("trainer.strategy", "fsdp")


@dataclass
class TrainerConfig:
    max_steps: int = option(1500, "optimiser steps", least=1, heading="Length of the run, metrics and samples")
    max_tokens: float | None = option(None, "training tokens, such as 1e9, instead of max_steps", least=1, most=1e18)
    epochs: float | None = option(None, "epochs, instead of max_steps; default with data=chat: 2", above=0.0, below=1e9)
    val_every: int = option(500, "validation interval, in steps", least=1)
    val_tokens: int | None = option(None, "tokens per validation, from the start of the split; null: all", least=1)
    checkpoint_every: int = option(500, "checkpoint interval, in steps", least=1)
    keep_last: int = option(2, "latest checkpoints to keep, besides the best", least=1)
    log_every: int = option(10, "logging interval, in steps; train/loss is the mean over it", least=1)
    grad_norms: bool = option(False, "log gradient norms per part of the model, before clipping")
    sample_every: int | None = option(None, "sampling interval, in steps (samples.jsonl); 0: no samples; null: val_every",
                                      least=0)
    sample_tokens: int = option(200, "tokens per sample", least=0)
    probe: bool = option(False, "measure the kernel's share of the time and its errors, as in sweeps")
    overfit_batches: int = option(0, "train on this many batches over and over; 0: off", least=0)
    precision: str | None = option(None, "32-true, tf32 (GPU matmuls round float32 to 10 bits), bf16-mixed, fp16-mixed, or "
                                   "auto: bf16-mixed where it is faster; null: bf16-mixed on a GPU that supports it, else "
                                   "32-true", one_of=("32-true", "tf32", "bf16-mixed", "fp16-mixed", "auto"),
                                   heading="Memory, speed and devices")
    accumulate: int = option(1, "gradient accumulation steps", least=1)
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, a third more "
                                            "time")
    optim_in_backward: bool = option(False, "update each weight in the backward pass and free its gradient at once: same "
                                     "results, less memory; requires optim.grad_clip=0")
    tbptt: int = option(0, "truncated BPTT: segments of ctx_len tokens per step, with gradients through the state, over whole "
                        "documents; 0: independent windows", least=0)
    compile: bool = option(False, "torch.compile each block")
    graphs: bool | None = option(None, "replay all blocks as one CUDA graph, without launch overhead; null: only where "
                                 "launches would limit the speed")
    malloc: str = option("tuned", "memory allocator: tuned: keep large freed blocks, which is faster (large runs with frozen "
                         "weights or conversations return them after each block, fsdp at once); small: return them at once "
                         "(Linux); default: the C library's", one_of=("tuned", "small", "default"))
    accelerator: str = option("auto", "auto, cpu or gpu", one_of=("auto", "cpu", "gpu"))
    strategy: str = option("single", "single, ddp or fsdp", one_of=("single", "ddp", "fsdp"))
    reshard: bool = option(True, "reshard weights after each block's forward pass and gather them again in backward; false: "
                           "keep them, which takes more memory and less time (fsdp)", needs=FSDP)
    offload: bool = option(False, "keep weights, gradients and optimiser state in host memory, and update them there (fsdp)",
                           needs=FSDP)
    devices: int = option(1, "processes per machine; 0: one per GPU", least=0)
    num_nodes: int = option(1, "machines", least=1)
    link_gbps: float | None = option(None, "network bandwidth per device for the plan, Gbit/s; null: typical of machines with "
                                     "such GPUs", above=0.0, needs=("plan", "true", "timed", *GPUS))

    def __post_init__(self) -> None:
        check_options(self, "trainer.")
        if self.strategy == "single" and (self.devices, self.num_nodes) != (1, 1):
            raise UserError("trainer.devices and trainer.num_nodes require trainer=ddp or trainer=fsdp")
        if self.overfit_batches % self.accumulate:
            raise UserError(f"trainer.overfit_batches must be a multiple of trainer.accumulate, {self.accumulate}; got "
                            f"{self.overfit_batches}")
        if self.strategy == "fsdp" and self.sample_every:
            raise UserError("trainer.sample_every conflicts with trainer=fsdp, which shards the weights: leave it out; the run "
                            "ends with a sample from its last checkpoint")


@dataclass
class LoggerConfig:
    name: str = option("wandb", "set by logger=", verbatim=GRAMMAR, filled=True, heading="Logger")
    _target_: str | None = option(None, "class of any Lightning logger, besides metrics.csv; example: "
                                  "configs/logger/mlflow.yaml")
    arguments: list[str] = option(list, "NAME=VALUE argument of _target_; repeatable")
    project: str | None = option(None, "project (MLflow: experiment); null: WANDB_PROJECT or the tracker's own setting, else "
                                 "timemix", filled=True)
    group: str | None = option(None, "run group; null: WANDB_RUN_GROUP, else the sweep's folder")
    run_name: str | None = option(None, "run name; null: WANDB_NAME, else the kernel and out_dir")
    published_losses: list[float] = option(list, "mean training losses of a published run, one per published_steps steps, "
                                           "shown in the report")
    published_steps: int = option(0, "steps averaged in each of published_losses", least=0)

    def __post_init__(self) -> None:
        check_options(self, "logger.")
        if self._target_ is None:
            _one_of("logger.name", self.name, ("wandb", "csv", "none"))
        if bool(self.published_losses) != bool(self.published_steps):
            raise UserError("logger.published_losses and logger.published_steps require each other: give both or neither")


@dataclass
class SweepConfig:
    """Launching the runs of a sweep (train.py -m)."""

    jobs: int | None = option(None, "parallel runs, each with its share of the threads, or its own GPU; null: 1, with "
                              "submitit all", least=1, heading="Sweep, with -m")
    launcher: str = option("local", "local: processes on this machine; submitit: SLURM jobs (pip install 'timemix[slurm]')",
                           one_of=("local", "submitit"))
    arguments: list[str] = option(list, "NAME=VALUE for submitit, such as slurm_partition=gpu, gpus_per_node=1, or "
                                  "timeout_min=60, after which a job saves and is requeued; repeatable",
                                  needs=("sweep.launcher", "submitit"))

    def __post_init__(self) -> None:
        check_options(self, "sweep.")


STATE_LAYOUTS = ("official", "transposed")
LORA = ("tune.method", "lora")
ENGLISH = "english"                      # the value of tune.guard for the text in the package


@dataclass
class TuneConfig:
    """Fine-tuning, with init_from=. LoRA: W + alpha / rank B A (Hu et al. 2021, arXiv 2106.09685)."""

    method: str = option("full", "set by tune=", one_of=("full", "lora", "state"), heading="Tuning")
    rank: int = option(16, "LoRA rank", least=1, needs=LORA)
    alpha: float = option(32.0, "LoRA alpha; adapters are scaled by alpha / rank", above=0.0, needs=LORA)
    dropout: float = option(0.0, "LoRA dropout", least=0, needs=LORA)
    modules: list[str] = option(list, "LoRA target modules, such as [att.key,att.value]; []: all linear layers of the blocks",
                                verbatim=GRAMMAR, needs=LORA)
    state: str | None = option(None, "tuned state to start from, of any program; null: zeros, or init_from's (state)",
                               verbatim=PATH, needs=("tune.method", "state"))
    base: str = option("float32", "dtype of the frozen matrices: float32, bfloat16, or on a CPU int8 or int4", one_of=BASES)
    guard: str | None = option(ENGLISH, f"text whose loss is measured before and after tuning: {ENGLISH} (a small one, "
                               "included), FILE, or null: none", verbatim=PATH)
    objective: str = option("likelihood", "likelihood: cross-entropy; dpo or ipo: preference learning from pairs (data=chat)",
                            one_of=("likelihood", *PREFERENCES))
    beta: float = option(0.1, "beta: how closely to stay to the reference model, init_from= (dpo, ipo)", above=0.0,
                         needs=("tune.objective", *PREFERENCES))
    label_smoothing: float = option(0.0, "label smoothing: assumed fraction of swapped pairs (dpo)", least=0,
                                    needs=("tune.objective", "dpo"))
    sft_weight: float = option(0.0, "weight of the chosen answer's loss per token, added to the objective (dpo, ipo)", least=0,
                               needs=("tune.objective", *PREFERENCES))

    def __post_init__(self) -> None:
        check_options(self, "tune.")
        if not self.label_smoothing < 0.5:
            raise UserError(f"tune.label_smoothing must be from 0 to below 0.5; got {self.label_smoothing}")
        if not self.dropout < 1:
            raise UserError(f"tune.dropout must be from 0 to below 1; got {self.dropout}")
        if self.method == "full" and self.base != "float32":
            raise UserError(f"tune.base={self.base} requires tune=lora or state; tune=full trains the weights in float32")

    @property
    def prefers(self) -> bool:
        """Whether the objective is a preference loss, on pairs of answers."""
        return self.objective in PREFERENCES


@dataclass
class TrainConfig:
    kernel: KernelConfig = field(default_factory=KernelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    seed: int = option(0, "random seed of the initial weights and the data order", heading="Run")
    out_dir: str | None = option(None, "run directory; null: runs/DATE_TIME", verbatim=PATH)
    resume: str | None = option(None, "auto: resume the run in out_dir, or else the latest, or start one; PATH: resume this "
                                "run or checkpoint", verbatim=PATH)
    init_from: str | None = option(None, "base model: a checkpoint of any format, or ORG/REPO/FILE on the Hub; sets weights, "
                                   "sizes and tokenizer", verbatim=PATH)
    plan: str = option("false", "true: print the plan and exit; timed: measure step times too, even if that takes minutes; "
                       f"{', '.join(GPUS)}: plan for a machine with such GPUs",
                       one_of=("false", "true", "timed", *GPUS))

    def __post_init__(self) -> None:
        self.plan = str(self.plan).lower()               # Hydra reads true and false as booleans
        check_options(self)
        whole_number("seed", self.seed, most=2**32 - 1)          # the largest that NumPy's generator takes
        if self.plan in GPUS and self.trainer.accelerator == "cpu":
            raise UserError(f"plan={self.plan} conflicts with trainer.accelerator=cpu: leave one out")
        if self.trainer.strategy == "fsdp" and self.tune.base in ("int8", "int4"):
            raise UserError(f"tune.base={self.tune.base} conflicts with trainer=fsdp, which cannot shard packed weights: use "
                            "tune.base=bfloat16, or trainer=ddp")
        if self.tune.prefers:
            self._require_pairs()
        if self.trainer.tbptt and self.data.name == "mix":
            raise UserError("trainer.tbptt conflicts with data=mix, whose windows come from several sources: leave one out")
        if self.data.streaming and self.trainer.tbptt:
            raise UserError("trainer.tbptt conflicts with data.streaming, which cuts documents into windows: leave one out")
        if self.data.streaming and self.trainer.epochs is not None:
            raise UserError("trainer.epochs conflicts with data.streaming, because the length of a stream is unknown: give "
                            "trainer.max_steps or trainer.max_tokens")
        if self.trainer.tbptt and self.tune.dropout:
            raise UserError("trainer.tbptt conflicts with tune.dropout, because recomputed segments would draw other random "
                            "numbers: leave one out")
        if self.trainer.strategy == "fsdp" and self.optim.name == EIGHT_BITS:
            raise UserError(f"optim={EIGHT_BITS} conflicts with trainer=fsdp, which shards the parameters whose moments it "
                            "quantises: use optim=adamw, or trainer=ddp")

    def _require_pairs(self) -> None:
        objective = f"tune.objective={self.tune.objective}"
        if self.data.name != "chat":
            raise UserError(f"{objective} requires data=chat, with pairs of answers; got data={self.data.name}")
        if self.trainer.tbptt:
            raise UserError(f"{objective} conflicts with trainer.tbptt, which would cut pairs into segments: leave it out, and "
                            "choose a model.ctx_len that holds a pair")

    def require_separate_updates(self) -> None:
        """Raises UserError for the first option that conflicts with trainer.optim_in_backward=true. Of a resumed run this is
        known only once its saved options and the user's are merged.
        """
        trainer, optim = self.trainer, self.optim
        if not trainer.optim_in_backward:
            return
        conflicts = {
            f"trainer={trainer.strategy} exchanges gradients between processes before they are applied: use trainer=auto":
                trainer.strategy != "single",
            f"optim={optim.name} updates matrices of one shape together: use optim=adamw": optim.name in ORTHOGONAL,
            f"optim.grad_clip={optim.grad_clip:g} needs the norm of all gradients: add optim.grad_clip=0": optim.grad_clip > 0,
            f"trainer.accumulate={trainer.accumulate} sums the gradients of several batches: use trainer.accumulate=1":
                trainer.accumulate > 1,
            f"trainer.tbptt={trainer.tbptt} sums the gradients of its segments: use trainer.tbptt=1 or 0": trainer.tbptt > 1,
            "trainer.precision=fp16-mixed repeats steps whose gradients overflow: use trainer.precision=bf16-mixed":
                trainer.precision == "fp16-mixed",
            "trainer.grad_norms=true measures gradients after the backward pass: leave it out": trainer.grad_norms,
            "trainer.graphs=true computes the gradients of all blocks in one launch: leave it out": bool(trainer.graphs)}
        for reason, applies in conflicts.items():
            if applies:
                raise UserError(f"trainer.optim_in_backward=true updates each weight during the backward pass, and {reason}")

    @property
    def only_plans(self) -> bool:
        return self.plan != "false"

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimiser step, over all processes."""
        segments = max(1, self.trainer.tbptt)
        return self.data.batch_size * self.model.ctx_len * segments * self.trainer.accumulate


SMALL = 1e-30                            # bounds of sampling options, so that logits stay within float32
LARGE = 1e30
ORDERS = ("hf", "rwkv")


def _biases(texts: Iterable[str]) -> dict[int, float]:
    """{ID: X} for strings ID:X. Raises UserError for others."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UserError(f"logit_bias must be TOKEN_ID:NUMBER, as in logit_bias=198:-5; got {text!r}") from None
    return biases


def _texts_and_ids(texts: Iterable[str]) -> list[str | int]:
    """The texts, with [ID,...] replaced by its ids."""
    entries: list[str | int] = []
    for text in texts:
        ids = re.fullmatch(r"\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]", text, re.ASCII)
        entries += map(int, ids[1].split(",")) if ids else [text]
    return entries


@dataclass(frozen=True)
class Sampling:
    """The options of sampling, for the command line, requests, the engine and kernels/draw.

    The options of generate.py, chat.py and serve.py and the fields of requests derive from these. Raises UserError for a value
    out of range or of another type; integers may be NumPy's or torch's.

    Penalties (formula: rwkv/generation/sampling.py): repetition_penalty (CTRL, arXiv 1909.05858) applies to tokens of the
    prompt and the output; presence_penalty and frequency_penalty (OpenAI's API) apply to the output only, so that each answer
    of a conversation starts without penalties, and so does a sequence that continues a saved state. penalty_decay multiplies
    the counts of frequency_penalty before each new token is counted, as in the demos of RWKV's author. no_penalty: ids of
    tokens exempt from penalties, and texts, which stand for their tokens. Tokens in `banned` are never drawn.
    """

    temperature: float = option(0.8, "temperature; 0: greedy", least=SMALL, most=LARGE, or_zero=True, served=(0, 2))
    top_k: int = option(0, "sample from the top k tokens; 0: all", least=0, served=(-1, 2**31 - 1))
    top_p: float = option(0.95, "nucleus sampling: the likeliest tokens with this total probability; 1: all", least=SMALL,
                          most=1, served=(0, 1))
    min_p: float = option(0.0, "minimum probability, relative to the likeliest token; 0: off", least=0, most=1)
    repetition_penalty: float = option(1.0, "divides positive logits, and multiplies negative ones, of tokens in the prompt "
                                       "or the output; 1: off", least=SMALL, most=LARGE, served=(0.01, 100))
    presence_penalty: float = option(0.0, "subtracted from the logit of each token in the output so far; 0: off", least=-LARGE,
                                     most=LARGE, served=(-2, 2))
    frequency_penalty: float = option(0.0, "subtracted once per occurrence of the token in the output so far; 0: off",
                                      least=-LARGE, most=LARGE, served=(-2, 2))
    penalty_decay: float = option(1.0, "factor per step on the counts of frequency_penalty, so that they fade; 1: off",
                                  least=0, most=1)
    no_penalty: tuple[int | str, ...] = option(tuple, "text whose tokens have no penalty, or token ids as [ID,...]; "
                                               "repeatable", typed=list[str], read=_texts_and_ids, verbatim=TEXT)
    logit_bias: Mapping[int, float] = option(dict, "ID:X adds X to a token's logit; repeatable", typed=list[str], read=_biases,
                                             least=-LARGE, most=LARGE, served=(-100, 100))
    banned: tuple[int, ...] = option(tuple, "[ID,...]: tokens never sampled, such as [0], the end-of-text token of many "
                                     "models", typed=list[int])
    order: str = option("hf", "order of the filters: hf: temperature before top_p, top_k and min_p, as in Hugging Face; rwkv: "
                        "after them, as in ChatRWKV", one_of=ORDERS)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type is int:
                value = whole_number(item.name, value, item.metadata["least"], item.metadata["most"])
                object.__setattr__(self, item.name, value)
            else:
                self._check(item, value)
        tokens = whole_numbers("logit_bias", self.logit_bias)
        object.__setattr__(self, "logit_bias", dict(zip(tokens, self.logit_bias.values(), strict=True)))
        object.__setattr__(self, "banned", whole_numbers("banned", self.banned))
        object.__setattr__(self, "no_penalty", _texts_or_whole_numbers("no_penalty", self.no_penalty))

    @staticmethod
    def _check(item: Field, value: Any) -> None:
        """Raises UserError for a value of another type or out of the option's range. Whole numbers: whole_number."""
        limits = item.metadata
        if limits["one_of"]:
            _one_of(item.name, value, limits["one_of"])
        if item.type == Mapping[int, float]:
            if not isinstance(value, Mapping):
                raise UserError(f"{item.name} must be a dict of token ids and numbers; got {value!r}")
        elif limits["least"] is None:
            return
        for number in value.values() if isinstance(value, Mapping) else [value]:
            fits = isinstance(number, Real) and (limits["least"] <= number <= limits["most"] or
                                                 (limits["or_zero"] and number == 0))
            if not fits:
                upto = "" if limits["most"] == math.inf else f" to {limits['most']:g}"
                raise UserError(f"{item.name} must be {'0, or ' * limits['or_zero']}a number from {limits['least']:g}{upto}; "
                                f"got {number!r}")

    @classmethod
    def of(cls, config: Any) -> "Sampling":
        """The sampling options of a program's configuration. Raises UserError for a value out of range."""
        values = {}
        for item in fields(cls):
            read = item.metadata["read"]
            value = getattr(config, item.name)
            values[item.name] = read(value) if read else value
        return cls(**values)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A hashable form of the options."""
        values = [getattr(self, item.name) for item in fields(self)]
        return tuple(tuple(sorted(value.items())) if isinstance(value, Mapping) else value for value in values)

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check_ids(self, vocab_size: int) -> None:
        """Raises UserError if a token id is outside the vocabulary, or all tokens are banned."""
        for name in ("logit_bias", "banned", "no_penalty"):
            for token in getattr(self, name):
                if isinstance(token, int) and not 0 <= token < vocab_size:
                    raise UserError(f"{name} must hold token ids from 0 to {vocab_size - 1}; got {token}")
        if len({*self.banned}) >= vocab_size:
            raise UserError(f"banned has all {vocab_size} tokens of the vocabulary: leave at least one out")

    def ids_without_penalty(self, tokenizer: Any) -> tuple[int, ...]:
        """The ids of no_penalty, in order. Raises UserError for a text that the tokenizer cannot encode."""
        texts = [entry for entry in self.no_penalty if isinstance(entry, str)]
        try:
            encoded = tokenizer.encode_within(texts)
        except UserError as error:
            raise UserError(f"no_penalty: {error}") from None
        return tuple(sorted({entry for entry in self.no_penalty if isinstance(entry, int)}.union(*encoded)))

    def __str__(self) -> str:
        """The temperature, top_p, and the options that differ from their defaults: temperature 0.8, top_p 0.95, order rwkv."""
        shown = []
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if value != default or item.name in ("temperature", "top_p"):
                shown.append(f"{item.name} {_shown(value)}")
        return ", ".join(shown)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "[" + ",".join(f"{token}:{bias:g}" for token, bias in value.items()) + "]"
    if isinstance(value, tuple):
        return "[" + ",".join(map(repr, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def preset_option(name: str, heading: str = "Sampling") -> Any:
    """The field `sampling`: the preset, a file of configs/sampling, that sets the options of sampling."""
    return option(name, "preset; default from the checkpoint or model family (docs/chat.md); explicit options win",
                  verbatim=GRAMMAR, heading=heading)


def layout_option(source: str) -> Any:
    """The field `state_layout` for tuned states of the option `source`."""
    return option(None, f"layout of a tuned state of {source} whose file does not say: official (value by key, as trainers "
                  "write it) or transposed (web-rwkv's .st)", one_of=STATE_LAYOUTS)


Config = TypeVar("Config")


def with_sampling(config: type[Config]) -> type[Config]:
    """A decorator below @dataclass: adds the options of Sampling as fields after the field `sampling`."""
    annotations: dict[str, Any] = {}
    for name, kind in config.__annotations__.items():
        annotations[name] = kind
        for item in fields(Sampling) if name == "sampling" else ():
            typed = item.metadata["typed"]
            metadata = {**item.metadata, "least": None}          # Sampling.of checks the range
            annotations[item.name] = typed or item.type
            setattr(config, item.name, field(default_factory=list, metadata=metadata) if typed else
                    field(default=item.default, metadata=metadata))
    config.__annotations__ = annotations
    return config


@dataclass
class SavedModelConfig:
    """Options shared by generate.py, chat.py, serve.py and rwkv.tools.evaluate."""

    checkpoint: str = option(LATEST.as_posix(), "file, Hugging Face directory, run directory, or name on the Hub: "
                             "ORG/REPO/FILE, ORG/REPO or ORG/REPO:Q4_K_M, optionally with @REVISION. Options for states, "
                             "adapters, tokenizers and templates take such names too", heading="Model", verbatim=PATH)
    lora: str | None = option(None, "another program's LoRA adapter, merged into the checkpoint: a PEFT directory or an "
                              "RWKV-PEFT file", verbatim=PATH)
    lora_alpha: float | None = option(None, "alpha of an adapter whose file lacks it, such as RWKV-PEFT's", above=0.0)
    tokenizer: str | None = option(None, "byte, world, FILE.json or FILE.txt, if the checkpoint has none", verbatim=PATH)
    end_of_text: str | None = option(None, "end-of-text token; null: as the checkpoint or FILE.json says", verbatim=NAME)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    device: str = option("auto", "auto, cpu or cuda", one_of=("auto", "cpu", "cuda"))
    dtype: str | None = option(None, "float32, bfloat16, float16 (GPU), int8 or int4 (matrices only), or blocks (the quantised "
                               "matrices of a GGUF file as they are, CPU); auto or null: bfloat16 on a GPU that supports it, "
                               "else blocks if the file has them, else float32", one_of=DTYPES)


@dataclass
@with_sampling
class GenerateConfig(SavedModelConfig):
    """rwkv/generation/options.py checks combinations of options."""

    prompt: str | None = option(None, "prompt; -: read from standard input", heading="Samples", verbatim=TEXT)
    prompts: str | None = option(None, 'file with a prompt per line, or .jsonl with {"prompt": "..."} per line', verbatim=PATH)
    state: str | None = option(None, "state file to continue, written by save_state= with the same model and tokenizer; or a "
                               "tuned state of any program", verbatim=PATH)
    state_layout: str | None = layout_option("state=")
    num_samples: int = option(1, "samples per prompt", least=1)
    seed: int = option(0, "random seed of a prompt's first sample; the next sample has seed + 1", least=0)
    batch_size: int = option(16, "batch size; samples do not depend on it", least=1)
    max_new_tokens: int = option(200, "maximum tokens per sample", least=0)
    stop: list[str] = option(list, "stop string, not shown; repeatable")
    stop_tokens: list[int] = option(list, "[ID,...]: stop tokens, not shown")
    json_schema: str | None = option(None, "JSON schema file that each sample must satisfy", verbatim=PATH)
    grammar: str | None = option(None, "Lark grammar file that each sample must follow", verbatim=PATH)
    regex: str | None = option(None, "regular expression that each sample must match in full", verbatim=TEXT)
    sampling: str = preset_option("default")
    stream: bool = option(True, "print a single sample token by token", heading="Output")
    out: str | None = option(None, "JSON Lines file for the samples, with tokens and finish reason", verbatim=PATH)
    logprobs: int = option(0, "top log-probabilities per token, written to out=, or else to standard error", least=0)
    save_state: str | None = option(None, "file for the state after the sample, and its stop string, for state=",
                                    verbatim=PATH)

    def __post_init__(self) -> None:
        check_options(self)
        Sampling.of(self)


@dataclass
@with_sampling
class ChatConfig(SavedModelConfig):
    template: str | None = option(None, f"chat template: {MODEL_TEMPLATE}", verbatim=PATH, heading="Conversation")
    system: str | None = option(None, "system message")
    state: str | None = option(None, "state file before the conversation: of save_state=, or a tuned state of any program",
                               verbatim=PATH)
    state_layout: str | None = layout_option("state=")
    think: str = option("false", "true: answers begin with thoughts; fake: with an empty thought (templates g1, flower)",
                        one_of=THINK)
    seed: int = option(0, "random seed of the first answer; the next answer has seed + 1", least=0)
    max_new_tokens: int = option(500, "maximum tokens per answer", least=1)
    sampling: str = preset_option("chat")

    def __post_init__(self) -> None:
        self.think = str(self.think).lower()             # Hydra reads true and false as booleans
        check_options(self)
        Sampling.of(self)


@dataclass
class EvaluateDataConfig:
    path: str | None = option(None, 'UTF-8 text, or FILE.jsonl with {"text": "..."} per line', verbatim=PATH,
                              heading="Evaluation")
    template: str | None = option(None, f"chat template of the conversations in FILE.jsonl: {MODEL_TEMPLATE}", verbatim=PATH)


@dataclass
class EvaluateConfig(SavedModelConfig):
    dtype: str | None = option("float32", "as for generate.py: auto, float32, bfloat16, float16, int8, int4 or blocks",
                               one_of=DTYPES)
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    chunk_len: int = option(1024, "tokens per forward pass", least=1)
    batch_size: int = option(16, "batch size, of FILE.jsonl", least=1)
    start: str | None = option(None, "text before the first prediction; null: the end-of-text token", verbatim=TEXT)
    out: str | None = option(None, "file for the result, which is also on standard output", verbatim=PATH)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
@with_sampling
class ServeConfig(SavedModelConfig):
    model_name: str | None = option(None, "model id for clients; null: the checkpoint's name")
    adapters: list[str] = option(list, "NAME=PATH,...: further models, which requests name. PATH: the directory or .ckpt of a "
                                 "tune=state or tune=lora run from this checkpoint, a state file, or another program's tuned "
                                 "state or adapter; repeatable", filled=True)
    state_layout: str | None = layout_option("adapters=")
    template: str | None = option(None, f"chat template: {MODEL_TEMPLATE}", verbatim=PATH)
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all interfaces", heading="HTTP", filled=True)
    port: int = option(8000, "port; 0: any free port", least=0)
    api_key: list[str] = option(list, "API key that clients must send; repeatable, one per client; null: none", filled=True)
    cors: list[str] = option(list, "allowed CORS origin; repeatable", filled=True)
    sampling: str = preset_option("openai", heading="Sampling, the defaults of requests")
    max_rows: int = option(32, "batch size: sequences generated at a time", least=1, heading="Limits")
    max_queue: int = option(128, "queue size, in sequences; requests beyond it get status 429", least=0)
    max_tokens: int = option(4096, "maximum tokens per completion", least=1)
    max_prompt_tokens: int = option(32768, "maximum tokens per prompt", least=1)
    max_body_mib: int = option(8, "maximum size of a request body, MiB", least=1)
    max_connections: int = option(1024, "maximum open connections", least=1)
    receive_s: float = option(30.0, "time limit for receiving a request, in seconds", above=0.0)
    timeout_s: float = option(600.0, "time limit per completion, in seconds; the partial text is returned", above=0.0)
    grace_s: float = option(30.0, "seconds to let running requests finish after SIGTERM", least=0.0)
    cache_mib: int = option(256, "prefix-cache size, MiB; never shared between API keys; 0: off", least=0)
    states_mib: int = option(256, "memory for saved states (/v1/states, save_state), MiB; evicts LRU, keys over their fair "
                             "share first; 0: off, unless states_dir= is set", least=0, heading="Saved states")
    states_dir: str | None = option(None, "folder for saved states, which then survive eviction and restarts; servers may "
                                    "share it; null: memory only", verbatim=PATH, filled=True)
    states_dir_mib: int = option(4096, "disk space for saved states, MiB; deletes LRU", least=1)
    responses_mib: int = option(64, "memory for stored responses (/v1/responses), MiB; evicts LRU; with states_dir= also "
                                "stored there", least=0)

    def __post_init__(self) -> None:
        keys = self.api_key or []        # a file of options may have one key, or null
        self.api_key = [key for key in ([keys] if isinstance(keys, str) else keys) if key != "null"]
        check_options(self)
        _ = self.adapter_paths           # raises UserError unless all are NAME=PATH
        if self.port > 65535:
            raise UserError(f"port must be from 0 to 65535; got {self.port}")
        if "*" in self.cors and self.api_key:
            raise UserError("cors=* conflicts with api_key=, because any page could use this server: name the origins")
        Sampling.of(self)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The adapters' paths by name. Raises UserError unless all are NAME=PATH with different names."""
        paths: dict[str, str] = {}
        for pair in (pair for pairs in self.adapters for pair in NEXT_PAIR.split(pairs)):
            name, _, path = pair.partition("=")
            if not name or not path:
                raise UserError(f"adapters must be NAME=PATH,...; got {pair!r}")
            if name in paths:
                raise UserError(f"adapters has a duplicate name {name!r}: give each model its own")
            paths[name] = path
        return paths


def whole_number(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """`value` as an int. Raises UserError, with the option's name, unless it is a whole number from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be a whole number; got {value!r}") from None
    if not least <= number <= most:
        raise UserError(f"{name} must be {f'{least} or more' if most == math.inf else f'from {least} to {most}'}; got {number}")
    return number


def whole_numbers(name: str, values: Iterable[Any], most: float = math.inf) -> tuple[int, ...]:
    """`values` as ints. Raises UserError, with the option's name, unless all are whole numbers from 0 to `most`."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of whole numbers; got {values!r}")
    return tuple(whole_number(name, value, most=most) for value in values)


def _texts_or_whole_numbers(name: str, values: Any) -> tuple[int | str, ...]:
    """`values` as a tuple. Raises UserError, with the option's name, unless all are token ids or texts that are not empty."""
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, Iterable) or "" in (values := tuple(values)):
        raise UserError(f"{name} must be a list of token ids and of texts that are not empty; got {values!r}")
    return tuple(value if isinstance(value, str) else whole_number(name, value) for value in values)


def strings(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """`values` as a tuple. Raises UserError, with the option's name, unless it is a list of strings."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of strings; got a {type(values).__name__}")
    values = tuple(values)
    for value in values:
        if not isinstance(value, str):
            raise UserError(f"{name} must be a list of strings; got {value!r} in it")
    return values


def _one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise UserError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _at_least(name: str, value: float, least: float, most: float) -> None:
    if not value >= least:
        raise UserError(f"{name} must be at least {least}; got {value}")
    if value > most:
        raise UserError(f"{name} must be at most {most}; got {value}")
    if value == math.inf:
        raise UserError(f"{name} must be a finite number; got {value}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        allowed = f"a finite number above {low:g}" if high == math.inf else f"above {low:g} and below {high:g}"
        raise UserError(f"{name} must be {allowed}; got {value:g}")
