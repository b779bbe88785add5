"""Tests which runs have CUDA graphs of blocks, and that a replay computes what the blocks compute, with a fake capture."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import each_generation, small_model, tokens
from torch import Tensor, nn

from rwkv.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, TrainerConfig, TuneConfig
from rwkv.errors import UserError
from rwkv.training import graphs
from rwkv.training.graphs import Replay
from rwkv.training.task import LanguageModel
from rwkv.training.trainer import prepare_blocks

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SMALL = TrainConfig(model=ModelConfig(n_embd=192), data=DataConfig(batch_size=8))


def with_trainer(**options: Any) -> TrainConfig:
    return replace(SMALL, trainer=TrainerConfig(**options))


# Which runs


def test_a_small_run_on_a_gpu_has_graphs_and_a_large_one_only_if_asked() -> None:
    large = replace(SMALL, model=ModelConfig(n_embd=2048, ctx_len=4096))
    with_graphs = replace(large, trainer=TrainerConfig(graphs=True))
    assert graphs.uses_graphs(SMALL, GPU, "cuda_v3")
    assert not graphs.uses_graphs(large, GPU, "cuda_v3")
    assert graphs.uses_graphs(with_graphs, GPU, "triton_scan")
    assert "bottleneck" in str(graphs.describe(large, GPU, "cuda_v3"))
    assert "trainer.graphs=false" in str(graphs.describe(SMALL, GPU, "cuda_v3"))


def test_a_cpu_has_no_graphs_and_prints_nothing() -> None:
    assert not graphs.uses_graphs(SMALL, CPU, "c_v0")
    assert graphs.describe(SMALL, CPU, "c_v0") is None


@pytest.mark.parametrize(("config", "kernel", "words"), [
    (with_trainer(strategy="fsdp"), "cuda_v3", "fsdp"), (with_trainer(tbptt=2), "cuda_v3", "tbptt"),
    (with_trainer(accumulate=2), "cuda_v3", "accumulate"), (with_trainer(compile=True), "cuda_v3", "compile"),
    (with_trainer(activation_checkpointing=True), "cuda_v3", "checkpointing"), (with_trainer(probe=True), "cuda_v3", "probe"),
    (with_trainer(precision="fp16-mixed"), "cuda_v3", "fp16-mixed"), (SMALL, "torch_chunk", "kernel=torch_chunk"),
    (SMALL, "taichi_v3", "kernel=taichi_v3"), (replace(SMALL, data=DataConfig(name="chat")), "cuda_v3", "conversations"),
    (replace(SMALL, tune=TuneConfig(method="lora")), "cuda_v3", "tune=lora"),
    (replace(SMALL, model=ModelConfig(generation="rwkv7", deep_embed_dim=4)), "cuda_v3", "DeepEmbed")],
    ids=lambda value: str(value)[:20])
def test_a_run_that_cannot_be_captured_has_no_graphs_and_says_why(config: TrainConfig, kernel: str, words: str) -> None:
    assert not graphs.uses_graphs(config, GPU, kernel)
    assert words in str(graphs.describe(config, GPU, kernel))
    with pytest.raises(UserError, match=f"trainer.graphs=true cannot be used, because .*{words}"):
        graphs.uses_graphs(replace(config, trainer=replace(config.trainer, graphs=True)), GPU, kernel)


# Replays


class FakeReplay(torch.autograd.Function):
    """Computes like a CUDA graph: from a fixed input, with results that the next replay overwrites."""

    @staticmethod
    def forward(ctx: Any, graph: "FakeGraph", x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graph = graph
        graph.replays += 1
        graph.input.data.copy_(x)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=graph.half, cache_enabled=False):
            graph.output = graph.blocks(graph.input)
        return graph.output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph = ctx.graph
        gradients = torch.autograd.grad(graph.output, (graph.input, *graph.blocks.parameters()), grad)
        for static, gradient in zip(graph.gradients, gradients, strict=True):
            static.copy_(gradient)
        return None, *(static.detach() for static in graph.gradients)


class FakeGraph:
    """Replaces torch.cuda.make_graphed_callables, which needs a GPU."""

    def __init__(self, blocks: nn.Module, sample: tuple[Tensor], allow_unused_input: bool) -> None:
        self.blocks, self.input = blocks, sample[0]
        self.half = torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
        blocks(*sample).sum().backward()         # like a capture, this makes the copies of the weights
        for parameter in blocks.parameters():
            parameter.grad = None
        self.output = sample[0]
        self.gradients = [torch.empty_like(each) for each in (*sample, *blocks.parameters())]    # each replay overwrites these
        self.replays = 0

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = FakeReplay.apply(self, x, *self.blocks.parameters())
        return out


def train(generation: str, precision: str, with_replay: bool) -> tuple[list[float], list[Tensor], Replay | None]:
    torch.manual_seed(0)
    model = prepare_blocks(small_model("c_v0", generation=generation), TrainerConfig(precision=precision))
    if with_replay:
        model.replay = Replay(model, FakeGraph)
    task = LanguageModel(model, OptimConfig(), 10, 1.0)
    optimizer = task.configure_optimizers()["optimizer"]
    losses = []
    for seed in range(3):
        x = tokens(model, seed=seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = task.loss(x, x.roll(-1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()], model.replay


@each_generation
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_with_replays_equals_a_run_without_bit_for_bit(generation: str, precision: str) -> None:
    losses, weights, replay = train(generation, precision, True)
    expected, expected_weights, _ = train(generation, precision, False)
    assert replay is not None
    assert replay._graph.replays == 3
    assert losses == expected
    assert all(map(torch.equal, weights, expected_weights))


def test_passes_that_a_replay_cannot_compute_are_computed_as_usual() -> None:
    model = small_model("c_v0", generation="rwkv7")
    replay = model.replay = Replay(model, FakeGraph)
    plain = small_model("c_v0", generation="rwkv7")
    x, other = tokens(model, 2, 8), tokens(model, 1, 5)
    with torch.no_grad():
        assert torch.equal(model.forward_features(x), plain.forward_features(x))
    assert replay._graph is None
    first = model.forward_features(x)
    second = model.forward_features(x.flip(0))           # before the backward pass of the first
    model.forward_features(other)
    starts = torch.zeros(x.shape, dtype=torch.bool).index_fill_(1, torch.tensor([0, 4]), True)
    assert torch.equal(model.forward_features(x, starts), plain.forward_features(x, starts))
    assert replay._graph.replays == 1
    (first.square().sum() + second.square().sum()).backward()
    (plain.forward_features(x).square().sum() + plain.forward_features(x.flip(0)).square().sum()).backward()
    for one, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(one.grad, expected.grad, rtol=1e-4, atol=1e-6)
    model.forward_features(x)
    assert replay._graph.replays == 2


def test_after_a_failed_capture_a_line_says_so_and_the_run_computes_as_usual(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = small_model("c_v0", generation="rwkv4")
    model.replay = Replay(model, fail)
    for _ in range(2):
        model.forward_features(tokens(model)).sum().backward()
    assert capsys.readouterr().err.count("the capture failed: operation not permitted when stream is capturing") == 1
