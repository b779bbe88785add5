"""Finds the special tokens in a tokenizer.json and the tokens that end a text, and gives special tokens private names.

`parsed` is the content of such a file. "Ends of text" are the ids of the tokens that end a text. The first of them also
separates documents.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rwkv.errors import UserError
from rwkv.io.json_types import JsonMapping, JsonObject

END_OF_TEXT = "<|endoftext|>"            # GPT-2, GPT-NeoX, Phi, Qwen; and tokenizers trained here
ENDS = (END_OF_TEXT,
        "</s>",                          # Llama 1 and 2, Mistral, T5, BART, XLM-R
        "<|end_of_text|>",               # Llama 3, Granite
        "<eos>", "<|eos|>", "[EOS]",     # Gemma; common in self-made files
        "<\uff5cend\u2581of\u2581sentence\uff5c>",       # DeepSeek
        "[SEP]")                         # BERT, which has no other end
ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>")
PLAIN_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
KEY = "end_of_text"                      # a key in a tokenizer's definition (Tokenizer.to_dict)


def special_tokens(parsed: JsonMapping) -> dict[str, int]:
    return {token["content"]: token["id"] for token in added_tokens(parsed) if token["special"]}


def vocabulary(parsed: JsonMapping) -> dict[str, int]:
    return _model_vocabulary(parsed) | {token["content"]: token["id"] for token in added_tokens(parsed)}


def added_tokens(parsed: JsonMapping) -> list[JsonObject]:
    """Returns the file's added tokens with the ids that the library `tokenizers` gives them.

    The library ignores the ids in the file: a token of the model's vocabulary has its id there, and the other tokens follow the
    vocabulary in the order of the file.
    """
    tokens = parsed.get("added_tokens") or []
    ids = _model_vocabulary(parsed) if tokens else {}
    next_id = len(ids)
    added: dict[str, int] = {}
    for token in tokens:
        content = token["content"]
        if content not in added:
            added[content] = ids.get(content, next_id)
            next_id = max(next_id, added[content] + 1)
    return [{**token, "id": added[token["content"]]} for token in tokens]


def _model_vocabulary(parsed: JsonMapping) -> dict[str, int]:
    vocab = parsed["model"]["vocab"]
    return dict(vocab) if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}


def unknown_token(parsed: JsonMapping) -> str | None:
    """Returns the name of the token that replaces characters outside the vocabulary, or None if there is no such token."""
    model = parsed["model"]
    if isinstance(model["vocab"], dict):
        name = model.get("unk_token")
        return name if isinstance(name, str) and name in vocabulary(parsed) else None
    index = model.get("unk_id")
    return None if index is None else str(model["vocab"][index][0])


def ends_by_rule(parsed: JsonMapping) -> list[int]:
    """Returns the ends of text that the tokenizer's file alone implies, or [] if the file implies none.

    The first rule that applies determines the end:
    1. <|endoftext|>
    2. the special token whose name is in ENDS, if there is exactly one
    3. the special token 0, unless it stands for unknown text, padding or a mask
    """
    ids = vocabulary(parsed)
    special = special_tokens(parsed)
    if END_OF_TEXT in ids:
        return [ids[END_OF_TEXT]]
    candidates = [special[name] for name in ENDS if name in special]
    if len(candidates) == 1:
        return candidates
    first = next((name for name, index in special.items() if index == 0), None)
    if first is None or first == unknown_token(parsed) or any(part in first.lower() for part in ("unk", "pad", "mask")):
        return []
    return [0]


def ends_by_first_rule(parsed: JsonMapping) -> list[int]:
    """Returns the ends of text for a definition without ends, as in older checkpoints: <|endoftext|>, or a special token 0."""
    end = vocabulary(parsed).get(END_OF_TEXT)
    if end is not None:
        return [end]
    return [0] if 0 in special_tokens(parsed).values() else []


def declared_ends(parsed: JsonMapping, stated: Iterable[int | str]) -> list[int]:
    """Returns the ids of the tokens that another file declares as ends of text, by id or name, and that can be ends.

    A token that is neither special nor in ENDS or ENDS_OF_TURNS is ordinary text. Some programs declare such a token by
    mistake, so it is left out. Duplicates are left out, too.
    """
    ids = vocabulary(parsed)
    special = special_tokens(parsed)
    ending = {*special.values(), *(ids[name] for name in (*ENDS, *ENDS_OF_TURNS) if name in ids)}
    indices = [ids.get(each) if isinstance(each, str) else each for each in stated]
    return list(dict.fromkeys(index for index in indices if index in ending and index is not None))


def end_named_by_user(parsed: JsonMapping, name: str, source: str, option: str) -> list[int]:
    """Returns the id of the token that the user names as the end of a text, as a list.

    Raises UserError if the token is missing, or is a single character that is not special.
    """
    special = special_tokens(parsed)
    index = vocabulary(parsed).get(name)
    if index is None or (len(name) == 1 and name not in special):
        raise UserError(f"{option} must be a special token of {source} ({_name_list(special)}); got {name!r}")
    return [index]


def unknown_end_error(parsed: JsonMapping, source: str, option: str) -> UserError:
    """Returns the error for a file that does not determine which token ends a text."""
    special = special_tokens(parsed)
    candidates = [name for name in ENDS if name in special]
    reason = f"has {' and '.join(candidates)}" if candidates else f"has neither {END_OF_TEXT} nor another known end token"
    return UserError(f"{source} {reason}, so the file does not determine which token ends a text. Name the token with "
                     f"{option}=TEXT. The special tokens are {_name_list(special)}")


def definition(text: str, ends: Sequence[int], by_first_rule: Sequence[int]) -> JsonObject:
    """Returns the definition of a JsonTokenizer, with the ends of text only if they differ from those of ends_by_first_rule."""
    result: JsonObject = {"kind": "json", "definition": text}
    return result if list(ends) == list(by_first_rule) else {**result, KEY: list(ends)}


def definition_with_ends(text: str, stated: Iterable[Iterable[int | str]]) -> JsonObject:
    """Returns the definition of a JsonTokenizer for a tokenizer.json with the content `text`.

    `stated` contains the ends of text that other files declare. The first valid ones are used. If there are none, the ends of
    ends_by_rule are used.
    """
    try:
        parsed = json.loads(text)
        ends: list[int] = next(filter(None, (declared_ends(parsed, each) for each in stated)), [])
        return definition(text, ends or ends_by_rule(parsed), ends_by_first_rule(parsed))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):         # JsonTokenizer will raise the error
        return {"kind": "json", "definition": text}


def with_listed_tokens(text: str, listed: Iterable[JsonMapping], vocab_size: object) -> tuple[str, list[str]]:
    """Adds the tokens that another file lists to a tokenizer.json with the content `text`.

    Tokens beyond the model's `vocab_size` ids are taken out, because the model has no embeddings of them; some programs add
    padding without resizing the model. Returns the new content, or `text` if nothing changes, and the names taken out.
    """
    try:
        parsed = json.loads(text)
        tokens = parsed.get("added_tokens") or []
        known = {token["content"] for token in tokens}
        missing = [{"id": 0, **PLAIN_TOKEN, **token} for token in listed if token["content"] not in known]
        numbered = added_tokens({**parsed, "added_tokens": [*tokens, *missing]})
        n_ordinary = len(_model_vocabulary(parsed))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):         # JsonTokenizer will raise the error
        return text, []
    limit = vocab_size if isinstance(vocab_size, int) and vocab_size >= n_ordinary else None
    usable = [token for token in numbered if limit is None or token["id"] < limit]
    if not missing and len(usable) == len(tokens):
        return text, []
    unusable = [token["content"] for token in numbered if token not in usable]
    return json.dumps({**parsed, "added_tokens": usable}, ensure_ascii=False), unusable


def ends_of(described: JsonMapping) -> list[int]:
    """Returns the ends of text in a JsonTokenizer's definition, or [] if they are unknown."""
    return list(described[KEY] if KEY in described else ends_by_first_rule(json.loads(described["definition"])))


