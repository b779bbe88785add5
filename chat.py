"""Chats with a checkpoint in the terminal: `python chat.py checkpoint=runs/latest`; `--help` lists the options and commands."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)         # Ctrl-C during the imports ends the program without a traceback
    from rwkv.programs.chat import main

    main()
