"""Reads adapters that other programs trained, and merges them into the base weights, in float32, whenever a weight is read.

    FILE.pth, .safetensors       RWKV-PEFT: LoRA as X.lora_A (r,in) and X.lora_B (out,r), without alpha; PiSSA if init_pissa.pth
                                 is in the same folder; MiSS, under its former names, as X.disha or X.bone. After web-rwkv's
                                 converter (.st, .lora): LoRA as X.lora.0 (in,r) and X.lora.1 (out,r)
    adapter_config.json, adapter_model.safetensors or .bin       a PEFT directory: LoRA (rank_pattern, alpha_pattern), rsLoRA,
                                 DoRA; PiSSA; MiSS

X is the path of a linear layer in any supported layout. Other tensors in RWKV-PEFT's files are fully trained weights, which
replace the model's. So do X.weight in a PEFT directory (modules_to_save), and X.base_layer.weight, which PEFT writes beside an
adapter of the head.

    LoRA    W + s B A                                    s = alpha / r; rsLoRA: alpha / sqrt(r); arXiv 2106.09685, 2312.03732
    DoRA    m (W + s B A) / |W + s B A|                  |.|: the norm of each row; arXiv 2402.09353
    PiSSA   W - W_r + s B A                              W_r: the part of W with the r largest singular values; in RWKV-PEFT the
                                                         initial B A, from init_pissa.pth, with s = 1; arXiv 2404.02948
    MiSS    W[o,c] + M[c mod r, o]                       arXiv 2409.15371; mini: M repeated along o; bat: W + W_k M_k + M_k for
                                                         blocks W_k (r,r); an M_k per row (PEFT) or column (RWKV-PEFT) of blocks

Sources: huggingface/peft 0.21, tuners/lora/layer.py, dora.py, tuners/miss/layer.py and utils/other.py (get_pattern_key);
JL-er/RWKV-PEFT, merge/merge.py, merge/merge_bone.py and rwkvt/peft/rwkvLinear.py; web-rwkv,
assets/scripts/convert_safetensors.py and src/runtime/loader.rs (lora_matrices).
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rwkv.checkpoint import formats
from rwkv.checkpoint.formats import _torch_file, pth, safetensors
from rwkv.checkpoint.generations import PARTITIONED, generation_of, require_dtype, squeeze
from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.checkpoint.location import ADAPTER as CONFIG
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.io import hub
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.model.base import TIME_STATE, without_wrappers

INIT_PISSA = "init_pissa.pth"
PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "miss_block", "bone_block",
         "disha", "bone")
RWKV_PEFT_PARTS = ("lora_A", "lora_B", "disha", "bone")
PART = re.compile(rf"(.+)\.({'|'.join(PARTS)})(?:\.default)?(?:\.weight)?")
WEB_RWKV_PART = re.compile(r"(.+)\.lora\.([01])")        # web-rwkv's converter renames lora_A, which it transposes, and lora_B
WHOLE = re.compile(r"(.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight")
PEFT_TYPES = ("LORA", "MISS", "BONE")
PLAIN = (True, False, "gaussian", "eva", "orthogonal", "mica")   # these values of init_lora_weights leave the base unchanged
REFUSED = {"trainable_token_indices": "trained rows of the embedding", "layer_replication": "repeated layers",
           "target_parameters": "adapters of tensors other than linear layers", "fan_in_fan_out": "transposed layers",
           "lora_bias": "biases", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA",
           "alora_invocation_tokens": "adapters activated by a token", "arrow_config": "Arrow", "kasa_config": "KaSA",
           "monteclora_config": "MonteCLoRA", "loftq_config": "LoftQ"}

Change = Callable[[Tensor], Tensor]      # maps a matrix (out,in), in float32 or wider, to the adapted matrix


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from a file.

    Attributes:
        about: the kind of adapter, for messages.
        changes: the change of each adapted matrix, by official name.
        tensors: the file's tensors, by the names that the file uses.
        whole: complete weights that replace the model's, before the changes.
    """

    path: Path
    about: str
    changes: Mapping[str, Change]
    tensors: Mapping[str, Stored]
    whole: Mapping[str, Stored] = field(default_factory=dict)