def _name_list(special: Mapping[str, int]) -> str:
    shown = ", ".join([*special][:10]) + (f" and {len(special) - 10} more" if len(special) > 10 else "")
    return shown or "none"


class Private(NamedTuple):
    """The content of a tokenizer.json in which each special token `name` has the new name private[name]."""

    content: JsonObject
    private: dict[str, str]


def with_private_names(parsed: JsonObject, names: Iterable[str]) -> Private:
    """Renames the tokens `names` to random strings, so that a text cannot contain a special token by accident.

    A token's old name in a text is encoded as ordinary text.
    """
    secret = secrets.token_hex(16)
    private = {name: f"{secret}x{index}" for index, name in enumerate(names)}
    model = dict(parsed["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {private.get(name, name): index for name, index in vocab.items()}
        if model.get("unk_token") in private:
            model["unk_token"] = private[model["unk_token"]]
    else:
        model["vocab"] = [[private.get(piece, piece), score] for piece, score in vocab]
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model.get("merges") or []]
    cut = len(model.get("continuing_subword_prefix") or "")
    remaining = [(a, b) for a, b in merges if private.keys().isdisjoint((a, b, a + b[cut:]))]
    if merges:
        model["merges"] = [list(pair) for pair in remaining]
    added = [{**token, "content": private[token["content"]], "special": True, "normalized": False, "single_word": False}
             if token["content"] in private else token for token in parsed.get("added_tokens") or []]
    return Private({**parsed, "model": model, "added_tokens": added}, private)
