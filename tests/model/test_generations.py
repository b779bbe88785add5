"""A generation is its two files: they offer the same names, and no code outside rwkv/model and rwkv/checkpoint imports them."""

import importlib
import re
from pathlib import Path

import pytest

from rwkv.checkpoint.generations import generation_of, generations
from rwkv.config import ModelConfig
from rwkv.model.base import generation

RWKV = Path(__file__).parent.parent.parent / "rwkv"
NAMES = sorted(path.stem for path in (RWKV / "model").glob("rwkv*.py") if re.fullmatch(r"rwkv\d+", path.stem))
OFFERS = ("NAME", "OPERATOR", "shapes", "resolved", "Block", "State", "empty_state", "init_weights", "group", "KEPT_FLOAT32",
          "Step", "PLAIN", "non_negative", "LR_SCALES", "UNUSED", "operator_work", "kept_for_backward")
READS = ("model", "recognises", "official_name", "arranged", "laid_out", "widths", "has_many_forms", "HUGGING_FACE_TYPE",
         "HUGGING_FACE_SIZES", "HUGGING_FACE_CONSTANTS", "hugging_face_config", "EXTENSIONS", "GGUF_ARCHITECTURE")


@pytest.mark.parametrize("name", NAMES)
def test_a_generations_files_offer_the_same_names(name: str) -> None:
    model, checkpoint = (importlib.import_module(f"rwkv.{folder}.{name}") for folder in ("model", "checkpoint"))
    assert [offered for offered in OFFERS if not hasattr(model, offered)] == []
    assert [offered for offered in READS if not hasattr(checkpoint, offered)] == []
    assert checkpoint in generations()
    assert checkpoint.model is model


def test_a_configuration_names_its_generation() -> None:
    assert generation(ModelConfig()).__name__ == "rwkv.model.rwkv4"
    assert generation_of(ModelConfig()).model is generation(ModelConfig())


def test_no_other_code_imports_a_generation() -> None:
    others = [path for path in RWKV.rglob("*.py") if path.parts[len(RWKV.parts)] not in ("model", "checkpoint")]
    importing = {str(path.relative_to(RWKV)) for path in others
                 if re.search(r"import.*\brwkv\d+\b|rwkv\.(model|checkpoint)\.rwkv\d", path.read_text(encoding="utf-8"))}
    assert not importing
