"""A run's checkpoints, from which it continues to the bit: each written whole or not at all, then read back and verified.

    checkpoints/last.ckpt      every trainer.checkpoint_every steps, after the last step, and where training is interrupted
    checkpoints/last-1.ckpt    the one before it, and so on: trainer.keep_last of them in all
    checkpoints/best.ckpt      that of the lowest val/loss

Beside what Lightning saves (weights, optimiser, schedule, gradient scaler, the place in the data) each holds the state of
every generator of random numbers. They are saved in hooks of fit alone: after it, the loaders have forgotten where they are.
"""

import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rwkv.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from rwkv.divergence import Divergence
from rwkv.formats import _torch_file
from rwkv.formats._atomic import write_file
from rwkv.processes import gathered, rank

FOLDER = "checkpoints"
LAST, BEST = Path(FOLDER) / "last.ckpt", Path(FOLDER) / "best.ckpt"
NEXT, DAMAGED = "next.ckpt", "damaged.ckpt"
VALIDATION = "epoch_loop.val_loop.batch_progress"        # its key in the state of Lightning's fit loop


class VerifiedFiles(TorchCheckpointIO):
    """How Lightning reads and writes checkpoints here."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Raises ValueError, one sentence, where the disk is full or what was written cannot be read back."""
        path = Path(path)
        try:
            write_file(path, lambda file: _write_and_verify(checkpoint, file))
        except (OSError, RuntimeError, CheckpointError) as error:        # torch turns a full disk into a RuntimeError
            reason = getattr(_cause(error), "strerror", None) or str(error).splitlines()[0]
            raise ValueError(f"cannot write the checkpoint {path.parent / LAST.name}: {reason}; the ones before it are intact: "
                             f"make room, and continue with resume=auto out_dir={path.parent.parent}") from None


class Checkpoints(Callback):
    """Saves the last and the best ones; validation is part of a step: of one with validation, what is saved is after it."""

    def __init__(self, out_dir: Path, every: int, val_every: int, keep: int, divergence: Divergence) -> None:
        self.out_dir, self.every, self.val_every, self.keep = out_dir, every, val_every, keep
        self.divergence = divergence
        self.best, self._stepped, self._validating = math.inf, 0, False
        self._saved = (0, True)          # the step of last.ckpt, and whether it is after that step's validation

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._stepped = trainer.global_step
        self._saved = (trainer.global_step, False)       # one from after the validation is saved again only if that is repeated

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step == self._stepped:        # in the middle of an accumulation
            return
        self._stepped = step
        if step >= trainer.max_steps:
            trainer.should_stop = True   # for Lightning: validate now, whatever val_every is
        elif step % self.every == 0 and not self.validation_follows(trainer):
            self.save_last(trainer)

    def on_validation_start(self, *_: Any) -> None:
        self._validating = True

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._validating, step = False, trainer.global_step
        loss = float(trainer.callback_metrics["val/loss"])
        self.divergence.require_finite(trainer, loss)
        if loss < self.best:
            self.best = loss
            trainer.save_checkpoint(self.out_dir / BEST)
        if step % self.every == 0 or step >= trainer.max_steps:
            self.save_last(trainer)

    def on_save_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Says to Lightning whether validation is to begin anew. Its own count, of batches, would go on in the middle."""
        begun = {"ready": int(self._validating), "started": int(self._validating), "processed": 0, "completed": 0}
        checkpoint["loops"]["fit_loop"][VALIDATION] = {"total": begun, "current": dict(begun), "is_last_batch": False}

    def validation_follows(self, trainer: lightning.Trainer) -> bool:
        return trainer.global_step % self.val_every == 0 or trainer.global_step >= trainer.max_steps

    def save_last(self, trainer: lightning.Trainer) -> None:
        """In the place of one of the same step, from before its validation ended.

        Else the others move one place on once it is written; a kill in between leaves it under another name, for settle.
        """
        before, now = self._saved, (trainer.global_step, not self._validating)
        if now == before:
            return
        self.divergence.require_finite(trainer)
        trainer.save_checkpoint(self.out_dir / FOLDER / (LAST.name if now[0] == before[0] else NEXT))
        self._saved = now
        if rank() == 0:
            settle(self.out_dir, self.keep)


class RandomState(Callback):
    """torch's, Python's and NumPy's, of each process: what training draws after a resume is what it would have drawn."""

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": gathered(_random_state())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict["ranks"]

    def on_train_start(self, *_: Any) -> None:
        if self._loaded:                 # all else is set up by now
            _set_random_state(self._loaded[rank() % len(self._loaded)])


def settle(out_dir: Path, keep: int | None = None) -> None:
    """Gives a checkpoint that was written its name, and removes what writing left behind when it was killed.

    keep: the number of checkpoints that stay; None for all.
    """
    folder = out_dir / FOLDER
    if (folder / NEXT).is_file():
        _make_place(folder)
        (folder / NEXT).replace(folder / LAST.name)
    for path in _newest_first(out_dir):
        if keep is not None and keep <= _age(path.name) < sys.maxsize:
            path.unlink()
    for unfinished in folder.glob(".*.ckpt.*"):
        unfinished.unlink(missing_ok=True)


def newest_sound(out_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged; None where there are none. Those after it are said and set aside.

    Raises ValueError where there are some and all are damaged: they keep their names, so that the next call does so too.
    """
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in _newest_first(out_dir):
        try:
            sound = read_checkpoint(path)
        except CheckpointError as error:
            damaged.append((path, error))
        else:
            _set_aside(damaged)
            return sound
    if damaged or (out_dir / FOLDER / DAMAGED).is_file():
        raise ValueError(f"every checkpoint in {out_dir / FOLDER} is damaged: the run cannot be continued; begin a new one, "
                         f"with init_from={out_dir / BEST} where that one is sound")
    return None


def _set_aside(damaged: list[tuple[Path, CheckpointError]]) -> None:
    for path, error in damaged:
        path.replace(path.with_name(DAMAGED))
        print(f"{path} is damaged and now called {DAMAGED}; continuing from the one before it ({error})", file=sys.stderr)


def _make_place(folder: Path) -> None:
    """For a newest one: the others move one place on, up to the first that is free, and none is lost."""
    free = next(age for age in itertools.count() if not (folder / _name(age)).is_file())
    for age in range(free, 0, -1):
        (folder / _name(age - 1)).replace(folder / _name(age))


def _newest_first(out_dir: Path) -> list[Path]:
    names = [LAST.name, *sorted((path.name for path in (out_dir / FOLDER).glob("last-*.ckpt")), key=_age)]
    return [out_dir / FOLDER / name for name in names if (out_dir / FOLDER / name).is_file()]


def _name(age: int) -> str:
    return f"last-{age}.ckpt" if age else LAST.name


def _age(name: str) -> int:
    """How many checkpoints are newer; sys.maxsize for a name that training does not give."""
    if name == LAST.name:
        return 0
    number = name.removeprefix("last-").removesuffix(".ckpt")
    return int(number) if number.isdigit() else sys.maxsize


def _write_and_verify(checkpoint: dict[str, Any], file: Any) -> None:
    """The checksums of all entries, and that it can be loaded with no code executed."""
    torch.save(checkpoint, file)
    file.flush()
    _torch_file.load(Path(file.name))


def _cause(error: BaseException) -> BaseException:
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _random_state() -> dict[str, Any]:
    """In plain containers."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, np.asarray(keys).tolist(), *rest)}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
