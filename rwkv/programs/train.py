"""Trains an RWKV language model with the time-mixing kernel of your choice.

  python train.py                                     a small model, in minutes
  python train.py kernel=taichi_v3 model=small
  python train.py model=rwkv7_tiny                    RWKV-7 instead of RWKV-4
  python train.py data=text data.path=FILE data.tokenizer=char
  python train.py data=jsonl data.path="corpus/*.jsonl.gz" plan=true
  python train.py model=169m trainer.max_tokens=1e9 plan=true
  python train.py init_from=FILE data=text data.path=FILE             fine-tune
  python train.py init_from=FILE data=chat data.path=TALKS.jsonl tune=lora
  python train.py resume=auto                         continue the latest run
  python train.py -m kernel=conv1d,taichi_v3 seed=0,1         four runs in turn
  python train.py -m optim.lr=1e-3,3e-3 sweep.jobs=2          two at a time
  python train.py trainer=ddp trainer.devices=2       two processes

Continuing. Ctrl-C saves and stops; so do SIGTERM, SIGHUP of a terminal that
closes (not under nohup), and what batch systems send before a job's time is
over: SIGUSR1, SIGUSR2, SIGXCPU. The exit status is then 130. In SLURM:
  #SBATCH --signal=USR1@120
  srun python train.py out_dir=DIRECTORY resume=auto OPTION=VALUE...
  [ $? = 130 ] && scontrol requeue $SLURM_JOB_ID
resume=auto, with out_dir=DIRECTORY for an older run, continues a run that was
stopped or killed, with bit-identical results. One that has saved nothing
begins again, and what it had written goes to DIRECTORY/unsaved-1. The options
of the model and the data, trainer.accumulate, trainer.val_tokens, optim.name,
optim.weight_decay and optim.*_lr_scale keep their values; other options on the
command line take effect from the next step. trainer.max_steps=MORE trains on,
as does trainer.epochs=MORE.

Recipes. experiment=FILE.yaml takes options from a file, in groups or by their
names on the command line, which may still replace them; FILE may be in any
folder, and may be the config.yaml of an earlier run:
  optim: {lr: 1e-4, warmup_steps: 100}
  model: rwkv7_tiny

Conversations. data=chat reads lines with messages, conversations, or prompt
and completion; the loss is on the assistant's answers alone. tune=lora trains
adapters, tune=state the state before the first token (RWKV-7), of a model
whose weights stay as they are, in fewer bytes with tune.base=bfloat16, int8 or
int4. Such a run's checkpoints name the file of init_from=, which must stay
where it is; at the end it leaves adapter/ for the PEFT library, or
state.safetensors for generate.py and time_state.pth in RWKV-PEFT's layout.
python -m rwkv.tools.convert RUN FILE merges adapters into the weights.

Several GPUs or processes. trainer=ddp, or trainer=fsdp for a model too large
for one GPU, takes all GPUs of the machine, or trainer.devices=N processes. On
several machines, run the same command on each:
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
    --rdzv-endpoint=HOST:29500 train.py trainer=ddp trainer.num_nodes=2
With trainer=fsdp each process has a share of the weights, gradients and
optimiser state, and writes its own part of a checkpoint while training goes
on; any number of processes, also one, continues it. trainer.reshard=false
gathers weights once a step, trainer.offload=true keeps them in host memory.
With --max-restarts=N and resume=auto out_dir=DIRECTORY, torchrun continues a
run of which a process has died. Where a machine cannot resolve its own name,
give torchrun --local-addr=ADDRESS. docs/scale.md has the recipes, SLURM's too.
plan=h100, or another GPU's name, plans for machines that are not here.

A run first shows what it will do and need, and refuses what does not fit into
memory or onto the disk. Steps are optimiser steps; trainer.epochs counts passes
over the training split, and is 2 for data=chat where no length is given.
Paths, names and other texts are taken verbatim, in sweeps too: commas, quotes
and equals signs need no escaping. A sweep (-m) runs every combination of the
other options, OPTION=A,B; -m resume=auto out_dir=DIRECTORY continues one.
sweep.jobs=2 trains two at a time, sweep.launcher=submitit each as a job of
SLURM.
--cfg job shows all options as YAML.

Threads. On Linux a run sets GOMP_SPINCOUNT, the time for which waiting threads
keep their cores, to a low value: with torch's own, a step on a busy machine
takes many times as long. A GOMP_SPINCOUNT or OMP_WAIT_POLICY that is set in
the environment stays.
"""

import sys

from kernels.machine import threads
from rwkv import cli
from rwkv.config import TrainConfig
from rwkv.errors import UserError


def train(config: TrainConfig, line: cli.CommandLine) -> None:
    for key in (key for key in line.keys if key.startswith("sweep.")):
        raise UserError(f"{key} is for sweeps: add -m, or leave it out")
    if config.trainer.strategy == "single":       # else each of several processes would say so
        from rwkv.training.run.options import check_run

        check_run(config, line.keys)
        print("loading    PyTorch and Lightning, then the data", file=sys.stderr, flush=True)
    from rwkv.training import fit

    fit.main(config, line)


def sweep(line: cli.CommandLine, jobs: cli.Jobs) -> None:
    from rwkv.training import sweep

    sweep.run(line, jobs)


def main() -> None:
    threads.wait_briefly()               # before torch is imported
    cli.run(train, TrainConfig, "train", __doc__, sweep)


if __name__ == "__main__":
    main()
