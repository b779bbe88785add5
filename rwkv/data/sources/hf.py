"""Opens datasets of Hugging Face's `datasets` library, whole or as streams. Each text of a column is a document."""

import glob
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rwkv.config import DataConfig
from rwkv.data.documents.copies import split_documents
from rwkv.data.documents.source import Source
from rwkv.data.files import contents, find_files, natural_key
from rwkv.data.sources.jsonl import between_separators
from rwkv.errors import UserError
from rwkv.io.cache import sha256
from rwkv.io.compressed import COMPRESSED
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of
from rwkv.io.utf8 import require_no_pointer

PATH = ("a .parquet, .arrow, .json, .jsonl, .csv or .tsv file (text also as .gz or .zst), a folder or a pattern of them, a "
        "folder that save_to_disk made, or the name of a dataset on the Hugging Face Hub")
LOCAL = False
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
TEXT = (".json", ".jsonl", ".csv", ".tsv")        # these may be compressed
ENDINGS = (*FORMATS, *(f"{suffix}{compression}" for suffix in TEXT for compression in COMPRESSED))
STRINGS = ("string", "large_string", "string_view")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
ROWS = 256                               # number of rows to read at a time
BATCH = 1000                             # rows of a Parquet file that the library reads at a time


def source(config: DataConfig, cache: Path) -> Source:
    dataset = _load_rows(config)
    texts = [name for name, kind in dataset.features.items() if getattr(kind, "dtype", None) in STRINGS]
    if not len(dataset):
        raise UserError(f"data.path={config.path} has no rows")
    if config.field not in texts:
        raise _no_column(config, texts, dataset.features.get(config.field))

    def documents() -> Iterator[Any]:
        return split_documents(between_separators(_texts(dataset, config), config), config.val_fraction, str(config.path))

    about = f"{describe(config)}, {count_of(len(dataset), 'row')}, column {config.field}"
    identity = sha256([config.field, *filter(None, [config.separator, config.config]), config.split, str(len(dataset)),
                       *_content_hashes(dataset, config, cache)])
    return Source(documents, about, identity, int(dataset.data.nbytes))


def describe(config: DataConfig) -> str:
    """Returns the path, the configuration if one was chosen, and the split."""
    configuration = f", configuration {config.config}" if config.config else ""
    return f"{config.path}{configuration}, split {config.split}"


def _require_configurations(config: DataConfig) -> None:
    path = str(config.path)
    is_files = Path(path).is_file() or glob.has_magic(path) or (_suffix(Path(path)) in FORMATS and not Path(path).is_dir())
    if config.config is not None and (is_files or _is_saved(path)):
        raise UserError(f"data.config={config.config} requires a data set with configurations, which is a name on the Hugging "
                        f"Face Hub or a folder with a README.md that lists them; got data.path={path}")


def _load_rows(config: DataConfig) -> Any:
    _require_configurations(config)
    path, split = str(config.path), config.split
    with _import_datasets(path) as datasets:
        if _is_saved(path):
            return _select_split(datasets.load_from_disk(path), path, split)
        name, options = _load_arguments(config)
        rows = datasets.load_dataset(name, split=split, **options)
        # The library notices a changed file only by its timestamp, which cp -p, rsync and archives preserve
        size = sum(file.stat().st_size for _, file in local_files(path))
        if size and "data_files" in options and rows.info.download_size not in (None, size):
            rows = datasets.load_dataset(name, split=split, download_mode="force_redownload", **options)
        return rows


def open_streamed(config: DataConfig) -> Any:
    """Returns the text column as an IterableDataset of the library `datasets`, whose state_dict is the position."""
    _require_configurations(config)
    path = str(config.path)
    with _import_datasets(path) as datasets:
        if _is_saved(path):
            rows = _select_split(datasets.load_from_disk(path), path, config.split).to_iterable_dataset()
        else:
            name, options = _load_arguments(config)
            rows = datasets.load_dataset(name, split=config.split, streaming=True, **options)
        columns = rows.column_names or [*next(iter(rows), {})]
        if config.field not in columns:
            raise _no_column(config, columns)
        return rows.select_columns([config.field])


