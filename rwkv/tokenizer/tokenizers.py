"""Text to token ids and back: bytes, characters, every file of the `tokenizers` library, and the RWKV World vocabulary.

A tokenizer's ids are 0..vocab_size-1. `end_of_text` (0, unless a JSON file names another) stands before every document in the
data and ends a generated text; `encode` never returns it, and it decodes to nothing. `decode` and `decoder` take any sequence
of ids; bytes that are not UTF-8 become U+FFFD. A checkpoint holds its whole tokenizer and its hash; a tokenizer that is used
with it must have the same hash.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rwkv.errors import UserError
from rwkv.io.utf8 import WrongCharacter, read_text, require_unicode
from rwkv.tokenizer import world
from rwkv.tokenizer.decoders import BytesDecoder, Decoder, TextDecoder, token_bytes
from rwkv.tokenizer.split import pieces, safe_split

END_OF_TEXT = "<|endoftext|>"
NAMES = "byte, world, or the path of a `tokenizers` .json file or of a World vocabulary's .txt file"


class Tokenizer(ABC):
    """Encodes any text that its vocabulary covers, and decodes any ids.

    strips_spaces: some token includes the spaces beside it, so that a text cannot be split safely (rwkv/tokenizer/split.py).
    """

    kind: str
    vocab_size: int
    end_of_text: int = 0
    strips_spaces: bool = False

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The whole definition, for `from_dict`: `kind`, and strings or lists of strings."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """The ids of a text that is valid Unicode."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """A new incremental decoder."""

    def encode(self, text: str, before: int = 0) -> list[int]:
        """The ids of `text`. Raises UserError if the vocabulary does not cover it.

        `before`: the number of characters before it in a longer text; an error counts its place from there.
        """
        try:
            require_unicode(text)
            return self._encode(text)
        except WrongCharacter as error:
            raise error.after(before) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """encode() of each text."""
        return [self.encode(text) for text in texts]

    def encode_stream(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """The ids of "".join(texts), piece by piece, in bounded memory (see rwkv/tokenizer/split.py)."""
        return (ids for _, ids in self.encode_pieces(texts))

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """As encode_stream, with the text of each piece."""
        before = 0
        for piece in pieces(texts, safe_split(self)):
            yield piece, self.encode(piece, before)
            before += len(piece)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, as `decoder` would give it piece by piece. Raises UserError for an id outside the vocabulary."""
        return self.decoder().decode(ids)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the definition: tokenizers with equal hashes give equal ids."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def from_dict(definition: dict[str, Any]) -> "Tokenizer":
        """The tokenizer that to_dict described. Raises UserError for any other dictionary."""
        match definition:
            case {"kind": "byte"}:
                return ByteTokenizer()
            case {"kind": "char", "characters": list(characters)}:
                return CharTokenizer(characters)
            case {"kind": "json", "definition": str(text)}:
                return JsonTokenizer(text)
            case {"kind": "world", "vocabulary": str(text)}:
                return WorldTokenizer(text)
        raise UserError("not a tokenizer's definition: expected the kind byte, char, json or world, and its vocabulary")

    @staticmethod
    def from_file(path: str | Path) -> "Tokenizer":
        """From a `tokenizers` .json or a World vocabulary's .txt file. Raises UserError if it is missing or wrong."""
        text = read_text(Path(path), f"the tokenizer file {path}")
        return WorldTokenizer(text, str(path)) if Path(path).suffix == ".txt" else JsonTokenizer(text, str(path))

    @staticmethod
    def named(name: str, option: str = "tokenizer", names: str = NAMES) -> "Tokenizer":
        """The tokenizer byte, world (from an installed package), FILE.json or FILE.txt. Raises UserError for other names.

        option, names: the option and its legal values, for the message.
        """
        if name == "byte":
            return ByteTokenizer()
        if name != "world" and not name.endswith((".json", ".txt")):
            raise UserError(f"{option} is {names}; got {name!r}")
        return Tokenizer.from_file(world.installed() if name == "world" else name)


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8. Byte 0 is end_of_text: a text that contains U+0000 is refused."""

    kind = "byte"
    vocab_size = 256

    def _encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise WrongCharacter(text.index("\0"), "U+0000, which data.tokenizer=byte reserves for the end of a text: "
                                 "remove it, or use data.tokenizer=bpe")
        return list(text.encode())

    def decoder(self) -> Decoder:
        return BytesDecoder(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [b"", *(bytes([value]) for value in range(1, 256))]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}


class CharTokenizer(Tokenizer):
    """The distinct characters of a text, sorted, from id 1 on; id 0 is end_of_text."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self._ids = {character: index for index, character in enumerate(self.characters, start=1)}
        self.vocab_size = 1 + len(self.characters)

    def _encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            raise UserError(self._unknown(text)) from None

    def _unknown(self, text: str) -> str:
        unknown = sorted(set(text) - set(self.characters))
        shown = ", ".join(map(repr, unknown[:10])) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
        return (f"{shown}: not among the {len(self.characters)} characters of the text that the char tokenizer was made from; "
                "remove them, or train with data.tokenizer=byte or bpe")

    def decoder(self) -> Decoder:
        return BytesDecoder(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [b"", *(character.encode() for character in self.characters)]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, from the text of its JSON file; `source` is the file's name in errors.

    Special tokens written out in a text are encoded as ordinary characters. The file's truncation, padding and templates are
    not applied; unknown characters are handled as the file specifies.
    """

    kind = "json"

    def __init__(self, text: str, source: str = "the tokenizer's definition") -> None:
        self._library = _parse(text, source)
        parsed = json.loads(text)
        self.definition = json.dumps(parsed, sort_keys=True, ensure_ascii=False)
        self._byte_level = (parsed.get("decoder") or {}).get("type") == "ByteLevel"
        added = parsed.get("added_tokens", [])
        self.strips_spaces = any((token["lstrip"] or token["rstrip"]) and not token["special"] for token in added)
        self._special = {token["id"] for token in added if token["special"]}
        self.vocab_size = 1 + max(self._library.get_vocab().values(), default=-1)
        self.end_of_text = self._find_end_of_text(source)
        self._special.add(self.end_of_text)

    def _find_end_of_text(self, source: str) -> int:
        named = self._library.token_to_id(END_OF_TEXT)
        if named is None and 0 not in self._special:
            raise UserError(f"{source} has no token that separates documents: no {END_OF_TEXT} and no special token 0")
        return named or 0

    def _encode(self, text: str) -> list[int]:
        return self._encode_each([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            require_unicode(text)
        return self._encode_each(list(texts))

    def _encode_each(self, texts: list[str]) -> list[list[int]]:
        """The fast call leaves out each token's place in the text, which takes twice the time and many times the memory."""
        with _as_user_error("the tokenizer cannot encode the text"):
            return [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]

    def decoder(self) -> Decoder:
        if self._byte_level:
            return BytesDecoder(self._bytes)
        return TextDecoder(self._library.decode, self.vocab_size, self._special)

    @cached_property
    def _bytes(self) -> list[bytes]:
        tokens = (self._library.id_to_token(index) for index in range(self.vocab_size))
        return [b"" if index in self._special else token_bytes(token or "") for index, token in enumerate(tokens)]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "definition": self.definition}

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "JsonTokenizer":
        """Byte-level BPE: the ids are end_of_text, the 256 bytes, then merges, as many as `vocab_size` and `texts` allow."""
        if vocab_size < 257:
            raise UserError(f"data.vocab_size must be at least 257, for {END_OF_TEXT} and the 256 bytes; got {vocab_size}")
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        library.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        return cls(library.to_str())


class WorldTokenizer(Tokenizer):
    """The RWKV World vocabulary, from the text of its file; `source` is the file's name in errors.

    vocab_size is that of the published models, 65536: the ids in use, 0 to 65529, rounded up to a multiple of 64. The ids
    above decode to nothing.
    """

    kind = "world"

    def __init__(self, text: str, source: str = "the tokenizer's definition") -> None:
        self._vocabulary = world.Vocabulary.parse(text, source)
        self.vocab_size = -(-len(self._vocabulary.tokens) // 64) * 64

    def _encode(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            require_unicode(text)
        return self._vocabulary.encode_batch(list(texts))

    def decoder(self) -> Decoder:
        return BytesDecoder(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        tokens = self._vocabulary.tokens
        return tokens + [b""] * (self.vocab_size - len(tokens))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocabulary": self._vocabulary.to_text()}


def _parse(text: str, source: str) -> tokenizers.Tokenizer:
    with _as_user_error(f"{source} is not a `tokenizers` JSON file"):
        library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


@contextmanager
def _as_user_error(problem: str) -> Iterator[None]:
    """Turns any error of the library into a UserError; a panic of its Rust code is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {error}") from None
