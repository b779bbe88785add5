"""Reads and writes Hugging Face directories: config.json, weights in one file or in shards, and the tokenizer.

The tokenizer is a tokenizer.json, or the World vocabulary in a text file as in fla's directories. RWKV-4's tensors have
transformers' names. RWKV-7's directories have the layout of fla (the default of layout=), of transformers' branch for RWKV-7,
or of transformers-rwkv. In the last two the World vocabulary is a tokenizer.json (rwkv/tokenizer/world_json.py). Directories of
rwkv7-hf (model_type rwkv7_native) have fla's tensors.

With a tokenizer.json, the end-of-text tokens are those in the first of generation_config.json, config.json,
tokenizer_config.json and special_tokens_map.json that names a valid one, or else those of ends_by_rule in
rwkv/tokenizer/special.py. The World vocabulary's end of text is always id 0.

Source: huggingface/transformers, models/rwkv/modeling_rwkv.py and configuration_rwkv.py, generation/configuration_utils.py
(eos_token_id: an id or a list of ids) and the branch's models/rwkv7; flash-linear-attention, fla/models/rwkv7;
rwkv-rs/hf-adapter.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType

import torch

from rwkv.chat.metadata import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG
from rwkv.checkpoint import card
from rwkv.checkpoint.content import ENTRY, Content, Outgoing
from rwkv.checkpoint.formats import LAYOUTS, _torch_file, pth, require_no_pointer, safetensors
from rwkv.checkpoint.generations import generation_of, generations, require_supported, supported_names, unknown_key_notes
from rwkv.checkpoint.lazy_tensors import same_numbers
from rwkv.checkpoint.location import ADAPTER, SHARD, WEIGHT_SUFFIXES
from rwkv.errors import CheckpointError, UserError
from rwkv.io import hub
from rwkv.io.atomic import write_file, write_folder
from rwkv.io.json_types import JsonObject
from rwkv.model.base import MATRICES
from rwkv.tokenizer import special, world_json
from rwkv.tokenizer.tokenizers import SPECIAL
from rwkv.tokenizer.world import Vocabulary

SUFFIXES = ("",)                         # the empty suffix stands for a directory
TOKENIZER = "tokenizer.json"
WEIGHTS = "model.safetensors"
SPECIAL_TOKENS = "special_tokens_map.json"
WORLD = "rwkv_vocab_v20230424.txt"
OURS = (CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, WORLD)
WHOLE, INDICES = hub.WHOLE, hub.INDICES
HEADS = ("lm_head.weight", "head.weight")
QUANTISED = "weights quantised by another program"
AUTHORS_EMBEDDING = re.compile(r"(?!rwkv7\.)(?:.+\.)?emb\.weight")      # names in transformers' branch begin with rwkv7.
FEATURES = {"quantization_config": QUANTISED, "quantization": QUANTISED, "pruned_heads": "pruned heads",
            "final_logit_softcapping": "capped logits", "rope_scaling": "rotary positions"}
CONSTANTS = {"hidden_act": ("sqrelu", "relu2", "relu_squared", "squared_relu")}          # all of these names mean max(x, 0)^2
# Any transformers model's config.json may have these keys, which do not affect the computation
UNUSED = frozenset((
    "architectures", "model_type", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "tie_word_embeddings", "initializer_range", "_name_or_path", "name_or_path", "tokenizer_class", "return_dict",
    "return_dict_in_generate", "torchscript", "output_attentions",
    "output_hidden_states", "output_scores", "use_bfloat16", "chunk_size_feed_forward", "is_decoder",
    "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "prefix", "_commit_hash", "_attn_implementation", "attn_implementation",
    "keys_to_ignore_at_inference", "is_composition", "base_model_tp_plan", "base_model_pp_plan", "max_length", "min_length",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "unsloth_version", "torch_version"))
UNUSED_ENDS = ("_token_id", "_token", "_dropout")        # keys with these suffixes do not affect the computation


def recognises(path: Path) -> bool:
    return any((path / name).is_file() for name in (CONFIG, *INDICES)) or hub.has_configuration(path)


def read(path: Path) -> Content:
    """Reads a directory, or one file in it that has all weights, with the directory's configuration and tokenizer."""
    folder = path.parent if path.is_file() else path
    if not (folder / CONFIG).is_file():
        return _shards_alone(folder)
    config, generation = _config(folder / CONFIG)
    require_supported(folder / CONFIG, config, CONSTANTS | generation.HUGGING_FACE_CONSTANTS,
                      FEATURES | generation.HUGGING_FACE_FEATURES)
    content = _read_file(path) if path.is_file() else _weights(path)
    declared = _declared_sizes(folder / CONFIG, config, generation.HUGGING_FACE_SIZES)
    length = declared.pop("ctx_len", None)
    if isinstance(length, int) and length > 0:
        declared["ctx_len"] = length
    declared |= _epsilon(folder / CONFIG, config, generation, content.entry is not None)
    known_keys = {*UNUSED, *FEATURES, *CONSTANTS, *generation.HUGGING_FACE_UNUSED, *generation.HUGGING_FACE_SIZES,
             *generation.HUGGING_FACE_CONSTANTS, *generation.HUGGING_FACE_FEATURES}
    others = {name: value for name, value in config.items() if name not in known_keys and not name.endswith(UNUSED_ENDS)}
    tokenizer, notes = _tokenizer_definition(folder, config.get("vocab_size"))
    entry, edits = _entry_with_edits(folder, content.entry, tokenizer)
    return replace(content, path=path, entry=entry, declared=declared, tokenizer=tokenizer,
                   tied=config.get("tie_word_embeddings") is True,
                   notes=[*content.notes, *unknown_key_notes(folder / CONFIG, others), *notes, *edits])


