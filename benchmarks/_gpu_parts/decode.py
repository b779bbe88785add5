"""The part `decode`: decoding steps with sampling, and prefill."""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_parts.check import Check, milliseconds
from benchmarks._gpu_parts.random_models import random_model
from rwkv.config import Sampling
from rwkv.generation.decoder import CDecoder, Decoder, decoder_of
from rwkv.generation.prefill import SHORT_PROMPT, Prefill, advance_all
from rwkv.generation.sampling import draw_function_on, next_tokens
from rwkv.model.weights_watch import tensors_of
from rwkv.pretrained import RWKV

DECODERS = (("bfloat16", "0.1b"), ("bfloat16", "1.5b"), ("int8", "1.5b"), ("int4", "1.5b"), ("float16", "0.1b"),
            ("int8", "0.1b"), ("int4", "0.1b"), ("float32", "0.1b"))             # the most common cases first
SIZES = {"0.1b": (12, 768), "1.5b": (24, 2048), "tiny": (2, 64)}                 # layers and width
PROMPTS = (1, 32), (1, 512), (8, 512), (1, 4096), (8, 8)                         # prompts and their tokens


def decode(check: Check) -> None:
    for format, size in DECODERS if check.on_gpu else (("bfloat16", "tiny"), ("float32", "tiny")):
        about = {"model": size, "dtype": format}
        with check.measuring(**about):
            V = 65536 if check.on_gpu else 256
            _measure_decoder(check, random_model(check.device, "rwkv7", *SIZES[size], V, format), about)
        check.end_after_gpu_fault()


@torch.no_grad()
def _measure_decoder(check: Check, model: RWKV, about: dict[str, Any]) -> None:
    options = Sampling(temperature=1.0, top_p=0.8)
    weights = sum(tensor.nbytes for tensor in tensors_of(model)) - model.emb.weight.nbytes
    for B in (1, 8, 64, 256, 512) if check.on_gpu else (1, 2):
        with check.measuring(**about, rows=B):
            start = time.perf_counter()
            state = model.empty_state(B)
            decoder = decoder_of(model, state)
            draw, _ = draw_function_on(model.emb.weight.device, isinstance(decoder, CDecoder))
            tokens, uniform = torch.zeros(B, dtype=torch.long), torch.rand(B, dtype=torch.float64)

            def sample(logits: Tensor, uniform: Tensor = uniform, draw: Any = draw) -> Tensor:
                return next_tokens(logits, uniform, options, draw=draw)

            logits = decoder.step(sample(decoder.step(tokens)))
            row = {"first_tokens_s": time.perf_counter() - start,
                   "token_ms": milliseconds(check, lambda f=sample, d=decoder, t=tokens: f(d.step(t)), 0.5),
                   "step_ms": milliseconds(check, lambda d=decoder, t=tokens: d.step(t), 0.3),
                   "sampling_ms": milliseconds(check, lambda f=sample, x=logits: f(x), 0.3)}
            check.add(**about, rows=B, decoder=type(decoder).__name__, tok_s=1000 * B / row["token_ms"], **row,
                      least_gb=(weights + 2 * state.nbytes()) / 1e9)         # bytes that a step must read and write
            del decoder, logits          # frees the decoder's slots for the next batch size
    decoder = decoder_of(model, model.empty_state(0))
    for n, T in PROMPTS if check.on_gpu else ((1, 16), (2, 3)):
        with check.measuring(**about, prompts=n, prefill=T):
            ms = milliseconds(check, lambda n=n, T=T: _read_prompts(model, decoder, n, T), 0.5)
            check.add(**about, prompts=n, prefill=T, ms=ms, tok_s=1000 * n * T / ms)


def _read_prompts(model: RWKV, decoder: Any, n: int, T: int) -> None:
    """Reads n prompts of T tokens as the engine does: short prompts together."""
    prompts = [Prefill(model, [1] * T, decoder=None if isinstance(decoder, Decoder) else decoder) for _ in range(n)]
    if n * T <= SHORT_PROMPT and all(prompt.joinable_tokens for prompt in prompts):
        advance_all(prompts)
    for prompt in prompts:
        while prompt.next_cost:
            prompt.advance()
