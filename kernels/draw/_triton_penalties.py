"""Applies penalties for repeated tokens on a GPU to many sequences at once. rwkv/generation/sampling.py has the formulas.

counts (slots,V) float64, which decay, and flags (slots,V) uint8 are on the GPU, with a slot for each sequence. A flag has three
bits: IN_PROMPT, if the token occurs in the prompt; IN_TEXT, if the token occurs in the generated text; and EXEMPT, if the token
is exempt from penalties.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

IN_PROMPT, IN_TEXT, EXEMPT = 1, 2, 4
BLOCK = 1024


def penalize(logits: Tensor, counts: Tensor, flags: Tensor, slots: Tensor, tokens: Tensor, options: Tensor) -> Tensor:
    """Counts each row's last token, and returns the logits (B,V) float32 after the penalties.

    Args:
        slots (B,): the sequences' slots, int64.
        tokens (B,): the last tokens drawn, int64; -1 for none.
        options (B,4): repetition, presence and frequency penalty, and the factor by which counts decay with each token,
            float64.
    """
    rows, V = logits.shape
    out = torch.empty(rows, V, dtype=torch.float32, device=logits.device)
    if rows:
        with torch.cuda.device_of(logits):
            _penalize[(rows, triton.cdiv(V, BLOCK))](logits, out, counts, flags, slots, tokens, options, logits.stride(0), V,
                                                     BLOCK, enable_fp_fusion=True)
    return out


@triton.jit
def _penalize(logits, out, counts, flags, slots, tokens, options, stride, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < V
    place = tl.load(slots + row) * V + c
    token = tl.load(tokens + row)
    flag = tl.load(flags + place, mask=inside, other=0)
    count = tl.load(counts + place, mask=inside, other=0.0)
    if token >= 0:
        drawn = (c == token) & ((flag & 4) == 0)
        count = count * tl.load(options + row * 4 + 3) + tl.where(drawn, 1.0, 0.0)
        flag = tl.where(drawn, flag | 2, flag)
        tl.store(counts + place, count, mask=inside)
        tl.store(flags + place, flag, mask=inside)
    x = tl.load(logits + row * stride + c, mask=inside, other=0.0).to(tl.float32)
    repetition = tl.load(options + row * 4)
    penalized = x.to(tl.float64)
    penalized = tl.where(penalized > 0, penalized / repetition, penalized * repetition)
    penalized = penalized - tl.load(options + row * 4 + 1) * tl.where((flag & 2) > 0, 1.0, 0.0)
    penalized = penalized - tl.load(options + row * 4 + 2) * count
    counted = ((flag & 3) > 0) & ((flag & 4) == 0)
    tl.store(out + row * V + c, tl.where(counted, penalized.to(tl.float32), x), mask=inside)
