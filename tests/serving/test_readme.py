"""Runs the lines for OpenAI's client in README.md and docs/serve.md, and the example with tool calls, with a small model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving_runs import Running
from training_runs import ENVIRONMENT

pytestmark = pytest.mark.programs
ROOT = Path(__file__).parent.parent.parent


def test_the_readme_s_client_gets_answers(g1: Running, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "client" in block]
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8000", g1.url), names)
        assert capsys.readouterr().out.strip()


def test_the_page_on_serving_s_client_gets_an_answer(server: Running) -> None:
    pytest.importorskip("openai")
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    lines = page[page.index("    from openai"):page.index("\n- Completions")].split("\n")
    exec("\n".join(line[4:] for line in lines).replace("http://127.0.0.1:8000", server.url), {})


@pytest.mark.soak
def test_the_example_serves_and_calls(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    command = [sys.executable, str(ROOT / "examples" / "serve_and_call.py"), str(checkpoint), "tokenizer=byte"]
    result = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "stream: " in result.stdout
