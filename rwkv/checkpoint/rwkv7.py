"""Recognises RWKV-7's checkpoints, and converts their names and layouts from and to each format.

Official names and shapes are those of rwkv/model/rwkv7, as in the .pth files of RWKV-LM. The other formats have:

    huggingface    fla's names; w1 .. g2 transposed, as weights of linear layers; k_k, k_a, the biases and ffn.x_k are [C];
                   in older directories, x_r .. x_g joined as x_x; in MLX's, k_k, k_a and ln_x are [heads,N]
    official       a Hugging Face directory of transformers' branch: official names and shapes; all names but head.weight begin
                   with rwkv7.
    transformers-rwkv      a Hugging Face directory of transformers-rwkv: names as in transformers' linear attention; all
                   vectors are [C] or [1,1,C]; low-rank matrices as in RWKV-LM's files
    st             web-rwkv's .safetensors: official names; w1 .. g2 and tuned states transposed, as the shapes of w1 .. g2 show
    ggmf           official names; x_r .. x_g joined as x_rwkvag [6,1,C]; w1 .. g2 transposed
    gguf           llama.cpp's names; joined and transposed as in ggmf, x_rwkvag as [6,1,1,C]; r_k and all vectors are [C]

RWKV-7a's tensors (DeepEmbed) have only official names. If s_emb_x is missing, it was merged into s_emb, and is read as zeros.
use_deep_embed in a Hugging Face directory is a different feature: RWKV-8's table outside the file.

Layer 0's v0, v1 and v2 are unused, but programs differ in whether files must contain them. The official trainer requires them,
so they are written to .pth, .ckpt, .safetensors and directories of transformers' branch. fla and transformers-rwkv have no such
parameters and rwkv.cpp aborts on them, so they are omitted from those directories and from ggmf. llama.cpp requires them in
GGUF, with the rank of a1; its converter and this module write copies of a0, a1 and a2. Missing ones, and those in GGUF, are
read as zeros.

The group norm's epsilon is 64e-5 in the official code, rwkv.cpp, llama.cpp and transformers-rwkv. In other Hugging Face
directories it is 1e-5 times head_dim, which is the same only for heads of size 64. For a group norm of y with epsilon e,
norm(y; e) = norm(c y; c^2 e), and y is linear in the receptance. So reading or writing such a directory scales the receptance
by c, and r_k, which multiplies only the receptance, by 1/c.

Sources: RWKV-LM, RWKV-v7/train_temp; flash-linear-attention, utils/convert_from_rwkv7.py and fla/models/rwkv7; rwkv.cpp,
python/convert_pytorch_to_ggml.py and rwkv_model_loading.inc; rwkv-rs/transformers-rwkv, temp/rwkv_pth2st.py; llama.cpp,
conversion/rwkv.py, src/models/rwkv7.cpp and src/llama-quant.cpp; mlx-lm, mlx_lm/models/rwkv7.py (sanitize).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rwkv.checkpoint.lazy_tensors import Stored
from rwkv.config import ModelConfig
from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.model import rwkv7 as model
from rwkv.model.base import TIME_STATE, DeepEmbedGeneration
from rwkv.model.rwkv7.architecture import EPS

if TYPE_CHECKING:                        # so that mypy reports missing names
    _GENERATION: DeepEmbedGeneration = model

# Later versions, which are not supported, also have r_k; RWKV-7 has no tensor that matches these patterns. The latest is first
EXTENSIONS = {"RWKV-8": r".*\.(rosa|rosa_qkv)\..*|.*\.(enn|ennk)(\.weight)?", "RWKV-7b (DEA)": r".*\.qkv\..*"}
EMBED = ".ffn.s_emb.weight"
EMBED_X = ".ffn.s_emb_x.weight"
HEAD_SIZE = 64                           # the head size of every released model
JOINED = f"x_{model.MIXES}"
TRANSPOSED = "_transposed"               # reading adds this to the name of a low-rank matrix that is stored transposed
LOW_RANK = tuple(f".{name}{part}" for name in model.LOW_RANK for part in "12")
VECTOR = rf".*\.(x_[{model.MIXES}]|w0|a0|v0|k_k|k_a|s0)"
BY_HEAD = (".att.k_k", ".att.k_a", ".att.ln_x.weight", ".att.ln_x.bias")        # [heads,N] in MLX's directories

HUGGING_FACE_TYPE = "rwkv7"              # model_type in config.json
HUGGING_FACE_OTHER_TYPES = ("rwkv7_native", "rwkv7_hf_adapter")      # rwkv7-hf writes these, with fla's tensors
OFFICIAL_PREFIX = "rwkv7."
RANKS = {"decay_low_rank_dim": "w1", "a_low_rank_dim": "a1", "v_low_rank_dim": "v1", "gate_low_rank_dim": "g1"}
HUGGING_FACE_SIZES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "intermediate_size": "n_ffn",
                      "head_dim": "head_size", "head_size": "head_size", "vocab_size": "vocab_size",
                      "attention_hidden_size": "n_embd", "value_dim": "n_embd", "num_attention_heads": "n_heads",
                      "max_position_embeddings": "ctx_len", "context_length": "ctx_len",
                      **{name: name for name in RANKS}}
NORM_EPS = 1e-5
HUGGING_FACE_CONSTANTS = {
    **dict.fromkeys(("norm_eps", "layer_norm_epsilon", "layer_norm_eps"), (NORM_EPS,)),
    "norm_first": (True,), "norm_bias": (True,), "wkv_state_dtype": ("float32",), "number_of_conv_states": (2,),
    "layer_types": ("linear_attention", "rwkv", "rwkv7"), "architecture_version": ("rwkv7",), "rescale_every": (0,)}
HUGGING_FACE_UNUSED = ("attn_mode", "hidden_ratio", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy",
                       "use_l2warp", "wkv_mode", "group_norm_epsilon",
                       "num_heads")      # fla ignores num_heads if head_dim is set; fla's first version always wrote 32
GROUP_NORM = "group_norm_epsilon"        # a key of config.json; the default is head_dim times norm_eps
HUGGING_FACE_FEATURES = {"use_deep_embed": "RWKV-8's DeepEmbed", "attn": "layers of softmax attention",
                         "embedding_layer_norm_fused": "an embedding that ln0 is merged into"}
HUGGING_FACE = {"emb.weight": "model.embeddings.weight", "ln_out.weight": "model.norm.weight",
                "ln_out.bias": "model.norm.bias", "head.weight": "lm_head.weight"}
HUGGING_FACE_LAYERS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att": "attn", "ffn": "ffn"}
HUGGING_FACE_EARLIER_MIXES = "attn.x_x"  # fla's first version joined x_r .. x_g, as [6,C] or [6,1,1,C]
HUGGING_FACE_ATTENTION = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}

TRANSFORMERS_RWKV = "transformers-rwkv"  # a value of layout=, and the name of that layout
TRANSFORMERS_RWKV_TYPE = "rwkv"          # model_type in config.json, which also has architecture_version
TRANSFORMERS_RWKV_TOP = {"emb.weight": "model.embed_tokens.weight", "ln_out.weight": "model.norm.weight",
                         "ln_out.bias": "model.norm.bias", "head.weight": "lm_head.weight",
                         "blocks.0.ln0.weight": "model.embedding_norm.weight", "blocks.0.ln0.bias": "model.embedding_norm.bias"}
TRANSFORMERS_RWKV_LAYERS = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "att": "linear_attn", "ffn": "mlp"}
TRANSFORMERS_RWKV_EARLIER = {"mlp.up_proj.weight": "ffn.key.weight", "mlp.down_proj.weight": "ffn.value.weight"}

GGUF_ARCHITECTURE = "rwkv7"
GGUF_SIZES = {"block_count": "n_layer", "embedding_length": "n_embd", "feed_forward_length": "n_ffn",
              "wkv.head_size": "head_size", "attention.decay_lora_rank": "decay_low_rank_dim",
              "attention.iclr_lora_rank": "a_low_rank_dim", "attention.value_residual_mix_lora_rank": "v_low_rank_dim",
              "attention.gate_lora_rank": "gate_low_rank_dim"}
GGUF_CONSTANTS = {"attention.layer_norm_epsilon": (NORM_EPS,), "attention.group_norm_epsilon": (EPS,),
                  "token_shift_count": (2,), "rescale_every_n_layers": (0,), "expert_count": (0,), "embedding_scale": (0, 1),
                  "residual_scale": (0, 1), "logit_scale": (0, 1), "final_logit_softcapping": (0,),
                  "attention.layer_norm_rms_epsilon": (0,)}
GGUF_UNUSED = ("context_length", "vocab_size", "attention.head_count", "attention.head_count_kv", "rope.dimension_count")
GGUF = {"emb.weight": "token_embd.weight", "blocks.0.ln0.weight": "token_embd_norm.weight",
        "blocks.0.ln0.bias": "token_embd_norm.bias", "ln_out.weight": "output_norm.weight", "ln_out.bias": "output_norm.bias",
        "head.weight": "output.weight"}
GGUF_LAYERS = {"ln1": "attn_norm", "ln2": "attn_norm_2", "att.ln_x": "time_mix_ln", f"att.{JOINED}": "time_mix_lerp_fused",
               "ffn.x_k": "channel_mix_lerp_k", "ffn.key": "channel_mix_key", "ffn.value": "channel_mix_value"}
GGUF_FLOAT32 = r".*\.time_mix_(w[12]|lerp_fused)\.weight"           # llama.cpp's converter also keeps all vectors float32
GGUF_UNQUANTISED = r".*\.time_mix_([wavg][12]|lerp_fused)\.weight"  # llama.cpp's quantizer does not quantise these, either


def recognises(tensors: Mapping[str, Stored]) -> bool:
    """Returns True if tensors with these names are RWKV-7's: they include r_k, but no name that only later versions have."""
    extended = any(re.fullmatch(pattern, name) for pattern in EXTENSIONS.values() for name in tensors)
    return any(name.endswith(".att.r_k") for name in tensors) and not extended


