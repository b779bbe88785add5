"""Every option of each program: its type, default, help and check, once. A dataclass per group of configs.

A dataclass checks its values when it is built and raises UserError with the option's name. rwkv/cli/help.py prints the help
texts. This file knows nothing of Hydra.
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

SCALED = ("time_mix", "time_decay", "time_first")        # optim.NAME_lr_scale is a factor on the learning rate of each
GENERATIONS = tuple(sorted(path.stem for path in (Path(__file__).parent / "model").glob("rwkv*.py") if path.stem[4:].isdigit()))
SOURCES = tuple(sorted(path.stem for path in (Path(__file__).parent / "data" / "sources").glob("[!_]*.py")))      # of text
TOKENS = ("binidx", "datatrove")         # kinds of data that are ids already
STREAMED = ("jsonl", "hf")               # kinds of data for data.streaming
ORTHOGONAL = ("muon", "normuon")                         # optimisers with an update of their own for the blocks' matrices
EIGHT_BITS = "adamw8bit"                 # the optimiser with moments in 8 bits
GPUS = ("a100", "h100", "h200", "rtx3060", "rtx4090", "rtx5090")         # that plan= knows
LENGTHS = ("trainer.max_steps", "trainer.max_tokens", "trainer.epochs")      # each says how long to train
LARGEST_SEED = 2**63 - 1                 # of torch's generators
MIB = 2**20                              # bytes; the unit of options whose names end in _mib
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 5}      # of a matrix's weight; in int4 with the scales
DTYPES = tuple(BITS)
BASES = ("float32", "bfloat16", "int8", "int4")          # dtypes of frozen weights beside what is trained
LATEST = Path("runs") / "latest"         # a link to the run that began last; of a sweep, to the one that was trained last
PREFERENCES = ("dpo", "ipo")             # objectives that learn from pairs of answers
LIKELIHOOD = ("tune.objective", "likelihood")
NEXT_PAIR = re.compile(r",(?=[^,=/\\]+=)")              # a comma before NAME=; paths may have other commas
TEMPLATES = "world, g1, flower or a jinja2 file"        # the chat templates, for help
TEMPLATE_OF_MODEL = f"{TEMPLATES}; null: the one of the run's data, else the checkpoint's, else by its name"
THINK = ("false", "true", "fake")        # how answers begin: rwkv/chat/thoughts.py
Pooling = Literal["mean", "last"]        # of hidden states, to an embedding
PATH = "path"                            # the kinds of free text, which is taken verbatim from the command line
NAME = "name"
TEXT = "text"
GRAMMAR = "grammar"                      # Hydra's grammar, in which all other options are written


def option(default: Any, help: str, *, one_of: Collection[str] | None = None, least: float | None = None,
           most: float = math.inf, above: float | None = None, below: float = math.inf, verbatim: str | None = None,
           filled: bool = False, needs: tuple[Any, ...] = (), heading: str | None = None, or_zero: bool = False,
           served: tuple[float, float] | None = None, typed: Any = None, read: Callable[[Any], Any] | None = None) -> Any:
    """A dataclass field for one option.

    default: the value, or a function that makes it, as list. help: its text in --help. heading: the title in --help above this
    option and those after it. one_of, least, most, above and below: the allowed values; None is always allowed. With least, a
    number must be finite. verbatim: PATH (~/ is the home folder), NAME, TEXT (null is a text) or GRAMMAR; None for the rule of
    `free_text`. filled: an empty text is refused. needs: the dotted key of another option, and the values of that option with
    which this one has an effect.

    For Sampling: or_zero: 0 is allowed too. served: the range in requests, if OpenAI's API has another. typed: the type on the
    command line, if the field has another. read: the function that converts a typed value to the field's type.
    """
    metadata = {"help": help, "heading": heading, "one_of": one_of, "least": least, "most": most, "above": above,
                "below": below, "verbatim": verbatim, "filled": filled, "needs": needs, "or_zero": or_zero, "served": served,
                "typed": typed, "read": read}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def options(schema: type, prefix: str = "") -> dict[str, Field]:
    """Every option of a dataclass and of those inside it, by its dotted key."""
    found: dict[str, Field] = {}
    for item in fields(schema):
        if isinstance(item.type, type) and is_dataclass(item.type):
            found |= options(item.type, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = item
    return found


def free_text(item: Field) -> str | None:
    """PATH, NAME or TEXT for an option whose value is free text, taken as it stands; None for one in Hydra's grammar.

    A text without a list of choices is free, unless its option says otherwise.
    """
    stated: str | None = item.metadata["verbatim"]
    if stated is None and item.type in (str, str | None, list[str]) and not item.metadata["one_of"]:
        return NAME
    return None if stated == GRAMMAR else stated


def check_options(config: Any, group: str = "") -> None:
    """Raises UserError for the first value of `config` that its option does not allow. group: the prefix of names, "model."."""
    for item in fields(config):
        value = getattr(config, item.name)
        limits = item.metadata
        if value is None or not limits:
            continue
        if limits["filled"] and "" in (value if isinstance(value, list) else [value]):
            raise UserError(f"{group}{item.name} is empty, perhaps because a shell variable is not set: give a value, or leave "
                            f"{group}{item.name}= out")
        if limits["one_of"]:
            _one_of(group + item.name, value, limits["one_of"])
        if limits["least"] is not None:
            _at_least(group + item.name, value, limits["least"], limits["most"])
        if limits["above"] is not None:
            _between(group + item.name, value, limits["above"], limits["below"])


def require_effect(config: Any, given: Iterable[str]) -> None:
    """Raises UserError for the first of the `given` keys that changes nothing in this configuration."""
    known = options(type(config))
    for key in given:
        needs = known[key].metadata["needs"] if key in known else ()
        if not needs:
            continue
        needed, *allowed = needs
        value = operator.attrgetter(needed)(config)
        if value not in allowed:
            group, _, name = needed.rpartition(".")
            shown = group if name in ("name", "method") else needed          # these two are set by their group
            value, *allowed = (str(each).lower() if isinstance(each, bool) else each for each in (value, *allowed))
            raise UserError(f"{key} is for {shown}={' or '.join(allowed)}, and has no effect with {shown}={value}: leave it "
                            f"out, or give {shown}={allowed[0]}")


def given_length(config: "TrainConfig", given: Collection[str]) -> str | None:
    """The key of LENGTHS that is among the `given` ones and not null; None for none. Raises UserError for two of them."""
    own = [key for key in LENGTHS if key in given and operator.attrgetter(key)(config) is not None]
    if len(own) > 1:
        raise UserError(f"{own[0]} and {own[1]} both say how long to train: give one of them")
    return own[0] if own else None


@dataclass
class KernelConfig:
    name: str = option("auto", "set by kernel=", verbatim=GRAMMAR)


@dataclass
class ModelConfig:
    """The widths of a model. rwkv/model/GENERATION.py says what null means, and lists the options of one generation."""

    generation: str = option("rwkv4", "architecture, set by model=", one_of=GENERATIONS, heading="Model")
    n_layer: int = option(4, "number of blocks", least=1, most=10_000)
    n_embd: int = option(192, "width in channels", least=1)
    n_att: int | None = option(None, "width inside time mixing; null: n_embd (rwkv4)", least=1)
    n_ffn: int | None = option(None, "width inside channel mixing; null: 4 n_embd", least=1)
    head_size: int = option(64, "width of a head (rwkv7)", least=1)
    decay_low_rank_dim: int | None = option(None, "rank of the decay, w1 and w2; null: as RWKV-LM has it for n_embd (rwkv7)",
                                            least=1)
    a_low_rank_dim: int | None = option(None, "rank of a1 and a2 (rwkv7)", least=1)
    v_low_rank_dim: int | None = option(None, "rank of v1 and v2 (rwkv7)", least=1)
    gate_low_rank_dim: int | None = option(None, "rank of the gate, g1 and g2 (rwkv7)", least=1)
    deep_embed_dim: int | None = option(None, "width of DeepEmbed's matrix of each token, 32 in RWKV-7a; null: none (rwkv7)",
                                        least=1)
    ctx_len: int = option(128, "tokens in a training window", least=1)

    def __post_init__(self) -> None:
        check_options(self, "model.")


@dataclass
class DataConfig:
    """rwkv/data/prepare.py says how val_fraction divides each kind of data."""

    name: str = option("stdlib", "set by data=", one_of=(*SOURCES, *TOKENS, "mix"), heading="Data")
    path: str | None = option(None, "a file, a folder, a pattern such as books/**/*.txt, or a data set's name", verbatim=PATH)
    sources: list[dict[str, Any]] = option(list, "of data=mix: {path: A.jsonl, weight: 0.7} for each source, with its share of "
                                           "the tokens; also name, data, field, separator, split, val_fraction",
                                           needs=("data.name", "mix"))
    field: str = option("text", "name of the field with the text, in jsonl and hf", verbatim=TEXT, filled=True,
                       needs=("data.name", "jsonl", "hf"))
    separator: str | None = option(None, "text between the documents of a file, such as <|endoftext|>; null: a file, or each "
                                   "text of jsonl and hf, is one document", verbatim=NAME, filled=True,
                                   needs=("data.name", "text", "jsonl", "hf"))
    template: str | None = option(None, f"of conversations: {TEMPLATES}; null: by init_from's file", verbatim=PATH,
                                  needs=("data.name", "chat"))
    think: str = option("false", "how learnt answers begin: true: answers with thoughts follow the prompt that asks for "
                        "thoughts; fake: the last answer follows an empty thought; false: as in the conversation",
                        one_of=THINK, needs=("data.name", "chat"))
    preview: bool = option(False, "true: show two conversations, with learnt text marked, and train nothing",
                           needs=("data.name", "chat"))
    split: str = option("train", "split of a Hugging Face data set", filled=True, needs=("data.name", "hf"))
    streaming: bool = option(False, "read jsonl and hf while training, and tokenise nothing before",
                             needs=("data.name", "jsonl", "hf", "mix"))
    shuffle_buffer: int = option(10_000, "documents of a stream that are shuffled at a time", least=1,
                                 needs=("data.streaming", True))
    val_documents: int = option(256, "first documents of a stream, which are for validation", least=1,
                                needs=("data.streaming", True))
    tokenizer: str = option("bpe", "byte, char, bpe (made from the text), world, FILE.json or FILE.txt", verbatim=PATH)
    vocab_size: int = option(2048, "number of tokens of a bpe tokenizer", least=257, most=2**24)
    end_of_text: str | None = option(None, "text of the token of FILE.json that ends a document; null: what FILE.json says",
                                     verbatim=NAME)
    batch_size: int = option(8, "windows in one backward pass, over all processes", least=1)
    cache_dir: str = option(".cache", "folder where tokenised data are kept for other runs", verbatim=PATH)
    val_fraction: float = option(0.1, "fraction of the data for validation", above=0.0, below=1.0,
                                 needs=("data.streaming", False))
    num_workers: int = option(0, "processes that load batches; 0: the training process itself", least=0)
    tokenize_workers: int = option(0, "shards tokenised at a time; 0: one per core, up to 4", least=0)
    sample_prompt: str = option("", "text that samples continue; empty: samples begin without a prompt", verbatim=TEXT)

    def __post_init__(self) -> None:
        self.think = str(self.think).lower()             # Hydra reads true and false as booleans
        check_options(self, "data.")


@dataclass
class OptimConfig:
    """The scales of time_mix_*, time_decay and time_first are 1, 2 and 3 in RWKV-LM (RWKV-v4neo/src/model.py). Muon's update
    is in rwkv/training/optim.py. l2_wrap and confidence_penalty (rwkv/model/loss.py) change gradients and no reported loss.
    """

    name: str = option("adamw", "set by optim=", one_of=("adamw", "adam", *ORTHOGONAL, EIGHT_BITS),
                       heading="Optimiser")
    lr: float = option(3e-3, "highest learning rate; less for models wider than 384 channels; with init_from= by tune=: full "
                       "1e-5, lora 2e-4, state 0.1")
    min_lr: float | None = option(None, "learning rate of the last step; null: a twentieth of lr")
    schedule: str = option("cosine", "how the rate falls: cosine, linear, exponential or constant (with "
                           "init_from=, unless tune=state)",
                           one_of=("cosine", "linear", "exponential", "constant"))
    warmup_steps: int = option(20, "steps in which the rate first rises to lr; 10 with init_from=", least=0)
    matrix_lr: float = option(0.02, "learning rate of the blocks' matrices under muon and normuon", least=0,
                              needs=("optim.name", *ORTHOGONAL))
    matrix_momentum: float = option(0.95, "momentum of the blocks' matrices under muon and normuon",
                                    needs=("optim.name", *ORTHOGONAL))
    time_mix_lr_scale: float = option(1.0, "factor on the rate of time_mix_* (rwkv4)", least=0)
    time_decay_lr_scale: float = option(2.0, "factor on the rate of the decays: rwkv4's time_decay, rwkv7's w0", least=0)
    time_first_lr_scale: float = option(3.0, "factor on the rate of time_first (rwkv4)", least=0)
    betas: tuple[float, float] = option((0.9, 0.99), "decay rates of Adam's two moments")
    eps: float = option(1e-8, "Adam's epsilon", least=0)
    weight_decay: float = option(0.0, "weight decay of matrices", least=0)
    grad_clip: float = option(1.0, "largest norm of the whole gradient; 0: no clipping", least=0)
    l2_wrap: float = option(1e-4, "penalty on each position's largest logit, as in RWKV-LM; 0: none", least=0, needs=LIKELIHOOD)
    confidence_penalty: float = option(0.0, "weight of a penalty on predictions of low entropy", least=0, needs=LIKELIHOOD)

    def __post_init__(self) -> None:
        check_options(self, "optim.")
        if not 0 <= self.matrix_momentum < 1:
            raise UserError(f"optim.matrix_momentum must be from 0 to below 1; got {self.matrix_momentum}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas must be two numbers from 0 to below 1; got {list(self.betas)}")
        if not 0 < self.lr < math.inf:
            raise UserError(f"optim.lr must be a finite number above 0; got {self.lr}")
        if not 0 < self.last_lr <= self.lr:
            raise UserError(f"optim.min_lr must be above 0 and at most optim.lr, which is {self.lr}; got {self.min_lr}: give "
                            "another optim.min_lr as well")

    @property
    def last_lr(self) -> float:
        """The learning rate of the last step. Rounding makes a twentieth of 3e-3 exactly 1.5e-4."""
        return float(f"{self.lr / 20:.6g}") if self.min_lr is None else self.min_lr


FSDP = ("trainer.strategy", "fsdp")


@dataclass
class TrainerConfig:
    max_steps: int = option(1500, "optimiser steps in all", least=1, heading="Length of the run, metrics and samples")
    max_tokens: float | None = option(None, "tokens in all, as 1e9, instead of max_steps", least=1, most=1e18)
    epochs: float | None = option(None, "passes over the training split, instead of max_steps; data=chat: 2 where no length is "
                                  "given", above=0.0, below=1e9)
    val_every: int = option(500, "steps between two validations", least=1)
    val_tokens: int | None = option(None, "tokens that each validation reads, the first of the validation split; null: all",
                                    least=1)
    checkpoint_every: int = option(500, "steps between two checkpoints", least=1)
    keep_last: int = option(2, "number of checkpoints kept beside the best", least=1)
    log_every: int = option(10, "steps between two rows of metrics; train/loss is their mean", least=1)
    grad_norms: bool = option(False, "log the gradient norm of each part of the model, before clipping")
    sample_every: int | None = option(None, "steps between two texts in samples.jsonl; 0: none; null: val_every", least=0)
    sample_tokens: int = option(200, "tokens of each sample", least=0)
    probe: bool = option(False, "measure the kernel's share of the time and its errors, as sweeps do")
    overfit_batches: int = option(0, "train on that many batches again and again; 0: on all", least=0)
    precision: str | None = option(None, "32-true, tf32 (products on a GPU round float32 to 10 bits), bf16-mixed, fp16-mixed, "
                                   "or auto: bf16-mixed where that is faster; null: bf16-mixed on a GPU that has it, else "
                                   "32-true", one_of=("32-true", "tf32", "bf16-mixed", "fp16-mixed", "auto"),
                                   heading="Memory, speed and devices")
    accumulate: int = option(1, "batches whose gradients one step adds up", least=1)
    activation_checkpointing: bool = option(False, "compute each block again in its backward pass: less memory, a third more "
                                            "time")
    optim_in_backward: bool = option(False, "update each weight as soon as its gradient is known, and free the gradient: the "
                                     "same numbers in less memory; needs optim.grad_clip=0")
    tbptt: int = option(0, "segments of ctx_len tokens in a step, with gradients through the state between them and "
                        "documents read to their end; 0: independent windows", least=0)
    compile: bool = option(False, "compile each block with torch.compile")
    graphs: bool | None = option(None, "on a GPU replay all blocks as one CUDA graph: the host launches no single operations; "
                                 "null: in runs whose steps are so small that the host would be the limit")
    malloc: str = option("tuned", "tuned: the process keeps large freed blocks of memory, which is faster, and a large run "
                         "with frozen weights or conversations returns them after each block, and with fsdp at once; small: "
                         "it returns them at once (Linux); default: as the C library does",
                         one_of=("tuned", "small", "default"))
    accelerator: str = option("auto", "auto, cpu or gpu", one_of=("auto", "cpu", "gpu"))
    strategy: str = option("single", "single, ddp or fsdp", one_of=("single", "ddp", "fsdp"))
    reshard: bool = option(True, "free a block's gathered weights after its forward pass, and gather them again for its "
                           "backward pass; false: keep them in between, which takes more memory and less time (fsdp)",
                           needs=FSDP)
    offload: bool = option(False, "keep the weights, gradients and optimiser state in host memory, and update them there; a "
                           "GPU has what a block needs (fsdp)", needs=FSDP)
    devices: int = option(1, "processes on each machine; 0: one per GPU", least=0)
    num_nodes: int = option(1, "number of machines", least=1)
    link_gbps: float | None = option(None, "for the plan: Gbit/s that each device can send; null: as machines with such GPUs "
                                     "usually have", above=0.0, needs=("plan", "true", "timed", *GPUS))

    def __post_init__(self) -> None:
        check_options(self, "trainer.")
        if self.strategy == "single" and (self.devices, self.num_nodes) != (1, 1):
            raise UserError("trainer.devices and trainer.num_nodes are for trainer=ddp and trainer=fsdp")
        if self.overfit_batches % self.accumulate:
            raise UserError(f"trainer.overfit_batches must be a multiple of trainer.accumulate, {self.accumulate}; got "
                            f"{self.overfit_batches}")
        if self.strategy == "fsdp" and self.sample_every:
            raise UserError("trainer=fsdp gives each process a share of the weights, and trainer.sample_every needs them "
                            "whole: leave it out; the run ends with a sample of its last checkpoint")


@dataclass
class LoggerConfig:
    name: str = option("wandb", "set by logger=", verbatim=GRAMMAR, filled=True, heading="Logger")
    _target_: str | None = option(None, "the class of any logger of Lightning, beside metrics.csv: configs/logger/mlflow.yaml")
    arguments: list[str] = option(list, "NAME=VALUE that _target_ is called with; may be given several times")
    project: str | None = option(None, "project, in MLflow the experiment; null: WANDB_PROJECT or the tracker's own "
                                 "setting, by default timemix", filled=True)
    group: str | None = option(None, "group of runs; null: WANDB_RUN_GROUP, by default the sweep's folder")
    run_name: str | None = option(None, "name of the run; null: WANDB_NAME, by default the kernel and out_dir")
    published_losses: list[float] = option(list, "mean training losses of a published run, for the report: of its first "
                                           "published_steps steps, of the next, ...")
    published_steps: int = option(0, "steps that each of published_losses is the mean of", least=0)

    def __post_init__(self) -> None:
        check_options(self, "logger.")
        if self._target_ is None:
            _one_of("logger.name", self.name, ("wandb", "csv", "none"))
        if bool(self.published_losses) != bool(self.published_steps):
            raise UserError("logger.published_losses and logger.published_steps belong together: give both or neither")


@dataclass
class SweepConfig:
    """How the runs of a sweep are started (train.py -m)."""

    jobs: int | None = option(None, "runs at a time, each with its share of the threads, or a GPU of its own; null: 1, with "
                              "submitit all", least=1, heading="Sweep, with -m")
    launcher: str = option("local", "local: processes of this machine; submitit: jobs of SLURM (pip install 'timemix[slurm]')",
                           one_of=("local", "submitit"))
    arguments: list[str] = option(list, "NAME=VALUE for submitit, as slurm_partition=gpu, gpus_per_node=1, or timeout_min=60, "
                                  "after which a job saves and is queued again; may be given several times",
                                  needs=("sweep.launcher", "submitit"))

    def __post_init__(self) -> None:
        check_options(self, "sweep.")


STATE_LAYOUTS = ("official", "transposed")
LORA = ("tune.method", "lora")
ENGLISH = "english"                      # the text of tune.guard that comes with the package


@dataclass
class TuneConfig:
    """What a run with init_from= trains. LoRA: W + alpha / rank B A (Hu et al. 2021, arXiv 2106.09685)."""

    method: str = option("full", "set by tune=", one_of=("full", "lora", "state"), heading="Tuning")
    rank: int = option(16, "rank of each adapter (lora)", least=1, needs=LORA)
    alpha: float = option(32.0, "factor on the adapters, divided by the rank (lora)", above=0.0, needs=LORA)
    dropout: float = option(0.0, "fraction of an adapter's inputs left out while it is trained (lora)", least=0, needs=LORA)
    modules: list[str] = option(list, "linear layers of a block that get an adapter, as [att.key,att.value]; []: all (lora)",
                                verbatim=GRAMMAR, needs=LORA)
    state: str | None = option(None, "tuned state of any program to begin from; null: zeros, or that of init_from= (state)",
                               verbatim=PATH, needs=("tune.method", "state"))
    base: str = option("float32", "dtype of the frozen weights' matrices: float32, bfloat16, or on a CPU int8 or int4",
                       one_of=BASES)
    guard: str | None = option(ENGLISH, f"text whose loss is measured before and after tuning: {ENGLISH}, a small one that "
                               "comes with this program, FILE, or null for none", verbatim=PATH)
    objective: str = option("likelihood", "likelihood: of the data; dpo or ipo: learns from pairs (data=chat) to prefer the "
                            "chosen answer to the rejected one", one_of=("likelihood", *PREFERENCES))
    beta: float = option(0.1, "weight of staying near the model of init_from= (dpo, ipo)", above=0.0,
                         needs=("tune.objective", *PREFERENCES))
    label_smoothing: float = option(0.0, "assumed fraction of pairs whose answers are swapped by mistake (dpo)", least=0,
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
            raise UserError(f"tune.base={self.base} is for frozen weights, and tune=full trains them: use tune=lora or state")

    @property
    def prefers(self) -> bool:
        """Whether the objective learns from pairs of answers."""
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
    seed: int = option(0, "seed of the initial weights and of the order of the data", heading="Run")
    out_dir: str | None = option(None, "the run's directory; null: runs/DATE_TIME", verbatim=PATH)
    resume: str | None = option(None, "auto: continue the run in out_dir, or else the latest, or begin one; PATH: continue "
                                "this run or checkpoint", verbatim=PATH)
    init_from: str | None = option(None, "checkpoint of any format, or a name on the Hub as ORG/REPO/FILE, that gives weights, "
                                   "sizes and tokenizer", verbatim=PATH)
    plan: str = option("false", "true: show what the run would do and need, and train nothing; timed: measure the time of its "
                       f"steps too, even if they take minutes; {', '.join(GPUS)}: for a machine with such GPUs",
                       one_of=("false", "true", "timed", *GPUS))

    def __post_init__(self) -> None:
        self.plan = str(self.plan).lower()               # Hydra reads true and false as booleans
        check_options(self)
        whole_number("seed", self.seed, most=2**32 - 1)          # the largest that NumPy's generator takes
        if self.plan in GPUS and self.trainer.accelerator == "cpu":
            raise UserError(f"plan={self.plan} is for GPUs, and trainer.accelerator=cpu for CPUs: leave one out")
        if self.trainer.strategy == "fsdp" and self.tune.base in ("int8", "int4"):
            raise UserError(f"trainer=fsdp divides weights in floating point, and tune.base={self.tune.base} packs them: use "
                            "tune.base=bfloat16, or trainer=ddp")
        if self.tune.prefers:
            self._require_pairs()
        if self.trainer.tbptt and self.data.name == "mix":
            raise UserError("trainer.tbptt conflicts with data=mix, whose windows are of several sources: leave one out")
        if self.data.streaming and self.trainer.tbptt:
            raise UserError("trainer.tbptt conflicts with data.streaming, which cuts documents into windows: leave one out")
        if self.data.streaming and self.trainer.epochs is not None:
            raise UserError("trainer.epochs conflicts with data.streaming, since the length of a stream is not known: give "
                            "trainer.max_steps or trainer.max_tokens")
        if self.trainer.tbptt and self.tune.dropout:
            raise UserError("trainer.tbptt computes segments twice, and tune.dropout would draw other random numbers the "
                            "second time: leave one out")
        if self.trainer.strategy == "fsdp" and self.optim.name == EIGHT_BITS:
            raise UserError(f"optim={EIGHT_BITS} rounds moments in blocks of a whole parameter, and trainer=fsdp divides each "
                            "parameter among processes: use optim=adamw, or trainer=ddp")

    def _require_pairs(self) -> None:
        asked = f"tune.objective={self.tune.objective}"
        if self.data.name != "chat":
            raise UserError(f"{asked} learns from pairs of answers, which data={self.data.name} does not read: use data=chat")
        if self.trainer.tbptt:
            raise UserError(f"{asked} reads both answers of a pair in one row, and trainer.tbptt reads rows in segments: leave "
                            "trainer.tbptt out, and take a model.ctx_len that holds a pair")

    def require_separate_updates(self) -> None:
        """Raises UserError for the first option that trainer.optim_in_backward=true excludes. When a run is resumed, only its
        own options together with the given ones can tell.
        """
        trainer, optim = self.trainer, self.optim
        if not trainer.optim_in_backward:
            return
        obstacles = {
            f"trainer={trainer.strategy} exchanges gradients between processes before they are applied: use trainer=auto":
                trainer.strategy != "single",
            f"optim={optim.name} updates all matrices of one shape together: use optim=adamw": optim.name in ORTHOGONAL,
            f"optim.grad_clip={optim.grad_clip:g} needs the norm of all gradients: add optim.grad_clip=0": optim.grad_clip > 0,
            f"trainer.accumulate={trainer.accumulate} adds up the gradients of several batches: use trainer.accumulate=1":
                trainer.accumulate > 1,
            f"trainer.tbptt={trainer.tbptt} adds up the gradients of its segments: use trainer.tbptt=1 or 0": trainer.tbptt > 1,
            "trainer.precision=fp16-mixed repeats steps whose gradients overflow: use trainer.precision=bf16-mixed":
                trainer.precision == "fp16-mixed",
            "trainer.grad_norms=true measures gradients after the backward pass: leave it out": trainer.grad_norms,
            "trainer.graphs=true computes the gradients of all blocks in one launch: leave it out": bool(trainer.graphs)}
        for reason, applies in obstacles.items():
            if applies:
                raise UserError(f"trainer.optim_in_backward=true updates each weight during the backward pass, and {reason}")

    @property
    def only_plans(self) -> bool:
        return self.plan != "false"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all processes read for one optimiser step."""
        segments = max(1, self.trainer.tbptt)
        return self.data.batch_size * self.model.ctx_len * segments * self.trainer.accumulate


