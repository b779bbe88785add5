"""Declares the options of train.py in a dataclass per config group."""

import math
import operator
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rwkv.config.common import TEMPLATES, THINK, KernelConfig
from rwkv.config.schema import GRAMMAR, NAME, PATH, TEXT, check_options, option
from rwkv.config.values import require_one_of, whole_number
from rwkv.errors import UserError

PACKAGE = Path(__file__).parent.parent
SCALED = ("time_mix", "time_decay", "time_first")        # parameters with a learning-rate factor, optim.NAME_lr_scale
GENERATIONS = tuple(sorted(path.parent.name for path in (PACKAGE / "model").glob("rwkv[0-9]*/__init__.py")))
SOURCES = tuple(sorted(path.stem for path in (PACKAGE / "data" / "sources").glob("[!_]*.py")))    # values of data= with text
TOKENS = tuple(sorted(path.stem for path in (PACKAGE / "data" / "token_files").glob("[!_]*.py")))    # values of data= with ids
STREAMED = ("jsonl", "hf")               # values of data= that data.streaming supports
ORTHOGONAL = ("muon", "normuon")                         # optimisers that orthogonalise the updates of the blocks' matrices
EIGHT_BITS = "adamw8bit"                 # the optimiser with 8-bit moments
GPUS = ("a100", "h100", "h200", "rtx3060", "rtx4090", "rtx5090")         # GPUs for which plan= can plan
LENGTHS = ("trainer.max_steps", "trainer.max_tokens", "trainer.epochs")      # the options that set the training length
BASES = ("float32", "bfloat16", "int8", "int4")          # dtypes of frozen weights (tune.base)
PREFERENCES = ("dpo", "ipo")             # objectives that train on pairs of answers
LIKELIHOOD = ("tune.objective", "likelihood")
ALL_WEIGHTS = ("tune.method", "full")


def length_option(config: "TrainConfig", user_keys: Collection[str]) -> str | None:
    """Returns the option in `LENGTHS` that the user has set, or None. Raises UserError if several are set."""
    lengths = [key for key in LENGTHS if key in user_keys and operator.attrgetter(key)(config) is not None]
    if len(lengths) > 1:
        raise UserError(f"{lengths[0]} conflicts with {lengths[1]}, because both set the training length: use only one of "
                        "these options")
    return lengths[0] if lengths else None


@dataclass
class ModelConfig:
    """The sizes of a model. rwkv/model/GENERATION/ lists the options of a generation, and computes the values that are null."""

    generation: str = option("rwkv4", "architecture; set it with model=NAME", one_of=GENERATIONS, heading="Model")
    n_layer: int = option(4, "number of blocks", least=1, most=10_000)
    n_embd: int = option(192, "embedding width (channels)", least=1)
    n_att: int | None = option(None, "width of time mixing; null: n_embd (rwkv4)", least=1)
    n_ffn: int | None = option(None, "width of channel mixing; null: 4 n_embd", least=1)
    head_size: int = option(64, "head size (rwkv7)", least=1)
    decay_low_rank_dim: int | None = option(None, "rank of the decay's LoRA, w1 and w2; null: RWKV-LM's choice for n_embd "
                                            "(rwkv7)", least=1)
    a_low_rank_dim: int | None = option(None, "rank of the in-context learning rate's LoRA, a1 and a2 (rwkv7)", least=1)
    v_low_rank_dim: int | None = option(None, "rank of the value residual's LoRA, v1 and v2 (rwkv7)", least=1)
    gate_low_rank_dim: int | None = option(None, "rank of the gate's LoRA, g1 and g2 (rwkv7)", least=1)
    deep_embed_dim: int | None = option(None, "DeepEmbed's width per token, 32 in RWKV-7a; null: no DeepEmbed (rwkv7)", least=1)
    ctx_len: int = option(128, "context length: tokens per training window", least=1)

    def __post_init__(self) -> None:
        check_options(self, "model.")


