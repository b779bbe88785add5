"""Converts the World vocabulary to and from a tokenizer.json, which has one of three formats.

The first format is the trie of transformers-rwkv: a model of type RwkvTrie, which the `tokenizers` library does not have, with
the tokens in byte-level BPE's alphabet and their ids. The second format is only read, and is the rwkv_vocab_v20230424.json of
web-rwkv and ai00: a token for each id, as a string or, if it is not UTF-8, as a list of bytes. The third format is that of
RWKV's own models on Hugging Face:

    model          WordLevel: the tokens in byte-level BPE's alphabet with their ids, and <|endoftext|> with id 0
    pre_tokenizer  ByteLevel, then a Split by one regular expression (?:A|B|...) of all tokens, the longest first

The first matching alternative is the longest matching token, which is the rule of rwkv/tokenizer/world.py. The expression is
parsed here and never compiled, because the library would try its 65,529 alternatives one by one, a hundred times slower.

Sources: rwkv-rs/transformers-rwkv, models/rwkv7/convert_rwkv7_world_tokenizer_to_hf.py and temp/rwkv_pth2st.py;
cryscan/web-rwkv, assets/vocab.
"""

import json
import re

from rwkv.io.json_types import JsonObject
from rwkv.tokenizer.decoders import BYTE_OF, token_bytes
from rwkv.tokenizer.world import LAST_ID, Vocabulary

TRIE = "RwkvTrie"
END = "<|endoftext|>"
END_TOKEN = {"id": 0, "content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
FIRST_ID = re.compile(r'\s*\{\s*"\d+"\s*:')          # how the second format begins
SPECIAL = re.compile(r"([\\.^$|?*+()\[\]{}])")
PIECE = re.compile(r"\\(.)|(\|)|([^\\|]+)", re.DOTALL)
CHARACTER_OF = {value: character for character, value in BYTE_OF.items()}


def vocabulary_in(text: str) -> str | None:
    """Converts a tokenizer.json to the text of a World vocabulary's file. Returns None for other vocabularies or damage."""
    by_id = FIRST_ID.match(text)
    if not by_id and '"WordLevel"' not in text and f'"{TRIE}"' not in text:          # the caller parses other vocabularies
        return None
    try:
        parsed = json.loads(text)
        if by_id:
            pairs = [(int(index), token.encode() if isinstance(token, str) else bytes([*token]))
                     for index, token in parsed.items()]
        else:
            ids_by_token = parsed["model"]["vocab"]
            tokens = ([token for token, index in ids_by_token.items() if index != 0] if parsed["model"]["type"] == TRIE
                      else _expression_tokens(parsed) if _is_world_format(parsed) else [])
            pairs = [(ids_by_token[token], token_bytes(token)) for token in tokens]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    ids = dict(pairs)
    if not ids or len(ids) != len(pairs) or not all(1 <= index <= LAST_ID for index in ids):
        return None
    if {bytes([value]) for value in range(256)} - {*ids.values()}:
        return None
    return Vocabulary([ids.get(index, b"") for index in range(1 + max(ids))]).to_text()


def to_trie(text: str) -> str:
    """Converts the text of a World vocabulary's file to a tokenizer.json with the model RwkvTrie."""
    before = {"SpecialToken": {"id": END, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [END_TOKEN], "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [before, texts[0]], "pair": [before, *texts],
                           "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": TRIE, "vocab": {END: 0, **{token: index for index, token in _tokens_by_id(text).items()}}},
    }, ensure_ascii=False)


def _tokens_by_id(text: str) -> dict[int, str]:
    tokens = Vocabulary.parse(text, "the tokenizer's definition").tokens
    return {index: "".join(CHARACTER_OF[value] for value in token) for index, token in enumerate(tokens) if token}


def to_json(text: str) -> str:
    tokens = _tokens_by_id(text)
    by_length = sorted(tokens.items(), key=lambda item: (-len(item[1]), item[0]))
    expression = "(?:" + "|".join(SPECIAL.sub(r"\\\1", token) for _, token in by_length) + ")"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [END_TOKEN], "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [byte_level, split]}, "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": {"type": "WordLevel", "vocab": {END: 0, **{token: index for index, token in tokens.items()}},
                  "unk_token": END},
    }, ensure_ascii=False)


def _is_world_format(parsed: JsonObject) -> bool:
    """Returns True if everything except the regular expression is as in the third format."""
    byte_level, split = parsed["pre_tokenizer"]["pretokenizers"]
    added = parsed.get("added_tokens") or []
    return (parsed["model"]["type"] == "WordLevel" and parsed["decoder"]["type"] == "ByteLevel"
            and parsed.get("normalizer") is None and parsed.get("post_processor") is None
            and byte_level["type"] == "ByteLevel" and not byte_level["add_prefix_space"] and byte_level["use_regex"] is False
            and split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
            and all(token["id"] == 0 for token in added))


def _expression_tokens(parsed: JsonObject) -> list[str]:
    """Returns the unescaped tokens in the regular expression, or [] if they are not in descending order of length."""
    expression: str = parsed["pre_tokenizer"]["pretokenizers"][1]["pattern"]["Regex"]
    inner = expression.removeprefix("(?:").removesuffix(")") if expression.startswith("(?:") else expression
    tokens = []
    token = ""
    position = 0
    while match := PIECE.match(inner, position):
        escaped, bar, plain = match.groups()
        position = match.end()
        if bar:
            tokens.append(token)
            token = ""
        elif (escaped and escaped.isalnum()) or (plain and SPECIAL.search(plain)):        # this may be a character class
            return []
        else:
            token += escaped or plain
    tokens.append(token)
    lengths = [len(token) for token in tokens]
    ordered = position == len(inner) and all(lengths) and lengths == sorted(lengths, reverse=True)
    return tokens if ordered and all(character in BYTE_OF for token in tokens for character in token) else []