def is_directory(path: Path) -> bool:
    """Returns True if the path is a PEFT directory that contains only an adapter, not a whole model.

    Some trainers also write the base model's config.json into the directory, without the weights.
    """
    has_model = (path / hub.CONFIG).is_file() and any((path / name).is_file() for name in hub.MODEL_WEIGHTS)
    return (path / CONFIG).is_file() and not has_model


def has_adapter(tensors: Mapping[str, Stored]) -> bool:
    return any(PART.fullmatch(name) or WEB_RWKV_PART.fullmatch(name) for name in tensors)


def base_name(path: Path) -> str:
    """Returns the name of the base model that a PEFT directory states. Raises CheckpointError if it states none."""
    name = _config(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{path} is a LoRA adapter that does not name its base model: pass the base model as checkpoint= "
                              "and the adapter as lora=")
    return name


def read(path: Path, config: ModelConfig, weights: Mapping[str, Stored], alpha: float | None = None) -> Adapter:
    """Reads the adapter at `path`.

    Raises CheckpointError for an adapter of another model or of an unsupported kind, UserError if alpha is missing or given
    twice.

    Args:
        config: the base model's configuration.
        weights: the base model's weights.
        alpha: LoRA's alpha if the file lacks it.
    """
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise CheckpointError(f"{path} is not an adapter: expected a PEFT directory with {CONFIG}, or a file of RWKV-PEFT. "
                                  "Pass a model as checkpoint=")
        if alpha is not None:
            raise UserError(f"lora_alpha conflicts with {path / CONFIG}, which already sets alpha: omit lora_alpha")
        return _peft(path, config, weights)
    return _rwkv_peft(path, config, weights, alpha)


def _peft(path: Path, config: ModelConfig, weights: Mapping[str, Stored]) -> Adapter:
    config_json = _config(path)
    kind = config_json.get("peft_type")
    if kind is None:
        raise CheckpointError(f"{path / CONFIG} has no peft_type, so another program than PEFT wrote it, such as MLX: only "
                              "directories of PEFT are supported")
    if kind not in PEFT_TYPES:
        raise CheckpointError(f"{path} is a PEFT adapter of type {kind}, which is not supported: the type must be one of "
                              f"{', '.join(PEFT_TYPES)}")
    for key, feature in REFUSED.items():
        if config_json.get(key):
            raise CheckpointError(f"{path / CONFIG} sets {key} to {json.dumps(config_json[key])[:60]}: {feature} cannot be "
                                  "merged")
    if config_json.get("bias", "none") != "none":
        raise CheckpointError(f"{path / CONFIG} sets bias to {config_json['bias']!r}, but RWKV layers have no biases")
    file = next((path / name for name in hub.ADAPTER_WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{path} contains {CONFIG} but no weights: expected "
                              f"{' or '.join(hub.ADAPTER_WEIGHTS)} in the same folder")
    tensors = (pth if _torch_file.recognises(file) else safetensors).read(file).tensors
    if not tensors:
        raise CheckpointError(f"{file} contains no tensors: save the adapter again")
    modules, others = _by_module(file, tensors)
    steps: dict[str, list[Change]] = {}
    for name in others:
        match = WHOLE.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{file} contains {name}, which is not part of an adapter. Besides adapters, only whole "
                                  "linear layers and embeddings can be merged")
        steps[match[1]] = [partial(_read_like, part=tensors[name])]
    make = partial(_peft_lora, config_json) if kind == "LORA" else partial(_peft_miss, config_json)
    for module, parts in modules.items():
        steps.setdefault(module, []).append(make(path, module, parts))
    changes = dict(_official_change(path, module, config, weights, partial(_compose, changes_of_module))
                   for module, changes_of_module in steps.items())
    about = {"LORA": "DoRA" if config_json.get("use_dora") else "LoRA"}.get(str(kind), "MiSS")
    return Adapter(path, f"{about} of PEFT", changes, tensors)