def _declared_sizes(path: Path, config: JsonObject, sizes: dict[str, str]) -> JsonObject:
    declared: JsonObject = {}
    for key, name in sizes.items():
        value = config.get(key)
        if key == "value_dim" and isinstance(value, list) and all(width == value[0] for width in value):
            value = value[0] if value else None          # the list has one value per layer
        if value is None:
            continue
        if declared.setdefault(name, value) != value:
            raise CheckpointError(f"{path} sets {key} to {value}, but another key sets the same size to {declared[name]}. "
                                  "Models in which these sizes differ are not supported")
    return declared


def _epsilon(path: Path, config: JsonObject, generation: ModuleType, ours: bool) -> dict[str, float]:
    """Returns the group norm's epsilon by its key in config.json, or {} if it is the generation's default.

    `ours` is True if this program wrote the file. Then a missing key means the default.
    """
    key = getattr(generation, "GROUP_NORM", None)
    head_size = config.get("head_dim") or config.get("head_size")
    if key is None or (key not in config and "architecture_version" in config):
        return {}                        # transformers-rwkv's epsilon does not depend on the head size
    if (key not in config and (ours or not isinstance(head_size, int) or head_size < 1)):
        return {}
    epsilon = config.get(key, generation.group_norm_epsilon(head_size))
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise CheckpointError(f"{path}: {key} must be between 0 and 1; got {epsilon!r}")
    return {key: epsilon}


def write(path: Path, outgoing: Outgoing) -> None:
    """Writes the directory. Raises UserError if it contains other files, or if the layout does not support the generation."""
    if outgoing.layout not in (None, *LAYOUTS):
        raise UserError(f"the layout of a Hugging Face directory must be one of {', '.join(LAYOUTS)}; got {outgoing.layout!r}")
    generation = generation_of(outgoing.config)
    if outgoing.layout is not None and not hasattr(generation, "OFFICIAL_PREFIX"):
        raise UserError(f"{generation.model.NAME} has only one layout for Hugging Face directories: omit the layout")
    _require_ours(path, outgoing.texts)
    write_folder(path, lambda folder: _write(folder, outgoing))


def _write(folder: Path, outgoing: Outgoing) -> None:
    arrangement = outgoing.layout if outgoing.layout not in (None, "fla") else "huggingface"
    tensors = generation_of(outgoing.config).to_format_layout(outgoing.tensors, arrangement)
    metadata = {ENTRY: json.dumps(outgoing.entry)}
    write_file(folder / WEIGHTS, lambda file: safetensors.write_tensors(file, tensors.values(), metadata))
    for name, text in _texts_by_file_name(outgoing).items():
        write_file(folder / name, lambda file, text=text: file.write(text.encode()))     # type: ignore[misc]


def _dtype_for_config(outgoing: Outgoing) -> torch.dtype:
    """Returns the widest dtype of the matrices, because loading in a narrower one would round merged adapters (float32)."""
    group = generation_of(outgoing.config).model.group
    dtypes = (tensor.dtype for name, tensor in outgoing.tensors.items() if group(name) in MATRICES)
    return functools.reduce(torch.promote_types, dtypes)


