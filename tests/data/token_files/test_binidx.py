"""Tests of data=binidx: files of Megatron and RWKV-LM, read without a copy; wrong files are named."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from binidx_files import CODES, write
from hypothesis import given, settings
from hypothesis import strategies as st
from losing import dropping, with_unknown

from rwkv.config import DataConfig
from rwkv.data import token_files
from rwkv.data.prepare import prepare
from rwkv.data.token_files import binidx
from rwkv.data.validation import limit_validation
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import ByteTokenizer, JsonTokenizer

DOCUMENTS = [list(f"document {number}, {'again ' * (number % 5)}\n".encode()) for number in range(40)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(name="binidx", path=str(tmp_path / "data"), tokenizer="byte", batch_size=2,
                      cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_ids_are_read_unchanged(config: DataConfig, tmp_path: Path, dtype: str, suffix: str) -> None:
    write(tmp_path / "data", [[*document, 0] for document in DOCUMENTS], dtype)
    prepared = prepare(dataclasses.replace(config, path=f"{config.path}{suffix}"), 16)
    ids = [*prepared.train[:].tolist(), *prepared.val[:].tolist()]
    assert ids == [index for document in DOCUMENTS for index in (*document, 0)]
    assert {part.path for part in (*prepared.train.parts, *prepared.val.parts)} == {tmp_path / "data.bin"}
    assert 0.1 <= len(prepared.val) / len(ids) + 0.01 < 0.13
    assert prepared.sizes.val_bytes == pytest.approx(len(prepared.val), rel=0.05)
    assert sum(path.stat().st_size for path in Path(config.cache_dir).iterdir()) < 2000


@settings(max_examples=30)                # each writes files
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=20), sentences=st.integers(1, 3), ended=st.booleans(),
       modes=st.booleans())
def test_documents_begin_at_the_end_of_text_before_them(tmp_path_factory: pytest.TempPathFactory, lengths: list[int],
                                                        sentences: int, ended: bool, modes: bool) -> None:
    """RWKV-LM ends each document with end_of_text; Megatron does so only as an option."""
    base = tmp_path_factory.getbasetemp() / "documents"
    documents = [[7 + number] * length + [0] * ended for number, length in enumerate(lengths)]
    write(base, documents, sentences=sentences, modes=modes)
    index = binidx.read_index(base.with_suffix(".idx"))
    begins = [0, *itertools.accumulate(map(len, documents[:-1]))]
    assert (index.tokens, index.starts.tolist()) == (sum(map(len, documents)), begins)
    corpus = token_files.read(binidx.files(str(base)), ByteTokenizer(), 0.4, base.parent / "cache")
    starts = [*corpus.train.starts.tolist(), *(corpus.val.starts + len(corpus.train)).tolist()]
    assert starts == [0, *(begin - ended for begin in begins[1:])]
    assert corpus.val.starts[0] == 0


def test_one_document_gives_its_last_part(config: DataConfig, tmp_path: Path) -> None:
    write(tmp_path / "data", [list(range(1, 251)) * 4])
    prepared = prepare(config, 16)
    assert (len(prepared.train), len(prepared.val)) == (900, 100)
    assert prepared.train.starts.tolist() == [0]


def test_ids_that_are_not_text_have_a_byte_each(config: DataConfig, tmp_path: Path) -> None:
    """Decoded to text, a byte that is not UTF-8 would be U+FFFD, which has three bytes."""
    write(tmp_path / "data", [[*range(128, 256)] * 8])
    prepared = prepare(config, 16)
    assert prepared.val_bytes_per_token == 1
    assert limit_validation(prepared, 50, 16).val_bytes_per_token == 1


def test_ids_that_stand_for_no_bytes_have_no_bits_per_byte(config: DataConfig, tmp_path: Path) -> None:
    write(tmp_path / "data", [*DOCUMENTS, [0] * 200])
    prepared = prepare(dataclasses.replace(config, val_fraction=0.01), 16)
    assert not prepared.val[:].any()
    assert prepared.val_bytes_per_token is None
    assert limit_validation(prepared, 50, 16).val_bytes_per_token is None


def test_the_ids_are_scanned_once(config: DataConfig, tmp_path: Path) -> None:
    """Other ids are written with the same time and size: a second scan would notice them."""
    write(tmp_path / "data", DOCUMENTS)
    first = prepare(config, 16)
    for content in ((tmp_path / "data.bin").read_bytes(), bytes(sum(map(len, DOCUMENTS)) * 2)):
        (tmp_path / "data.bin").write_bytes(content)
        for path in tmp_path.glob("data.*"):
            os.utime(path, (1e9, 1e9))
        assert prepare(config, 16).sha256 == first.sha256


@pytest.mark.parametrize("victim", ["bin", "idx", "starts"])
def test_a_change_is_noticed(config: DataConfig, tmp_path: Path, victim: str) -> None:
    write(tmp_path / "data", DOCUMENTS)
    before = prepare(config, 16)
    starts = before.train.starts.tolist()
    if victim == "bin":
        write(tmp_path / "data", [[66, *document[1:]] for document in DOCUMENTS])
    elif victim == "idx":
        write(tmp_path / "data", [DOCUMENTS[0] + DOCUMENTS[1], *DOCUMENTS[2:]])
    else:
        (path,) = Path(config.cache_dir).glob("*starts.npy")
        path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    after = prepare(config, 16)
    assert (after.sha256 == before.sha256) == (victim == "starts")
    assert after.train.starts.tolist() == ([0, *starts[2:]] if victim == "idx" else starts)


def change(suffix: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def apply(base: Path) -> None:
        file = base.with_suffix(suffix)
        file.write_bytes(edit(file.read_bytes()))

    return apply


WRONG = {
    "no idx": (lambda base: base.with_suffix(".idx").unlink(), ("data.idx",)),
    "no files": (lambda base: [base.with_suffix(end).unlink() for end in (".bin", ".idx")], ("data.bin", "data.idx")),
    "empty idx": (change(".idx", lambda data: b""), ("data.idx",)),
    "another file": (change(".idx", lambda data: b"PK" + data[2:]), ("data.idx",)),
    "version": (change(".idx", lambda data: data[:9] + b"\2" + data[10:]), ("data.idx", "version 2")),
    "older": (change(".idx", lambda data: b"TNTIDX\0\0" + data[8:]), ("data.idx", "TNTIDX")),
    "floats": (change(".idx", lambda data: data[:17] + b"\6" + data[18:]), ("data.idx", "type 6")),
    "cut idx": (change(".idx", lambda data: data[:-8]), ("data.idx",)),
    "long idx": (change(".idx", lambda data: data + b"\0" * 3), ("data.idx",)),
    "pointer": (change(".bin", lambda data: b"version https://git-lfs.github.com/spec/v1\n"), ("data.bin", "git lfs pull")),
    "cut bin": (change(".bin", lambda data: data[:-2]), ("data.bin",)),
    "places": (change(".idx", lambda data: data[:200] + b"\7" * 8 + data[208:]), ("data.idx", "sequences")),
    "documents": (change(".idx", lambda data: data[:-8] + b"\7" * 8), ("data.idx", "documents")),
    "ids": (change(".bin", lambda data: b"\0\1" + data[2:]), ("data.bin", "data.tokenizer")),
}


@pytest.mark.parametrize(("spoil", "named"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_named(config: DataConfig, tmp_path: Path, spoil: Callable[[Path], object],
                               named: tuple[str, ...]) -> None:
    spoil(write(tmp_path / "data", DOCUMENTS))
    with pytest.raises(UserError) as error:
        prepare(config, 16)
    assert all(part in str(error.value) for part in named)


@given(data=st.data())
def test_every_truncated_or_altered_index_is_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = write(tmp_path_factory.getbasetemp() / "altered", DOCUMENTS[:3])
    file, right = base.with_suffix(".idx"), base.with_suffix(".idx").read_bytes()
    place = data.draw(st.integers(0, len(right) - 1))
    wrong = data.draw(st.sampled_from([right[:place], right[:place] + bytes([right[place] ^ 0x80]) + right[place + 1:]]))
    file.write_bytes(wrong)
    with pytest.raises(UserError):
        token_files.read(binidx.files(str(base)), ByteTokenizer(), 0.4, base.parent / "cache-altered")


def test_negative_ids_and_empty_files_are_errors(config: DataConfig, tmp_path: Path) -> None:
    for documents, ctx_len, words in (([[1, -1, 2]], 1, "-1"), ([[]], 1, "empty"), ([[1, 2, 3]], 16, "model.ctx_len")):
        write(tmp_path / "data", documents, "int32")
        with pytest.raises(UserError, match=words):
            prepare(config, ctx_len)


def test_its_tokenizer_must_be_named(config: DataConfig, tmp_path: Path) -> None:
    write(tmp_path / "data", [[300, *document] for document in DOCUMENTS])
    with pytest.raises(UserError):
        prepare(dataclasses.replace(config, tokenizer="bpe"), 16)
    given_one = JsonTokenizer.train(["some text"], 400)
    with pytest.raises(UserError):
        prepare(dataclasses.replace(config, tokenizer="bpe"), 16, given_one)


def test_unknown_tokens_among_ids_made_elsewhere_are_counted(config: DataConfig, tmp_path: Path) -> None:
    write(tmp_path / "data", [[2, 3, 4, 2, 3] * (10 + number) + [1] * (number % 3 == 0) + [0] for number in range(40)])
    some = prepare(config, 16, with_unknown("abc"))
    assert some.unknown == pytest.approx((some.val[:] == 1).mean())
    assert some.val_bytes_per_token is not None
    assert some.describe_lost()
    assert prepare(config, 16, dropping("abcd")).unknown == 0
    assert prepare(config, 16).describe_lost() is None, "bytes lose nothing"
    write(tmp_path / "data", [[2, 1, 4, 1, 3] * 10 + [0] for _ in range(40)])
    many = prepare(config, 16, with_unknown("abc"))
    assert many.unknown == pytest.approx(0.4, abs=0.02)
    assert many.val_bytes_per_token is None


# Several files


NUMBERS = [0, 1, 2, 10]


def write_parts(folder: Path, name: str) -> list[int]:
    """Writes parts of DOCUMENTS in the order of their numbers, with ids of several types. Returns the ids of all parts."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, (number, dtype) in enumerate(zip(NUMBERS if "of" not in name else range(4), (*CODES, *CODES), strict=False)):
        write(folder / name.format(number), [[*document, 0] for document in DOCUMENTS[10 * part:10 * part + 10]], dtype)
    return [index for document in DOCUMENTS for index in (*document, 0)]