@dataclass
class DataConfig:
    """The training data. rwkv/data/prepare.py describes how val_fraction splits each kind of data."""

    name: str = option("stdlib", "kind of data; set it with data=NAME", one_of=(*SOURCES, *TOKENS, "mix"), heading="Data")
    path: str | None = option(None, "file, folder, pattern such as books/**/*.txt, or data set name", verbatim=PATH)
    sources: list[dict[str, Any]] = option(list, "for data=mix: {path: A.jsonl, weight: 0.7} per source; tokens are drawn in "
                                           "proportion to the weights; other keys: name, data, field, separator, split, "
                                           "config, val_fraction",
                                           needs=("data.name", "mix"))
    field: str = option("text", "name of the field with the text, in jsonl and hf", verbatim=TEXT, filled=True,
                        needs=("data.name", "jsonl", "hf"))
    separator: str | None = option(None, "string between the documents of a file, such as <|endoftext|>; null: each file, or "
                                   "each row of jsonl and hf, is one document", verbatim=NAME, filled=True,
                                   needs=("data.name", "text", "jsonl", "hf"))
    template: str | None = option(None, f"chat template: {TEMPLATES}; null: the template of init_from", verbatim=PATH,
                                  needs=("data.name", "chat"))
    think: str = option("false", "how training prompts end: true: with <think, before answers with reasoning; fake: with empty "
                        "reasoning, before the last answer if it has no reasoning; false: without reasoning",
                        one_of=THINK, needs=("data.name", "chat"))
    preview: bool = option(False, "true: show two conversations, with the trained text marked, and exit",
                           needs=("data.name", "chat"))
    split: str = option("train", "split of the Hugging Face data set", filled=True, needs=("data.name", "hf"))
    config: str | None = option(None, "configuration of the Hugging Face data set, such as sample-10BT; null: its default",
                                filled=True, needs=("data.name", "hf"))
    streaming: bool = option(False, "tokenise jsonl and hf while training, instead of before",
                             needs=("data.name", "jsonl", "hf", "mix"))
    shuffle_buffer: int = option(10_000, "size of the shuffle buffer of a stream, in documents", least=1,
                                 needs=("data.streaming", True))
    val_documents: int = option(256, "number of validation documents, taken from the start of the stream", least=1,
                                needs=("data.streaming", True))
    tokenizer: str = option("bpe", "byte, char, bpe (trained on the text), world, FILE.json or FILE.txt", verbatim=PATH)
    vocab_size: int = option(2048, "vocabulary size of a bpe tokenizer", least=257, most=2**24, needs=("data.tokenizer", "bpe"))
    end_of_text: str | None = option(None, "end-of-text token; null: the one in FILE.json", verbatim=NAME, filled=True)
    batch_size: int = option(8, "batch size: windows per backward pass, over all processes", least=1)
    cache_dir: str = option(".cache", "cache folder for tokenised data", verbatim=PATH)
    val_fraction: float = option(0.1, "fraction of the data for validation", above=0.0, below=1.0,
                                 needs=("data.streaming", False))
    num_workers: int = option(0, "data-loader processes; 0: load in the training process", least=0)
    tokenize_workers: int = option(0, "shards tokenised in parallel; 0: one per core, up to 4", least=0)
    sample_prompt: str = option("", "prompt of the samples; empty: no prompt", verbatim=TEXT)

    def __post_init__(self) -> None:
        check_options(self, "data.")
        for entry in self.sources:
            for name in ("weight", "val_fraction"):
                if isinstance(entry, dict) and isinstance(entry.get(name), str):     # YAML reads 1e-1 as a string
                    with suppress(ValueError):
                        entry[name] = float(entry[name])