def _texts_by_file_name(outgoing: Outgoing) -> dict[str, str]:
    tokenizer = outgoing.entry.get("tokenizer") or {}
    in_json = tokenizer.get("kind") == "json" and isinstance(tokenizer.get("definition"), str)
    ends = (special.ends_of(tokenizer) if in_json else []) or [0]
    ids = {"bos_token_id": ends[0], "eos_token_id": ends if len(ends) > 1 else ends[0]}
    dtype = _dtype_for_config(outgoing)
    layout = {} if outgoing.layout is None else {"layout": outgoing.layout}
    config = {**generation_of(outgoing.config).hugging_face_config(outgoing.config, outgoing.vocab_size, dtype, **layout),
              **ids, "tie_word_embeddings": False, "use_cache": True, "torch_dtype": str(dtype).removeprefix("torch."),
              **({"_name_or_path": outgoing.name} if outgoing.name else {})}
    texts: dict[str, str] = {}
    tokenizer_config: JsonObject = {}
    if outgoing.card:
        texts[card.FILE] = outgoing.card
    if in_json:
        texts[TOKENIZER] = tokenizer["definition"]
        parsed = json.loads(tokenizer["definition"])
        end = next((name for name, index in special.vocabulary(parsed).items() if index == ends[0]), None)
        names = {} if end is None else {"bos_token": end, "eos_token": end}
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    if tokenizer.get("kind") == "world" and outgoing.layout == "transformers-rwkv":
        texts[TOKENIZER] = world_json.to_trie(tokenizer["vocabulary"])
        tokenizer_config = {"tokenizer_class": "RwkvTokenizer", "bos_token": world_json.END, "eos_token": world_json.END}
    elif tokenizer.get("kind") == "world" and outgoing.layout == "official":
        texts[TOKENIZER] = world_json.to_json(tokenizer["vocabulary"])
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), world_json.END)
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "split_special_tokens": True}
    elif tokenizer.get("kind") == "world":
        texts[WORLD] = tokenizer["vocabulary"]
    if tokenizer.get("kind") == "world" and tokenizer.get(SPECIAL):
        tokenizer_config["added_tokens_decoder"] = {
            str(index): {**special.PLAIN_TOKEN, "content": name, "special": True} for name, index in tokenizer[SPECIAL].items()}
    tokenizer_config = json.loads(outgoing.texts.get(TOKENIZER_CONFIG, "{}")) | tokenizer_config
    generation_config = json.loads(outgoing.texts.get(GENERATION_CONFIG, "{}"))
    if outgoing.layout in ("official", "transformers-rwkv"):
        generation_config = {**ids, "pad_token_id": ends[0], **generation_config}
    if generation_config and tokenizer:
        generation_config |= ids
    contents = {CONFIG: config, TOKENIZER_CONFIG: tokenizer_config, GENERATION_CONFIG: generation_config}
    return {**texts, **outgoing.texts,
            **{name: json.dumps(content, indent=2) + "\n" for name, content in contents.items() if content}}


def _require_ours(path: Path, texts: Mapping[str, str]) -> None:
    """Raises UserError if `path` contains files that would be lost: files that are neither OURS nor equal to `texts`."""
    if path.exists() and not path.is_dir():              # write_folder would replace a device or pipe, such as /dev/null
        raise UserError(f"{path} must be a directory, but is a file or a device: choose another name")
    same = {path / name for name, text in texts.items() if (path / name).is_file() and _text(path / name) == text}
    files = chain(sorted(path.glob("*")), path.rglob("*"))               # top-level files first: a home folder may be large
    other = next((file for file in files if not file.is_dir() and file not in same
                  and (file.parent != path or (file.name not in OURS and not card.is_ours(file)))), None)
    if other is not None:
        raise UserError(f"{path} contains {other.relative_to(path).as_posix()}, which is not part of a checkpoint: choose an "
                        "empty directory")


def _config(path: Path) -> tuple[JsonObject, ModuleType]:
    config = _json(path)
    kind = config.get("architecture_version") or config.get("model_type")
    generation = next((module for module in generations()
                       if kind in (module.HUGGING_FACE_TYPE, *module.HUGGING_FACE_OTHER_TYPES)), None)
    if generation is None:
        expected = " or ".join(repr(module.HUGGING_FACE_TYPE) for module in generations())
        version = f"an RWKV-{kind[4:]}" if isinstance(kind, str) and kind.startswith("rwkv") else "not an RWKV"
        raise CheckpointError(f"{path.parent} is {version} checkpoint: config.json has model_type {kind!r}, but {expected} is "
                              f"expected. This program runs {supported_names()}")
    return config, generation


