"""Tests of grammars: whatever a model's weights are, a finished text matches the grammar."""

import json
import math
import random
import sys
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import tokenizer_files
from hypothesis import example, given
from hypothesis import strategies as st
from models import following, saying, small_model
from schemas import SCHEMAS, closed, random_schema

from rwkv.config import GenerateConfig, Sampling
from rwkv.errors import UserError
from rwkv.generation.engine import Engine, generate, generate_batch
from rwkv.generation.grammar import Grammar
from rwkv.generation.grammar.matcher import matcher_of
from rwkv.generation.options import check_config
from rwkv.generation.request import Request
from rwkv.generation.row import NO_TOKEN, Sample
from rwkv.generation.stopping import StoppingCriteria
from rwkv.programs.generate_results import run_generation
from rwkv.tokenizer.tokenizers import ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer

BYTES = ByteTokenizer()
MODEL = small_model("conv1d", vocab_size=256)
NAMED = closed(name={"type": "string", "maxLength": 4}, n={"type": "integer", "minimum": 0, "maximum": 50})


def texts(grammar: Grammar, tokenizer: Tokenizer = BYTES, n: int = 2, **options: Any) -> list[Sample]:
    model = MODEL if tokenizer is BYTES else small_model("conv1d", vocab_size=tokenizer.vocab_size)
    options = {"max_new_tokens": 300, "temperature": 1.0, **options}
    return generate_batch(model, tokenizer, [""] * n, seeds=[*range(n)], grammar=grammar, **options)


def count_finished(schema: dict[str, Any], samples: list[Sample]) -> int:
    """Returns how many of the samples have ended by themselves, and asserts that these are valid."""
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    ended = [sample for sample in samples if sample.finish_reason == "end_of_text"]
    for sample in ended:
        problems = [str(error) for error in validator.iter_errors(json.loads(sample.text))]
        assert not problems, (schema, sample.text, problems)
    assert all(sample.finish_reason in ("end_of_text", "length") for sample in samples)
    return len(ended)


def test_a_choice_is_one_of_its_texts() -> None:
    choices = ['a"b', "\n\x01\\", "\x7f", "/x/", "a|b", "%json", "\u2028", "yes", "yes, sir"]
    for sample in texts(Grammar.choice(choices), n=20):
        assert sample.text in choices
    for choice in (*choices, ""):
        assert {sample.text for sample in texts(Grammar.choice([choice]))} == {choice}
    labels = [f"label {number}" for number in range(5000)]
    assert {sample.text for sample in texts(Grammar.choice(labels))} <= {*labels}


def test_every_finished_text_is_valid() -> None:
    ended = 0
    for number, schema in enumerate(SCHEMAS):
        ended += count_finished(schema, texts(Grammar.json_schema(schema), temperature=(0, 0.7, 1, 2)[number % 4]))
    assert ended > len(SCHEMAS), "most of the samples must be finished"


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0, 0.8, 2])
def test_every_finished_text_of_many_schemas_is_valid(temperature: float) -> None:
    ended = 0
    for seed in range(200):
        schema = random_schema(random.Random(seed))
        ended += count_finished(schema, texts(Grammar.json_schema(schema), n=4, temperature=temperature))
    assert ended > 400