@pytest.mark.parametrize(("name", "path"), [
    ("data_{:05}", "data*"), ("data_{:05}", "."), ("data-{:05}-of-00004", "data"), ("data{}", "*.idx"), ("deep/er/x{}", "."),
    ("data_part_{}_text_document", "*"), ("d\N{LATIN SMALL LETTER A WITH DIAERESIS} ta/data {}", "*/*.bin")])
def test_parts_are_one_corpus_in_the_order_of_their_numbers(config: DataConfig, tmp_path: Path, name: str, path: str) -> None:
    folder = tmp_path / "parts"
    (folder / name).parent.mkdir(parents=True)
    ids = write_parts(folder, name)
    for other in ("README.md", ".hidden.bin", "data.txt"):
        (folder / other).write_text("no ids")
    prepared = prepare(dataclasses.replace(config, path=str(folder / path)), 16)
    assert [*prepared.train[:].tolist(), *prepared.val[:].tolist()] == ids
    starts = [*prepared.train.starts.tolist(), *(prepared.val.starts + len(prepared.train)).tolist()]
    begins = [0, *itertools.accumulate(len(document) + 1 for document in DOCUMENTS[:-1])]
    assert starts == [begin - (number % 10 > 0) for number, begin in enumerate(begins)]
    assert "4 files" in prepared.source