@contextmanager
def _import_datasets(path: str) -> Iterator[ModuleType]:
    """Imports the library `datasets`, and converts errors that are raised inside the block to UserErrors."""
    try:
        import datasets
    except ImportError:
        raise UserError("data=hf requires the library `datasets`. Run pip install datasets") from None
    datasets.utils.logging.set_verbosity(logging.CRITICAL)          # the library logs errors before it raises them
    try:
        yield datasets
    except UserError:
        raise
    except Exception as error:           # the library raises exceptions of many classes
        problem = reason(error).rstrip(".")
        raise UserError(f"data.path={path} cannot be loaded with the library `datasets`: {problem}"
                        f"{_remedy(path, problem, error, datasets)}") from None


def _remedy(path: str, problem: str, error: Exception, datasets: ModuleType) -> str:
    if re.search("(Unknown|Bad) split", problem):
        return ". Choose a split with data.split=NAME"
    if problem == "Config name is missing":              # the error's second line lists the names
        return f". {' '.join(str(error).splitlines()[1:2])}: choose one with data.config=NAME"
    names: list[str] = []
    with suppress(Exception):            # a folder that cannot be loaded may have no readable configurations
        names = datasets.get_dataset_config_names(path) if Path(path).is_dir() else []
    if len(names) > 1:
        return f". Choose one of the configurations {', '.join(names)} with data.config=NAME"
    if re.search("reach|exist|find", problem) and not Path(path).exists() and not glob.has_magic(path):
        return f". On this machine there is no file or folder {path}"
    return ""


def reason(error: Exception) -> str:
    """Returns the first line of the message of an error's cause, or of the error if there is no cause.

    When a file cannot be read, only the cause is informative.
    """
    cause = error.__cause__ or error
    first = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    return "the files have different columns" if first == "Couldn't cast" else first


def _no_column(config: DataConfig, columns: list[str], actual: object = None) -> UserError:
    """Returns the error for a missing column, or for a column of the type `actual`. `columns` are those with strings."""
    other = "" if actual is None else f" (its type is {str(actual)[:60]})"
    return UserError(f"data.path={config.path} has no string column {config.field!r}{other}, but has the columns "
                     f"{', '.join(columns) or '(none)'}. Choose a column with data.field=NAME")


def local_files(path: str) -> list[tuple[str, Path]]:
    """Returns the (name, file) of each file that a path, folder or pattern names and whose format is in FORMATS.

    Returns [] for the name of a dataset on the Hub.
    """
    if Path(path).exists() or glob.has_magic(path):
        with suppress(UserError):        # the library may support other files
            return [(name, file) for name, file in find_files(path, ENDINGS) if _suffix(file) in FORMATS]
    return []


def _suffix(path: Path) -> str:
    """Returns the suffix of the format: .jsonl for a.jsonl.gz, but .gz for a file whose format may not be compressed."""
    inner = path.with_suffix("").suffix
    return inner if path.suffix in COMPRESSED and inner in TEXT else path.suffix


def _is_saved(path: str) -> bool:
    return any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json"))


def _load_arguments(config: DataConfig) -> tuple[str, JsonObject]:
    """Returns the arguments for load_dataset: a file format and the files, or the name of a folder or dataset.

    Only the text column of local Parquet files is read, because their other columns may differ. Raises UserError for a path
    that load_dataset would take for a pattern, or a file for the name of a dataset on the Hub.
    """
    path, split = str(config.path), config.split
    if Path(path).is_dir() and glob.has_magic(str(Path(path).resolve())):
        raise UserError(f"data.path={path} must not contain *, ? or [, in which the library `datasets` finds no files of a "
                        "folder. Rename the folder, or use data=jsonl for JSON lines")
    local = [file for _, file in local_files(path)]
    for file in local:
        require_no_pointer(file)
    suffixes = {_suffix(file) for file in local}
    options: JsonObject = {}
    if suffixes == {".parquet"}:
        options = _column_options(config, local)
    elif len(suffixes) == 1 and suffixes <= SEPARATORS.keys():
        options = _text_options(local, SEPARATORS[suffixes.pop()])
    suffix = _suffix(Path(path))
    if suffix not in FORMATS and (Path(path).is_file() or glob.has_magic(path)):
        raise UserError(f"data.path={path} must be {PATH}")
    if suffix not in FORMATS or Path(path).is_dir():
        return path, {"name": config.config, **options}
    is_pattern = glob.has_magic(path) and not Path(path).exists()
    files = sorted((str(file.absolute()) for _, file in find_files(path, ())), key=natural_key) if is_pattern else \
        [str(Path(path).absolute()) if Path(path).is_file() else path]     # absolute: glob.escape below covers the whole path
    name = re.split(r"[\[+]", split)[0].strip()
    return FORMATS[suffix], {"data_files": {name: [*map(glob.escape, files)]}, **options}


