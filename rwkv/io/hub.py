"""Downloads models by name from the Hugging Face Hub.

Every option for a checkpoint, state, adapter, tokenizer or template accepts these names:

    ORG/REPO                 a repository with config.json, adapter_config.json or an index of shards, or with one weights file
    ORG/REPO/PATH            a file or a directory inside the repository
    ORG/REPO:Q4_K_M          the GGUF file with this quantisation
    NAME@REVISION            a branch, a tag or a commit; main by default
    hf://NAME                the same; also a browser's address, https://huggingface.co/ORG/REPO/blob/main/PATH

A name that exists on disk, or whose first folder exists, is a path. The package huggingface_hub downloads the files, so its
cache, token, offline mode and progress bar apply. A download resumes after its connection breaks (before version 1.25 of that
package, only when the command is repeated). Only files that will be read are downloaded.
"""

import functools
import importlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import NamedTuple, NoReturn

from kernels.arguments import path_of
from rwkv.errors import CheckpointError

EXTRA = "pip install huggingface_hub"
MAIN = "main"
FAILURES = (OSError, json.JSONDecodeError, UnicodeEncodeError)           # in addition to the HTTP library's errors
UNAUTHORIZED = 401                       # the HTTP status for a wrong token
SHOWN = 4                                # an error message lists at most this many names
CARD = "README.md"
RUNS = "runs/"                           # this begins a path, even if the folder does not exist yet
COMMIT = re.compile(r"[0-9a-f]{40}")
SCHEME = re.compile(r"(hf:|(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)(?=/))/*")
REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(refs/(?:pr|convert)/[\w.-]+|[^/:@]+))?"
                        r"(?:/([^:@]*))?((?:[:@][^:@]+)*)")
ON_A_PAGE = re.compile(r"(?:blob|resolve|raw|tree)/([^/]+)(?:/(.*))?")         # matches the path in a browser's address
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf\Z)")
QUANTISATION = re.compile(r"(?<![A-Za-z0-9])(?:IQ\d\w*|Q\d\w*|T?BF16|F16|F32|MXFP4)(?![A-Za-z0-9_])", re.IGNORECASE)
WEIGHTS = (".pth", ".safetensors", ".gguf", ".st", ".ckpt", ".bin", ".ggmf")
TRAINER_STATE = re.compile(r"(optimizer|scheduler|scaler|rng_state(_\d+)?|training_args|.*_optim_states)\.(pt|pth|bin)")
FILES = (*WEIGHTS, ".pt", ".json", ".txt", ".jinja", ".jinja2")                # ORG/NAME with such a suffix is a path
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
MARKS = (CONFIG, ADAPTER_CONFIG)         # a directory with one of these is a model or adapter
WHOLE = ("model.safetensors", "pytorch_model.bin")       # a directory's file with all weights has one of these names
INDEX = ".index.json"
INDICES = tuple(name + INDEX for name in WHOLE)
MODEL_WEIGHTS = (*WHOLE, *INDICES)
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
DIRECTORY_WEIGHTS = (*MODEL_WEIGHTS, *ADAPTER_WEIGHTS)   # the preferred file is first
BESIDE = (".json", ".jinja", ".txt", ".model", ".md")    # a directory's other files have these suffixes


class Name(NamedTuple):
    """A name on the Hub.

    Attributes:
        path: the path within the repository; "" is the repository itself.
        quantisation: selects a GGUF file by its quantisation, such as Q4_K_M.
        revision: a branch, a tag or a commit; None is main.
    """

    repository: str
    path: str = ""
    quantisation: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        path = f"/{self.path}" if self.path else ""
        quantisation = f":{self.quantisation}" if self.quantisation else ""
        return f"{self.repository}{path}{quantisation}{f'@{self.revision}' if self.revision else ''}"


class Download(NamedTuple):
    """A downloaded file or directory: its path on disk, and its name with the commit (`pinned`).

    The pinned name always stands for the same content.
    """

    path: Path
    pinned: str


