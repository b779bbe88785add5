"""Measures the speed and the error of a run's kernel on the run's own data, and writes the results to out_dir/kernel.json.

The file always describes the machine. The key `wrong` holds the message of kernel_check.py. trainer.probe=true adds:
- the times of about SAMPLES steps after the warm-up, and of the operator's forward and backward passes in these steps. A clock
  measures a CPU, and CUDA events measure a GPU. The events are read after training.
- the errors of the operator's output and gradients in each layer, relative to the float64 reference. Errors are measured with
  the inputs and the upstream gradients of two batches: in the third step, and after training with the last step's batch. Before
  the third step, all gradients that reach the operator are zero, because some matrices are initialised with zeros. If no
  weight before the operator is trained, as in the first layers of some tuned models, only the output is measured.

The probe does not change training by a single bit. Errors are measured in an extra pass over half of a batch, which takes less
memory than a step. The gradients of this pass are dropped, and the random generators, which tune.dropout uses, are restored.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from tqdm import tqdm

from kernels.compare import err_ratio, misses, tolerance
from kernels.machine.hardware import describe
from rwkv.config import TrainerConfig
from rwkv.data.tbptt_segments import Segments
from rwkv.distributed import rank
from rwkv.io.atomic import require_folder, write_file
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import labelled_line
from rwkv.report.run_files import KERNEL, read_measured
from rwkv.training.kernel_check import mismatch_message
from rwkv.training.task import LanguageModel, TrainingBatch

START = 2                                # errors are first measured at this step, counted from 0
WARM_UP = 20                             # the first timed step follows this many steps, or a fifth of a short run
SAMPLES = 100                            # about this many steps are timed
Timestamp = float | torch.cuda.Event
LayerState = tuple[Tensor, ...] | Tensor          # the operator's state in one layer
Call = Callable[..., tuple[Tensor, LayerState]]          # operator(inputs ..., state) -> (y, state)


def timestamp(device: str) -> Timestamp:
    """Returns a timestamp: a time on a CPU, or on a GPU an event of the current stream, recorded without synchronising."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Timestamp, end: Timestamp) -> float:
    """Returns the time between two timestamps. On a GPU this function synchronises, so call it only after training."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return 1000 * (end - begin)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(begin.elapsed_time(end))


class Sample:
    """Records the timestamps of a step and of the operator's forward and backward passes in the step."""

    def __init__(self, step: int, device: str) -> None:
        self.step = step
        self.device = device
        self.spans: dict[str, list[tuple[Timestamp, Timestamp]]] = {"ms": [], "forward_ms": [], "backward_ms": []}
        self.begin = timestamp(device)

    def end(self) -> None:
        self.spans["ms"].append((self.begin, timestamp(self.device)))

    def as_row(self) -> dict[str, float]:
        return {"step": self.step} | {name: sum(milliseconds(*span) for span in spans) for name, spans in self.spans.items()}

    def time_call(self, operator: Call, *inputs: object) -> tuple[Tensor, LayerState]:
        begin = timestamp(self.device)
        y, state = operator(*inputs)
        self.spans["forward_ms"].append((begin, timestamp(self.device)))
        if y.grad_fn is not None:
            begins: list[Timestamp] = []
            y.grad_fn.register_prehook(lambda *_: begins.append(timestamp(self.device)))
            y.grad_fn.register_hook(lambda *_: self.spans["backward_ms"].append((begins.pop(), timestamp(self.device))))
        return y, state


