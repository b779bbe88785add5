"""Tests that values cached from weights match the model's current weights, however the weights were changed."""

import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import in_format, small_model
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rwkv.chat.turn_templates import chat_template
from rwkv.generation.conversation import Chat
from rwkv.generation.decoder import decoder_of
from rwkv.generation.engine import Engine, generate
from rwkv.generation.prefix_cache import PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.sampling import Sampling
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model import weights_watch
from rwkv.model.decoding.c_step import step_of
from rwkv.model.weights_watch import CachedFromWeights, exact_copies
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
Change = Callable[[RWKV, str, Tensor], None]


def frozen(dtype: str = "float32", generation: str = "rwkv4") -> RWKV:
    """Returns a frozen model whose float32 matrices have exact copies in bfloat16."""
    model = small_model("reference", vocab_size=256, generation=generation, n_embd=64, n_ffn=96, n_layer=2)
    return in_format(model.bfloat16().float(), dtype)


def in_place(model: RWKV, name: str, weight: Tensor) -> None:
    weight[:1] = 1 - weight[:1]


def under_inference_mode(model: RWKV, name: str, weight: Tensor) -> None:
    with torch.inference_mode():
        weight.copy_(1 - weight)


def new_data(model: RWKV, name: str, weight: Tensor) -> None:
    weight.data = 1 - weight.data


def through_data(model: RWKV, name: str, weight: Tensor) -> None:
    weight.data.copy_(1 - weight)


def replace_parameter(model: RWKV, name: str, weight: Tensor) -> None:
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, nn.Parameter(1 - weight, requires_grad=False))


def load_state(model: RWKV, name: str, weight: Tensor) -> None:
    model.load_state_dict({name: 1 - weight}, strict=False)


def assign_state(model: RWKV, name: str, weight: Tensor) -> None:
    model.load_state_dict({name: 1 - weight}, strict=False, assign=True)


def run_fused_step(model: RWKV, name: str, weight: Tensor) -> None:
    model.requires_grad_(True)
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    model.requires_grad_(False)


CHANGES = [in_place, under_inference_mode, new_data, through_data, replace_parameter, load_state, assign_state, run_fused_step]


@pytest.mark.compiles
@pytest.mark.parametrize(("generation", "dtype", "allowed"), [
    ("rwkv4", "float32", 1e-4), ("rwkv7", "bfloat16", 0.1), ("rwkv7", "int4", 0.1),
    pytest.param("rwkv7", "float64", 1e-4, marks=pytest.mark.thorough),          # PyTorch decodes this dtype, because C cannot
    *(pytest.param(*case, marks=pytest.mark.soak) for case in (
        ("rwkv4", "bfloat16", 0.1), ("rwkv4", "int8", 0.1), ("rwkv4", "int4", 0.1), ("rwkv4", "float64", 1e-4),
        ("rwkv7", "float32", 1e-4), ("rwkv7", "int8", 0.1)))])
@torch.no_grad()
def test_decoding_and_the_model_agree_after_any_change_of_any_weight(dtype: str, allowed: float, generation: str) -> None:
    """A running engine and a new decoder follow the change. Each weight is changed in one of several ways and then restored."""
    model = frozen(dtype, generation)
    engine = Engine(model, BYTES)
    rows = engine.add_all([Request("ab", 0, StoppingCriteria(1000), Sampling(banned=(BYTES.end_of_text,)))])
    for i, name in enumerate(list(dict(model.named_parameters()))):
        engine.step()
        state, before = engine.context().state, model.get_parameter(name).detach().clone()
        CHANGES[i % len(CHANGES)](model, name, model.get_parameter(name))
        engine.step()
        token = torch.tensor([[rows[0].sample.tokens[-1]]])
        expected = model.prefill(token, state)[0].float()
        for logits in (engine.context().logits, decoder_of(model, state).step(token[0])):
            assert (logits.float() - expected).abs().max() < allowed * max(1.0, float(expected.abs().max())), name
        replace_parameter(model, name, 1 - before)


