"""Describes the files of the toy generation."""

from rwkv.model import rwkv9

model = rwkv9

GGUF_ARCHITECTURE, HUGGING_FACE_TYPE, HUGGING_FACE_OTHER_TYPES = None, "rwkv9", ()
HUGGING_FACE_SIZES = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "vocab_size": "vocab_size",
                      "context_length": "ctx_len"}
HUGGING_FACE_FEATURES, HUGGING_FACE_CONSTANTS, HUGGING_FACE_UNUSED, EXTENSIONS = {}, {}, (), {}


def recognises(tensors):
    return "blocks.0.att.decay" in tensors


def official_name(name):
    return name


def to_official_layout(tensors, declared):
    return tensors


def to_format_layout(tensors, format):
    return dict(tensors)


def hugging_face_config(config, vocab_size, dtype):
    return {"model_type": "rwkv9", "num_hidden_layers": config.n_layer, "hidden_size": config.n_embd,
            "vocab_size": vocab_size, "context_length": config.ctx_len}


def widths(matrix, names):
    return {"n_embd": matrix("emb.weight")[1]}


def has_several_shapes(name):
    return False


def directory_factor(name, config):
    return 1.0
