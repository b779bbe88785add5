"""The part `serve`: concurrent sequences, in the engine alone and over HTTP."""

import time
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path

from benchmarks import serving
from benchmarks._gpu_parts.check import Check
from benchmarks.generation import write_checkpoint
from benchmarks.gpu_check import SERVER, not_installed
from rwkv.config import Sampling
from rwkv.generation.engine import Engine
from rwkv.generation.prefix_cache import PrefixCache
from rwkv.generation.request import Request
from rwkv.generation.row import Row
from rwkv.generation.stopping import StoppingCriteria
from rwkv.pretrained import RWKV
from rwkv.tokenizer.tokenizers import Tokenizer

SHORT = 32                               # tokens of a short answer


def serve(check: Check) -> None:
    """Measures concurrent sequences after their prompts, in the engine alone and over HTTP with serve.py."""
    shape, clients = ((12, 768, 65472), (1, 16, 64)) if check.on_gpu else ((2, 64, 1024), (1, 2))
    seconds = 5.0 if check.on_gpu else 0.5
    checkpoint = write_checkpoint(check.scratch, "rwkv7", shape)
    vocabulary = checkpoint.with_name(serving.VOCABULARY)
    serving.write_vocabulary(vocabulary, shape[-1])
    with check.measuring(engine="bfloat16"):
        _engine(check, checkpoint, vocabulary, clients, seconds)
    if missing := not_installed(SERVER):
        check.add(server="bfloat16", skipped=f"not installed: {missing}")
        return
    with check.measuring(server="bfloat16"):
        start = time.perf_counter()
        with serving.serving(checkpoint, "bfloat16", f"device={check.device}", f"max_rows={max(clients)}") as server:
            check.add(server="bfloat16", ready_s=time.perf_counter() - start)
            for n in clients:
                tok_s, busy = serving.rate_over_http(server, n, seconds, n)
                check.add(server="bfloat16", clients=n, tok_s=tok_s, client_cpu=busy)


def _engine(check: Check, checkpoint: Path, vocabulary: Path, texts: Sequence[int], seconds: float) -> None:
    model = RWKV.from_pretrained(checkpoint, device=check.device, dtype="bfloat16")
    tokenizer = Tokenizer.named(str(vocabulary))
    start = time.perf_counter()
    Engine(model, tokenizer).warm_up(max(texts))
    check.add(engine="bfloat16", warm_up_s=time.perf_counter() - start)
    for n in texts:
        engine = Engine(model, tokenizer)
        start = time.perf_counter()
        for seed in range(n):
            engine.add(Request(serving.PROMPT, seed, StoppingCriteria(10**9),
                               Sampling(temperature=1, top_p=0.8, banned=(0,))))
        while len(engine.step()) < n:
            pass
        read_s, start, steps = time.perf_counter() - start, time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            engine.step()
            steps += 1
        check.add(engine="bfloat16", texts=n, prompts_s=read_s, tok_s=n * steps / (time.perf_counter() - start))
    check.add(engine="bfloat16", texts=max(texts), answers=SHORT,
              tok_s=_rate_of_short_answers(Engine(model, tokenizer, PrefixCache()), max(texts), seconds))


def _rate_of_short_answers(engine: Engine, n: int, seconds: float) -> float:
    """Returns the tokens/s of n sequences, each replaced at its end. The cache moves their states to host memory."""
    rows: list[Row] = []
    seeds = count()
    tokens = 0
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        tokens += sum(len(row.sample.tokens) for row in rows if not row.unfinished)
        rows = [row for row in rows if row.unfinished]
        for seed in islice(seeds, n - len(rows)):        # each sequence has its own prompt
            rows.append(engine.add(Request(f"{serving.PROMPT}{seed} ", seed, StoppingCriteria(SHORT),
                                           Sampling(temperature=1, top_p=0.8, banned=(0,)))))
        engine.step()
    return tokens / (time.perf_counter() - start)
