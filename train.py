"""Trains an RWKV language model: `python train.py kernel=taichi_v3 model=small`. Options: configs/ and rwkv/config.py."""

import sys

from kernels import threads

if __name__ == "__main__":
    threads.wait_briefly()               # before torch is imported

import lightning

from rwkv import cli, processes, sweep
from rwkv.callbacks import Interrupted
from rwkv.config import TrainConfig
from rwkv.data import DataModule
from rwkv.divergence import Diverged
from rwkv.finetune import new_model
from rwkv.plan import announce, data_for
from rwkv.run import Run, as_plain, create, open_run
from rwkv.scale import device_for, prepare_blocks, process_count, share
from rwkv.task import LanguageModel
from rwkv.tracking import loggers, require
from rwkv.training import build_trainer, kernel_for, leave_report, say, say_result, show_sample


def main(config: TrainConfig, line: cli.CommandLine) -> None:
    if processes.launched():
        with processes.connected():
            train(processes.agreed(lambda: open_run(config, line.keys, line.chosen)))
    else:
        run = open_run(config, line.keys, line.chosen)
        count = process_count(run.config)
        if count > 1:
            run.lock.release()           # the first of the processes takes it
            sys.exit(processes.launch(count))
        train(run)


def train(run: Run) -> None:
    config, device = run.config, device_for(run.config.trainer.accelerator)
    batches = share(config)
    wkv, kernel = kernel_for(config, device)
    processes.agreed(lambda: require(config.logger))
    data = data_for(run, device, wkv.name)
    lightning.seed_everything(config.seed, verbose=False)
    model = prepare_blocks(new_model(config.model, run.beginning, data.tokenizer, wkv), config.trainer)
    task = LanguageModel(model, config.optim, config.trainer.max_steps, data.val_bytes_per_token)
    resolved = as_plain(config) | {"kernel": {"name": wkv.name}}
    task.describe(resolved, data.tokenizer)
    announce(run, kernel, device, task, data)

    processes.agreed(lambda: create(run, resolved))
    logs = loggers(config.logger, run.out_dir, resolved, run.resume_step)
    trainer = build_trainer(run, device, data.tokenizer, logs)
    loaders = DataModule(data, batches, config.model.ctx_len, config.seed, config.trainer.tbptt)
    try:
        trainer.fit(task, loaders, ckpt_path=run.resume_from, weights_only=True)
    except Interrupted:
        say(f"\nstopped at step {trainer.global_step}; continue with: python train.py resume=auto out_dir={run.out_dir}")
        sys.exit(130)
    except Diverged as error:
        leave_report(run.out_dir)
        processes.fail_together(error)
    say_result(trainer.callback_metrics, data.sizes.gzip_bpb)
    leave_report(run.out_dir)
    show_sample(task, data.tokenizer, config, run.out_dir)


if __name__ == "__main__":
    cli.run(main, TrainConfig, "train", sweep.run)
