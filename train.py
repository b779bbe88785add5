"""Trains an RWKV language model: `python train.py kernel=taichi_v3 model=small`; `--help` lists the options."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # Ctrl-C during the imports ends the program without a traceback
    from rwkv.programs.train import main

    main()
