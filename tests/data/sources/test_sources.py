"""Tests of data=stdlib, text, jsonl and hf: the documents of each split, the splitting of long texts, and wrong input."""

import dataclasses
import gzip
import hashlib
import json
import os
import shlex
import shutil
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rwkv import cli
from rwkv.config import SOURCES, TOKENS, DataConfig
from rwkv.data.documents.separators import describe, marks, separate
from rwkv.data.documents.source import Document, in_validation
from rwkv.data.files import find_files
from rwkv.data.prepare import Corpus, prepare
from rwkv.data.sources import open_source
from rwkv.data.sources.hf import open_streamed
from rwkv.data.sources.stdlib import read_stdlib
from rwkv.data.streaming.streams import open_stream
from rwkv.errors import UserError
from rwkv.tokenizer.split import SafeSplit, last_line_end, pieces, safe_split
from rwkv.tokenizer.tokenizers import CharTokenizer, JsonTokenizer, Tokenizer

TEXT = "".join(f"line {number}: the quick brown fox — {number * number % 97}\n" for number in range(400))
WORDS = [f"document {number} says {'again ' * (number % 7)}{number * number}\nand — ends" for number in range(60)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(name="text", path=str(tmp_path / "text.txt"), tokenizer="byte", cache_dir=str(tmp_path / "cache"))


def of_kind(config: DataConfig, name: str, path: Path, **options: object) -> DataConfig:
    return dataclasses.replace(config, name=name, path=str(path), **options)


def texts(config: DataConfig) -> tuple[list[str], list[str]]:
    """Returns the documents of (training, validation)."""
    documents = list(open_source(config, Path(config.cache_dir)).documents())
    return (["".join(document.chunks) for document in documents if not document.val],
            ["".join(document.chunks) for document in documents if document.val])


def bytes_of(prepared: Corpus) -> tuple[list[str], list[str]]:
    """Returns the documents of both splits, decoded from the ids of the byte tokenizer."""
    train, val = ("".join(map(chr, split[:])).encode("latin1") for split in (prepared.train, prepared.val))
    return train.decode()[1:].split("\0"), val.decode()[1:].split("\0")


# The standard library


def test_the_standard_library_is_split_by_file() -> None:
    config = DataConfig()
    train, val = texts(config)
    sizes = [sum(len(document.encode()) for document in split) for split in (train, val)]
    assert 5e6 < sum(sizes) < 20e6
    assert 0.1 <= sizes[1] / sum(sizes) < 0.13
    assert any("class HTTPServer" in document for document in train + val)
    assert texts(config) == (train, val)


def test_only_sources_of_the_library_itself_are_read(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "sub/c.py", "test/d.py", "sub/tests/e.py", "encodings/f.py", "site-packages/g.py", "h.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"# {name}\r\n".encode())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    text = read_stdlib(tmp_path, 0.1)
    assert sorted(text.train + text.val) == ["# a.py\n", "# b.py\n", "# sub/c.py\n"]
    assert (len(text.train), len(text.val)) == (2, 1)


def test_a_new_file_does_not_change_the_order_of_the_others(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").write_text(name * 100)
    before = read_stdlib(tmp_path, 0.5)
    (tmp_path / "i.py").write_text("i")
    after = read_stdlib(tmp_path, 0.5)
    assert [document for document in after.val + after.train if document != "i"] == before.val + before.train


# Text files


def test_one_file_is_split_at_nine_tenths_of_its_characters(config: DataConfig) -> None:
    text = "—" * 60_000                  # three bytes each, so that blocks end inside a character
    Path(str(config.path)).write_bytes(text.encode())
    cut = int(len(text) * 0.9)
    assert texts(config) == ([text[:cut]], [text[cut:]])
    assert open_source(config, Path(config.cache_dir)).sha256 == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("separator", [None, "--"])
def test_a_byte_order_mark_is_not_part_of_the_text(config: DataConfig, tmp_path: Path, separator: str | None) -> None:
    for name, words in zip("ab", (WORDS[:30], WORDS[30:]), strict=True):
        (tmp_path / f"{name}.txt").write_text("--".join(words), encoding="utf-8-sig")
    for path in (tmp_path, tmp_path / "a.txt"):
        train, val = texts(of_kind(config, "text", path, separator=separator))
        joined = "".join([*train, *val])
        assert "\ufeff" not in joined
        assert len(joined.replace("--", "")) == sum(map(len, WORDS if path is tmp_path else WORDS[:30]))


@pytest.mark.parametrize(("content", "is_json"), [
    ('{"text": "a"}\n{"text": "b"}\n', True), ('\ufeff[\n  {"prompt": "a"}]', True), ("[1] a note {2}", False),
    ("{ a: b }", False), ("[[{ ... }]]", False)])
def test_json_that_is_read_as_plain_text_is_announced(config: DataConfig, content: str, is_json: bool) -> None:
    Path(str(config.path)).write_text(content, encoding="utf-8")
    assert ("data=jsonl" in open_source(config, Path(config.cache_dir)).about) == is_json


@pytest.mark.parametrize("path", ["", "books/**/*.txt", "books"])
def test_several_files_are_documents(config: DataConfig, tmp_path: Path, path: str) -> None:
    for number, words in enumerate(WORDS):
        file = tmp_path / "books" / f"shelf [{number % 3}]" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(words.encode() + b"\r\n")
    (tmp_path / "books" / "empty.txt").touch()
    (tmp_path / "books" / "other.md").write_text("not a text file by its name")
    train, val = bytes_of(prepare(of_kind(config, "text", tmp_path / path), 16))
    assert sorted(train + val) == sorted(words + "\r\n" for words in WORDS)
    assert 0.1 <= sum(map(len, val)) / sum(map(len, train + val)) < 0.13
    assert {text.split()[1] for text in val} != {str(number) for number in range(len(val))}


def test_a_bracket_in_a_pattern_is_written_as_a_class(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "books [1]"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.md").write_text(f"text {number}")
    refuses(of_kind(config, "text", folder / "*.md"), "write [[] for")
    assert len(find_files(str(tmp_path / "books [[]1]" / "*.md"), ())) == 9


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**/**/*.txt", "**"])
def test_links_read_no_file_twice(config: DataConfig, tmp_path: Path, pattern: str) -> None:
    """Links to the folder itself, or to a folder or a file in it, are left out; a link that leads elsewhere is followed."""
    books, elsewhere = tmp_path / "books", tmp_path / "elsewhere"
    for folder in (books / "shelf", books / ".hidden", elsewhere):
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text(folder.name)
    for name, target in (("again", "."), ("again2", "."), ("copy", "shelf"), ("more", elsewhere), ("a.txt", "shelf/text.txt")):
        (books / name).symlink_to(target)
    names = [name for name, _ in find_files(str(books / pattern), (".txt",))]
    assert names == ["more/text.txt", "shelf/text.txt"]
    train, val = texts(of_kind(config, "text", books / pattern))
    assert sorted(train + val) == ["elsewhere", "shelf"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "chat"])
@pytest.mark.parametrize("pattern", ["", "*l*", "**/*"])
def test_a_link_to_a_missing_file_is_named(config: DataConfig, tmp_path: Path, kind: str, pattern: str) -> None:
    """Without the error, the file's text would silently be missing from the data."""
    books, ending = tmp_path / "books", ".txt" if kind == "text" else ".jsonl"
    books.mkdir()
    (books / f"all{ending}").write_text('{"text": "a"}\n' * 99)
    (books / f"lost{ending}").symlink_to(tmp_path / "moved" / "file")
    (books / "lost.other").write_text("")
    refuses(of_kind(config, kind, books / pattern), f"lost{ending}", "link", "does not exist")


def test_a_file_with_wildcards_in_its_name_is_that_file(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "[a]*.txt").write_text(TEXT)
    (tmp_path / "a.txt").write_text("another")
    train, val = texts(of_kind(config, "text", tmp_path / "[a]*.txt"))
    assert train[0] + val[0] == TEXT


# JSON lines


def write_lines(path: Path, documents: list[str], field: str = "text") -> Path:
    lines = [json.dumps({"id": number, field: text}, ensure_ascii=bool(number % 2)) + "\n" * (1 + number % 2)
             for number, text in enumerate(documents)]
    content = "".join(lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_a_row_whose_text_is_null_has_no_text(config: DataConfig, tmp_path: Path) -> None:
    """The library `datasets` writes null for a row without a text, and data=hf reads such a file in the same way."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for word in WORDS for text in (None, word)))
    lines = of_kind(config, "jsonl", path)
    train, val = texts(lines)
    assert sorted(train + val) == sorted(WORDS)
    stream = open_stream(lines)
    assert [text for row in stream.read() if (text := stream.text(row))] == WORDS
    path.write_text('{"text": null}\n')
    refuses(lines, "has no text")


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_lines_are_documents(config: DataConfig, tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, [*WORDS, ""])
    train, val = bytes_of(prepare(of_kind(config, "jsonl", path), 16))
    assert [words for words in WORDS if words in val] == val
    assert [words for words in WORDS if words not in val] == train
    assert len(val) == 6


def test_a_folder_of_lines_and_another_field(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "a.jsonl", WORDS[:20], "content")
    write_lines(tmp_path / "sub" / "b.jsonl.gz", WORDS[20:], "content")
    train, val = texts(of_kind(config, "jsonl", tmp_path / "sub", field="content"))
    assert sorted(train + val) == sorted(WORDS)


def test_a_single_line_is_cut_in_two(config: DataConfig, tmp_path: Path) -> None:
    train, val = texts(of_kind(config, "jsonl", write_lines(tmp_path / "one.jsonl", [TEXT])))
    assert (train, val) == ([TEXT[:int(len(TEXT) * 0.9)]], [TEXT[int(len(TEXT) * 0.9):]])


@given(fraction=st.floats(0.01, 0.9), count=st.integers(2, 400))
def test_a_fixed_share_of_documents_is_for_validation(fraction: float, count: int) -> None:
    chosen = list(islice(in_validation(fraction), count))
    assert chosen[0]
    assert abs(sum(chosen) - fraction * count) <= 1
    assert list(islice(in_validation(fraction), count + 1))[:count] == chosen


# Hugging Face


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the library `datasets`, which caches data in the test's folder."""
    library: ModuleType = pytest.importorskip("datasets", reason="no library `datasets`: pip install -e '.[hf]'")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    library.disable_progress_bars()
    return library


@pytest.mark.filterwarnings("ignore")                    # the library's own
@pytest.mark.parametrize("form", ["folder", "dictionary", "parquet", "json"])
def test_a_hugging_face_dataset(datasets: ModuleType, config: DataConfig, tmp_path: Path, form: str) -> None:
    rows = datasets.Dataset.from_dict({"text": WORDS, "number": list(range(len(WORDS)))})
    path = tmp_path / {"folder": "rows", "dictionary": "rows", "parquet": "rows.parquet", "json": "rows.json"}[form]
    write = {"folder": rows.save_to_disk, "dictionary": datasets.DatasetDict({"train": rows}).save_to_disk,
             "parquet": rows.to_parquet, "json": rows.to_json}[form]
    write(str(path))
    hf_config = of_kind(config, "hf", path)
    train, val = bytes_of(prepare(hf_config, 16))
    assert sorted(train + val) == sorted(WORDS)
    assert [words for words in WORDS if words in val] == val
    with pytest.raises(UserError):
        prepare(dataclasses.replace(hf_config, field="body"), 16)


@pytest.mark.filterwarnings("ignore")                    # the library's own
def test_a_part_may_be_empty_but_not_all_and_a_column_has_one_name(datasets: ModuleType, config: DataConfig,
                                                                   tmp_path: Path) -> None:
    import pyarrow.parquet

    (tmp_path / "parts").mkdir()
    for number, words in enumerate(([], WORDS, [])):
        table = pyarrow.table({"text": pyarrow.array(words, pyarrow.string())})
        pyarrow.parquet.write_table(table, tmp_path / "parts" / f"{number}.parquet")
    for path in (tmp_path / "parts", tmp_path / "parts" / "*.parquet"):
        assert sorted(document for split in texts(of_kind(config, "hf", path)) for document in split) == sorted(WORDS)
    refuses(of_kind(config, "hf", tmp_path / "parts" / "0.parquet"), "has no rows")
    for ending, separator in (("csv", ","), ("tsv", "\t")):
        (tmp_path / f"t.{ending}").write_text(f"text{separator}text\n" + f"a{separator}b\n" * 60)
        refuses(of_kind(config, "hf", tmp_path / f"t.{ending}"), "2 columns named 'text'")


@pytest.mark.filterwarnings("ignore")                    # the library's own
def test_tables_are_texts_and_splits_have_parts(datasets: ModuleType, config: DataConfig, tmp_path: Path) -> None:
    import pyarrow

    words = ["a lamp, lit", "NA", "null", "nan", "None", "12", "true", "2020-01-01"]

    def read(name: str, **options: object) -> list[str]:
        return sorted(document for split in texts(of_kind(config, "hf", tmp_path / name, **options)) for document in split)

    (tmp_path / "t.csv").write_text("".join(f'"{word}",{number}\n' for number, word in enumerate(["text", *words])))
    (tmp_path / "t.tsv").write_text("".join(f"{number}\t{word}\n" for number, word in enumerate(["text", *words])))
    assert read("t.csv") == read("t.tsv") == sorted(words)
    for name in ("t.csv", "t.tsv"):
        packed = tmp_path / "packed" / f"{name}.gz"
        packed.parent.mkdir(exist_ok=True)
        packed.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        for path in ("packed", f"packed/{packed.name}", f"packed/*{name[1:]}.gz"):
            assert read(path) == sorted(words)
        assert sorted(row["text"] for row in open_streamed(of_kind(config, "hf", packed))) == sorted(words)
        packed.unlink()
        folder = tmp_path / f"folder of {name}"
        folder.mkdir()
        shutil.copy(tmp_path / name, folder)
        assert read(folder.name) == sorted(words)
        (folder / name).write_text("text\n" + "a, b\tc\n" * 60)
        for path in (folder, folder / name, folder / "*"):           # pandas would take "a" for an index
            refuses(of_kind(config, "hf", path), name, "first row")
    assert read("t.csv", split="train[:2]") == sorted(words[:2])
    assert read("t.csv", split="train[:25%]+train[-1:]") == sorted([*words[:2], words[-1]])
    table = pyarrow.table({"text": pyarrow.array(words, pyarrow.string_view())})
    with pyarrow.ipc.new_stream(str(tmp_path / "t.arrow"), table.schema) as file:
        file.write_table(table)
    assert read("t.arrow") == sorted(words)
    rows = datasets.load_dataset("csv", data_files=str(tmp_path / "t.csv"), split="train", keep_default_na=False)
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    assert read("saved", split="train[:50%]") == sorted(words[:4])
    for wrong in ("test", "train[:50%", "test[:2]"):
        with pytest.raises(UserError):
            read("saved", split=wrong)


@pytest.mark.filterwarnings("ignore")                    # the library's own
@pytest.mark.parametrize("path", ["rows", "rows/*.parquet", "rows/**/*.parquet"])
def test_folders_and_patterns_of_parquet(datasets: ModuleType, config: DataConfig, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "rows" if path == "rows/*.parquet" else tmp_path / "rows" / "dätä 1"
    folder.mkdir(parents=True)
    for number, part in ((1, WORDS[:20]), (2, WORDS[20:40]), (10, WORDS[40:])):          # one file has a second column
        rows = datasets.Dataset.from_dict({"text": part} | ({"n": part} if number == 2 else {}))
        rows.to_parquet(folder / f"part-{number}.parquet")
    for name in ("README.md", ".hidden.parquet", "_SUCCESS"):
        (folder / name).write_text("---\nlicense: mit\n---\n")
    train, val = bytes_of(prepare(of_kind(config, "hf", tmp_path / path), 16))
    assert sorted(train + val) == sorted(WORDS)
    (folder / "part-3.parquet").write_bytes(b"PAR1")
    refuses(of_kind(config, "hf", tmp_path / path), "part-3.parquet")
    datasets.Dataset.from_dict({"body": WORDS}).to_parquet(folder / "part-3.parquet")
    refuses(of_kind(config, "hf", tmp_path / path), "part-3.parquet", "body")


@pytest.mark.filterwarnings("ignore")                    # the library's own
def test_a_path_that_the_library_cannot_find_is_named(datasets: ModuleType, config: DataConfig, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes a file that it cannot read for a name on the Hub, and the path of a folder for a pattern."""
    folder = tmp_path / "rows [1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    datasets.Dataset.from_dict({"text": WORDS, "words": [words.split() for words in WORDS]}).to_json("rows.json")
    assert sorted(document for split in texts(of_kind(config, "hf", Path("rows.json"))) for document in split) == sorted(WORDS)
    refuses(of_kind(config, "hf", folder), "must not contain")
    refuses(of_kind(config, "hf", Path("rows.json"), field="words"), "no string column 'words' (its type is ", "text")
    Path("rows.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    for path in ("rows.parquet.gz", "*.gz"):
        refuses(of_kind(config, "hf", Path(path)), path, "a .parquet, .arrow")
    for name in ("pointer.parquet", "pointer.json"):
        Path(name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 381\n")
        refuses(of_kind(config, "hf", Path(name)), name, "git lfs pull")
    refuses(of_kind(config, "hf", Path("absent.parquet")), "there is no file or folder absent.parquet")


@pytest.mark.filterwarnings("ignore")                    # the library's own
def test_a_file_that_was_replaced_by_one_of_the_same_timestamp_is_read(datasets: ModuleType, config: DataConfig,
                                                                       tmp_path: Path) -> None:
    """An archive may give all versions of a file the same timestamp. The library would return the first version's rows."""
    for ending in ("json", "parquet", "csv"):
        path = tmp_path / f"rows.{ending}"
        for words in (WORDS[:30], WORDS[30:]):
            rows = datasets.Dataset.from_dict({"text": words})
            {"json": rows.to_json, "parquet": rows.to_parquet, "csv": rows.to_csv}[ending](str(path))
            os.utime(path, (1e9, 1e9))
            for _ in range(2):
                assert sorted(text for split in texts(of_kind(config, "hf", path)) for text in split) == sorted(words)


@pytest.mark.filterwarnings("ignore")                    # the library's own
def test_a_configuration_of_a_data_set_is_chosen_by_name(datasets: ModuleType, config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, words in (("en", WORDS[:40]), ("de", WORDS[40:])):
        datasets.Dataset.from_dict({"text": words}).to_parquet(folder / f"{name}.parquet")
    listed = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in ("en", "de"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    german = dataclasses.replace(of_kind(config, "hf", folder), config="de")
    assert sorted(document for split in texts(german) for document in split) == sorted(WORDS[40:])
    rows = open_streamed(german)
    assert [row["text"] for row in rows] == WORDS[40:]
    refuses(of_kind(config, "hf", folder), "en, de", "data.config=NAME")
    refuses(dataclasses.replace(german, config="fr"), "en, de")
    refuses(dataclasses.replace(german, path=str(folder / "en.parquet")), "data.config=de requires")


def test_the_error_without_the_library_names_the_package(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses(of_kind(config, "hf", Path("somewhere")), "pip install")


# Pieces of long texts

LINES = st.lists(st.text("ab1。…， \n\t—漢.;()", max_size=12), max_size=40).map("\n".join)


@pytest.fixture(scope="module", params=["byte", "char", "bpe", "world"])
def tokenizer(request: pytest.FixtureRequest) -> tuple[Tokenizer, SafeSplit]:
    text = "ab1。…， \n\t—漢.;()\n a b" * 9
    trained = {"char": lambda: CharTokenizer(text), "bpe": lambda: JsonTokenizer.train([text], 300)}
    result = trained[request.param]() if request.param in trained else Tokenizer.named(request.param)
    return result, safe_split(result)


@pytest.mark.thorough
@given(text=LINES, size=st.integers(1, 30))
def test_pieces_have_the_ids_of_the_whole(tokenizer: tuple[Tokenizer, SafeSplit], text: str, size: int) -> None:
    encoder, split = tokenizer
    parts = list(pieces((text[start:start + size] for start in range(0, len(text), size)), split))
    assert "".join(parts) == text
    assert [index for piece in parts for index in encoder.encode(piece)] == encoder.encode(text)


def test_a_bpe_tokenizer_made_from_pieces_is_that_of_the_whole() -> None:
    text = "".join(f"if a{number % 5}:\n\n    b = {number}  \n\n\n\n" for number in range(200))
    parts = list(pieces((text[start:start + 7] for start in range(0, len(text), 7)), last_line_end))
    assert len(parts) > 100
    assert JsonTokenizer.train(parts, 300).hash == JsonTokenizer.train([text], 300).hash


def test_a_tokenizer_that_looks_across_lines_gets_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = json.loads(JsonTokenizer.train([TEXT], 300).definition)
    definition["pre_tokenizer"]["add_prefix_space"] = True
    split = safe_split(JsonTokenizer(json.dumps(definition)))
    assert list(pieces([TEXT] * 3, split)) == [TEXT * 3]
    monkeypatch.setattr("rwkv.tokenizer.split.LONGEST", len(TEXT))
    assert list(pieces([TEXT] * 3, split)) == [TEXT] * 3


# Errors


def refuses(config: DataConfig, *words: str) -> None:
    with pytest.raises(UserError) as error:
        prepare(config, 16)
    for part in words:
        assert part in str(error.value)


WRONG_TEXT: dict[str, tuple[bytes | None, tuple[str, ...]]] = {
    "missing": (None, ("data.path=", "text.txt")), "empty": (b"", ("data.path=", "text.txt")),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 381\n" * 9, ("text.txt", "git lfs pull")),
    "one character": (b"a", ("data.path=", "text.txt")),
    "cut off": ("köstlich\n".encode() * 99 + b"k\xc3", ("byte 991 ", "cut off", "download")),
    "latin-1": ("name,ort\nJosé,Köln\n".encode("latin1") * 99, ("byte 12 ", "iconv")),
    "UTF-16": ("a\n".encode("utf-16") * 99, ("byte 0 ", "iconv -f utf-16 ")),
    "UTF-32": ("a\n".encode("utf-32") * 99, ("byte 0 ", "iconv -f utf-32 ")),
    "UTF-32, big endian": ("\ufeffa\n".encode("utf-32-be") * 99, ("byte 2 ", "iconv -f utf-32 ")),
    **{f"{coding} without a mark, {text!r}": (text.encode(coding) * 99, (f"iconv -f {coding} ",))
       for coding in ("utf-16le", "utf-16be", "utf-32le", "utf-32be") for text in ("a\n", "a café\n")},
    "gzip": (gzip.compress(b"a\n" * 99), ("byte 1 ", "gzip -dc")),
    "binary": (b"\x7fELF\0" + bytes(range(256)), ("byte 133 ",)),
    "half a character": (("a" * 70_000 + "é").encode()[:-1], ("byte 70000 ",)),
    "a page of zeros at its end": (b"text " * 3000 + bytes(9000), ("incomplete", "byte 15000. ", "zero bytes")),
    "a page of zeros inside": (b"text\n" * 1000 + bytes(70_000) + b"text\n" * 1000, ("incomplete", "byte 5000. ")),
    "short": (b"abcdefghij" * 10, ("model.ctx_len=16",)), "U+0000": (b"ab\0c" * 99, ("text.txt", "character 2 ")),
}


@pytest.mark.parametrize(("content", "named"), WRONG_TEXT.values(), ids=WRONG_TEXT)
def test_a_wrong_file_is_named_with_the_place(config: DataConfig, content: bytes | None, named: tuple[str, ...]) -> None:
    if content is not None:
        Path(str(config.path)).write_bytes(content)
    refuses(config, *named)


@pytest.mark.parametrize("written", [
    '{"text": "a", "text": "b"}\n{"text": "c"}\n', '[{"text": "c"}, {"text": "a", "text": "b"}]',
    '{"text": "c"}\n{"text": "a", "meta": {"n": 1, "n": 2}}\n'])
def test_a_key_that_an_object_has_twice_is_named(config: DataConfig, tmp_path: Path, written: str) -> None:
    (tmp_path / "twice.jsonl").write_text(written)
    refuses(of_kind(config, "jsonl", tmp_path / "twice.jsonl"), "twice.jsonl", "occurs twice")


def test_a_complete_cache_need_not_be_written(config: DataConfig) -> None:
    """Folders in place of the cache's files refuse a write, even by root."""
    Path(str(config.path)).write_text(TEXT)
    before = bytes_of(prepare(config, 16))
    for path in Path(config.cache_dir).glob("contents-*.json"):
        path.unlink()
        path.mkdir()
    assert bytes_of(prepare(config, 16)) == before


# Documents in one file


@given(text=st.text("ab<|>\n", max_size=40), separator=st.sampled_from(["<|>", "\n\n", "a", "<<"]), size=st.integers(1, 9))
def test_documents_stand_between_separators(text: str, separator: str, size: int) -> None:
    chunks = [text[start:start + size] for start in range(0, len(text), size)]
    documents = separate([(iter(chunks), "a file", None)], separator, "a file")
    if separator not in text:
        with pytest.raises(UserError, match="does not occur"):
            list(documents)
        return
    assert [document for document, _, _ in documents] == [part.strip("\r\n") for part in text.split(separator)]


@pytest.mark.parametrize("mark", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<eos>", "<|EOT|>",
                                  "<end_of_turn>", "[EOS]", "<|end_of_document|>", "<｜end▁of▁sentence｜>"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_marks_that_end_documents_are_counted_and_separate(config: DataConfig, tmp_path: Path, kind: str, mark: str) -> None:
    path = tmp_path / "text.txt"
    if kind == "text":
        path.write_text("".join(f"{words}\n{mark}\n" for words in WORDS), encoding="utf-8")
    else:
        path = write_lines(tmp_path / "t.jsonl", [f"{words}{mark}" for words in WORDS])
    plain = of_kind(config, kind, path)
    assert prepare(plain, 16).marks.keys() == {mark}
    separated = prepare(dataclasses.replace(plain, separator=mark), 16)
    assert not separated.marks
    train, val = bytes_of(separated)
    assert sorted(train + val) == sorted(WORDS)
    assert f"data.separator={shlex.quote(mark)}" in describe({mark: 3}, takes_separator=True)


def test_a_text_that_only_resembles_a_mark_is_not_a_mark() -> None:
    assert not marks(["if a <end> b", "<s>old</S>", "a | end | b", "x[END]", "<|user|>", "<br/>", "[sep]", "List<EosType>"])


# Wrong input


WRONG_LINES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "not JSON": (b'{"text": "a"}\n\n{"text": \n', ("line 3",)), "no object": (b'{"text": "a"}\n["b"]\n', ("line 2",)),
    "no field": (b'{"body": "a", "n": 1}\n', ("line 1 ", "data.field=body")),
    "a conversation": (b'{"messages": [{"role": "user", "content": "a"}]}\n', ("line 1 ", "data=chat")),
    "no string": (b'{"text": 7}\n', ("line 1: ", "'text'")),
    "latin-1": (b'{"text": "a"}\n{"text": "\xe9"}\n', ("line 2 ", "byte 10 ")),
    "half a pair": (b'{"text": "a"}\n{"text": "\\ud800"}\n', ("line 2",)), "empty": (b"", ()), "blank": (b"\n\n", ()),
    "a list cut off": (b'[{"text": "a"},', ()), "a list of Latin-1": (b'[{"text": "\xe4"}]', ("UTF-8",)),
    "no object in a list": (b'[{"text": "a"}, "b"]', ("entry 2",)), "another format": (b"PAR1", ("Parquet",)),
    "cut off": (gzip.compress(b'{"text": "a"}\n' * 99)[:-9], ("data.path=",)), "not gzip": (b'{"text": "a"}\n\x1f\x8b', ()),
}


@pytest.mark.parametrize(("content", "named"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_wrong_line_is_named(config: DataConfig, tmp_path: Path, content: bytes, named: tuple[str, ...]) -> None:
    path = tmp_path / ("wrong.jsonl.gz" if content[:2] == b"\x1f\x8b" else "wrong.jsonl")
    path.write_bytes(content)
    refuses(of_kind(config, "jsonl", path), "wrong.jsonl", *named)


@pytest.mark.parametrize("place", [70_000, 199_990])
def test_a_character_that_cannot_be_encoded_is_named_by_its_place_in_the_file(config: DataConfig, place: int) -> None:
    """The character is in a later piece of the training text, or in the validation text."""
    text = "line\n" * 40_000
    Path(str(config.path)).write_text(f"{text[:place]}\0{text[place + 1:]}")
    refuses(config, f"character {place} ")


def test_the_kinds_of_data_are_the_files_of_the_folder_and_have_presets() -> None:
    assert {*SOURCES, *TOKENS, "mix"} == {*cli.choices("data")} == {
        "stdlib", "text", "jsonl", "chat", "hf", "binidx", "datatrove", "mix"}


def test_errors_name_the_path_and_the_option(config: DataConfig, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "*.md"):
        refuses(of_kind(config, "text", path), "data.path=", str(path))
    for name in {*SOURCES, *TOKENS} - {"stdlib"}:
        refuses(dataclasses.replace(config, name=name, path=None), f"data={name} ", "data.path")
    for name in ("text", "jsonl", "chat"):
        refuses(of_kind(config, name, tmp_path / "absent"), f"data.path={tmp_path / 'absent'} does not exist")
    refuses(of_kind(config, "stdlib", tmp_path), "data=stdlib conflicts with data.path")
    Path(str(config.path)).write_text(TEXT)
    refuses(dataclasses.replace(config, cache_dir=str(config.path)), "data.cache_dir")
    if sys.platform != "win32":
        refuses(of_kind(config, "text", Path("/dev/null")), "not a pipe or a device")
    with pytest.raises(UserError):
        read_stdlib(tmp_path, 0.1)


def test_a_cache_that_cannot_be_written_is_named_before_a_tokenizer_is_trained(config: DataConfig, tmp_path: Path,
                                                                              capsys: pytest.CaptureFixture[str]) -> None:
    Path(str(config.path)).write_text(TEXT)
    refuses(dataclasses.replace(config, tokenizer="bpe", cache_dir=str(tmp_path / "text.txt" / "cache")), "data.cache_dir")
    assert "tokenizer" not in capsys.readouterr().err


def test_documents_are_read_one_by_one(config: DataConfig, tmp_path: Path) -> None:
    """A wrong line at the end raises only after the lines before it were read."""
    path = write_lines(tmp_path / "a.jsonl", WORDS)
    path.write_bytes(path.read_bytes() + b"wrong\n")
    documents = open_source(of_kind(config, "jsonl", path), tmp_path).documents()
    assert all(isinstance(document, Document) for document in islice(documents, len(WORDS)))
    with pytest.raises(UserError):
        next(documents)
