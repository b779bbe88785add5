"""RWKV language models: `from rwkv import RWKV, Tokenizer, generate`."""

from rwkv.generation.engine import generate, generate_batch
from rwkv.model.rwkv4 import RWKV
from rwkv.tokenizer.tokenizers import Tokenizer

__all__ = ["RWKV", "Tokenizer", "generate", "generate_batch"]
