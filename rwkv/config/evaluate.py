"""Declares the options of rwkv.tools.evaluate."""

from dataclasses import dataclass, field

from rwkv.config.common import DTYPES, MODEL_TEMPLATE, SavedModelConfig
from rwkv.config.schema import PATH, TEXT, check_options, option


@dataclass
class EvaluateDataConfig:
    path: str | None = option(None, 'UTF-8 text, or FILE.jsonl with {"text": "..."} per line', verbatim=PATH,
                              heading="Evaluation")
    template: str | None = option(None, f"chat template of the conversations in FILE.jsonl: {MODEL_TEMPLATE}", verbatim=PATH)


@dataclass
class EvaluateConfig(SavedModelConfig):
    dtype: str | None = option("float32", "dtype, as for generate.py: auto, float32, bfloat16, float16, int8, int4 or blocks",
                               one_of=DTYPES)
    data: EvaluateDataConfig = field(default_factory=EvaluateDataConfig)
    chunk_len: int = option(1024, "tokens per forward pass", least=1)
    batch_size: int = option(16, "batch size, for FILE.jsonl", least=1)
    start: str | None = option(None, "text before the first predicted token; null: the end-of-text token", verbatim=TEXT)
    out: str | None = option(None, "file for the result, which is also printed on standard output", verbatim=PATH)

    def __post_init__(self) -> None:
        check_options(self)
