"""Tests runs of tune=lora and tune=state: what checkpoints contain, how they are read, continued, converted and refused."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from files import SIZES, byte_model
from models import small_model, tokens
from parity.exchange import PYTHON, in_peers_environment
from programs import Run, one_sentence
from safetensors.torch import load_file, save_file
from training_runs import OF_PROBE, assert_same_training, finish, losses, start

from rwkv.checkpoint.files import read_checkpoint
from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig, TuneConfig
from rwkv.errors import CheckpointError, UserError
from rwkv.generation.state_files import load_context
from rwkv.model.lora import add_adapters
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import ByteTokenizer
from rwkv.tools.convert import convert
from rwkv.training.memory.estimate import estimate

OPTIONS = ("data=chat", "data.path=conversations.jsonl", "data.batch_size=2", "data.cache_dir=cache", "trainer=cpu",
           "logger=csv", "model.ctx_len=64", "optim.lr=1e-2", "optim.warmup_steps=0", "trainer.sample_tokens=4",
           "trainer.log_every=1", "trainer.malloc=default", "tune.guard=null")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with base7.safetensors, base4.safetensors and conversations.jsonl."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("rwkv4", "rwkv7"):
        byte_model(folder / f"base{name[-1]}.safetensors", name)
    conversations = [{"prompt": f"{number} and one?", "completion": str(number + 1)} for number in range(12)]
    (folder / "conversations.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a folder with a copy of the files."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tune_model(run: Run, *options: str, base: str = "base7.safetensors") -> Path:
    status, _, error = run("train", *OPTIONS, f"init_from={base}", "out_dir=out", "trainer.max_steps=3", *options)
    assert status == 0, error
    return Path("out")


@pytest.mark.programs
@pytest.mark.parametrize(("base", "options"), [
    ("base4.safetensors", ()), pytest.param("base7.safetensors", ("tune.modules=[att.key,ffn.value]",), marks=pytest.mark.soak),
    ("base7.safetensors", ("trainer.precision=bf16-mixed", "trainer.activation_checkpointing=true", "trainer.accumulate=2")),
    pytest.param("base7.safetensors", ("trainer.tbptt=2", "tune.base=int8"), marks=pytest.mark.soak),
    ("base7.safetensors", ("tune.base=int4", "trainer.sample_every=1")),
    pytest.param("base4.safetensors", ("tune.base=bfloat16",), marks=pytest.mark.soak),
])
def test_adapters_are_trained_saved_separately_and_merged(folder: Path, run: Run, base: str, options: tuple[str, ...]) -> None:
    out = tune_model(run, "tune=lora", "tune.rank=2", *options, base=base)
    weights = torch.load(out / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert weights
    assert all("lora" in name for name in weights)
    adapters = load_file(out / "adapter/adapter_model.safetensors")
    adapter_config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert {f"base_model.{name}" for name in weights} == adapters.keys()
    assert "base_model.model.blocks.0.att.key.lora_A.weight" in adapters
    assert all(any(f"{module}.lora" in name for name in adapters) for module in adapter_config["target_modules"])

    names = ("merged.pth", *(("merged.safetensors", "merged.ckpt", "merged") if not options else ()))
    for name in names:
        convert(out, folder / name)
    model, merged, *others = (RWKV.from_pretrained(name) for name in (base, *names))
    assert all(torch.equal(other.head.weight, merged.head.weight) for other in others)
    ids = tokens(model)
    before, _ = model(ids)
    add_adapters(model, adapter_config["target_modules"], adapter_config["r"], adapter_config["lora_alpha"])
    model.load_state_dict({name.removeprefix("base_model.model."): tensor for name, tensor in adapters.items()}, strict=False)
    apart, _ = model(ids)
    assert (merged(ids)[0] - apart).norm() < 3e-6 * apart.norm()
    torch.testing.assert_close(RWKV.from_pretrained(out)(ids)[0], merged(ids)[0], rtol=0, atol=0)
    assert not torch.allclose(apart, before, atol=1e-4)


@pytest.mark.programs
@pytest.mark.parametrize("base", ["base4.safetensors", "base7.safetensors"])
def test_the_probe_measures_y_alone_where_nothing_before_the_operator_is_trained(folder: Path, run: Run, base: str) -> None:
    """Adapters are on ffn.key alone, so none comes before the operator of layer 0. The report is written, too."""
    out = tune_model(run, "tune=lora", "tune.modules=[ffn.key]", "trainer.probe=true", base=base)
    errors = json.loads((out / "kernel.json").read_text())["errors"]
    for when in ("start", "end"):
        first, second, *_ = (layer["errors"] for layer in errors[when]["layers"])
        assert list(first) == ["y"]
        assert "grad k" in second
        assert "4" in base or list(second) == ["y", *(f"grad {name}" for name in ("r", "log_w", "k", "v", "a", "b"))]
        assert all(error["err_ratio"] < errors[when]["allowed"][name] for name, error in [*first.items(), *second.items()])
    assert "Error of the operator" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.programs
def test_the_probe_leaves_the_random_numbers_of_dropout_to_training(folder: Path, run: Run) -> None:
    for probe in ("true", "false"):
        status, _, error = run("train", *OPTIONS, "init_from=base7.safetensors", "tune=lora", "tune.dropout=0.3",
                               "trainer.max_steps=3", f"trainer.probe={probe}", f"out_dir={probe}")
        assert status == 0, error
    assert_same_training(Path("true"), Path("false"), OF_PROBE)


@pytest.fixture
def peft() -> None:
    if not PYTHON.exists() or subprocess.run([PYTHON, "-I", "-c", "import peft"], capture_output=True).returncode:
        pytest.skip(f"no peft in {PYTHON.parent.parent.name}: `make peers` installs it")


@pytest.mark.soak
@pytest.mark.parametrize(("base", "options"), [
    ("base4.safetensors", ()), ("base7.safetensors", ("tune.modules=[att.key,ffn.value]", "tune.alpha=5")),
    ("base7.safetensors", ("tune.base=int8",)),
])
def test_peft_reads_and_merges_an_adapter_like_timemix(folder: Path, run: Run, peft: None, base: str,
                                                       options: tuple[str, ...]) -> None:
    out = tune_model(run, "tune=lora", "tune.rank=2", *options, base=base)
    convert(folder / base, folder / "base.pth")
    convert(out, folder / "ours.pth")
    reader = Path(__file__).with_name("peft_reader.py")
    in_peers_environment(str(reader), "base.pth", f"{out}/adapter", "theirs.pth", cwd=folder)
    before, ours, theirs = (torch.load(f"{name}.pth", weights_only=True) for name in ("base", "ours", "theirs"))
    changed = {name for name in ours if not torch.equal(ours[name], before[name])}
    assert changed
    assert changed <= theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


@pytest.mark.programs
@pytest.mark.parametrize("options", [
    (), ("trainer.tbptt=2",), pytest.param(("tune.base=int8", "trainer.precision=bf16-mixed"), marks=pytest.mark.soak)])
def test_a_state_is_trained_and_saved_for_others(folder: Path, run: Run, options: tuple[str, ...]) -> None:
    out = tune_model(run, "tune=state", *options)
    base, model = RWKV.from_pretrained("base7.safetensors"), RWKV.from_pretrained(out)
    states = torch.load(out / "time_state.pth", weights_only=True)
    assert list(states) == [f"blocks.{layer}.att.time_state" for layer in range(3)]
    for state, learnt in zip(states.values(), model.time_states(), strict=True):
        assert torch.equal(state, learnt)
        assert state.abs().max() > 0
    context = load_context(out / "state.safetensors", base, ByteTokenizer())
    ids = tokens(base, B=1)
    torch.testing.assert_close(base(ids, context.state)[0], model(ids)[0], rtol=0, atol=1e-6)
    assert not torch.allclose(base(ids)[0], model(ids)[0], atol=1e-4)
    with pytest.raises(UserError):
        convert(out, folder / "other.gguf")
    with pytest.raises(UserError):
        model.save_pretrained(folder / "other.pth")
    common = "prompt=a", "temperature=0", "max_new_tokens=5", "device=cpu"
    status, text, _ = run("generate", "checkpoint=base7.safetensors", f"state={out}/state.safetensors", *common)
    assert status == 0
    assert run("generate", f"checkpoint={out}", *common)[1] == text


@pytest.mark.programs
def test_training_a_state_continues_from_another_state(folder: Path, run: Run) -> None:
    """The state comes from a file of any program, a checkpoint with a state, or a run. A tiny rate hardly changes the state."""
    random = torch.Generator().manual_seed(0)
    begin = {f"blocks.{layer}.att.time_state": 0.1 * torch.randn(2, 64, 64, generator=random) for layer in range(3)}
    torch.save(begin, "begin.pth")
    save_file({name: state.mT.half().contiguous() for name, state in begin.items()}, "begin.st")
    out = tune_model(run, "tune=state", "tune.state=begin.pth", "optim.lr=1e-6")
    trained = torch.load(out / "time_state.pth", weights_only=True)
    assert all(torch.allclose(trained[name], begin[name], atol=1e-4) for name in begin)
    convert(out, folder / "both.pth")
    for name, *options in (("both.pth", "data.tokenizer=byte"), (str(out),), ("base7.safetensors", "tune.state=begin.st")):
        status, _, error = run("train", *OPTIONS, "tune=state", f"init_from={name}", *options, "plan=true")
        assert status == 0, error
        assert "tuned state" in error
    (folder / "begin.pth").unlink()
    status, _, error = run("train", *OPTIONS, "resume=out", "trainer.max_steps=4")       # the checkpoint has the state
    assert status == 0, error
    common = (*OPTIONS, "trainer.max_steps=3", "init_from=base7.safetensors")
    one_sentence(run("train", *common, "tune=lora", "tune.state=begin.st"), "tune.state")
    one_sentence(run("train", *common, "tune=state", f"tune.state={out}/state.safetensors"), "time_state.pth", "tune.state=")
    one_sentence(run("train", *common, "tune=state", "tune.state=begin.pth"), "begin.pth")
    one_sentence(run("train", *OPTIONS, "trainer.max_steps=3", "init_from=both.pth", "data.tokenizer=byte"), "tune=state")
    one_sentence(run("train", *OPTIONS, "trainer.max_steps=3", "tune=state", "init_from=begin.st"), "tune.state=", "init_from=")


@pytest.mark.soak
@pytest.mark.parametrize(("options", "alone"), [
    (("tune=lora", "tune.rank=2", "trainer.tbptt=2"), ()), (("tune=state",), ()),
    (("tune=lora", "tune.base=int8", "trainer.tbptt=2"), ("data.batch_size=1", "trainer.accumulate=2"))])
def test_two_processes_tune_like_one(folder: Path, options: tuple[str, ...], alone: tuple[str, ...]) -> None:
    """In int8 the single process reads rows one at a time, like each of the two.

    Float32 products of several rows differ in the last bits, which may round an input to another value, 1/63 of the row's
    largest away.
    """
    arguments = (*OPTIONS, *options, "init_from=base7.safetensors", "trainer.max_steps=6", "trainer.val_every=3")
    for name, more in (("one", alone), ("two", ("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"))):
        result = finish(start(folder, "train", *arguments, *more, f"out_dir={name}"))
        assert result.status == 0, result.error
    for name in ("train/loss", "val/loss"):
        assert losses(folder / "two", name) == pytest.approx(losses(folder / "one", name), abs=1e-5)
    one, two = (torch.load(folder / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.programs
def test_options_that_cannot_be_tuned_are_refused(folder: Path, run: Run) -> None:
    common = (*OPTIONS, "trainer.max_steps=3")
    one_sentence(run("train", *common, "tune=state", "init_from=base4.safetensors"), "RWKV-7", "use tune=lora")
    one_sentence(run("train", *common, "tune=lora", "tune.modules=[att.query]", "init_from=base4.safetensors"), "att.query")
    one_sentence(run("train", *common, "tune=lora", "tune.rank=129", "init_from=base7.safetensors"), "tune.rank", "128", "129")
    one_sentence(run("train", *common, "tune.base=int8"), "requires tune=lora or tune=state")
    one_sentence(run("train", *common, "tune=lora", "tune.base=int8", "trainer=fsdp", "init_from=base4.safetensors"),
                 "tune.base=bfloat16", "trainer=ddp")
    one_sentence(run("train", *common, "tune=lora", "tune.dropout=0.1", "trainer.tbptt=2", "init_from=base7.safetensors"),
                 "tune.dropout")
    for method, option in (("state", "weight_decay"), ("state", "time_decay_lr_scale"), ("lora", "time_decay_lr_scale")):
        one_sentence(run("train", *common, f"tune={method}", f"optim.{option}=0.1", "init_from=base7.safetensors"),
                     f"optim.{option}", f"tune={method}")


@pytest.mark.programs
def test_the_frozen_weights_must_exist_and_be_unchanged(folder: Path, run: Run) -> None:
    """A missing base does not damage the run. A merged base is refused, because the adapter would be added twice."""
    out = tune_model(run, "tune=lora", "tune.rank=2")
    base = folder / "base7.safetensors"
    base.rename(folder / "elsewhere")
    one_sentence(run("train", *OPTIONS, "resume=out", "trainer.max_steps=4"), "base7.safetensors", "cannot read the base")
    assert (out / "checkpoints/last.ckpt").is_file()
    (folder / "elsewhere").rename(base)
    convert(out, folder / "merged.safetensors")
    byte_model(folder / "other.safetensors", seed=9)
    for name in ("merged", "other"):
        (folder / f"{name}.safetensors").replace(base)
        with pytest.raises(CheckpointError):
            read_checkpoint(out)


@pytest.mark.programs
@pytest.mark.parametrize("method", ["lora", pytest.param("state", marks=pytest.mark.soak)])
def test_a_run_that_ended_before_its_files_were_written_writes_them(folder: Path, run: Run, method: str) -> None:
    out = tune_model(run, f"tune={method}")
    files = [*out.glob("adapter/*"), *out.glob("*.safetensors"), *out.glob("*.pth")]
    for file in files:
        file.unlink()
    assert run("train", *OPTIONS, "resume=out")[0] == 0
    assert len(files) == {"lora": 3, "state": 2}[method]     # the adapter has a card
    assert all(file.is_file() for file in files)
    one_sentence(run("train", *OPTIONS, "resume=out"), "finished at step 3")


@pytest.mark.programs
def test_the_plan_counts_the_trained_values(folder: Path, run: Run) -> None:
    status, _, error = run("train", *OPTIONS, "tune=lora", "tune.rank=2", "init_from=base7.safetensors", "plan=true")
    model = small_model(generation="rwkv7", vocab_size=256, **SIZES["rwkv7"])
    add_adapters(model, (), 2, 2.0)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert status == 0
    assert f"lora: {count:,} trained values with frozen weights in float32" in error
    assert "recomputes activations, because tune=lora freezes the weights" in error


@pytest.mark.programs
def test_the_losses_of_a_run_on_a_bfloat16_file_equal_those_of_the_merged_model(folder: Path, run: Run) -> None:
    """Where a program's dtype or tune.base rounds the sums again, a line says so."""
    convert(folder / "base7.safetensors", folder / "half.safetensors", "bfloat16")
    out = tune_model(run, "tune=lora", "tune.rank=2", "optim.lr=1e-4", base="half.safetensors")
    weights = torch.load(out / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    apart = RWKV.from_pretrained("half.safetensors", mmap=False)
    add_adapters(apart, (), 2, 32.0)
    apart.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()}, strict=False)
    ids = tokens(apart, T=40)
    trained, before, merged = (model(ids)[0] for model in (apart.eval(), RWKV.from_pretrained("half.safetensors"),
                                                           RWKV.from_pretrained(out)))
    assert (merged - trained).norm() < 0.01 * (before - trained).norm()
    reported = {}
    for dtype in ("float32", "bfloat16"):
        status, _, error = run("generate", "checkpoint=out", "prompt=a", "max_new_tokens=1", f"dtype={dtype}")
        assert status == 0, error
        reported[dtype] = "training survives" in error
        status, _, plan = run("train", *OPTIONS, "tune=lora", "init_from=out", "plan=true", f"tune.base={dtype}")
        assert status == 0, plan
        assert ("rounds the adapters" in plan) == reported[dtype]
    assert reported == {"float32": False, "bfloat16": True}