def official_name(name: str) -> str:
    """Converts another program's tensor name to the official one. Keeps a prefix, and returns an official name unchanged.

    Adds TRANSPOSED to the name of a low-rank matrix that fla stores transposed.
    """
    top, layers, gguf = _official_names()
    if name in gguf:
        return gguf[name]
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        return f"blocks.{match[1]}.{gguf.get(match[2], match[2])}"
    if re.match(r"layers\.\d+\.|(embeddings|norm)\.", name):            # the directory's model has no head
        name = f"model.{name}"
    if match := re.fullmatch(r"((?:.*\.)?)((?:model|lm_head)\..*)", name):
        prefix, file_name = match.groups()
        if file_name in top:
            return prefix + top[file_name]
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", file_name)
        if layer and layer[2] in layers:
            return f"{prefix}blocks.{layer[1]}.{layers[layer[2]]}"
    return name


@cache
def _official_names() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Maps to official names: Hugging Face names outside layers, names within a layer, and llama.cpp's names."""
    config = ModelConfig(generation="rwkv7", n_layer=1, n_embd=1, head_size=1)
    block = [name.removeprefix("blocks.0.") for name in model.shapes(config, 1) if name.startswith("blocks.0.")]
    layers = {_fla_layer_name(name): name + TRANSPOSED * name.endswith(LOW_RANK) for name in block}
    layers |= {_transformers_rwkv_layer_name(name): name for name in block} | TRANSFORMERS_RWKV_EARLIER
    layers[HUGGING_FACE_EARLIER_MIXES] = f"att.{JOINED}"
    gguf = {name: official for official, name in GGUF.items()} | {_gguf_name(name): name for name in (*block, f"att.{JOINED}")}
    top = {name: official for names in (HUGGING_FACE, TRANSFORMERS_RWKV_TOP) for official, name in names.items()}
    return top, layers, gguf