@dataclass
class OptimConfig:
    """The optimiser and its learning rates.

    The default learning-rate factors of time_mix_*, time_decay and time_first are RWKV-LM's (RWKV-v4neo/src/model.py). l2_wrap
    and confidence_penalty (rwkv/model/loss.py) change gradients, not reported losses. Muon: rwkv/training/optim/muon.py.
    """

    name: str = option("adamw", "optimiser; set it with optim=NAME", one_of=("adamw", "adam", *ORTHOGONAL, EIGHT_BITS),
                       heading="Optimiser")
    lr: float = option(3e-3, "peak learning rate; the default is lower for models wider than 384 channels; with init_from= "
                       "it is 1e-5 for tune=full, 2e-4 for lora, 0.1 for state")
    min_lr: float | None = option(None, "final learning rate; null: lr / 20")
    schedule: str = option("cosine", "learning-rate schedule: cosine, linear, exponential or constant; default with "
                           "init_from=: constant, unless tune=state", one_of=("cosine", "linear", "exponential", "constant"))
    warmup_steps: int = option(20, "learning-rate warm-up steps; default with init_from=: 10", least=0)
    matrix_lr: float = option(0.02, "learning rate of the blocks' matrices (muon, normuon)", least=0,
                              needs=("optim.name", *ORTHOGONAL))
    matrix_momentum: float = option(0.95, "momentum of the blocks' matrices (muon, normuon)",
                                    needs=("optim.name", *ORTHOGONAL))
    time_mix_lr_scale: float = option(1.0, "learning-rate factor of time_mix_* (rwkv4)", least=0, needs=ALL_WEIGHTS)
    time_decay_lr_scale: float = option(2.0, "learning-rate factor of the decays: rwkv4's time_decay, rwkv7's w0", least=0,
                                        needs=ALL_WEIGHTS)
    time_first_lr_scale: float = option(3.0, "learning-rate factor of time_first (rwkv4)", least=0, needs=ALL_WEIGHTS)
    betas: tuple[float, float] = option((0.9, 0.99), "Adam's beta1 and beta2")
    # float32 rounds a smaller epsilon to 0, and a weight without a gradient then becomes 0 / 0
    eps: float = option(1e-8, "Adam's epsilon", least=1e-37)
    weight_decay: float = option(0.0, "weight decay, of matrices and adapters only", least=0,
                                 needs=("tune.method", "full", "lora"))
    grad_clip: float = option(1.0, "gradient clipping: maximum norm; 0: off", least=0)
    l2_wrap: float = option(1e-4, "penalty on each position's largest logit, as in RWKV-LM; 0: off", least=0, needs=LIKELIHOOD)
    confidence_penalty: float = option(0.0, "weight of the penalty on low-entropy predictions; 0: off", least=0,
                                       needs=LIKELIHOOD)

    def __post_init__(self) -> None:
        check_options(self, "optim.")
        if not 0 <= self.matrix_momentum < 1:
            raise UserError(f"optim.matrix_momentum must be at least 0 and below 1; got {self.matrix_momentum}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas must be two numbers, each at least 0 and below 1; got {list(self.betas)}")
        if not 0 < self.lr < math.inf:
            raise UserError(f"optim.lr must be a positive finite number; got {self.lr}")
        if not 0 < self.last_lr <= self.lr:
            raise UserError(f"optim.min_lr must be positive and at most optim.lr={self.lr}; got {self.min_lr}. With "
                            "optim.min_lr=null it is optim.lr / 20")

    @property
    def last_lr(self) -> float:
        """Returns the final learning rate. The rounding makes 3e-3 / 20 exactly 1.5e-4."""
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
    log_every: int = option(10, "logging interval, in steps; train/loss is the mean over the interval", least=1)
    grad_norms: bool = option(False, "log gradient norms per part of the model, before clipping")
    sample_every: int | None = option(None, "sampling interval, in steps (samples.jsonl); 0: no samples; null: val_every",
                                      least=0)
    sample_tokens: int = option(200, "tokens per sample", least=0)
    probe: bool = option(False, "measure the kernel's fraction of the step time, and the kernel's errors; sweeps always do")
    overfit_batches: int = option(0, "train on this many batches over and over; 0: off", least=0)
    precision: str | None = option(None, "32-true, tf32 (GPU matmuls round float32 to 10 bits), bf16-mixed, fp16-mixed, or "
                                   "auto: bf16-mixed where it is faster; null: bf16-mixed on a GPU that supports it, else "
                                   "32-true", one_of=("32-true", "tf32", "bf16-mixed", "fp16-mixed", "auto"),
                                   heading="Memory, speed and devices")
    accumulate: int = option(1, "gradient accumulation steps", least=1)
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, a third more "
                                            "time")
    optim_in_backward: bool = option(False, "update each weight in the backward pass and free its gradient immediately: same "
                                     "results, less memory; requires optim.grad_clip=0")
    tbptt: int = option(0, "truncated BPTT: number of ctx_len-token segments per step, with gradients through the states "
                        "between segments; a document's state carries over from step to step; 0: independent windows", least=0)
    compile: bool = option(False, "torch.compile each block")
    graphs: bool | None = option(None, "replay all blocks as one CUDA graph, without launch overhead; null: only where "
                                 "launches would limit the speed")
    malloc: str = option("tuned", "memory allocator on Linux: tuned: keep large freed blocks for reuse, which is faster (fsdp, "
                         "and large runs with frozen weights or conversations, return them sooner); small: return freed blocks "
                         "immediately; default: the C library's settings",
                         one_of=("tuned", "small", "default"))
    accelerator: str = option("auto", "device: auto, cpu or gpu", one_of=("auto", "cpu", "gpu"))
    strategy: str = option("single", "how processes share the work: single, ddp or fsdp", one_of=("single", "ddp", "fsdp"))
    reshard: bool = option(True, "reshard weights after each block's forward pass and gather them again in backward; false: "
                           "keep them gathered, which takes more memory and less time (fsdp)", needs=FSDP)
    offload: bool = option(False, "keep weights, gradients and optimiser state in host memory, and update them there (fsdp)",
                           needs=FSDP)
    devices: int = option(1, "processes per machine; 0: one per GPU", least=0)
    num_nodes: int = option(1, "number of machines", least=1)
    link_gbps: float | None = option(None, "network bandwidth per device for the plan, Gbit/s; null: the typical bandwidth of "
                                     "machines with such GPUs", above=0.0, needs=("plan", "true", "timed", *GPUS))

    def __post_init__(self) -> None:
        check_options(self, "trainer.")
        if self.strategy == "single" and (self.devices, self.num_nodes) != (1, 1):
            raise UserError("trainer.devices and trainer.num_nodes require trainer=ddp or trainer=fsdp")
        if self.overfit_batches % self.accumulate:
            raise UserError(f"trainer.overfit_batches must be a multiple of trainer.accumulate={self.accumulate}; got "
                            f"{self.overfit_batches}")
        if self.strategy == "fsdp" and self.sample_every:
            raise UserError("trainer.sample_every conflicts with trainer=fsdp, because the weights are sharded. Omit "
                            "trainer.sample_every: the run ends with a sample from its last checkpoint")


