"""peer_generation.py PEER DTYPE FOLDER BATCHES PROMPT: prefill and decode of PyPI's rwkv or transformers, as JSON rows.

PEER: rwkv (an RWKV-4 checkpoint), rwkv7 (PyPI's rwkv on an RWKV-7 checkpoint) or transformers.

benchmarks.generation --peers runs it on the checkpoint in FOLDER, in an environment with the peer and without this project.
"""

import json
import os
import resource
import sys
import time
from statistics import median

os.environ |= {"RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0", "HF_HUB_OFFLINE": "1"}

import torch

ROUNDS, ROUND_S = 5, 0.6


def seconds(function):
    """The median seconds of one call."""
    samples = []
    for _ in range(ROUNDS):
        calls, began = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - began < ROUND_S:
            function()
            calls += 1
        samples.append((time.perf_counter() - began) / calls)
    return median(samples)


def rwkv7_rows(folder, dtype, batches, prompt):
    os.environ["RWKV_V7_ON"] = "1"
    yield from rwkv_rows(folder, dtype, batches, prompt, suffix="")          # that form of it adds the suffix itself


def rwkv_rows(folder, dtype, batches, prompt, suffix=".pth"):
    from rwkv.model import RWKV

    strategy = {"float32": "cpu fp32", "bfloat16": "cpu bf16", "int8": "cpu fp32i8"}[dtype]
    began = time.perf_counter()
    model = RWKV(model=f"{folder}/model{suffix}", strategy=strategy, verbose=False)
    load_s = time.perf_counter() - began
    tokens = torch.randint(1000, (prompt,)).tolist()
    _, state = model.forward(tokens[:8], None)
    began = time.perf_counter()
    model.forward(tokens[:1], model.forward(tokens, None)[1])
    same = {"batch": 1, "load_s": load_s, "first_token_s": time.perf_counter() - began}
    yield same | {"what": "decode, batch 1", "tokens_per_s": 1 / seconds(lambda: model.forward(tokens[:1], state))}
    yield same | {"what": f"prefill {prompt}", "tokens_per_s": prompt / seconds(lambda: model.forward(tokens, None))}


@torch.no_grad()
def transformers_rows(folder, dtype, batches, prompt):
    from transformers import RwkvForCausalLM

    began = time.perf_counter()
    model = RwkvForCausalLM.from_pretrained(f"{folder}/huggingface", dtype=getattr(torch, dtype)).eval()
    load_s = time.perf_counter() - began
    tokens = torch.randint(1000, (1, prompt))
    model(tokens[:, :8], use_cache=True)
    began = time.perf_counter()
    model(tokens[:, :1], state=model(tokens, use_cache=True).state, use_cache=True)
    same = {"load_s": load_s, "first_token_s": time.perf_counter() - began}
    for B in batches:
        yield same | {"what": f"decode, batch {B}", "batch": B, "tokens_per_s": B / seconds(decode(model, B))}
    whole = seconds(lambda: model(tokens, use_cache=True))
    yield same | {"what": f"prefill {prompt}", "batch": 1, "tokens_per_s": prompt / whole}


def decode(model, B):
    tokens = torch.arange(B)[:, None]
    state = model(tokens.expand(B, 2), use_cache=True).state
    return lambda: model(tokens, state=state, use_cache=True)


def main(peer, dtype, folder, batches, prompt):
    rows = {"rwkv": rwkv_rows, "rwkv7": rwkv7_rows, "transformers": transformers_rows}[peer](
        folder, dtype, [int(B) for B in batches.split(",")], int(prompt))
    same = {"of": peer, "dtype": dtype}
    print(json.dumps([row | same | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024} for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
