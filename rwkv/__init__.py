"""RWKV language models: `from rwkv import RWKV, Tokenizer, generate`."""

from rwkv.generation import generate, generate_batch
from rwkv.model import RWKV
from rwkv.tokenizer import Tokenizer

__all__ = ["RWKV", "Tokenizer", "generate", "generate_batch"]
