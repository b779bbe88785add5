"""Converts tokenizers to and from GGUF's metadata: the World vocabulary (`rwkv`), and byte-level BPE like GPT-2's (`gpt2`).

    tokenizer.ggml.model, .tokens, .token_type      rwkv: each token is Python's repr of its bytes, without b and quotes;
                                                    gpt2: each token is the byte-level encoding of its bytes
    tokenizer.ggml.merges, .pre                     gpt2: the pairs of tokens to merge, and the pre-tokenizer
    tokenizer.huggingface.json                      gpt2: the complete tokenizer.json, in files that this program wrote
    tokenizer.ggml.eos_token_id, .eot_, .eom_       gpt2: the end-of-text tokens; the World vocabulary's is id 0

Ids without a token, up to the number of embedding rows, have the text [PADid] and the type "unused". Sources: llama.cpp,
conversion/base.py and src/llama-vocab.cpp; ggml, docs/gguf.md.
"""

import json
import re
from pathlib import Path
from typing import Any

from rwkv.checkpoint.content import Outgoing
from rwkv.errors import CheckpointError, UserError
from rwkv.io.json_types import JsonObject
from rwkv.tokenizer import special
from rwkv.tokenizer.tokenizers import SPECIAL
from rwkv.tokenizer.world import Vocabulary

GGML = "tokenizer.ggml."
JSON = "tokenizer.huggingface.json"
NORMAL = 1                               # this and the next three are values of token_type
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
WORLD_START = "<s>"                      # GGUF requires a text for id 0, but the World vocabulary has no token 0
PRE_TOKENIZER = "gpt-2"
ENDS = tuple(f"{GGML}{name}_token_id" for name in ("eos", "eot", "eom"))
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN_BPE = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
PLAIN_ADDED = {"single_word": False, "lstrip": False, "rstrip": False}
NO_MODEL = ("none", "no_vocab")
ESCAPES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def metadata_of(outgoing: Outgoing) -> JsonObject:
    """Returns the metadata that describes the tokenizer. Raises UserError for a tokenizer that GGUF cannot represent."""
    definition = outgoing.entry.get("tokenizer")
    if definition is None:
        return {f"{GGML}model": NO_MODEL[0]}
    if definition["kind"] == "world":
        vocabulary = Vocabulary.parse(definition["vocabulary"], "the tokenizer's definition").tokens
        tokens = [repr(token)[2:-1] or f"[PAD{index}]" for index, token in enumerate(vocabulary)]
        tokens[0] = WORLD_START
        types = [CONTROL, *(NORMAL if token else UNUSED for token in vocabulary[1:])]
        for name, index in (definition.get(SPECIAL) or {}).items():
            unused = range(len(tokens), index + 1)
            tokens += [f"[PAD{each}]" for each in unused]
            types += [UNUSED for _ in unused]
            tokens[index], types[index] = name, CONTROL
        metadata: JsonObject = {f"{GGML}model": "rwkv"}
        ends = [0]
    elif definition["kind"] == "json":
        parsed = json.loads(definition["definition"])
        tokens, types = _bpe_tokens(parsed)
        ends = special.ends_of(definition) or [0]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parsed["model"]["merges"]]
        metadata = {f"{GGML}model": "gpt2", f"{GGML}pre": PRE_TOKENIZER, f"{GGML}merges": merges,
                    JSON: definition["definition"]}
    else:
        raise UserError(f"GGUF cannot store a tokenizer of type {definition['kind']}: choose another format, or a tokenizer "
                        "with the World vocabulary (world) or byte-level BPE (bpe)")
    spare = range(len(tokens), outgoing.vocab_size)
    return {**metadata, f"{GGML}tokens": tokens + [f"[PAD{index}]" for index in spare],
            f"{GGML}token_type": types + [UNUSED for _ in spare], f"{GGML}bos_token_id": ends[0],
            **dict(zip(ENDS, ends, strict=False)), f"{GGML}add_bos_token": False}


def _bpe_tokens(parsed: JsonObject) -> tuple[list[str], list[int]]:
    """Returns the texts and types of all ids. Raises UserError for a tokenizer that GGUF cannot represent."""
    model = parsed["model"]
    added = special.added_tokens(parsed)
    pre_tokenizer = parsed.get("pre_tokenizer") or {}
    differences = {
        "a normalizer": parsed.get("normalizer"),
        "a different pre_tokenizer": any(pre_tokenizer.get(name, True) != value for name, value in BYTE_LEVEL.items()
                                     if name != "trim_offsets"),         # trim_offsets does not affect the ids
        "a different decoder": (parsed.get("decoder") or {}).get("type") != "ByteLevel",
        "a different model": any((model.get(name) or None) != (value or None) for name, value in PLAIN_BPE.items()),
        "added tokens that absorb spaces": any(token.get(name) for token in added for name in PLAIN_ADDED)}
    for difference, is_present in differences.items():
        if is_present:
            raise UserError(f"GGUF can store only byte-level BPE tokenizers like GPT-2's, but this tokenizer has {difference}: "
                            "choose another format, or omit the tokenizer")
    names = {index: text for text, index in model["vocab"].items()} | {token["id"]: token["content"] for token in added}
    types = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in added}
    ids = range(1 + max(names))
    return ([names.get(index, f"[PAD{index}]") for index in ids],
            [types.get(index, NORMAL) if index in names else UNUSED for index in ids])


