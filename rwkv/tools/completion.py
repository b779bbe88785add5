"""Prints a shell completion script for bash, zsh or fish: commands, options and values.

  source <(timemix completion bash)                     in ~/.bashrc
  source <(timemix completion zsh)                      in ~/.zshrc, after compinit
  timemix completion fish > ~/.config/fish/completions/timemix.fish
"""

import ast
import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from kernels.arguments import Parser
from rwkv import cli, config
from rwkv.cli import exit_on_user_error
from rwkv.config import ChatConfig, EvaluateConfig, GenerateConfig, ServeConfig, TrainConfig, options

SCHEMAS = {"chat": ChatConfig, "evaluate": EvaluateConfig, "generate": GenerateConfig, "serve": ServeConfig,
           "train": TrainConfig}         # the arguments of these programs are OPTION=VALUE
SHELLS = ("bash", "zsh", "fish")
BASH = """\
_timemix() {{
    local words current="${{COMP_LINE:0:COMP_POINT}}" key
    current="${{current##* }}"           # readline cuts a word at =
    if [ "$COMP_CWORD" -le 1 ]; then
        COMPREPLY=($(compgen -W {commands} -- "$current")); return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) COMPREPLY=($(compgen -f -- "$current")); return ;;
    esac
    key="${{current%%=*}}"
    if [ "$key" = "$current" ]; then
        COMPREPLY=($(compgen -W "$(printf '%s\\n' $words | sed 's/=.*/=/')" -- "$current"))
        [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
        case "${{COMPREPLY[0]}}" in *=) compopt -o nospace ;; esac
    else
        COMPREPLY=($(compgen -W "$(printf '%s\\n' $words | sed -n "s/^$key=//p")" -- "${{current#*=}}"))
        [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "${{current#*=}}"))
    fi
}}
complete -F _timemix timemix
"""
ZSH = """\
_timemix() {{
    local -a words_of
    local key
    if (( CURRENT == 2 )); then compadd -- {commands}; return; fi
    case "${{words[2]}}" in
{cases}
        *) _files; return ;;
    esac
    if compset -P '*='; then
        key="${{IPREFIX##* }}"
        local -a values=(${{${{(M)words_of:#$key*}}#$key}})
        values=(${{values:#}})
        (( $#values )) && compadd -- $values || _files
    else
        local -a keys=(${{(u)${{(M)words_of:#*=*}}/%=*/=}}) others=(${{words_of:#*=*}})
        compadd -S '' -- $keys
        compadd -- $others || (( $#keys )) || _files
    fi
}}
compdef _timemix timemix
"""


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("rwkv.tools.completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    shell = parser.parse_args(arguments).shell
    with exit_on_user_error():
        print(script(shell), end="", flush=True)


def script(shell: str) -> str:
    from rwkv.tools.__main__ import COMMANDS

    table = {name: words(name, module) for name, module in COMMANDS.items()}
    if shell == "fish":
        lines = [f"complete -c timemix -n __fish_use_subcommand -f -a {shlex.quote(' '.join(table))}"]
        for name, entries in table.items():
            condition = f"__fish_seen_subcommand_from {name}"
            lines.append(f"complete -c timemix -n '{condition}' -a {shlex.quote(' '.join(entries))}")
            if without_files := _without_files(entries):
                matches = f'string match -qr "{without_files}" -- (commandline -ct)'
                lines.append(f"complete -c timemix -n '{condition}; and {matches}' -f")
        return "\n".join(lines) + "\n"
    listed = shlex.quote(" ".join(table)) if shell == "bash" else " ".join(table)
    cases = "\n".join(f"        {name}) words={shlex.quote(' '.join(entries))} ;;" if shell == "bash" else
                      f"        {name}) words_of=({' '.join(map(shlex.quote, entries))}) ;;" for name, entries in table.items())
    return (BASH if shell == "bash" else ZSH).format(commands=listed, cases=cases)


def _without_files(entries: list[str]) -> str:
    """Returns a pattern for words that fish must not complete as files: option names, and OPTION=VALUE if values are listed."""
    listed = sorted({entry.partition("=")[0] for entry in entries if entry.partition("=")[2]})
    patterns = [f"^({'|'.join(listed)})="] if listed else []
    names_options = any("=" in entry and not entry.startswith("-") for entry in entries)
    return "|".join(patterns + ["^[^=/]*\\z"] * names_options)


def words(command: str, module: str) -> list[str]:
    """Returns the words that may follow a command: OPTION=VALUE if values are listed, otherwise OPTION=, and flags."""
    if command == "completion":
        return list(SHELLS)
    if command not in SCHEMAS:
        return sorted({*_flags(module), "--help"})
    schema = SCHEMAS[command]
    entries = ["--help", "--cfg", *(["-m"] if schema is TrainConfig else [])]
    for group in cli.groups(schema):
        entries += [f"{group}={choice}" for choice in cli.choices(group)]
    for key, item in options(schema).items():
        values = item.metadata.get("one_of") or (("true", "false") if item.type is bool else ("",))
        entries += [f"{key}={value}" for value in values if key not in cli.groups(schema) and key != "kernel.name"]
    return entries


def _flags(module: str) -> Iterator[str]:
    """Yields the flags of a program that uses argparse, from its source: --FLAG=VALUE for listed values, --FLAG for others."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    modules = {alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
             for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags = [argument.value for argument in node.args if isinstance(argument, ast.Constant)
                     and isinstance(argument.value, str) and argument.value.startswith("--")]
            values = _values(next((item.value for item in node.keywords if item.arg == "choices"), None), modules)
            if "--kernel" in flags:
                values = cli.KERNELS
            yield from (f"{flag}={value}" for flag in flags for value in values)
            yield from (flag for flag in flags if not values)


def _values(choices: ast.expr | None, modules: dict[str, str]) -> Sequence[str]:
    """Returns the values in an argument `choices=`, if it is a literal or a constant of rwkv.config; otherwise ()."""
    if isinstance(choices, (ast.Tuple, ast.List)):
        return [str(item.value) for item in choices.elts if isinstance(item, ast.Constant)]
    if isinstance(choices, ast.Name) and modules.get(choices.id) == config.__name__:
        return [str(value) for value in getattr(config, choices.id)]
    return ()


if __name__ == "__main__":
    main()
