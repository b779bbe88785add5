"""Tests how runs with init_from= save memory: several passes per step, memory returned to the system, and recomputation."""

from dataclasses import replace
from typing import Any

import pytest

from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig, TuneConfig
from rwkv.training.memory.estimate import estimate
from rwkv.training.memory.savings import fit_memory, with_passes


@pytest.mark.parametrize(("options", "rows"), [({}, 1), ({"method": "full"}, 8), ({"ctx_len": 128}, 4), ({"tbptt": 2}, 8),
                                               ({"given": ("trainer.accumulate",)}, 8),
                                               ({"method": "full", "n_layer": 12, "n_embd": 768}, 1)])
def test_passes_have_512_tokens_where_weights_are_frozen_or_many(options: dict[str, Any], rows: int) -> None:
    sizes = ModelConfig(generation="rwkv7", ctx_len=options.get("ctx_len", 512), n_layer=options.get("n_layer", 2),
                        n_embd=options.get("n_embd", 64))
    config = TrainConfig(model=sizes, data=DataConfig(batch_size=8),
                         trainer=TrainerConfig(accelerator="cpu", tbptt=options.get("tbptt", 0)),
                         tune=TuneConfig(method=options.get("method", "lora")))
    config_of_passes, line = with_passes(config, 65536, options.get("given", ()))
    assert (config_of_passes.data.batch_size, config_of_passes.tokens_per_step) == (rows, config.tokens_per_step)
    assert (line is None) == (rows == 8)


def test_a_run_that_is_short_of_memory_computes_activations_again() -> None:
    config = TrainConfig(model=ModelConfig(generation="rwkv7", n_layer=24, n_embd=2048, ctx_len=2048),
                         data=DataConfig(batch_size=4), tune=TuneConfig(method="lora"),
                         trainer=TrainerConfig(accelerator="cpu"))
    need = estimate(config, 65536).total
    returned = estimate(replace(config, trainer=replace(config.trainer, malloc="small")), 65536).total
    assert returned < need
    for free, malloc, checkpointing in ((need, "tuned", False), (returned, "small", False), (returned - 1, "small", True)):
        fitted, line = fit_memory(config, 65536, (), free)
        assert (fitted.trainer.malloc, fitted.trainer.activation_checkpointing) == (malloc, checkpointing)
        assert (line is None) == (malloc == "tuned")
