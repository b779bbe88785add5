"""An architecture consists of its folder, its file in checkpoint/ and its operator: no other code imports or names it."""

import ast
import re
from pathlib import Path

RWKV = Path(__file__).parent.parent.parent / "rwkv"
OWN = r"(model|checkpoint)/rwkv\d+\b"
NAME = re.compile(r"r?wkv\d+")
MAY_NAME = {"config/train.py": {"rwkv4"},        # the default of model.generation
            "training/plan/other_gpus.py": {"rwkv4", "rwkv7"}}          # measured training steps


def others() -> dict[str, str]:
    """The source of each file outside the generations."""
    files = {path.relative_to(RWKV).as_posix(): path for path in RWKV.rglob("*.py")}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if not re.match(OWN, name)}


def named(source: str) -> set[str]:
    """The names of generations and their operators among the strings of a file."""
    return {node.value for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)}


def imported(source: str) -> set[str]:
    """The modules of generations that a file imports."""
    names = [f"{getattr(node, 'module', '')}.{alias.name}" for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return {name for name in names if any(NAME.fullmatch(part) for part in name.split("."))}


def test_no_other_code_imports_a_generation() -> None:
    assert imported("from rwkv.model import base, rwkv7\nimport rwkv.model.rwkv4.mix") == {
        "rwkv.model.rwkv7", ".rwkv.model.rwkv4.mix"}
    assert {name: found for name, source in others().items() if (found := imported(source))} == {}


def test_no_other_code_asks_for_a_generation_by_name() -> None:
    assert named('x = config.generation == "rwkv7" or op in ("wkv4",)') == {"rwkv7", "wkv4"}
    assert {name: found for name, source in others().items() if (found := named(source) - MAY_NAME.get(name, set()))} == {}
