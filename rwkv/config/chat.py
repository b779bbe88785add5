"""Declares the options of chat.py."""

from dataclasses import dataclass

from rwkv.config.common import LARGEST_SEED, MODEL_TEMPLATE, THINK, DraftedConfig, layout_option
from rwkv.config.sampling import Sampling, preset_option, with_sampling
from rwkv.config.schema import PATH, check_options, option


@dataclass
@with_sampling
class ChatConfig(DraftedConfig):
    template: str | None = option(None, f"chat template: {MODEL_TEMPLATE}", verbatim=PATH, heading="Conversation")
    system: str | None = option(None, "system message")
    state: str | None = option(None, "state file to start from, written by save_state=; or a tuned state (timemix's or another "
                               "trainer's)",
                               verbatim=PATH)
    state_layout: str | None = layout_option("state=")
    think: str = option("false", "true: answers begin with reasoning; fake: with empty reasoning; both require a template with "
                        "reasoning, such as g1", one_of=THINK)
    seed: int = option(0, "random seed of the first answer; the next answer has seed + 1", least=0,
                       most=LARGEST_SEED // 2)           # leaves room for the seeds of later answers
    max_new_tokens: int = option(500, "maximum tokens per answer", least=1)
    sampling: str = preset_option("chat")

    def __post_init__(self) -> None:
        check_options(self)
        Sampling.from_config(self)
