"""Tests that a third generation needs only a folder in rwkv/model, an operator in kernels/ and a file in rwkv/checkpoint.

The toy in third_generation/ has formulas only: no fused forms, no decoding step and no C. Without any change of the program's
files it trains, resumes, samples, is compared with its reference, and is saved, converted and loaded.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import ENVIRONMENT, ROOT, SMALL, TEXT

TESTS = Path(__file__).parent.parent
TOY = Path(__file__).parent / "third_generation"
RUN = (*SMALL, "logger=csv", "model.generation=rwkv9", "model.n_embd=16", "model.ctx_len=16", "optim.lr=1e-2",
       "optim.schedule=constant", "trainer.val_every=6", "trainer.checkpoint_every=2")
DRIVER = f"""
import json, sys
from pathlib import Path
sys.path[:0] = [".", {str(TESTS)!r}]
import pytest, torch
from programs import status_of
from rwkv import RWKV
from rwkv.tools import convert

patch = pytest.MonkeyPatch()
run = lambda program, *arguments: status_of(patch, program, *arguments) == 0 or sys.exit(f"{{program}} {{arguments}}")
run("train", *{RUN!r}, "trainer.max_steps=6", "out_dir=whole")
run("train", *{RUN!r}, "trainer.max_steps=4", "out_dir=stopped")
run("train", "resume=auto", "out_dir=stopped", "trainer.max_steps=6")
run("train", *{RUN!r}, "kernel=reference", "trainer.probe=true", "trainer.max_steps=3", "out_dir=checked")
print("SAMPLE")
run("generate", "checkpoint=whole", "prompt=line", "max_new_tokens=12", "seed=1", "stop=[]")

probed = json.loads(Path("checked", "kernel.json").read_text())
assert probed["wrong"] is None and probed["errors"]["end"]["layers"][1]["errors"]["grad decay"]["err_ratio"] < 1e-5

models = {{}}
for name in ("stopped", "a.safetensors", "a.pth", "directory"):
    if name != "stopped":
        convert.main(["whole", name])
    models[name] = RWKV.from_pretrained(name)
whole = RWKV.from_pretrained("whole")
tokens = torch.arange(24).view(2, 12)
logits, state = whole(tokens)
for model in models.values():
    assert torch.equal(model(tokens)[0], logits)
halves = [whole(tokens[:, :5])]
halves.append(whole(tokens[:, 5:], halves[0][1]))
torch.testing.assert_close(torch.cat([half for half, _ in halves], 1), logits)
first = RWKV(whole.config, whole.vocab_size, whole.operator).init_weights()
assert not torch.equal(first.blocks[1].att.decay, whole.blocks[1].att.decay), "nothing was trained"
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with links to the program's files and to those of the toy."""
    root = tmp_path_factory.mktemp("program")
    folders = [ROOT / name for name in ("kernels", "rwkv", "rwkv/model", "rwkv/checkpoint")]
    for folder in folders:
        (root / folder.relative_to(ROOT)).mkdir()
    for path in (ROOT / "configs", *(path for folder in folders for path in folder.iterdir())):
        if path not in folders and path.name != "__pycache__":
            (root / path.relative_to(ROOT)).symlink_to(path)
    for path in TOY.rglob("*.py"):
        (root / path.relative_to(TOY)).parent.mkdir(exist_ok=True)
        (root / path.relative_to(TOY)).symlink_to(path)
    (root / "text.txt").write_text(TEXT)
    return root


@pytest.mark.programs
def test_a_third_generation_runs_in_all_programs(program: Path) -> None:
    """The toy generation runs through all programs, and the terminal names its kernel and its decoder."""
    process = subprocess.run([sys.executable, "-c", DRIVER], cwd=program, env=ENVIRONMENT, capture_output=True, text=True,
                             check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "RWKV-9" in process.stderr
    assert "decoding: PyTorch (RWKV-9 has no decoding step in C)" in process.stderr
    assert "reference (chosen by auto: not measured on cpu yet)" in process.stderr
    assert "continued from" in process.stderr
    assert len(process.stdout.partition("SAMPLE\n")[2]) >= 12
