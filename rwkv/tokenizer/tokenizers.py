"""Defines the tokenizers: bytes, characters, any tokenizer.json of the `tokenizers` library, and the RWKV World vocabulary.

A tokenizer has the ids 0..vocab_size-1. Each id of `ends` ends a generated text. The first of these ids is `end_of_text`, which
precedes every document in the data. Only a tokenizer.json may have an `end_of_text` other than 0 (see special.py).

`encode` never returns a special token, whatever the text, except the unknown token, which replaces characters outside the
vocabulary. Special tokens decode to nothing, again except the unknown token. `decode` and `decoder` accept any sequence of ids.
Bytes that are not UTF-8 become U+FFFD. A checkpoint contains its whole tokenizer and the tokenizer's hash. Any tokenizer that
is used with the checkpoint must have the same hash.
"""

import hashlib
import json
import operator
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import SupportsIndex, cast

import tokenizers

from kernels.arguments import path_of
from rwkv.config import require_path, require_type
from rwkv.errors import UserError
from rwkv.io import hub
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.io.signals import consume_interruptibly
from rwkv.io.utf8 import WrongCharacter, read_bytes, read_text, require_unicode
from rwkv.tokenizer import special, world, world_json
from rwkv.tokenizer.decoders import BytesDecoder, Decoder, TextDecoder, token_bytes
from rwkv.tokenizer.special import END_OF_TEXT
from rwkv.tokenizer.split import pieces, safe_split, without_long_runs

Rule = Callable[[JsonMapping], list[int]]
JOINING = ("ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")         # decoders that only concatenate the texts of tokens
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")              # a byte fallback token
NAMES = "byte, world, or the path of a `tokenizers` .json file or of a World vocabulary's .txt file"
SPECIAL = "special"                      # a key in the definition of a WorldTokenizer with special tokens
LARGEST = 2 ** 24                        # maximum size of a vocabulary, and of data.vocab_size
MAX_UNUSED_ROWS = 255                    # an embedding may have this many more rows than tokens: some models round the size up
MADE_FROM_DATA = ("char", "bpe")         # values of data.tokenizer for tokenizers made from the data


