"""Tests generate.py as a user calls it: texts on standard output, mistakes as one sentence, and saved states."""

import errno
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from models import small_model
from programs import Run, one_sentence

from rwkv.config import GenerateConfig
from rwkv.errors import UserError
from rwkv.generation.options import prompts_from
from rwkv.tokenizer.tokenizers import CharTokenizer

ROOT = Path(__file__).parent.parent.parent
CHECKPOINT = ("checkpoint=model.ckpt", "kernel=conv1d")
CHARACTERS = "abc ü,=\"'\n"


@pytest.fixture(autouse=True)
def checkpoint(tmp_path: Path) -> Path:
    tokenizer = CharTokenizer(CHARACTERS)
    small_model("conv1d", tokenizer.vocab_size).save_pretrained(tmp_path / "model.ckpt", tokenizer)
    return tmp_path / "model.ckpt"


@pytest.mark.parametrize(("arguments", "named"), [
    ((), "runs/latest"),
    (("checkpoint=absent.ckpt",), "absent.ckpt"),
    (("prompt=zebra!",), "'!', 'e', 'r', 'z'"),
    (("tokenizer=absent.json",), "absent.json"),
    ((f"seed={2**63 - 1}", "num_samples=2", "batch_size=1"), "seed"),
    (("logit_bias=99:1",), "logit_bias"),
    (("max_tokens=3",), "max_new_tokens"),
    (("debug=null",), "unknown option debug"),
    (("state=absent.safetensors",), "absent.safetensors"),
    (("state=model.ckpt",), "model.ckpt"),
    (("prompts=wrong.jsonl",), "wrong.jsonl, line 2"),
    (("prompts=list.json",), "list.json, line 1"),
    (("prompts=utf16.txt",), "UTF-16"), (("prompts=utf16le.txt",), "UTF-16LE"),
    (("prompts=wrong.jsonl", "prompt=a"), "prompts="),
    (("num_samples=2", "save_state=x"), "save_state="),
    (("prompt=a", "out=x", "save_state=./x"), "different files"),
    (("prompt=a", "out=-"), "standard output"),
    (("prompt=a", "save_state=-"), "standard output"),
    *(pytest.param(*more, marks=pytest.mark.thorough) for more in (
        (("checkpoint=several",), "name one file"),
        (("kernel=nonsense",), "nonsense"),
        (("logit_bias=a:1",), "logit_bias"),
        (("max_new_tokens=-1",), "max_new_tokens"),
        (("dtype=int3",), "dtype"), (("dtype=float16", "device=cpu"), "dtype=float16 requires a GPU"),
        (("stop=",), "stop"),
        (("prompts=absent.txt",), "absent.txt"),
        (("prompts=empty.txt",), "empty.txt"))),
])
def test_a_mistake_is_reported_in_one_sentence(run: Run, arguments: tuple[str, ...], named: str) -> None:
    Path("empty.txt").write_text("\n")
    Path("several").mkdir(exist_ok=True)
    for name in ("a.pth", "b.pth"):
        (Path("several") / name).touch()
    Path("utf16.txt").write_text("a", encoding="utf-16")
    Path("utf16le.txt").write_text("a\nb", encoding="utf-16le")
    Path("wrong.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    Path("list.json").write_text('[{"prompt": "a"}]')
    has_checkpoint = "checkpoint=" in "".join(arguments) or not arguments
    one_sentence(run("generate", *(() if has_checkpoint else CHECKPOINT[:1]), *arguments), named)


def test_a_checkpoint_without_a_tokenizer_is_reported_in_one_sentence(run: Run) -> None:
    small_model(vocab_size=256).save_pretrained("bare.pth")
    one_sentence(run("generate", "checkpoint=bare.pth"), "bare.pth", "tokenizer=")


@pytest.mark.parametrize("prompt", ["", "a=b, \"c'\n"])
def test_standard_output_is_the_prompt_and_its_continuation(run: Run, prompt: str) -> None:
    status, output, error = run("generate", *CHECKPOINT, f"prompt={prompt}", "max_new_tokens=20")
    assert status == 0
    pattern = rf"^read {max(1, len(prompt))} tokens? in [\d.]+ s, wrote \d+ in [\d.]+ s( \(\d+ tokens/s after the first\))?$"
    assert re.search(pattern, error, re.MULTILINE)
    assert output.startswith(prompt)
    assert set(output) <= set(CHARACTERS)
    again = run("generate", "checkpoint=model.ckpt", f"prompt={prompt}", "max_new_tokens=20", "stream=false")
    assert again[1] == output


def test_a_prompt_from_standard_input(run: Run, set_stdin: Callable[[bytes], None]) -> None:
    set_stdin("cab\nü".encode())
    assert run("generate", *CHECKPOINT, "prompt=-", "max_new_tokens=0")[:2] == (0, "cab\nü\n")
    set_stdin(b"caf\xe9")
    status, _, error = run("generate", *CHECKPOINT, "prompt=-")
    assert (status, "byte 3" in error) == (2, True)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_dtypes_write_too(run: Run, dtype: str) -> None:
    status, output, _ = run("generate", *CHECKPOINT, "prompt=a", f"dtype={dtype}", "max_new_tokens=10", "banned=[0]")
    assert (status, len(output)) == (0, 12)


@pytest.mark.thorough
def test_many_prompts_give_the_same_texts_as_one_by_one(run: Run) -> None:
    Path("prompts.txt").write_text("ab\nc, a\n", encoding="utf-8")
    Path("prompts.jsonl").write_text('{"prompt": "ab"}\n\n{"prompt": "c, a"}\n', encoding="utf-8")
    several = ("num_samples=2", "seed=5", "max_new_tokens=15", "banned=[0]")
    _, from_text, _ = run("generate", *CHECKPOINT, "prompts=prompts.txt", *several, "out=texts.jsonl", "logprobs=2")
    _, from_json, _ = run("generate", *CHECKPOINT, "prompts=prompts.jsonl", *several, "batch_size=1")
    assert from_text == from_json
    samples = [json.loads(line) for line in Path("texts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(sample["prompt"], sample["seed"]) for sample in samples] == [("ab", 5), ("ab", 6), ("c, a", 5), ("c, a", 6)]
    assert from_text == "---\n".join(f"{sample['prompt']}{sample['text']}\n" for sample in samples)
    for sample in samples:
        alone = run("generate", *CHECKPOINT, f"prompt={sample['prompt']}", f"seed={sample['seed']}", *several[2:])[1]
        assert alone == f"{sample['prompt']}{sample['text']}\n"
        assert [len(entry["top"]) for entry in sample["logprobs"]] == [2] * 15


@pytest.mark.parametrize("last", [1, 2])
def test_a_prompt_without_ids_is_an_error_before_any_work_and_leaves_the_old_file(run: Run, last: int) -> None:
    Path("samples.jsonl").write_text("of yesterday\n")
    Path("prompts.txt").write_text("\n".join(["ab", "z"][-last:]))
    one_sentence(run("generate", *CHECKPOINT, "prompts=prompts.txt", "batch_size=1", "out=samples.jsonl"), "'z'")
    assert Path("samples.jsonl").read_text() == "of yesterday\n"


NO_LINE_ENDS = "a\u2028b\u2029c\x85d\fe\vf"


@pytest.mark.parametrize(("name", "line"), [
    ("prompts.txt", NO_LINE_ENDS),
    *((name, json.dumps({"prompt": NO_LINE_ENDS}, ensure_ascii=False)) for name in ("prompts.jsonl", "PROMPTS.JSONL"))])
def test_a_line_of_prompts_ends_at_a_newline_alone(tmp_path: Path, name: str, line: str) -> None:
    """A byte order mark is not part of the first line."""
    (tmp_path / name).write_bytes(f"\ufeff{line}\r\n{line}\n".encode())
    assert prompts_from(GenerateConfig(prompts=str(tmp_path / name))) == [NO_LINE_ENDS] * 2


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd, as <(...) of a shell does")
def test_prompts_may_come_from_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"ab\nc\n")
    os.close(writer)
    assert prompts_from(GenerateConfig(prompts=f"/dev/fd/{reader}")) == ["ab", "c"]
    os.close(reader)


def test_prompts_may_come_from_standard_input(set_stdin: Callable[[bytes], None]) -> None:
    set_stdin("ab\r\n\nü".encode())
    assert prompts_from(GenerateConfig(prompts="-")) == ["ab", "ü"]
    set_stdin(b"\n")
    with pytest.raises(UserError, match="prompts=-"):
        prompts_from(GenerateConfig(prompts="-"))


def test_stop_strings_are_verbatim_and_may_be_several(run: Run) -> None:
    options = (*CHECKPOINT, "prompt=a", "banned=[0]", "max_new_tokens=200", "temperature=2", "seed=3")
    whole = run("generate", *options)[1]
    stopped = run("generate", *options, "stop=, ", "stop=\n")[1]
    end = min(place for place in (whole.find(", ", 1), whole.find("\n", 1)) if place >= 0)
    assert end < len(whole) - 1
    assert stopped == whole[:end] + "\n"


def test_only_a_strongly_biased_token_is_drawn(run: Run) -> None:
    b, c = CharTokenizer(CHARACTERS).encode("bc")
    biases = (f"logit_bias={b}:1000", f"logit_bias={c}:900")
    assert run("generate", *CHECKPOINT, "prompt=a", "max_new_tokens=5", *biases)[1] == "abbbbb\n"


def test_a_saved_state_continues_as_if_not_interrupted(run: Run) -> None:
    options = (*CHECKPOINT, "temperature=0", "banned=[0]")
    whole = run("generate", *options, "prompt=ab", "max_new_tokens=30")[1]
    first = run("generate", *options, "prompt=ab", "max_new_tokens=12", "save_state=kept.safetensors")[1]
    rest = run("generate", *options, "state=kept.safetensors", "max_new_tokens=18")[1]
    assert first.removesuffix("\n") + rest == whole
    small_model("conv1d", len(CHARACTERS) + 1, seed=1).save_pretrained("other.ckpt", CharTokenizer(CHARACTERS))
    one_sentence(run("generate", "checkpoint=other.ckpt", "state=kept.safetensors"), "kept.safetensors", "model")


class Interrupting(io.StringIO):
    """A standard output whose user presses Ctrl-C after twelve characters."""

    def write(self, text: str) -> int:
        super().write(text)
        if text and len(self.getvalue()) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return len(text)


def test_ctrl_c_keeps_what_was_written(run: Run) -> None:
    options = (*CHECKPOINT, "prompt=ab", "max_new_tokens=40", "banned=[0]")
    whole = run("generate", *options)[1]
    with redirect_stdout(Interrupting()) as output:
        status, _, _ = run("generate", *options, "out=text.jsonl", "save_state=kept.safetensors")
    assert status == 130
    assert output.getvalue() == whole[:12] + "\n"
    assert json.loads(Path("text.jsonl").read_text())["finish"] is None
    assert Path("kept.safetensors").exists()


@pytest.mark.parametrize("files", [(), ("out=text.jsonl", "save_state=kept.safetensors")])
def test_a_closed_pipe_is_not_an_error(run: Run, files: tuple[str, ...]) -> None:
    """`python generate.py | head` ends without an error, and its files are complete."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed, redirect_stdout(closed):     # noqa: PTH123 (a descriptor)
        status, _, error = run("generate", *CHECKPOINT, "prompt=a", "max_new_tokens=10", "banned=[0]", *files)
    assert status == 0
    assert "rror" not in error
    if files:
        assert len(json.loads(Path("text.jsonl").read_text())["tokens"]) == 10
        assert Path("kept.safetensors").exists()


def test_a_program_may_be_started_without_standard_input_and_output(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with <&- and >&- in a shell."""
    with monkeypatch.context() as patch:
        for name in ("stdin", "stdout"):
            patch.setattr(sys, name, None)
        status, _, error = run("generate", *CHECKPOINT, "prompt=-", "max_new_tokens=3", "out=text.jsonl")
        assert (status, "rror" in error) == (0, False)
        assert run("generate", *CHECKPOINT, "max_new_tokens=3")[0] == 0
        assert run("chat", *CHECKPOINT)[0] == 0
        sys.stdin.close()
    assert json.loads(Path("text.jsonl").read_text())["prompt"] == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("option", ["out", "save_state"])
def test_a_full_disk_is_reported_with_the_file(run: Run, option: str) -> None:
    status, _, error = run("generate", *CHECKPOINT, "prompt=a", "max_new_tokens=3", f"{option}=/dev/full")
    assert status == 2
    assert error.splitlines()[-1].startswith("error: /dev/full: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_reported_after_the_files_are_written(run: Run) -> None:
    full = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115  the program closes it
    files = ("out=text.jsonl", "save_state=kept.safetensors")
    with redirect_stdout(full):
        status, _, error = run("generate", *CHECKPOINT, "prompt=a", "max_new_tokens=10", "banned=[0]", *files)
    full.close()
    assert status == 2
    assert error.splitlines()[-1] == f"error: standard output: {os.strerror(errno.ENOSPC)}"
    assert len(json.loads(Path("text.jsonl").read_text())["tokens"]) == 10
    assert Path("kept.safetensors").exists()
