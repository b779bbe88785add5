"""Tests of shards: their content, which is the same for any number of workers and interruptions, and the repair of damage."""

import dataclasses
import errno
import gzip
import os
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from forked import Forked
from losing import dropping, with_unknown
from tokenizer_files import chatml

from rwkv.config import DataConfig
from rwkv.data import shards
from rwkv.data.prepare import Corpus, prepare
from rwkv.data.sources import open_source
from rwkv.errors import UserError
from rwkv.tokenizer.lost_bytes import Lost
from rwkv.tokenizer.tokenizers import JsonTokenizer

TEXT = "".join(f"line {number}: the quick brown fox — {number * number % 97}\n" for number in range(400))
SHARD = 2000


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return DataConfig(name="text", path=str(tmp_path / "text.txt"), tokenizer="bpe", vocab_size=300,
                      cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Writes 50 small files, a few of which fill a shard, and returns their configuration."""
    monkeypatch.setattr(shards, "SHARD", SHARD)
    (tmp_path / "library").mkdir()
    for number in range(50):
        (tmp_path / "library" / f"{number}.txt").write_text(f"{number}\n" + TEXT[:number * 40])
    return DataConfig(name="text", path=str(tmp_path / "library"), tokenizer="bpe", vocab_size=300,
                      cache_dir=str(tmp_path / "cache"))


def with_text(config: DataConfig, text: str) -> DataConfig:
    Path(str(config.path)).write_bytes(text.encode())
    return config


def tokens_of(prepared: Corpus) -> tuple[list[int], list[int]]:
    return prepared.train[:].tolist(), prepared.val[:].tolist()


def splits_of(config: DataConfig) -> tuple[list[str], list[str]]:
    documents = [("".join(document.chunks), document.val)
                 for document in open_source(config, Path(config.cache_dir)).documents()]
    return [text for text, val in documents if not val], [text for text, val in documents if val]


def shards_in(cache: Path) -> dict[str, bytes]:
    """Returns the bytes of each file of token ids, by the file's name."""
    return {path.name: path.read_bytes() for path in sorted(cache.glob("tokens-*/*.ids"))}


# Content


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe", "world"])
def test_tokens_are_each_document_after_end_of_text(library: DataConfig, tokenizer: str) -> None:
    library = dataclasses.replace(library, tokenizer=tokenizer)
    prepared = prepare(library, 16)
    assert len(shards_in(Path(library.cache_dir))) > 10
    for split, tokens in zip(splits_of(library), (prepared.train, prepared.val), strict=True):
        documents = [[0, *prepared.tokenizer.encode(text)] for text in split]
        assert tokens[:].tolist() == [index for document in documents for index in document]
        assert tokens.starts.tolist() == np.cumsum([0, *map(len, documents)])[:-1].tolist()


def test_documents_begin_with_the_end_of_text_that_is_named(library: DataConfig, tmp_path: Path) -> None:
    """Data with another separator have another cache entry.

    If a document contains the separator's name, the name stays text and adds no separator.
    """
    (tmp_path / "library" / "typed.txt").write_text("a <|eot_id|> b <|end_of_text|>")
    file = tmp_path / "tokenizer.json"
    file.write_text(chatml(["<|end_of_text|>", "<|eot_id|>"], first=False))
    for name in ("<|end_of_text|>", "<|eot_id|>"):
        prepared = prepare(dataclasses.replace(library, tokenizer=str(file), end_of_text=name), 8)
        assert prepared.tokenizer.ends == (prepared.tokenizer.special[name],)
        assert sum(split.count(prepared.tokenizer.end_of_text) for split in tokens_of(prepared)) == 51
        assert {split[0] for split in tokens_of(prepared)} == {prepared.tokenizer.end_of_text}
    with pytest.raises(UserError):
        prepare(dataclasses.replace(library, end_of_text="<|eot_id|>"), 8)


def test_sizes_are_those_of_tokens_and_text(config: DataConfig) -> None:
    prepared, (train, val) = prepare(config, 16), splits_of(config)
    sizes = prepared.sizes
    assert (sizes.train_tokens, sizes.val_tokens) == tuple(map(len, tokens_of(prepared)))
    assert (sizes.train_bytes, sizes.val_bytes) == (len(train[0].encode()), len(val[0].encode()))
    assert sizes.gzip_bpb == 8 * len(gzip.compress(val[0].encode(), 9)) / sizes.val_bytes


def test_a_wide_vocabulary_takes_wider_integers(config: DataConfig) -> None:
    config = dataclasses.replace(config, tokenizer="char")
    assert prepare(config, 16).train[:].dtype == np.uint16
    with_text(config, "".join(map(chr, range(0x20000, 0x20000 + 70_000))))
    assert prepare(config, 16).train[:].dtype == np.uint32


def test_a_bpe_tokenizer_of_a_long_text_is_trained_on_samples_from_all_of_it(config: DataConfig,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rwkv.data.prepare.BPE_BYTES", 200_000)
    words = ("first", "second", "third")
    prepared = prepare(with_text(config, "".join(f" {word}\n" * 80_000 for word in words)), 16)
    assert all(len(prepared.tokenizer.encode(f" {word}")) == 1 for word in words)


# What the tokenizer loses

LOSING = {"dropping": dropping(sorted(set(TEXT) - set("—q"))), "unknown": with_unknown(sorted(set(TEXT) - set("—q")))}


@pytest.mark.parametrize("tokenizer", LOSING.values(), ids=LOSING)
def test_what_the_tokenizer_loses_is_counted(library: DataConfig, tokenizer: JsonTokenizer) -> None:
    prepared = prepare(library, 16, tokenizer)
    sizes = prepared.sizes
    for texts, size, lost in zip(splits_of(library), (sizes.train_bytes, sizes.val_bytes), (sizes.train_lost, sizes.val_lost),
                                 strict=True):
        lost_text = "".join(character for text in texts for character in text if character in "—q")
        assert lost == Lost(len(lost_text.encode()), size, len(lost_text) * (tokenizer is LOSING["unknown"]))
    assert sizes.val_lost.share > 0.05
    assert prepared.val_bytes_per_token is None
    assert "validation text" in str(prepared.describe_lost())


def test_a_small_loss_of_text_is_reported_and_bits_per_byte_remain(config: DataConfig) -> None:
    with_text(config, TEXT * 3 + "ä" + TEXT[-300:])
    prepared = prepare(config, 16, dropping(sorted(set(TEXT))))
    assert prepared.sizes.train_lost == Lost(0, prepared.sizes.train_bytes)
    assert prepared.sizes.val_lost.bytes == 2
    assert prepared.val_bytes_per_token == prepared.sizes.val_bytes / (prepared.sizes.val_tokens - 1)
    assert prepared.describe_lost()


def test_a_tokenizer_that_loses_nothing_is_not_mentioned(config: DataConfig) -> None:
    prepared = prepare(config, 16)
    assert (prepared.sizes.val_lost.bytes, prepared.describe_lost()) == (0, None)


def test_a_text_that_the_tokenizer_almost_loses_is_refused_with_the_reason(config: DataConfig) -> None:
    with pytest.raises(UserError, match=r"shorter than one context.* loses .*%"):
        prepare(config, 16, dropping("z"))


# Shards are made once, and again if anything has changed


def test_cached_data_are_not_made_again(library: DataConfig) -> None:
    """Files that were unchanged for a while are not read again either.

    The test changes the files' content but neither size nor time, so only a second reading would notice the change.
    """
    def inodes() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in Path(library.cache_dir).rglob("*")}

    for path in Path(str(library.path)).iterdir():
        os.utime(path, (1e9, 1e9))
    first, before = prepare(library, 16), inodes()
    for path in Path(str(library.path)).iterdir():
        path.write_bytes(b"?" * path.stat().st_size)
        os.utime(path, (1e9, 1e9))
    second = prepare(library, 16)
    assert (second.sizes, second.tokenizer.hash) == (first.sizes, first.tokenizer.hash)
    assert second.train[:].tolist() == first.train[:].tolist()
    assert inodes() == before


@pytest.mark.parametrize("change", ["tokenizer", "split", "a text", "a name"])
def test_a_change_of_text_or_options_has_another_cache_entry(library: DataConfig, change: str) -> None:
    """The changed text is as long as the old one and is written immediately, so neither sizes nor coarse times differ."""
    before, file = prepare(library, 16), Path(str(library.path)) / "49.txt"
    if change == "tokenizer":
        library = dataclasses.replace(library, tokenizer="byte")
    elif change == "split":
        library = dataclasses.replace(library, val_fraction=0.3)
    elif change == "a name":
        file.rename(file.with_name("50.txt"))
    else:
        file.write_text(file.read_text().replace("fox", "cat"))
    after = prepare(library, 16)
    assert after.train.parts[0].path.parent != before.train.parts[0].path.parent


@pytest.mark.parametrize("victim", ["a text", "a shard"])
def test_a_recent_change_is_noticed_even_if_the_time_is_the_same(library: DataConfig, victim: str) -> None:
    file = Path(str(library.path)) / "49.txt"
    os.utime(file)
    before = prepare(library, 16)
    expected = tokens_of(before)
    if victim == "a shard":
        file = before.train.parts[0].path
    status, content = file.stat(), file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = prepare(library, 16)
    assert (after.sha256 != before.sha256) == (victim == "a text")
    assert (tokens_of(after) == expected) == (victim == "a shard")


DAMAGE = {
    "truncated": lambda content: content[:-10],
    "a bit flipped": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "longer": lambda content: content + b"\0" * 64,
    "removed": None,
}
VICTIMS = ("bpe-*.json", "contents-*.json", "tokens-*/manifest.json", "tokens-*/00003-train.ids", "tokens-*/00003.json",
           "tokens-*/00000-val.ids", "tokens-*/train-starts.npy")


@pytest.mark.thorough
@pytest.mark.parametrize(("victim", "damage"), [
    *((victim, DAMAGE[name]) for victim in VICTIMS for name in ("a bit flipped", "removed")),
    *((victim, DAMAGE[name]) for victim in VICTIMS[2:4] for name in ("truncated", "longer"))])
def test_a_damaged_file_is_made_again(library: DataConfig, victim: str, damage) -> None:
    library = dataclasses.replace(library, val_fraction=0.5)
    before = prepare(library, 16)
    expected, starts = tokens_of(before), before.train.starts.tolist()
    path = sorted(Path(library.cache_dir).glob(victim.replace("00000-val", "*-val")))[0]
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    after = prepare(library, 16)
    assert (tokens_of(after), after.train.starts.tolist()) == (expected, starts)
    assert after.sizes == before.sizes


def test_only_the_damaged_shard_is_made_again(library: DataConfig) -> None:
    prepare(library, 16)
    files = sorted(Path(library.cache_dir).glob("tokens-*/*.ids"))
    before = {path: path.stat().st_ino for path in files}
    files[3].write_bytes(b"?" * files[3].stat().st_size)
    prepare(library, 16)
    assert [path for path in files if path.stat().st_ino != before[path]] == [files[3]]


# Shards are the same for any number of workers and interruptions


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_shards_are_the_same_with_any_number_of_workers(library: DataConfig, tmp_path: Path, workers: int) -> None:
    prepare(library, 16)
    prepare(dataclasses.replace(library, cache_dir=str(tmp_path / "other"), tokenize_workers=workers), 16)
    assert shards_in(tmp_path / "other") == shards_in(Path(library.cache_dir))


SCRIPT = """
import signal, sys, time
from pathlib import Path
from rwkv.data import shards
from rwkv.config import DataConfig
from rwkv.data.prepare import prepare
shards.SHARD, shards.SHOWN_AFTER, write = {shard}, 0.0, shards.write_json
if {slowly}:
    shards.write_json = lambda path, content: (time.sleep(0.1), write(path, content))
signal.signal(signal.SIGINT, signal.default_int_handler)     # a process in the background starts without it
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
print(prepare(DataConfig(name="text", path={path!r}, vocab_size=300, cache_dir={cache!r}), 16).sizes)
"""


def start(config: DataConfig, ready: Path, go: Path, slowly: bool = False) -> Forked:
    script = SCRIPT.format(shard=SHARD, slowly=slowly, path=config.path, cache=config.cache_dir)
    return Forked(ready.parent, ("-c", script, str(ready), str(go)), dict(os.environ))


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_an_interrupted_run_leaves_its_finished_shards(library: DataConfig, tmp_path: Path, number: int) -> None:
    whole = dataclasses.replace(library, cache_dir=str(tmp_path / "whole"))
    prepare(whole, 16)
    (tmp_path / "go").touch()
    process, cache = start(library, tmp_path / "ready", tmp_path / "go", slowly=True), Path(library.cache_dir)
    wait_for(lambda: len(list(cache.glob("tokens-*/00*.json"))) >= 3)
    process.send_signal(number)
    stderr = process.communicate(timeout=60)[1]
    assert "tokenising:" in stderr
    inodes = {path: path.stat().st_ino for path in cache.glob("tokens-*/00*.json")}
    assert 3 <= len(inodes) < len(list((tmp_path / "whole").glob("tokens-*/00*.json")))
    prepare(library, 16)
    assert shards_in(cache) == shards_in(tmp_path / "whole")
    assert {path: path.stat().st_ino for path in inodes} == inodes
    assert not list(cache.glob("tokens-*/.*.*")), "no unfinished file"


@pytest.mark.programs
def test_two_runs_may_start_at_once(library: DataConfig, tmp_path: Path) -> None:
    ready, go = [tmp_path / "ready0", tmp_path / "ready1"], tmp_path / "go"
    runs = [start(library, mark, go, slowly=True) for mark in ready]
    wait_for(lambda: all(mark.exists() for mark in ready))
    go.touch()
    outputs, errors = zip(*(run.communicate(timeout=60) for run in runs), strict=True)
    alone = dataclasses.replace(library, cache_dir=str(tmp_path / "alone"))
    assert list(outputs) == [f"{prepare(alone, 16).sizes}\n"] * 2
    assert [str(library.cache_dir) in text for text in errors].count(True) == 1
    assert shards_in(Path(library.cache_dir)) == shards_in(tmp_path / "alone")


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS])
def test_a_cache_where_files_cannot_be_locked_is_used(config: DataConfig, tmp_path: Path, error: int,
                                                      monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Some network file systems have no locks: a lock file in their place would remain after a crash."""
    with_locks = prepare(dataclasses.replace(config, cache_dir=str(tmp_path / "locked")), 8)

    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert tokens_of(prepare(config, 8)) == tokens_of(with_locks)
    assert "cannot be locked" in capsys.readouterr().err


def test_a_lock_that_cannot_be_written_is_a_cache_that_cannot_be_written(config: DataConfig,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("rwkv.data.shards.lock_folder", refuse)
    with pytest.raises(UserError, match=r"data\.cache_dir"):
        prepare(config, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("writes", range(0, 24, 4))
def test_a_full_disk_leaves_nothing_half_written(library: DataConfig, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """The disk is full after any number of writes. Finished files are used once there is room."""
    fsync, remaining = os.fsync, iter(range(writes))

    def full(handle: int) -> None:
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError) as error:
            prepare(library, 16)
    assert "data.cache_dir" in str(error.value)
    assert not list(Path(library.cache_dir).rglob(".*.*"))
    prepared = prepare(library, 16)
    documents = [prepared.tokenizer.encode(text) for text in splits_of(library)[0]]
    assert prepared.train[:].tolist() == [index for document in documents for index in (0, *document)]


@pytest.mark.thorough
def test_a_long_text_is_never_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text's tokens are not in memory as a whole, either: Python allocates less than a quarter of the text's size."""
    monkeypatch.setattr(shards, "SHARD", 1 << 14)
    monkeypatch.setattr("rwkv.io.utf8.BLOCK", 1 << 14)
    (tmp_path / "long.txt").write_text(TEXT * 500)
    config = DataConfig(name="text", path=str(tmp_path / "long.txt"), tokenizer="byte", cache_dir=str(tmp_path / "cache"),
                        tokenize_workers=2)
    tracemalloc.start()
    try:
        prepared = prepare(config, 16)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < prepared.sizes.train_bytes / 4


def test_a_text_with_too_few_tokens_is_an_error(config: DataConfig) -> None:
    with_text(config, "the same line again\n" * 300)
    with pytest.raises(UserError):
        prepare(config, 500)