SMALL = 1e-30                            # limits of options of sampling, so that logits stay within float32
LARGE = 1e30
ORDERS = ("hf", "rwkv")


def _biases(texts: Iterable[str]) -> dict[int, float]:
    """{ID: X} for texts ID:X. Raises UserError for others."""
    biases = {}
    for text in texts:
        token, _, bias = text.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UserError(f"logit_bias must be TOKEN_ID:NUMBER, as in logit_bias=198:-5; got {text!r}") from None
    return biases


def _texts_and_ids(texts: Iterable[str]) -> list[str | int]:
    """The texts; one that is a list of numbers in brackets becomes these numbers."""
    found: list[str | int] = []
    for text in texts:
        ids = re.fullmatch(r"\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]", text, re.ASCII)
        found += map(int, ids[1].split(",")) if ids else [text]
    return found


@dataclass(frozen=True)
class Sampling:
    """The options of sampling, for the command line, requests, the engine and kernels/draw.

    The options of generate.py, chat.py and serve.py and the fields of requests derive from these. Raises UserError for a value
    out of range or of another type; integers may be NumPy's or torch's.

    The penalties (rwkv/generation/sampling.py has the formula): repetition_penalty (CTRL, arXiv 1909.05858) is for tokens of
    the prompt and of the text that is written; presence_penalty and frequency_penalty (OpenAI's API) are for tokens of the text
    only, so that each answer of a conversation begins without penalties, and so does a text that continues a saved state.
    penalty_decay multiplies the counts of frequency_penalty before each new token is counted, as in the demos of RWKV's author.
    no_penalty: ids of tokens that no penalty changes, and texts, which stand for the tokens that they are encoded as.
    Tokens in `banned` are never drawn.
    """

    temperature: float = option(0.8, "temperature; 0: always the likeliest token", least=SMALL, most=LARGE, or_zero=True,
                                served=(0, 2))
    top_k: int = option(0, "choose among that many likeliest tokens; 0: all", least=0, served=(-1, 2**31 - 1))
    top_p: float = option(0.95, "choose among the likeliest tokens of that total probability; 1: all", least=SMALL, most=1,
                          served=(0, 1))
    min_p: float = option(0.0, "lowest probability, as a fraction of the highest; 0: any", least=0, most=1)
    repetition_penalty: float = option(1.0, "divides positive logits of tokens in the prompt or the text, multiplies negative "
                                       "ones; 1: off", least=SMALL, most=LARGE, served=(0.01, 100))
    presence_penalty: float = option(0.0, "subtracted from the logit of each token in the text so far; 0: off",
                                     least=-LARGE, most=LARGE, served=(-2, 2))
    frequency_penalty: float = option(0.0, "subtracted for each time that the token is in the text so far; 0: off",
                                      least=-LARGE, most=LARGE, served=(-2, 2))
    penalty_decay: float = option(1.0, "factor on the counts of frequency_penalty at each step, so that they fade; 1: they "
                                  "stay", least=0, most=1)
    no_penalty: tuple[int | str, ...] = option(tuple, "text whose tokens have no penalty, or the tokens' ids as [ID,...]; may "
                                               "be given several times", typed=list[str], read=_texts_and_ids, verbatim=TEXT)
    logit_bias: Mapping[int, float] = option(dict, "ID:X adds X to a token's logit; may be given several times",
                                             typed=list[str], read=_biases, least=-LARGE, most=LARGE, served=(-100, 100))
    banned: tuple[int, ...] = option(tuple, "[ID,...]: tokens never chosen, such as [0], the end of a text in many models",
                                     typed=list[int])
    order: str = option("hf", "hf: top_p, top_k and min_p act after the temperature, as in Hugging Face; rwkv: before it, as "
                        "in ChatRWKV", one_of=ORDERS)

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
                raise UserError(f"{item.name} is {'0, or ' * limits['or_zero']}a number from {limits['least']:g}{upto}; "
                                f"got {number!r}")

    @classmethod
    def of(cls, config: Any) -> "Sampling":
        """The options of a program's configuration (with_sampling). Raises UserError for a value out of range."""
        values = {}
        for item in fields(cls):
            read = item.metadata["read"]
            value = getattr(config, item.name)
            values[item.name] = read(value) if read else value
        return cls(**values)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """A hashable value, equal for equal options."""
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
        """Raises UserError where a token id is outside the vocabulary, or all tokens are banned."""
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
        """The temperature, top_p, and the options that are not at their default: temperature 0.8, top_p 0.95, order rwkv."""
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
    """The field `sampling`: the name of the preset, a file of configs/sampling, that sets the options of sampling."""
    return option(name, "set by sampling=; without it the file, or the kind of model, chooses first (docs/chat.md); options "
                  "that are given override it", verbatim=GRAMMAR, heading=heading)


