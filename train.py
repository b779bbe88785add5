"""Trains an RWKV language model: `python train.py kernel=taichi_v3 model=small`. Options: configs/ and rwkv/config.py."""

import sys
from dataclasses import replace

import lightning

from kernels.select import AUTO, select, why_auto
from rwkv import cli
from rwkv.callbacks import Interrupted
from rwkv.config import TrainConfig
from rwkv.data import DataModule
from rwkv.finetune import new_model
from rwkv.run import Run, as_plain, create, open_run
from rwkv.task import LanguageModel
from rwkv.tokens import prepare
from rwkv.tracking import loggers
from rwkv.training import announce, build_trainer, device_for, dtype_for, say, show_sample


def main(config: TrainConfig, line: cli.CommandLine) -> None:
    sweep = cli.sweep_dir()
    if sweep and config.out_dir:
        config = replace(config, out_dir=f"{config.out_dir}/{sweep.name}")
    train(open_run(config, given=line.keys, default_dir=sweep))


def train(run: Run) -> None:
    config, device = run.config, device_for(run.config.trainer.accelerator)
    dtype = dtype_for(config.trainer.precision)
    wkv = select(config.kernel.name, device, dtype)
    kernel = why_auto(device, dtype) if config.kernel.name == AUTO else wkv.name
    data = prepare(config.data, config.model.ctx_len, run.tokenizer)

    lightning.seed_everything(config.seed, verbose=False)
    model = new_model(config.model, run.beginning, data.tokenizer, wkv)
    task = LanguageModel(model, config.optim, config.trainer.max_steps, data.val_bytes_per_token)
    resolved = as_plain(config) | {"kernel": {"name": wkv.name}}
    task.describe(resolved, data.tokenizer)
    announce(run, kernel, device, task, data.describe())

    create(run, resolved)
    trainer = build_trainer(config.trainer, config.optim.grad_clip, run.out_dir, device,
                            loggers(config.logger, run.out_dir, resolved, run.resume_step))
    fit(trainer, task, DataModule(data, config.data, config.model.ctx_len, config.seed), run)
    show_sample(task, data.tokenizer, config, run.out_dir)


def fit(trainer: lightning.Trainer, task: LanguageModel, data: DataModule, run: Run) -> None:
    try:
        trainer.fit(task, data, ckpt_path=run.resume_from, weights_only=True)
    except Interrupted:
        say(f"\nstopped at step {trainer.global_step}; continue with: python train.py resume=auto out_dir={run.out_dir}")
        sys.exit(130)
    if trainer.global_step % run.config.trainer.val_every:
        trainer.validate(task, data, verbose=False)
    metrics = trainer.callback_metrics
    say(f"val/loss {metrics['val/loss']:.4f} nats per token, val/bpb {metrics['val/bpb']:.4f} bits per byte "
        f"(gzip -9 of the same text: {data.corpus.sizes.gzip_bpb:.4f})")


if __name__ == "__main__":
    cli.run(main, TrainConfig, "train")