@pytest.mark.parametrize("names", [["data_text_document"], ["data_content_document"], ["data_0", "data_1"],
                                   ["data_000_text_document", "data_001_text_document"], ["data-00000", "data-00001"]])
def test_a_name_selects_megatron_s_files_and_parts(config: DataConfig, tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        write(tmp_path / name, DOCUMENTS[number::len(names)])
    write(tmp_path / "database", DOCUMENTS[:1])
    prepared = prepare(config, 16)
    assert len(prepared.train) + len(prepared.val) == sum(map(len, DOCUMENTS))


def test_copies_in_several_parts_are_in_one_split(config: DataConfig, tmp_path: Path) -> None:
    one = tmp_path / "one"
    documents = [*DOCUMENTS, *DOCUMENTS[5:9]]
    write(one, [[*document, 0] for document in documents])
    for number in range(2):
        write(tmp_path / f"data_{number}", [[*document, 0] for document in documents[22 * number:22 * number + 22]])
    alone, parts = (prepare(dataclasses.replace(config, path=str(path)), 16) for path in (one, tmp_path / "data"))
    assert parts.copies == alone.copies == 4
    train, val = (bytes(split[:].tolist()).split(b"\0") for split in (parts.train, parts.val))
    assert not {*map(bytes, DOCUMENTS)} & {*train} & {*val}


@pytest.mark.parametrize(("names", "named"), [
    (["data_0", "data_2"], ("part 1 is missing",)), (["data-00000-of-00003", "data-00001-of-00003"], ("part 2 is missing",)),
    (["data_text_document", "data_content_document"], ("is ambiguous", "data_content_document")),
    (["data_0_text_document", "data_0_code_document"], ("is ambiguous",)), (["other"], ("no data.bin",))])
def test_parts_that_do_not_fit_together_are_named(config: DataConfig, tmp_path: Path, names: list[str],
                                                  named: tuple[str, ...]) -> None:
    for name in names:
        write(tmp_path / name, DOCUMENTS)
    with pytest.raises(UserError) as error:
        prepare(config, 16)
    assert all(part in str(error.value) for part in named)


def test_a_missing_half_of_a_part_and_foreign_ids_are_named(config: DataConfig, tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"data_{number}", DOCUMENTS)
    write(tmp_path / "data_2", [*DOCUMENTS, [300]])
    with pytest.raises(UserError, match=r"data_2\.bin contains the id 300"):
        prepare(config, 16)
    (tmp_path / "data_1.idx").unlink()
    with pytest.raises(UserError, match=r"no data_1\.idx"):
        prepare(config, 16)