def _fla_layer_name(name: str) -> str:
    part, _, rest = name.partition(".")
    if part == "att" and (match := re.fullmatch(r"([wavg])([012])", rest)):
        rest = f"{match[1]}_lora.lora." + {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[match[2]]
    elif part == "att":
        head, dot, tail = rest.partition(".")
        rest = HUGGING_FACE_ATTENTION.get(head, head) + dot + tail
    return f"{HUGGING_FACE_LAYERS[part]}.{rest}"


def _transformers_rwkv_layer_name(name: str) -> str:
    part, _, rest = name.partition(".")
    head, dot, tail = rest.partition(".")
    if part == "att":
        head = HUGGING_FACE_ATTENTION.get(head, head)
    return f"{TRANSFORMERS_RWKV_LAYERS.get(part, part)}.{head}{dot}{tail}"


def _gguf_name(name: str) -> str:
    stem, suffix = (name.rpartition(".")[::2]) if name.endswith((".weight", ".bias")) else (name, "weight")
    layer = GGUF_LAYERS.get(stem) or f"time_mix_{stem.removeprefix('att.')}"
    return f"{layer}.{suffix}"


def to_official_layout(tensors: dict[str, Stored], declared: JsonMapping) -> dict[str, Stored]:
    """Converts tensors from the layout of any format to the official layout.

    `declared` has the sizes that the file states. head_size splits GGUF's r_k [C] into heads. v_low_rank_dim is the rank of
    layer 0's v1 if no layer has a v1; the default is the rank of a1.
    """
    factor = math.sqrt(EPS / declared.get(GROUP_NORM, EPS))
    joined = any(name.endswith(f".{JOINED}") for name in tensors)
    transposed = joined or _are_transposed(tensors)
    official: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name.endswith(f".{JOINED}") and tensor.shape[:1] == (len(model.MIXES),) and len(tensor.shape) > 1:
            for index, letter in enumerate(model.MIXES):
                part = name.replace(JOINED, f"x_{letter}")
                official[part] = tensor.part(index, part, tensor.shape[1:])
        elif name.endswith(TRANSPOSED) or (transposed and name.endswith((*LOW_RANK, TIME_STATE))):
            new_name = name.removesuffix(TRANSPOSED)
            official[new_name] = tensor.rename(new_name).transpose()
        elif name.endswith(BY_HEAD) and len(tensor.shape) == 2:
            official[name] = tensor.view((tensor.count,))
        else:
            official[name] = _split_heads(tensor, declared.get("head_size")) if name.endswith(".r_k") else tensor
    if joined:
        official = {name: tensor for name, tensor in official.items() if name not in model.UNUSED}
    return _scale_receptance(official | _missing_v0_v1_v2(official, declared) | _missing_embeddings(official), factor)


def _are_transposed(tensors: Mapping[str, Stored]) -> bool:
    """Returns True if the low-rank matrices' shapes show that all of them are stored transposed, as web-rwkv's are."""
    C = tensors["emb.weight"].shape[-1:] if "emb.weight" in tensors else ()
    shapes = [tensor.shape if name.endswith("2") else tensor.shape[::-1] for name, tensor in tensors.items()
              if name.endswith(LOW_RANK)]                # these are (C,rank) if the file's matrices are transposed
    return all(shape[:1] == C for shape in shapes) and any(shape[1:] != C for shape in shapes)


def _scale_receptance(tensors: dict[str, Stored], factor: float) -> dict[str, Stored]:
    """Multiplies the receptance by `factor` and divides r_k by it.

    The model stays the same if its group norm's epsilon is scaled by the square of `factor`.
    """
    factors = {".att.receptance.weight": factor, ".att.r_k": 1 / factor}
    scaled = {name: tensor.scale(factors[end]) for name, tensor in tensors.items()
              if (end := name[name.find(".att."):]) in factors}
    return tensors if factor == 1 else tensors | scaled


def _split_heads(tensor: Stored, head_size: Any) -> Stored:
    if len(tensor.shape) != 1 or not isinstance(head_size, int) or head_size < 1 or tensor.shape[0] % head_size:
        return tensor
    return tensor.view((tensor.shape[0] // head_size, head_size))


def _missing_v0_v1_v2(tensors: Mapping[str, Stored], declared: JsonMapping) -> dict[str, Stored]:
    """Returns zeros for the missing ones of layer 0's v0, v1 and v2; {} if a0 or a1, which give the sizes, are missing."""
    bias, matrix = (tensors.get(name.replace(".v", ".a")) for name in model.UNUSED[:2])
    if bias is None or matrix is None or len(matrix.shape) != 2 or not bias.shape:
        return {}
    ranks = [tensor.shape[1] for name, tensor in tensors.items() if name.endswith(".att.v1") and len(tensor.shape) == 2]
    stated = declared.get("v_low_rank_dim")
    default_rank = stated if isinstance(stated, int) and stated > 0 else matrix.shape[1]
    C = bias.shape[-1]
    rank = ranks[0] if ranks else default_rank
    shapes = dict(zip(model.UNUSED, ((1, 1, C), (C, rank), (rank, C)), strict=True))
    return {name: Stored(name, bias.source, shape, bias.dtype, lambda shape=shape: torch.zeros(shape, device="cpu"))  # type: ignore[misc]
            for name, shape in shapes.items() if name not in tensors}


def _missing_embeddings(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns a zero s_emb_x for each layer without one, because such a file has s_emb_x merged into s_emb."""
    zeros: dict[str, Stored] = {}
    embedding = tensors.get("emb.weight")
    for name, table in tensors.items():
        key = name.removesuffix(EMBED) + EMBED_X
        if name.endswith(EMBED) and key not in tensors and len(table.shape) == 2 and embedding is not None:
            shape = (table.shape[1], embedding.shape[-1])
            zeros[key] = Stored(key, table.source, shape, table.dtype, lambda shape=shape: torch.zeros(shape, device="cpu"))  # type: ignore
    return zeros


def to_format_layout(tensors: Mapping[str, Stored], format: str) -> dict[str, Stored]:
    """Converts tensors to the names and layout of `format`, which may also be a layout of a Hugging Face directory.

    Raises UserError if `format` does not support the model's DeepEmbed or head size.
    """
    if format not in ("huggingface", "official", TRANSFORMERS_RWKV, "ggmf", "gguf", "st"):
        return {name: tensor.rename(name) for name, tensor in tensors.items()}
    if any(name.endswith(EMBED) for name in tensors):
        raise UserError("RWKV-7a (DeepEmbed) can be stored only in .pth, .ckpt or .safetensors: choose one of these formats")
    if format == "huggingface":
        converted = _to_hugging_face(tensors)
    elif format == "official":
        converted = {name if name == "head.weight" else OFFICIAL_PREFIX + name: tensor
                     for name, tensor in _with_directory_epsilon(tensors).items()}
    elif format == TRANSFORMERS_RWKV:
        converted = _to_transformers_rwkv(tensors)
    elif format == "st":
        converted = {name: tensor.transpose() if name.endswith((*LOW_RANK, TIME_STATE)) else tensor
                     for name, tensor in tensors.items()}
    elif format == "ggmf":
        converted = _join_mixes({name: tensor for name, tensor in tensors.items() if name not in model.UNUSED})
    else:
        converted = _to_gguf(tensors)
    return {name: tensor.rename(name) for name, tensor in converted.items()}


def _with_directory_epsilon(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    head_size = tensors["blocks.0.att.r_k"].shape[1]
    return _scale_receptance(dict(tensors), math.sqrt(group_norm_epsilon(head_size) / EPS))


def group_norm_epsilon(head_size: int) -> float:
    """Returns the group norm's epsilon that a Hugging Face directory assumes for this head size."""
    return head_size * NORM_EPS if head_size != HEAD_SIZE else EPS


def _to_hugging_face(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    converted: dict[str, Stored] = {}
    for name, tensor in _with_directory_epsilon(tensors).items():
        if name in HUGGING_FACE:
            converted[HUGGING_FACE[name]] = tensor
        elif name not in model.UNUSED:
            _, layer, rest = name.split(".", 2)
            vector = len(tensor.shape) == 3 and not rest.startswith("att.x_")
            tensor = tensor.view(tensor.shape[-1:]) if vector else tensor
            tensor = tensor.transpose() if rest.endswith(LOW_RANK) else tensor
            converted[f"model.layers.{layer}.{_fla_layer_name(rest)}"] = tensor
    return converted


def _to_transformers_rwkv(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    head_size = tensors["blocks.0.att.r_k"].shape[1]
    if head_size != HEAD_SIZE:
        raise UserError(f"the layout {TRANSFORMERS_RWKV} requires a head size of {HEAD_SIZE}; got {head_size}: choose a "
                        "different layout")
    converted: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name in TRANSFORMERS_RWKV_TOP:
            converted[TRANSFORMERS_RWKV_TOP[name]] = tensor
        elif name not in model.UNUSED:
            _, layer, rest = name.split(".", 2)
            tensor = tensor.view(tensor.shape[-1:]) if len(tensor.shape) == 3 else tensor
            converted[f"model.layers.{layer}.{_transformers_rwkv_layer_name(rest)}"] = tensor
    return converted


def _join_mixes(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Transposes low-rank matrices, and replaces each block's x_r .. x_g by one tensor x_rwkvag [6,1,C] at x_r's position."""
    converted: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name.endswith(".att.x_r"):
            stem = name.removesuffix("x_r")
            parts = [tensors[f"{stem}x_{letter}"] for letter in model.MIXES]
            converted[stem + JOINED] = Stored.join(stem + JOINED, parts, (len(parts), 1, tensor.shape[-1]))
        elif ".att.x_" not in name:
            converted[name] = tensor.transpose() if name.endswith(LOW_RANK) else tensor
    return converted


def _to_gguf(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    copies = {name: tensors[name.replace(".v", ".a")] for name in model.UNUSED}
    converted: dict[str, Stored] = {}
    for name, tensor in _join_mixes({**tensors, **copies}).items():
        if name in GGUF:
            converted[GGUF[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        if rest.endswith(JOINED):
            tensor = tensor.view((*tensor.shape[:1], 1, *tensor.shape[1:]))
        elif model.group(name) == "vector":
            tensor = tensor.view((tensor.count,))
        converted[f"blk.{layer}.{_gguf_name(rest)}"] = tensor
    return converted


def hugging_face_config(config: ModelConfig, vocab_size: int, dtype: torch.dtype, layout: str = "fla") -> JsonObject:
    """Returns the part of config.json that describes the architecture."""
    config = model.with_default_widths(config)
    epsilon = {GROUP_NORM: group_norm_epsilon(config.head_size)} if config.head_size != HEAD_SIZE else {}
    shared = {"model_type": HUGGING_FACE_TYPE, "vocab_size": vocab_size, "max_position_embeddings": config.ctx_len,
              "num_hidden_layers": config.n_layer, "hidden_size": config.n_embd, "intermediate_size": config.n_ffn,
              "head_dim": config.head_size, "norm_bias": True, "norm_eps": NORM_EPS, **epsilon,
              **{name: getattr(config, name) for name in RANKS}}
    if layout == TRANSFORMERS_RWKV:
        return {"architectures": ["RwkvForCausalLM"], "model_type": TRANSFORMERS_RWKV_TYPE, "architecture_version": "rwkv7",
                "vocab_size": vocab_size, "context_length": config.ctx_len, "num_hidden_layers": config.n_layer,
                "hidden_size": config.n_embd, "intermediate_size": config.n_ffn, "head_size": config.head_size,
                "num_attention_heads": config.n_embd // config.head_size, "layer_norm_epsilon": NORM_EPS, GROUP_NORM: EPS,
                "wkv_mode": "fp32io16", **{name: getattr(config, name) for name in RANKS}}
    if layout == "official":
        return {"architectures": ["Rwkv7ForCausalLM"], **shared, "num_heads": config.n_embd // config.head_size,
                "use_deep_embed": False, "wkv_state_dtype": "float32"}
    return {"architectures": ["RWKV7ForCausalLM"], **shared, "hidden_act": "sqrelu", "norm_first": True, "attn_mode": "chunk"}


def widths(matrix: Callable[[str], tuple[int, ...]], names: Collection[str]) -> dict[str, int]:
    """Returns the model's widths, by their names in ModelConfig.

    `matrix` returns a matrix's shape (rows, columns) by name. `names` are the names of all tensors.
    """
    deep = {"deep_embed_dim": matrix("blocks.0.ffn.s1")[1]} if any(name.endswith(EMBED) for name in names) else {}
    return {**deep, "n_embd": matrix("emb.weight")[1], "n_ffn": matrix("blocks.0.ffn.key.weight")[0],
            "head_size": matrix("blocks.0.att.r_k")[1],
            **{size: matrix(f"blocks.0.att.{name}")[1] for size, name in RANKS.items()}}


def has_several_shapes(name: str) -> bool:
    """Returns True if the tensor is a vector that some files store as [C] and others as [1,1,C]."""
    return re.fullmatch(VECTOR, name) is not None


def directory_factor(name: str, config: ModelConfig) -> float:
    """Returns the official matrix divided by the matrix in a Hugging Face directory with the default epsilon."""
    epsilon = group_norm_epsilon(model.with_default_widths(config).head_size)
    return math.sqrt(EPS / epsilon) if name.endswith(".att.receptance.weight") else 1.0
