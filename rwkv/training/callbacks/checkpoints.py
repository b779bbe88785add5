"""Saves a run's checkpoints, from which the run resumes bit-exactly.

    checkpoints/last.ckpt      every trainer.checkpoint_every steps, after the last step, and when training is interrupted
    checkpoints/last-1.ckpt    the checkpoint before last.ckpt, and so on: trainer.keep_last files in all
    checkpoints/best.ckpt      the checkpoint with the lowest val/loss

Each file is written atomically, then read back and verified. With trainer=fsdp each checkpoint is a folder, which is written
while training continues (rwkv/training/sharding/saving.py).

Lightning saves the weights, the optimiser, the schedule, the gradient scaler and the data position. This module adds the states
of all random number generators. Callback hooks save all checkpoints during fit, because the loaders forget the data position
after fit.
"""

import itertools
import math
import random
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.types import STEP_OUTPUT

from rwkv.checkpoint.files import Checkpoint, read_checkpoint
from rwkv.checkpoint.formats import _fsdp_folder, _torch_file
from rwkv.checkpoint.location import FOLDER, LAST, is_checkpoint, is_sharded
from rwkv.data.loaders import worker_error
from rwkv.distributed import all_gather, rank
from rwkv.errors import CheckpointError, UnreadableError, UserError, memory_message
from rwkv.io.atomic import old_path_during_replace, remove, replace_folder, require_folder, write_file
from rwkv.io.json_types import StateDict
from rwkv.training.callbacks.divergence import Divergence
from rwkv.training.sharding.saving import write_error
from rwkv.training.sharding.strategy import ShardedStrategy

BEST = Path(FOLDER) / "best.ckpt"
NEXT = "next.ckpt"
DAMAGED = "damaged.ckpt"
TRAINING = "epoch_loop.batch_progress"                   # these are keys in the state of Lightning's fit loop
VALIDATION = "epoch_loop.val_loop.batch_progress"


class VerifiedFiles(TorchCheckpointIO):
    """Lightning's checkpoint I/O that writes files atomically and verifies them."""

    def save_checkpoint(self, checkpoint: StateDict, path: str | Path, storage_options: object = None) -> None:
        """Writes a checkpoint. Raises UserError if the disk is full or the written file cannot be read back."""
        target = Path(path)
        is_folder = target.is_dir()      # the run was started with trainer=fsdp and left a folder of this name
        try:
            if is_folder:
                target.rename(old_path_during_replace(target))
            write_file(target, lambda file: _write_and_verify(checkpoint, file))
            if is_folder:
                remove(old_path_during_replace(target))
        except (OSError, RuntimeError, CheckpointError) as error:        # torch turns a full disk into a RuntimeError
            if memory_message(error):
                raise
            raise worker_error(error) or write_error(target, error) from None

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> StateDict:
        """Reads a checkpoint. Raises UserError if it contains only weights."""
        if Path(path).is_dir():
            return _fsdp_folder.read_whole(Path(path))
        loaded: StateDict = super().load_checkpoint(path, *arguments, **options)
        if "optimizer_states" not in loaded:
            raise UserError(f"{path} contains only weights, as timemix convert writes them, but a run also resumes from the "
                            f"state of its optimiser. To start a new run with these weights, use init_from={path}")
        return loaded


