"""Trains the same model with several kernels, and prints the speed and the loss of each kernel.

python examples/ablate.py [FOLDER] [--kernels A,B] [--steps N]
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/ablation"), metavar="FOLDER")
    parser.add_argument("--kernels", default="conv1d,torch_scan,c_v0")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    command = [sys.executable, ROOT / "train.py", "-m", f"kernel={args.kernels}", "logger=csv", f"out_dir={args.folder}",
               "model.n_layer=2", "model.n_embd=64", "trainer.val_tokens=10000", "trainer.log_every=1",
               f"trainer.max_steps={args.steps}"]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"the sweep failed. To resume the sweep, run: python train.py -m resume=auto out_dir={args.folder}")
    print(f"{'kernel':12} {'tokens/s':>9} {'val/loss':>9} {'apart by':>9}")
    for row in medians(args.folder / "report.csv"):
        print(f"{row['kernel']:12} {float(row['tok_per_sec']):9,.0f} {float(row['val_loss']):9.4f} "
              f"{float(row['difference'] or 0):9.1e}")


def medians(file: Path) -> list[dict[str, str]]:
    """Returns the rows of a report.csv with the medians over each kernel's runs."""
    with file.open(newline="", encoding="utf-8") as opened:
        return [row for row in csv.DictReader(opened) if row["statistic"] == "median"]


if __name__ == "__main__":
    main()
