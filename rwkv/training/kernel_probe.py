"""What a run's kernel costs and how far it is from float64, on the run's own numbers: out_dir/kernel.json.

Beside the machine, which is always there, trainer.probe=true measures
- the time of some hundred steps after WARM_UP, and in each of them that of WKV's forward and backward passes: by a clock on
  a CPU, by CUDA events on a GPU, read when training is over;
- the error of WKV in each layer, its output and all its gradients, on the k, v, time_decay, time_first and upstream gradient of
  a batch at the start and of the last batch after the last step, against the reference in float64. The start is the third
  step: RWKV-4 begins with keys and outputs of zero, and the gradients that reach WKV are all zero until then.

Training does not change by a bit: between sampled steps nothing is attached, a clock only looks, and errors are those of a
pass of their own, over half of the batch so that its memory stays below that of a step, whose gradients are thrown away.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from kernels.bench.hardware import describe
from kernels.compare import err_ratio
from kernels.wkv4 import WKV, WKVState, cases
from rwkv.config import TrainerConfig
from rwkv.data.documents import Segments
from rwkv.distributed import rank
from rwkv.io.atomic import write_file
from rwkv.model.rwkv4 import Block

FILE = "kernel.json"
START = 2
WARM_UP, SAMPLES = 20, 100               # steps that are not timed (a fifth of a short run), and how many are, roughly
DIFFERENTIABLE = ("time_decay", "time_first", "k", "v")


class Clock(Protocol):
    """mark() notes a moment, and ms(begin, end), asked when training is over, is the time between two of them."""

    def mark(self) -> Any: ...
    def ms(self, begin: Any, end: Any) -> float: ...


class CpuClock:
    def mark(self) -> float:
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        return 1000 * (end - begin)


class CudaClock:
    """Events on the current stream: noting one waits for nothing."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end)


class Sample:
    """One step: its own begin and end, and those of every forward and backward pass of WKV in it."""

    def __init__(self, step: int, clock: Clock) -> None:
        self.step, self.clock = step, clock
        self.spans: dict[str, list[tuple[Any, Any]]] = {"ms": [], "forward_ms": [], "backward_ms": []}
        self.begin = clock.mark()

    def end(self) -> None:
        self.spans["ms"].append((self.begin, self.clock.mark()))

    def wrap(self, wkv: WKV, layer: int) -> Callable[..., tuple[Tensor, WKVState]]:
        return partial(self._timed, wkv)

    def as_row(self) -> dict[str, float]:
        return {"step": self.step} | {name: sum(self.clock.ms(*span) for span in spans) for name, spans in self.spans.items()}

    def _timed(self, wkv: WKV, *inputs: Any) -> tuple[Tensor, WKVState]:
        begin = self.clock.mark()
        y, state = wkv(*inputs)
        self.spans["forward_ms"].append((begin, self.clock.mark()))
        if y.grad_fn is not None:
            begins: list[Any] = []
            y.grad_fn.register_prehook(lambda *_: begins.append(self.clock.mark()))
            y.grad_fn.register_hook(lambda *_: self.spans["backward_ms"].append((begins.pop(), self.clock.mark())))
        return y, state


