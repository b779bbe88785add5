"""Computes one embedding vector per text from the final hidden states, which are the inputs of the head."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from rwkv.config import Pooling, strings
from rwkv.errors import UserError
from rwkv.generation.engine import Engine, warn_of_other_tokenizer
from rwkv.generation.request import Request
from rwkv.generation.stopping import StoppingCriteria
from rwkv.model.base import Model
from rwkv.tokenizer.tokenizers import Tokenizer


def embed(model: Model, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling = "mean") -> Tensor:
    """Returns the float32 embeddings (n,C) of n texts. Raises ValueError if a text cannot be encoded, or for unknown pooling.

    Each embedding has norm 1, so the dot product of two embeddings is their cosine similarity. pooling="mean" averages over the
    text's tokens, and "last" takes the last token. An empty text is read as the end-of-text token. The other texts do not
    affect a text's embedding.
    """
    if pooling not in get_args(Pooling):
        raise UserError(f"pooling must be one of {', '.join(get_args(Pooling))}; got {pooling!r}")
    texts = strings("texts", texts)
    engine = Engine(model, tokenizer)
    warn_of_other_tokenizer(model, tokenizer)
    rows = [engine.add(Request(text, stopping=StoppingCriteria(0), pooling=pooling)) for text in texts]
    engine.run()
    return torch.stack([row.embedding for row in rows]) if rows else torch.empty(0, model.config.n_embd)
