"""Tests that a randomly damaged file of any format loads a whole model or raises CheckpointError, and never hangs."""

import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from files import NAMES, each_held, loads
from models import small_model
from torch import Tensor

from rwkv.checkpoint.files import Checkpoint, checkpoint_of, write_checkpoint
from rwkv.tokenizer.tokenizers import CharTokenizer, JsonTokenizer

IN_SUITE, IN_SOAK = 10, 200                  # trials per format; RWKV-7 has six formats
MOST_MEMORY = 4 << 30                        # address space: a damaged size must not be allocated

Damage = Callable[[Path, random.Random], None]


def truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:chance.randrange(len(content))])


def flip_bytes(path: Path, chance: random.Random) -> None:
    """Changes a few bytes, half of the time near the beginning or the end, where the sizes and names are."""
    content = bytearray(path.read_bytes())
    near = chance.choice([len(content), min(len(content), 400)])
    for _ in range(chance.choice([1, 1, 3, 20])):
        place = chance.randrange(near) * chance.choice([1, -1])
        content[place] ^= chance.randrange(1, 256)
    path.write_bytes(content)


def remove_or_repeat(path: Path, chance: random.Random) -> None:
    """Removes or repeats a piece of the bytes."""
    content = path.read_bytes()
    start = chance.randrange(len(content))
    end = min(len(content), start + chance.choice([1, 4, 64, 5000]))
    path.write_bytes(content[:start] + chance.choice([b"", 2 * content[start:end]]) + content[end:])


def zero(path: Path, chance: random.Random) -> None:
    """Sets a block of the bytes to zero, as if the disk had lost the block."""
    content = path.read_bytes()
    start = chance.randrange(len(content))
    length = min(len(content) - start, chance.choice([8, 512, 4096]))
    path.write_bytes(content[:start] + bytes(length) + content[start + length:])


BYTES: tuple[Damage, ...] = (truncate, flip_bytes, remove_or_repeat, zero)


def swap(checkpoint: Checkpoint, chance: random.Random) -> None:
    one, other = chance.sample(sorted(checkpoint.weights), 2)
    stored = checkpoint.weights.stored
    stored[one], stored[other] = stored[other].rename(one), stored[one].rename(other)


def change_dtype(checkpoint: Checkpoint, chance: random.Random) -> None:
    name = chance.choice(sorted(checkpoint.weights))
    checkpoint.weights.stored[name] = checkpoint.weights.stored[name].cast(chance.choice([torch.float16, torch.bfloat16]))


def drop(checkpoint: Checkpoint, chance: random.Random) -> None:
    del checkpoint.weights.stored[chance.choice(sorted(checkpoint.weights)[1:])]


TENSORS: tuple[Callable[[Checkpoint, random.Random], None], ...] = (swap, change_dtype, drop)


SIZES = {"rwkv4": {"n_layer": 2, "n_embd": 4, "n_att": 6}, "rwkv7": {"n_layer": 2, "n_embd": 4, "head_size": 2}}
HEAD = {"n_embd": 64, "n_ffn": 4, "head_size": 64}           # the smallest that Hugging Face directories of RWKV-7 can have


BPE = JsonTokenizer.train([], 257)


def small(generation: str, format: str) -> Checkpoint:
    tokenizer = BPE if format == "gguf" else CharTokenizer("abü")
    more = HEAD if (generation, format) == ("rwkv7", "huggingface") else {}
    return checkpoint_of(weights(generation, tokenizer.vocab_size + 5, **more), tokenizer)


@cache
def weights(generation: str, vocab_size: int, **sizes: int) -> dict[str, Tensor]:
    return small_model("reference", vocab_size, generation=generation, **{**SIZES[generation], **sizes}).state_dict()


def trial(folder: Path, generation: str, format: str, seed: int) -> bool:
    """Damages one file and returns whether it still loads."""
    chance, path = random.Random(f"{generation} {format} {seed}"), folder / f"{seed}-{NAMES[format]}"
    checkpoint = small(generation, format)
    if seed % 3 == 0:
        chance.choice(TENSORS)(checkpoint, chance)
    try:
        write_checkpoint(checkpoint, path, format=format)
    except (ValueError, KeyError, RuntimeError):         # the writer refuses some changes: damage the file's bytes instead
        write_checkpoint(small(generation, format), path, format=format)
    if seed % 3:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        chance.choice(BYTES)(chance.choice(files), chance)
    return loads(path)


@pytest.mark.thorough
@each_held
def test_damage_is_refused_or_harmless(tmp_path: Path, generation: str, format: str) -> None:
    outcomes = [trial(tmp_path, generation, format, seed) for seed in range(IN_SUITE)]
    assert not all(outcomes)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux alone")
@each_held
def test_damage_at_length(tmp_path: Path, generation: str, format: str, address_space: None) -> None:
    outcomes = [trial(tmp_path, generation, format, seed) for seed in range(IN_SUITE, IN_SUITE + IN_SOAK)]
    print(json.dumps({"generation": generation, "format": format, "loaded": sum(outcomes), "refused": outcomes.count(False)}))
    assert not all(outcomes)


@pytest.fixture
def address_space():  # type: ignore[no-untyped-def]
    """Limits the address space, so that allocating a wrong size raises MemoryError, which fails the test."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
