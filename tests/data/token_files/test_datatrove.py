"""Tests of data=datatrove: shards of datatrove's DocumentTokenizer, read in place; wrong files are named."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rwkv.config import DataConfig
from rwkv.data.prepare import prepare
from rwkv.errors import UserError

DOCUMENTS = [[*f"document {number}, {'again ' * (number % 5)}\n".encode(), 0] for number in range(40)]
IDS = [*itertools.chain.from_iterable(DOCUMENTS)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(name="datatrove", path=str(tmp_path / "data"), tokenizer="byte", batch_size=2,
                      cache_dir=str(tmp_path / "cache"))


def write(path: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2", stated: str | None = "gpt2") -> None:
    """Writes a shard with its index and, unless `stated` is None, metadata, as DocumentTokenizer's save does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [*itertools.accumulate(map(len, documents))]
    path.write_bytes(b"".join(np.array(document, dtype).tobytes() for document in documents))
    Path(f"{path}.index").write_bytes(np.array(ends, "<u8").tobytes())
    if stated is not None:
        Path(f"{path}.metadata").write_text(f"{stated}\n{ends[-1]}\n{ends[-1]} T")


@pytest.mark.parametrize(("dtype", "stated"), [("<u2", "gpt2"), ("<u2", "gpt2|2"), ("<u4", "a/b|4"), ("<u4", None),
                                               ("<u2", None)])
def test_ids_are_read_unchanged(config: DataConfig, tmp_path: Path, dtype: str, stated: str | None) -> None:
    shard = tmp_path / "00000_00000_shuffled.ds"
    write(shard, DOCUMENTS, dtype, stated)
    prepared = prepare(dataclasses.replace(config, path=str(shard)), 16)
    assert [*prepared.train[:].tolist(), *prepared.val[:].tolist()] == IDS
    assert {part.path for part in (*prepared.train.parts, *prepared.val.parts)} == {shard}
    starts = [*prepared.train.starts.tolist(), *(prepared.val.starts + len(prepared.train)).tolist()]
    assert starts == [0, *(end - 1 for end in itertools.accumulate(map(len, DOCUMENTS[:-1])))]
    assert 0.1 <= len(prepared.val) / len(IDS) + 0.01 < 0.13
    assert (stated is None) == ("tokenized with" not in prepared.source)


@pytest.mark.parametrize("path", ["data", "data/**/*.ds", "data/*/*_shuffled.ds"])
def test_shards_are_one_corpus_in_the_order_of_their_numbers(config: DataConfig, tmp_path: Path, path: str) -> None:
    for part, number in enumerate((0, 1, 2, 10)):
        some = DOCUMENTS[10 * part:10 * part + 10]
        write(tmp_path / "data" / "dätä" / f"{number}_shuffled.ds", some, "<u4" if part else "<u2")
    (tmp_path / "data" / "README.md").write_text("a page")
    (tmp_path / "data" / ".hidden.ds").write_text("hidden")
    prepared = prepare(dataclasses.replace(config, path=str(tmp_path / path)), 16)
    assert [*prepared.train[:].tolist(), *prepared.val[:].tolist()] == IDS


def test_empty_documents_and_longer_ones_than_a_window_are_read(config: DataConfig, tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.ds", [[], *DOCUMENTS, [], [7] * 5000, []])
    prepared = prepare(config, 16)
    assert [*prepared.train[:].tolist(), *prepared.val[:].tolist()] == [*IDS, *[7] * 5000]


@pytest.mark.parametrize(("spoil", "named"), [
    ("no index", ("a.ds.index",)), ("cut index", ("a.ds.index", "truncated")), ("order", ("a.ds.index", "ascend")),
    ("cut ids", ("a.ds",)), ("ids", ("a.ds contains the id 300", "data.tokenizer")), ("both", ("unshuffled", "_shuffled.ds")),
    ("loss", ("a.ds.loss",)), ("none", ("data.path=", ".ds")), ("empty", ("a.ds is empty",)), ("bpe", ("data.tokenizer",)),
    ("size", ("a.ds", "do not match")), ("no path", ("data.path",))])
def test_wrong_files_are_named(config: DataConfig, tmp_path: Path, spoil: str, named: tuple[str, ...]) -> None:
    shard, index = tmp_path / "data" / "a.ds", tmp_path / "data" / "a.ds.index"
    write(shard, [*DOCUMENTS, [300]] if spoil == "ids" else DOCUMENTS, stated=None)
    if spoil == "empty":
        shard.write_bytes(b"")
        index.write_bytes(b"")
    if spoil == "no index":
        index.unlink()
    elif spoil == "cut index":
        index.write_bytes(index.read_bytes()[:-3])
    elif spoil == "order":
        index.write_bytes(index.read_bytes()[8:] + index.read_bytes()[:8])
    elif spoil == "cut ids":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif spoil == "both":
        for stage in ("shuffled", "unshuffled"):
            write(shard.with_name(f"0_{stage}.ds"), DOCUMENTS)
    elif spoil == "loss":
        Path(f"{shard}.loss").touch()
    elif spoil == "none":
        shard.unlink()
    elif spoil == "size":
        Path(f"{shard}.metadata").write_text("gpt2|4\n1\n")
    options = {"bpe": {"tokenizer": "bpe"}, "no path": {"path": None}}.get(spoil, {})
    with pytest.raises(UserError) as error:
        prepare(dataclasses.replace(config, **options), 16)
    assert all(part in str(error.value) for part in named), str(error.value)

