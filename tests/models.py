"""Makes small models of every architecture, in which every weight affects the output, and lists kernels that can run them."""

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from implementations import implementation
from torch import Tensor, nn

from kernels.matvec import BLOCKS, Packed, pack
from kernels.matvec.cases import random_blocks
from kernels.registry import why_not
from kernels.select import folder, select, selectable
from rwkv.config import GENERATIONS, ModelConfig
from rwkv.model.base import generation as module_of
from rwkv.model.decoding.c_step import LINEAR
from rwkv.model.quantized import to_blocks, to_int4, to_int8
from rwkv.model.state import State
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import WorldTokenizer
from rwkv.tokenizer.world import Vocabulary

SMALL = {"n_layer": 3, "n_embd": 16, "ctx_len": 32}
RANKS = {"decay_low_rank_dim": 5, "a_low_rank_dim": 4, "v_low_rank_dim": 3, "gate_low_rank_dim": 6}
OWN: dict[str, dict[str, Any]] = {"rwkv4": {}, "rwkv7": {"head_size": 8, **RANKS}}       # options of one architecture only
OPERATORS = {name: module_of(ModelConfig(generation=name)).OPERATOR for name in GENERATIONS}
each_generation = pytest.mark.parametrize("generation", GENERATIONS)
each_form = pytest.mark.parametrize(("generation", "kernel"), [    # one kernel per kind; tests/kernels has all
    ("rwkv4", "conv1d"), ("rwkv4", "torch_scan"), implementation("wkv4", "taichi_scan", "rwkv4", "taichi_scan"),
    ("rwkv7", "reference"), ("rwkv7", "torch_chunk")])


def reasons(operator: str = "wkv4") -> dict[str, str | None]:
    """Returns, for every selectable kernel, the reason why it cannot run on this machine's CPU, or None if it can."""
    return {name: why_not(folder(operator, name), name) for name in selectable(operator)}


def kernels(operator: str = "wkv4") -> list[Any]:
    """Returns every selectable kernel as a parameter for tests on the CPU. conftest.py leaves out kernels that cannot run."""
    return [pytest.param(name, marks=pytest.mark.implementation(folder(operator, name), name, device="cpu"))
            for name in selectable(operator)]


def small_config(generation: str = "rwkv4", **sizes: int) -> ModelConfig:
    return ModelConfig(generation=generation, **{**SMALL, **OWN[generation], **sizes})


def small_model(kernel: str = "reference", vocab_size: int = 50, seed: int = 0, generation: str = "rwkv4",
                **sizes: int) -> RWKV:
    """Returns a model with logits of order 1.

    Matrices that start at zero, norms and token-shift weights are randomised.
    """
    torch.manual_seed(seed)
    model = RWKV(small_config(generation, **sizes), vocab_size, select(OPERATORS[generation], kernel)).init_weights()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, weight.shape[0 if model.generation.group(name) == "low rank" else 1] ** -0.5)
            elif "ln" in name or generation == "rwkv7":
                weight.add_(0.1 * torch.randn_like(weight))
    return model


class Rounding(nn.Module):
    """A linear layer that multiplies rounded inputs by rounded weights in float64."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        self._packed, self._matvec = packed, select("matvec", "reference")

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._matvec(x, self._packed))


def in_format(model: RWKV, format: str) -> RWKV:
    """Converts the model's matrices to a format of kernels/matvec, without gradients. Blocks of GGUF's formats are random."""
    model = model.requires_grad_(False).eval()
    if format in BLOCKS:
        generator = torch.Generator().manual_seed(0)
        return to_blocks(model, {f"{name}.weight": random_blocks(format, *layer.weight.shape, generator)
                                 for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Embedding))})
    if format in ("int8", "int4"):
        return {"int8": to_int8, "int4": to_int4}[format](model)
    return model.to(getattr(torch, format))


def exact(model: RWKV) -> RWKV:
    """Returns the model in float64, with the same roundings as its weight format."""
    doubled = copy.deepcopy(model).double()
    for name, layer in model.named_modules():
        if isinstance(layer, LINEAR):
            packed = layer.packed if not isinstance(layer, nn.Linear) else pack(layer.weight, str(layer.weight.dtype)[6:])
            doubled.set_submodule(name, Rounding(packed))
    return doubled


def saying(*rows: str) -> RWKV:
    """Returns a byte model that predicts, after each character of a row, the next character."""
    return following(256, *(list(row.encode()) for row in rows))


def following(vocab_size: int, *rows: list[int], n_embd: int = 16) -> RWKV:
    """Returns a model that predicts, after each token of a row, the next token."""
    model = small_model("conv1d", vocab_size=vocab_size, n_embd=n_embd)
    with torch.no_grad():
        model.head.weight.zero_()
        model.ln_out.weight.fill_(1)
        model.ln_out.bias.zero_()
        for block in model.blocks:
            block.att.output.weight.zero_()
            block.ffn.value.weight.zero_()
        model.emb.weight.normal_(generator=torch.Generator().manual_seed(0))
        hidden = model.hidden(torch.arange(vocab_size)[:, None])[0][:, 0]
        for row in rows:
            for here, after in pairwise(row):
                model.head.weight[after] += 10 * hidden[here]
    return model


def writing(*rows: list[bytes], ends: bool = True, n_embd: int = 64) -> tuple[RWKV, WorldTokenizer]:
    """Returns a model and its tokenizer.

    After each token of a row, the model generates the next token, and then end-of-text unless ends=False. Each token may occur
    only once in a row.
    """
    vocabulary = world_vocabulary(sorted({token for row in rows for token in row}))
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = WorldTokenizer(vocabulary.to_text())
    end = [tokenizer.end_of_text] if ends else []
    return following(tokenizer.vocab_size, *([*(ids[token] for token in row), *end] for row in rows), n_embd=n_embd), tokenizer


def world_vocabulary(tokens: Iterable[bytes]) -> Vocabulary:
    """Returns a World vocabulary of all single bytes, followed by the longer ones of the tokens."""
    singles = [bytes([value]) for value in range(256)]
    return Vocabulary([b"", *singles, *(token for token in tokens if len(token) > 1)])


def tokens(model: RWKV, B: int = 2, T: int = 24, seed: int = 1) -> Tensor:
    return torch.randint(model.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def as_values(state: State) -> dict[str, Tensor]:
    """Returns the state in a unique representation, because many (a, b, p) of RWKV-4 represent the same a/b and p + log b."""
    parts = state.named()
    if "p" in parts:
        a, b, p = (parts.pop(name) for name in "abp")
        parts |= {"a/b": a / b, "p + log b": p + b.log()}
    return parts


def assert_same_state(actual: State, expected: State, atol: float = 1e-4) -> None:
    torch.testing.assert_close(as_values(actual), as_values(expected), rtol=0, atol=atol, check_dtype=False)


def assert_same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], error: float) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert float((gradient - expected[name]).norm()) <= error * float(expected[name].norm()), name


def saved_activations(module: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Returns the bytes that autograd saves for the backward pass of forward(), without the module's parameters.

    A storage counts once.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    assert result.requires_grad
    return sum(sizes.values())