def allows(grammar: Grammar, text: str) -> bool:
    matcher = matcher_of(grammar, BYTES)
    for byte in text.encode():
        mask = matcher.allowed_mask()
        if mask is None or not mask[byte // 8] >> byte % 8 & 1:
            return False
        matcher.push(byte)
    return True


@given(st.integers(1, 9999), st.integers(1, 12), st.integers(1, 31))
@example(2024, 2, 29)
@example(2023, 2, 29)
@example(1900, 2, 29)
@example(2000, 2, 29)
def test_only_dates_of_the_calendar_are_allowed(year: int, month: int, day: int) -> None:
    try:
        exists = bool(date(year, month, day))
    except ValueError:
        exists = False
    text = f"{year:04}-{month:02}-{day:02}"
    assert allows(Grammar.json_schema({"type": "string", "format": "date"}), f'"{text}"') == exists
    assert allows(Grammar.json_schema({"type": "string", "format": "date-time"}), f'"{text}T12:00:00Z"') == exists


@pytest.mark.parametrize("name", ["email", "hostname"])
def test_addresses_have_only_valid_lengths(name: str) -> None:
    before = "a" * 64 + "@" if name == "email" else ""
    room = 254 - len(before) if name == "email" else 253
    long = ".".join(["b" * 19] * 20)
    for domain in ("b.c", "b" * 63 + ".c", "b" * 64 + ".c", long[:room], long[:room + 1]):
        allowed = allows(Grammar.json_schema({"type": "string", "format": name}), f'"{before}{domain}"')
        assert allowed == (len(domain) <= room and "b" * 64 not in domain), domain
        valid = jsonschema_rs.validator_for({"format": name}, validate_formats=True).is_valid(before + domain)
        assert valid or not allowed, domain


def each_tokenizer() -> list[Any]:
    tokenizers = {"char": CharTokenizer('{}": ,nameabc0123456789'), "chatml": JsonTokenizer(tokenizer_files.chatml()),
                  "bpe": JsonTokenizer.train(['{"name": "abc", "n": 12}'] * 5, 270),
                  "sentencepiece": JsonTokenizer(tokenizer_files.sentencepiece_bpe())}
    return [pytest.param(tokenizer, id=name) for name, tokenizer in tokenizers.items()]


@pytest.mark.parametrize("tokenizer", each_tokenizer())
def test_tokens_of_any_tokenizer(tokenizer: Tokenizer) -> None:
    samples = texts(Grammar.json_schema(NAMED), tokenizer, n=3)
    assert count_finished(NAMED, samples) == 3
    assert all(b"".join(tokenizer.tokens_as_bytes()[token] for token in sample.tokens).decode() == sample.text
               for sample in samples)


@pytest.mark.parametrize("tokenizer", [JsonTokenizer(tokenizer_files.wordpiece()), JsonTokenizer(tokenizer_files.wordlevel())])
def test_tokenizers_whose_tokens_have_no_bytes_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError):
        texts(Grammar.json_schema({}), tokenizer)


def test_a_text_is_the_same_alone_and_in_a_batch_and_in_pieces() -> None:
    grammars = [Grammar.json_schema(NAMED), None, Grammar.regex("[ab]{3,9}"), Grammar.json_schema(SCHEMAS[12])]
    options = {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {97: 2.0}}
    engine = Engine(MODEL, BYTES)
    rows = [engine.add(Request("x", seed, StoppingCriteria(80), Sampling(**options), grammar=grammar))
            for seed, grammar in enumerate(grammars)]
    pieces: dict[int, str] = {}
    for index, piece in engine:
        pieces[index] = pieces.get(index, "") + piece
    for seed, (row, grammar) in enumerate(zip(rows, grammars, strict=True)):
        alone = "".join(generate(MODEL, BYTES, "x", 80, seed, grammar=grammar, **options))
        assert alone == row.sample.text == pieces[row.index]


def test_log_probabilities_are_of_the_allowed_tokens() -> None:
    sample, = texts(Grammar.regex("[ab]c"), n=1, logprobs=5)
    first, second, end = sample.logprobs
    assert {entry["token"] for entry in first["top"]} == {*b"ab"}
    assert math.isclose(sum(math.exp(entry["logprob"]) for entry in first["top"]), 1, abs_tol=1e-6)
    assert [entry["token"] for entry in second["top"]] == [*b"c"]
    assert end["token"] == BYTES.end_of_text
    assert end["logprob"] == 0


