"""python -m rwkv.tools.list [NAME]: Lists models that checkpoint= can name: downloaded ones, and runs in this folder.

With a NAME, ORG/REPO, it lists the models in this repository on the Hugging Face Hub, and which of them are downloaded.
"""

import sys
from pathlib import Path

from kernels.arguments import Parser
from rwkv.checkpoint.location import LAST, saved_runs
from rwkv.cli import exit_on_user_error
from rwkv.config import LATEST
from rwkv.errors import UserError
from rwkv.io import hub
from rwkv.io.atomic import size_on_disk
from rwkv.io.lines import count_of

GB = 1e9


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rwkv.tools.list", (__doc__ or "").partition(": ")[2])
    parser.add_argument("name", metavar="NAME", nargs="?", help="ORG/REPO: a repository on the Hugging Face Hub")
    name = parser.parse_args(arguments).name
    with exit_on_user_error():
        lines = _local_models() if name is None else _hub_models(name)
        width = max((len(name) for name, _, _ in lines), default=0)
        for name, size, note in lines:
            print(f"{name:{width}}  {size / GB:8.2f} GB  {note}".rstrip(), flush=True)
        if not lines:
            print("no runs in this folder, and no downloads: timemix list ORG/REPO lists a repository", file=sys.stderr)


def _local_models() -> list[tuple[str, int, str]]:
    """Returns the name, the size in bytes and a note for each run and each downloaded model.

    Lists the runs and sweeps in runs/, and those in the current folder, where out_dir=NAME creates them.
    """
    runs = sorted({*saved_runs(LATEST.parent), *saved_runs(Path())})
    return [*((str(run), size_on_disk(run / LAST), "a run") for run in runs),
            *((str(each.name), each.size, "downloaded") for each in hub.cached_models())]


def _hub_models(text: str) -> list[tuple[str, int, str]]:
    name = hub.parse(text)
    if name is None or Path(text).exists():
        raise UserError(f"NAME must be a repository on the Hub, such as ORG/REPO; got {text}")
    contents = hub.contents_of(name)
    offers = [offer for offer in hub.model_paths(contents) if f"{offer}/".startswith(f"{name.path}/" if name.path else "")]
    if not offers:
        raise UserError(f"{name} has {count_of(len(contents.files), 'file')}, but no supported model")
    downloaded = {(each.name.repository, each.path.as_posix().partition("/snapshots/")[2]) for each in hub.cached_models()}
    notes = {offer: "downloaded" if (name.repository, f"{contents.commit}/{offer}".rstrip("/")) in downloaded else ""
             for offer in offers}
    return [(str(name._replace(path=offer)), hub.size_of(contents, offer), note) for offer, note in notes.items()]


if __name__ == "__main__":
    main()