@dataclass(eq=False)
class Checkpoints(Callback):
    """A callback that saves the last and the best checkpoints.

    If a step ends with a validation, the step's checkpoint is saved after the validation.

    Args:
        every: the number of steps between checkpoints.
        val_every: the number of steps between validations.
        keep: the number of last checkpoints to keep.
    """

    out_dir: Path
    every: int
    val_every: int
    keep: int
    divergence: Divergence
    best: float = math.inf
    _validating: bool = False
    _saved: tuple[int, bool] = (0, True)         # the step of last.ckpt, and whether that step's validation had ended

    def state_dict(self) -> StateDict:
        return {"best": self.best}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self.best = state_dict["best"]

    def setup(self, trainer: lightning.Trainer, *_: object, **__: object) -> None:
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.after_save = partial(rotate_checkpoints, self.out_dir, self.keep)

    def on_train_start(self, trainer: lightning.Trainer, *_: object) -> None:
        self._saved = (trainer.global_step, False)       # this step is saved again only if its validation is repeated

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: STEP_OUTPUT,
                           batch: object, batch_idx: int) -> None:
        step = trainer.global_step
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if step >= trainer.max_steps:
            trainer.should_stop = True   # makes Lightning validate now, even if val_every does not divide the step
        elif step % self.every == 0 and not self.validation_follows(trainer):
            self.save_last(trainer)

    def on_train_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.finish(trainer)

    def on_validation_start(self, *_: object) -> None:
        self._validating = True

    def on_validation_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self._validating = False
        step = trainer.global_step
        loss = float(trainer.callback_metrics["val/loss"])
        self.divergence.require_finite(trainer, loss)
        if loss < self.best:
            self.best = loss
            self._save(trainer, BEST)
        if step % self.every == 0 or step >= trainer.max_steps:
            self.save_last(trainer)

    def on_save_checkpoint(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule,
                           checkpoint: StateDict) -> None:
        """Makes an unfinished validation restart from its first batch. Lightning would continue in the middle."""
        started = int(self._validating)
        progress = {"ready": started, "started": started, "processed": 0, "completed": 0}
        checkpoint["loops"]["fit_loop"][VALIDATION] = {"total": progress, "current": dict(progress), "is_last_batch": False}

    def on_load_checkpoint(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule,
                           checkpoint: StateDict) -> None:
        """Recomputes whether Lightning's only epoch ended with the last batch, because the run's length may have changed.

        With the saved value, Lightning would begin a finished run that the user extends with a second epoch of the data.
        """
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        if isinstance(trainer.limit_train_batches, int):         # trainer.overfit_batches sets this
            batches = min(batches, trainer.limit_train_batches)
        progress = checkpoint["loops"]["fit_loop"][TRAINING]
        progress["is_last_batch"] = progress["current"]["ready"] >= batches

    def validation_follows(self, trainer: lightning.Trainer) -> bool:
        return trainer.global_step % self.val_every == 0 or trainer.global_step >= trainer.max_steps

    def save_last(self, trainer: lightning.Trainer) -> None:
        """Saves last.ckpt unless the file is up to date.

        If last.ckpt is of the same step, but from before the end of the validation, this method replaces the file. In all other
        cases the new checkpoint is written as next.ckpt, and `rotate_checkpoints` renames all checkpoints. If the run is killed
        before the renaming, the resumed run calls `rotate_checkpoints`.
        """
        current = (trainer.global_step, not self._validating)
        if current == self._saved:
            return
        self.divergence.require_finite(trainer)
        same_step = trainer.global_step == self._saved[0]
        self._save(trainer, LAST if same_step else LAST.with_name(NEXT))
        self._saved = current
        if rank() == 0 and not isinstance(trainer.strategy, ShardedStrategy):
            rotate_checkpoints(self.out_dir, self.keep)

    def _save(self, trainer: lightning.Trainer, path: Path) -> None:
        if rank() == 0:
            require_folder(self.out_dir)
        trainer.save_checkpoint(self.out_dir / path)

    def finish(self, trainer: lightning.Trainer) -> None:
        """Waits until the current checkpoint has been written. Raises UserError if writing fails."""
        if isinstance(trainer.strategy, ShardedStrategy):
            trainer.strategy.finish()


