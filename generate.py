"""Generates text: `python generate.py checkpoint=runs/latest prompt="def main"`; `--help` lists the options."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # Ctrl-C during the imports ends the program without a traceback
    from rwkv.programs.generate import main

    main()