class Record:
    """Calls one layer's operator and records the inputs by name, the state, the output y and the gradients of one pass.

    `grads` holds the gradients of the inputs. The tuple is empty if the inputs have no gradients.
    """

    def __init__(self, operator: Call) -> None:
        self.operator = operator
        self.inputs: dict[str, Tensor] = {}
        self.state: LayerState | None = None
        self.y = self.grad_y = torch.empty(0)
        self.grads: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: object) -> tuple[Tensor, LayerState]:
        y, state = self.operator(*inputs)
        arguments = dict(inspect.signature(self.operator).bind(*inputs).arguments)
        self.state = arguments.pop("state", None)
        self.inputs = {name: tensor.detach() for name, tensor in arguments.items()}
        self.y = y.detach()
        if y.grad_fn is not None:
            y.grad_fn.register_hook(self._keep_gradients)
        return y, state

    def _keep_gradients(self, grads: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
        self.grads = tuple(grads[:len(self.inputs)])
        self.grad_y = upstream[0]

    def errors(self) -> dict[str, dict[str, float]]:
        """Returns the err_ratio and the largest absolute error of y and, if recorded, of each input's gradient."""
        operator_class: Any = type(self.operator)
        reference = operator_class("reference")
        leaves = {name: tensor.double().requires_grad_() for name, tensor in self.inputs.items()}
        with torch.enable_grad(), torch.autocast(self.y.device.type, enabled=False):
            y, _ = reference(**leaves, state=_double(self.state))
        names = ["y"]
        expected = [y.detach()]
        if self.grads:
            names += [f"grad {name}" for name in leaves]
            expected += torch.autograd.grad(y, list(leaves.values()), self.grad_y.double())
        return {name: {"err_ratio": err_ratio(actual, exact), "max": float((actual - exact).abs().max())}
                for name, actual, exact in zip(names, (self.y, *self.grads), expected, strict=True)}

    def ranges(self) -> dict[str, list[float]]:
        return {name: [float(tensor.min()), float(tensor.max())] for name, tensor in self.inputs.items()}


def _double(state: LayerState | None) -> LayerState | None:
    if state is None or isinstance(state, Tensor):
        return state if state is None else state.detach().double()
    named_tuple: Callable[..., LayerState] = type(state)         # a state is a tensor or a named tuple of tensors
    return named_tuple(*(part.detach().double() for part in state))


class WrappedOperators:
    """Replaces each layer's operator by wrap(operator, layer) until `restore` is called."""

    def __init__(self, pl_module: lightning.LightningModule, wrap: Callable[[Call, int], Call]) -> None:
        self._mixers = _time_mixers(pl_module)
        self._operators = [mixer.wkv for mixer in self._mixers]
        for layer, mixer in enumerate(self._mixers):
            mixer.wkv = wrap(mixer.wkv, layer)

    def restore(self) -> None:
        for mixer, operator in zip(self._mixers, self._operators, strict=True):
            mixer.wkv = operator


class Probe(Callback):
    """A callback that writes out_dir/kernel.json in rank 0 when training starts, and again when training ends or fails.

    Args:
        exclude: called with the seconds of the error measurement at the start.
        kernel_error: the message that kernel_check.check returned.
    """

    def __init__(self, out_dir: Path, options: TrainerConfig, exclude: Callable[[float], None],
                 kernel_error: str | None) -> None:
        self.path = out_dir / KERNEL
        self.options = options
        self.measured: JsonObject = {}           # the content of kernel.json
        self._exclude = exclude
        self._kernel_error = kernel_error
        self._disabled = _why_disabled(options)  # the reason why the probe is off, or None if the probe is on
        self._first_step = 0             # the step at which this process started or resumed the run
        self._max_steps = 0
        self._samples: list[Sample] = []
        self._sample: Sample | None = None       # the sample of the current step, if this step is timed
        self._wrapped_operators: WrappedOperators | None = None
        self._batch: TrainingBatch | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._first_step = trainer.global_step
        self._max_steps = trainer.max_steps
        earlier = read_measured(self.path, []) if self._first_step else {}
        self.measured = {
            "kernel": _time_mixers(pl_module)[0].wkv.name, "device": pl_module.device.type, "precision": self.options.precision,
            "machine": describe(pl_module.device.type), "wrong": earlier.get("wrong", self._kernel_error),
            "probe": self._disabled or "on", "warm_up": self._warm_up(),
            "steps": [row for row in earlier.get("steps", []) if row["step"] < self._first_step],
            "errors": {when: errors for when, errors in earlier.get("errors", {}).items() if when == "start"},
            "finished": False}
        self._write()

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: TrainingBatch,
                             batch_idx: int) -> None:
        if rank() > 0 or self._disabled:
            return
        self._batch = batch
        step = trainer.global_step
        if step == min(START, self._max_steps - 1) and "start" not in self.measured["errors"]:
            start = time.perf_counter()
            self.measured["errors"]["start"] = measure_errors(trainer, pl_module, batch)
            self._warn(self.measured["errors"]["start"])
            self._write()
            self._exclude(time.perf_counter() - start)
        timed = step - self._first_step - self._warm_up()
        is_sampled = timed >= 0 and timed % max(1, self._max_steps // SAMPLES) == 0
        if batch_idx % self.options.accumulate == 0 and is_sampled:
            self._sample = Sample(step, pl_module.device.type)
            sample = self._sample
            self._wrapped_operators = WrappedOperators(pl_module, lambda operator, layer: partial(sample.time_call, operator))

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: STEP_OUTPUT,
                           batch: object, batch_idx: int) -> None:
        if self._sample is not None and (batch_idx + 1) % self.options.accumulate == 0:
            self._sample.end()
            self._samples.append(self._sample)
            self._unwrap()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.measured["finished"] = trainer.global_step >= self._max_steps
        if self._batch is not None:
            self.measured["errors"]["end"] = measure_errors(trainer, pl_module, self._batch)
            self._warn(self.measured["errors"]["end"])

    def on_exception(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException) -> None:
        with suppress(OSError):          # the disk may be full, or the directory deleted: `exception` already says so
            self._finish()               # Lightning does not call teardown in this case

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self._finish()

    def _warn(self, measured: JsonObject) -> None:
        largest: dict[str, float] = {}
        for layer in measured["layers"]:
            for name, error in layer["errors"].items():
                largest[name] = max(largest.get(name, 0.0), error["err_ratio"])
        where = f"on the run's data at step {measured['step']}"
        message = mismatch_message(self.measured["kernel"], misses(largest, measured["allowed"]), where)
        if message:
            tqdm.write(labelled_line("WARNING", message, sys.stderr), file=sys.stderr)

    def _finish(self) -> None:
        if self.measured:
            self._unwrap()
            self.measured["steps"] += [sample.as_row() for sample in self._samples]
            self._samples = []
            self._batch = None
            self._write()

    def _unwrap(self) -> None:
        if self._wrapped_operators is not None:
            self._wrapped_operators.restore()
        self._wrapped_operators = None
        self._sample = None

    def _warm_up(self) -> int:
        return min(WARM_UP, self._max_steps // 5)

    def _write(self) -> None:
        if rank() == 0:
            require_folder(self.path.parent)
            write_file(self.path, lambda file: file.write(json.dumps(self.measured).encode()))


def measure_errors(trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: TrainingBatch) -> JsonObject:
    """Measures, in a pass over half of the batch, each layer's operator: its errors and the ranges of its inputs."""
    task = cast(LanguageModel, pl_module)
    records = [Record(mixer.wkv) for mixer in _time_mixers(task)]
    wrapped = WrappedOperators(task, lambda operator, layer: records[layer])
    gpus = [task.device] if task.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):
            with torch.enable_grad(), trainer.precision_plugin.train_step_context():
                loss = task.loss(*_first_half(batch))
            torch.autograd.grad(loss, [weight for weight in task.parameters() if weight.requires_grad], allow_unused=True)
    finally:
        wrapped.restore()
    dtype = records[0].y.dtype
    return {"step": trainer.global_step, "dtype": str(dtype).removeprefix("torch."),
            "allowed": tolerance(task.model.operator, dtype),
            "layers": [{"errors": record.errors(), "ranges": record.ranges()} for record in records]}


def _first_half(batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    # A batch of segments (B,K,T) contributes only the first segment of each row
    x, y = (batch.x[:, 0], batch.y[:, 0]) if isinstance(batch, Segments) else batch[:2]
    rows = max(1, len(x) // 2)
    return x[:rows], y[:rows]


def _time_mixers(pl_module: lightning.LightningModule) -> list[Any]:
    return [block.att for block in cast(LanguageModel, pl_module).model.blocks]


def _why_disabled(options: TrainerConfig) -> str | None:
    if not options.probe:
        return "off"
    if options.compile:
        return "trainer.compile=true compiles the blocks, so the operator in them cannot be measured"
    return "trainer=fsdp shards the weights over processes" if options.strategy == "fsdp" else None
