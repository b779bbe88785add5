"""Sources of text, document by document: the standard library, text files, JSON lines, conversations, Hugging Face datasets.

    source = open_source(config.data, cache)
    for document in source.documents():
        document.val, document.where, "".join(document.chunks)

A source can be read several times, always in the same order, and is never in memory as a whole. Each kind is one file of this
folder. data=binidx holds tokens, not text (rwkv/data/binidx.py).
"""

from pathlib import Path

from rwkv.config import DataConfig
from rwkv.data.sources import chat, huggingface, jsonl, stdlib, text
from rwkv.data.sources.source import Source
from rwkv.errors import UserError


def open_source(config: DataConfig, cache: Path) -> Source:
    """The source that data.name and data.path name. cache: the folder for the hashes of its files."""
    if config.name == "stdlib" and config.path:
        raise UserError(f"data=stdlib takes no data.path: to train on {config.path}, give data=text as well")
    if config.name == "stdlib":
        return stdlib.source(config)
    if not config.path:
        raise UserError(f"data={config.name} needs data.path: {KINDS[config.name][1]}")
    return KINDS[config.name][0](config, cache)


KINDS = {
    "text": (text.source, "a text file in UTF-8, a folder of .txt files, or a pattern such as books/**/*.md"),
    "jsonl": (jsonl.source, "a .jsonl or .jsonl.gz file, a folder of them, or a pattern"),
    "chat": (chat.source, "a .jsonl or .jsonl.gz file of conversations, a folder of them, or a pattern"),
    "hf": (huggingface.source, "a folder that save_to_disk made, a .parquet, .arrow, .json or .csv file, or a dataset's name"),
}
