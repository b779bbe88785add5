"""Two hundred random schemas, in the shapes of real tools and of test suites, at three temperatures: what ends is valid."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from models import small_model
from serving_runs import serving

from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = [pytest.mark.programs, pytest.mark.soak, pytest.mark.timeout(1800)]
SCHEMAS, TEMPERATURES, MOST = 200, (0, 0.7, 2), 300
KEYS = ["name", "id", "Größe", "城市", "a b", "x/y", "~0", "$ref", "type", "naïve", "\U0001f642", "it's", 'quo"te',
        "back\\slash", ""]
PATTERNS = ["^[a-z]{1,6}$", "^(yes|no)$", "[0-9]{2}", "^\\d{3}-\\d{2}$", "^[A-Z][a-zé]{0,4}( [A-Z])?$", "^#[0-9a-f]{6}$"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname"]
VALUES = [None, True, 0, -3, 1.5, "", "é", 'a"b\\c', [], [1, [2]], {}, {"k": None}]


class Schemas:
    """Makes schemas: keywords of one type at a time, two or three levels deep, with definitions that are referred to."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.definitions: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        kind = self.chance.choice([self.object, self.object, self.object, self.array, self.any_of])
        schema = {**kind(3)}
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def schema(self, depth: int) -> dict[str, Any]:
        simple = [self.text, self.integer, self.number, self.enum, self.const, self.several]
        deep = [self.object, self.array, self.any_of, self.reference]
        made: dict[str, Any] = self.chance.choice(simple if depth == 0 else [*simple, *deep, *deep])(depth - 1)
        return {**made, "description": "What it is for."} if self.chance.random() < 0.2 else made

    def object(self, depth: int) -> dict[str, Any]:
        names = self.chance.sample(KEYS, self.chance.randint(1, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        schema["required"] = names if self.chance.random() < 0.5 else [name for name in names if self.chance.random() < 0.5]
        more = self.chance.choice([False, False, False, {"type": "boolean"}, None])
        if more is not None:
            schema["additionalProperties"] = more
        if more is not False:            # or it would hardly end; a number of properties goes with all of them required
            schema |= {"required": names, "maxProperties": len(names) + 1}
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        least = self.chance.randint(0, 2)
        most = least + self.chance.randint(0, 2)
        schema = {"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": most}
        if self.chance.random() < 0.2:
            schema["prefixItems"] = [self.schema(0)]
            schema["maxItems"] = least + 1
        return schema

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(max(0, depth)) for _ in range(self.chance.randint(2, 3))]}

    def reference(self, depth: int) -> dict[str, Any]:
        """To a definition, of a tree at times: the same may be inside itself."""
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        if self.chance.random() < 0.3:
            child = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
            made: dict[str, Any] = {"type": "object", "properties": {"value": self.schema(0), "next": child},
                                    "required": ["value", "next"], "additionalProperties": False}
        else:
            made = self.schema(0)
        self.definitions[name] = made
        return {"$ref": f"#/$defs/{name}"}

    def text(self, depth: int) -> dict[str, Any]:
        found = {"type": "string"}
        kind = self.chance.randrange(3)
        if kind == 0:
            return {**found, "pattern": self.chance.choice(PATTERNS), "maxLength": 12}
        if kind == 1:
            return {**found, "format": self.chance.choice(FORMATS)}
        least = self.chance.randint(0, 3)
        return {**found, "minLength": least, "maxLength": least + self.chance.randint(0, 5)}

    def integer(self, depth: int) -> dict[str, Any]:
        low = self.chance.randint(-1000, 1000)
        schema = {"type": "integer", self.chance.choice(["minimum", "exclusiveMinimum"]): low,
                  self.chance.choice(["maximum", "exclusiveMaximum"]): low + self.chance.choice([2, 7, 90, 10**6])}
        return schema

    def number(self, depth: int) -> dict[str, Any]:
        low = round(self.chance.uniform(-100, 100), self.chance.randint(0, 3))
        return {"type": "number", "minimum": low, "maximum": round(low + self.chance.uniform(0.1, 1000), 2)}

    def enum(self, depth: int) -> dict[str, Any]:
        return {"enum": self.chance.sample(VALUES, self.chance.randint(1, 4))}

    def const(self, depth: int) -> dict[str, Any]:
        return {"const": self.chance.choice(VALUES)}

    def several(self, depth: int) -> dict[str, Any]:
        return {"type": self.chance.sample(["null", "boolean", "integer"], 2), "minimum": 0, "maximum": 30}


def test_what_ends_is_valid_and_what_is_cut_says_so(tmp_path: Path) -> None:
    small_model("conv1d", vocab_size=256, n_embd=32).save_pretrained(tmp_path / "tiny.pth", ByteTokenizer(), format="pth")
    schemas = [Schemas(seed).whole() for seed in range(SCHEMAS)]
    asked = [(number, temperature) for number in range(SCHEMAS) for temperature in TEMPERATURES]
    with serving(tmp_path, "checkpoint=tiny.pth", "tokenizer=byte", "template=g1", "max_rows=8") as server, \
            ThreadPoolExecutor(8) as threads, httpx.Client(base_url=f"{server.url}/v1", timeout=600) as api:
        def answer(each: tuple[int, float]) -> httpx.Response:
            number, temperature = each
            return api.post("/chat/completions", json={
                "messages": [{"role": "user", "content": "Hello"}], "temperature": temperature, "seed": number,
                "max_tokens": MOST,
                "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schemas[number]}}})

        answers = [*threads.map(answer, asked)]
    ended, refused, wrong = 0, [], []
    for (number, temperature), each in zip(asked, answers, strict=True):
        schema = schemas[number]
        if each.status_code != 200:
            refused.append((number, schema, each.text))
            continue
        choice, usage = each.json()["choices"][0], each.json()["usage"]
        text = choice["message"]["content"]
        if choice["finish_reason"] == "length":
            if usage["completion_tokens"] != MOST:
                wrong.append((number, temperature, schema, text, "cut early"))
            continue
        ended += 1
        try:
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(text))
        except ValueError as error:
            wrong.append((number, temperature, schema, text, str(error)))
    print(f"{len(asked)} answers: {ended} ended, {len(asked) - ended - len(refused)} cut, {len(refused)} refused, "
          f"{len(wrong)} wrong")
    assert not wrong, wrong[:5]
    assert not refused, refused[:5]
    assert ended >= 0.8 * len(asked), "more strings have no end than the schemas explain"
