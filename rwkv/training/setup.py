"""Builds the operator, the data and the model of a run before training, in this order:

    kernel_for    the operator with the kernel that kernel= names, for this device and this precision
    data_for      the tokenised data, after a check that the model fits
    new_model     the model with initial weights, or with the weights of the file that init_from= names
"""

import sys
from itertools import islice

import torch

from kernels import native
from kernels.machine.allocator import give_back_free_blocks
from kernels.operator import Operator
from kernels.select import AUTO, why_auto
from rwkv import distributed
from rwkv.checkpoint.files import Checkpoint
from rwkv.config import ModelConfig, TuneConfig
from rwkv.data.conversations import annotated_conversations
from rwkv.data.prepare import Corpus, prepare
from rwkv.errors import UserError
from rwkv.io.lines import escape_controls
from rwkv.model.base import MATRICES, Model, generation
from rwkv.model.lora import add_adapters
from rwkv.model.operators import operator_for, size_for
from rwkv.model.quantized import BFloat16Linear, to_bfloat16, to_int4, to_int8, to_packed
from rwkv.tokenizer.tokenizers import Tokenizer
from rwkv.training.device import dtype_for
from rwkv.training.memory.capacity import needs_here, require_capacity
from rwkv.training.run.directory import Run
from rwkv.training.run.resume import is_fixed


def kernel_for(model: ModelConfig, kernel: str, device: torch.device, precision: str | None,
               rows: int = 1) -> tuple[Operator, str]:
    """Returns the operator for batches of `rows` rows, and the kernel's name, with the reason if kernel=auto chose it."""
    dtype = dtype_for(precision)
    size = size_for(model, rows, model.ctx_len)
    wkv = operator_for(model, kernel, device, dtype, size)
    return wkv, why_auto(generation(model).OPERATOR, device, dtype, size) if kernel == AUTO else wkv.name


def data_for(run: Run, device: torch.device) -> Corpus:
    """Returns the run's data, which rank 0 tokenises.

    Raises UserError if the model does not fit into memory, or if the checkpoints do not fit onto the disk. The check assumes
    the smallest possible vocabulary, because the size of a vocabulary made from the data is not known yet. With plan= the check
    follows the plan.
    """
    config = run.config
    smallest = run.tokenizer.vocab_size if run.tokenizer else 1
    if not config.only_plans:
        distributed.broadcast_from_rank0(lambda: require_capacity(needs_here(config, smallest, device), run.out_dir,
                                                                  is_fixed if run.exists else None))
    return distributed.rank0_first(lambda: prepare(config.data, config.model.ctx_len, run.tokenizer, config.tune.prefers))


def show_conversations(data: Corpus) -> None:
    """Prints two training conversations for data.preview and exits. The text in [[ ]] is the text to be learnt."""
    if data.conversations is None:
        raise UserError("data.preview= requires data=chat, because the preview shows conversations")
    if distributed.rank() == 0:
        conversations = annotated_conversations(data.conversations[0], data.tokenizer)
        print(escape_controls("\n\n".join(islice(conversations, 2)), sys.stdout))
    sys.exit(0)


def new_model(config: ModelConfig, init_checkpoint: Checkpoint | None, tokenizer: Tokenizer, wkv: Operator,
              tune: TuneConfig | None = None, device: torch.device | str = "cpu") -> Model:
    """Returns a model to train, on the CPU, with initial weights or with the weights of `init_checkpoint`.

    Args:
        config: the sizes. Given init_checkpoint, all sizes except ctx_len must be those of the file.
        tune: the tuning options. None trains all weights.
        device: the device of the run, for which frozen matrices are packed.
    """
    if init_checkpoint is None:
        return Model(config, tokenizer.vocab_size, wkv).init_weights()
    if tune is None or tune.method == "full":
        return Model.with_weights(config, wkv, init_checkpoint.tensors("float32"))
    model = _frozen_model(config, wkv, init_checkpoint, tune.base, torch.device(device).type)
    if tune.method == "lora":
        add_adapters(model, tune.modules, tune.rank, tune.alpha, tune.dropout)
    else:
        empty = [state[0].clone() for state in model.generation.empty_state(config, 1).named()["wkv"]]
        model.set_time_states([layer.get(copy=True).float() for layer in init_checkpoint.time_states or ()] or empty)
    return model


def _frozen_model(config: ModelConfig, wkv: Operator, checkpoint: Checkpoint, base: str, device: str) -> Model:
    """Returns the frozen model with the blocks' matrices in the dtype `base`. Each conversion frees memory before the next.

    `device` is the type of the run's device. The layers in int8 and int4 for a CPU cannot compute on a GPU.

    With base float32, the embedding and the head keep the dtype of the file: conversion to float32 would not make bfloat16
    weights more exact, and the head's product converts the weights in chunks. The other bases round the embedding to bfloat16,
    and base bfloat16 also rounds the head.
    """
    group = generation(config).group
    as_in_file = {name for name in checkpoint.weights.stored if group(name) in MATRICES}
    if base == "float32":
        as_in_file = {"emb.weight", "head.weight"}
    stored = {name: tensor if name in as_in_file else tensor.cast(torch.float32)
              for name, tensor in checkpoint.weights.stored.items()}

    def free_file_pages(name: str) -> None:
        stored[f"{name}.weight"].drop_pages()
        give_back_free_blocks()

    model = Model.with_weights(config, wkv, {name: tensor.get() for name, tensor in stored.items()}).requires_grad_(False)
    stored["emb.weight"].drop_pages()    # verification has read all pages of the file, but training reads few
    if base == "bfloat16":
        return to_bfloat16(model)
    if model.head.weight.dtype == torch.bfloat16:
        model.head = BFloat16Linear(model.head.weight)
    elif model.head.weight.dtype != torch.float32:
        model.head.weight.data = model.head.weight.float()
    if base == "float32":
        return model
    if device == "cuda":
        return to_packed(model, base, "cpu", head=False, replaced=free_file_pages)
    if base == "int4":
        return to_int4(model, head=False, replaced=free_file_pages)
    # with AMX, which FBGEMM does not use, the C kernel is twice as fast
    return to_int8(model, head=False, replaced=free_file_pages, in_c=native.has_amx())