def _rwkv_peft(path: Path, config: ModelConfig, weights: Mapping[str, Stored], alpha: float | None) -> Adapter:
    content = formats.recognise(path).read(path)
    tensors = content.tensors
    modules, others = _by_module(path, tensors)
    if not modules:
        is_state = bool(tensors) and all(name.endswith(TIME_STATE) for name in tensors)
        raise CheckpointError(f"{path} is not an adapter: no tensor name ends in .lora_A, .lora_B, .disha or .bone. Pass a "
                              f"{'tuned state as state=' if is_state else 'model as checkpoint='}")
    if content.entry is not None:
        raise CheckpointError(f"{path} is a training checkpoint, not an adapter: use checkpoint=RUN, or lora=RUN/adapter, "
                              "which the run writes when it finishes")
    if unknown := sorted({part for parts in modules.values() for part in parts} - {*RWKV_PEFT_PARTS}):
        raise CheckpointError(f"{path} contains {unknown[0]}, a weight of a PEFT adapter, but the folder lacks "
                              f"{CONFIG}, which states how to merge them: put this file into the same folder, and pass the "
                              "folder")
    initial = _read_initial_pissa(path.with_name(INIT_PISSA))
    is_lora = any("lora_A" in parts for parts in modules.values())
    if is_lora and not initial and alpha is None:
        raise UserError(f"{path} does not state LoRA's alpha: pass the value that the adapter was trained with, such as "
                        "lora_alpha=32, or --lora-alpha 32 to timemix convert. For a PiSSA adapter, put "
                        f"{INIT_PISSA} into the same folder")
    if alpha is not None and (initial or not is_lora):
        reason = f"PiSSA has no alpha, and the folder contains {INIT_PISSA}" if initial else "MiSS has no alpha"
        raise UserError(f"lora_alpha conflicts with {path}: {reason}. Omit lora_alpha")
    changes = {}
    for module, parts in modules.items():
        if is_lora:
            A, B = _factors(path, module, parts)
            change: Change = partial(lora, A=A, B=B, scale=1.0 if initial else (alpha or 0) / A.shape[0])
            if initial:
                # RWKV-PEFT removes the prefix "model." only from the names in the other file
                first = next((pair for name, pair in initial.items() if f".{name}".endswith(f".{module}")), None)
                if first is None:
                    raise CheckpointError(f"{path.with_name(INIT_PISSA)} lacks {module}, which {path.name} contains. The two "
                                          "files may come from different training runs")
                change = partial(_compose, [partial(lora, A=first[0], B=first[1], scale=-1.0), change])
        else:
            block = next(iter(parts.values()))
            if len(block.shape) == 2 and "bone" in parts:
                raise CheckpointError(f"{path}: {module}.bone has shape {block.shape}, an early form of MiSS that is not "
                                      "supported")
            change = partial(miss, M=block) if len(block.shape) == 2 else partial(bat, M=block, by_row=False)
        name, changed = _official_change(path, module, config, weights, change)
        changes[name] = changed
    whole = _official_weights(tensors, others, config, weights)
    for name, tensor in whole.items():
        if name.endswith(TIME_STATE):
            raise CheckpointError(f"{path} contains an adapter and a tuned state ({name}): save each in its own file, and pass "
                                  "the state as state=")
        if any(tensor.name.startswith(f"{module}.") and tensor.name != f"{module}.weight" for module in modules):
            raise CheckpointError(f"{path} contains {tensor.name}, which belongs to an unsupported kind of adapter: "
                                  f"expected only {', '.join(RWKV_PEFT_PARTS)}")
        if name not in weights or squeeze(tensor.shape) != squeeze(weights[name].shape):
            raise CheckpointError(f"{path} contains {name} of shape {tensor.shape}, but the model has no such tensor: the "
                                  "adapter belongs to a different model")
    kind = "PiSSA" if initial else "LoRA" if is_lora else "MiSS"
    replacements = {name: tensor.rename(name).view(weights[name].shape) for name, tensor in whole.items()}
    return Adapter(path, f"{kind} of RWKV-PEFT", changes, tensors, replacements)


