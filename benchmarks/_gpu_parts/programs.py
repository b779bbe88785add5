"""The parts `programs`, `resume`, `shards` and `tests`: the project's programs, called as a user calls them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import torch

from benchmarks._gpu_parts.check import Check
from benchmarks.gpu_check import SERVER, not_installed
from kernels.machine.hardware import ROOT
from rwkv.checkpoint.files import read_checkpoint


def programs(check: Check) -> None:
    run = str(check.scratch / "run")
    saved, device = f"checkpoint={run}", f"device={check.device}"
    if not run_program(check, "train rwkv7_tiny", *training(check, "run", "rwkv7_tiny", "trainer.max_steps=20")):
        return
    run_program(check, "generate", "generate.py", saved, device, "prompt=The ", "max_new_tokens=20")
    run_program(check, "generate 16 in float32", "generate.py", saved, device, "prompt=The ", "num_samples=16",
                "max_new_tokens=20", "dtype=float32")
    run_program(check, "chat", "chat.py", saved, device, "max_new_tokens=10", text="Hello\n")
    run_program(check, "evaluate", "-m", "rwkv.tools.evaluate", saved, device,
                f"data.path={ROOT / 'CONTRIBUTING.md'}")
    if missing := not_installed(SERVER):
        check.add(program="serve", skipped=f"not installed: {missing}")
    else:
        with check.measuring(program="serve"):
            _request_completion(check, saved, device)
    run_program(check, "train tiny with a probe",
                *training(check, "probed", "tiny", "trainer.max_steps=20", "trainer.probe=true"))


def _request_completion(check: Check, saved: str, device: str) -> None:
    start = time.monotonic()
    with start_program(check, "serve.py", saved, device, "port=0") as process:
        try:
            url = _server_url(process, check.left(60))
            body = json.dumps({"prompt": "The ", "max_tokens": 8}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=check.left(60)) as answer:
                text = json.load(answer)["choices"][0]["text"]
            process.terminate()
            code = process.wait(timeout=check.left(40))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    failed = {} if code == 0 else {"error": f"status {code}"}
    check.add(program="serve", status="ok" if code == 0 else f"status {code}", seconds=round(time.monotonic() - start, 1),
              answer=text, **failed)


def _server_url(process: subprocess.Popen[str], seconds: float) -> str:
    assert process.stdout is not None
    end, lines = time.monotonic() + seconds, ""
    while time.monotonic() < end and (line := process.stdout.readline()):
        lines += line
        if "http://" in line:
            return "http://" + line.partition("http://")[2].split()[0].rstrip("/.,;")
    raise RuntimeError(f"the server did not start: {lines[-300:]}")


def resume(check: Check) -> None:
    """Compares a run of 6 steps with a copy that is resumed from the checkpoint of step 3."""
    for model in ("rwkv7_tiny", "tiny"):
        steps = ["trainer.max_steps=6", "trainer.checkpoint_every=3", "trainer.val_every=6", "optim.warmup_steps=2"]
        if not run_program(check, f"train {model}", *training(check, model, model, *steps)):
            continue
        original, continued = check.scratch / model, check.scratch / f"{model}-continued"
        shutil.copytree(original, continued)
        for checkpoint in (continued / "checkpoints").glob("*.ckpt"):
            if checkpoint.name != "last-1.ckpt":
                checkpoint.unlink()
        (continued / "checkpoints" / "last-1.ckpt").rename(continued / "checkpoints" / "last.ckpt")
        if run_program(check, f"continue {model}", "train.py", "resume=auto", f"out_dir={continued}"):
            with check.measuring(resumed=model):
                resumed, uninterrupted = (read_checkpoint(folder).tensors("float32") for folder in (continued, original))
                off = [name for name in uninterrupted if not torch.equal(resumed[name], uninterrupted[name])]
                check.add(resumed=model, wrong=off[:5], tensors=len(uninterrupted))


def shards(check: Check) -> None:
    if not check.on_gpu:
        return
    steps = ("trainer.max_steps=15", "trainer.precision=bf16-mixed")
    fsdp = ("trainer=fsdp", "trainer.devices=1")
    for name, options in (("fsdp", fsdp), ("offload", (*fsdp, "trainer.offload=true")),
                          ("ddp", ("trainer=ddp", "trainer.devices=1")),
                          ("recomputed", ("trainer.activation_checkpointing=true",))):
        run_program(check, name, *training(check, name, "rwkv7_tiny", *steps, *options))


def tests(check: Check) -> None:
    chosen = ["tests/kernels"] if check.on_gpu else ["tests/kernels/test_wkv7.py", "-m", "not programs and not thorough"]
    marked = ["-m", "not soak or implementation", "-W", "default"] if check.on_gpu else []
    run_program(check, "tests of kernels/", "-m", "pytest", *chosen, *marked, "--device", check.device, most=600)


def training(check: Check, out: str, model: str, *options: str) -> list[str]:
    if not any(option.startswith("trainer=") for option in options):
        options = (f"trainer={'gpu' if check.on_gpu else 'cpu'}", *options)
    return ["train.py", f"model={model}", "data=text", f"data.path={ROOT / 'README.md'}", "data.tokenizer=byte", "logger=csv",
            "data.val_fraction=0.05", "model.ctx_len=64", "trainer.sample_tokens=0", "trainer.sample_every=0",
            f"data.cache_dir={check.scratch}/cache", f"out_dir={check.scratch}/{out}", *options]


def run_program(check: Check, name: str, *command: str, most: float = 60, text: str = "") -> bool:
    """Runs a program of the project, and adds a row with the status, time and last lines of output. `text` is its input."""
    start = time.monotonic()
    process = start_program(check, *command, stdin=subprocess.PIPE)
    try:
        output, _ = process.communicate(text, timeout=check.left(most))
        status = "ok" if process.returncode == 0 else f"status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = "stopped at its limit"
    failed = {} if status == "ok" else {"error": status}
    check.add(program=name, status=status, seconds=round(time.monotonic() - start, 1), tail=output[-600:], **failed)
    return status == "ok"


def start_program(check: Check, *command: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """Starts a program in the scratch folder, so that runs/latest of the clone does not change."""
    words = [str(ROOT / word) if word.endswith(".py") else word for word in command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *words], cwd=check.scratch, env=environment, stdin=stdin, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
