"""Trains an RWKV language model: `python train.py kernel=taichi_v3 model=small`. Options: configs/ and rwkv/config.py."""

import sys
from dataclasses import replace

import lightning

from rwkv import cli, processes
from rwkv.callbacks import Interrupted
from rwkv.config import TrainConfig
from rwkv.data import DataModule
from rwkv.finetune import new_model
from rwkv.run import Run, as_plain, create, open_run
from rwkv.scale import device_for, prepare_blocks, process_count, share
from rwkv.task import LanguageModel
from rwkv.tokens import prepare
from rwkv.tracking import loggers
from rwkv.training import announce, build_trainer, kernel_for, say, say_result, show_sample


def main(config: TrainConfig, line: cli.CommandLine) -> None:
    sweep = cli.sweep_dir()
    if sweep and config.out_dir:
        config = replace(config, out_dir=f"{config.out_dir}/{sweep.name}")
    if processes.launched():
        with processes.connected():
            train(processes.agreed(lambda: open_run(config, line.keys)))
    else:
        run = open_run(config, line.keys, sweep)
        count = process_count(run.config, sweep is not None)
        train(run) if count == 1 else sys.exit(processes.launch(count))


def train(run: Run) -> None:
    config, device = run.config, device_for(run.config.trainer.accelerator)
    batches = share(config)
    wkv, kernel = kernel_for(config, device)
    data = processes.in_turn(lambda: prepare(config.data, config.model.ctx_len, run.tokenizer))

    lightning.seed_everything(config.seed, verbose=False)
    model = prepare_blocks(new_model(config.model, run.beginning, data.tokenizer, wkv), config.trainer)
    task = LanguageModel(model, config.optim, config.trainer.max_steps, data.val_bytes_per_token)
    resolved = as_plain(config) | {"kernel": {"name": wkv.name}}
    task.describe(resolved, data.tokenizer)
    announce(run, kernel, device, task, data.describe())

    processes.agreed(lambda: create(run, resolved))
    trainer = build_trainer(config, run.out_dir, device, loggers(config.logger, run.out_dir, resolved, run.resume_step))
    loaders = DataModule(data, batches, config.model.ctx_len, config.seed)
    try:
        trainer.fit(task, loaders, ckpt_path=run.resume_from, weights_only=True)
    except Interrupted:
        say(f"\nstopped at step {trainer.global_step}; continue with: python train.py resume=auto out_dir={run.out_dir}")
        sys.exit(130)
    say_result(trainer.callback_metrics, data.sizes.gzip_bpb)
    show_sample(task, data.tokenizer, config, run.out_dir)


if __name__ == "__main__":
    cli.run(main, TrainConfig, "train")
