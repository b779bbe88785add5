"""Tests that RWKV-7 follows its paper's formulas, and has RWKV-LM's initial weights and parameter groups.

Independent implementations serve as references: tests/numpy_rwkv7.py of the model, and this file of the initialisation and the
groups. test_lora.py compares the gradients with finite differences.

Sources: arXiv 2503.14456; RWKV-LM, RWKV-v7/train_temp/src/model.py.
"""

import math
from pathlib import Path

import pytest
import torch
from models import kernels, small_config, small_model, tokens
from numpy_rwkv7 import LayerState, NumpyRWKV7
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kernels.select import select
from rwkv.checkpoint.files import checkpoint_of
from rwkv.config import ModelConfig, OptimConfig
from rwkv.errors import UserError
from rwkv.model.base import n_parameters
from rwkv.model.rwkv7 import UNUSED, State, shapes, with_default_widths
from rwkv.pretrained import RWKV
from rwkv.training.optim.optimisers import parameter_groups

LETTERS = "rwkvag"
KERNELS = kernels("wkv7")


def small(kernel: str = "reference", **sizes: int) -> RWKV:
    return small_model(kernel, generation="rwkv7", **sizes)


def oracle(model: RWKV) -> NumpyRWKV7:
    return NumpyRWKV7({name: weight.detach().numpy() for name, weight in model.state_dict().items()})


def assert_close(actual: Tensor, expected: object, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=0, atol=atol, check_dtype=False)


def assert_same_state(state: State, expected: list[LayerState]) -> None:
    for layer, theirs in zip(state.layers(), expected, strict=True):
        for mine, part in zip(layer, theirs, strict=True):
            assert_close(mine, part)


# The formulas


@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_logits_and_state_equal_those_of_the_formulas(kernel: str) -> None:
    model = small(kernel)
    ids = tokens(model, T=40)
    expected, after = oracle(model)(ids.numpy())
    logits, state = model(ids)
    assert logits.std() > 0.3, "logits of zero would be equal too"
    assert_close(logits, expected)
    assert_same_state(state, after)
    first, state = model(ids[:, :23])
    rest, state = model(ids[:, 23:], state)
    assert_close(torch.cat([first, rest], 1), expected)
    assert_same_state(state, after)


