"""Checks that the notebook in examples/ runs from its first cell to its last, and is stored without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


def test_the_notebook_has_no_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"]]


@pytest.mark.soak                        # the tests start three runs and a Jupyter kernel, one after another
@pytest.mark.filterwarnings("default")   # Jupyter emits a warning
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the notebook with three training steps, outside the clone."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parent.parent))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for full, short in (("STEPS = 200", "STEPS = 4"),
                        ("next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / \"train.py\").is_file())",
                         f"Path({str(NOTEBOOK.parent.parent)!r})"),
                        ('"logger=csv"]', '"logger=csv", "data=text", "data.path=text.txt"]')):
        assert full in first.source
        first.source = first.source.replace(full, short)
    (tmp_path / "text.txt").write_text("".join(f"def f{n}(x): return x + {n}\n" for n in range(3000)))
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert "val/loss" in texts[2]
    assert "torch_scan" in texts[3]
    assert texts[4].startswith("def ")
    assert (tmp_path / "runs" / "tour" / "kernels" / "report.html").exists()
