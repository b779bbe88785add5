"""Computes the outputs that are compared, and runs the peers in environments of their own.

    python -I peers.py rwkv|transformers|rwkv7|llama.cpp JOBS.json

The peers are PyPI's `rwkv`, whose RWKV-7 is a separate program, transformers and llama.cpp. A job names a model (an official
.pth, for transformers also a directory, for llama.cpp a GGUF file), its tokens (.npy), and the file for its outputs (.npz). It
may name a directory or file to save the model to, which llama.cpp does in Q8_0. This file imports none of our packages, because
`rwkv` is another package in these environments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

if TYPE_CHECKING:
    import torch

Forward = Callable[[ndarray, Any], tuple[ndarray, Any]]
FORMS = ("whole", "chunked", "one by one")
# Official parts of names, and those of transformers.
TRANSFORMERS_NAMES = (
    ("emb.", "rwkv.embeddings."), ("blocks.", "rwkv.blocks."), ("ln_out.", "rwkv.ln_out."), (".ln0.", ".pre_ln."),
    (".att.", ".attention."), (".ffn.", ".feed_forward."), ("time_mix_k", "time_mix_key"), ("time_mix_v", "time_mix_value"),
    ("time_mix_r", "time_mix_receptance"))


def outputs(forward: Forward, values: Callable[[Any], dict[str, ndarray]], tokens: ndarray, chunks: list[int],
            n_greedy: int) -> dict[str, ndarray]:
    """Returns the logits (B,T,V) and the state after reading `tokens` (B,T) in each form, and n_greedy more tokens.

    Args:
        forward: takes tokens (B,t) and a state or None, and returns logits (B,t,V) and the new state.
        values: returns the parts of a state by name, as state_values does.
    """
    results = {}
    for form, lengths in zip(FORMS, ([tokens.shape[1]], chunks, [1] * tokens.shape[1]), strict=True):
        logits, state = read(forward, tokens, lengths)
        results |= {f"{form}: logits": logits} | {f"{form}: {name}": value for name, value in values(state).items()}
    return results | {"greedy": greedy(forward, logits[:, -1], state, n_greedy)}


def read(forward: Forward, tokens: ndarray, lengths: list[int]) -> tuple[ndarray, Any]:
    logits, state = [], None
    for piece in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        part, state = forward(piece, state)
        logits.append(part)
    return np.concatenate(logits, axis=1), state


def greedy(forward: Forward, logits: ndarray, state: Any, n: int) -> ndarray:
    """Returns the n next tokens (B,n); `logits` (B,V) select the first."""
    next_tokens = [logits.argmax(-1)]
    while len(next_tokens) < n:
        logits, state = forward(next_tokens[-1][:, None], state)
        next_tokens.append(logits[:, -1].argmax(-1))
    return np.stack(next_tokens, axis=1)


def state_values(att_x: ndarray, a: ndarray, b: ndarray, p: ndarray, ffn_x: ndarray) -> dict[str, ndarray]:
    """Returns the parts of a state to compare: many (a, b, p) represent the same state, but a/b and p + log b are unique."""
    return {"att_x": att_x, "a/b": a / b, "p + log b": p + np.log(b), "ffn_x": ffn_x}


class RwkvPackage:
    """PyPI's `rwkv`, which reads one row at a time and changes the state, a list of att_x, a, b, p, ffn_x for each layer.

    If n_att != n_embd, tokens are read one by one, because the code for several tokens stores n_att numbers in n_embd places.
    """

    def __init__(self, path: Path) -> None:
        from rwkv.model import RWKV  # this is the package's, not ours

        self.model = RWKV(model=str(path), strategy="cpu fp32", verbose=False)

    def row(self, tokens: ndarray, state: list[torch.Tensor] | None) -> tuple[ndarray, list[torch.Tensor]]:
        logits, state = [], state and list(state)
        for piece in np.split(tokens, len(tokens)) if self.model.args.n_att != self.model.args.n_embd else [tokens]:
            part, state = self.model.forward(piece.tolist(), state, full_output=True)
            logits.append(part.numpy().reshape(len(piece), -1))
        return np.concatenate(logits), state

    def parts(self, state: list[torch.Tensor]) -> list[ndarray]:
        return [np.stack([tensor.numpy() for tensor in state[part::5]]) for part in range(5)]

    values = staticmethod(state_values)


class RwkvPackage7:
    """PyPI's `rwkv` with RWKV_V7_ON=1, for one row; its state is a list of att_x, S (H,N,N) and ffn_x for each layer."""

    def __init__(self, path: Path) -> None:
        from rwkv.model import RWKV

        self.model = RWKV(model=str(path.with_suffix("")), strategy="cpu fp32")

    def row(self, tokens: ndarray, state: list[torch.Tensor] | None) -> tuple[ndarray, list[torch.Tensor]]:
        state = state and [part.clone() for part in state]
        logits, state = self.model.forward(tokens.tolist(), state, full_output=True)
        return logits.numpy().reshape(len(tokens), -1), state

    def parts(self, state: list[torch.Tensor]) -> list[ndarray]:
        return [np.stack([tensor.numpy() for tensor in state[part::3]]) for part in range(3)]

    @staticmethod
    def values(att_x: ndarray, wkv: ndarray, ffn_x: ndarray) -> dict[str, ndarray]:
        return {"att_x": att_x, "wkv": wkv, "ffn_x": ffn_x}