def layout_option(of: str) -> Any:
    """The field `state_layout` beside the option `of`."""
    return option(None, f"which way round a tuned state of {of} is, where its file does not say: official (value by key, as "
                  "trainers write it) or transposed (as web-rwkv's .st has it)", one_of=STATE_LAYOUTS)


Config = TypeVar("Config")


def with_sampling(config: type[Config]) -> type[Config]:
    """A decorator below @dataclass: adds a field for each option of Sampling after the class's field `sampling`."""
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
    """The first options of generate.py, chat.py, serve.py and rwkv.tools.evaluate."""

    checkpoint: str = option(LATEST.as_posix(), "a file, a Hugging Face directory, a run's directory, or a name on the Hub: "
                             "ORG/REPO/FILE, ORG/REPO or ORG/REPO:Q4_K_M, with @REVISION if need be. Other options that name "
                             "a state, an adapter, a tokenizer or a template take such a name too", heading="Model",
                             verbatim=PATH)
    lora: str | None = option(None, "another program's adapter, merged into the checkpoint: PEFT's directory, or a file of "
                              "RWKV-PEFT", verbatim=PATH)
    lora_alpha: float | None = option(None, "alpha of an adapter whose file does not state it, as RWKV-PEFT's do not",
                                      above=0.0)
    tokenizer: str | None = option(None, "byte, world, FILE.json or FILE.txt, where the checkpoint has none", verbatim=PATH)
    end_of_text: str | None = option(None, "text of the token that ends a text; null: what the checkpoint or FILE.json "
                                     "says", verbatim=NAME)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    device: str = option("auto", "auto, cpu or cuda", one_of=("auto", "cpu", "cuda"))
    dtype: str | None = option(None, "float32, bfloat16, float16 (on a GPU), or int8 or int4 (of the matrices); null: bfloat16 "
                               "on a GPU that has it, else float32", one_of=DTYPES)


