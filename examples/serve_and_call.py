"""Starts a server for a checkpoint in another process, and requests an answer and a stream with OpenAI's client.

python examples/serve_and_call.py [CHECKPOINT] [OPTION=VALUE ...]

CHECKPOINT is a file or a run; the default is runs/latest. The options are those of serve.py. The example requires
pip install -e '.[serve]' openai.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    checkpoint, *options = sys.argv[1:] or ["runs/latest"]
    if checkpoint in ("-h", "--help"):
        print(__doc__)
        return
    command = [sys.executable, ROOT / "serve.py", f"checkpoint={checkpoint}", "port=0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            call(address(server))
        finally:
            server.terminate()


def address(server: subprocess.Popen[str]) -> str:
    """Prints the server's output until the server is ready, and returns the url of the server."""
    url = ""
    for line in server.stderr or ():
        sys.stderr.write(line)
        word, _, rest = line.strip().partition(" ")
        if word == "address":
            url = rest.strip()
        if word == "ready":
            return url
    sys.exit("the server has ended: the lines above give the reason")


def call(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 7 times 8?"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=30)
    print("answer:", answer.choices[0].message.content)
    print("stream: ", end="")
    for part in client.completions.create(model=model, prompt="def main", max_tokens=30, stream=True):
        print(part.choices[0].text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
