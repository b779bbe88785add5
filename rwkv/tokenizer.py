"""Text to token ids and back: byte, char, whatever the `tokenizers` library can read or train, and the RWKV World vocabulary.

A Tokenizer's ids are 0..vocab_size-1. `end_of_text` (0 for all but a JSON file that says otherwise) stands before every
document in the data, ends a generated text, never comes out of `encode`, and decodes to nothing. `decode` and `decoder`
take any sequence of ids: what is not UTF-8 becomes U+FFFD, one character at the earliest moment that it is certain.
A checkpoint carries its tokenizer whole, with its hash; what is used with it must have the same.
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

from rwkv import world
from rwkv.decoders import BytesDecoder, Decoder, TextDecoder, token_bytes
from rwkv.utf8 import WrongCharacter, require_unicode

END_OF_TEXT = "<|endoftext|>"
NAMES = "byte, world, or the path of a `tokenizers` .json file or of a World vocabulary's .txt file"


class Tokenizer(ABC):
    """Encodes any text that its vocabulary covers, decodes any ids, and describes itself in plain containers."""

    kind: str
    vocab_size: int
    end_of_text: int = 0

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything that `from_dict` needs: `kind` and strings or lists of strings."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """The ids of a text that is known to be valid Unicode."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """A new incremental decoder."""

    def encode(self, text: str, before: int = 0) -> list[int]:
        """The ids of `text`. Raises ValueError where the vocabulary does not cover it.

        `before`: the characters in front of it in a longer text, in which an error's place is counted.
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
        """The ids of "".join(texts), in parts; what is in memory does not grow with the text, where `_settled` sees to that."""
        rest, before = "", 0
        for text in texts:
            rest += text
            end = self._settled(rest)
            if end:
                yield self.encode(rest[:end], before)
                rest, before = rest[end:], before + end
        if rest:
            yield self.encode(rest, before)

    def _settled(self, text: str) -> int:
        """How many characters at the beginning of `text` have the ids that they have alone, and so has what follows them."""
        return len(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: what `decoder` gives, in one piece."""
        return self.decoder().decode(ids)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the definition: two tokenizers with the same hash give the same ids."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @staticmethod
    def from_dict(definition: dict[str, Any]) -> "Tokenizer":
        """The inverse of to_dict. Raises ValueError for anything else."""
        match definition:
            case {"kind": "byte"}:
                return ByteTokenizer()
            case {"kind": "char", "characters": list(characters)}:
                return CharTokenizer(characters)
            case {"kind": "json", "definition": str(text)}:
                return JsonTokenizer(text)
            case {"kind": "world", "vocabulary": str(text)}:
                return WorldTokenizer(text)
        raise ValueError("not a tokenizer's description: expected kind byte, char, json or world, with what belongs to it")

    @staticmethod
    def from_file(path: str | Path) -> "Tokenizer":
        """A `tokenizers` .json file or a World vocabulary's .txt. Raises ValueError where it is missing or something else."""
        text = _read(Path(path))
        return WorldTokenizer(text, str(path)) if Path(path).suffix == ".txt" else JsonTokenizer(text, str(path))

    @staticmethod
    def named(name: str, option: str = "tokenizer", names: str = NAMES) -> "Tokenizer":
        """byte, world (from an installed package), FILE.json or FILE.txt. Raises ValueError for anything else."""
        if name == "byte":
            return ByteTokenizer()
        if name != "world" and not name.endswith((".json", ".txt")):
            raise ValueError(f"{option} is {names}; got {name!r}")
        return Tokenizer.from_file(world.installed() if name == "world" else name)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes. Byte 0 is end_of_text: a text that contains U+0000 is refused."""

    kind = "byte"
    vocab_size = 256

    def _encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise WrongCharacter(text.index("\0"), "U+0000, which data.tokenizer=byte keeps for the end of a text: remove it, "
                                 "or use data.tokenizer=bpe")
        return list(text.encode())

    def decoder(self) -> Decoder:
        return BytesDecoder([b"", *(bytes([value]) for value in range(1, 256))])

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
            raise ValueError(self._unknown(text)) from None

    def _unknown(self, text: str) -> str:
        unknown = sorted(set(text) - set(self.characters))
        shown = ", ".join(map(repr, unknown[:10])) + (f" and {len(unknown) - 10} more" if len(unknown) > 10 else "")
        return (f"{shown}: not among the {len(self.characters)} characters of the text that the char tokenizer was made from; "
                "leave out what it lacks, or train with data.tokenizer=byte or bpe")

    def decoder(self) -> Decoder:
        return BytesDecoder([b"", *(character.encode() for character in self.characters)])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, from the text of its JSON file; `source` is its name in errors.

    Special tokens written out in a text are encoded as the ordinary characters that they are. Truncation, padding and
    templates that the file asks for are left out; what it does with characters that it lacks is its own affair.
    """

    kind = "json"

    def __init__(self, text: str, source: str = "the tokenizer's definition") -> None:
        self._library = _parse(text, source)
        parsed = json.loads(text)
        self.definition = json.dumps(parsed, sort_keys=True, ensure_ascii=False)
        self._byte_level = (parsed.get("decoder") or {}).get("type") == "ByteLevel"
        self._splits_at_lines = _splits_at_lines(parsed)
        self._special = {token["id"] for token in parsed.get("added_tokens", []) if token["special"]}
        self.vocab_size = 1 + max(self._library.get_vocab().values(), default=-1)
        self.end_of_text = self._find_end_of_text(source)
        self._special.add(self.end_of_text)

    def _find_end_of_text(self, source: str) -> int:
        named = self._library.token_to_id(END_OF_TEXT)
        if named is None and 0 not in self._special:
            raise ValueError(f"{source} has no token that separates documents: no {END_OF_TEXT} and no special token 0")
        return named or 0

    def _encode(self, text: str) -> list[int]:
        return self._encode_each([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            require_unicode(text)
        return self._encode_each(list(texts))

    def _encode_each(self, texts: list[str]) -> list[list[int]]:
        """Without each token's place in the text, which takes twice the time and many times the memory."""
        with _sentence("the tokenizer cannot encode the text"):
            return [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]

    def _settled(self, text: str) -> int:
        return _last_line_end(text) if self._splits_at_lines else 0

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
        """Byte-level BPE; its ids are end_of_text, the 256 bytes, then merges up to `vocab_size` or as `texts` allow."""
        if vocab_size < 257:
            raise ValueError(f"data.vocab_size is at least 257, for {END_OF_TEXT} and the 256 bytes; got {vocab_size}")
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        library.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
        return cls(library.to_str())


class WorldTokenizer(Tokenizer):
    """The RWKV World vocabulary, from the text of its file; `source` is its name in errors.

    vocab_size is that of the published models, 65536: the ids in use, 0 to 65529, rounded up to a multiple of 64. Those
    beyond decode to nothing.
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

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes, UTF-8 or not."""
        return self._vocabulary.encode_bytes(data)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, exactly: the inverse of encode_bytes. Raises ValueError for an id outside the vocabulary."""
        return self.decoder().decode_bytes(ids)

    def _settled(self, text: str) -> int:
        return self._vocabulary.settled(text)

    def decoder(self) -> BytesDecoder:
        return BytesDecoder(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        tokens = self._vocabulary.tokens
        return tokens + [b""] * (self.vocab_size - len(tokens))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocabulary": self._vocabulary.to_text()}


def build(kind: str, texts: Sequence[str], vocab_size: int = 2048) -> Tokenizer:
    """What data.tokenizer names: char (of `texts`), bpe (trained on `texts`, with vocab_size), or what `named` knows."""
    if kind == "char":
        return CharTokenizer(set().union(*texts))
    if kind == "bpe":
        return JsonTokenizer.train(texts, vocab_size)
    return Tokenizer.named(kind, "data.tokenizer", f"char, bpe, {NAMES}")


def _splits_at_lines(parsed: dict[str, Any]) -> bool:
    """Whether the file's rules never look across the place between a character and a newline after it.

    So it is with GPT-2's and GPT-NeoX's: words do not contain spaces, and NFC never joins anything to a newline.
    """
    words = parsed.get("pre_tokenizer") or {}
    normal = (parsed.get("normalizer") or {"type": "NFC"})["type"] == "NFC"
    whole = any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in parsed.get("added_tokens", []))
    return (normal and not whole and words.get("type") == "ByteLevel" and not words.get("add_prefix_space")
            and words.get("use_regex", True))


def _last_line_end(text: str) -> int:
    """Where the last newline is that follows a character which is no space; 0 for none."""
    end = text.rfind("\n")
    while end > 0 and text[end - 1].isspace():
        end = text.rfind("\n", 0, end)
    return max(end, 0)


def _parse(text: str, source: str) -> tokenizers.Tokenizer:
    with _sentence(f"{source} is not a `tokenizers` JSON file"):
        library = tokenizers.Tokenizer.from_str(text)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


@contextmanager
def _sentence(said: str) -> Iterator[None]:
    """Turns what the library raises into a ValueError: Exception, and BaseException where its Rust code panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{said}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a tokenizer's file: it is not UTF-8") from None
