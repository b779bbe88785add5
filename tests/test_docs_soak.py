"""Runs every command of the README and the pages of docs/, examples/ and kernels/, page by page, in the order of the page.

The commands of a page run in a temporary folder with small files of the names that they use. RULES has the arguments that are
added to a command to make it short, and the commands that are not run, with the reason. A command that matches no rule fails
the test.
"""

import gzip
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import binidx_files
import numpy as np
import pytest
import zstandard
from files import SIZES, byte_model
from models import small_model
from serving_runs import Running, serving
from test_docs import PAGES, ROOT, commands, python_blocks
from tokenizer_files import sentencepiece_bpe
from training_runs import ENVIRONMENT

pytestmark = pytest.mark.soak
SHOWN_PORT = "http://127.0.0.1:8000"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away", "from", "here")
LENGTH = "trainer.max_steps=3"
STEPS = f"{LENGTH} trainer.val_every=3 trainer.checkpoint_every=3 trainer.val_tokens=200 trainer.sample_tokens=4"
SIZE = "model.n_layer=1 model.n_embd=64 model.ctx_len=32"
TRAIN = f"{STEPS} logger=csv data.cache_dir=cache"       # a model from a file has its size already
ANEW = f"{TRAIN} {SIZE}"
LITTLE_TEXT = "data.val_fraction=0.2"
SHORT_BENCH = "--only conv1d --shape 2,64,32 --seconds 0.01"


class Rule(NamedTuple):
    """Says how commands that begin with the regular expression `pattern` are run.

    The arguments `more` are added to a command. `why_not` is the reason why a command is not run.
    """

    pattern: str
    more: str = ""
    why_not: str = ""


def not_run(pattern: str, why: str) -> Rule:
    return Rule(pattern, why_not=why)


# The first matching rule applies.
RULES = [
    not_run(r"make\b", "installs environments, or runs this suite, benchmarks or checks of many minutes"),
    not_run(r"(\S+/)?pip |python3 -m venv|hf download", "downloads packages or weights"),
    not_run(r"python -m pytest", "is part of this suite"),
    not_run(r"timemix (chat|list|pull)\b", "needs the Hub"),
    not_run(r"timemix (serve|convert)\b", "is on another page in a different spelling"),
    not_run(r"python generate\.py checkpoint=MODEL", "uses the large file of the command before it"),
    not_run(r"python -m rwkv\.tools\.convert .*--lora", "uses a file that another program has written"),
    not_run(r"python \S+ .*((state|NAME)=(time_state|STATE)|=ADAPTER)", "uses a file that another program has written"),
    Rule(r"timemix (doctor|smoke)\b"),
    not_run(r"python -m benchmarks\.gpu_check", "needs a GPU"),
    not_run(r"python -m (kernels\.bench|benchmarks)\.tables", "writes into the documentation"),
    not_run(r"python -m benchmarks\.(first_token|in_place|generations|training|tuning_memory)", "cannot be shortened: minutes"),
    not_run(r"python train\.py kernel=NAME", "uses a kernel that the reader writes"),
    not_run(r"python -m kernels\.bench timex --only NAME", "uses a kernel that the reader writes"),
    not_run(r"python train\.py .*sweep\.launcher=submitit", "needs SLURM"),
    Rule(r"curl "),
    Rule(r"python serve\.py", "max_tokens=200"),
    Rule(r"python chat\.py", "max_new_tokens=4"),
    Rule(r"python generate\.py", "max_new_tokens=4"),
    Rule(r"python train\.py .*plan="),
    not_run(r"python train\.py data=(hf|datatrove) ", "needs the library datasets, or shards that datatrove wrote"),
    Rule(r"python train\.py .*data\.streaming=true",
         f"{ANEW.replace(LENGTH, '')} trainer.max_tokens=1024 data.val_documents=20"),
    Rule(r"python train\.py data=mix", f"{ANEW} {LITTLE_TEXT} data.tokenizer=byte"),
    not_run(r"python train\.py trainer=fsdp( trainer\.devices=8 .*)?$", "takes all GPUs"),
    Rule(r"python train\.py resume=auto", "trainer.max_steps=6"),        # keeps the run's other options
    Rule(r"python train\.py init_from=\S+ data=chat", f"{TRAIN} model.ctx_len=256 {LITTLE_TEXT}"),
    Rule(r"python train\.py init_from=", f"{TRAIN} model.ctx_len=32 {LITTLE_TEXT}"),
    Rule(r"python train\.py experiment=rwkv7_minipile", f"{ANEW} trainer.max_tokens=null data.batch_size=2 {LITTLE_TEXT}"),
    Rule(r"python train\.py .*data\.path=", f"{ANEW} {LITTLE_TEXT}"),
    Rule(r"python train\.py -m resume=auto out_dir="),
    Rule(r"python train\.py -m experiment=kernel_ablation", f"{ANEW} data.tokenizer=byte seed=0 kernel=conv1d,taichi_v0"),
    Rule(r"python train\.py -m .*trainer\.max_tokens=",
         f"{ANEW.replace(LENGTH, '')} data.tokenizer=byte data.batch_size=4 trainer.max_tokens=512 out_dir=sweep"),
    Rule(r"python train\.py -m kernel=conv1d,taichi_v3,taichi_scan seed=0,1", f"{ANEW} data.tokenizer=byte kernel=conv1d"),
    Rule(r"python train\.py", f"{ANEW} data.tokenizer=byte"),
    Rule(r"python -m rwkv\.tools\.(evaluate|report)"),
    Rule(r"python examples/ablate\.py", "ablation --steps 3"),
    Rule(r"python examples/tune\.py", "tuning --steps 3"),
    Rule(r"python examples/serve_and_call\.py"),
    Rule(r"python examples/brick_padding\.py", "wall.png"),
    Rule(r"python -m kernels$"),
    Rule(r"python -m kernels\.bench\.plot"),
    Rule(r"python -m kernels\.bench wkv4 --shape", "--only torch_scan --shape 2,64,32 --sweep 16,32 --seconds 0.01"),
    Rule(r"python -m kernels\.bench ", SHORT_BENCH),
    Rule(r"python -m benchmarks\.generation$", "--shape 1,64,300 --dtype float32 --batch 1 --prompt 16"),
    Rule(r"python -m benchmarks\.step_profile",
         "--generation rwkv4 --optim adamw --precision 32-true --shape 1,64,2,16,64 --steps 1"),
    Rule(r"python -m benchmarks\.positions", "--generation rwkv4 --contexts 128 --widths 64 --tokens 8192 --out positions"),
    Rule(r"python -m benchmarks\.serving ", "--texts 2 --seconds 1 --turns 1 --shape 1,64,512"),
    Rule(r"python -m benchmarks\.serving_states", "--tokens 50 --turns 1 --shape 1,64,512"),
    Rule(r"python -m benchmarks\.tuning", "--base-steps 2 --steps 2 --pairs 200 --ways lora"),
    Rule(r"python -m benchmarks\.speculation", "--shapes 6,64,300 --dtypes int8"),
    Rule(r"python -m benchmarks\.fused_products", "--shape 1,64,300,1,16 --steps 1"),
    not_run(r"python -m benchmarks\.versions", "needs a checkout of an earlier version"),
    Rule(r"python -m benchmarks\.quality"),
    Rule(r"python -m benchmarks\.tokenization", "--strings 20 --text FILE"),
]


