"""RWKV language models: `from rwkv import RWKV, Tokenizer, generate`."""

from rwkv.generation import generate
from rwkv.model import RWKV
from rwkv.tokenizer import Tokenizer

__all__ = ["RWKV", "Tokenizer", "generate"]
