"""A generation is its folder and its file in checkpoint/, which no code outside rwkv/model and rwkv/checkpoint imports."""

import re
from pathlib import Path

RWKV = Path(__file__).parent.parent.parent / "rwkv"


def test_no_other_code_imports_a_generation() -> None:
    others = [path for path in RWKV.rglob("*.py") if path.parts[len(RWKV.parts)] not in ("model", "checkpoint")]
    importing = {str(path.relative_to(RWKV)) for path in others
                 if re.search(r"import.*\brwkv\d+\b|rwkv\.(model|checkpoint)\.rwkv\d", path.read_text(encoding="utf-8"))}
    assert not importing