class Contents(NamedTuple):
    """The files of a repository at a commit.

    Attributes:
        files: the sizes in bytes by path; None is an unknown size.
        offline: the reason why the list is from the cache; None if it is from the Hub.
    """

    commit: str
    files: Mapping[str, int | None]
    offline: str | None = None


def parse(text: str | Path) -> Name | None:
    """Parses a name on the Hub; returns None for a path. Raises CheckpointError for hf:// or an address without a model."""
    text = text.as_posix() if isinstance(text, Path) else text
    scheme = SCHEME.match(text)
    body = text[scheme.end():].partition("?")[0].rstrip("/") if scheme else text
    match = REPOSITORY.fullmatch(body)
    if match is None or ".." in body.split("/"):
        if scheme:
            raise CheckpointError(f"{text} must name a model on the Hub, such as hf://ORG/REPO/FILE.pth or hf://ORG/REPO:Q4_K_M")
        return None
    repository, revision, path, tail = match.groups(default="")
    if not scheme and (text.endswith("/") or (not path and repository.lower().endswith(FILES))):
        return None
    if scheme and (page := ON_A_PAGE.fullmatch(path)):
        revision, path = page[1], page[2] or ""
    quantisation = None
    for mark, value in re.findall(r"([:@])([^:@]+)", tail):
        if mark == ":":
            quantisation = value
        else:
            revision = value
    if not scheme and (body.startswith(RUNS) or Path(repository.partition("/")[0]).is_dir()):
        return None
    return Name(repository, path.strip("/"), quantisation, revision or None)


def local(name: str | Path, noun: str = "checkpoint") -> Path:
    """Downloads a name on the Hub and returns its path on disk. Returns other paths, even missing ones, with ~/ expanded.

    `noun` is what error messages call the file. Raises CheckpointError if the Hub has no such file, if the Hub is unreachable
    and the file is not cached, or if huggingface_hub is not installed.
    """
    download = _fetch_unless_path(name, noun)
    return path_of(name) if download is None else download.path


def fetch(name: str | Path, noun: str = "checkpoint") -> Download:
    """Downloads a name as local() does, and also returns the name pinned to a commit. A path is only made absolute."""
    return _fetch_unless_path(name, noun) or Download(Path(name), str(Path(name).resolve()))


def _fetch_unless_path(name: str | Path, noun: str) -> Download | None:
    if Path(name).exists() or Path(name).is_symlink() or (parsed := parse(name)) is None:
        return None
    return _fetch(parsed, noun)


@functools.cache
def _fetch(name: Name, noun: str) -> Download:
    hub = _client(name, noun)
    if name.revision and COMMIT.fullmatch(name.revision) and name.path.endswith(FILES) and not PART.search(name.path):
        path = _snapshots_folder(hub, name.repository) / name.revision / name.path
        if path.is_file():               # a commit never changes, so no request is needed
            return Download(path, str(name))
    contents = contents_of(name, noun)
    target, needed = choose(name, contents, noun)
    if CARD in contents.files and CARD not in needed:            # the card states the licence
        needed.insert(0, CARD)
    folder = _snapshots_folder(hub, name.repository) / contents.commit
    is_cached = all((folder / file).is_file() for file in needed)
    if not is_cached:
        _download(hub, name, folder, needed)
    index = folder / needed[-1]
    if index.name.endswith(INDEX) and target != needed[-1]:
        shards = _shards(index, PurePosixPath(needed[-1]).parent)
        if not all((folder / file).is_file() for file in shards):
            _download(hub, name, folder, shards)
            is_cached = False
        needed = [*needed, *shards]
    pinned = str(Name(name.repository, target, None, contents.commit))
    size = sum((folder / file).stat().st_size for file in needed)
    source = f"from the cache{f', because {contents.offline}' if contents.offline else ''}" if is_cached else \
        f"{size / 1e6:,.1f} MB from {hub.constants.ENDPOINT}"
    print(f"hub: {name}: {source}: {folder / target}", file=sys.stderr, flush=True)
    return Download(folder / target, pinned)


