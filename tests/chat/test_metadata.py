"""Tests of checkpoints' chat metadata: templates in tokenizer_config.json and in GGUF, names, and sampling options."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from rwkv.chat.encoding import encode
from rwkv.chat.interface import END
from rwkv.chat.metadata import Generation, generation_in
from rwkv.chat.names import default_template
from rwkv.chat.turn_templates import chat_template
from rwkv.errors import UserError
from rwkv.tokenizer.tokenizers import ByteTokenizer

TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")
CONVERSATION = [{"role": "user", "content": "Hi"}]
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


@pytest.mark.parametrize("value", [
    TEMPLATE, {"default": TEMPLATE, "tool_use": "-"},
    [{"name": "tool_use", "template": "-"}, {"name": "default", "template": TEMPLATE}],
], ids=["text", "by name", "list"])
def test_tokenizer_config_has_the_default(tmp_path: Path, value: Any) -> None:
    name = default_template(directory(tmp_path / "rwkv7-g1k", chat_template=value)).template
    assert chat_template(name).render(CONVERSATION) == "<user>Hi\n<assistant>"


def test_a_separate_template_file_takes_precedence(tmp_path: Path) -> None:
    folder = directory(tmp_path / "model", chat_template="{{ messages[0].content }}")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    assert chat_template(default_template(folder).template).render(CONVERSATION) == "<user>Hi\n<assistant>"


SPECIAL = ("{% for m in messages %}{{ sep_token + m.content + additional_special_tokens[1] + image_token + pad_token }}"
           "{% endfor %}")
EXTRA: dict[str, Any] = {"additional_special_tokens": [{"content": "<a>"}, {"content": "<b>"}], "pad_token": "<end>",
                         "extra_special_tokens": {"image_token": "<image>"}, "eos_token": {"content": "<end>"}}


def test_a_template_may_use_the_special_tokens(tmp_path: Path) -> None:
    """The variables are those of transformers' apply_chat_template, and the name of the end-of-text token becomes the token."""
    folder = tmp_path / "model"
    directory(folder, chat_template=SPECIAL, **EXTRA)
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<sep>", "pad_token": "another"}))
    template = chat_template(default_template(str(folder)).template)
    assert template.render(CONVERSATION) == f"<sep>Hi<b><image>{END}"
    (folder / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<other>"}))
    assert template.definition != chat_template(template.name).definition
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(SPECIAL)
    with pytest.raises(UserError, match="additional_special_tokens"):
        chat_template(str(folder / "chat_template.jinja"))


def test_a_template_in_gguf_may_use_them_too(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.add_string("tokenizer.chat_template", "{% for m in messages %}{{ m.content + sep_token + pad_token }}{% endfor %}")
    writer.add_array("tokenizer.ggml.tokens", ["<end>", "a", "<sep>"])
    for name, index in (("eos", 0), ("padding", 0), ("seperator", 2)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert chat_template(str(tmp_path / "model.gguf")).render(CONVERSATION) == f"Hi<sep>{END}"


@pytest.mark.parametrize("value", [None, 3, [], ["text"], [{"name": "tool_use", "template": TEMPLATE}], {}, "", " \n",
                                   {"default": ""}])
def test_without_a_default_the_name_decides(tmp_path: Path, value: Any) -> None:
    folder = directory(tmp_path / "rwkv7-g1k-1.5b", chat_template=value)
    assert default_template(folder).template == "g1"
    (tmp_path / "rwkv7-g1k-1.5b" / "chat_template.jinja").write_text("\n")
    assert default_template(folder).template == "g1"
    (tmp_path / "rwkv7-g1k-1.5b" / "chat_template.jinja").unlink()
    with pytest.raises(UserError):
        chat_template(f"{folder}/tokenizer_config.json")


def test_the_metadata_of_a_gguf_have_the_default(tmp_path: Path) -> None:
    name = default_template(gguf_file(tmp_path / "model.gguf", tokenizer__chat_template=TEMPLATE)).template
    assert chat_template(name).render(CONVERSATION) == "<user>Hi\n<assistant>"


@pytest.mark.parametrize("template", [*CONVERTERS, " "])
def test_the_template_that_llama_cpp_gives_every_model_is_ignored(tmp_path: Path, template: str) -> None:
    assert default_template(gguf_file(tmp_path / "a.gguf", tokenizer__chat_template=template)).template == "world"
    assert default_template(gguf_file(tmp_path / "rwkv7-g1d.gguf", tokenizer__chat_template=template)).template == "g1"


def test_the_model_name_decides_if_the_file_name_does_not(tmp_path: Path) -> None:
    assert default_template(gguf_file(tmp_path / "model.gguf", general__name="Rwkv7 G1k 1.5b 20260930")).template == "g1"
    folder = directory(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": "RWKV/RWKV7-G1k-1.5B/"}))
    assert default_template(folder).template == "g1"
    (tmp_path / "model" / "config.json").write_text(json.dumps({"_name_or_path": "/home/g1/world"}))
    assert default_template(folder).template == "world"


def test_the_name_of_worlds_end_token_in_a_template_is_that_token(tmp_path: Path) -> None:
    """fla's template renders the token before a conversation, but the token's name in a message is plain text."""
    end = "<|rwkv_tokenizer_end_of_text|>"
    folder = directory(tmp_path / "fla", chat_template=f"{{{{ '{end}' }}}}{TEMPLATE}")
    template = chat_template(default_template(folder).template)
    tokenizer = ByteTokenizer()
    (ids,) = encode(tokenizer, [template.render([{"role": "user", "content": end}])])
    assert ids == [0, *tokenizer.encode(f"<user>{end}\n<assistant>")]


def test_sampling_options_apply_only_with_do_sample(tmp_path: Path) -> None:
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.5, "top_k": True, "eos_token_id": 0}
    folder = Path(directory(tmp_path / "model"))
    file = folder / "generation_config.json"
    assert generation_in(folder) == Generation(file, {})
    for content, expected in ((options, {"temperature": 0.8, "top_p": 0.5}), (options | {"do_sample": False}, {}), ([], {}),
                              (options | {"top_k": -1, "top_p": None}, {"temperature": 0.8, "top_k": 0})):
        file.write_text(json.dumps(content))
        generation = generation_in(folder)
        assert (generation.file, generation.sampling) == (file, expected)


def test_sampling_options_of_a_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = tmp_path / "model.gguf"
    assert generation_in(file) == Generation(file, {"temperature": 0.5, "top_k": 40}, draws=True)


def test_penalties_stops_and_a_limit_apply_without_do_sample(tmp_path: Path) -> None:
    """Penalties also apply to greedy decoding, as in transformers."""
    folder = Path(directory(tmp_path / "model"))
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.8, "repetition_penalty": 1.2, "penalty_decay": 0.9, "stop_strings": "\nUser:",
                                "max_new_tokens": 300.0}))
    penalties = {"repetition_penalty": 1.2, "penalty_decay": 0.9}
    assert generation_in(folder) == Generation(file, penalties, False, ("\nUser:",), 300)


