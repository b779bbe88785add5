"""Measures the engine without HTTP, for benchmarks/serving.py.

For each line [sequences, seconds] of standard input, the engine and the decoder without sampling run alternately for that many
seconds. The answer is a line with the tokens per second of both.
"""

import json
import sys
import time
from functools import partial

from kernels.machine import allocator, threads

TURN_S = 0.1


def main() -> None:
    threads.wait_briefly()               # must precede the import of torch, as in serve.py
    allocator.use_large_pages()
    allocator.keep_large_blocks()

    import torch

    from benchmarks.serving import PROMPT
    from rwkv.generation.decoder import decoder_of
    from rwkv.generation.engine import Engine
    from rwkv.generation.prefill import prefill
    from rwkv.generation.request import Request
    from rwkv.generation.sampling import Sampling
    from rwkv.generation.stopping import StoppingCriteria
    from rwkv.pretrained import RWKV
    from rwkv.tokenizer.tokenizers import Tokenizer

    model = RWKV.from_pretrained(sys.argv[1], dtype=sys.argv[2])
    tokenizer = Tokenizer.named(sys.argv[3])
    for line in sys.stdin:
        texts, seconds = json.loads(line)
        engine = Engine(model, tokenizer)
        for seed in range(texts):
            engine.add(Request(PROMPT, seed, StoppingCriteria(10**9),
                               Sampling(temperature=1, top_p=1, logit_bias={0: -100})))
        while len(engine.step()) < texts:
            pass
        start = prefill(model, torch.ones(texts, 1, dtype=torch.long))
        decoder = decoder_of(model, start.state)
        tokens = torch.ones(texts, dtype=torch.long)
        rates: dict[str, list[float]] = {"engine": [], "decoder": []}
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for name, step in (("engine", engine.step), ("decoder", partial(decoder.step, tokens))):
                began = time.perf_counter()
                steps = 0
                while time.perf_counter() < began + TURN_S:
                    step()
                    steps += 1
                rates[name].append(texts * steps / (time.perf_counter() - began))
        print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
