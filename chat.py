"""Chats with a checkpoint in the terminal: `python chat.py checkpoint=runs/latest`; `--help` lists the options and commands."""

from rwkv.programs.chat import main

if __name__ == "__main__":
    main()