class LlamaCpp:
    """llama.cpp through llama-cpp-python. The state of a row is a context, whose contents are not compared."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def row(self, tokens: ndarray, state: Any) -> tuple[ndarray, Any]:
        from llama_cpp import Llama

        state = state or Llama(str(self.path), n_ctx=512, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False)
        before = state.n_tokens
        state.eval(tokens.tolist())
        return state.scores[before:state.n_tokens].copy(), state

    def parts(self, state: Any) -> list[ndarray]:
        return []

    @staticmethod
    def values() -> dict[str, ndarray]:
        return {}

    def save(self, path: str, kind: str = "Q8_0") -> None:
        import llama_cpp

        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama_cpp.llama_model_quantize(str(self.path).encode(), path.encode(), options):
            raise RuntimeError(f"llama.cpp could not quantise {self.path} to {kind}")


class Transformers:
    """RwkvForCausalLM of transformers, which changes its state, a list of ffn_x, att_x, a, b and p (B,width,L).

    Rows are read one at a time: with several rows, transformers would add (B,C) to (B,1,C) for a single token.
    """

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import RwkvForCausalLM

        model = RwkvForCausalLM.from_pretrained(path) if path.is_dir() else from_official(torch.load(path))
        self.model = model.eval()
        self.save = self.model.save_pretrained

    def row(self, tokens: ndarray, state: list[torch.Tensor] | None) -> tuple[ndarray, list[torch.Tensor]]:
        import torch

        state = [part.clone() for part in state] if state else self.empty_state()
        with torch.no_grad():
            out = self.model(torch.tensor(tokens)[None], state=state, use_cache=True)
        return out.logits[0].numpy(), out.state

    def empty_state(self) -> list[torch.Tensor]:
        """Makes an empty state, because transformers' own assumes that n_att is n_embd."""
        import torch

        config = self.model.config
        widths = [config.hidden_size] * 2 + [config.attention_hidden_size] * 3
        state = [torch.zeros(1, width, config.num_hidden_layers) for width in widths]
        state[4] -= 1e30
        return state

    def parts(self, state: list[torch.Tensor]) -> list[ndarray]:
        ffn_x, att_x, a, b, p = (part[0].T.numpy() for part in state)
        return [att_x, a, b, p, ffn_x]

    values = staticmethod(state_values)


def from_official(weights: dict[str, torch.Tensor]) -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    V, C = weights["emb.weight"].shape
    A, F = (len(weights[f"blocks.0.{part}.key.weight"]) for part in ("att", "ffn"))
    config = RwkvConfig(vocab_size=V, hidden_size=C, attention_hidden_size=A, intermediate_size=F, rescale_every=0,
                        num_hidden_layers=sum(name.endswith("ln1.weight") for name in weights))
    model = RwkvForCausalLM(config)
    model.load_state_dict({transformers_name(name): tensor for name, tensor in weights.items()})
    return model


def transformers_name(name: str) -> str:
    for official, theirs in TRANSFORMERS_NAMES:
        name = name.replace(official, theirs)
    return name


def by_rows(peer: Any) -> tuple[Forward, Callable[[Any], dict[str, ndarray]]]:
    """Returns `forward` and `values` for outputs(), for a model that reads one row: the state of several rows is a list."""
    def forward(tokens: ndarray, states: list[Any] | None) -> tuple[ndarray, list[Any]]:
        read = [peer.row(row, state) for row, state in zip(tokens, states or [None] * len(tokens), strict=True)]
        return np.stack([logits for logits, _ in read]), [state for _, state in read]

    def values(states: list[Any]) -> dict[str, ndarray]:
        return peer.values(*(np.stack(rows, axis=1) for rows in zip(*map(peer.parts, states), strict=True)))

    return forward, values


def work(peer: type, job: dict[str, Any]) -> None:
    model = peer(Path(job["model"]))
    if "save" in job:
        model.save(job["save"])
    np.savez(job["outputs"], **outputs(*by_rows(model), np.load(job["tokens"]), job["chunks"], job["greedy"]))


if __name__ == "__main__":
    peer = {"rwkv": RwkvPackage, "transformers": Transformers, "rwkv7": RwkvPackage7, "llama.cpp": LlamaCpp}[sys.argv[1]]
    for each in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
        work(peer, each)
