"""Runs EleutherAI's lm-evaluation-harness on a checkpoint.

  python -m rwkv.tools.lm_eval --model_args checkpoint=FILE.pth,tokenizer=world --tasks lambada_openai
  python -m rwkv.tools.lm_eval --model_args checkpoint=DIRECTORY,dtype=int8 --tasks arc_easy piqa --batch_size 16
  python -m rwkv.tools.lm_eval --help

The arguments are those of the harness's own command line, `lm_eval run`, with the model timemix, whose model_args are
checkpoint=, tokenizer=, end_of_text=, kernel=, dtype= and chunk_len=, as in evaluate. Tasks that sample use top_p=1 by default.
pip install -e '.[lm-eval]' installs the harness.
"""

import sys
from collections.abc import Sequence

from kernels.arguments import Parser
from kernels.machine import threads
from rwkv.cli import exit_on_user_error
from rwkv.errors import UserError


def command_line(arguments: Sequence[str]) -> list[str]:
    """Returns the harness's arguments: `arguments` with the command `run`, and with --model timemix if they name no model."""
    rest = list(arguments[1:] if arguments[:1] == ["run"] else arguments)
    has_model = any(argument in ("-M", "--model") or argument.startswith("--model=") for argument in rest)
    return ["run", *([] if has_model else ["--model", "timemix"]), *rest]


def main() -> None:
    threads.wait_briefly()               # must be called before torch is imported
    with exit_on_user_error():
        try:
            import lm_eval.__main__ as harness
        except ImportError as error:
            if {"-h", "--help"} & {*sys.argv[1:]}:           # the rest of the help is the harness's own
                print(Parser.rewrite_usage(__doc__ or "").rstrip(), flush=True)
                return
            raise UserError(f"lm_eval cannot be imported ({error}): in a clone of this project's repository, run pip install "
                            "-e '.[lm-eval]'") from None
        from rwkv.tools import _harness

        _harness.register()
        sys.argv = ["lm_eval", *command_line(sys.argv[1:])]
        harness.cli_evaluate()


if __name__ == "__main__":
    main()
