"""Tests that only the folder, the checkpoint file and the operator of an architecture import or name the architecture."""

import ast
import re
from pathlib import Path

RWKV = Path(__file__).parent.parent.parent / "rwkv"
OWN_CODE = r"(model|checkpoint)/rwkv\d+\b"
NAME = re.compile(r"r?wkv\d+")
ALLOWED_NAMES = {"config/train.py": {"rwkv4"},        # the default of model.generation
                 "training/plan/other_gpus.py": {"rwkv4", "rwkv7"}}          # names measured training steps


def other_sources() -> dict[str, str]:
    """Returns the sources of all files that belong to no generation, by path."""
    files = {path.relative_to(RWKV).as_posix(): path for path in RWKV.rglob("*.py")}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items() if not re.match(OWN_CODE, name)}


def generation_names(source: str) -> set[str]:
    """Returns the names of generations and their operators that occur as strings in a file."""
    return {node.value for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)}


def generation_imports(source: str) -> set[str]:
    """Returns the modules of generations that a file imports."""
    names = [f"{getattr(node, 'module', '')}.{alias.name}" for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    return {name for name in names if any(NAME.fullmatch(part) for part in name.split("."))}


def test_no_other_code_imports_a_generation() -> None:
    assert generation_imports("from rwkv.model import base, rwkv7\nimport rwkv.model.rwkv4.mix") == {
        "rwkv.model.rwkv7", ".rwkv.model.rwkv4.mix"}
    assert {name: hits for name, source in other_sources().items() if (hits := generation_imports(source))} == {}


def test_no_other_code_names_a_generation() -> None:
    assert generation_names('x = config.generation == "rwkv7" or op in ("wkv4",)') == {"rwkv7", "wkv4"}
    assert {name: hits for name, source in other_sources().items()
            if (hits := generation_names(source) - ALLOWED_NAMES.get(name, set()))} == {}
