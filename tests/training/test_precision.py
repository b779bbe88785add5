"""Tests which precision training and generation choose on a CPU, and on a GPU that a fake torch.cuda reports."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from rwkv.config import SavedModelConfig, TrainConfig, TrainerConfig
from rwkv.errors import UserError
from rwkv.model import loss
from rwkv.pretrained import default_dtype
from rwkv.training import device
from rwkv.training.device import dtype_for, resolve_precision, set_product_precision, why_precision
from rwkv.training.memory.estimate import estimate
from rwkv.training.run.directory import as_plain
from rwkv.training.run.opening import open_run
from rwkv.training.trainer import precision_for

GPU, CPU = torch.device("cuda"), torch.device("cpu")
FakeGpu = Callable[..., None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Returns a function that makes torch report a GPU. bfloat16 requires the capability 8.0."""
    def fake(major: int = 9, memory: float = 80e9) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {major}.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=int(memory)))

    return fake


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("major", "option", "expected"), [
    (9, None, "bf16-mixed"), (9, "auto", "bf16-mixed"), (9, "32-true", "32-true"), (9, "tf32", "tf32"),
    (9, "fp16-mixed", "fp16-mixed"), (8, None, "bf16-mixed"), (7, None, "32-true"), (7, "auto", "32-true"),
    (7, "fp16-mixed", "fp16-mixed"), (7, "bf16-mixed", "bf16-mixed")])
@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_on_a_gpu(gpu: FakeGpu, major: int, option: str | None, expected: str, accelerator: str) -> None:
    gpu(major)
    assert resolve_precision(option, accelerator) == expected


@pytest.mark.parametrize(("option", "expected"), [(None, "32-true"), ("32-true", "32-true"), ("bf16-mixed", "bf16-mixed")])
@pytest.mark.parametrize("fast", [False, True])
def test_on_a_cpu_the_default_is_float32(no_gpu: None, option: str | None, expected: str, fast: bool,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "bfloat16_is_faster", lambda device: fast)
    assert resolve_precision(option, "auto") == expected


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_is_in_float32(gpu: FakeGpu) -> None:
    gpu()
    assert resolve_precision(None, "cpu") == "32-true"
    assert default_dtype("cpu") == "float32"


def test_tf32_on_a_device_without_it_is_reported_in_one_sentence(gpu: FakeGpu) -> None:
    with pytest.raises(UserError, match="requires a GPU, but this run is on a CPU"):
        resolve_precision("tf32", "cpu")
    gpu(7)
    with pytest.raises(UserError, match=r"8\.0 or higher, but GPU 7\.0 is older"):
        resolve_precision("tf32", "gpu")


def test_tf32_is_float32_with_shorter_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    for precision in ("tf32", "32-true", "bf16-mixed"):
        set_product_precision(precision, GPU)
        set_product_precision(precision, CPU)
    assert calls == ["high", "highest", "highest"]
    assert dtype_for("tf32") == torch.float32
    assert precision_for(TrainerConfig(precision="tf32"), GPU) == {"precision": "32-true"}


@pytest.mark.parametrize(("major", "precision", "words"), [
    (9, "bf16-mixed", "trainer.precision=32-true computes in float32"), (9, "32-true", "trainer.precision=bf16-mixed is"),
    (7, "32-true", "does not multiply bfloat16"), (9, "tf32", "10 bits")])
def test_the_plan_says_why(gpu: FakeGpu, major: int, precision: str, words: str) -> None:
    gpu(major)
    assert words in str(why_precision(precision, GPU))
    assert why_precision(precision, CPU) is None


@pytest.mark.parametrize(("major", "device_name", "dtype"), [
    (9, "cuda", "bfloat16"), (7, "cuda", "float32"), (9, "cpu", "float32")])
def test_generating(gpu: FakeGpu, major: int, device_name: str, dtype: str) -> None:
    gpu(major)
    assert SavedModelConfig().dtype is None
    assert default_dtype(device_name) == dtype


@pytest.mark.parametrize("given", [[], ["trainer.precision"]])
@pytest.mark.parametrize("before", ["32-true", "bf16-mixed", "tf32"])
def test_a_resumed_run_keeps_its_precision(gpu: FakeGpu, tmp_path: Path, before: str, given: list[str]) -> None:
    gpu()
    plain = as_plain(TrainConfig(trainer=TrainerConfig(precision=before)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    request = TrainConfig(resume="auto", out_dir=str(tmp_path), trainer=TrainerConfig())
    assert open_run(request, given, []).config.trainer.precision == before


# The loss's chunk


@pytest.mark.parametrize(("memory", "V", "itemsize", "least"), [
    (80e9, 65536, 2, 8192), (24e9, 65536, 2, 2048), (8e9, 65536, 4, 256), (1e9, 2 ** 20, 4, 256)])
def test_a_gpu_has_as_many_rows_at_once_as_a_share_of_its_memory_holds(gpu: FakeGpu, memory: float, V: int, itemsize: int,
                                                                       least: int) -> None:
    gpu(memory=memory)
    rows = loss.rows_per_chunk(V, device=GPU, itemsize=itemsize)
    assert rows >= least
    assert rows % loss.LEAST_ROWS == 0
    assert rows == loss.LEAST_ROWS or rows * V * itemsize <= loss.CHUNK_SHARE * memory
    assert loss.rows_per_chunk(V) == max(256, 2 ** 21 // V), "on a CPU"


def test_the_estimate_counts_the_chunk_of_the_device(gpu: FakeGpu) -> None:
    config = TrainConfig(trainer=TrainerConfig(accelerator="cpu", precision="bf16-mixed"))
    config.model.n_embd, config.model.ctx_len, config.data.batch_size = 768, 1024, 8
    on_cpu = estimate(config, 65536)
    gpu(memory=80e9)
    config.trainer.accelerator = "gpu"
    on_gpu = estimate(config, 65536)
    head = 4 * 65536 * 768
    assert on_gpu.loss == 2 * 65536 * 8192 + head        # all logits in bfloat16, and the head's gradient once
    assert on_cpu.loss == 2 * 4 * 65536 * 256 + 2 * head
