"""What checkpoints say of chat: templates in tokenizer_config.json and in GGUF's metadata, names, options of sampling."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from rwkv.chat.names import default_template
from rwkv.chat.rendered import encode
from rwkv.chat.stated import sampling_in
from rwkv.chat.templates import chat_template
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import ByteTokenizer

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")
TALK = [{"role": "user", "content": "Hi"}]
CONVERTERS = ["rwkv-world",
              "{%- for message in messages -%}{{- 'User: ' + message['content']|trim + '\\n\\n' -}}{%- endfor -%}"]


def directory(folder: Path, **tokenizer_config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return str(folder)


def gguf_file(path: Path, **metadata: Any) -> str:
    writer = gguf.GGUFWriter(path, "rwkv7")
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("stated", [
    TEMPLATE, {"default": TEMPLATE, "tool_use": "-"},
    [{"name": "tool_use", "template": "-"}, {"name": "default", "template": TEMPLATE}],
], ids=["text", "by name", "list"])
def test_tokenizer_config_holds_the_default(tmp_path: Path, stated: Any) -> None:
    name = default_template(directory(tmp_path / "rwkv7-g1k", chat_template=stated)).template
    assert chat_template(name).render(TALK) == "<user>Hi\n<assistant>"


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    folder = directory(tmp_path / "model", chat_template="{{ messages[0].content }}")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    assert chat_template(default_template(folder).template).render(TALK) == "<user>Hi\n<assistant>"


@pytest.mark.parametrize("stated", [None, 3, [], ["text"], [{"name": "tool_use", "template": TEMPLATE}], {}])
def test_without_a_default_the_name_decides(tmp_path: Path, stated: Any) -> None:
    folder = directory(tmp_path / "rwkv7-g1k-1.5b", chat_template=stated)
    assert default_template(folder).template == "g1"
    with pytest.raises(UserError):
        chat_template(f"{folder}/tokenizer_config.json")


def test_ggufs_metadata_hold_the_default(tmp_path: Path) -> None:
    name = default_template(gguf_file(tmp_path / "model.gguf", tokenizer__chat_template=TEMPLATE)).template
    assert chat_template(name).render(TALK) == "<user>Hi\n<assistant>"


@pytest.mark.parametrize("template", CONVERTERS)
def test_what_llama_cpps_converter_gives_every_model_is_no_choice(tmp_path: Path, template: str) -> None:
    assert default_template(gguf_file(tmp_path / "a.gguf", tokenizer__chat_template=template)).template == "world"
    assert default_template(gguf_file(tmp_path / "rwkv7-g1d.gguf", tokenizer__chat_template=template)).template == "g1"


def test_the_name_in_the_file_counts_where_the_files_own_says_nothing(tmp_path: Path) -> None:
    assert default_template(gguf_file(tmp_path / "model.gguf", general__name="Rwkv7 G1k 1.5b 20260930")).template == "g1"
    folder = directory(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": "RWKV/RWKV7-G1k-1.5B/"}))
    assert default_template(folder).template == "g1"
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": "/home/g1/world"}))
    assert default_template(folder).template == "world"


def test_the_world_vocabularys_end_in_a_template_is_that_token(tmp_path: Path) -> None:
    """fla's directories write it before a conversation; in a message it is text."""
    end = "<|rwkv_tokenizer_end_of_text|>"
    folder = directory(tmp_path / "fla", chat_template=f"{{{{ '{end}' }}}}{TEMPLATE}")
    template = chat_template(default_template(folder).template)
    tokenizer = ByteTokenizer()
    (ids,) = encode(tokenizer, [template.render([{"role": "user", "content": end}])])
    assert ids == [0, *tokenizer.encode(f"<user>{end}\n<assistant>")]


def test_sampling_counts_where_it_is_used(tmp_path: Path) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.5, "top_k": True, "eos_token_id": 0}
    folder = Path(directory(tmp_path / "model"))
    file = folder / "generation_config.json"
    assert sampling_in(folder) == (file, {})
    for content, expected in ((options, {"temperature": 0.8, "top_p": 0.5}), (options | {"do_sample": False}, {}), ([], {}),
                              (options | {"top_k": -1, "top_p": None}, {"temperature": 0.8, "top_k": 0})):
        file.write_text(json.dumps(content))
        assert sampling_in(folder) == (file, expected)


def test_a_gguf_states_sampling_too(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert sampling_in(tmp_path / "model.gguf") == (tmp_path / "model.gguf", {"temperature": 0.5, "top_k": 40})


def test_a_damaged_file_is_a_users_error(tmp_path: Path) -> None:
    folder = directory(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError):
        default_template(folder)
    whole = Path(gguf_file(tmp_path / "model.gguf", tokenizer__chat_template=TEMPLATE))
    whole.write_bytes(whole.read_bytes()[:60])
    with pytest.raises(UserError):
        default_template(str(tmp_path / "model.gguf"))