@dataclass
class LoggerConfig:
    name: str = option("wandb", "logger; set it with logger=NAME", verbatim=GRAMMAR, filled=True, heading="Logger")
    _target_: str | None = option(None, "class of a Lightning logger to use in addition to metrics.csv; example: "
                                  "configs/logger/mlflow.yaml")
    arguments: list[str] = option(list, "NAME=VALUE for the constructor of _target_; repeatable", needs=("logger._target_",))
    project: str | None = option(None, "project (wandb, trackio) or experiment (mlflow); null: WANDB_PROJECT or the tracker's "
                                 "own setting, else timemix", filled=True)
    group: str | None = option(None, "run group (wandb, mlflow, trackio); null: WANDB_RUN_GROUP, else the sweep's folder")
    run_name: str | None = option(None, "run name (wandb, mlflow, trackio); null: WANDB_NAME, else the kernel and out_dir")
    published_losses: list[float] = option(list, "mean training losses of a published run, one for each published_steps "
                                           "steps; the report compares them with this run's losses")
    published_steps: int = option(0, "number of steps over which each of published_losses is a mean", least=0)

    def __post_init__(self) -> None:
        check_options(self, "logger.")
        if self._target_ is None:
            require_one_of("logger.name", self.name, ("wandb", "csv", "none"))
        if bool(self.published_losses) != bool(self.published_steps):
            raise UserError("logger.published_losses and logger.published_steps require each other: set both or neither")


