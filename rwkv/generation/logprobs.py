"""Log-probabilities of tokens, computed from the logits before any option of sampling, and their entries in an answer."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rwkv.tokenizer.tokenizers import Tokenizer


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities (B,) of tokens (B,), the ids (B,n) of the n likeliest tokens, and their log-probabilities (B,n).

    They are computed on the device of the logits (B,V), and returned on the CPU.
    """
    every = torch.log_softmax(logits.float(), -1)
    likeliest = every.topk(min(n, every.shape[-1]))
    of_tokens = every.gather(-1, tokens.to(every.device).unsqueeze(-1)).squeeze(-1)
    return of_tokens.cpu(), likeliest.indices.cpu(), likeliest.values.cpu()


def entry(tokenizer: Tokenizer, token: int, logprob: Tensor, likeliest: Tensor, their_logprobs: Tensor, n: int | None,
          before: Sequence[int]) -> dict[str, Any]:
    """A token with its text and log-probability, and the n likeliest tokens at its place. before: the last ids before it."""
    tokens = [token, *likeliest.tolist()[:n]]
    names = tokenizer.names(tokens, before)
    values = [logprob.item(), *their_logprobs.tolist()[:n]]
    own, *top = [{"token": each, "text": name, "logprob": value}
                 for each, name, value in zip(tokens, names, values, strict=True)]
    return {**own, "top": [each for each in top if each["logprob"] > -math.inf]}
