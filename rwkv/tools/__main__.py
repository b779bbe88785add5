"""`timemix COMMAND [ARGUMENT...]`, also `python -m rwkv.tools COMMAND ...`: runs any program of this project.

The commands are the names of the programs in rwkv/programs and rwkv/tools, and kernels and bench, which stand for
`python -m kernels` and `python -m kernels.bench`. Other modules in the two folders are not programs.
"""

import ast
import re
import runpy
import signal
import sys
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

FOLDERS = (Path(__file__).parent.parent / "programs", Path(__file__).parent)
PROGRAM = 'if __name__ == "__main__":'     # this line marks a file as a program
COMMANDS = {path.stem: f"rwkv.{folder.name}.{path.stem}" for folder in FOLDERS for path in sorted(folder.glob("[a-z]*.py"))
            if PROGRAM in path.read_text(encoding="utf-8")}
COMMANDS |= {"kernels": "kernels.__main__", "bench": "kernels.bench.__main__"}
UNKNOWN = 2                              # the exit status for an unknown command


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # Ctrl-C during the imports ends the program without a traceback
    from kernels.arguments import Parser
    from kernels.machine import threads
    from rwkv.cli import exit_on_user_error
    from rwkv.commands import commands_as_typed
    from rwkv.io.lines import wrap_hanging

    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("--help", "-h"):
        with exit_on_user_error():
            print("\n".join(["timemix COMMAND [ARGUMENT...]; timemix COMMAND --help lists the arguments", "",
                             *(wrap_hanging(f"  {name:12}{_first_sentence(module)}", 14, sys.stdout)
                               for name, module in COMMANDS.items())]), flush=True)
    elif command in ("--version", "-V"):
        print("timemix", _version())
    elif command.replace("-", "_") not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        print(f"error: unknown command {command!r}. {hint}The commands are: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(UNKNOWN)
    else:
        command = command.replace("-", "_")
        threads.wait_briefly()           # must be called before torch is imported
        sys.argv = [f"timemix {command}", *arguments]
        Parser.rewrite_usage = commands_as_typed
        with exit_on_user_error():       # for Ctrl-C during the command's imports
            runpy.run_module(COMMANDS[command], run_name="__main__")


def _version() -> str:
    try:
        return metadata.version("timemix")
    except metadata.PackageNotFoundError:
        return "(a clone that is not installed)"


def _first_sentence(module: str) -> str:
    """Returns the first sentence of a module's docstring, without the command before it, and without importing the module."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    about = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"[.:;](?:\s|$)", " ".join(re.sub(r"^python -m .*?: ", "", about).split()))[0]
    return sentence[0].upper() + sentence[1:]


if __name__ == "__main__":
    main()