@dataclass
@with_sampling
class GenerateConfig(SavedModelConfig):
    """rwkv/generation/output.py checks combinations of options."""

    prompt: str | None = option(None, "text to continue; -: standard input", heading="Texts", verbatim=TEXT)
    prompts: str | None = option(None, 'file with a prompt on each line, or .jsonl with {"prompt": "..."} on each line',
                                 verbatim=PATH)
    state: str | None = option(None, "file that save_state= wrote: its text is continued, with the same model and tokenizer; "
                               "or a tuned state of any program", verbatim=PATH)
    state_layout: str | None = layout_option("state=")
    num_samples: int = option(1, "texts for each prompt", least=1)
    seed: int = option(0, "seed of the first text of a prompt; the next has the next seed", least=0)
    batch_size: int = option(16, "batch size: texts at a time; a text does not depend on it", least=1)
    max_new_tokens: int = option(200, "largest number of tokens in a text", least=0)
    stop: list[str] = option(list, "text that ends a sample and is not shown; may be given several times")
    stop_tokens: list[int] = option(list, "[ID,...]: tokens that end a sample and are not shown")
    json_schema: str | None = option(None, "file with a JSON schema that each text satisfies", verbatim=PATH)
    grammar: str | None = option(None, "file with a Lark grammar that each text follows", verbatim=PATH)
    regex: str | None = option(None, "regular expression that each text matches as a whole", verbatim=TEXT)
    sampling: str = preset_option("default")
    stream: bool = option(True, "show a single text token by token", heading="Output")
    out: str | None = option(None, "file for the texts as lines of JSON, with tokens and finish reason", verbatim=PATH)
    logprobs: int = option(0, "number of likeliest tokens whose log-probabilities are written, to out= or else to standard "
                           "error", least=0)
    save_state: str | None = option(None, "file for the state after the text, and the stop string that ended it, for state=",
                                    verbatim=PATH)

    def __post_init__(self) -> None:
        check_options(self)
        Sampling.of(self)