@dataclass
class SweepConfig:
    """The options that say how train.py -m starts the runs of a sweep."""

    jobs: int | None = option(None, "concurrent runs, each with its share of the CPU threads or its own GPU; null: 1, or "
                              "with submitit all runs", least=1, heading="Sweep, with -m")
    launcher: str = option("local", "local: processes on this machine; submitit: SLURM jobs (pip install 'timemix[slurm]')",
                           one_of=("local", "submitit"))
    arguments: list[str] = option(list, "NAME=VALUE for submitit, such as slurm_partition=gpu, gpus_per_node=1, or "
                                  "timeout_min=60, after which a job saves and is requeued; repeatable",
                                  needs=("sweep.launcher", "submitit"))

    def __post_init__(self) -> None:
        check_options(self, "sweep.")


LORA = ("tune.method", "lora")
ENGLISH = "english"                      # tune.guard=english selects the text in the package


@dataclass
class TuneConfig:
    """The options that say how the model of init_from= is tuned.

    LoRA adds alpha / rank B A to a matrix W (Hu et al. 2021, arXiv 2106.09685).
    """

    method: str = option("full", "what is trained; set it with tune=NAME", one_of=("full", "lora", "state"), heading="Tuning")
    rank: int = option(16, "LoRA rank", least=1, needs=LORA)
    alpha: float = option(32.0, "LoRA alpha; adapters are scaled by alpha / rank", above=0.0, needs=LORA)
    dropout: float = option(0.0, "LoRA dropout", least=0, needs=LORA)
    modules: list[str] = option(list, "LoRA target modules, such as [att.key,att.value]; []: all linear layers of the blocks",
                                verbatim=GRAMMAR, needs=LORA)
    state: str | None = option(None, "tuned state to start from, of any trainer; null: the one in init_from=, else zeros",
                               verbatim=PATH, needs=("tune.method", "state"))
    base: str = option("float32", "dtype of the frozen matrices: float32, bfloat16, int8 or int4", one_of=BASES)
    guard: str | None = option(ENGLISH, f"text whose loss is measured before and after tuning: {ENGLISH} (a short "
                               "text in the package), FILE, or null: no text", verbatim=PATH)
    objective: str = option("likelihood", "likelihood: cross-entropy; dpo or ipo: preference learning from pairs (data=chat)",
                            one_of=("likelihood", *PREFERENCES))
    beta: float = option(0.1, "beta; a larger beta keeps the model closer to that of init_from= (dpo, ipo)", above=0.0,
                         needs=("tune.objective", *PREFERENCES))
    label_smoothing: float = option(0.0, "label smoothing: assumed fraction of swapped pairs (dpo)", least=0,
                                    needs=("tune.objective", "dpo"))
    sft_weight: float = option(0.0, "weight of the chosen answer's loss per token in the objective (dpo, ipo)", least=0,
                               needs=("tune.objective", *PREFERENCES))

    def __post_init__(self) -> None:
        check_options(self, "tune.")
        if not self.label_smoothing < 0.5:
            raise UserError(f"tune.label_smoothing must be at least 0 and below 0.5; got {self.label_smoothing}")
        if not self.dropout < 1:
            raise UserError(f"tune.dropout must be at least 0 and below 1; got {self.dropout}")
        if self.method == "full" and self.base != "float32":
            raise UserError(f"tune.base={self.base} requires tune=lora or tune=state, because tune=full trains the weights in "
                            "float32")

    @property
    def prefers(self) -> bool:
        """Returns True if the objective is a preference loss, which compares the two answers of a pair."""
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
    resume: str | None = option(None, "auto: resume the run in out_dir, or without out_dir the latest run; if there is no run, "
                                "start one; PATH: resume this run or checkpoint", verbatim=PATH)
    init_from: str | None = option(None, "base model: a checkpoint of any format, or ORG/REPO/FILE on the Hub; sets weights, "
                                   "sizes and tokenizer", verbatim=PATH)
    plan: str = option("false", "true: print the plan and exit; timed: time training steps too, even if this takes minutes; "
                       f"{', '.join(GPUS)}: plan for a machine with such GPUs",
                       one_of=("false", "true", "timed", *GPUS))

    def __post_init__(self) -> None:
        check_options(self)
        whole_number("seed", self.seed, most=2**32 - 1)          # the largest seed that NumPy's generator accepts
        if self.plan in GPUS and self.trainer.accelerator == "cpu":
            raise UserError(f"plan={self.plan} conflicts with trainer.accelerator=cpu: omit one of these options")
        if self.trainer.strategy == "fsdp" and self.tune.base in ("int8", "int4"):
            raise UserError(f"tune.base={self.tune.base} conflicts with trainer=fsdp, because int8 and int4 weights cannot be "
                            "sharded: use tune.base=bfloat16 or trainer=ddp")
        if self.tune.prefers:
            self._require_pairs()
        if self.trainer.tbptt and self.data.name == "mix":
            raise UserError("trainer.tbptt conflicts with data=mix, whose windows come from several sources: omit one of these "
                            "options")
        if self.data.streaming and self.trainer.tbptt:
            raise UserError("trainer.tbptt conflicts with data.streaming, because streams cut documents into windows: omit one "
                            "of these options")
        if self.data.streaming and self.trainer.epochs is not None:
            raise UserError("trainer.epochs conflicts with data.streaming, because the length of a stream is unknown: set "
                            "trainer.max_steps or trainer.max_tokens")
        if self.trainer.tbptt and self.tune.dropout:
            raise UserError("trainer.tbptt conflicts with tune.dropout, because recomputed segments would draw different "
                            "random numbers: omit one of these options")
        if self.trainer.strategy == "fsdp" and self.optim.name == EIGHT_BITS:
            raise UserError(f"optim={EIGHT_BITS} conflicts with trainer=fsdp, because 8-bit moments require parameters that "
                            "are not sharded: use optim=adamw or trainer=ddp")

    def _require_pairs(self) -> None:
        objective = f"tune.objective={self.tune.objective}"
        if self.data.name != "chat":
            raise UserError(f"{objective} requires data=chat with pairs of answers; got data={self.data.name}")
        if self.trainer.tbptt:
            raise UserError(f"{objective} conflicts with trainer.tbptt, because segments would cut pairs apart: omit "
                            "trainer.tbptt, and choose a model.ctx_len that is long enough for a pair")

    def require_separate_updates(self) -> None:
        """Raises UserError for the first option that conflicts with trainer.optim_in_backward=true.

        For a resumed run, merge the saved options with the user's options first.
        """
        trainer, optim = self.trainer, self.optim
        if not trainer.optim_in_backward:
            return
        conflicts = {
            f"trainer={trainer.strategy} exchanges gradients between processes before the update: use trainer=auto":
                trainer.strategy != "single",
            f"optim={optim.name} updates matrices of one shape together: use optim=adamw": optim.name in ORTHOGONAL,
            f"optim.grad_clip={optim.grad_clip:g} needs the norm of all gradients: use optim.grad_clip=0": optim.grad_clip > 0,
            f"trainer.accumulate={trainer.accumulate} sums the gradients of several batches: use trainer.accumulate=1":
                trainer.accumulate > 1,
            f"trainer.tbptt={trainer.tbptt} sums the gradients of its segments: use trainer.tbptt=1 or 0": trainer.tbptt > 1,
            "trainer.precision=fp16-mixed repeats steps whose gradients overflow: use trainer.precision=bf16-mixed":
                trainer.precision == "fp16-mixed",
            "trainer.grad_norms=true measures gradients after the backward pass: omit trainer.grad_norms": trainer.grad_norms,
            "trainer.graphs=true computes the gradients of all blocks in one launch: omit trainer.graphs": bool(trainer.graphs)}
        for reason, applies in conflicts.items():
            if applies:
                raise UserError(f"trainer.optim_in_backward=true updates each weight during the backward pass, but {reason}")

    @property
    def only_plans(self) -> bool:
        return self.plan != "false"

    @property
    def tokens_per_step(self) -> int:
        """Returns the number of tokens per optimiser step, over all processes."""
        segments = max(1, self.trainer.tbptt)
        return self.data.batch_size * self.model.ctx_len * segments * self.trainer.accumulate