def _by_module(path: Path, tensors: Mapping[str, Stored]) -> tuple[dict[str, dict[str, Stored]], list[str]]:
    """Returns the adapter parts of each module, by the module's path, and the names of all other tensors.

    Raises CheckpointError if a part of the adapter in the file `path` has no values, or a tensor has an unsupported dtype.
    """
    modules: dict[str, dict[str, Stored]] = {}
    others = []
    for name, tensor in tensors.items():
        require_dtype(path, tensor)
        match = PART.fullmatch(name) or WEB_RWKV_PART.fullmatch(name)
        if match is None:
            others.append(name)
            continue
        if not tensor.count:
            raise CheckpointError(f"{path}: the adapter for {match[1]} {PARTITIONED}")
        part = {"0": "lora_A", "1": "lora_B"}.get(match[2], match[2])
        modules.setdefault(match[1], {})[part] = tensor.transpose() if match[2] == "0" else tensor
    return modules, others


def _read_initial_pissa(path: Path) -> dict[str, tuple[Stored, Stored]]:
    formats.require_no_pointer(path)
    tensors = pth.read(path).tensors if path.is_file() else {}
    ends = ".init_lora_A", ".init_lora_B"
    names = [name.removesuffix(ends[0]) for name in tensors if name.endswith(ends[0])]
    return {name: (tensors[name + ends[0]], tensors[name + ends[1]]) for name in names if name + ends[1] in tensors}


def _peft_lora(config_json: JsonMapping, path: Path, module: str, parts: Mapping[str, Stored]) -> Change:
    A, B = _factors(path, module, parts)
    alpha = _alpha_of(config_json, path, module.removeprefix("base_model.model."))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path / CONFIG}: lora_alpha must be a number; got {alpha!r}")
    rank = A.shape[0]
    scale = alpha / (math.sqrt(rank) if config_json.get("use_rslora") else rank)
    initialisation = config_json.get("init_lora_weights", True)
    if initialisation not in (*PLAIN, "pissa"):
        raise CheckpointError(f"{path / CONFIG} sets init_lora_weights to {initialisation!r}, so the adapter was trained on "
                              "changed base weights: save the adapter again with path_initial_model_for_weight_conversion in "
                              "PEFT's save_pretrained")
    if "lora_magnitude_vector" in parts:
        if "lora_embedding_A" in parts:
            raise CheckpointError(f"{path} has DoRA for the embedding {module}, which is not supported")
        return partial(dora, A=A, B=B, scale=scale, m=parts["lora_magnitude_vector"])
    if config_json.get("use_dora"):
        raise CheckpointError(f"{path} lacks {module}.lora_magnitude_vector, which DoRA requires")
    if "lora_embedding_A" in parts:
        return partial(embedding_lora, A=A, B=B, scale=scale)
    change = partial(lora, A=A, B=B, scale=scale)
    return partial(_compose, [partial(subtract_largest, rank=rank), change]) if initialisation == "pissa" else change


def _alpha_of(config_json: JsonMapping, path: Path, layer: str) -> object:
    patterns = config_json.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{path / CONFIG}: alpha_pattern must be an object; got {json.dumps(patterns)[:60]}")
    for pattern, alpha in patterns.items():
        try:
            matches = re.fullmatch(rf"(.*\.)?({pattern})", layer)
        except re.error as error:
            raise CheckpointError(f"{path / CONFIG}: the key {pattern!r} in alpha_pattern must be a regular expression: "
                                  f"{error}") from None
        if matches:
            return alpha
    return config_json.get("lora_alpha")


