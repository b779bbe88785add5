"""Tests of data.streaming: a stream's batches, their order for any number of processes, exact continuation, wrong input."""

import dataclasses
import gc
import gzip
import importlib.util
import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import Run, one_sentence
from training_runs import assert_same_training, done_here, finish, fork_run, kill_after, losses, start

from rwkv.config import DataConfig
from rwkv.data.documents.copies import fingerprint
from rwkv.data.loaders import _init_worker
from rwkv.data.options import check_data
from rwkv.data.prepare import prepare
from rwkv.data.sources import jsonl
from rwkv.data.streaming.lanes import StreamLoader, join_states
from rwkv.data.streaming.streams import ENDS, open_stream
from rwkv.data.windows import StepLayout
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = pytest.mark.thorough
T = 16
TEXTS = [f"document {number} says {'again ' * (number * number % 23)}{number * number} — ends" for number in range(150)]
LEFT_OPEN = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
HF = pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="no library `datasets`: pip install -e '.[hf]'")


def lines_of(texts: Iterable[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def config_of(path: Path, **options: Any) -> DataConfig:
    return DataConfig(name="jsonl", path=str(path), tokenizer="byte", streaming=True,
                      **{"val_documents": 10, "shuffle_buffer": 16, "batch_size": 4} | options)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.jsonl").write_bytes(lines_of(TEXTS))
    return config_of(tmp_path / "a.jsonl")


def loader(config: DataConfig, batches: int = 60, rank: int = 0, world: int = 1, seed: int = 3, **options: Any) -> StreamLoader:
    corpus = prepare(dataclasses.replace(config, **options), T)
    return StreamLoader(batches, config.num_workers, _init_worker, sources=corpus.streams, tokenizer=corpus.tokenizer, T=T,
                        layout=StepLayout(config.batch_size // world, rank=rank, world=world), seed=seed)


def read(batches: Iterable[Any]) -> list[Any]:
    return [(x.tolist(), y.tolist()) for x, y in batches]


def plain(state: Any) -> Any:
    """Returns the state as a checkpoint restores it, by torch.load with weights_only."""
    return torch.load(_saved(state), weights_only=True)


def _saved(state: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def documents_of(batches: list[Any]) -> list[list[str]]:
    """Returns the documents of each lane: the tokens between two end-of-text tokens."""
    lanes = [list(itertools.chain.from_iterable(row)) for row in zip(*(x for x, _ in batches), strict=True)]
    return [[bytes(ids).decode(errors="replace") for is_text, ids in
             ((key, list(group)) for key, group in itertools.groupby(lane, bool)) if is_text] for lane in lanes]


# What is read


def test_an_epoch_has_every_training_document_once_and_validation_has_the_first(config: DataConfig) -> None:
    corpus = prepare(config, T)
    val = bytes(corpus.val[:].tolist()).decode().split("\0")[1:]
    assert val == TEXTS[:10]
    assert not (Path(config.path or "").parent / ".cache").exists()
    tokens = sum(len(text.encode()) + 1 for text in TEXTS[10:])
    batches = read(loader(config, batches=tokens // (4 * T) + 8))
    for (_, y), (x, _) in itertools.pairwise(batches):
        assert [row[-1] for row in y] == [row[0] for row in x], "a window ends with the first token of its lane's next one"
    whole = [text for lane in documents_of(batches) for text in lane[:-1]]       # the last one may be cut
    assert set(whole) <= set(TEXTS[10:])
    assert set(whole) >= set(TEXTS[10:]) - {lane[-1] for lane in documents_of(batches)}
    assert whole != sorted(whole, key=TEXTS.index)


def test_fewer_documents_than_rows_of_a_batch(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of([*TEXTS[:12], ""]))
    lanes = documents_of(read(loader(config)))
    assert {text for lane in lanes for text in lane[1:-1]} == set(TEXTS[10:12])
    assert all(len(lane) > 3 for lane in lanes)


def test_the_next_epoch_has_another_order(config: DataConfig) -> None:
    tokens = sum(len(text.encode()) + 1 for text in TEXTS[10:])
    one = dataclasses.replace(config, batch_size=1)
    lane, = documents_of(read(loader(one, batches=2 * tokens // T + 2)))
    first, second = lane[:140], lane[140:280]
    assert sorted(first) == sorted(TEXTS[10:]) == sorted(second)
    assert first != second


def test_a_document_of_validation_is_in_no_training_batch(config: DataConfig, tmp_path: Path) -> None:
    copies = [*TEXTS, *(f"{text} \n" for text in TEXTS[:10]), *TEXTS[:3]]
    (tmp_path / "a.jsonl").write_bytes(lines_of(copies))
    trained = {text.strip() for lane in documents_of(read(loader(config, batches=300))) for text in lane[:-1]}
    assert not trained & set(TEXTS[:10])


@pytest.mark.parametrize("shape", ["folder", "gz", "pattern", "non-ascii", "long", "empty documents", "blank lines", "bom"])
def test_other_people_s_files(tmp_path: Path, shape: str) -> None:
    """The same documents, in the same order, give the same batches, however they are divided among files."""
    folder = tmp_path / "dätä [1]" if shape == "non-ascii" else tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    texts = [f"{text} {'long ' * 5000 * (number == 40)}" for number, text in enumerate(TEXTS)] if shape == "long" else TEXTS
    parts = [lines_of(texts[start:start + 50]) for start in range(0, 150, 50)]
    path = folder
    if shape == "gz":
        (folder / "part-1.jsonl.gz").write_bytes(gzip.compress(parts[0]))
        (folder / "part-2.jsonl.gz").write_bytes(gzip.compress(b""))
        (folder / "part-3.jsonl.gz").write_bytes(gzip.compress(parts[1][:1000]) + gzip.compress(parts[1][1000:]))
        (folder / "part-10.jsonl.gz").write_bytes(gzip.compress(parts[2]))
    else:
        empty = b'{"text": ""}\n' * 3 if shape == "empty documents" else b"\n \n" if shape == "blank lines" else b""
        start = b"\xef\xbb\xbf" if shape == "bom" else b""
        for name, part in zip(("part-1", "part-2", "part-10"), parts, strict=True):
            (folder / f"{name}.jsonl").write_bytes(start + part.replace(b"\n", b"\n" + empty, 1) + empty)
        (folder / "part-3.jsonl").touch()
        path = folder / "*.jsonl" if shape == "pattern" else folder
    for name in ("README.md", ".hidden.jsonl", "_SUCCESS", "deep/notes.txt"):
        (folder / name).write_text("not data")
    (tmp_path / "one.jsonl").write_bytes(lines_of(texts))
    stream, whole = (open_stream(config_of(where)) for where in (path, tmp_path / "one.jsonl"))
    assert [text for row in stream.read() if (text := stream.text(row))] == texts == [whole.text(row) for row in whole.read()]
    if shape != "empty documents":       # they count as documents
        assert read(loader(config_of(path))) == read(loader(config_of(tmp_path / "one.jsonl")))


@pytest.mark.skipif(not importlib.util.find_spec("zstandard"), reason="no package zstandard: pip install zstandard")
def test_zstandard_is_read_and_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    import zstandard

    content = b"".join(zstandard.ZstdCompressor().compress(lines_of(TEXTS[start:start + 50])) for start in (0, 50, 100))
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(content)
    (tmp_path / "one.jsonl").write_bytes(lines_of(TEXTS))
    assert read(loader(config_of(path))) == read(loader(config_of(tmp_path / "one.jsonl")))
    alone = prepare(dataclasses.replace(config_of(path), streaming=False, cache_dir=str(tmp_path / "cache")), T)
    assert len(alone.train) + len(alone.val) == sum(len(text.encode()) + 1 for text in TEXTS)
    path.write_bytes(content[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.zst.*cut off"):
        read(loader(config_of(path), batches=1000))


@pytest.mark.skipif(not importlib.util.find_spec("zstandard"), reason="no package zstandard: pip install zstandard")
def test_zstandard_of_a_long_window_is_read(tmp_path: Path) -> None:
    """zstd --long=28 makes such files, and the package refuses them unless a reader raises its limit."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(lines_of(TEXTS)) + packer.flush())
    assert [entry["text"] for entry, _, _ in jsonl.entries(tmp_path / "a.jsonl.zst")] == TEXTS


def test_a_separator_divides_the_texts_of_a_stream(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_bytes(lines_of("<|end|>\n".join(TEXTS[start:start + 5]) for start in range(0, 150, 5)))
    config = config_of(tmp_path / "one.jsonl", separator="<|end|>", val_documents=2)
    assert bytes(prepare(config, T).val[:].tolist()).decode().split("\0")[1:] == TEXTS[:10]
    assert {text for lane in documents_of(read(loader(config))) for text in lane[:-1]} <= set(TEXTS[10:])


# The order


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batches_of_one(config: DataConfig, world: int) -> None:
    of_each = [read(loader(config, rank=rank, world=world)) for rank in range(world)]
    together = [tuple([row for rows in zip(*split, strict=True) for row in rows] for split in zip(*batches, strict=True))
                for batches in zip(*of_each, strict=True)]
    assert together == read(loader(config))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_batches_are_the_same_for_any_number_of_workers(config: DataConfig, workers: int) -> None:
    one = loader(config, num_workers=0)
    other = loader(dataclasses.replace(config, num_workers=workers))
    assert read(itertools.islice(one, 20)) == read(itertools.islice(other, 20))
    assert one.state_dict() == other.state_dict(), "batches that a worker has read ahead do not count"


def test_the_order_depends_on_the_seed(config: DataConfig) -> None:
    assert read(loader(config, seed=1)) != read(loader(config, seed=2))


# Continuing


@settings(max_examples=25)
@given(taken=st.integers(1, 59), buffer=st.sampled_from((1, 7, 16, 70, 140, 1000)), rows=st.sampled_from((1, 3, 4)),
       is_packed=st.booleans())
def test_a_stream_continues_with_exactly_the_next_batch(tmp_path_factory: pytest.TempPathFactory, taken: int, buffer: int,
                                                        rows: int, is_packed: bool) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / ("packed.jsonl.gz" if is_packed else "texts.jsonl")
    if not path.exists():
        path.write_bytes(gzip.compress(lines_of(TEXTS)) if is_packed else lines_of(TEXTS))
    config = config_of(path, shuffle_buffer=buffer, batch_size=rows)
    whole = read(loader(config))
    first = loader(config)
    assert read(itertools.islice(first, taken)) == whole[:taken]
    continued = loader(config)
    continued.load_state_dict(plain(first.state_dict()))
    assert read(continued) == whole[taken:]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 1), (2, 4), (1, 2)])
def test_a_stream_continues_with_another_number_of_processes(config: DataConfig, before: int, after: int) -> None:
    whole = read(loader(config))
    first = [loader(config, rank=rank, world=before) for rank in range(before)]
    for each in first:
        read(itertools.islice(each, 23))
    states = [each.state_dict() for each in first]       # without a process group, each state is that of one process
    state = plain(states[0] | {"sources": [join_states([one["sources"][0] for one in states])]})
    continued = [loader(config, rank=rank, world=after) for rank in range(after)]
    for each in continued:
        each.load_state_dict(state)
    of_each = [read(each) for each in continued]
    together = [tuple([row for rows in zip(*split, strict=True) for row in rows] for split in zip(*batches, strict=True))
                for batches in zip(*of_each, strict=True)]
    assert together == whole[23:]


def test_a_continued_stream_continues_again(config: DataConfig) -> None:
    whole, batches = read(loader(config)), list[Any]()
    state = None
    for taken in (5, 1, 20, 13, 21):
        each = loader(config)
        if state is not None:
            each.load_state_dict(state)
        batches += read(itertools.islice(each, taken))
        state = plain(each.state_dict())
    assert batches == whole


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_reader_that_is_dropped_closes_its_file(tmp_path: Path, name: str) -> None:
    """If the reader did not close the file, it would stay open until Python's garbage collector runs."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines_of(TEXTS)) if name.endswith(".gz") else lines_of(TEXTS))
    gc.disable()
    try:
        next(open_stream(config_of(path)).read())
        files = [file for file in gc.get_objects() if isinstance(file, BufferedReader) and not file.closed]
        assert not [file for file in files if getattr(file, "name", "") == str(path)]
    finally:
        gc.enable()


def test_a_state_is_small(config: DataConfig, tmp_path: Path) -> None:
    """A state has positions, but no text of the buffer or of unfinished documents."""
    each = loader(config, shuffle_buffer=140)
    read(itertools.islice(each, 30))
    assert len(json.dumps(each.state_dict())) < 1000


@pytest.mark.parametrize("change", ["longer", "shorter", "begins otherwise", "middle", "gone", "one more file"])
def test_a_file_that_has_changed_is_reported_in_one_sentence(tmp_path: Path, change: str) -> None:
    from rwkv.data.loaders import DataModule

    path = tmp_path / "d" / "a.jsonl"
    path.parent.mkdir()
    content = lines_of(text * 60 for text in TEXTS)      # longer than what is hashed at both ends
    path.write_bytes(content)
    config = config_of(path.parent)
    first = loader(config, batches=1000)
    read(itertools.islice(first, 900))
    saved = DataModule(prepare(config, T), config, T, 0).state_dict()
    middle = content.index(b"document 20 ")
    assert middle > ENDS
    path.write_bytes({"longer": content + lines_of(["more"]), "shorter": content[:content.index(b"\n", 300_000) + 1],
                      "begins otherwise": content.replace(b"document 1 ", b"document_1 ", 1),
                      "middle": content[:middle] + b"document_" + content[middle + 9:]}.get(change, content))
    if change == "gone":
        path.unlink()
    if change == "one more file":
        (path.parent / "b.jsonl").write_bytes(content)
    with pytest.raises(UserError) as caught:             # noqa: PT012
        DataModule(prepare(config, T), config, T, 0).load_state_dict(saved)
        continued = loader(config, batches=1000)
        continued.load_state_dict(first.state_dict())
        read(continued)
    assert any(word in str(caught.value) for word in ("changed", "contains no .jsonl"))
    assert "\n" not in str(caught.value)


# Wrong input


WRONG: list[tuple[bytes, dict[str, Any], tuple[str, ...]]] = [
    (lines_of(TEXTS[:10]), {}, ("10 documents", "data.val_documents=10")),
    (lines_of(["a"] * 40), {"val_documents": 5}, ("data.val_documents=5", "10 tokens", "requires at least 17")),
    (b"", {}, ("is empty",)), (b'[{"text": "a"}]', {}, ("JSON list", "data.streaming")), (b"PAR1", {}, ("Parquet",)),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", {}, ("git lfs pull",)),
    (lines_of(TEXTS), {"field": "body"}, ("data.field=text",)),
    (lines_of([*TEXTS[:10], *([""] * 30)]), {}, ("no text to train on", "empty")),
    (lines_of([*TEXTS[:10], *TEXTS[:10]]), {}, ("no text to train on", "copies")),
    (b'{"text": "cut o\n' + lines_of(TEXTS), {}, ("line 1", "not JSON")),
    (lines_of(TEXTS) + b'{"text": "\xff"}\n' * 11, {}, ("line 1", "UTF-8")),
    (lines_of([*TEXTS, *["zero \0"] * 11]), {}, ("line 1", "U+0000")),
    (gzip.compress(lines_of(TEXTS)), {}, ("gzip", ".gz")),
    (gzip.compress(lines_of(TEXTS))[:-400], {"ending": ".gz"}, ("cannot be read", "end"))]


@pytest.mark.parametrize(("workers", "content", "options", "named"), [
    *((0, *case) for case in WRONG),
    *(pytest.param(1, *case, marks=() if "UTF-8" in case[2] else pytest.mark.soak) for case in WRONG)])
def test_a_wrong_stream_is_reported_in_one_sentence(tmp_path: Path, workers: int, content: bytes, options: dict[str, Any],
                                                    named: tuple[str, ...]) -> None:
    from rwkv.data.loaders import worker_error

    path = tmp_path / f"a.jsonl{options.get('ending', '')}"
    path.write_bytes(content)
    options = {name: value for name, value in options.items() if name != "ending"}
    with pytest.raises(UserError) as caught:
        read(loader(config_of(path, num_workers=workers, **options), batches=1000))
    sentence = str(worker_error(caught.value) or caught.value)
    assert all(name in sentence for name in named), sentence
    assert "\n" not in sentence


def test_a_row_that_cannot_be_read_is_skipped_as_an_empty_one_is_and_named_once(tmp_path: Path,
                                                                               capfd: pytest.CaptureFixture[str]) -> None:
    """The run cannot be resumed with a corrected file, because a run must read the files that it began with."""
    windows = {}
    for name, line in (("empty", b'{"text": ""}   '), ("damaged", b'{"text": "cut o')):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(lines_of(TEXTS[:40]) + line + b"\n" + lines_of(TEXTS[40:]))
        windows[name] = read(loader(config_of(path), batches=260))        # more than one epoch
    assert windows["empty"] == windows["damaged"]
    assert capfd.readouterr().err.count(f"{tmp_path / 'damaged.jsonl'}, line 41 is not JSON") == 1


def test_options_that_a_stream_does_not_have_are_named(config: DataConfig, run: Run) -> None:
    path, stream = f"data.path={config.path}", "data.streaming=true"
    one_sentence(run("train", "data=jsonl", path, stream), "data.tokenizer", "bpe")
    one_sentence(run("train", "data=text", path, stream, "data.tokenizer=byte"), "data.streaming", "jsonl")
    one_sentence(run("train", "data=jsonl", path, stream, "data.tokenizer=byte", "trainer.epochs=2"), "trainer.epochs")
    one_sentence(run("train", "data=jsonl", path, stream, "data.tokenizer=byte", "trainer.tbptt=2"), "trainer.tbptt")
    one_sentence(run("train", "data=jsonl", path, stream, "data.tokenizer=byte", "data.val_fraction=0.5"), "data.val_fraction")
    one_sentence(run("train", "data=jsonl", path, "data.val_documents=5"), "data.val_documents", "data.streaming=true")
    with pytest.raises(UserError, match=r"b: data\.streaming"):
        check_data(DataConfig(name="mix", streaming=True, tokenizer="byte", sources=[
            {"path": config.path, "weight": 1}, {"name": "b", "data": "stdlib", "weight": 1}]))


# Data sets


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    yield datasets.Dataset.from_dict
    with warnings.catch_warnings(action="ignore"):       # the library leaves files of .csv open
        gc.collect()
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.suffix in (".arrow", ".parquet")], "nothing is converted"


@HF
@LEFT_OPEN
@pytest.mark.parametrize("shape", ["file", "folder", "pattern", "saved", "csv"])
def test_a_data_set_is_read_like_the_same_lines(config: DataConfig, tmp_path: Path, quiet: Any, shape: str) -> None:
    folder = tmp_path / "nested" / "dätä"
    rows = [quiet({"n": [1] * len(part), "text": part}) for part in (TEXTS[:70], TEXTS[70:71], TEXTS[71:])]
    path = folder
    if shape == "saved":
        quiet({"text": TEXTS}).save_to_disk(folder)
    elif shape in ("file", "csv"):
        path = tmp_path / ("a.parquet" if shape == "file" else "a.csv")
        whole = quiet({"text": TEXTS})
        _ = whole.to_parquet(path, batch_size=20) if shape == "file" else whole.to_csv(path)
    else:
        folder.mkdir(parents=True)
        for name, part in zip(("part-1", "part-2", "part-3"), rows, strict=True):
            part.to_parquet(folder / f"{name}.parquet")
        for name in ("README.md", ".hidden", "_SUCCESS"):
            (folder / name).write_text("")
        path = folder / "*.parquet" if shape == "pattern" else folder
    streamed = config_of(path)
    streamed = dataclasses.replace(streamed, name="hf")
    corpus = prepare(streamed, T)
    assert bytes(corpus.val[:].tolist()).decode().split("\0")[1:] == TEXTS[:10]
    whole = read(loader(streamed))
    trained = [text for lane in documents_of(whole) for text in lane[:-1]]
    assert set(trained) <= set(TEXTS[10:])
    for taken, buffer in ((1, 16), (17, 16), (41, 16), (250, 140), (400, 70)):
        first, continued = (loader(streamed, batches=500, shuffle_buffer=buffer) for _ in range(2))
        iterator = iter(first)
        read(itertools.islice(iterator, taken))
        continued.load_state_dict(plain(first.state_dict()))
        assert read(itertools.islice(continued, 60)) == read(itertools.islice(iterator, 60))


@HF
@LEFT_OPEN
def test_a_wrong_data_set_is_reported_in_one_sentence(tmp_path: Path, quiet: Any) -> None:
    quiet({"body": TEXTS}).to_parquet(tmp_path / "a.parquet")
    quiet({"text": TEXTS, "n": TEXTS}).to_parquet(tmp_path / "b.parquet")
    quiet({"body": TEXTS}).to_parquet(tmp_path / "c.parquet")
    quiet({"text": [*TEXTS[:20], None, *TEXTS[20:]]}).to_parquet(tmp_path / "none.parquet")
    quiet({"text": list(range(20))}).to_parquet(tmp_path / "numbers.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-100])
    for name, named in (("a", ("body", "data.field")), ("[bc]", ("c.parquet", "body")), ("numbers", ("row 0", "'text'")),
                        ("cut", ("cut.parquet",)), ("absent", ("absent",))):
        config = dataclasses.replace(config_of(tmp_path / f"{name}.parquet"), name="hf")
        with pytest.raises(UserError) as caught:
            read(loader(config, batches=600))
        assert "\n" not in str(caught.value)
        assert all(part in str(caught.value) for part in named), str(caught.value)
    assert read(loader(dataclasses.replace(config_of(tmp_path / "none.parquet"), name="hf")))
    windows = []
    for name, row in (("empty", b'{"text": ""}\n'), ("number", b'{"text": 3}\n')):     # a row without a text is skipped
        path = tmp_path / f"{name}.json"
        path.write_bytes(lines_of(TEXTS[:40]) + row + lines_of(TEXTS[40:]))
        windows.append(read(loader(dataclasses.replace(config_of(path), name="hf"))))
    assert windows[0] == windows[1]


# Mixes, and whole runs


def test_a_mix_of_streams_continues_and_keeps_its_shares(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines_of(text.upper() for text in TEXTS))
    mix = dataclasses.replace(config, name="mix", path=None, sources=[
        {"path": config.path, "weight": 3}, {"path": str(tmp_path / "b.jsonl"), "weight": 1}])
    whole = read(loader(mix, batches=64))
    upper = sum(bytes(row).decode(errors="replace").isupper() for x, _ in whole for row in x)
    assert 0.2 * 256 < upper < 0.26 * 256                # isupper() is False for a window with digits alone
    for world in (1, 2):
        of_each = []
        for rank in range(world):
            first, continued = (loader(mix, batches=64, rank=rank, world=world) for _ in range(2))
            read(itertools.islice(first, 29))
            continued.load_state_dict(plain(first.state_dict()))
            of_each.append(read(continued))
        assert [x for batches in zip(*of_each, strict=True) for x in zip(*(x for x, _ in batches), strict=True)] == [
            tuple(x[turn:turn + world]) for x, _ in whole[29:] for turn in range(0, 4, world)]


def test_validation_documents_of_one_source_are_in_no_other(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines_of([*reversed(TEXTS), *TEXTS[:10]]))
    mix = dataclasses.replace(config, name="mix", path=None, sources=[
        {"path": config.path, "weight": 1}, {"path": str(tmp_path / "b.jsonl"), "weight": 1}])
    trained = {text for stream, _ in prepare(mix, T).streams for text in TEXTS if fingerprint([text]) not in stream.held_out}
    assert trained == set(TEXTS[10:-10])


@pytest.mark.programs
def test_a_killed_run_continues_bit_for_bit(config: DataConfig, tmp_path: Path) -> None:
    run = ("debug=fast", "trainer=cpu", "logger=csv", "kernel=conv1d", "data=jsonl", f"data.path={config.path}",
           "data.streaming=true", "data.val_documents=10", "data.shuffle_buffer=16", "model.n_layer=1", "model.ctx_len=16",
           "trainer.max_steps=60", "trainer.checkpoint_every=7", "trainer.val_every=30", "data.num_workers=1")
    whole = done_here(tmp_path, "train", *run, "out_dir=whole")
    assert whole.status == 0, whole.error
    assert "10 documents for validation" in whole.error
    assert not (tmp_path / ".cache").exists()
    kill_after(fork_run(tmp_path, *run, "out_dir=killed"), tmp_path / "killed", random.randrange(8, 50), 0.0)
    result = done_here(tmp_path, "train", "resume=auto", "out_dir=killed")
    assert result.status == 0, result.error
    assert_same_training(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.soak
def test_two_processes_train_like_one(config: DataConfig, tmp_path: Path) -> None:
    run = ("debug=fast", "logger=csv", "kernel=conv1d", "data=jsonl", f"data.path={config.path}", "data.streaming=true",
           "data.val_documents=10", "data.shuffle_buffer=16", "model.n_layer=1", "model.ctx_len=16", "trainer.max_steps=12",
           "trainer.checkpoint_every=6", "trainer.val_every=6", "trainer.keep_last=2")
    assert done_here(tmp_path, "train", *run, "trainer=cpu", "out_dir=one").status == 0
    two = finish(start(tmp_path, "train", *run, "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "out_dir=two"))
    assert two.status == 0, two.error
    (tmp_path / "two" / "checkpoints" / "last.ckpt").unlink()
    (tmp_path / "two" / "checkpoints" / "last-1.ckpt").rename(tmp_path / "two" / "checkpoints" / "last.ckpt")
    again = done_here(tmp_path, "train", "resume=auto", "out_dir=two", "trainer=cpu", "trainer.devices=1")
    assert again.status == 0, again.error
    for name in ("train/loss", "val/loss"):
        assert losses(tmp_path / "two", name) == pytest.approx(losses(tmp_path / "one", name), rel=1e-4)


def test_the_tokenizer_of_a_stream_becomes_the_run_s(config: DataConfig) -> None:
    assert prepare(config, T).tokenizer.hash == ByteTokenizer().hash
