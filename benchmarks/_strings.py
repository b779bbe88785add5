"""Makes random strings on which tokenizers could differ: every script, mixtures of scripts, long runs of one character."""

import random
from collections.abc import Iterator, Sequence

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n\t.,;:=(){}[]\"'#_-*"
RANGES = ((0x20, 0x7F), (0, 0x20), (0x80, 0x250), (0x370, 0x530), (0x600, 0x6FF), (0x900, 0x97F), (0x2000, 0x2100),
          (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xFFFF), (0x1F300, 0x1FAFF), (0x10000, 0x10FFFF))


def unicode_strings(count: int, seed: int = 0) -> Iterator[str]:
    """Yields in turn random words, characters of one script, mixtures of scripts, and a run of one character before words."""
    choose = random.Random(seed)
    for index in range(count):
        length = choose.randrange(1, 60)
        script = choose.choice(RANGES)
        words = "".join(choose.choices(LETTERS, k=length))
        mixed = _characters(choose, choose.choices(RANGES, k=length))
        yield (words, _characters(choose, [script] * length), mixed, _characters(choose, [script]) * length + words)[index % 4]


def _characters(choose: random.Random, ranges: Sequence[tuple[int, int]]) -> str:
    return "".join(chr(choose.randrange(*bounds)) for bounds in ranges)