@dataclass
@with_sampling
class ChatConfig(SavedModelConfig):
    template: str | None = option(None, TEMPLATE_OF_MODEL, verbatim=PATH, heading="Conversation")
    system: str | None = option(None, "system message")
    state: str | None = option(None, "state file that the conversation begins from: of save_state=, or a tuned state of any "
                               "program", verbatim=PATH)
    state_layout: str | None = layout_option("state=")
    think: str = option("false", "true: answers begin with thoughts; fake: with an empty thought (templates g1, flower)",
                        one_of=THINK)
    seed: int = option(0, "seed of the first answer; the next has the next seed", least=0)
    max_new_tokens: int = option(500, "largest number of tokens in an answer", least=1)
    sampling: str = preset_option("chat")

    def __post_init__(self) -> None:
        self.think = str(self.think).lower()             # Hydra reads true and false as booleans
        check_options(self)
        Sampling.of(self)


@dataclass
class EvaluateDataConfig:
    path: str | None = option(None, 'a text in UTF-8, or FILE.jsonl with {"text": "..."} on each line', verbatim=PATH,
                              heading="Evaluation")
    template: str | None = option(None, f"chat template of conversations in FILE.jsonl: {TEMPLATE_OF_MODEL}", verbatim=PATH)


@dataclass
class EvaluateConfig(SavedModelConfig):
    dtype: str | None = option("float32", "as for generate.py: float32, bfloat16, float16, int8 or int4", one_of=DTYPES)
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    chunk_len: int = option(1024, "tokens in a pass", least=1)
    batch_size: int = option(16, "texts in a pass, of FILE.jsonl", least=1)
    start: str | None = option(None, "text before the first prediction, instead of the end-of-text token", verbatim=TEXT)
    out: str | None = option(None, "file for the result, which is on standard output too", verbatim=PATH)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass
