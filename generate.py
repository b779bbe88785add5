"""Generates text: `python generate.py checkpoint=runs/latest prompt="def main"`; `--help` lists the options."""

from rwkv.programs.generate import main

if __name__ == "__main__":
    main()
