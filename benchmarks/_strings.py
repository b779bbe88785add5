"""Random strings on which tokenizers may differ: every script, truncated characters, invalid bytes, long runs."""

import random
from collections.abc import Iterator, Sequence

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n\t.,;:=(){}[]\"'#_-*"
RANGES = ((0x20, 0x7F), (0, 0x20), (0x80, 0x250), (0x370, 0x530), (0x600, 0x6FF), (0x900, 0x97F), (0x2000, 0x2100),
          (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFF), (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF))


def unicode_strings(count: int, seed: int = 0) -> Iterator[str]:
    """Alternates random words, characters of one script, mixtures, and a run of one character before words."""
    choose = random.Random(seed)
    for index in range(count):
        length, script = choose.randrange(1, 60), choose.choice(RANGES)
        words = "".join(choose.choices(LETTERS, k=length))
        mixed = _characters(choose, choose.choices(RANGES, k=length))
        yield (words, _characters(choose, [script] * length), mixed, _characters(choose, [script]) * length + words)[index % 4]


def byte_strings(count: int, seed: int = 1) -> Iterator[bytes]:
    """Alternates random bytes, text cut at any byte, and text with a few wrong bytes."""
    choose = random.Random(seed)
    for index, text in enumerate(unicode_strings(count, seed)):
        data = text.encode()
        half = len(data) // 2
        cut = data[choose.randrange(1 + half):choose.randrange(half, 1 + len(data))]
        yield (choose.randbytes(choose.randrange(1, 60)), cut, _damaged(choose, data))[index % 3]


def _characters(choose: random.Random, ranges: Sequence[tuple[int, int]]) -> str:
    return "".join(chr(choose.randrange(*bounds)) for bounds in ranges)


def _damaged(choose: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(choose.randrange(1, 4)):
        damaged[choose.randrange(len(damaged))] = choose.randrange(256)
    return bytes(damaged)