def test_layers_that_must_be_called_give_the_same_results() -> None:
    """Adapters, hooks and torch.compile see the plain form, whose gradients equal those of the fused form."""
    model = small()
    names, weights = zip(*model.named_parameters(), strict=True)

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        loss = cross_entropy(logits.flatten(0, 1), tokens(model, seed=2).flatten())
        return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))

    expected, after = oracle(model)(tokens(model).numpy())
    fused_gradients = gradients(model(tokens(model))[0])
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_: None)
    logits, state = model(tokens(model))
    assert_close(logits, expected)
    assert_same_state(state, after)
    for name, gradient in gradients(logits).items():
        assert (fused_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        assert gradient.norm() > 0, name


def test_a_checkpoint_of_a_block_keeps_the_gradient_of_its_carry_or_is_refused() -> None:
    """With use_reentrant=True, torch computes v_first, a tensor in a tuple, without gradients."""
    model = small()
    names, weights = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(model(tokens(model))[0].square().sum(), weights)

    def output(use_reentrant: bool) -> Tensor:
        x, carry = model.emb(tokens(model)), None
        for block in model.blocks:
            x, _, carry = checkpoint(block, x, None, carry, use_reentrant=use_reentrant)
        return model.head(model.ln_out(x)).square().sum()

    for name, gradient, right in zip(names, torch.autograd.grad(output(False), weights), expected, strict=True):
        torch.testing.assert_close(gradient, right, msg=name)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        output(True).backward()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("input_requires_grad", [False, True])
def test_blocks_above_others_without_gradients_are_trained(input_requires_grad: bool, checkpointed: bool) -> None:
    model = small()
    with torch.no_grad():
        x, _, carry = model.blocks[0](model.emb(tokens(model)), None)
    x.requires_grad_(input_requires_grad)
    for block in model.blocks[1:]:
        x, _, carry = checkpoint(block, x, None, carry, use_reentrant=False) if checkpointed else block(x, None, carry)
    x.sum().backward()
    assert model.blocks[1].att.key.weight.grad is not None


@torch.no_grad()
def test_every_tensor_counts_but_layer_0_s_value_residual() -> None:
    """Model and reference could agree although neither reads a tensor, so each tensor must change the logits."""
    model = small()
    ids = tokens(model, T=6)
    expected = model(ids)[0]
    for name, weight in model.state_dict().items():
        before = weight.clone()
        weight.add_(0.05 * torch.randn_like(weight))
        changed = float((model(ids)[0] - expected).abs().max())
        weight.copy_(before)
        assert (changed == 0) if name in UNUSED else (changed > 1e-4), name


@torch.no_grad()
def test_equal_tokens_and_a_key_of_zero_stay_finite() -> None:
    model = small()
    model.blocks[1].att.key.weight.zero_()
    ids = torch.zeros(1, 30, dtype=torch.long)
    assert_close(model(ids)[0], oracle(model)(ids.numpy())[0], atol=1e-4)     # rounding the weights causes 2.5e-5


# Tensors and sizes


def test_parameters_have_the_official_names_and_shapes() -> None:
    C, V, H, N, F, (w, a, v, g) = 16, 50, 2, 8, 64, (5, 4, 3, 6)
    layer = {**{f"{norm}.{part}": (C,) for norm in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")},
             **{f"att.x_{letter}": (1, 1, C) for letter in LETTERS},
             "att.w0": (1, 1, C), "att.w1": (C, w), "att.w2": (w, C), "att.a0": (1, 1, C), "att.a1": (C, a), "att.a2": (a, C),
             "att.v0": (1, 1, C), "att.v1": (C, v), "att.v2": (v, C), "att.g1": (C, g), "att.g2": (g, C),
             "att.k_k": (1, 1, C), "att.k_a": (1, 1, C), "att.r_k": (H, N),
             **{f"att.{name}.weight": (C, C) for name in ("receptance", "key", "value", "output")},
             "ffn.x_k": (1, 1, C), "ffn.key.weight": (F, C), "ffn.value.weight": (C, F)}
    expected = {f"blocks.{index}.{name}": shape for index in range(3) for name, shape in layer.items()}
    expected |= {"emb.weight": (V, C), "blocks.0.ln0.weight": (C,), "blocks.0.ln0.bias": (C,),
                 "ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (V, C)}
    model = small()
    assert {name: tuple(weight.shape) for name, weight in model.state_dict().items()} == expected
    assert shapes(model.config, V) == expected
    assert n_parameters(model.config, V) == 2 * V * C + 4 * C + 3 * (19 * C + 12 * C * C + 2 * C * (w + a + v + g))


@pytest.mark.parametrize(("n_embd", "ranks"), [(64, (32, 32, 32, 32)), (768, (64, 64, 32, 128)), (4096, (160, 160, 96, 320))])
def test_the_default_ranks_are_those_of_the_official_trainer(n_embd: int, ranks: tuple[int, ...]) -> None:
    actual = with_default_widths(ModelConfig(generation="rwkv7", n_embd=n_embd))
    assert (actual.decay_low_rank_dim, actual.a_low_rank_dim, actual.v_low_rank_dim, actual.gate_low_rank_dim) == ranks
    assert actual.n_ffn == 4 * n_embd


def test_a_width_that_is_not_a_multiple_of_the_head_size_is_reported_in_one_sentence() -> None:
    with pytest.raises(UserError):
        shapes(ModelConfig(generation="rwkv7", n_embd=100), 50)


@pytest.mark.parametrize(("generation", "name"), [("rwkv4", "head_size"), ("rwkv4", "v_low_rank_dim"), ("rwkv7", "n_att")])
def test_an_option_of_another_generation_is_reported_in_one_sentence(generation: str, name: str) -> None:
    with pytest.raises(UserError, match=name):
        RWKV(ModelConfig(generation=generation, **{name: 32}), 50, None)


def test_the_fingerprint_does_not_depend_on_unused_tensors() -> None:
    """Saved states contain the fingerprint, which must not depend on tensors that some formats leave out."""
    model = small()
    before = model.fingerprint()
    for name in UNUSED:
        model.state_dict()[name].add_(1)
    assert model.fingerprint() == before
    with torch.no_grad():
        model.blocks[0].att.w0.add_(1)
    assert model.fingerprint() != before


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0.02), ("int8", 0.3)])
@torch.no_grad()
def test_weights_in_bfloat16_are_computed_in_other_dtypes(tmp_path: Path, dtype: str, allowed: float) -> None:
    """With int8 the low-rank matrices, which are not linear layers, become float32 like the vectors."""
    model = small(n_embd=64)
    model.save_pretrained(tmp_path / "model.safetensors", dtype="bfloat16")
    loaded = RWKV.from_pretrained(tmp_path / "model.safetensors", "reference", dtype=dtype)
    expected = model(tokens(model))[0]
    assert (loaded(tokens(model))[0] - expected).norm() < allowed * expected.norm()