def test_arguments_fit_the_schema_of_the_tool_that_is_named() -> None:
    schema = {"properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    grammar = Grammar.text_with_calls([("a.b/c-d", schema, "schema")])
    for name, arguments, allowed in (("a.b/c-d", '{"n": 3}', True), ("a.b/c-d", '{"m": 3}', False),
                                     ("axb/c-d", '{"m": 3}', True)):
        assert allows(grammar, f'Well: {{"name": "{name}", "arguments": {arguments}}}') == allowed


def test_the_end_comes_where_the_grammar_accepts() -> None:
    eager = following(256, [*b"\n"], [0, 0], [*b"a", 0])         # this model ends a text as soon as it may
    assert "".join(generate(eager, BYTES, "", 20, temperature=0, grammar=Grammar.regex("a{3}b*"))).startswith("aaa")
    assert "".join(generate(eager, BYTES, "", 20, temperature=0, grammar=Grammar.regex("a{0,3}"))) == ""
    sample, = texts(Grammar.regex("a{9}"), n=1, max_new_tokens=5)
    assert (sample.text, sample.finish_reason) == ("aaaaa", "length")
    sample, = texts(Grammar.regex("a{9}"), n=1, stop=("aaaa",))
    assert (sample.text, sample.finish_reason) == ("", "stop")


def test_thoughts_are_free() -> None:
    model = saying("!Hm,{9}x</think>\n")
    text = "".join(generate(model, BYTES, "!", 500, temperature=0, grammar=Grammar.json_schema(NAMED).after_thoughts()))
    thoughts, _, answer = text.partition("</think>")
    assert thoughts == "Hm,{9}x"
    jsonschema_rs.validator_for(NAMED).validate(json.loads(answer))


def test_banned_tokens_may_leave_no_token() -> None:
    for sample in texts(Grammar.regex("ab*c"), banned=[*b"bc"]):
        assert (sample.text, sample.finish_reason) == ("a", NO_TOKEN)


@pytest.mark.parametrize(("grammar", "place"), [
    (Grammar.json_schema({"properties": {"a": {"items": {"type": "strin"}}}}), "json_schema.properties.a.items:"),
    (Grammar.json_schema({"type": 3}), "json_schema:"), (Grammar.json_schema({"items": {"type": True}}), "json_schema.items:"),
    (Grammar.json_schema({"$ref": "#/$defs/X", "$defs": {"X": {"not": {}}}}), "json_schema.$defs.X:"),
    (Grammar.json_schema({"anyOf": [{"type": "string"}, {"pattern": "(?=a)b", "type": "string"}]}), "json_schema.anyOf[1]:"),
    (Grammar.json_schema({"$ref": "http://example.com/schema"}), "json_schema:"),
    (Grammar.json_schema({"x-guidance": {"lenient": True}, "uniqueItems": True}), "json_schema:"),
    (Grammar.json_schema({"enum": ["\ud800"]}), "json_schema:"),
    (Grammar.lark("start: missing"), "grammar:"), (Grammar.regex("a(b"), "regex:"), (Grammar.regex(r"(a)\1"), "regex:")])
def test_what_cannot_be_compiled_is_refused_with_the_place(grammar: Grammar, place: str) -> None:
    for refuse in (grammar.check, lambda: matcher_of(grammar, BYTES)):
        with pytest.raises(UserError) as error:
            refuse()
        assert str(error.value).startswith(place)


@pytest.mark.parametrize("schema", [
    [], None, True, "text", {"properties": {"a": {"minProperties": 4}}}, {"properties": {"\n": {"type": "integer"}}}])
def test_invalid_schemas_and_ambiguous_keys_are_refused(schema: Any) -> None:
    with pytest.raises(UserError):
        Grammar.json_schema(schema)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(UserError):
        Grammar.json_schema(schema).check()


def test_without_llguidance_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (lambda: Grammar.json_schema({}).check(), lambda: Grammar.regex("a"),
                 lambda: texts(Grammar.lark('start: "b"'))):
        with pytest.raises(UserError) as error:
            make()
        assert "pip install" in str(error.value)


def test_generate_py_has_the_options_for_grammars(tmp_path: Path) -> None:
    schema, wrong, lark = (tmp_path / name for name in ("schema.json", "wrong.json", "words.lark"))
    schema.write_text(json.dumps(NAMED))
    wrong.write_text("{")
    lark.write_text('start: "a" | "b"')
    out = tmp_path / "out.jsonl"
    for option, value in (("json_schema", str(schema)), ("grammar", str(lark)), ("regex", "[cd]")):
        config = GenerateConfig(**{option: value}, out=str(out), num_samples=2, max_new_tokens=300, dtype="float32")
        check_config(config)
        run_generation(MODEL, BYTES, config, ["x"])
        for line in out.read_text().splitlines():
            text = json.loads(line)["text"]
            if option == "json_schema":
                jsonschema_rs.validator_for(NAMED).validate(json.loads(text))
            else:
                assert text in ("ab" if option == "grammar" else "cd")
    for options in ({"json_schema": str(wrong)}, {"json_schema": str(tmp_path / "none")}, {"regex": "a("},
                    {"regex": "a", "grammar": str(lark)}, {"grammar": str(wrong)}):
        with pytest.raises(UserError):
            check_config(GenerateConfig(**options))