def _column_options(config: DataConfig, files: list[Path]) -> JsonObject:
    import pyarrow.parquet

    rows = 0
    for file in files:
        try:
            metadata = pyarrow.parquet.read_metadata(file)
            schema = metadata.schema.to_arrow_schema()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"data.path={file} cannot be read: {reason(error)}") from None
        rows += metadata.num_rows
        if config.field not in schema.names:
            strings = [name for name in schema.names if str(schema.field(name).type) in STRINGS]
            raise _no_column(replace(config, path=str(file)), strings)
    if not rows:
        raise UserError(f"data.path={config.path} has no rows")
    return {"columns": [config.field], "batch_size": BATCH}      # the library's default is the number of rows, which may be 0


def _text_options(files: list[Path], separator: str) -> JsonObject:
    """Returns the options for reading every value of .csv or .tsv files as text, because NA, null and 12 would be converted.

    Raises UserError if two columns have the same name, or if the first row has more values than the header. pandas would take
    the first values of such rows for an index, and put the others into the wrong columns.
    """
    import datasets
    import pandas

    for path in files:
        header = pandas.read_csv(path, sep=separator, nrows=1, header=None, dtype=str, keep_default_na=False)
        names = header.iloc[0].tolist()
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"data.path={path} has {names.count(duplicate)} columns named {duplicate!r}. Rename all but one of "
                            "them")
        if not isinstance(pandas.read_csv(path, sep=separator, nrows=1).index, pandas.RangeIndex):
            raise UserError(f"data.path={path} has more values in the first row than columns. Put values that contain "
                            f"{separator!r} into quotes, and name all columns in the header")
    columns = pandas.read_csv(files[0], sep=separator, nrows=0).columns
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return {"features": features, "sep": separator, "keep_default_na": False, "na_filter": False}


def _select_split(saved: Any, path: str, split: str) -> Any:
    """Returns the rows of `split` in a folder that save_to_disk wrote. A dataset without splits accepts any name."""
    import datasets

    name = re.split(r"[\[+]", split)[0].strip()
    splits = saved if isinstance(saved, dict) else {name: saved}
    if name not in splits:
        raise UserError(f"data.path={path} has no split {name!r}, but has the splits {', '.join(splits)}. Choose a split with "
                        "data.split=NAME")
    if split == name:
        return splits[name]
    instructions = datasets.ReadInstruction.from_spec(split).to_absolute({key: len(rows) for key, rows in splits.items()})
    parts = [splits[part.splitname].select(range(part.from_ or 0, len(splits[part.splitname]) if part.to is None else part.to))
             for part in instructions]
    return datasets.concatenate_datasets(parts)


def _texts(dataset: Any, config: DataConfig) -> Iterator[tuple[str, str, int | None]]:
    only = dataset.select_columns([config.field])
    for start in range(0, len(only), ROWS):
        for number, text in enumerate(only[start:start + ROWS][config.field], start=start):
            yield text or "", f"{config.path}, row {number}", None


def _content_hashes(dataset: Any, config: DataConfig, cache: Path) -> list[str]:
    """Returns the hashes of the dataset's files, or of the texts if the dataset is in memory or consists of selected rows."""
    files = [Path(file["filename"]) for file in dataset.cache_files]
    if files and getattr(dataset, "_indices", None) is None:
        return [content.sha256 for content in contents(files, cache)]
    return [sha256(text for text, _, _ in _texts(dataset, config))]