@torch.no_grad()
def test_a_model_in_bfloat16_computes_its_decay_in_float32() -> None:
    """bfloat16 would round a decay near 1 to 1."""
    model = small(n_embd=64)
    stored = checkpoint_of(model.state_dict()).stored_in("bfloat16")
    assert {name for name, tensor in stored.items() if tensor.get().dtype == torch.float32} == {
        f"blocks.{layer}.att.w0" for layer in range(3)}
    log_ws: list[Tensor] = []
    operator = model.blocks[0].att.wkv
    model = model.bfloat16()
    model.blocks[0].att.w0.data = model.blocks[0].att.w0.data.float()
    model.blocks[0].att.wkv = lambda r, log_w, *others: (log_ws.append(log_w), operator(r, log_w, *others))[1]
    model(tokens(model))
    assert log_ws[0].dtype == torch.float32
    assert (log_ws[0] != log_ws[0].bfloat16()).float().mean() > 0.9


# Initialisation and groups, as in RWKV-LM


CONFIG = small_config("rwkv7", n_embd=24)
V, L, C, N = 61, CONFIG.n_layer, CONFIG.n_embd, CONFIG.head_size


@pytest.fixture(scope="module")
def new_model() -> RWKV:
    torch.manual_seed(0)
    return RWKV(CONFIG, V, select("wkv7", "reference")).init_weights()