def _shards_alone(path: Path) -> Content:
    """Reads the author's tensors from shards without config.json, as DeepSpeed's zero_to_fp32.py and Accelerate write them."""
    content = _weights(path)
    if not any(AUTHORS_EMBEDDING.fullmatch(name) for name in content.tensors):
        raise CheckpointError(f"{path} contains shards of a Hugging Face directory, but lacks the config.json: download this "
                              "file, too")
    return content


def _weights(path: Path) -> Content:
    """Reads the weights in a directory. Raises CheckpointError if there are none, or if several files differ."""
    whole = [name for name in WHOLE if (path / name).is_file()]
    indices = [name for name in INDICES if (path / name).is_file()]
    if whole:                            # a download by name pattern may include an index without its shards
        bare = [name for name in indices if not _has_shards(path / name)]
        if any(name.partition(".")[0] == whole[0].partition(".")[0] for name in bare):
            raise CheckpointError(f"{path} contains {whole[0]}, and also {bare[0]} without the shards that {bare[0]} lists: "
                                  "remove the outdated file, or complete the download")
        indices = [name for name in indices if name not in bare]
    if not whole and not indices:
        others = sorted(file.name for file in path.iterdir()
                        if hub.has_weights(file.name, WEIGHT_SUFFIXES) and file.name not in hub.ADAPTER_WEIGHTS
                        and file.is_file())
        if shards := [name for name in others if SHARD.fullmatch(name)]:
            raise CheckpointError(f"{path} contains {shards[0]}, but lacks the index of the shards: download "
                                  f"{' or '.join(INDICES)}, too")
        hint = f". To read {', '.join(others[:3])}, name the file itself" if others else ". The download may be incomplete"
        raise CheckpointError(f"{path} contains config.json but no weights: expected {' or '.join((*WHOLE, *INDICES))}{hint}")
    if (path / ADAPTER).is_file():
        raise CheckpointError(f"{path} contains both an adapter ({ADAPTER}) and weights: move the adapter to another directory")
    contents = {name: _read_file(path / name) if name in whole else _shards(path / name) for name in (*whole, *indices)}
    (first_name, content), *duplicates = contents.items()
    for name, duplicate in duplicates:
        if not _are_same(content, duplicate):
            raise CheckpointError(f"{path} contains different weights in {first_name} and {name}: remove the outdated file")
    return content


def _has_shards(index: Path) -> bool:
    return any((index.parent / file).is_file() for file in {*_file_by_tensor(index).values()})


def _are_same(first: Content, second: Content) -> bool:
    """Returns True if two files contain the same weights, up to rounding. Either may lack the head, which can be tied."""
    if any(not name.endswith(HEADS) for name in first.tensors.keys() ^ second.tensors.keys()):
        return False
    return all(same_numbers(tensor, second.tensors[name]) for name, tensor in first.tensors.items() if name in second.tensors)


def _read_file(path: Path) -> Content:
    return pth.read(path) if _torch_file.recognises(path) else safetensors.read(path)


def _shards(index: Path) -> Content:
    places = _file_by_tensor(index)
    shards: dict[str, Content] = {}
    for file in sorted({*places.values()}):
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent} lacks the shard {file}, which {index.name} lists. The download may be "
                                  "incomplete")
        shards[file] = _read_file(index.parent / file)
    for name, file in places.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{shards[file].path} lacks the tensor {name}, which {index.name} lists. The files may come "
                                  "from different checkpoints")
    return Content(index.parent, {name: shards[file].tensors[name] for name, file in places.items()})


def _file_by_tensor(index: Path) -> dict[str, str]:
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
        raise CheckpointError(f"{index} must have a weight_map that maps each tensor to a file in the same folder, as "
                              "transformers writes it")
    return places


def _tokenizer_definition(folder: Path, vocab_size: object) -> tuple[JsonObject | None, list[str]]:
    """Returns the definition of the directory's tokenizer, or None, and messages. `vocab_size` is that of config.json."""
    if (folder / TOKENIZER).is_file():
        text = _text(folder / TOKENIZER)
        stated = [*_declared_end_tokens(folder)]
        if (vocabulary := world_json.vocabulary_in(text)) is not None:
            in_trie = (json.loads(text).get("added_tokens") or []) if f'"{world_json.TRIE}"' in text else []
            return _world_definition(folder, vocabulary, vocab_size, [token for token in in_trie if token["id"] != 0])
        text, unusable = special.with_listed_tokens(text, _listed_tokens(folder), vocab_size)
        notes = [f"{folder} has the tokens {', '.join(unusable[:4])}, but its embedding has no rows for them: they are ignored"]
        return special.definition_with_ends(text, stated), notes if unusable else []
    if (folder / WORLD).is_file():
        return _world_definition(folder, _text(folder / WORLD), vocab_size)
    return None, []


