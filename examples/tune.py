"""Trains a small model, tunes the model on conversations with LoRA, and prints the loss before and after tuning.

python examples/tune.py [FOLDER] [--steps N]

The conversations ask for the first of three words. The same options tune a released model: init_from=FILE.pth.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = ("tree", "river", "stone", "cloud", "lamp", "bread", "wind", "horse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/tuning"), metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    conversations, held_out = args.folder / "conversations.jsonl", args.folder / "held-out.jsonl"
    write(conversations, 400, seed=0)
    write(held_out, 50, seed=1)
    base, tuned = args.folder / "base", args.folder / "tuned"
    small = ("logger=csv", "trainer.sample_tokens=0", "trainer.val_tokens=5000")
    train("model=rwkv7_tiny", "model.n_layer=2", "model.n_embd=128", "data.tokenizer=byte", f"trainer.max_steps={args.steps}",
          f"out_dir={base}", *small)
    train(f"init_from={base}", "data=chat", f"data.path={conversations}", "tune=lora", "optim.lr=5e-3", f"out_dir={tuned}",
          *small)
    print(f"loss on held-out answers, nats per token: {loss(base, held_out):.3f} before, {loss(tuned, held_out):.3f} after")


def write(file: Path, count: int, seed: int) -> None:
    """Writes conversations of a question and an answer, one per line of JSON."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as opened:
        for _ in range(count):
            words = draw.sample(WORDS, 3)
            conversation = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[0]}]
            opened.write(json.dumps({"messages": conversation}) + "\n")


def train(*options: str) -> None:
    if subprocess.run([sys.executable, ROOT / "train.py", *options], check=False).returncode:
        sys.exit("training failed: the lines above give the reason")


def loss(checkpoint: Path, conversations: Path) -> float:
    options = (f"checkpoint={checkpoint.resolve()}", f"data.path={conversations.resolve()}")
    command = [sys.executable, "-m", "rwkv.tools.evaluate", *options]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(process.stdout.splitlines()[-1])["loss"])


if __name__ == "__main__":
    main()