def official_vectors(layer: int) -> dict[str, list[float]]:
    """Returns the initial vectors of a layer, computed by the loops over channels n of RWKV-LM."""
    rho, sigma = layer / (L - 1), 1 - layer / L
    names = ["att.w0", "att.a0", "att.v0", "att.k_k", "att.k_a", "ffn.x_k", *(f"att.x_{letter}" for letter in LETTERS)]
    vectors: dict[str, list[float]] = {name: [] for name in names}
    for n in range(C):
        line, z = n / (C - 1) - 0.5, (n % N - (N - 1) / 2) / ((N - 1) / 2)
        z *= abs(z)
        vectors["att.w0"].append(-6 + 6 * (n / (C - 1)) ** (1 + rho ** 0.3) + 0.5 + 2.5 * z)
        vectors["att.a0"].append(-0.19 + 0.3 * z + 0.4 * line)
        vectors["att.v0"].append(0.73 - 0.4 * line)
        vectors["att.k_k"].append(0.71 - 0.1 * line)
        vectors["att.k_a"].append(1.02)
        vectors["ffn.x_k"].append(1 - (n / C) ** sigma ** 4)
        for letter, power in zip(LETTERS, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            vectors[f"att.x_{letter}"].append(1 - (n / C) ** (power * sigma))
    return vectors | {"att.ln_x.weight": [((layer + 1) / L) ** 0.7] * C, "att.ln_x.bias": [0.0] * C, "att.r_k": [-0.04] * C}


@pytest.mark.parametrize("layer", range(L))
def test_initial_vectors(new_model: RWKV, layer: int) -> None:
    weights = new_model.state_dict()
    for name, expected in official_vectors(layer).items():
        assert_close(weights[f"blocks.{layer}.{name}"].flatten(), torch.tensor(expected), 1e-6)


def test_initial_matrices(new_model: RWKV) -> None:
    weights = new_model.state_dict()
    gains = {"att.receptance.weight": 1.0, "att.value.weight": 1.0, "att.key.weight": 0.1, "ffn.key.weight": 1.0}
    for layer in range(L):
        for name in ("att.output.weight", "ffn.value.weight", *(f"att.{letter}1" for letter in "wavg")):
            assert not weights[f"blocks.{layer}.{name}"].any()
        for name, gain in (gains | {f"att.{letter}2": 0.1 for letter in "wavg"}).items():
            orthogonal(weights[f"blocks.{layer}.{name}"], gain)
    orthogonal(weights["head.weight"], 0.5 * math.sqrt(V / C))
    assert 0.9e-4 < weights["emb.weight"].abs().max() <= 1e-4
    for name, weight in weights.items():
        if "ln" in name and "ln_x" not in name:
            assert (weight == float(name.endswith("weight"))).all(), name


def test_a_head_of_fewer_tokens_than_channels_and_ranks_above_the_width() -> None:
    config = small_config("rwkv7", n_embd=8, gate_low_rank_dim=20)
    weights = RWKV(config, 5, select("wkv7", "reference")).init_weights().state_dict()
    orthogonal(weights["head.weight"], 0.5)
    orthogonal(weights["blocks.1.att.g2"], 0.1 * math.sqrt(20 / 8))


def orthogonal(weight: Tensor, gain: float) -> None:
    """Checks that the columns, or the rows of a wide matrix, are orthogonal and have length `gain`."""
    square = weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
    assert_close(square, gain ** 2 * torch.eye(len(square)))


@pytest.mark.parametrize(("n_layer", "n_embd"), [(1, 8), (1, 1), (2, 3)])
def test_one_layer_or_one_channel_has_finite_weights(n_layer: int, n_embd: int) -> None:
    config = small_config("rwkv7", n_layer=n_layer, n_embd=n_embd, head_size=1 if n_embd % 8 else 8)
    model = RWKV(config, 3, select("wkv7", "reference")).init_weights()
    assert all(weight.isfinite().all() for weight in model.state_dict().values())


def official_group(name: str) -> tuple[float, bool]:
    """Returns the factor of a parameter's learning rate, and True if weight decay applies, by RWKV-LM's rules for names."""
    if "att.w0" in name:
        return 2.0, False
    matrix = ".weight" in name and not any(part in name for part in ("ln0", "ln1", "ln2", "ln_x", "ln_out"))
    return 1.0, matrix


def test_the_optimiser_has_the_three_official_groups(new_model: RWKV) -> None:
    groups = parameter_groups(new_model, OptimConfig(lr=6e-4, min_lr=6e-5, weight_decay=1e-3))
    names = {parameter: name for name, parameter in new_model.named_parameters()}
    actual = {names[parameter]: (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]}
    assert len(groups) == 3
    assert actual.keys() == set(names.values())
    for name, (lr, decay) in actual.items():
        factor, decays = official_group(name)
        assert (lr, decay) == (pytest.approx(factor * 6e-4), 1e-3 if decays else 0.0), name
    assert {name for name, (_, decay) in actual.items() if decay} >= {"emb.weight", "head.weight"}


def test_muon_updates_the_matrices_of_plain_matrix_products(new_model: RWKV) -> None:
    groups = parameter_groups(new_model, OptimConfig(name="muon"))
    names = {parameter: name for name, parameter in new_model.named_parameters()}
    theirs = {names[parameter].split(".", 2)[2] for group in groups if group.get("orthogonal") for parameter in group["params"]}
    assert theirs == {"att.key.weight", "att.value.weight", "att.output.weight", "ffn.key.weight", "ffn.value.weight"} | (
        {"att.receptance.weight"} if new_model.generation.group("blocks.0.att.receptance.weight") == "matrix" else set())