# Files


def text(path: Path) -> None:
    chance = random.Random(0)
    path.write_text("".join(f"{' '.join(chance.choices(WORDS, k=8))}.\n" for _ in range(400)), encoding="utf-8")


def lines(path: Path, *objects: object) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")


def texts(path: Path) -> None:
    lines(path, *({"text": f"{n} comes before {n + 1}."} for n in range(400)))


def compressed(path: Path) -> None:
    texts(path.with_suffix(""))
    content = path.with_suffix("").read_bytes()
    path.with_suffix("").unlink()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else zstandard.compress(content))


def conversations(path: Path) -> None:
    lines(path, *({"messages": [{"role": "user", "content": f"What comes after {n}?"},
                                {"role": "assistant", "content": f"{n + 1}"}]} for n in range(40)))


def pairs(path: Path) -> None:
    lines(path, *({"prompt": f"What comes after {n}?", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(40)))


def tokens(path: Path) -> None:
    chance = np.random.default_rng(0)
    binidx_files.write(path, [[*chance.integers(1, 60_000, 200).tolist(), 0] for _ in range(20)])


def world_model(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    small_model(generation="rwkv7", vocab_size=65536, **SIZES["rwkv7"]).save_pretrained(path)


def other_model(path: Path) -> None:
    small_model(vocab_size=300).save_pretrained(path)


def tokenizer(path: Path) -> None:
    path.write_text(sentencepiece_bpe(), encoding="utf-8")


def latest_run(path: Path) -> None:
    train(path.parent.parent, f"data.tokenizer=byte {SIZE}")


def tuned_by(how: str) -> Callable[[Path], None]:
    """Returns a function that trains a run which tunes BASE.pth with tune=`how`."""
    def train_run(path: Path) -> None:
        conversations(path.parent.parent / "conversations.jsonl")
        train(path.parent.parent, f"init_from=BASE.pth data=chat data.path=conversations.jsonl tune={how} model.ctx_len=256 "
                                  f"{LITTLE_TEXT} out_dir={path}")
    return train_run


def train(folder: Path, options: str) -> None:
    run_program([sys.executable, str(ROOT / "train.py"), *shlex.split(f"{TRAIN} {options}")], folder)


G1 = "rwkv7-g1k-1.5b-20260930-ctx25600.pth"
DRAFT = "rwkv7-g1d-0.1b-20260129-ctx8192.pth"
RELEASED = {f"BlinkDL/rwkv7-g1/{DRAFT}": world_model}
# FILES has, by page, the files that exist before the page's first command.
FILES: dict[str, dict[str, Callable[[Path], None]]] = {
    "README.md": {"FILE": text, **RELEASED},
    "files.md": RELEASED,
    "clients.md": {G1: world_model},
    "deploy.md": {G1: world_model},
    "data.md": {"FILE": text, "NAME": tokens, "web/a.jsonl.gz": compressed, "web/b.jsonl.zst": compressed,
                "web.jsonl": texts, "books/one.txt": text},
    "chat.md": {G1: world_model, "CONVERSATIONS.jsonl": conversations},
    "serve.md": {G1: world_model, DRAFT: world_model, "RWKV-4.pth": other_model, "20B_tokenizer.json": tokenizer, "FILE": text,
                 "BASE.pth": world_model, "runs/calm": tuned_by("state"), "runs/legal": tuned_by("lora"),
                 "runs/latest": latest_run},
    "train.md": {"FILE": text, "FILE.pth": world_model, "enwik8": text, "minipile": tokens,
                 "mine.yaml": lambda path: path.write_text("seed: 1\n")},
    "tune.md": {"FILE.pth": world_model, "CONVERSATIONS.jsonl": conversations, "PAIRS.jsonl": pairs},
    "benchmarks.md": {"FILE": text, "TEXT": text, "CHECKPOINT.safetensors": byte_model},
    "examples/README.md": {"runs/latest": latest_run},
}
# VALUES has, by page, the values of the page's placeholders.
VALUES = {
    "chat.md": {'"max_tokens": 2000': '"max_tokens": 20'},
    "serve.md": {"BASE": "BASE.pth"},
    "train.md": {"PATH": "FILE.pth", "DIR": "runs/latest", "out_dir=DIR": "out_dir=sweep"},
    "tune.md": {"init_from=FILE": "init_from=FILE.pth"},
    "benchmarks.md": {"OP": "timex", "--json FILE": "--json results.json", "FOLDER": "folder", "PART": "share",
                      "serving_states PART": "serving_states first", "CHECKPOINT": "CHECKPOINT.safetensors"},
    "kernels/README.md": {"FOLDER": "folder"},
}


# Running


class Step(NamedTuple):
    """A command as the page shows it, and as it is run. `rule` is None if no rule matches."""

    shown: str
    words: list[str]
    rule: Rule | None


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def steps(page: Path) -> Iterator[Step]:
    values = VALUES.get(name_of(page), {})
    for command in commands(page):
        line = shlex.join(command.words)
        for placeholder in sorted(values, key=len, reverse=True):
            line = re.sub(rf"(?<!\w){re.escape(placeholder)}(?![\w/.])", values[placeholder], line)
        rule = next((rule for rule in RULES if re.match(rule.pattern, " ".join(command.words))), None)
        yield Step(" ".join(command.words), shlex.split(line), rule)


def run_program(words: list[str], folder: Path) -> str:
    """Runs a program, which must succeed, and returns its standard output."""
    result = subprocess.run(words, cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, input="hi\n", text=True,
                            encoding="utf-8", capture_output=True, check=False)
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


class Reader:
    """Simulates a reader who types a page's commands, one after another."""

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        self._folder, self._servers = folder, servers
        self.server: Running | None = None
        self._state = ""                 # the id of the last saved state

    def type(self, words: list[str]) -> None:
        program, *rest = words
        if program == "timemix":
            program, rest = "python", ["-m", "rwkv.tools", *rest]
        if words[:2] == ["python", "serve.py"]:
            self.server = self._servers.enter_context(serving(self._folder, *rest[1:]))
        elif program == "curl":
            self._curl(rest)
        elif program == "python" and rest[0].endswith(".py"):
            run_program([sys.executable, str(ROOT / rest[0]), *rest[1:]], self._folder)
        else:
            assert program == "python"
            run_program([sys.executable, *rest], self._folder)

    def _curl(self, words: list[str]) -> None:
        assert self.server is not None
        here = [word.replace(SHOWN_PORT, self.server.url).replace("state_...", self._state) for word in words]
        answer = json.loads(run_program(["curl", "-sS", "--fail-with-body", *here], self._folder))
        assert "error" not in answer
        if answer["object"] == "state":
            self._state = answer["id"]

    def run(self, source: str) -> None:
        """Runs a Python program of the page that calls the server."""
        assert self.server is not None
        run_program([sys.executable, "-c", source.replace(SHOWN_PORT, self.server.url)], self._folder)


PAGES_TO_RUN = [page for page in PAGES if any(step.rule is None or not step.rule.why_not for step in steps(page))]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES_TO_RUN, ids=name_of)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    for name, make in FILES.get(name_of(page), {}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        make(tmp_path / name)
    with ExitStack() as servers:
        reader = Reader(tmp_path, servers)
        for step in steps(page):
            assert step.rule is not None, f"no rule of this file matches the command: {step.shown}"
            if not step.rule.why_not:
                print(step.shown, flush=True)
                reader.type([*step.words, *shlex.split(step.rule.more)])
        if page.name == "README.md" and page.parent == ROOT:
            reader.run("\n".join(block for block in python_blocks() if "client" in block))


def test_every_rule_matches_some_command() -> None:
    used = {step.rule for step in chain.from_iterable(map(steps, PAGES))}
    assert [rule.pattern for rule in RULES if rule not in used] == []
