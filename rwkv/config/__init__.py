"""Declares the options of all programs, with type, default, help and allowed values, in a dataclass per config group.

A dataclass checks its values when it is built, and raises UserError with the option's name for a wrong value. rwkv/cli/help.py
prints the help texts. Nothing here imports Hydra.

    NAME.py       options of the program NAME                       schema.py    declares and checks options
    common.py, sampling.py    options that several programs share   values.py    parses and checks single values
"""

from rwkv.config.chat import ChatConfig
from rwkv.config.common import (
    BITS,
    BLOCKS,
    DRAFT_TOKENS,
    DTYPES,
    LARGEST_SEED,
    LATEST,
    MIB,
    NGRAM,
    STATE_LAYOUTS,
    DraftedConfig,
    KernelConfig,
    Pooling,
    SavedModelConfig,
)
from rwkv.config.evaluate import EvaluateConfig
from rwkv.config.generate import GenerateConfig
from rwkv.config.sampling import Sampling
from rwkv.config.schema import PATH, TEXT, free_text_kind, is_met, missing_requirement, options, require_effect
from rwkv.config.serve import ServeConfig
from rwkv.config.train import (
    EIGHT_BITS,
    ENGLISH,
    GENERATIONS,
    GPUS,
    LENGTHS,
    ORTHOGONAL,
    PREFERENCES,
    SCALED,
    SOURCES,
    STREAMED,
    TOKENS,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    OptimConfig,
    SweepConfig,
    TrainConfig,
    TrainerConfig,
    TuneConfig,
    length_option,
)
from rwkv.config.values import require_between, require_path, require_type, strings, whole_number, whole_numbers
