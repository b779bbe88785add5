"""Declares options that several programs share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rwkv.config.schema import GRAMMAR, NAME, PATH, option

LARGEST_SEED = 2**63 - 1                 # the largest seed that torch's generators accept
MIB = 2**20                              # bytes in the unit of the options named *_mib
BLOCKS = "blocks"                        # dtype=blocks: a GGUF file's quantised blocks, unchanged
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 5, BLOCKS: 8}     # bits per matrix weight, roughly
DTYPES = ("auto", *BITS)
LATEST = Path("runs") / "latest"         # a link to the latest run's directory; a sweep's runs count too
TEMPLATES = "world, g1, flower or a jinja2 file"        # chat templates, in help texts
MODEL_TEMPLATE = f"{TEMPLATES}; null: as in training, else the checkpoint's, else guessed from the file's name"
THINK = ("false", "true", "fake")        # values of think=: how answers begin (rwkv/chat/thoughts.py)
NGRAM = "ngram"                          # draft=ngram proposes tokens without a draft model
DRAFT_TOKENS = 8                         # the default of draft_tokens
STATE_LAYOUTS = ("official", "transposed")
Pooling = Literal["mean", "last"]        # how embeddings pool hidden states


@dataclass
class KernelConfig:
    name: str = option("auto", "implementation of the model's operator; set it with kernel=NAME", verbatim=GRAMMAR)


@dataclass
class SavedModelConfig:
    """Options shared by generate.py, chat.py, serve.py and rwkv.tools.evaluate."""

    checkpoint: str = option(LATEST.as_posix(), "file, Hugging Face directory, run directory, or name on the Hub: "
                             "ORG/REPO/FILE, ORG/REPO or ORG/REPO:Q4_K_M, optionally with @REVISION. Options for states, "
                             "adapters, tokenizers and templates take such names too", heading="Model", verbatim=PATH)
    lora: str | None = option(None, "another program's LoRA adapter, merged into the checkpoint: a PEFT directory or an "
                              "RWKV-PEFT file", verbatim=PATH)
    lora_alpha: float | None = option(None, "LoRA alpha, for adapter files without it, such as RWKV-PEFT's", above=0.0)
    tokenizer: str | None = option(None, "tokenizer, for checkpoints without one: byte, world, FILE.json or FILE.txt",
                                   verbatim=PATH)
    end_of_text: str | None = option(None, "end-of-text token; null: the one in the checkpoint or FILE.json", verbatim=NAME)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    device: str = option("auto", "auto, cpu or cuda", one_of=("auto", "cpu", "cuda"))
    dtype: str | None = option(None, "float32, bfloat16, float16 (GPU), int8 or int4 (matrices only), or blocks (the quantised "
                               "matrices of a GGUF file, unchanged; CPU only); auto or null: bfloat16 on a GPU that supports "
                               "it, else blocks, int8 or int4 if the file has them, else float32", one_of=DTYPES)
    cache_packed: bool = option(False, "store packed int8 or int4 weights in ~/.cache/timemix/packed, for faster later starts "
                                "on a CPU; at most 32 GiB in all")


@dataclass
class DraftedConfig(SavedModelConfig):
    """Options shared by generate.py, chat.py and serve.py."""

    draft: str | None = option(None, "draft for speculative decoding, which gives the same output faster on a CPU: ngram, for "
                               "output that repeats itself or the prompt; or a small model with the same vocabulary, named as "
                               "for checkpoint=",
                               verbatim=PATH)
    draft_tokens: int = option(DRAFT_TOKENS, "maximum tokens proposed at a time; fewer while the draft is often wrong",
                               least=1, most=32)


def layout_option(source: str) -> Any:
    """Declares the option `state_layout`. `source` is the option that names the tuned states of this layout."""
    return option(None, f"layout of a tuned state given with {source}, if its file states none: official (value by key, "
                  "as trainers write it) or transposed (web-rwkv's .st)", one_of=STATE_LAYOUTS)