def contents_of(name: Name, noun: str = "checkpoint") -> Contents:
    """Lists the files of the repository, from the Hub, or from the cache if the Hub is unreachable."""
    hub = _client(name, noun)
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        info = hub.HfApi(library_name="timemix").model_info(name.repository, revision=name.revision, files_metadata=True)
    except errors.GatedRepoError:
        raise CheckpointError(f"{name.repository} is gated: accept the terms at {hub.constants.ENDPOINT}/{name.repository}, "
                              "and log in with `hf auth login` or set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(f"there is no {noun} at {name}: no such path exists, and {hub.constants.ENDPOINT} has no "
                              f"repository {name.repository}. Check the name. For a private repository, log in with "
                              "`hf auth login` or set HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{name.repository} has no revision {name.revision!r}: name a branch, a tag or a full commit "
                              "hash, or omit the revision to use main") from None
    except (*errors.HfHubHTTPError.__bases__, *FAILURES) as error:
        reason = _cause(hub, error) or f"{hub.constants.ENDPOINT} cannot be reached ({_first_line(error)})"
        return _cached_contents(hub, name, noun, reason)
    return Contents(info.sha, {file.rfilename: file.size for file in info.siblings})


def _cause(hub: ModuleType, error: Exception) -> str | None:
    """Returns a clause that says why the Hub or the cache cannot be used, or None if the connection failed."""
    if hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, json.JSONDecodeError):
        return f"{hub.constants.ENDPOINT} does not answer as the Hub does, perhaps because of a proxy or a login page"
    if isinstance(error, UnicodeEncodeError):
        return "the token in HF_TOKEN, or that of `hf auth login`, contains invalid characters"
    if getattr(getattr(error, "response", None), "status_code", None) == UNAUTHORIZED:
        return f"{hub.constants.ENDPOINT} rejects the token in HF_TOKEN, or that of `hf auth login`"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used: {error.strerror}"
    return None


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]


def _cached_contents(hub: ModuleType, name: Name, noun: str, reason: str) -> Contents:
    snapshots = _snapshots_folder(hub, name.repository)
    revision = name.revision or MAIN
    ref = snapshots.parent / "refs" / revision
    commit = _commit_of(ref) if ref.is_file() else revision
    folder = snapshots / commit
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    if not files:
        commits = sorted(other.name for other in snapshots.glob("*") if any(map(Path.is_file, other.rglob("*"))))
        has = (f"has other commits of {name.repository}: append one of them to the name (@{', @'.join(commits[:SHOWN])})"
               if commits else "does not contain the repository")
        raise CheckpointError(f"there is no {noun} at {name}: no such path exists, {reason}, and the cache "
                              f"{snapshots.parent.parent} {has}")
    return Contents(commit, files, reason)


def choose(name: Name, contents: Contents, noun: str = "checkpoint") -> tuple[str, list[str]]:
    """Returns the path of the file or directory that a name refers to, and the files to download; an index of shards is last.

    Raises CheckpointError if no file or directory matches, or several do.
    """
    files = contents.files
    if name.path in files and not name.quantisation:
        folder, _, file = name.path.rpartition("/")
        if not is_directory(file, {other.rpartition("/")[2] for other in files if other.rpartition("/")[0] == folder}):
            prefix = f"{folder}/" if folder else ""
            configured = file in WHOLE and prefix + CONFIG in files
            return name.path, [*(_files_beside(files, prefix) if configured else []), *_parts_of(name.path, files)]
        name = name._replace(path=folder)
    prefix = f"{name.path}/" if name.path else ""
    inside = [file for file in files if file.startswith(prefix)]
    if not inside:
        _raise_not_found(name, contents, noun)
    if name.quantisation:
        chosen = _choose_quantisation(name, [file for file in inside if file.endswith(".gguf")])
        return chosen, _parts_of(chosen, files)
    direct = [file for file in inside if "/" not in file.removeprefix(prefix)]
    weights = next((prefix + file for file in DIRECTORY_WEIGHTS if prefix + file in files), None)
    if weights and name.path in _model_folders(direct):
        return name.path, [*_files_beside(files, prefix), weights]
    single = _without_later_parts(file for file in direct if has_weights(file))
    if len(single) == 1:
        return single[0], _parts_of(single[0], files)
    models = [*single, *_model_folders(inside)]
    _raise_ambiguous(name, models or _without_later_parts(file for file in inside if has_weights(file)), noun)


