"""Text from a model: the prompt in one parallel pass, then one token after the other from the recurrent state.

Memory and time per token do not depend on how much has been read or written.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rwkv.model import RWKV
from rwkv.sampling import sample
from rwkv.state import State
from rwkv.tokenizer import Tokenizer

PREFILL_CHUNK = 1024                     # tokens of the prompt that one pass takes: bounds the memory of a long prompt


def generate(model: RWKV, tokenizer: Tokenizer, prompt: str = "", max_new_tokens: int = 200, temperature: float = 0.8,
             top_k: int = 0, top_p: float = 0.95, seed: int = 0) -> Iterator[str]:
    """Pieces of text that continue `prompt` (not repeated), as they come, each of whole characters.

    Without a prompt generation starts from the end-of-text token; that token ends a text. Raises ValueError, before the
    first piece is asked for, where the prompt cannot be encoded or the tokenizer does not fit the model.
    """
    tokens = encode_prompt(model, tokenizer, prompt)
    return _pieces(model, tokenizer, tokens, max_new_tokens, temperature, top_k, top_p, torch.Generator().manual_seed(seed))


def _pieces(model: RWKV, tokenizer: Tokenizer, tokens: Tensor, max_new_tokens: int, temperature: float, top_k: int,
            top_p: float, generator: torch.Generator) -> Iterator[str]:
    decoder = tokenizer.decoder()
    logits, state = prefill(model, tokens)
    for remaining in reversed(range(max_new_tokens)):
        token = sample(logits[:, :tokenizer.vocab_size], generator, temperature, top_k, top_p)
        if token.item() == tokenizer.end_of_text:
            break
        if piece := decoder.push(int(token)):
            yield piece
        if remaining:
            logits, state = decode_one_token(model, token, state)
    if rest := decoder.flush():
        yield rest


def encode_prompt(model: RWKV, tokenizer: Tokenizer, prompt: str) -> Tensor:
    """The prompt's tokens (1,T), T >= 1."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.vocab_size}: they do not "
                         "belong together")
    ids = list(tokenizer.encode(prompt)) or [tokenizer.end_of_text]
    return torch.tensor([ids], device=model.emb.weight.device)


def prefill(model: RWKV, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """The logits (B,V) after tokens (B,T), and the state, in passes of a bounded number of tokens."""
    for chunk in tokens.split(PREFILL_CHUNK, dim=1):
        logits, state = model.prefill(chunk, state)
    assert state is not None
    return logits, state


def decode_one_token(model: RWKV, token: Tensor, state: State) -> tuple[Tensor, State]:
    """The logits (B,V) after one more token (B,), and the state."""
    return model.prefill(token.to(model.emb.weight.device).unsqueeze(1), state)
