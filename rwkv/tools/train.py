"""Trains an RWKV language model: `python train.py kernel=taichi_v3 model=small`. Options: configs/ and rwkv/config.py."""

from kernels.backends import threads
from rwkv import cli
from rwkv.config import TrainConfig


def train(config: TrainConfig, line: cli.CommandLine) -> None:
    from rwkv.training import fit        # torch and Lightning: imported when the options are right

    fit.main(config, line)


def sweep(line: cli.CommandLine, jobs: cli.Jobs) -> None:
    from rwkv.training import sweep

    sweep.run(line, jobs)


def main() -> None:
    threads.wait_briefly()               # before torch is imported
    cli.run(train, TrainConfig, "train", sweep)


if __name__ == "__main__":
    main()
