"""Tests models that a user has changed: decoding computes what the model computes, and reads only its own memory."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import each_generation, in_format, small_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from kernels import native
from rwkv.errors import CheckpointError
from rwkv.generation.decoder import decoder_of
from rwkv.generation.engine import Engine, generate_batch
from rwkv.generation.prefix_cache import PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.sampling import Sampling
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.decoding.c_step import decoding_line, why_not
from rwkv.model.quantized import to_bfloat16
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer

pytestmark = pytest.mark.thorough
BYTES = ByteTokenizer()
in_c = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
Change = Callable[[RWKV], Any]


def frozen(generation: str, **sizes: int) -> RWKV:
    options = {"n_embd": 64, "n_ffn": 96, "n_layer": 3, **sizes}
    return small_model("reference", vocab_size=256, generation=generation, **options).requires_grad_(False).eval()


def assert_decodes(model: RWKV) -> None:
    """Compares decoding with the model for three tokens, each from the state after the one before."""
    tokens = torch.tensor([[5, 9], [70, 3], [2, 250]])
    decoder = decoder_of(model, model.empty_state(2))
    for t in range(1, 4):
        logits = decoder.step(tokens[t - 1])
        torch.testing.assert_close(logits, model(tokens[:t].T)[0][:, -1], rtol=0, atol=1e-4)


def in_order(*places: int) -> Change:
    def change(model: RWKV) -> None:
        model.blocks = nn.ModuleList(model.blocks[place] for place in places)
    return change


ORDERS = {"swapped": (0, 2, 1), "first swapped": (1, 0, 2), "reversed": (2, 1, 0), "repeated": (0, 1, 1, 2),
          "first repeated": (0, 0, 1, 2), "last dropped": (0, 1), "first dropped": (1, 2), "one left": (0,),
          "thrice": (1, 1, 1)}


@each_generation
@pytest.mark.parametrize("places", ORDERS.values(), ids=ORDERS)
@torch.no_grad()
def test_moved_blocks(places: tuple[int, ...], generation: str) -> None:
    model = frozen(generation)
    in_order(*places)(model)
    assert_decodes(model)
    assert (places[0] == 0 and 0 not in places[1:]) == (why_not(model) is None) or native.why_not()
    assert "decoding" in (decoding_line(model) or "")


@each_generation
@torch.no_grad()
def test_a_block_repeated_elsewhere_is_another_model(generation: str) -> None:
    """Both models have the same modules and weights, and differ only in which block is repeated."""
    model = frozen(generation)
    blocks = model.blocks
    for places in ((0, 1, 1, 2), (0, 1, 2, 2)):
        model.blocks = nn.ModuleList(blocks[place] for place in places)
        assert_decodes(model)


def wider(model: RWKV) -> None:
    model.blocks[1] = frozen(model.config.generation, n_ffn=160).blocks[1]


def rows_added(model: RWKV) -> None:
    model.emb.weight = nn.Parameter(torch.cat((model.emb.weight, model.emb.weight[:8])), requires_grad=False)
    model.head.weight = nn.Parameter(torch.cat((model.head.weight, model.head.weight[:8])), requires_grad=False)


def other_embedding(model: RWKV) -> None:
    model.emb.max_norm = 0.5


def subclass(model: RWKV) -> None:
    class Scaled(RWKV):
        def forward(self, *arguments: Any) -> Any:
            logits, state = super().forward(*arguments)
            return logits * 0.5, state
    model.__class__ = Scaled


def no_norm_weight(model: RWKV) -> None:
    model.ln_out = nn.LayerNorm(64, bias=False)
    model.blocks[1].ln1 = nn.LayerNorm(64, elementwise_affine=False)


def other_groups(model: RWKV) -> None:
    for block in model.blocks:
        if hasattr(block.att, "ln_x"):
            block.att.ln_x.num_groups = 2


def another_operator(model: RWKV) -> None:
    operator = model.blocks[1].att.wkv

    class Halved:
        def __call__(self, *inputs: Any) -> Any:
            y, after = operator(*inputs)
            return y / 2, after

        def step(self, *inputs: Any) -> Any:
            y, after = operator.step(*inputs)
            return y / 2, after

    model.blocks[1].att.wkv = Halved()


def tied(model: RWKV) -> None:
    model.head.weight = model.emb.weight


CHANGES = [wider, rows_added, other_embedding, subclass, no_norm_weight, other_groups, another_operator, tied]


@each_generation
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_other_sizes_layers_and_operators(change: Change, generation: str) -> None:
    model = frozen(generation)
    change(model)
    assert_decodes(model)


@each_generation
@torch.no_grad()
def test_a_replaced_embedding_and_head_have_another_vocabulary(generation: str) -> None:
    model = frozen(generation)
    model.emb = nn.Embedding(300, 64)
    model.head = nn.Linear(64, 300, bias=False)
    tokenizer = CharTokenizer(map(chr, range(1, 300)))
    assert model.vocab_size == tokenizer.vocab_size == 300
    assert_decodes(model.requires_grad_(False))
    assert why_not(model) is None or native.why_not()
    assert len(generate_batch(model, tokenizer, ["\u0120"], max_new_tokens=4, banned=[0])[0].tokens) == 4


@each_generation
@pytest.mark.parametrize("format", ["int8", "int4", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_a_quantised_model_computes_in_the_dtype_of_its_other_weights(dtype: torch.dtype, format: str, generation: str) -> None:
    model, tokens = in_format(frozen(generation), format), torch.tensor([[5, 70, 2, 9]])
    before = model(tokens)[0]
    logits = model.to(dtype)(tokens)[0]
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), before, rtol=0, atol=0.3 * float(before.std()))
    assert len(generate_batch(model, BYTES, ["a"], max_new_tokens=4, banned=[0])[0].tokens) == 4


@each_generation
@pytest.mark.parametrize("format", ["int8", "int4", "q8_0"])
@torch.no_grad()
def test_the_state_dict_of_a_quantised_model_has_its_matrices(tmp_path: Path, format: str, generation: str) -> None:
    model, tokens = in_format(frozen(generation), format), torch.tensor([[5, 70, 2, 9]])
    other = in_format(frozen(generation, seed=1), format)
    assert len(generate_batch(other, BYTES, ["a"], max_new_tokens=4)[0].tokens) == 4         # the products are in use
    torch.save(model.state_dict(), tmp_path / "state_dict.pt")
    loaded = torch.load(tmp_path / "state_dict.pt", weights_only=True)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.att\.key\.weight"):
        small_model("reference", vocab_size=256, generation=generation, n_embd=64, n_ffn=96).load_state_dict(loaded)
    for wrong in ({"head.weight": loaded["head.weight"][1:]}, {"head.weight.zero": torch.zeros(1)}):
        with pytest.raises(RuntimeError, match=r"head\.weight"):
            other.load_state_dict(loaded | wrong)
    del (missing := dict(loaded))["head.weight"]
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        other.load_state_dict(missing)
    other.load_state_dict(loaded)
    assert torch.equal(other(tokens)[0], model(tokens)[0])
    assert_decodes(other)
    if format != "q8_0":
        with pytest.raises(CheckpointError, match="load_state_dict"):
            RWKV.from_pretrained(tmp_path / "state_dict.pt")


@each_generation
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_other_weights_in_a_quantised_model_are_another_model(format: str, generation: str) -> None:
    """A saved state of the weights before must not be continued."""
    model, other = in_format(frozen(generation), format), in_format(frozen(generation, seed=1), format)
    before = model.fingerprint()
    model.load_state_dict(model.state_dict())
    assert model.fingerprint() == before
    model.load_state_dict(other.state_dict())
    assert model.fingerprint() != before


def on_meta(model: RWKV) -> None:
    model.head.to("meta")


@each_generation
@torch.no_grad()
def test_a_part_on_another_device_is_named_and_not_read(generation: str) -> None:
    model = frozen(generation)
    model.blocks[1].to("meta")
    assert "meta" in str(why_not(model))


def epsilon(name: str) -> Change:
    def change(model: RWKV) -> None:
        module = model.get_submodule(name)
        module.eps = 0.3
    return change


def flag(model: RWKV) -> None:
    model.blocks[0].first = False


def bias(model: RWKV) -> None:
    model.blocks[1].att.output.bias = nn.Parameter(torch.ones(64), requires_grad=False)


def norm_bias(model: RWKV) -> None:
    model.ln_out.bias = nn.Parameter(torch.ones(64), requires_grad=False)


def in_place(model: RWKV) -> None:
    model.blocks[2].ffn.value.weight[3] += 1


def data(model: RWKV) -> None:
    model.blocks[2].ffn.value.weight.data = torch.ones_like(model.blocks[2].ffn.value.weight)


def hook(model: RWKV) -> None:
    model.blocks[1].ffn.register_forward_hook(lambda module, inputs, output: (output[0] * 2, output[1]))


def own_forward(model: RWKV) -> None:
    plain = model.blocks[1].ffn.forward
    model.blocks[1].ffn.forward = lambda *arguments, **named: (plain(*arguments, **named)[0] * 2, arguments[0][:, -1])


def on_class(model: RWKV) -> None:
    model.blocks[1].ffn = copy.deepcopy(model.blocks[2].ffn)


LATER_CHANGES = [epsilon("ln_out"), epsilon("blocks.0.ln0"), epsilon("blocks.1.ln1"), epsilon("blocks.2.ln2"), flag, bias,
                 norm_bias, in_place, data, hook, own_forward, on_class, in_order(2, 1, 0), other_embedding, subclass,
                 another_operator]


@each_generation
@pytest.mark.parametrize("change", LATER_CHANGES)
@torch.no_grad()
def test_a_change_after_the_first_text_is_seen(change: Change, generation: str) -> None:
    """A running engine, a new decoder and a cache of prompts all compute with the changed model."""
    model, cache = frozen(generation), PrefixCache()
    options = {"max_new_tokens": 4, "temperature": 0}
    engine = Engine(model, BYTES, cache)
    rows = engine.add_all([Request("ab", 0, StoppingCriteria(1000), Sampling(banned=(BYTES.end_of_text,)))])
    engine.step()
    generate_batch(model, BYTES, ["a prompt"], cache=cache, **options)
    engine.step()
    state = engine.context().state
    change(model)
    engine.step()
    token = torch.tensor([[rows[0].sample.tokens[-1]]])
    expected = model(token, state)[0][:, -1]
    torch.testing.assert_close(engine.context().logits, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(decoder_of(model, state).step(token[0]), expected, rtol=0, atol=1e-4)
    assert generate_batch(model, BYTES, ["a prompt"], cache=cache, **options)[0].tokens == generate_batch(
        model, BYTES, ["a prompt"], **options)[0].tokens
    assert_decodes(model)


@torch.no_grad()
def test_the_epsilon_of_rwkv7s_group_norm_is_read_everywhere() -> None:
    """The formulas, the fused form and decoding read the changed epsilon."""
    model, tokens = frozen("rwkv7"), torch.tensor([[1, 2, 3, 4]])
    before = model(tokens)[0]
    for block in model.blocks:
        block.att.ln_x.eps = 0.5
    assert_decodes(model)
    after = model(tokens)[0]
    torch.testing.assert_close(model.double()(tokens)[0].float(), after, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-2


@in_c
@each_generation
@pytest.mark.parametrize("default", ["device", "dtype"])
@torch.no_grad()
def test_a_default_device_or_dtype_changes_no_bit(default: str, generation: str) -> None:
    """Tensors for C are made on the CPU and in C's dtypes, whatever the defaults are."""
    model = frozen(generation)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1,
                               "presence_penalty": 0.2, "logprobs": 2}
    expected = generate_batch(model, BYTES, ["hello", "a"], **options)
    try:
        if default == "device":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(torch.float64)
        actual = generate_batch(model, BYTES, ["hello", "a"], **options)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert [sample.tokens for sample in actual] == [sample.tokens for sample in expected]


