"""Tests that a user's mistake is reported in one sentence before any work, and that a bug keeps its traceback."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_model
from programs import PROGRAMS, Run, one_sentence
from training_runs import SMALL, TEXT

from kernels.registry import KernelUnavailable, UnknownKernel
from rwkv import cli
from rwkv.errors import UserError
from rwkv.training.run.directory import require_unused
from rwkv.training.task import LanguageModel

FULL_GPU = ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.20 GiB is "
            "free. Including non-PyTorch memory, this process has 78.04 GiB memory in use.")


@pytest.mark.parametrize(("argument", "message"), [
    ("kernel=nonsense", "'nonsense'; the choices are: auto, c_v0, conv1d, "),
    ("kernel=conv1d,nonsense", "'nonsense'; the choices are: auto, c_v0, conv1d, "),
    ("kernel=fft", "fft"),
    (f"model={'x' * 300}", "; the choices are: "),
    ("model=huge", "'huge'; the choices are: 169m, 1b5, 3b, 430m, 7b, rwkv7_"),
    ("model.generation=rwkv5", "rwkv4, rwkv7; got 'rwkv5'"),
    ("model.head_size=32", "model.head_size is an option of rwkv7"),
    ("model.n_layer=two", "model.n_layer must be a whole number, such as 1000; got two"),
    ("tune.modules=att.key", "tune.modules must be a list"),
    ("tune.rank=4", "tune.rank requires tune=lora; got tune=full"),
    ("data.sources=[a.jsonl]", "data.sources must be a list, such as [{path"),
    ("data.sources=[{path: a.jsonl},null]", "data.sources must be a list, such as [{path"),
    ("hydra.run.dir=there", "hydra.run.dir has no effect"),
    ("hydra/launcher=joblib", "hydra/launcher has no effect"),
    ("+hydra.job.name=mine", "hydra.job.name has no effect"),
    ("kernel.name=glob(*)", "glob(*)"),
    ("seed=glob(*)", "seed=glob(*) must not use glob()"),
    ("model.n_layer=glob([1,2])", "must not use glob()"),
    ("model.n_layer=0", "model.n_layer"),
    ("optim.min_lr=1e-2", "optim.min_lr=null"),
    ("optim.lr=${nothing}", "nothing"),
    ("trainer.max_steps=(3", "cannot read"),
    ("trainer.precision=16", "32-true, tf32, bf16-mixed, fp16-mixed, auto; got '16'"),
    ("seed=1,2", "-m"),
    ("data.field=", "data.field is empty"),
    ("data.tokenizer=null", "data.tokenizer cannot be null"),
    ("optim.lrr=1", "optim.lrr; did you mean optim.lr?"),
    ("n_layer=1", "n_layer; did you mean model.n_layer?"), ("max_stepz=3", "did you mean trainer.max_steps?"),
    ("model.layers=1", "did you mean model.n_layer?"), ("trainr.max_stepz=1", "did you mean trainer.max_steps?"),
    ("optim.batch_size=1", "did you mean data.batch_size?"), ("trainer.optim.lr=1", "did you mean optim.lr?"),
    ("trainer.gradient_clip_val=0", "did you mean optim.grad_clip?"), ("trainer.fast_dev_run=true", "fast_dev_run; --help"),
    ("optim.betas=0.9,0.95", "must be a list of numbers"), ("tune.modules=att.key,att.value", "tune.modules must be a list"),
    ("modle=small", "did you mean model?"), ("kernel=taichi_v33", "did you mean taichi_v3?"),
    ("nonsense=1", "nonsense; --help"),
    ("+model.nonsense=1", "model.nonsense"),
    ("kernel", "'kernel'"),
    ("--seed=1", "--seed=1. Options are written without dashes: seed=1"),
    ("--plan", "--plan. Options are written without dashes: plan="),
    ("-p", "-p. Options are written without dashes: NAME=VALUE"),
    ("--max_steps", "trainer.max_steps=VALUE"), ("--batch-size=4", "data.batch_size=4"), ("--kernel=conv1d", ": kernel=conv1d"),
    ("max_steps", "trainer.max_steps=VALUE"), ("book.txt", "data=text data.path=book.txt"),
    ("trainer=gpu", "trainer=gpu"),
    ("experiment=kernel_ablation", "several values of kernel, seed require a sweep: use train.py -m"),
    *(pytest.param(*more, marks=pytest.mark.thorough) for more in (
        ("optim.betas=[0.9,1.5]", "optim.betas"),
        ("optim.matrix_lr=0.1", "optim.matrix_lr requires optim=muon or normuon"),
        ("data.template=world", "data.template requires data=chat"),
        ("model.n_layer=1000000", "model.n_layer must be at most 10000"),
        ("seed=4294967296", "seed"),
        ("logger.project=a/b", "logger.project"),
        ("optim.name=sgd", "adamw, adam, muon, normuon, adamw8bit; got 'sgd'"),
        ("trainer.max_steps=1,2x", "trainer.max_steps"),
        ("plan=maybe", "plan must be one of false, true, timed, a100"),
        ("optim.lr=abc", "optim.lr must be a number; got abc"),
        ("experiment=nope", "'nope'; the choices are: kernel_ablation, rwkv4_original"))),
])
def test_a_wrong_option_is_reported_in_one_sentence(run: Run, tmp_path: Path, argument: str, message: str) -> None:
    if argument == "trainer=gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    one_sentence(run("train", argument), message)
    assert not list(tmp_path.iterdir()), "nothing was done before the mistake was found"


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_argument_that_is_not_utf8_is_reported_in_one_sentence(run: Run, program: str) -> None:
    option = "data.path" if program in ("train", "evaluate") else "checkpoint"
    one_sentence(run(program, f"{option}=Latin-\udce9.txt"), option, r"Latin-\xe9.txt")


@pytest.mark.parametrize(("arguments", "message"), [
    (["model.n_att=8"], "model.n_att is an option of rwkv4"),
    (["optim.time_first_lr_scale=2"], "optim.time_first_lr_scale is an option of rwkv4"),
    (["model.head_size=50", "kernel=reference"], "a multiple of model.head_size (50)"),
    (["kernel=conv1d"], "conv1d computes the operator of RWKV-4, but the model is RWKV-7. Choose a kernel from auto, "),
])
def test_an_option_of_another_generation_is_reported_in_one_sentence(run: Run, tmp_path: Path, arguments: list[str],
                                                                     message: str) -> None:
    one_sentence(run("train", "model=rwkv7_tiny", *arguments), message)
    assert not list(tmp_path.iterdir()), "nothing was done before the mistake was found"


HEAVY = ("torch", "lightning", "hydra", "wandb", "taichi")


@pytest.mark.programs
@pytest.mark.parametrize(("program", "argument", "status", "heavy"), [
    ("train", "kernel=nope", 2, HEAVY), ("train", "optim.lrr=1", 2, HEAVY), ("train", "--help", 0, ("torch", "lightning")),
])
def test_an_answer_needs_no_heavy_import(program: str, argument: str, status: int, heavy: tuple[str, ...]) -> None:
    code = (f"import sys; from rwkv.programs.{program} import main\ntry: main()\n"
            f"finally: assert not {set(heavy)} & set(sys.modules), sorted({set(heavy)} & set(sys.modules))")
    process = subprocess.run([sys.executable, "-c", code, argument], cwd=cli.CONFIGS.parent, capture_output=True, text=True,
                             check=False)
    assert (process.returncode, "Traceback" in process.stderr) == (status, False), process.stderr


def test_a_directory_that_exists_is_not_overwritten(run: Run) -> None:
    Path("mine").mkdir()
    Path("mine", "thesis.txt").write_text("years of work")
    one_sentence(run("train", "out_dir=mine"), "out_dir=mine contains files")
    Path("mine", "config.yaml").write_text("seed: 0")
    one_sentence(run("train", "out_dir=mine"), "out_dir=mine exists already", "resume=auto")
    one_sentence(run("train", "out_dir=mine/thesis.txt"), "out_dir=mine/thesis.txt is a file")
    Path("mine", "config.yaml").rename("mine/sweep.json")
    one_sentence(run("train", "resume=auto", "out_dir=mine"), "contains a sweep", "-m resume=auto out_dir=mine")


def test_a_folder_that_cannot_be_created_is_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("missing")
    for out_dir, obstacle in (("file/run", "file"), ("link", "link"), ("link/run", "link")):
        with pytest.raises(UserError, match=f"^out_dir={tmp_path / out_dir} cannot be created, because {tmp_path / obstacle} "):
            require_unused(tmp_path / out_dir)
    (tmp_path / "missing").mkdir()
    require_unused(tmp_path / "link" / "run")


def test_a_new_run_may_use_a_folder_with_logs_and_system_files(tmp_path: Path) -> None:
    for name in ("train.log", "slurm-12.out", "nohup.out", "stderr", "log", ".lock", ".nfs0001", ".DS_Store"):
        (tmp_path / name).write_text("line")
    for name in ("lost+found", ".Trash-1000"):
        (tmp_path / name).mkdir()
    require_unused(tmp_path)
    for name in ("metrics.csv", "notes.md", "checkpoints", ".git", "photos.out"):
        path = tmp_path / name
        path.write_text("") if "." in name[1:] and name != "photos.out" else path.mkdir()
        with pytest.raises(UserError, match="contains files"):
            require_unused(tmp_path)
        path.unlink() if path.is_file() else path.rmdir()
    require_unused(tmp_path)


def test_a_path_that_cannot_be_resumed_is_reported_in_one_sentence(run: Run) -> None:
    for name in ("nowhere", "nowhere.ckpt"):
        one_sentence(run("train", f"resume={name}"), "must be a run's directory")
    Path("foreign.ckpt").write_text("hello")
    small_model().save_pretrained("weights.pth")
    for name in ("foreign.ckpt", "weights.pth"):
        one_sentence(run("train", f"resume={name}"), name)


@pytest.mark.programs
@pytest.mark.skipif(sys.platform == "win32", reason="its pipes report other errors")
@pytest.mark.parametrize("command", [("train.py", "--help"), ("-m", "rwkv.tools", "--help")])
def test_a_closed_pipe_ends_a_program_quietly(command: tuple[str, ...]) -> None:
    with subprocess.Popen([sys.executable, *command], cwd=cli.CONFIGS.parent, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, b"")


def test_a_bug_keeps_its_stack_trace(tmp_path: Path) -> None:
    """A ValueError keeps its traceback. A UserError exits with one sentence, even from an installed module."""
    with pytest.raises(json.JSONDecodeError), cli.exit_on_user_error():
        json.loads("x")
    (tmp_path / "site-packages").mkdir()
    installed = tmp_path / "site-packages" / "installed.py"
    installed.write_text("from rwkv.errors import UserError\n\n\ndef fail():\n    raise UserError('a')\n")
    spec = importlib.util.spec_from_file_location("installed", installed)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
        module.fail()
    assert stop.value.code == cli.USER_ERROR


@pytest.mark.parametrize("error", [UserError("a"), KernelUnavailable("a"), UnknownKernel("a"), OSError("a")])
def test_a_user_s_mistake_is_reported_in_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
        raise error
    assert (stop.value.code, capsys.readouterr().err) == (cli.USER_ERROR, "error: a\n")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot delete the current directory")
def test_a_deleted_current_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
        Path("model.pth").resolve()
    assert stop.value.code == cli.USER_ERROR
    assert "current directory" in capsys.readouterr().err


def test_a_full_gpu_is_one_sentence_but_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
        raise torch.OutOfMemoryError(FULL_GPU)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == cli.USER_ERROR
    assert "20.00 GiB" in line
    assert "1.20 GiB" in line
    with pytest.raises(RuntimeError, match="illegal"), cli.exit_on_user_error():
        raise RuntimeError("an illegal memory access was encountered")


def test_memory_that_cannot_be_allocated_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for allocate in (lambda: torch.empty(1 << 58, dtype=torch.uint8), lambda: bytearray(1 << 58)):
        with pytest.raises(SystemExit) as stop, cli.exit_on_user_error():
            allocate()
        assert stop.value.code == cli.USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: out of memory")


def test_a_cache_that_torch_compile_cannot_write_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    from torch._inductor.exc import InductorError

    for cause, named in ((PermissionError(13, "Permission denied", "/cache/73"), True), (ValueError("a bug"), False)):
        with pytest.raises(SystemExit if named else InductorError), cli.exit_on_user_error():
            raise InductorError(cause, None)
        error = capsys.readouterr().err
        assert ("/cache/73: Permission denied" in error and "TORCHINDUCTOR_CACHE_DIR" in error) == named


def fill_gpu() -> None:
    raise torch.OutOfMemoryError(FULL_GPU)


@pytest.mark.programs
@pytest.mark.parametrize(("allocate", "size"), [(fill_gpu, "20.00 GiB"), (lambda: torch.empty(1 << 56), f"{1 << 58} bytes")])
def test_a_run_without_memory_says_how_it_continues(allocate: Callable[[], object], size: str, run: Run,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: LanguageModel, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            allocate()
        return task.loss(*batch)

    Path("text.txt").write_text(TEXT, encoding="utf-8")
    options = (*SMALL, "kernel=conv1d", "model.n_layer=1", "trainer.checkpoint_every=2", "out_dir=full")
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "training_step", fail)
        status, _, error = run("train", *options)
    assert status == 2
    assert size in error
    command = error.splitlines()[-1].partition("continue with: python train.py ")[2].split()
    assert command[-1] == "trainer.activation_checkpointing=true"
    assert run("train", *command)[0] == 0


@pytest.mark.parametrize(("program", "arguments", "message"), [
    ("generate", ("-m", "seed=0,1"), "-m"), ("serve", ("-m", "port=0,1"), "-m"), ("train", ("--cfg", "hydra"), "--cfg job")])
def test_a_flag_without_effect_is_reported_in_one_sentence(run: Run, program: str, arguments: tuple[str, ...],
                                                           message: str) -> None:
    one_sentence(run(program, *arguments), message)


@pytest.mark.parametrize("option", ["api_key=", "host=", "checkpoint=null"])
def test_an_address_or_a_key_that_is_empty_is_refused(run: Run, option: str) -> None:
    """An empty api_key would open the server to clients that send an empty key."""
    one_sentence(run("serve", option), option.partition("=")[0])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such exit status")
@pytest.mark.parametrize("command", [["train.py"], ["generate.py"], ["chat.py"], ["serve.py"], ["-m", "rwkv.tools", "list"]])
def test_ctrl_c_during_the_imports_ends_a_program_without_a_traceback(command: list[str], tmp_path: Path) -> None:
    """The module takes the place of the package yaml, which each program imports before it reads its command line."""
    (tmp_path / "yaml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    process = subprocess.run([sys.executable, *command], cwd=cli.CONFIGS.parent, capture_output=True, text=True, check=False,
                             env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "")
