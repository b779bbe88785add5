"""Tunes a small RWKV-7 on a verifiable rule with full, LoRA and state tuning: python -m benchmarks.tuning --out FOLDER.

A question is six words from a list of 500, and the answer is the third word in capitals. The base model is first trained on
questions of one to six words. In half of the questions a system message gives the position of the answer ("System: third"), in
the others the position is random. So the base model follows an instruction, but without an instruction it copies a random word.
A base model in FOLDER/base/ is reused.

Prints exact matches before and after each tuning, on 100 unseen questions with the same words and on 50 with other words, both
without a system message; and wall time, trained values and peak memory of the training process. The last line of standard
output is the result as JSON.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks._main import run_program
from benchmarks.training import ROOT, metrics
from kernels.arguments import Parser, at_least, path_of
from kernels.bench.results import check_folder, output_file, publish
from kernels.machine import hardware

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
WAYS = {"full": ("optim.lr=1e-3",), "lora": ("tune=lora", "optim.lr=5e-3"),
        "state": ("tune=state", "optim.lr=5e-2", "optim.min_lr=1e-4")}
COMMON = ("data.batch_size=8", "model.ctx_len=128", "trainer=cpu", "logger=csv", "data.cache_dir=cache",
          "trainer.sample_every=0", "trainer.val_every=100000", "trainer.sample_tokens=0")
MODEL = ("model=rwkv7_tiny", "model.n_layer=2", "model.n_embd=128")
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")
Pair = tuple[str, str]
Conversation = list[dict[str, str]]


def words(count: int, seed: int) -> list[str]:
    """Returns distinct random words of two syllables."""
    chance = random.Random(seed)
    result: dict[str, None] = {}
    while len(result) < count:
        result["".join(chance.choice(letters) for letters in (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS))] = None
    return list(result)


def base_conversations(vocabulary: Sequence[str], count: int, chance: random.Random) -> list[Conversation]:
    """Returns questions of one to six words, with a random word as the answer.

    In half of the conversations a system message gives the position of the answer.
    """
    conversations = []
    for index in range(count):
        chosen = chance.sample(vocabulary, chance.randint(1, 6))
        place = chance.randrange(len(chosen))
        system = [{"role": "system", "content": PLACES[place]}] if index % 2 else []
        conversations.append([*system, *conversation(" ".join(chosen), chosen[place].upper())])
    return conversations


def conversation(question: str, answer: str) -> Conversation:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def third_word_pairs(vocabulary: Sequence[str], count: int, chance: random.Random) -> list[Pair]:
    """Returns questions of six words, with the third word as the answer."""
    pairs = []
    for _ in range(count):
        chosen = chance.sample(vocabulary, 6)
        pairs.append((" ".join(chosen), chosen[2].upper()))
    return pairs


def write(path: Path, conversations: Iterable[Conversation]) -> None:
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations), encoding="utf-8")


def train(folder: Path, name: str, *options: str) -> float:
    """Trains a run in folder/name, and returns the seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "train.py"), *COMMON, *options, f"out_dir={name}"], cwd=folder, check=True)
    return time.perf_counter() - started


def matches(folder: Path, checkpoint: str, questions: Sequence[Pair]) -> float:
    """Returns the fraction of questions whose greedy answer matches exactly."""
    code = (f"import json, sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from rwkv import RWKV, Tokenizer\n"
            "from rwkv.generation.engine import generate_batch\n"
            "from rwkv.chat.turn_templates import chat_template\n"
            "template = chat_template('world')\n"
            f"model, questions = RWKV.from_pretrained({checkpoint!r}), json.load(sys.stdin)\n"
            "prompts = [template.render([{'role': 'user', 'content': question}]) for question, _ in questions]\n"
            "samples = generate_batch(model, Tokenizer.named('byte'), prompts, 20, stop=template.stop, temperature=0)\n"
            "print(sum(sample.text.strip() == answer for sample, (_, answer) in zip(samples, questions)))\n")
    process = subprocess.run([sys.executable, "-c", code], cwd=folder, input=json.dumps(questions), capture_output=True,
                             text=True, check=True)
    return int(process.stdout) / len(questions)


def trained_values(folder: Path, way: str) -> int:
    import torch

    tensors = torch.load(folder / way / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    parser = Parser("benchmarks.tuning", (__doc__ or "").split(":")[0])
    parser.add_argument("--out", type=path_of, required=True, metavar="FOLDER")
    parser.add_argument("--base-steps", type=at_least(1), default=4000, metavar="N")
    parser.add_argument("--steps", type=at_least(1), default=2000, metavar="N")
    parser.add_argument("--pairs", type=at_least(1), default=20_000, metavar="N", help="conversations to tune on")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=output_file, metavar="FILE")
    options = parser.parse_args()
    folder = options.out.resolve()
    chance = random.Random(0)
    check_folder(folder)
    known = words(500, 1)
    other = words(100, 2)
    write(folder / "base.jsonl", base_conversations(known, 40_000, chance))
    write(folder / "rule.jsonl", (conversation(*pair) for pair in third_word_pairs(known, options.pairs, chance)))
    same = third_word_pairs(known, 100, chance)
    new = third_word_pairs([word for word in other if word not in known], 50, chance)
    if not (folder / "base").exists():
        train(folder, "base", *MODEL, "data=chat", "data.path=base.jsonl", "data.tokenizer=byte", "data.val_fraction=0.002",
              f"trainer.max_steps={options.base_steps}", "optim.lr=3e-3", "optim.min_lr=1e-4")
    results = [{"way": "before", "same_words": matches(folder, "base", same), "new_words": matches(folder, "base", new)}]
    for way in options.ways:
        seconds = train(folder, way, "data=chat", "data.path=rule.jsonl", "data.val_fraction=0.01", "init_from=base",
                        f"trainer.max_steps={options.steps}", *WAYS[way])
        peak = max(float(row["peak_mem"] or 0) for row in metrics(folder / way))
        results.append({"way": way, "same_words": matches(folder, way, same), "new_words": matches(folder, way, new),
                        "seconds": round(seconds), "trained": trained_values(folder, way), "peak_mem": peak})
    publish({"machine": hardware.describe("cpu"), "results": results}, options.json)


if __name__ == "__main__":
    run_program(main)