@with_sampling
class ServeConfig(SavedModelConfig):
    model_name: str | None = option(None, "the model's id for clients; null: the checkpoint's name")
    adapters: list[str] = option(list, "NAME=PATH,...: further models, which requests name: PATH is the directory of a run of "
                                 "tune=state or tune=lora that began from this checkpoint, a .ckpt of it, a state file, or "
                                 "another program's tuned state or adapter; may be given several times", filled=True)
    state_layout: str | None = layout_option("adapters=")
    template: str | None = option(None, f"chat template: {TEMPLATE_OF_MODEL}", verbatim=PATH)
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every one of this machine", heading="HTTP", filled=True)
    port: int = option(8000, "port; 0: a free one", least=0)
    api_key: list[str] = option(list, "key that clients must send; may be given several times, a key for each of several "
                                "clients; null: none", filled=True)
    cors: list[str] = option(list, "origin whose pages may use the server; may be given several times", filled=True)
    sampling: str = preset_option("openai", heading="Sampling, for requests that do not say")
    max_rows: int = option(32, "batch size: texts generated at a time", least=1, heading="Limits")
    max_queue: int = option(128, "texts that may wait; a request beyond them is refused with 429", least=0)
    max_tokens: int = option(4096, "largest number of tokens in a text", least=1)
    max_prompt_tokens: int = option(32768, "largest number of tokens in a prompt", least=1)
    max_body_mib: int = option(8, "largest body of a request, in MiB", least=1)
    max_connections: int = option(1024, "open connections", least=1)
    receive_s: float = option(30.0, "seconds within which a whole request must arrive", above=0.0)
    timeout_s: float = option(600.0, "seconds after which a text ends where it is", above=0.0)
    grace_s: float = option(30.0, "seconds that running texts have after SIGTERM", least=0.0)
    cache_mib: int = option(256, "memory for the states of prompts and answers, in MiB, apart for each key; 0: none", least=0)
    states_mib: int = option(256, "memory for the states that clients keep (/v1/states, save_state), in MiB; where it is full, "
                             "states used longest ago leave it, of keys with more than an equal share; 0 without states_dir: "
                             "none are kept", least=0, heading="States that clients keep")
    states_dir: str | None = option(None, "folder where each such state is also a file, which outlives a restart; several "
                                    "servers may share it; null: states that leave memory are lost", verbatim=PATH, filled=True)
    states_dir_mib: int = option(4096, "size of those files, in MiB; those used longest ago are deleted", least=1)
    responses_mib: int = option(64, "memory for the items of stored responses (/v1/responses), in MiB; those used longest ago "
                                "are dropped; with states_dir they are files there, too", least=0)

    def __post_init__(self) -> None:
        given = self.api_key or []       # a file of options may have one key, or null
        self.api_key = [key for key in ([given] if isinstance(given, str) else given) if key != "null"]
        check_options(self)
        _ = self.adapter_paths           # raises UserError for other forms than NAME=PATH
        if self.port > 65535:
            raise UserError(f"port must be from 0 to 65535; got {self.port}")
        if "*" in self.cors and self.api_key:
            raise UserError("cors=* lets any page use this server: with api_key= name the origins")
        Sampling.of(self)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The path of each adapter by its name. Raises UserError for another form, and for a name given twice."""
        found: dict[str, str] = {}
        for pair in (pair for given in self.adapters for pair in NEXT_PAIR.split(given)):
            name, _, path = pair.partition("=")
            if not name or not path:
                raise UserError(f"adapters must be NAME=PATH, or several such pairs with commas between them; got {pair!r}")
            if name in found:
                raise UserError(f"adapters has the name {name!r} twice: give each model a name of its own")
            found[name] = path
        return found


def whole_number(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    """`value` as an int. Raises UserError, with the option's name, where it is not a whole number from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be a whole number; got {value!r}") from None
    if not least <= number <= most:
        raise UserError(f"{name} must be {f'{least} or more' if most == math.inf else f'from {least} to {most}'}; got {number}")
    return number


def whole_numbers(name: str, values: Iterable[Any], most: float = math.inf) -> tuple[int, ...]:
    """`values` as ints from 0 to `most`. Raises UserError, with the option's name, for anything else."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of whole numbers; got {values!r}")
    return tuple(whole_number(name, value, most=most) for value in values)


def _texts_or_whole_numbers(name: str, values: Any) -> tuple[int | str, ...]:
    """`values`, each a text or an int from 0. Raises UserError, with the option's name, for others and for an empty text."""
    if isinstance(values, str):
        values = (values,)
    if not isinstance(values, Iterable) or "" in (values := tuple(values)):
        raise UserError(f"{name} must be a list of token ids and of texts that are not empty; got {values!r}")
    return tuple(value if isinstance(value, str) else whole_number(name, value) for value in values)


def strings(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """`values` as a tuple. Raises UserError, with the option's name, unless it is a list of strings."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise UserError(f"{name} must be a list of strings; got one {type(values).__name__}: put it into a list")
    values = tuple(values)
    for value in values:
        if not isinstance(value, str):
            raise UserError(f"{name} must be a list of strings; one of them is {value!r}")
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
