"""python -m rwkv.tools.list [NAME]: Lists the models that checkpoint= can name: downloaded ones, and runs in this folder.

With a NAME, ORG/REPO, it lists what this repository on the Hugging Face Hub offers, and which of it has been downloaded.
"""

from pathlib import Path

from kernels.arguments import Parser
from rwkv.checkpoint.location import LAST
from rwkv.cli import exit_on_user_error
from rwkv.config import LATEST
from rwkv.errors import UserError
from rwkv.io import hub
from rwkv.io.atomic import size_on_disk
from rwkv.io.lines import counted

GB = 1e9


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rwkv.tools.list", (__doc__ or "").partition(": ")[2])
    parser.add_argument("name", metavar="NAME", nargs="?", help="ORG/REPO: a repository on the Hugging Face Hub")
    given = parser.parse_args(arguments)
    with exit_on_user_error():
        lines = _here() if given.name is None else _offered(given.name)
        width = max((len(name) for name, _, _ in lines), default=0)
        for name, size, note in lines:
            print(f"{name:{width}}  {size / GB:8.2f} GB  {note}".rstrip(), flush=True)


def _here() -> list[tuple[str, int, str]]:
    """For each run and each downloaded model its name, its size in bytes, and a note."""
    runs = sorted(path for path in LATEST.parent.glob(f"*/{LAST}") if path.parents[1].name != LATEST.name)
    return [*((str(path.parents[1]), size_on_disk(path), "a run") for path in runs),
            *((str(each.name), each.size, "downloaded") for each in hub.cached())]


def _offered(text: str) -> list[tuple[str, int, str]]:
    name = hub.parse(text)
    if name is None or Path(text).exists():
        raise UserError(f"{text} is not a repository on the Hub: expected ORG/REPO")
    contents = hub.contents_of(name)
    offers = [offer for offer in hub.offers(contents) if f"{offer}/".startswith(f"{name.path}/" if name.path else "")]
    if not offers:
        raise UserError(f"{name} has nothing that this program reads, among {counted(len(contents.files), 'file')}")
    here = {(each.name.repository, each.path.as_posix().partition("/snapshots/")[2]) for each in hub.cached()}
    notes = {offer: "downloaded" if (name.repository, f"{contents.commit}/{offer}".rstrip("/")) in here else ""
             for offer in offers}
    return [(str(name._replace(path=offer)), hub.size_of(contents, offer), note) for offer, note in notes.items()]


if __name__ == "__main__":
    main()