def tokenizer_in(path: Path, metadata: JsonObject) -> JsonObject | None:
    """Returns the tokenizer's definition, or None if the file has none. Raises CheckpointError for an unsupported kind."""
    kind = metadata.get(f"{GGML}model", NO_MODEL[0])
    if kind in NO_MODEL:
        return None
    if kind == "rwkv":
        texts, types = _tokens(path, metadata)
        special_tokens = {text: index for index, (text, type_) in enumerate(zip(texts, types, strict=True))
                          if type_ == CONTROL and (index, text) != (0, WORLD_START)}
        return {"kind": "world", "vocabulary": _world_vocabulary_text(path, texts, types),
                **({SPECIAL: special_tokens} if special_tokens else {})}
    if kind != "gpt2":
        raise CheckpointError(f"{path} contains a tokenizer of type {kind!r}, but only rwkv (the World vocabulary) and gpt2 "
                              "(byte-level BPE) are supported: use the checkpoint that this GGUF file was converted from")
    ends = [metadata[key] for key in ENDS if isinstance(metadata.get(key), int)]
    if isinstance(metadata.get(JSON), str):
        return special.definition_with_ends(metadata[JSON], [ends])
    if metadata.get(f"{GGML}pre") != PRE_TOKENIZER:
        raise CheckpointError(f"{path} contains a byte-level BPE tokenizer with the pre-tokenizer "
                              f"{metadata.get(f'{GGML}pre')!r}, but only {PRE_TOKENIZER!r} is supported: use the checkpoint "
                              "that this GGUF file was converted from")
    content = _bpe_tokenizer_json(path, *_tokens(path, metadata), metadata.get(f"{GGML}merges"))
    return special.definition_with_ends(json.dumps(content), [ends])


def _tokens(path: Path, metadata: JsonObject) -> tuple[list[str], list[int]]:
    tokens = metadata.get(f"{GGML}tokens")
    types = metadata.get(f"{GGML}token_type")
    if not _is_list_of(str, tokens) or not _is_list_of(int, types) or len(tokens) != len(types):      # type: ignore[arg-type]
        raise CheckpointError(f"{path} must have as many {GGML}tokens as {GGML}token_type. The file may have been converted "
                              "incorrectly")
    return tokens, types         # type: ignore[return-value]


def _is_list_of(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _world_vocabulary_text(path: Path, texts: list[str], types: list[int]) -> str:
    try:
        tokens = [_parse_repr(text) if type_ == NORMAL else b"" for text, type_ in zip(texts, types, strict=True)]
    except ValueError as error:
        raise CheckpointError(f"{path} has a token that is not the repr of a bytes object ({error}). The file may have been "
                              "converted incorrectly") from error
    return Vocabulary(tokens).to_text()


def _parse_repr(text: str) -> bytes:
    """Decodes the escapes in `text`, which is the repr of bytes without b and quotes. Raises ValueError if it is not."""
    def unescape(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes([int(escape[1:], 16)]) if len(escape) == 3 else ESCAPES.get(escape, escape)

    return re.sub(rb"\\(x..|.)", unescape, text.encode("ascii"), flags=re.DOTALL)


def _bpe_tokenizer_json(path: Path, texts: list[str], types: list[int], merges: Any) -> JsonObject:
    if not _is_list_of(str, merges):
        raise CheckpointError(f"{path} has a byte-level BPE tokenizer without {GGML}merges. The file may have been converted "
                              "incorrectly")
    added = [{"id": index, "content": text, "special": type_ == CONTROL, "normalized": False, **PLAIN_ADDED}
             for index, (text, type_) in enumerate(zip(texts, types, strict=True)) if type_ in (CONTROL, USER_DEFINED)]
    vocab = {text: index for index, (text, type_) in enumerate(zip(texts, types, strict=True)) if type_ != UNUSED}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": BYTE_LEVEL | {"add_prefix_space": True},
            "model": {**PLAIN_BPE, "vocab": vocab, "merges": [merge.split(" ", 1) for merge in merges]}}
