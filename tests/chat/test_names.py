"""Tests that the names of a file and of its model determine the chat template and the context length of a released model."""

from pathlib import Path

import pytest

from rwkv.chat.names import choose_template, default_template, trained_length

RELEASED: list[tuple[str, str, int | None]] = [          # a case has a name, a template and a context length
    ("rwkv7-g1k-1.5b-20260930-ctx25600.pth", "g1", 25600),
    ("rwkv7-g1k-1.5b-20260930-ctx25600-Q4_K_M.gguf", "g1", 25600),
    ("models/rwkv7-g1j-7.2b-20260831-ctx16384.pth", "g1", 16384),
    ("rwkv7-g1h-2.9b.pth", "g1", 10240),
    ("rwkv7a-g1b-0.1b-20250819-ctx4096.pth", "g1", 4096),
    ("rwkv7-g1d-0.1b.pth", "g1", 8192), ("RWKV7-G1a3-0.4B.pth", "g1", 4096), ("rwkv7-0.1B-g1", "g1", 4096),
    ("rwkv7-g0a.safetensors", "g1", 4096), ("rwkv7_g1l_3b.pth", "g1", 25600),
    ("rwkv-g1k-3b-temp-5441.pth", "g1", 25600), ("rwkv-g1k-13b-5228", "g1", 25600),
    ("RWKV/RWKV7-1.5B-20260805/", "g1", 16384), ("fla-hub/RWKV7-G1j-1.5B-20260831", "g1", 16384),
    ("RWKV7-G1k-1.5B-20260930/model.safetensors", "g1", 25600), ("g1k/model-00001-of-00002.safetensors", "g1", 25600),
    ("hub/models--RWKV--RWKV7-13.3B-20260805/snapshots/64ffe5934178f40fb2c6de13f12cffaf9058f243", "g1", 16384),
    ("RWKV-x070-World-0.1B-v2.8-20241210-ctx4096.pth", "world", 4096), ("RWKV-x070-World-0.1B-v2.8.pth", "world", 4096),
    ("RWKV/RWKV7-Goose-World3-2.9B-HF", "world", 4096), ("RWKV-6-World-1.6B-20250507.pth", "world", 4096),
    ("RWKV-x070-Pile-168M-20241120-ctx4096.pth", "world", 4096), ("RWKV7-Goose-Pile-168M", "world", None),
    ("RWKV-x070-Pile-0.4B-20260101.pth", "world", None), ("RWKV-4-Pile-169M-20220807-8023.pth", "world", None),
    ("RWKV-4-Raven-14B-20260101.pth", "world", None), ("runs/g1/last.ckpt", "world", None), ("big1.pth", "world", None),
    ("runs/2026-09-30_10-00-00/last.ckpt", "world", None)]


@pytest.mark.parametrize(("name", "template", "length"), RELEASED)
def test_a_name_tells_the_template_and_the_length(name: str, template: str, length: int | None) -> None:
    assert default_template(name, None).template == template
    assert trained_length(name, None).tokens == length
    assert default_template("/x/blobs/sha256-77", name).template == template, "other names count too"
    assert default_template(name).why
    assert trained_length(name).why


def test_the_template_of_a_link_is_that_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "rwkv7-g1k-0.1b.pth").write_bytes(b"")
    (tmp_path / "latest.pth").symlink_to(tmp_path / "rwkv7-g1k-0.1b.pth")
    assert default_template(str(tmp_path / "latest.pth")).template == "g1"


def test_the_option_precedes_the_run_s_template_and_its_base() -> None:
    run = {"data": {"template": "chatml.jinja"}, "init_from": "rwkv7-g1k-0.1b.pth"}
    assert choose_template("flower", "last.ckpt", run).template == "flower"
    assert choose_template(None, "last.ckpt", run).template == "chatml.jinja"
    assert choose_template(None, "last.ckpt", {**run, "data": {}}).template == "g1"
    assert choose_template(None, "last.ckpt", None).template == "world"