def _peft_miss(config_json: JsonMapping, path: Path, module: str, parts: Mapping[str, Stored]) -> Change:
    M = parts.get("miss_block") or parts.get("bone_block")
    if M is None or len(parts) > 1:
        raise CheckpointError(f"{path} is a MiSS adapter, but {module} has {', '.join(parts)}: expected only miss_block")
    return partial(bat, M=M, by_row=True) if len(M.shape) == 3 else partial(miss, M=M)


def _factors(path: Path, module: str, parts: Mapping[str, Stored]) -> tuple[Stored, Stored]:
    """Returns LoRA's factors A (r,in) and B (out,r), or an embedding's A (r,V) and B (C,r)."""
    A = parts.get("lora_A") or parts.get("lora_embedding_A")
    B = parts.get("lora_B") or parts.get("lora_embedding_B")
    if A is None or B is None:
        raise CheckpointError(f"{path} has only {', '.join(parts)} for {module}: the adapter is incomplete")
    if len(A.shape) != 2 or len(B.shape) != 2 or A.shape[0] != B.shape[1]:
        raise CheckpointError(f"{path}: for {module}, the shapes of A {A.shape} and B {B.shape} do not match")
    return A, B


def _official_weight(name: str, config: ModelConfig, weights: Mapping[str, Stored]) -> str:
    """Returns the official name of a weight, without prefixes if the model then has such a weight."""
    parts = without_wrappers(name).split(".")
    names = [generation_of(config).official_name(".".join(parts[start:])) for start in range(len(parts))]
    return next((official for official in names if official in weights), names[0])