def has_weights(file: str, suffixes: tuple[str, ...] = WEIGHTS) -> bool:
    """Returns True if a file with this name may contain weights: not the state of a trainer of transformers or DeepSpeed."""
    return file.endswith(suffixes) and not TRAINER_STATE.fullmatch(file.rpartition("/")[2])


def has_configuration(file: Path) -> bool:
    """Returns True if `file` has all weights of a model, and a config.json is in the same folder."""
    return file.name in WHOLE and file.is_file() and (file.parent / CONFIG).is_file()


def is_directory(file: str, beside: Collection[str]) -> bool:
    """Returns True if `file` has the only weights in a directory with a configuration, and so stands for the directory.

    `beside` are the names of the files in the folder. For an adapter, the weights of a model do not count.
    """
    if file in ADAPTER_WEIGHTS:
        return ADAPTER_CONFIG in beside and {*ADAPTER_WEIGHTS} & {*beside} == {file}
    return file in WHOLE and CONFIG in beside and ADAPTER_CONFIG not in beside and {*MODEL_WEIGHTS} & {*beside} == {file}


def model_paths(contents: Contents) -> list[str]:
    """Returns the paths in a repository that can be read as a model or adapter; "" is the repository itself."""
    folders = _model_folders(contents.files)
    files = [file for file in contents.files if has_weights(file) and file.rpartition("/")[0] not in folders]
    return sorted([*folders, *_without_later_parts(files)])


def _model_folders(files: Iterable[str]) -> list[str]:
    """Returns the folders with a configuration or an index of shards; "" is the repository itself."""
    return [*dict.fromkeys(file.rpartition("/")[0] for file in files if file.rpartition("/")[2] in (*MARKS, *INDICES))]


def _files_beside(files: Iterable[str], prefix: str) -> list[str]:
    """Returns a directory's files other than weights. `prefix` is the directory's path with a slash, or ""."""
    inside = {file: file.removeprefix(prefix) for file in files if file.startswith(prefix)}
    return [file for file, name in inside.items() if name.endswith(BESIDE) and not name.endswith(INDEX)
            and ("/" not in name or name.startswith("additional_chat_templates/"))]


def _without_later_parts(files: Iterable[str]) -> list[str]:
    return [file for file in sorted(files) if not PART.search(file) or "-00001-of-" in file]


def _parts_of(file: str, files: Collection[str]) -> list[str]:
    if not PART.search(file):
        return [file]
    return sorted(other for other in files if PART.sub("", other) == PART.sub("", file))


def _choose_quantisation(name: Name, files: list[str]) -> str:
    def quantisations(file: str) -> list[str]:
        return [quantisation.upper() for quantisation in QUANTISATION.findall(PART.sub("", PurePosixPath(file).name))]

    requested = str(name.quantisation).upper()
    chosen = [file for file in _without_later_parts(files) if requested in quantisations(file)]
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        raise CheckpointError(f"{name.repository} has several GGUF files in {requested}: name one file, such "
                              f"as {_examples(name, chosen)}")
    available = sorted({quantisation for file in files for quantisation in quantisations(file)})
    raise CheckpointError(f"{name.repository} has no GGUF file in {requested}: " +
                          (f"choose from {', '.join(available)}" if available else
                           "no GGUF file in this repository has a quantisation in its name"))


def _raise_not_found(name: Name, contents: Contents, noun: str) -> NoReturn:
    by_name = {file.lower(): file for file in (*contents.files, *model_paths(contents)) if file}
    by_file_name = {file.rpartition("/")[2]: file for file in by_name}
    close = get_close_matches(name.path.lower(), by_name, n=SHOWN - 1, cutoff=0.6)
    file_name = name.path.lower().rpartition("/")[2]
    close += [by_file_name[match] for match in get_close_matches(file_name, by_file_name, n=1, cutoff=0.6)]
    nearest = [by_name[file] for file in dict.fromkeys(close)][:SHOWN - 1]
    where = f"the cache, which is used because {contents.offline}," if contents.offline else name.repository
    hint = f"did you mean {_examples(name, nearest, ' or ')}?" if nearest else \
        f"available: {_examples(name, model_paths(contents) or sorted(contents.files))}"
    raise CheckpointError(f"there is no {noun} at {name}: {where} has no {name.path}; {hint}")