class Tokenizer(ABC):
    """A tokenizer that encodes any text its vocabulary covers, and decodes any ids.

    Attributes:
        strips_spaces: whether a token strips adjacent spaces. If so, a text cannot be split safely (rwkv/tokenizer/split.py).
        adds_space: whether encoding adds a space before a text, as SentencePiece does, to mark the first word as a word.
        special: the ids, by name, of the tokens that a chat template may write.
        private: for the same names, the texts that `encode` maps to these tokens (rwkv/chat/encoding.py).
    """

    kind: str
    vocab_size: int
    ends: tuple[int, ...] = (0,)
    strips_spaces: bool = False
    adds_space: bool = False
    special: Mapping[str, int] = MappingProxyType({})
    private: Mapping[str, str] = MappingProxyType({})

    @property
    def end_of_text(self) -> int:
        """Returns the id that separates documents. Generation without a prompt begins with this id."""
        return self.ends[0]

    @abstractmethod
    def to_dict(self) -> JsonObject:
        """Returns the tokenizer as a dictionary for `from_dict`.

        The value of "kind" names the class. The other values are strings or lists.
        """

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Returns the ids of a text that is valid Unicode."""

    @property
    @abstractmethod
    def _bytes(self) -> list[bytes]:
        """Returns the bytes of each token of a vocabulary of byte strings, with b"" for special tokens."""

    def _new_decoder(self) -> Decoder:
        return BytesDecoder(self._bytes)

    def decoder(self, after: Sequence[int] = ()) -> Decoder:
        """Returns a decoder for a text that continues the ids `after`.

        The text of `after` and the decoder's output together equal decode(all ids).
        """
        decoder = self._new_decoder()
        decoder.continue_after(after)
        return decoder

    def encode(self, text: str, before: int = 0) -> list[int]:
        """Returns the ids of `text`. Raises UserError if the vocabulary does not cover the text.

        `before` is the number of characters before `text` in a longer text, for the positions in error messages.
        """
        try:
            require_unicode(text)
            return self._encode(text)
        except WrongCharacter as error:
            raise error.shift(before) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        _require_texts(texts)
        return [self.encode(text) for text in texts]

    def encode_within(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text when the text continues another text, so that no space is added before it."""
        return self.encode_batch(texts)

    def encode_after(self, text: str, before: Sequence[int]) -> list[int]:
        """Returns the ids of a text after the ids `before`. The text is a continuation if an ordinary token precedes it."""
        is_within = before and before[-1] not in self.special.values()
        return self.encode_within([text])[0] if is_within else self.encode(text)

    def encode_stream(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yields the ids of "".join(texts), one piece after another, in bounded memory (see rwkv/tokenizer/split.py)."""
        return (ids for _, ids in self.encode_pieces(texts))

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """Yields the text and the ids of each piece of "".join(texts), as encode_stream does."""
        before = 0
        for piece in pieces(texts, safe_split(self)):
            yield piece, self.encode(piece, before)
            before += len(piece)

    def drop_library(self) -> None:                      # noqa: B027  most tokenizers have none
        """Frees the memory of the library that encodes long texts. The next long text loads the library again."""

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """Decodes `ids`, which follow the ids `after`, and returns only the text of `ids`.

        Raises UserError if an id is outside the vocabulary.
        """
        return self.decoder(after).decode(_as_ids(ids))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes that `ids` stand for. Where decode has U+FFFD, a vocabulary of byte strings has the real bytes."""
        return self._new_decoder().decode_bytes(_as_ids(ids))

    def decode_start(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids` when further ids will follow, without an incomplete last character."""
        return "".join(map(self.decoder().push, ids))

    def names(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
        """Returns the text that each of `tokens` alone would add after the ids `before`, with "" for a special token."""
        return self._new_decoder().names(tokens, before)

    def tokens_as_bytes(self) -> list[bytes]:
        """Returns the bytes that each token adds to a text. Raises UserError if the bytes depend on neighbouring tokens."""
        return self._bytes

    @cached_property
    def has_bytes(self) -> bool:
        """Returns True if the bytes of every token are independent of other tokens, as grammars require."""
        try:
            self.tokens_as_bytes()
        except UserError:
            return False
        return True

    def starting(self, texts: Iterable[str]) -> set[int]:
        """Returns the ids of the special tokens whose names begin one of the texts. Leading white space is ignored."""
        return {index for text in texts for name, index in self.special.items() if text.lstrip().startswith(name)}

    @cached_property
    def hash(self) -> str:
        """Returns the SHA-256 of the vocabulary. Tokenizers with equal hashes produce equal ids for texts."""
        vocabulary = {name: value for name, value in self.to_dict().items() if name not in (special.KEY, SPECIAL)}
        return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()

    @property
    def data_key(self) -> str:
        """Returns a key for caches. Tokenizers with equal keys produce equal ids for documents and separators."""
        return self.hash

    def end_line(self) -> str | None:
        """Returns a line with the names of the tokens that end a text, or None for <|endoftext|> alone."""
        return None

    @staticmethod
    def from_dict(definition: JsonObject, end_of_text: str | None = None, option: str = "end_of_text") -> "Tokenizer":
        """Makes a tokenizer from a dictionary that to_dict returned. Raises UserError for any other dictionary.

        `end_of_text` is as in `named`, and `option` is the name of this option in error messages.
        """
        match definition:
            case {"kind": "json", "definition": str(text)}:
                ends = definition.get(special.KEY, special.ends_by_first_rule)
                return JsonTokenizer(text, end_of_text=end_of_text, ends=ends, option=option)
            case {"kind": "byte"}:
                tokenizer: Tokenizer = ByteTokenizer()
            case {"kind": "char", "characters": list(characters)}:
                tokenizer = CharTokenizer(characters)
            case {"kind": "world", "vocabulary": str(text)}:
                tokenizer = WorldTokenizer(text, special=definition.get(SPECIAL))
            case _:
                raise UserError("a tokenizer definition must have the kind byte, char, json or world, and its vocabulary")
        return _reject_option(tokenizer, end_of_text, option)

    @staticmethod
    def from_file(path: str | Path, end_of_text: str | None = None, like: JsonMapping | None = None,
                  option: str = "end_of_text") -> "Tokenizer":
        """Reads a tokenizer.json or a World vocabulary's .txt file. Raises UserError if the file is missing or invalid.

        `end_of_text` and `like` are as in `named`, and `option` is the name of `end_of_text` in error messages.
        """
        require_path("the tokenizer's file", path)
        path = path_of(path)
        text = read_text(path, _file_label(path))
        if path.suffix == ".txt":
            return _reject_option(WorldTokenizer(text, str(path)), end_of_text, option)
        if (vocabulary := world_json.vocabulary_in(text)) is not None:
            return _reject_option(WorldTokenizer(vocabulary, str(path)), end_of_text, option)
        return JsonTokenizer(text, str(path), end_of_text, _ends_of_same(text, like) or special.ends_by_rule, option)

    @staticmethod
    def named(name: str | Path, option: str = "tokenizer", end_of_text: str | None = None,
              like: JsonMapping | None = None) -> "Tokenizer":
        """Returns the tokenizer named byte, world (in an installed package), FILE.json or FILE.txt.

        Raises UserError for any other name.

        Args:
            option: the option that set the name, for error messages.
            end_of_text: the name of the token in FILE.json that ends a text; None for the token that the file implies.
            like: the definition of another tokenizer. If both are for the same file, the ends of text of `like` are used.
        """
        name = str(path_of(name)) if isinstance(name, Path) else name
        _require_known_name(name, option)
        if name == "byte":
            return _reject_option(ByteTokenizer(), end_of_text, end_option(option))
        return Tokenizer.from_file(_vocabulary_file(name), end_of_text, like, end_option(option))

    @staticmethod
    def check_named(name: str, option: str = "tokenizer", names: str = NAMES) -> None:
        """Raises UserError if `named` would reject the name, or if the file is missing. The vocabulary is not read.

        `option` and `names` are the option and its valid values, for error messages.
        """
        _require_known_name(name, option, names)
        if name != "byte":
            read_bytes(Path(_vocabulary_file(name)), _file_label(_vocabulary_file(name)), most=1)


def require_tokenizer_type(value: object) -> None:
    """Raises UserError unless the argument `tokenizer` of a function is a Tokenizer."""
    require_type("tokenizer", value, Tokenizer, 'a Tokenizer, such as Tokenizer.named("world") or Tokenizer.named("FILE.json")')


def _require_known_name(name: str, option: str, names: str = NAMES) -> None:
    require_type(option, name, str, names)
    on_hub = hub.parse(name)
    if name not in ("byte", "world") and not (on_hub.path if on_hub else name).endswith((".json", ".txt")):
        raise UserError(f"{option} must be {names}; got {name!r}")


def end_option(option: str) -> str:
    """Returns the end-of-text option that belongs to a tokenizer option, such as --end-of-text for --tokenizer."""
    prefix = option.removesuffix("tokenizer")
    return f"{prefix}{'end-of-text' if prefix == '--' else 'end_of_text'}"


def _vocabulary_file(name: str) -> str | Path:
    return world.installed_vocabulary() if name == "world" else hub.local(name, "tokenizer")


def _file_label(path: str | Path) -> str:
    return f"the tokenizer file {path}"


class ByteTokenizer(Tokenizer):
    """A tokenizer with one id per byte of UTF-8. Byte 0 is end_of_text, so a text must not contain U+0000."""

    kind = "byte"
    vocab_size = 256

    def _encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise WrongCharacter(text.index("\0"), "U+0000, but the byte tokenizer reserves byte 0 for the end of a text. "
                                 "Remove the character, or use another tokenizer")
        return list(text.encode())

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [b"", *(bytes([value]) for value in range(1, 256))]

    def to_dict(self) -> JsonObject:
        return {"kind": self.kind}


class CharTokenizer(Tokenizer):
    """A tokenizer with one id per distinct character of a text, in sorted order from 1. Id 0 is end_of_text."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self._ids = {character: index for index, character in enumerate(self.characters, start=1)}
        self.vocab_size = 1 + len(self.characters)

    def _encode(self, text: str) -> list[int]:
        if unknown := sorted({*text} - self._ids.keys()):
            shown = ", ".join(map(repr, unknown[:10])) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
            raise UserError(f"the char tokenizer cannot encode {shown}, because its vocabulary has only the "
                            f"{len(self.characters)} characters of the text from which the tokenizer was made. Remove these "
                            "characters from the text, or train with data.tokenizer=byte or data.tokenizer=bpe")
        return [self._ids[character] for character in text]

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [b"", *(character.encode() for character in self.characters)]

    def to_dict(self) -> JsonObject:
        return {"kind": self.kind, "characters": self.characters}


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    The name of a special token in a text is encoded as ordinary characters. Unknown characters are handled as the file
    specifies, but the file's truncation, padding, templates and BPE dropout are not applied. The constructor raises UserError
    if the file is invalid, or if no token is known to end a text.

    Args:
        text: the content of a tokenizer.json.
        source: the name of the file in error messages.
        end_of_text: the name of a token that ends texts instead of `ends`.
        ends: the ids that end a text, or a rule that finds these ids in the file.
        option: the name of `end_of_text` in error messages.
    """

    kind = "json"

    def __init__(self, text: str, source: str = "the tokenizer's definition", end_of_text: str | None = None,
                 ends: Sequence[int] | Rule = special.ends_by_rule, option: str = "end_of_text") -> None:
        parsed, tokens = _parse(text, source)
        chosen = ends(parsed) if callable(ends) else [*ends]
        if end_of_text is not None:
            chosen = special.end_named_by_user(parsed, end_of_text, source, option)
        if not chosen:
            raise special.unknown_end_error(parsed, source, option)
        if not {*chosen} <= {*tokens.values()}:
            raise UserError(f"{source} may be damaged: the vocabulary must contain all tokens that end a text, but lacks some "
                            f"of the ids {chosen}")
        ending = {name: index for name, index in tokens.items() if index in chosen}
        self.special = special.special_tokens(parsed) | ending
        renamed = special.with_private_names(parsed, self.special)
        with _as_user_error(f"{source} is not a `tokenizers` JSON file"):
            self._library = _load_library(json.dumps(renamed.content, ensure_ascii=False))
        self.definition = json.dumps(parsed, sort_keys=True, ensure_ascii=False)
        self.ends = tuple(chosen)
        self._by_first_rule = special.ends_by_first_rule(parsed)
        self.private = renamed.private
        self._byte_level = (parsed.get("decoder") or {}).get("type") == "ByteLevel"
        added = special.added_tokens(parsed)
        self._added = {token["id"] for token in added if token["content"] not in parsed["model"]["vocab"]}
        self.adds_space = any(step != parsed.get(name) for name, step in _continuation_steps(parsed).items())
        self.strips_spaces = any((token["lstrip"] or token["rstrip"]) and not token["special"] for token in added)
        self._unknown = special.unknown_token(parsed)
        self._skipped = {*self.special.values()} - {tokens.get(self._unknown or "")} | {*self.ends}
        self.vocab_size = 1 + max(self._library.get_vocab().values(), default=-1)
        if self.vocab_size > LARGEST:
            raise UserError(f"{source} may be damaged: token ids must be below {LARGEST}; got {self.vocab_size - 1}")

    def _encode(self, text: str) -> list[int]:
        return _encode_each(self._library, [text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return _encode_each(self._library, texts)

    def encode_within(self, texts: Sequence[str]) -> list[list[int]]:
        return _encode_each(self._library_within, texts)

    @cached_property
    def _library_within(self) -> tokenizers.Tokenizer:
        if not self.adds_space:
            return self._library
        content = json.loads(self._library.to_str())
        return _load_library(json.dumps(content | _continuation_steps(content)))

    def _new_decoder(self) -> Decoder:
        if self._byte_level:
            return super()._new_decoder()
        unknown = self._unknown or ""
        private = self.private.get(unknown)

        def decode(ids: list[int]) -> str:
            text = self._library.decode(ids, skip_special_tokens=False)
            return text.replace(private, unknown) if private else text

        return TextDecoder(decode, self.vocab_size, self._skipped)

    @cached_property
    def _bytes(self) -> list[bytes]:
        names = {private: name for name, private in self.private.items()}    # added tokens are not in byte-level BPE's alphabet
        tokens = [self._library.id_to_token(index) or "" for index in range(self.vocab_size)]
        return [b"" if index in self._skipped else names.get(token, token).encode() if index in self._added else
                token_bytes(names.get(token, token)) for index, token in enumerate(tokens)]

    def tokens_as_bytes(self) -> list[bytes]:
        if self._byte_level:
            return self._bytes
        decoder = json.loads(self._library.to_str()).get("decoder") or {"type": "none"}
        kinds = [step["type"] for step in decoder.get("decoders", [decoder])]
        if not {*kinds} <= {*JOINING}:
            raise UserError("grammars require a tokenizer whose tokens always stand for the same bytes, but this tokenizer has "
                            f"the decoder {', '.join(kinds)}")
        names = [self._library.id_to_token(index) or "" for index in range(self.vocab_size)]
        matches = [BYTE_TOKEN.fullmatch(name) for name in names]
        plain = next((index for index, byte in enumerate(matches) if not byte and index not in self._skipped), None)
        texts = self.names(range(self.vocab_size), () if plain is None else (plain,))
        return [bytes([int(byte[1], 16)]) if byte else text.encode() for byte, text in zip(matches, texts, strict=True)]

    @property
    def data_key(self) -> str:
        """Returns the hash and the end-of-text id. Caches of earlier versions, which omitted a default id, are not reused."""
        return f"{self.hash} {self.end_of_text}"

    def end_line(self) -> str | None:
        names = {index: name for name, index in self.special.items()}
        if [names.get(index) for index in self.ends] == [END_OF_TEXT]:
            return None
        shown = [f"{names.get(index, '')} (token {index})" for index in self.ends]
        return shown[0] + (f", and also {', '.join(shown[1:])}" if shown[1:] else "")

    def to_dict(self) -> JsonObject:
        return special.definition(self.definition, self.ends, self._by_first_rule)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "JsonTokenizer":
        """Trains a byte-level BPE with end_of_text, the 256 bytes and as many merges as `vocab_size` and `texts` allow.

        A signal can interrupt the library's computation only in the main thread.
        """
        if vocab_size < 257:
            raise UserError(f"data.vocab_size must be at least 257, for {END_OF_TEXT} and the 256 bytes; got {vocab_size}")
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        words = (part for text in texts for part in without_long_runs(text))
        consume_interruptibly(words, lambda stoppable: library.train_from_iterator(stoppable, trainer))
        return cls(library.to_str())


class WorldTokenizer(Tokenizer):
    """A tokenizer with the RWKV World vocabulary.

    vocab_size is 65536, as in the released models: the number of ids in use (0 to 65529), rounded up to a multiple of 64.
    Unused ids decode to nothing.

    Args:
        text: the content of a vocabulary file.
        source: its name in error messages.
        special: the ids, by name, of special tokens, which are id 0 or unused ids of the vocabulary.
    """

    kind = "world"

    def __init__(self, text: str, source: str = "the tokenizer's definition", special: Mapping[str, int] | None = None) -> None:
        self._vocabulary = world.Vocabulary.parse(text, source)
        self.special = dict(special or {})
        wrong = [name for name, index in self.special.items() if self._vocabulary.has(index)]
        if wrong:
            raise UserError(f"{source} gives the special token {wrong[0]} the id of another token")
        self.vocab_size = -(-max(len(self._vocabulary.tokens), *(index + 1 for index in self.special.values()), 0) // 64) * 64
        secret = secrets.token_hex(16)
        self.private = {name: f"{secret}x{place}z" for place, name in enumerate(self.special)}
        self._private_name = re.compile(f"({secret}x[0-9]+z)")

    def _encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        _require_texts(texts)
        if not self.special:
            return self._vocabulary.encode_batch(list(texts))
        cut = [self._private_name.split(text) for text in texts]         # every second piece is a private name
        ids = iter(self._vocabulary.encode_batch([piece for pieces in cut for piece in pieces[::2]]))
        by_private_name = {self.private[name]: index for name, index in self.special.items()}
        return [[token for place, piece in enumerate(pieces)
                 for token in ([by_private_name[piece]] if place % 2 else next(ids))] for pieces in cut]

    def drop_library(self) -> None:
        self._vocabulary.drop_library()

    @cached_property
    def _bytes(self) -> list[bytes]:
        tokens = self._vocabulary.tokens
        return tokens + [b""] * (self.vocab_size - len(tokens))

    def to_dict(self) -> JsonObject:
        special_tokens = {SPECIAL: dict(self.special)} if self.special else {}
        return {"kind": self.kind, "vocabulary": self._vocabulary.to_text(), **special_tokens}

    @property
    def data_key(self) -> str:
        return f"{self.hash} {sorted(self.special.items())}" if self.special else self.hash


def _as_ids(ids: object) -> list[int]:
    """Returns `ids`, which may be an array or a tensor, as a list. Raises UserError unless it contains whole numbers."""
    try:
        return [operator.index(token) for token in cast(Iterable[SupportsIndex], ids)]
    except TypeError:
        raise UserError(f"ids must be a list of token ids; got {ids!r:.60}") from None


def _require_texts(texts: Iterable[str]) -> None:
    """Raises UserError unless `texts` contains strings that are valid Unicode."""
    if isinstance(texts, str):
        raise UserError("texts must be a list of strings; got a str")
    for text in texts:
        require_unicode(text)


def _reject_option(tokenizer: Tokenizer, end_of_text: str | None, option: str) -> Tokenizer:
    if end_of_text is not None:
        raise UserError(f"{option} requires a tokenizer.json file, but the {tokenizer.kind} tokenizer always ends a text with "
                        f"token 0. Omit {option}")
    return tokenizer


def _ends_of_same(text: str, like: JsonMapping | None) -> Sequence[int] | Rule | None:
    """Returns the ends of text in `like`, or None unless `like` is the definition of a file with the content `text`."""
    if not like or like.get("kind") != "json":
        return None
    try:
        same = json.loads(text) == json.loads(like["definition"])
    except (ValueError, RecursionError):
        return None
    return like.get(special.KEY, special.ends_by_first_rule) if same else None


def _parse(text: str, source: str) -> tuple[JsonObject, dict[str, int]]:
    """Returns a parsed tokenizer.json and its vocabulary. Raises UserError with the library's message if parts are missing."""
    with _as_user_error(f"{source} is not a `tokenizers` JSON file"):
        try:
            parsed = json.loads(text)
            special.special_tokens(parsed)
            return parsed, special.vocabulary(parsed)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            tokenizers.Tokenizer.from_str(text)
            raise


def _continuation_steps(parsed: JsonObject) -> JsonObject:
    """Returns the normalizer and pre_tokenizer for a text that continues another text, so that no space is added before it.

    A step that comes after the text has been split into words acts on every word, so such a step is not changed.
    """
    cut = parsed.get("pre_tokenizer")
    if cut is not None and cut["type"] == "Sequence":
        cut = {**cut, "pretokenizers": [*map(_without_space, cut["pretokenizers"][:1]), *cut["pretokenizers"][1:]]}
    return {"normalizer": _without_space(parsed.get("normalizer")), "pre_tokenizer": _without_space(cut)}


def _without_space(step: JsonObject | None) -> JsonObject | None:
    kind = None if step is None else step["type"]
    if step is None or kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if kind == "ByteLevel" and step.get("add_prefix_space"):
        return {**step, "add_prefix_space": False}
    if kind == "Sequence" and "normalizers" in step:
        return {**step, "normalizers": [inner for inner in map(_without_space, step["normalizers"]) if inner is not None]}
    return step


def _encode_each(library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    _require_texts(texts)
    # encode_batch also returns offsets, which takes twice the time and far more memory
    with _as_user_error("the tokenizer cannot encode the text"):
        return [encoding.ids for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False)]


def _load_library(text: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    if isinstance(library.model, tokenizers.models.BPE):
        library.model.dropout = None     # with dropout, a text would get different ids at each call
    return library


@contextmanager
def _as_user_error(problem: str) -> Iterator[None]:
    """Converts any error of the library to a UserError, including a panic of its Rust code, which is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {error}") from None
