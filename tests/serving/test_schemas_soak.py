"""Two hundred random schemas, in the shapes of real tools and of test suites, at three temperatures: what ends is valid."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jsonschema_rs
import pytest
from models import small_model
from schemas import SCHEMAS, drawn
from serving_runs import serving

from rwkv.tokenizer.tokenizers import ByteTokenizer

pytestmark = [pytest.mark.programs, pytest.mark.soak, pytest.mark.timeout(1800)]
TEMPERATURES, MOST = (0, 0.7, 2), 300

def test_what_ends_is_valid_and_what_is_cut_says_so(tmp_path: Path) -> None:
    small_model("conv1d", vocab_size=256, n_embd=32).save_pretrained(tmp_path / "tiny.pth", ByteTokenizer(), format="pth")
    schemas = [*SCHEMAS, *(drawn(random.Random(seed)) for seed in range(160))]
    asked = [(number, temperature) for number in range(len(schemas)) for temperature in TEMPERATURES]
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
