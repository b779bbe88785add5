"""Trains an RWKV language model with the time-mixing kernel of your choice.

  python train.py                                     a small model, in minutes
  python train.py kernel=taichi_v3 model=small
  python train.py model=rwkv7_tiny                    RWKV-7 instead of RWKV-4
  python train.py data=text data.path=FILE data.tokenizer=char
  python train.py data=jsonl data.path="corpus/*.jsonl.gz" plan=true
  python train.py model=169m trainer.max_tokens=1e9 plan=true
  python train.py init_from=FILE data=text data.path=FILE             fine-tune
  python train.py init_from=FILE data=chat data.path=CHATS.jsonl tune=lora
  python train.py resume=auto                         resume the latest run
  python train.py -m kernel=conv1d,taichi_v3 seed=0,1         four runs
  python train.py -m optim.lr=1e-3,3e-3 sweep.jobs=2          two at a time
  python train.py trainer=ddp trainer.devices=2       two processes

Resuming. Ctrl-C saves and stops; so do SIGTERM, SIGHUP when the terminal closes
(not under nohup), and the signals of batch systems before a job's time limit:
SIGUSR1, SIGUSR2, SIGXCPU. The exit status is then 130. In SLURM:
  #SBATCH --signal=USR1@120
  srun python train.py out_dir=DIRECTORY resume=auto OPTION=VALUE...
  [ $? = 130 ] && scontrol requeue $SLURM_JOB_ID
resume=auto, with out_dir=DIRECTORY for an older run, resumes a run that was
stopped or killed, with bit-identical results. A run without a checkpoint starts
again, and its files move to DIRECTORY/unsaved-1. With init_from=FILE and
out_dir=DIRECTORY, the first call fine-tunes FILE, and later calls resume that
run. The options of the model and the data, trainer.accumulate,
trainer.val_tokens, optim.name, optim.weight_decay and optim.*_lr_scale keep
their values; other options on the command line apply from the next step.
trainer.max_steps=MORE or trainer.epochs=MORE extends a run.

Recipes. experiment=FILE.yaml reads options from a file, in groups or by their
command-line names; options on the command line override the file's. FILE may be
in any folder, and may be the config.yaml of an earlier run:
  optim: {lr: 1e-4, warmup_steps: 100}
  model: rwkv7_tiny

Conversations. data=chat reads lines with messages, conversations, or prompt
and completion; only the assistant's answers count in the loss. tune=lora trains
adapters, and tune=state trains the initial state (RWKV-7). Both freeze the
weights, which tune.base=bfloat16, int8 or int4 makes smaller. Checkpoints of
these runs refer to the file of init_from=, which must not move; at its end, a
run writes adapter/ for the PEFT library, or state.safetensors for generate.py
and time_state.pth in RWKV-PEFT's layout. python -m rwkv.tools.convert RUN FILE
merges adapters into the weights.

Several GPUs or processes. trainer=ddp, or trainer=fsdp for a model too large
for one GPU, uses all GPUs of the machine, or trainer.devices=N processes. On
several machines, run the same command on each:
  torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
    --rdzv-endpoint=HOST:29500 train.py trainer=ddp trainer.num_nodes=2
trainer=fsdp shards weights, gradients and optimiser state, and each process
writes its shard of a checkpoint in the background; any number of processes,
even one, can resume a run. trainer.reshard=false gathers weights once per step,
trainer.offload=true keeps weights in host memory. With --max-restarts=N and
resume=auto out_dir=DIRECTORY, torchrun restarts a run after a process dies. If
a machine cannot resolve its own name, give torchrun --local-addr=ADDRESS.
docs/scale.md has recipes, also for SLURM. plan=h100, or another GPU's name,
plans for other machines.

A run first prints its plan, and fails if memory or disk space will not suffice.
Steps are optimiser steps; trainer.epochs counts passes over the training split,
by default 2 for data=chat.
Paths, names and other texts are taken verbatim, in sweeps too: commas, quotes
and equals signs need no escaping. A sweep (-m) runs every combination of the
values, OPTION=A,B; -m resume=auto out_dir=DIRECTORY resumes a sweep.
sweep.jobs=2 trains two runs at a time, and sweep.launcher=submitit trains each
as a SLURM job.
--cfg job prints all options as YAML.

Threads. On Linux a run sets GOMP_SPINCOUNT, which limits how long a waiting
thread spins, to a low value: with torch's default, a step on a busy machine
takes many times as long. GOMP_SPINCOUNT or OMP_WAIT_POLICY in the environment
takes precedence.
"""

import sys

from kernels.machine import threads
from rwkv import cli
from rwkv.config import TrainConfig
from rwkv.errors import UserError


def train(config: TrainConfig, line: cli.CommandLine) -> None:
    for key in (key for key in line.keys if key.startswith("sweep.")):
        raise UserError(f"{key} requires a sweep: add -m to the command line, or leave {key} out")
    if config.trainer.strategy == "single":       # with several processes, each process would report an error
        from rwkv.training.run.options import check_run

        check_run(config, line.keys)
        print("loading    PyTorch and Lightning, then the data", file=sys.stderr, flush=True)
    from rwkv.training import fit

    fit.main(config, line)


def sweep(line: cli.CommandLine, jobs: cli.Jobs) -> None:
    from rwkv.training.sweep import sweep

    sweep.run(line, jobs)


def main() -> None:
    threads.wait_briefly()               # this call must precede the import of torch
    cli.run(train, TrainConfig, "train", __doc__, sweep)


if __name__ == "__main__":
    main()
