"""Computes log-probabilities of tokens from the logits before sampling options, and formats them as entries of an answer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv.generation.request import Entry
from rwkv.tokenizer.tokenizers import Tokenizer


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities (B,) of tokens (B,), and the ids (B,n) and log-probabilities (B,n) of the n likeliest tokens.

    The logits (B,V) may be on a GPU, where the work is then done. The results are on the CPU.
    """
    vocabulary = torch.log_softmax(logits.float(), -1)
    top = vocabulary.topk(min(n, vocabulary.shape[-1]))
    chosen = vocabulary.gather(-1, tokens.to(vocabulary.device).unsqueeze(-1)).squeeze(-1)
    return chosen.cpu(), top.indices.cpu(), top.values.cpu()


def logprob_entry(tokenizer: Tokenizer, token: int, logprob: Tensor, top_ids: Tensor, top_logprobs: Tensor, n: int | None,
                  before: Sequence[int]) -> Entry:
    """Returns the entry of a token: its text, its log-probability, and the n likeliest tokens at its position.

    `before` holds the ids before the token, on which the token's text may depend.
    """
    tokens = [token, *top_ids.tolist()[:n]]
    names = tokenizer.names(tokens, before)
    values = [logprob.item(), *top_logprobs.tolist()[:n]]
    chosen, *top = [{"token": each, "text": name, "logprob": value}
                    for each, name, value in zip(tokens, names, values, strict=True)]
    return {**chosen, "top": [each for each in top if each["logprob"] > -math.inf]}