def _official_weights(tensors: Mapping[str, Stored], names: Sequence[str], config: ModelConfig,
                      weights: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors called `names` by official name. web-rwkv's converter has transposed low-rank matrices."""
    low_rank = getattr(generation_of(config), "LOW_RANK", ()) if any(map(WEB_RWKV_PART.fullmatch, tensors)) else ()
    official = {_official_weight(name, config, weights): tensors[name] for name in names}
    return {name: tensor.transpose() if name.endswith(low_rank) else tensor for name, tensor in official.items()}


def _official_change(path: Path, module: str, config: ModelConfig, weights: Mapping[str, Stored],
                     change: Change) -> tuple[str, Change]:
    """Returns the official name of a module's matrix, and `change` as a change of that matrix.

    `change` is defined in the adapter's own layout.
    """
    generation = generation_of(config)
    parts = without_wrappers(module).split(".")
    for start in range(len(parts)):
        adapter_name = f"{'.'.join(parts[start:])}.weight"
        official_name = generation.official_name(adapter_name)
        name = official_name.removesuffix("_transposed")
        if name in weights and len(weights[name].shape) == 2:
            prefix = getattr(generation, "OFFICIAL_PREFIX", None)
            in_directory = official_name != adapter_name or prefix in [f"{part}." for part in parts[:start]]
            factor = generation.directory_factor(name, config) if in_directory else 1.0
            shape = weights[name].shape
            _require_shape(path, module, change, shape[::-1] if name != official_name else shape)
            return name, partial(_change_layout, change, name != official_name, factor)
        if name in weights:
            raise CheckpointError(f"{path} contains {module}, which is neither a linear layer nor an embedding: only these can "
                                  "be adapted or replaced")
    raise CheckpointError(f"{path} has an adapter for {module}, but the model has no such layer: the adapter belongs to a "
                          "different model")


def _change_layout(change: Change, transposed: bool, factor: float, W: Tensor) -> Tensor:
    """Returns W with a change that is defined for the matrix W / factor or, if `transposed`, for its transpose."""
    matrix = W.T if transposed else W
    result = change(matrix / factor) * factor
    return result.T if transposed else result


def _require_shape(path: Path, module: str, change: Change, shape: tuple[int, ...]) -> None:
    try:
        fits = change(torch.zeros(shape, device="meta")).shape == shape
    except (RuntimeError, ValueError):
        fits = False
    if not fits:
        raise CheckpointError(f"{path}: the adapter for {module} does not fit the model's matrix of shape {list(shape)}. The "
                              "adapter belongs to a different model")


def adapt_weight(weight: Stored, change: Change, path: Path) -> Stored:
    """Returns the adapted weight. The change, from the adapter at `path`, is applied each time the weight is read."""
    def data() -> Tensor:
        with torch.no_grad():
            W = weight.get()
            return change(W.to(torch.promote_types(W.dtype, torch.float32)))

    # weight.get() has checked the base's values, so non-finite values can only come from the adapter
    return replace(weight, source=f"the adapter {path}", dtype=torch.float32, data=data, mapped=False)


# The functions below are the kinds of change. Their W is (out,in)


def _read_like(W: Tensor, part: Stored) -> Tensor:
    return torch.empty(part.shape, dtype=W.dtype, device="meta") if W.is_meta else part.get().to(W.dtype)


def _compose(changes: Sequence[Change], W: Tensor) -> Tensor:
    """Applies the changes to W in order."""
    for change in changes:
        W = change(W)
    return W


def lora(W: Tensor, A: Stored, B: Stored, scale: float) -> Tensor:
    return torch.addmm(W, _read_like(W, B), _read_like(W, A), alpha=scale)


def embedding_lora(W: Tensor, A: Stored, B: Stored, scale: float) -> Tensor:
    return torch.addmm(W, _read_like(W, A).T, _read_like(W, B).T, alpha=scale)


def dora(W: Tensor, A: Stored, B: Stored, scale: float, m: Stored) -> Tensor:
    """Applies LoRA, and then scales each row of the result to the norm m (out,)."""
    direction = lora(W, A, B, scale)
    return _read_like(W, m).view(-1, 1) * direction / direction.norm(dim=1, keepdim=True)


def subtract_largest(W: Tensor, rank: int) -> Tensor:
    """Returns W with its `rank` largest singular values set to zero."""
    if W.is_meta:
        return W
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    return W - U[:, :rank] * S[:rank] @ Vh[:rank]


def miss(W: Tensor, M: Stored) -> Tensor:
    """Adds MiSS's M (r,out), tiled along the inputs. An M (r,mini) is also tiled along the outputs."""
    out, inputs = W.shape
    rank, width = M.shape
    if out % width:
        raise ValueError(f"the number of rows must be a multiple of {width}; got {out}")
    return W + _read_like(W, M).repeat(-(-inputs // rank), out // width)[:inputs].T


def bat(W: Tensor, M: Stored, by_row: bool) -> Tensor:
    """Applies the bat variant of MiSS with M (n,r,r), which has one block per row (`by_row`) or column of W's blocks (r,r)."""
    out, inputs = W.shape
    rank = M.shape[-1]
    blocks = W.reshape(out // rank, rank, inputs // rank, rank).permute(0, 2, 1, 3)      # (out/r,in/r,r,r)
    M_blocks = _read_like(W, M)
    M_blocks = M_blocks[:, None] if by_row else M_blocks[None]
    if M_blocks.shape[0 if by_row else 1] != blocks.shape[0 if by_row else 1]:
        raise ValueError("the number of blocks in M does not match W")
    return W + (blocks @ M_blocks + M_blocks).permute(0, 2, 1, 3).reshape(out, inputs)


def _config(path: Path) -> JsonObject:
    try:
        content = json.loads((path / CONFIG).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / CONFIG} is not JSON ({error}): the file is damaged or incomplete") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path / CONFIG} must contain a JSON object; got a {type(content).__name__}")
    return content