def test_each_kind_of_answer_has_its_own_file_or_the_default_file(tmp_path: Path) -> None:
    folder = Path(directory(tmp_path / "model"))
    for kind, temperature in (("", 0.1), ("fake_think_", 0.2), ("tools_", 0.3)):
        (folder / f"{kind}generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": temperature}))
    kinds = [{"fake": fake, "tools": tools} for fake in (False, True) for tools in (False, True)]
    assert [generation_in(folder, **kind).sampling["temperature"] for kind in kinds] == [0.1, 0.3, 0.2, 0.3]
    (folder / "fake_think_generation_config.json").write_text('{"do_sample": false}')
    (folder / "tools_generation_config.json").unlink()
    assert [generation_in(folder, **kind).sampling["temperature"] for kind in kinds] == [0.1] * 4


@pytest.mark.parametrize("fields", ['"stop_strings": 5', '"stop_strings": ["a", ""]', '"stop_strings": [3]',
                                    '"max_new_tokens": 0', '"max_new_tokens": 1.5', '"max_new_tokens": "many"',
                                    '"max_new_tokens": true', '"max_new_tokens": NaN', '"max_new_tokens": Infinity'])
def test_a_wrong_stop_or_limit_names_the_file(tmp_path: Path, fields: str) -> None:
    folder = Path(directory(tmp_path / "model"))
    (folder / "generation_config.json").write_text(f"{{{fields}}}")
    with pytest.raises(UserError) as error:
        generation_in(folder)
    assert "generation_config.json" in str(error.value)
    assert fields.split('"')[1] in str(error.value)


def test_a_damaged_file_is_a_users_error(tmp_path: Path) -> None:
    folder = directory(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError):
        default_template(folder)
    whole = Path(gguf_file(tmp_path / "model.gguf", tokenizer__chat_template=TEMPLATE))
    whole.write_bytes(whole.read_bytes()[:60])
    with pytest.raises(UserError):
        default_template(str(tmp_path / "model.gguf"))
