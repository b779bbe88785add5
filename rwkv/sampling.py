"""From logits to the next token: temperature, then top-k, then top-p, then a draw (Hugging Face's order)."""

import torch
from torch import Tensor


def sample(logits: Tensor, generator: torch.Generator, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """One token for each row of logits (B,V): (B,) int64, drawn in float32 on the CPU.

    temperature 0 takes the most likely token; top_k 0 and top_p 1 are off. top_p keeps the fewest most likely tokens whose
    probabilities, after temperature and top_k, add up to top_p or more: at least one.
    """
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature      # at most 0: no temperature overflows
    logits = _keep_top_p(_keep_top_k(logits, top_k), top_p)
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator).squeeze(-1)


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    if not 0 < top_k < logits.shape[-1]:
        return logits
    least = logits.topk(top_k).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    if top_p >= 1:
        return logits
    ordered, index = logits.sort(descending=True)
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities       # what the more likely tokens already add up to
    ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ordered)
