"""Reads and writes tuned states: each layer's initial state S, trained by tune=state or another program.

    torch.save     blocks.i.att.time_state (H,N,N), value by key: from official trainers, RWKV-PEFT, RWKV-Runner, tune=state
    .st, .state    the same names, key by value: for web-rwkv and ai00, whose converter transposes the states

Such a file states neither its layout nor the weights that it was trained on. The layout is inferred from the file format. If
the file also contains weights, the layout is inferred from their low-rank matrices, which the same converter transposes. A
.safetensors with only states may have either layout.

Sources: RWKV-PEFT, rwkvt/rwkv7/att.py; RWKV-Runner, backend-python/utils/rwkv.py (load_rwkv_state); web-rwkv,
assets/scripts/convert_safetensors.py and src/runtime/v7.rs (read_state).
"""

import hashlib
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import safetensors
import torch

from rwkv.checkpoint import formats
from rwkv.checkpoint.formats import _torch_file
from rwkv.checkpoint.formats.safetensors import write_tensors
from rwkv.checkpoint.generations import require_dtype, tuned_kind
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import STATE_LAYOUTS, ModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.io.atomic import write_file
from rwkv.model.base import TIME_STATE, generation, names_with_learnt_state, without_wrappers
from rwkv.model.state import State

OFFICIAL, TRANSPOSED = STATE_LAYOUTS
AXES = {OFFICIAL: "value by key", TRANSPOSED: "key by value"}
WEB_RWKV = (".st", ".state")             # web-rwkv's files have these suffixes


@dataclass(frozen=True)
class TimeStates:
    """A tuned state from a file.

    Attributes:
        layers: each layer's state (H,N,N), value by key.
        layout: the layout in the file.
        why: how the layout was inferred.
    """

    path: Path
    layers: list[Stored]
    layout: str
    why: str

    @property
    def line(self) -> str:
        """Returns the line about the tuned state in a program's plan."""
        return f"tuned state in {self.path}, read as {self.layout} ({AXES[self.layout]}): {self.why}"

    def state(self, config: ModelConfig) -> State:
        """Returns the state before the first token, for a batch of one. Raises CheckpointError if a value is not finite."""
        wkv = torch.stack([layer.get(copy=True) for layer in self.layers])
        return generation(config).empty_state(config, 1).with_wkv(wkv.unsqueeze(1))

    def digest(self) -> str:
        """Returns a hash of the values, which does not depend on the file's layout and dtype."""
        hashed = hashlib.sha256()
        for layer in self.layers:
            hashed.update(layer.get().numpy().tobytes())
        return hashed.hexdigest()


def layer_names(names: Collection[str]) -> dict[str, str]:
    """Maps each name that ends in att.time_state to blocks.i.att.time_state, without prefixes and wrappers."""
    parts = {name: without_wrappers(name).split(".") for name in names}
    return {name: ".".join(split[-4:]) for name, split in parts.items() if ".".join(split[-2:]) == TIME_STATE}


def is_file(path: Path) -> bool:
    """Returns True if the file contains only states. Raises CheckpointError if it cannot be read.

    A file of torch.save that names no state is not read further, because reading verifies the checksums of all its weights.
    """
    if formats.first_bytes(path, 2) == _torch_file.ZIP and not _names_a_state(path):
        return False
    content = formats.recognise(path).read(path)
    return content.entry is None and bool(content.tensors) and len(layer_names(content.tensors)) == len(content.tensors)


