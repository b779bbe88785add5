"""Serves a checkpoint over HTTP: `python serve.py checkpoint=runs/latest`; `--help` lists the options."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # Ctrl-C during the imports ends the program without a traceback
    from rwkv.programs.serve import main

    main()