def _entry_with_edits(folder: Path, entry: JsonObject | None, tokenizer: JsonObject | None
                      ) -> tuple[JsonObject | None, list[str]]:
    """Returns messages and the entry `timemix`, without its tokenizer if `tokenizer`, from the other files, has been edited."""
    own = (entry or {}).get("tokenizer")
    if entry is None or tokenizer is None or not isinstance(own, dict):
        return entry, []
    if not _is_same_vocabulary(tokenizer, own):
        return {**entry, "tokenizer": None, "tokenizer_hash": None}, [
            f"the tokenizer in {folder} has changed since the directory was written. The weights were trained with the "
            "original one, and some token ids may now stand for other texts"]
    ends, own_ends = tokenizer.get(special.KEY), own.get(special.KEY)
    stated = next(filter(None, _declared_end_tokens(folder)), [])        # may include a token that declared_ends leaves out
    is_same = tokenizer.get(SPECIAL) == own.get(SPECIAL) and (ends == own_ends or stated == own_ends)
    return entry if is_same else {**entry, "tokenizer": None}, []


def _is_same_vocabulary(first: JsonObject, second: JsonObject) -> bool:
    plain = [{key: value for key, value in each.items() if key not in (special.KEY, SPECIAL)} for each in (first, second)]
    try:
        return plain[0] == plain[1] or json.loads(first["definition"]) == json.loads(second["definition"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return False


def _world_definition(folder: Path, vocabulary: str, vocab_size: object,
                      added: Sequence[JsonObject] = ()) -> tuple[JsonObject, list[str]]:
    """Returns messages and the definition of a WorldTokenizer with the special tokens in `added` and tokenizer_config.json.

    As in transformers' tokenizers in Python, a token has the id that the file states. Tokens with the id of another token,
    tokens beyond the model's `vocab_size` and tokens that are not special are ignored.
    """
    definition: JsonObject = {"kind": "world", "vocabulary": vocabulary}
    listed = [*added, *_listed_tokens(folder)]
    if not listed:
        return definition, []
    tokens = Vocabulary.parse(vocabulary, str(folder)).tokens
    limit = vocab_size if isinstance(vocab_size, int) else len(tokens)
    ordinary = {token: index for index, token in enumerate(tokens) if token}
    new = {token["content"]: token for token in listed if ordinary.get(token["content"].encode()) != token["id"]}
    usable = {name: token["id"] for name, token in new.items() if token.get("special") is True and token["id"] < limit
              and tokens[token["id"]:token["id"] + 1] in ([], [b""])}
    ignored = [name for name in new if name not in usable]
    notes = [f"{folder} lists the tokens {', '.join(ignored[:4])}, but only special tokens with unused ids below {limit} can "
             "be added to the World vocabulary: they are ignored"]
    return definition | ({SPECIAL: usable} if usable else {}), notes if ignored else []


def _listed_tokens(folder: Path) -> list[JsonObject]:
    """Returns the tokens in tokenizer_config.json, in the order of their ids. transformers adds them to tokenizer.json's."""
    file = folder / TOKENIZER_CONFIG
    listed = _json(file).get("added_tokens_decoder") if file.is_file() else None
    if not isinstance(listed, dict) or not all(index.isdecimal() for index in listed):
        return []
    tokens = {index: listed[index] for index in sorted(listed, key=int)}
    return [{**token, "id": int(index)} for index, token in tokens.items()
            if isinstance(token, dict) and isinstance(token.get("content"), str)]


def _declared_end_tokens(folder: Path) -> Iterator[list[int | str]]:
    """Yields the ids or names of end-of-text tokens from each file that may state them, in transformers' order."""
    for name in (GENERATION_CONFIG, CONFIG):
        ids = _json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        ids = ids if isinstance(ids, list) else [ids]
        yield [id_ for id_ in ids if isinstance(id_, int) and not isinstance(id_, bool)]
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        token = _json(folder / name).get("eos_token") if (folder / name).is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        yield [token] if isinstance(token, str) else []


def _json(path: Path) -> JsonObject:
    try:
        content = json.loads(_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete: the content is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must contain a JSON object; got a {type(content).__name__}")
    return content


def _text(path: Path) -> str:
    require_no_pointer(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: the content is not UTF-8 text ({error})") from error