def _names_a_state(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    except Exception:                    # zipfile raises many error classes; reading will report the damage
        return False
    return any(TIME_STATE.encode() in pickled for pickled in pickles)


def is_content(content: bytes) -> bool:
    """Returns True if these bytes are a file of torch.save, or a .safetensors with only states."""
    if content[:2] in (_torch_file.ZIP, *_torch_file.PICKLES):
        return True
    try:
        names = [name for name, _ in safetensors.deserialize(content)]
    except Exception:                    # the library raises exceptions of many classes
        return False
    return bool(names) and len(layer_names(names)) == len(names)


def pop_states(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Removes the tuned states from a checkpoint's tensors, and returns them by official name."""
    return {name: tensors.pop(name) for name, official in layer_names(tensors).items() if name == official}


def states_by_name(layers: Sequence[Stored], dtype: torch.dtype = torch.float32) -> dict[str, Stored]:
    """Returns the layers' states by official name."""
    names = [f"blocks.{layer}.{TIME_STATE}" for layer in range(len(layers))]
    return {name: tensor.rename(name).cast(dtype) for name, tensor in zip(names, layers, strict=True)}


def read(path: Path, config: ModelConfig | None, layout: str | None = None) -> TimeStates:
    """Reads a tuned state.

    Raises CheckpointError for a different kind of file or a state of a different model, UserError if the layout is unknown.

    Args:
        config: the model's configuration; None accepts any model.
        layout: the layout in the file; None infers it from the file format.
    """
    content = formats.recognise(path).read(path)
    names = layer_names(content.tensors)
    if content.entry is not None and names:
        raise CheckpointError(f"{path} is the checkpoint of a training run, not a tuned state: pass this file as checkpoint=, "
                              "or pass the run's time_state.pth as the tuned state")
    others = [name for name in content.tensors if name not in names]
    if not names or others:
        raise CheckpointError(f"{path} is not a tuned state. A tuned state contains only blocks.i.{TIME_STATE}, but "
                              f"{_describe_other_content(content.tensors, others)}")
    if len({*names.values()}) < len(names):
        raise CheckpointError(f"{path} contains several states ({', '.join([*names][:3])}, ...): save each state in its own "
                              "file")
    if layout is None:
        layout, why = _infer_layout(path)
    else:
        why = f"state_layout={layout}"
    return TimeStates(path, fit_states(path, {names[name]: tensor for name, tensor in content.tensors.items()}, config, layout),
                      layout, why)


def read_content(content: bytes, config: ModelConfig, layout: str | None = None) -> TimeStates:
    """Reads a tuned state from a file's content instead of a path. The values are copies.

    Raises the errors of read(), whose messages call the content "the file".
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        try:
            states = read(path, config, layout)
            values = [layer.get(copy=True) for layer in states.layers]
        except UserError as error:
            raise UserError(str(error).replace(str(path), "the file")) from None
    layers = [Stored.of(layer.name, "the file", value) for layer, value in zip(states.layers, values, strict=True)]
    return replace(states, path=Path("the file"), layers=layers)


def write(states: TimeStates, path: Path) -> str:
    """Writes a file with only states, and returns the layout that its suffix implies. Raises UserError for unknown suffixes."""
    if path.suffix == ".st":
        tensors = {name: tensor.transpose() for name, tensor in states_by_name(states.layers, torch.float16).items()}
        write_file(path, lambda file: write_tensors(file, tensors.values(), {}))
        return TRANSPOSED
    if path.suffix != ".pth":
        raise UserError(f"the name of a tuned-state file must end in .pth, or in .st for web-rwkv; got {path.name}")
    write_file(path, lambda file: _torch_file.save(file, states_by_name(states.layers)))
    return OFFICIAL


def fit_states(path: Path, tensors: Mapping[str, Stored], config: ModelConfig | None, layout: str = OFFICIAL) -> list[Stored]:
    """Returns the layers' states, value by key in float32. `tensors` has the names that layer_names returns.

    Raises CheckpointError if the states do not match a model with these sizes, or have an unsupported dtype.
    """
    for tensor in tensors.values():
        require_dtype(path, tensor)
    shapes = {name: _without_row(tensor.shape) for name, tensor in tensors.items()}
    L, shape = (len(shapes), next(iter(shapes.values()))) if config is None else _layer_count_and_state_shape(path, config)
    expected = [f"blocks.{layer}.{TIME_STATE}" for layer in range(L)]
    if sorted(tensors) != sorted(expected) or set(shapes.values()) != {shape} or not _is_state(shape):
        model = f"the model has {L} layers of {shape[0]} heads of size {shape[1]}: the state belongs to a different model"
        raise CheckpointError(f"{path} contains a state with {_describe_sizes(shapes)}, but "
                              + (model if config else "all heads of a model must have the same size"))
    stored = [tensors[name].view(shapes[name]) for name in expected]
    stored = [tensor.transpose() for tensor in stored] if layout == TRANSPOSED else stored
    return [tensor.cast(torch.float32) for tensor in stored]


def _layer_count_and_state_shape(path: Path, config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    module = generation(config)
    if not module.LEARNS_STATE:
        raise CheckpointError(f"{path} contains a tuned state, which requires {names_with_learnt_state()}, but the model is "
                              f"{module.NAME}")
    config = module.with_default_widths(config)
    return config.n_layer, tuple(module.empty_state(config, 1, "meta").named()["wkv"].shape[2:])


def _infer_layout(path: Path) -> tuple[str, str]:
    """Infers the layout from the file format, and also returns the reason. Raises UserError if both layouts are possible."""
    if _torch_file.recognises(path):
        return OFFICIAL, "trainers write this layout with torch.save"
    if path.suffix in WEB_RWKV:
        return TRANSPOSED, f"web-rwkv's converter transposes the states in {path.suffix} files"
    raise UserError(f"cannot infer the layout of {path}: pass state_layout={OFFICIAL} ({AXES[OFFICIAL]}, as trainers do) or "
                    f"state_layout={TRANSPOSED} ({AXES[TRANSPOSED]}, as in web-rwkv's .st)")


def _describe_other_content(names: Collection[str], others: list[str]) -> str:
    if "emb.weight" in names or any(name.endswith(".emb.weight") for name in names):
        return "the file contains weights: pass them as checkpoint="
    if kind := tuned_kind(names):
        return f"the file is {kind}"
    if not others:
        return "the file contains no tensors"
    return f"the file contains {others[0]}" + (f" and {len(others) - 1} more" if others[1:] else "")


def _without_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if len(shape) == 4 and shape[0] == 1 else shape


def _is_state(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] == shape[2]


def _describe_sizes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    name, shape = next(iter(shapes.items()))
    odd = next((name for name in shapes if shapes[name] != shape), None)
    if not _is_state(shape):
        return f"an unexpected shape ({name} is {list(shape)})"
    if odd is not None:
        return f"several shapes ({name} is {list(shape)}, {odd} {list(shapes[odd])})"
    layers = {int(name.split(".")[1]) for name in shapes if name.split(".")[1].isdecimal()}
    missing = sorted({*range(max(layers, default=0))} - layers)
    lacks = f" (it lacks layer {missing[0]})" if missing else ""
    return f"{len(shapes)} layers{lacks} of {shape[0]} heads of size {shape[1]}"
