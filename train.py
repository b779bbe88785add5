"""Trains an RWKV language model: `python train.py kernel=taichi_v3 model=small`; `--help` lists the options."""

from rwkv.programs.train import main

if __name__ == "__main__":
    main()
