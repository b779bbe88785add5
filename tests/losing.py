"""Makes tokenizers that lose characters which their vocabulary lacks."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models

from rwkv.tokenizer.tokenizers import END_OF_TEXT, JsonTokenizer


def dropping(characters: Iterable[str]) -> JsonTokenizer:
    """Returns a tokenizer that has a token for each of the characters and drops all others."""
    library = tokenizers.Tokenizer(models.BPE(vocab=_numbered([END_OF_TEXT, *characters]), merges=[]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([END_OF_TEXT])
    return JsonTokenizer(library.to_str())


def with_unknown(characters: Iterable[str], special: bool = True) -> JsonTokenizer:
    """Returns a tokenizer with a token for each of the characters, and an unknown token for all others."""
    vocabulary = _numbered([END_OF_TEXT, "[UNK]", *characters])
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([END_OF_TEXT, *["[UNK]"] * special])
    return JsonTokenizer(library.to_str())


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
