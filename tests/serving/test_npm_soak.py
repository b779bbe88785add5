"""Runs the npm client `openai`, installed into a temporary folder, against the real server."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from serving_runs import Running

NPM, NODE = shutil.which("npm"), shutil.which("node")
pytestmark = [pytest.mark.programs, pytest.mark.soak,
              pytest.mark.skipif(NPM is None or NODE is None, reason="needs node and npm on the PATH")]
PROGRAM = """\
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2], apiKey: "none", maxRetries: 0});
const found = {models: [], stream: "", chatStream: ""};
for await (const model of client.models.list()) found.models.push(model.id);
const asked = {model: "tiny", prompt: "once", max_tokens: 20, seed: 3};
found.completion = (await client.completions.create(asked)).choices[0].text;
for await (const chunk of await client.completions.create({...asked, stream: true})) found.stream += chunk.choices[0].text;
const chat = {model: "tiny", messages: [{role: "user", content: "hi"}], max_completion_tokens: 20, seed: 3};
found.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
for await (const chunk of await client.chat.completions.create({...chat, stream: true}))
    found.chatStream += chunk.choices[0].delta.content ?? "";
try {
    await client.completions.create({...asked, temperature: -1});
} catch (error) {
    found.error = [error instanceof OpenAI.BadRequestError, error.status, error.param];
}
console.log(JSON.stringify(found));
"""


def test_the_npm_client_gets_the_same_texts(server: Running, tmp_path: Path) -> None:
    assert NPM is not None
    assert NODE is not None
    install = subprocess.run([NPM, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "openai"],
                             capture_output=True, text=True, cwd=tmp_path, timeout=300)
    if install.returncode:
        pytest.skip(f"npm could not install openai: {install.stderr[-200:]}")
    (tmp_path / "ask.mjs").write_text(PROGRAM)
    run = subprocess.run([NODE, "ask.mjs", f"{server.url}/v1"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout)
    assert results["models"] == ["tiny"]
    assert results["completion"] == results["stream"] != ""
    assert results["chat"] == results["chatStream"] != ""
    assert results["error"] == [True, 400, "temperature"]