@in_c
@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()], ids=["meta", "sparse"])
def test_c_refuses_a_tensor_whose_numbers_are_elsewhere(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="CPU"):
        native.run("draw", 1, tensor)


class Wrapper(torch.Tensor):
    """A tensor whose numbers are in another tensor, as in DTensor and quantised tensors."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, function(*args, **kwargs))


@in_c
def test_c_refuses_a_subclass_without_memory() -> None:
    with pytest.raises(ValueError, match="Wrapper"):
        native.run("draw", 1, Wrapper(torch.ones(3)))


@each_generation
@torch.no_grad()
def test_activations_of_a_subclass_are_computed_by_the_formulas(generation: str) -> None:
    model, x = frozen(generation), torch.randn(1, 5, 64)
    expected = model.blocks[0].ffn(x, None)[0]
    torch.testing.assert_close(model.blocks[0].ffn(Wrapper(x), None)[0].inner, expected)


@pytest.mark.compiles
@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4", "q8_0"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@torch.no_grad()
def test_quantised_layers_can_be_traced(format: str) -> None:
    """The formulas, which do not round inputs, take the place of C, whose results a trace would not contain."""
    layer = frozen("rwkv7")
    layer = (to_bfloat16(layer) if format == "bfloat16" else in_format(layer, format)).blocks[0].att.key
    x = torch.randn(2, 3, layer.in_features)
    expected = layer(x)
    for traced in (torch.vmap(layer), make_fx(layer)(torch.zeros_like(x)), torch.export.export(layer, (x,)).module(),
                   torch.compile(layer, backend="eager", fullgraph=True)):
        assert (traced(x) - expected).norm() < 0.03 * expected.norm()


@each_generation
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_have_the_shapes_of_the_results(generation: str) -> None:
    """Tools that estimate memory or trace a model run it with tensors that have no memory."""
    with FakeTensorMode():
        model = small_model("torch_scan" if generation == "rwkv4" else "torch_chunk", generation=generation)
        logits, _ = model(torch.zeros(2, 20, dtype=torch.long))
        logits.sum().backward()
    assert logits.shape == (2, 20, 50)