class Record:
    """One layer's WKV in one pass: what it was given, what it gave, and the gradients into and out of it."""

    def __init__(self) -> None:
        self.inputs: tuple[Tensor, ...] = ()
        self.state: WKVState | None = None
        self.y = self.grad_y = torch.empty(0)
        self.grads: tuple[Tensor, ...] = ()

    def wrap(self, wkv: WKV) -> Callable[..., tuple[Tensor, WKVState]]:
        return partial(self._kept, wkv)

    def _kept(self, wkv: WKV, *inputs: Any) -> tuple[Tensor, WKVState]:
        y, state = wkv(*inputs)
        self.inputs, self.y = tuple(tensor.detach() for tensor in inputs[:4]), y.detach()
        self.state = inputs[4] if len(inputs) > 4 else None
        assert y.grad_fn is not None
        y.grad_fn.register_hook(self._keep)
        return y, state

    def _keep(self, grads: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
        self.grads, self.grad_y = tuple(grads[:4]), upstream[0]

    def errors(self) -> dict[str, dict[str, float]]:
        """Of y and each gradient: err_ratio, and the largest difference."""
        leaves = [tensor.double().requires_grad_() for tensor in self.inputs]
        state = None if self.state is None else WKVState(*(part.detach().double() for part in self.state))
        with torch.enable_grad(), torch.autocast(self.y.device.type, enabled=False):
            y, _ = WKV("reference")(leaves[0], leaves[1], leaves[2], leaves[3], state)
        grads = torch.autograd.grad(y, leaves, self.grad_y.double())
        expected = {"y": y.detach()} | {f"grad {name}": grad for name, grad in zip(DIFFERENTIABLE, grads, strict=True)}
        found = [self.y, *self.grads]
        return {name: {"err_ratio": err_ratio(actual, reference), "max": float((actual - reference).abs().max())}
                for (name, reference), actual in zip(expected.items(), found, strict=True)}

    def ranges(self) -> dict[str, list[float]]:
        """The least and the largest of each input."""
        return {name: [float(tensor.min()), float(tensor.max())]
                for name, tensor in zip(DIFFERENTIABLE, self.inputs, strict=True)}


class Attached:
    """In the place of each layer's operator, wrap(operator, layer); until `detach`."""

    def __init__(self, pl_module: lightning.LightningModule, wrap: Callable[[WKV, int], Any]) -> None:
        self._before = [(block, block.att.wkv) for block in _blocks(pl_module)]
        for layer, (block, wkv) in enumerate(self._before):
            block.att.wkv = wrap(wkv, layer)

    def detach(self) -> None:
        for block, wkv in self._before:
            block.att.wkv = wkv


class Probe(Callback):
    """Writes out_dir/kernel.json when training begins, and again when it ends in whatever way. Of several processes, the first.

    paused(seconds): told how long a measurement of errors took.
    """

    def __init__(self, out_dir: Path, options: TrainerConfig, paused: Callable[[float], None]) -> None:
        self.path, self.options, self._paused = out_dir / FILE, options, paused
        self.measured: dict[str, Any] = {}
        self._first = self._steps = 0    # the step that training began or went on at, and the last one
        self._samples: list[Sample] = []
        self._sample: Sample | None = None
        self._attached: Attached | None = None
        self._batch: Any = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._first, self._steps = trainer.global_step, trainer.max_steps
        before = _read(self.path) if self._first else {}
        self.measured = {
            "kernel": _blocks(pl_module)[0].att.wkv.name, "device": pl_module.device.type, "precision": self.options.precision,
            "machine": describe(pl_module.device.type), "probe": _why_not(self.options) or "on", "warm_up": self._warm_up(),
            "steps": [row for row in before.get("steps", []) if row["step"] < self._first],
            "errors": {when: errors for when, errors in before.get("errors", {}).items() if when == "start"},
            "finished": False}
        self._write()

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any,
                             batch_idx: int) -> None:
        if rank() > 0 or _why_not(self.options):
            return
        self._batch, step = batch, trainer.global_step
        if step == min(START, self._steps - 1) and "start" not in self.measured["errors"]:
            since = time.perf_counter()
            self.measured["errors"]["start"] = measure_errors(trainer, pl_module, batch)
            self._write()
            self._paused(time.perf_counter() - since)
        if batch_idx % self.options.accumulate == 0 and self._is_sampled(step):
            self._sample = Sample(step, CudaClock() if pl_module.device.type == "cuda" else CpuClock())
            self._attached = Attached(pl_module, self._sample.wrap)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        if self._sample is not None and (batch_idx + 1) % self.options.accumulate == 0:
            self._sample.end()
            self._samples.append(self._sample)
            self._detach()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.measured["finished"] = trainer.global_step >= self._steps
        if self._batch is not None:
            self.measured["errors"]["end"] = measure_errors(trainer, pl_module, self._batch)

    def on_exception(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException) -> None:
        """Lightning tears nothing down then."""
        self._finish()

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._finish()

    def _finish(self) -> None:
        if self.measured:
            self._detach()
            self.measured["steps"] += [sample.as_row() for sample in self._samples]
            self._samples, self._batch = [], None
            self._write()

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.detach()
        self._attached = self._sample = None

    def _is_sampled(self, step: int) -> bool:
        since = step - self._first - self._warm_up()
        return since >= 0 and since % max(1, self._steps // SAMPLES) == 0

    def _warm_up(self) -> int:
        return min(WARM_UP, self._steps // 5)

    def _write(self) -> None:
        if rank() == 0:
            write_file(self.path, lambda file: file.write(json.dumps(self.measured).encode()))


def measure_errors(trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any) -> dict[str, Any]:
    """The step's number, and per layer the errors of WKV in a pass over half of the batch, and the ranges of its inputs."""
    records = [Record() for _ in _blocks(pl_module)]
    attached = Attached(pl_module, lambda wkv, layer: records[layer].wrap(wkv))
    try:
        with torch.enable_grad(), trainer.precision_plugin.train_step_context():
            loss = cast(Any, pl_module).loss(*_half(batch))
        torch.autograd.grad(loss, [weight for weight in pl_module.parameters() if weight.requires_grad], allow_unused=True)
    finally:
        attached.detach()
    dtype = records[0].y.dtype
    return {"step": trainer.global_step, "dtype": str(dtype).removeprefix("torch."), "allowed": cases.tolerance(dtype),
            "layers": [{"errors": record.errors(), "ranges": record.ranges()} for record in records]}


def _half(batch: Any) -> tuple[Tensor, Tensor]:
    """The first rows of a batch; of segments (B,K,T) the first one."""
    x, y = (batch.x[:, 0], batch.y[:, 0]) if isinstance(batch, Segments) else batch
    return x[:max(1, len(x) // 2)], y[:max(1, len(y) // 2)]


def _blocks(pl_module: lightning.LightningModule) -> list[Block]:
    return [cast(Block, block) for block in cast(Any, pl_module).model.blocks]


def _why_not(options: TrainerConfig) -> str | None:
    """Why nothing is measured, where that is so."""
    if not options.probe:
        return "off"
    if options.compile:
        return "a compiled block has no operator to look at: trainer.compile=true"
    return "the weights are spread over processes: trainer=fsdp" if options.strategy == "fsdp" else None


def _read(path: Path) -> dict[str, Any]:
    """What an earlier part of the run has written; nothing where that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
