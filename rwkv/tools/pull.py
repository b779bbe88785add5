"""python -m rwkv.tools.pull NAME...: Downloads models, states and adapters from the Hugging Face Hub, and prints their paths.

A NAME is ORG/REPO, ORG/REPO/FILE or ORG/REPO:Q4_K_M for a GGUF file, each optionally with @REVISION. Every option for a
checkpoint accepts such names, too, and downloads missing files; pull downloads them in advance, for example before going
offline.
"""

from kernels.arguments import Parser
from rwkv.cli import exit_on_user_error
from rwkv.errors import UserError
from rwkv.io import hub


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rwkv.tools.pull", (__doc__ or "").partition(": ")[2])
    parser.add_argument("names", metavar="NAME", nargs="+", help="ORG/REPO, ORG/REPO/FILE or ORG/REPO:Q4_K_M")
    names = parser.parse_args(arguments).names
    with exit_on_user_error():
        for name in names:
            if hub.parse(name) is None:
                raise UserError(f"NAME must be ORG/REPO, ORG/REPO/FILE or ORG/REPO:Q4_K_M; got {name}")
        for name in names:
            print(hub.local(f"hf://{hub.parse(name)}"), flush=True)


if __name__ == "__main__":
    main()
