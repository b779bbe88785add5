"""TODO."""

from dataclasses import replace

import torch

from kernels.select import AUTO, select, why_auto
from kernels.wkv4 import WKV
from rwkv import distributed
from rwkv.checkpoint.files import Checkpoint
from rwkv.config import ModelConfig, TrainConfig
from rwkv.data.prepare import Corpus, prepare
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.device import dtype_for
from rwkv.training.memory import require_room
from rwkv.training.run import Run


def new_model(config: ModelConfig, beginning: Checkpoint | None, tokenizer: Tokenizer, wkv: WKV) -> RWKV:
    """The model to train: with a checkpoint's weights, or RWKV-4's initial ones."""
    if beginning is None:
        return RWKV(config, tokenizer.vocab_size, wkv).init_weights()
    return RWKV.to_train_on(replace(beginning, config=config), wkv)


def data_for(run: Run, device: torch.device, kernel: str) -> Corpus:
    """The run's data, tokenised once it is clear that the model fits, whatever its vocabulary will be.

    Raises ValueError where it does not, or its checkpoints do not, and as rwkv.tokens.prepare does.
    """
    least = run.tokenizer.vocab_size if run.tokenizer else 1
    distributed.broadcast_from_rank0(lambda: require_room(run, device, kernel, least))
    data = distributed.rank0_first(lambda: prepare(run.config.data, run.config.model.ctx_len, run.tokenizer))
    distributed.broadcast_from_rank0(lambda: require_room(run, device, kernel, data.tokenizer.vocab_size))
    return data


def kernel_for(config: TrainConfig, device: torch.device) -> tuple[WKV, str]:
    """The operator that the configuration names, and how it is announced. Raises as kernels.select does."""
    dtype = dtype_for(config.trainer.precision)
    wkv = select("wkv4", config.kernel.name, device, dtype)
    return wkv, why_auto("wkv4", device, dtype) if config.kernel.name == AUTO else wkv.name
