"""Serves a checkpoint over HTTP: `python serve.py checkpoint=runs/latest`; `--help` lists the options."""

from rwkv.programs.serve import main

if __name__ == "__main__":
    main()