@torch.no_grad()
def test_a_cache_does_not_return_states_of_other_weights() -> None:
    model, cache = frozen(), PrefixCache()
    chat = Chat(model, BYTES, chat_template("world"), Sampling(), 3)
    options = {"prompt": "a prompt", "max_new_tokens": 8, "temperature": 0}
    list(generate(model, BYTES, cache=cache, **options))
    list(chat.say("hello"))
    model.blocks[0].att.output.weight.mul_(-3)
    assert list(generate(model, BYTES, cache=cache, **options)) == list(generate(model, BYTES, **options))
    before = [*chat.messages]
    second_chat = Chat(model, BYTES, chat.template, Sampling(), 3, seed=chat.seed)
    second_chat.load(before)
    assert list(chat.say("and?")) == list(second_chat.say("and?"))


@torch.no_grad()
def test_a_new_learnt_state_replaces_cached_states() -> None:
    model, cache = frozen(generation="rwkv7"), PrefixCache()
    options = {"prompt": "a prompt", "max_new_tokens": 8, "temperature": 0}
    before = list(generate(model, BYTES, cache=cache, **options))
    model.set_time_states([torch.randn_like(state) * 9 for state in model.empty_state(1).wkv[:, 0]])
    after = list(generate(model, BYTES, **options))
    assert before != after
    assert list(generate(model, BYTES, cache=cache, **options)) == after


@pytest.mark.compiles
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
@torch.no_grad()
def test_a_copy_of_a_model_in_int4_multiplies_its_own_weights(copied: Callable[[RWKV], RWKV]) -> None:
    model, ids = frozen("int4"), torch.tensor([[1, 2]])
    other, before = copied(model), model.prefill(ids)[0]
    assert torch.equal(other.prefill(ids)[0], before)
    other.head.packed.scale.zero_()
    other.head.packed.shift.zero_()
    assert not other.prefill(ids)[0].any()
    assert torch.equal(model.prefill(ids)[0], before)


def matrices(model: nn.Module) -> list[Tensor]:
    return [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]


def test_copies_are_exact_and_made_once() -> None:
    model = frozen()
    for weight, copied in zip(matrices(model), exact_copies(matrices(model)) or [], strict=True):
        assert copied.dtype == torch.bfloat16
        assert torch.equal(copied.float(), weight)
    assert step_of(model).reads_copies
    assert step_of(model) is step_of(model)


def test_a_copy_of_a_model_does_not_share_the_cached_step() -> None:
    """A copy of a model does not share the cached decoding step of the original."""
    model = frozen()
    step = step_of(model)
    assert step_of(copy.deepcopy(model)) is not step
    assert step_of(pickle.loads(pickle.dumps(model))) is not step


def test_the_cached_step_keeps_no_weight_in_memory() -> None:
    """The decoding step that is cached for a model does not keep replaced weights in memory."""
    model = frozen()
    step_of(model)
    for name in list(dict(model.named_parameters())):
        storage = StorageWeakRef(model.get_parameter(name).untyped_storage())
        replace_parameter(model, name, model.get_parameter(name))
        assert storage.expired(), name


def test_no_copy_is_made_that_would_change_a_number() -> None:
    """exact_copies() returns None if a weight does not fit bfloat16."""
    model = frozen()
    model.head.weight[:] = 1 + 2**-20
    assert exact_copies(matrices(model)) is None
    assert not step_of(model).reads_copies


def test_no_copy_is_made_of_weights_whose_changes_are_not_counted() -> None:
    """exact_copies() returns None for weights made in inference mode, because PyTorch does not count their changes."""
    model = frozen()
    with torch.inference_mode():
        model.head.weight = nn.Parameter(model.head.weight.clone(), requires_grad=False)
    assert exact_copies(matrices(model)) is None


def test_no_copy_is_made_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """exact_copies() returns None if memory does not suffice."""
    model = frozen()
    monkeypatch.setattr(weights_watch, "available_memory", lambda: 1000)
    assert exact_copies(matrices(model)) is None


def test_threads_that_share_a_model_compute_a_value_once() -> None:
    model, cache, computed = frozen(), CachedFromWeights(), []

    def compute(model: RWKV) -> object:
        time.sleep(0.02)                 # lets the other threads run
        computed.append(object())
        return computed[-1]

    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda _: cache.of(model, compute), range(8)))
    assert values == computed * 8