def _raise_ambiguous(name: Name, names: list[str], noun: str) -> NoReturn:
    if not names:
        raise CheckpointError(f"{name} has no weights in a supported format: expected config.json with model.safetensors, or "
                              f"a file with one of the suffixes {', '.join(WEIGHTS)}")
    raise CheckpointError(f"{name} contains {len(names)} files or directories that fit: name one {noun}, such as "
                          f"{_examples(name, names)}")


def _examples(name: Name, paths: list[str], separator: str = ", ") -> str:
    more = ", ..." if len(paths) > SHOWN else ""
    return separator.join(str(name._replace(path=path, quantisation=None)) for path in paths[:SHOWN]) + more


def _shards(index: Path, folder: PurePosixPath) -> list[str]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(folder / PurePosixPath(file).name) for file in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index} must have a weight_map that maps tensors to files") from None


def _download(hub: ModuleType, name: Name, folder: Path, files: list[str]) -> None:
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        for file in files:
            hub.hf_hub_download(name.repository, file, revision=name.revision, library_name="timemix")
    except (*errors.HfHubHTTPError.__bases__, *FAILURES, errors.EntryNotFoundError) as error:
        if cause := _cause(hub, error):
            raise CheckpointError(f"{name} cannot be downloaded, because {cause}") from None
        raise CheckpointError(f"the download of {name} was interrupted ({_first_line(error)}): repeat the command to continue "
                              "the download") from None
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"the download of {name} is incomplete: {missing[0]} is missing. Repeat the command to "
                              "continue the download")


def _commit_of(ref: Path) -> str:
    """Returns the commit that a file in refs/ names. Another program's file there, such as .DS_Store, names none."""
    return ref.read_text(encoding="ascii", errors="replace").strip()


def _snapshots_folder(hub: ModuleType, repository: str) -> Path:
    return Path(hub.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"


def _client(name: Name, noun: str) -> ModuleType:
    try:
        importlib.import_module("huggingface_hub.constants")
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise CheckpointError(f"there is no {noun} at {name}: no such path exists, and downloading from the Hugging Face Hub "
                              f"requires the package {error.name}: {EXTRA}") from None


class Cached(NamedTuple):
    """A model or adapter in the cache.

    `name` is its name on the Hub. The revision is the commit if no branch or tag refers to this commit.
    """

    name: Name
    size: int                            # bytes
    path: Path


def cached_models() -> list[Cached]:
    """Returns the models and adapters in the cache, sorted by repository."""
    hub = _client(Name("the cache"), "model")
    models = []
    for snapshots in sorted(Path(hub.constants.HF_HUB_CACHE).glob("models--*/snapshots")):
        refs = snapshots.parent / "refs"
        revisions = {_commit_of(ref): ref.relative_to(refs).as_posix() for ref in refs.rglob("*") if ref.is_file()}
        for folder in sorted(path for path in snapshots.iterdir() if path.is_dir()):
            revision = revisions.get(folder.name, folder.name)
            name = Name(snapshots.parent.name.removeprefix("models--").replace("--", "/", 1), "", None,
                        None if revision == MAIN else revision)
            sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
            contents = Contents(folder.name, sizes)
            models += [Cached(name._replace(path=offer), size_of(contents, offer), folder / offer)
                       for offer in model_paths(contents)
                       if offer in sizes or any((folder / offer / file).is_file() for file in DIRECTORY_WEIGHTS)]
    return models


def size_of(contents: Contents, offer: str) -> int:
    """Returns the size in bytes of a file and the other parts of a split file, or of all files in a directory."""
    files = _parts_of(offer, contents.files) if offer in contents.files else \
        [file for file in contents.files if file.startswith(f"{offer}/" if offer else "")]
    return sum(contents.files[file] or 0 for file in files)
