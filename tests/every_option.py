"""Lists a value other than the default for each sampling option, for tests that try all options."""

from typing import Any

OTHER_OPTIONS: dict[str, Any] = {
    "temperature": 1.7, "top_k": 3, "top_p": 0.6, "min_p": 0.2, "repetition_penalty": 1.5, "presence_penalty": 1.0,
    "frequency_penalty": 0.7, "penalty_decay": 0.5, "no_penalty": (3,), "logit_bias": {3: 2.0}, "banned": (1, 2),
    "order": "rwkv"}