class RandomState(Callback):
    """A callback that saves and restores each process's random number generators of torch, Python and NumPy.

    A process other than rank 0 is seeded anew in a new run, and when it joins a resumed run, so that dropout masks differ
    between processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._loaded: list[StateDict] = []

    def state_dict(self) -> StateDict:
        return {"ranks": all_gather(_random_state())}

    def load_state_dict(self, state_dict: StateDict) -> None:
        self._loaded = state_dict["ranks"]

    def on_train_start(self, trainer: lightning.Trainer, *_: object) -> None:
        if rank() < len(self._loaded):   # this hook comes after the setup, which draws random numbers
            _set_random_state(self._loaded[rank()])
        elif rank():
            _seed(int(np.random.SeedSequence((self.seed, rank(), trainer.global_step)).generate_state(1)[0]))


def rotate_checkpoints(out_dir: Path, keep: int | None = None) -> None:
    """Renames next.ckpt to last.ckpt, last.ckpt to last-1.ckpt and so on, and removes the remains of interrupted writes.

    `keep` is the number of last checkpoints to keep. None keeps all of them.
    """
    folder = out_dir / FOLDER
    for temporary in sorted(folder.glob(".*.ckpt.*"), key=lambda path: path.suffix == ".old"):
        _recover(temporary, folder / temporary.stem[1:])
    if is_checkpoint(folder / NEXT):
        _shift(folder)
        (folder / NEXT).replace(folder / LAST.name)
    for age, path in _by_age(out_dir).items():
        if keep is not None and age >= keep:
            remove(path)


def _recover(temporary: Path, path: Path) -> None:
    """Finishes replacing `path` if the program was killed after completing the new checkpoint, or else removes the remains."""
    if temporary.suffix == ".old" and is_checkpoint(temporary) and not is_checkpoint(path):
        temporary.rename(path)
    elif is_sharded(temporary) and temporary.suffix[1:].isdigit():
        replace_folder(temporary, path)
    else:
        remove(temporary)


def newest_sound_checkpoint(out_dir: Path) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint, or None without checkpoints.

    A newer, damaged checkpoint is renamed to damaged.ckpt, with a warning. If the run ended between its first validation and
    its first last.ckpt, best.ckpt is the only checkpoint and is returned.

    Raises UserError if all checkpoints are damaged. The damaged files keep their names then, so that the next call raises the
    same error. Raises UnreadableError if a checkpoint cannot be read for another reason.
    """
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in _by_age(out_dir).values():
        try:
            checkpoint = read_checkpoint(path)
        except UnreadableError:
            raise
        except CheckpointError as error:
            damaged.append((path, error))
        else:
            for bad_path, problem in damaged:
                remove(bad_path.with_name(DAMAGED))
                bad_path.replace(bad_path.with_name(DAMAGED))
                print(f"{bad_path} is damaged ({problem}) and was renamed to {DAMAGED}. The run continues from an earlier "
                      "checkpoint", file=sys.stderr)
            return checkpoint
    if damaged or (out_dir / FOLDER / DAMAGED).exists():
        raise UserError(f"every checkpoint in {out_dir / FOLDER} is damaged, so the run cannot be resumed. Start a new run: "
                        f"init_from={out_dir / BEST} begins with the best weights, if this file is intact")
    return read_checkpoint(out_dir / BEST) if is_checkpoint(out_dir / BEST) else None


def _shift(folder: Path) -> None:
    free = next(age for age in itertools.count() if not (folder / _name(age)).exists())
    for age in range(free, 0, -1):
        (folder / _name(age - 1)).replace(folder / _name(age))


def _by_age(out_dir: Path) -> dict[int, Path]:
    """Returns the paths of the last checkpoints by age. last.ckpt has age 0, last-1.ckpt has age 1, and so on."""
    paths = {}
    for path in (out_dir / FOLDER).glob("last*.ckpt"):
        name = re.fullmatch(r"last(?:-(\d+))?\.ckpt", path.name)
        if name:
            paths[int(name[1] or 0)] = path
    return dict(sorted(paths.items()))


def _name(age: int) -> str:
    return f"last-{age}.ckpt" if age else LAST.name


def _write_and_verify(checkpoint: StateDict, file: BinaryIO) -> None:
    torch.save(checkpoint, file)
    file.flush()
    _torch_file.load(Path(file.name))    # raises CheckpointError if a checksum differs or loading would execute code


def _random_state() -> StateDict:
    kind, keys, *rest = np.random.get_state(legacy=True)         # torch loads plain containers with weights_only=True
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, np.asarray(keys).tolist(), *rest)}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _seed(seed: int) -> None:
    torch.manual_seed(seed)              # seeds GPUs too
    random.seed(seed)
    np.random.seed(seed)


def _set_random_state(state: StateDict) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