@pytest.mark.programs
def test_a_run_with_several_passes_per_step_resumes_with_the_same_command(folder: Path, run: Run) -> None:
    """4 rows of 256 positions are 2 passes of 512 positions. The plan says so, and the run counts steps of 4 rows."""
    options = ("tune=lora", "tune.rank=2", "model.ctx_len=256", "data.batch_size=4", "trainer.val_every=3")
    out = tune_model(run, *options)
    run_config = read_checkpoint(out / "checkpoints/last.ckpt").run or {}
    assert (run_config["data"]["batch_size"], run_config["trainer"]["accumulate"]) == (2, 2)
    status, _, error = run("train", *OPTIONS, *options, "init_from=base7.safetensors", "out_dir=whole", "trainer.max_steps=4")
    assert status == 0
    assert "data.batch_size=2 trainer.accumulate=2" in error
    status, _, error = run("train", *OPTIONS, *options, "resume=auto", "out_dir=out", "trainer.max_steps=4")
    assert status == 0, error
    one_sentence(run("train", *OPTIONS, "tune=lora", "tune.rank=2", "model.ctx_len=256", "data.batch_size=8", "resume=auto",
                     "out_dir=out", "trainer.max_steps=5"), "data.batch_size=2")
    whole, continued = (torch.load(Path(name) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
                        for name in ("whole", "out"))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_the_memory_of_released_shapes_is_planned_by_what_is_frozen() -> None:
    """The estimates are for RWKV-7 0.1b with passes of one row of 512 tokens."""
    sizes = ModelConfig(generation="rwkv7", n_layer=12, n_embd=768, ctx_len=512)
    need = {(method, base): estimate(TrainConfig(model=sizes, data=DataConfig(name="chat", batch_size=1),
                                                 trainer=TrainerConfig(malloc="small"),
                                                 tune=TuneConfig(method=method, base=base)), 65536).total / 1e9
            for method, base in (("full", "float32"), ("lora", "float32"), ("state", "float32"), ("lora", "int4"))}
    assert need["lora", "int4"] < need["state", "float32"] < need["lora", "float32"] < 0.4 * need["full", "float32"]
