"""The outputs that are compared, and the two peers, which run in an environment of their own: PyPI's `rwkv` and transformers.

    python -I peers.py rwkv|transformers JOBS.json

A job names a model (an official .pth, or for transformers also a directory), its tokens (.npy), the file for its outputs
(.npz), and for transformers a directory to save itself to. This file imports nothing of ours: there, `rwkv` is another package.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import ndarray

Forward = Callable[[ndarray, Any], tuple[ndarray, Any]]
FORMS = ("whole", "chunked", "one by one")
# transformers' names for the official ones.
RENAMED = (("emb.", "rwkv.embeddings."), ("blocks.", "rwkv.blocks."), ("ln_out.", "rwkv.ln_out."), (".ln0.", ".pre_ln."),
           (".att.", ".attention."), (".ffn.", ".feed_forward."), ("time_mix_k", "time_mix_key"),
           ("time_mix_v", "time_mix_value"), ("time_mix_r", "time_mix_receptance"))


def outputs(forward: Forward, values: Callable[[Any], dict[str, ndarray]], tokens: ndarray, chunks: list[int],
            n_greedy: int) -> dict[str, ndarray]:
    """The logits (B,T,V) and the state after reading `tokens` (B,T) in each form, and a greedy continuation (B,n_greedy).

    forward(tokens (B,t), state or None) -> (logits (B,t,V), state); values(state) -> its parts in the form of `state_values`.
    """
    found = {}
    for form, lengths in zip(FORMS, ([tokens.shape[1]], chunks, [1] * tokens.shape[1]), strict=True):
        logits, state = read(forward, tokens, lengths)
        found |= {f"{form}: logits": logits} | {f"{form}: {name}": value for name, value in values(state).items()}
    return found | {"greedy": greedy(forward, logits[:, -1], state, n_greedy)}


def read(forward: Forward, tokens: ndarray, lengths: list[int]) -> tuple[ndarray, Any]:
    logits, state = [], None
    for piece in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        part, state = forward(piece, state)
        logits.append(part)
    return np.concatenate(logits, axis=1), state


def greedy(forward: Forward, logits: ndarray, state: Any, n: int) -> ndarray:
    """n more tokens (B,n), the first chosen by `logits` (B,V)."""
    chosen = [logits.argmax(-1)]
    while len(chosen) < n:
        logits, state = forward(chosen[-1][:, None], state)
        chosen.append(logits[:, -1].argmax(-1))
    return np.stack(chosen, axis=1)


def state_values(att_x: ndarray, a: ndarray, b: ndarray, p: ndarray, ffn_x: ndarray) -> dict[str, ndarray]:
    """The parts of a state to compare: many (a, b, p) are the same state, a/b and p + log b are unique."""
    return {"att_x": att_x, "a/b": a / b, "p + log b": p + np.log(b), "ffn_x": ffn_x}


class RwkvPackage:
    """PyPI's `rwkv`: one row at a time; its state is a list of att_x, a, b, p, ffn_x for each layer, which it changes.

    With n_att != n_embd it reads token by token here: its code for several tokens stores n_att numbers in n_embd places.
    """

    def __init__(self, path: Path) -> None:
        from rwkv.model import RWKV  # the package's, not ours

        self.model = RWKV(model=str(path), strategy="cpu fp32", verbose=False)

    def row(self, tokens: ndarray, state: list[torch.Tensor] | None) -> tuple[ndarray, list[torch.Tensor]]:
        logits, state = [], state and list(state)
        for piece in np.split(tokens, len(tokens)) if self.model.args.n_att != self.model.args.n_embd else [tokens]:
            part, state = self.model.forward(piece.tolist(), state, full_output=True)
            logits.append(part.numpy().reshape(len(piece), -1))
        return np.concatenate(logits), state

    def parts(self, state: list[torch.Tensor]) -> list[ndarray]:
        return [torch.stack(state[part::5]).numpy() for part in range(5)]


class Transformers:
    """RwkvForCausalLM: its state is (B,width,L) of ffn_x, att_x, a, b, p, which it changes; one row at a time, because with
    several it adds (B,C) to (B,1,C) for a single token."""

    def __init__(self, path: Path) -> None:
        from transformers import RwkvForCausalLM

        model = RwkvForCausalLM.from_pretrained(path) if path.is_dir() else from_official(torch.load(path))
        self.model = model.eval()

    def row(self, tokens: ndarray, state: list[torch.Tensor] | None) -> tuple[ndarray, list[torch.Tensor]]:
        state = [part.clone() for part in state] if state else self.empty_state()
        with torch.no_grad():
            out = self.model(torch.tensor(tokens)[None], state=state, use_cache=True)
        return out.logits[0].numpy(), out.state

    def empty_state(self) -> list[torch.Tensor]:
        """The one that it makes for itself takes n_att to be n_embd."""
        config = self.model.config
        widths = [config.hidden_size] * 2 + [config.attention_hidden_size] * 3
        state = [torch.zeros(1, width, config.num_hidden_layers) for width in widths]
        state[4] -= 1e30
        return state

    def parts(self, state: list[torch.Tensor]) -> list[ndarray]:
        ffn_x, att_x, a, b, p = (part[0].T.numpy() for part in state)
        return [att_x, a, b, p, ffn_x]


def from_official(weights: dict[str, torch.Tensor]) -> Any:
    from transformers import RwkvConfig, RwkvForCausalLM

    V, C = weights["emb.weight"].shape
    A, F = (len(weights[f"blocks.0.{part}.key.weight"]) for part in ("att", "ffn"))
    config = RwkvConfig(vocab_size=V, hidden_size=C, attention_hidden_size=A, intermediate_size=F, rescale_every=0,
                        num_hidden_layers=sum(name.endswith("ln1.weight") for name in weights))
    model = RwkvForCausalLM(config)
    model.load_state_dict({renamed(name): tensor for name, tensor in weights.items()})
    return model


def renamed(name: str) -> str:
    for official, theirs in RENAMED:
        name = name.replace(official, theirs)
    return name


def by_rows(peer: Any) -> tuple[Forward, Callable[[Any], dict[str, ndarray]]]:
    """`outputs`' forward and values for a model that reads one row: the state of several is a list."""
    def forward(tokens: ndarray, states: list[Any] | None) -> tuple[ndarray, list[Any]]:
        read = [peer.row(row, state) for row, state in zip(tokens, states or [None] * len(tokens), strict=True)]
        return np.stack([logits for logits, _ in read]), [state for _, state in read]

    def values(states: list[Any]) -> dict[str, ndarray]:
        return state_values(*(np.stack(rows, axis=1) for rows in zip(*map(peer.parts, states), strict=True)))

    return forward, values


def work(peer: type, job: dict[str, Any]) -> None:
    model = peer(Path(job["model"]))
    if "save" in job:
        model.model.save_pretrained(job["save"])
    np.savez(job["outputs"], **outputs(*by_rows(model), np.load(job["tokens"]), job["chunks"], job["greedy"]))


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")):
        work({"rwkv": RwkvPackage, "transformers": Transformers}[sys.argv[1]], each)
