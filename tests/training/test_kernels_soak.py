"""Trains RWKV-7 with every kernel in one sweep (make soak)."""

from pathlib import Path

import pytest
from models import reasons
from training_runs import ROOT, finish, losses, start

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

KERNELS = [name for name, reason in reasons("wkv7").items() if reason is None]
RECIPE = ("model=rwkv7_tiny", "optim=adamw", "optim.lr=6e-4", "trainer.max_steps=50", "trainer.log_every=1",
          "trainer.val_every=50", "trainer.sample_tokens=0", "logger=csv", f"data.cache_dir={ROOT / '.cache'}")
@pytest.mark.parametrize(("eps", "allowed"), [("1e-8", 1e-4), ("1e-18", None)])
def test_fifty_steps_under_every_kernel(tmp_path: Path, eps: str, allowed: float | None) -> None:
    """With the official eps, 1e-18, rounding decides updates of gradients near 0. The difference is then only printed."""
    arguments = (*RECIPE, f"optim.eps={eps}", f"kernel={','.join(KERNELS)}", "out_dir=sweep")
    result = finish(start(tmp_path, "train", "-m", *arguments), timeout_s=1800)
    assert result.status == 0, result.error
    runs = {folder.parent.name: list(losses(folder.parent).values()) for folder in tmp_path.glob("sweep/*/metrics.csv")}
    assert len(runs) == len(KERNELS)
    assert all(len(run) == 50 for run in runs.values())
    (reference,) = [run for name, run in runs.items() if name.endswith("kernel=reference")]
    assert reference[-1] < 0.8 * reference[0]
    for name, run in runs.items():
        difference = max(abs(one - other) for one, other in zip(run, reference, strict=True))
        print(f"eps {eps}, {name}: {difference:.1e}")
        assert allowed is None or difference <= allowed
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert all(name in page for name in KERNELS)
