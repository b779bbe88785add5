"""Runs PyPI's `rwkv` tokenizer for benchmarks/tokenization.py, in another environment and process.

This file is run as a script, so that `import rwkv` finds PyPI's package. Each line of standard input is a JSON request, and is
answered by one line.

    {"version": null}                 returns the version of the package
    {"text": FILE}                    reads the text for the next requests
    {"work": "encode" | "decode"}     encodes or decodes the text once
    {"ids_of": [HEX, ...]}            returns the token ids of byte strings
"""

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


class Answers:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.data = b""
        self.ids: list[int] = []

    def version(self, _: None) -> str:
        return metadata.version("rwkv")

    def text(self, path: str) -> None:
        self.data = Path(path).read_bytes()
        self.ids = self.tokenizer.encodeBytes(self.data)

    def work(self, which: str) -> None:
        self.tokenizer.encodeBytes(self.data) if which == "encode" else self.tokenizer.decode(self.ids)

    def ids_of(self, strings: list[str]) -> list[list[int]]:
        return [self.tokenizer.encodeBytes(bytes.fromhex(string)) for string in strings]


def main() -> None:
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    vocabulary = Path(sys.modules[TRIE_TOKENIZER.__module__].__file__ or "").with_name("rwkv_vocab_v20230424.txt")
    answers = Answers(TRIE_TOKENIZER(str(vocabulary)))
    for line in sys.stdin:
        ((request, argument),) = json.loads(line).items()
        print(json.dumps(getattr(answers, request)(argument)), flush=True)


if __name__ == "__main__":
    main()
