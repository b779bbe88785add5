"""Implements tune.objective=dpo and ipo, which make the chosen answer of a pair more probable than the rejected answer.

log p(y) is the sum of the log-probabilities of an answer's tokens under the trained model. log p_reference(y) is the same sum
under the reference, which is the model that init_from= names. The chosen answer is c, and the rejected answer is d:

    r(y) = beta (log p(y) - log p_reference(y))          the reward of an answer
    dpo  = -(1 - e) log sigmoid(r(c) - r(d)) - e log sigmoid(r(d) - r(c))           e = tune.label_smoothing
    ipo  = ((r(c) / |c| - r(d) / |d|) / beta - 1 / (2 beta))^2                     |y|: the number of tokens

The loss is dpo or ipo, plus tune.sft_weight times -log p(c) / |c|. The sources are:

    dpo                Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290), (7)
    label smoothing    Mitchell, "A note on DPO with noisy preferences"
    ipo                Azar et al. (arXiv 2310.12036), (17), per token as in TRL
    sft_weight         Pang et al. (arXiv 2404.19733), (1)

With tune=lora and tune=state, an extra forward pass with the tuned parameters disabled computes the reference. With tune=full,
the reference is computed once before the first step and stored in the run's file REFERENCE.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import logsigmoid

from rwkv.config import TuneConfig
from rwkv.data.conversations import SPLITS
from rwkv.data.pairs import PairRows, Pairs
from rwkv.data.prepare import Corpus
from rwkv.errors import UserError
from rwkv.io.atomic import write_file
from rwkv.model.base import TIME_STATE, Model
from rwkv.model.loss import IGNORED, log_probabilities

REWARDS = ("rewards_margin", "rewards_accuracy", "rewards_chosen", "rewards_rejected")    # metrics train/NAME and val/NAME
REFERENCE = "reference.safetensors"      # has tensors train and val (pairs,2): log p_reference of chosen and rejected


def reward_metrics() -> list[str]:
    return [f"{split}/{name}" for split in ("train", "val") for name in REWARDS]


class Answers(NamedTuple):
    """The log-probabilities log_p (P,2) float32 and the lengths (P,2) in tokens of P pairs of answers, chosen answers first."""

    log_p: Tensor
    lengths: Tensor


def answers(model: Model, batch: Pairs) -> Answers:
    """Computes the log-probabilities and the lengths of a batch's answers."""
    hidden = model.forward_features(batch.x, batch.starts).flatten(0, 1)
    targets = batch.y.flatten()
    positions = (targets != IGNORED).nonzero()[:, 0]
    token_log_p = log_probabilities(hidden.index_select(0, positions), model.head.weight, targets[positions])
    answer = torch.arange(2 * len(batch.numbers), device=targets.device)
    mask = batch.answers.flatten()[positions] == answer.unsqueeze(1)     # masked sums have the same order on all devices
    log_p = torch.where(mask, token_log_p, 0).sum(1)
    return Answers(log_p.view(-1, 2), mask.sum(1).view(-1, 2))


def losses(log_p: Tensor, reference: Tensor, lengths: Tensor, tune: TuneConfig) -> Tensor:
    """Returns the losses (P,) of P pairs. The tensors log_p, reference and lengths are (P,2), chosen answers first."""
    ratios = log_p - reference
    if tune.objective == "ipo":
        per_token = ratios / lengths
        loss = (per_token[:, 0] - per_token[:, 1] - 1 / (2 * tune.beta)) ** 2
    else:
        margin = tune.beta * (ratios[:, 0] - ratios[:, 1])
        loss = -(1 - tune.label_smoothing) * logsigmoid(margin) - tune.label_smoothing * logsigmoid(-margin)
    if tune.sft_weight:
        loss = loss - tune.sft_weight * log_p[:, 0] / lengths[:, 0]
    return loss


def rewards(log_p: Tensor, reference: Tensor, tune: TuneConfig) -> Tensor:
    """Returns the means (4,) of REWARDS over the pairs."""
    chosen, rejected = (tune.beta * (log_p.detach() - reference)).unbind(1)
    return torch.stack([chosen - rejected, (chosen > rejected).float(), chosen, rejected]).mean(1)


class Preferences:
    """The preference objective of a run.

    `stored` maps each split to the reference log-probabilities. None computes the reference with the tuned parameters disabled.
    """

    def __init__(self, tune: TuneConfig, stored: Mapping[str, Tensor] | None = None) -> None:
        self.tune, self.stored = tune, stored

    def read_reference(self, path: Path, data: Corpus) -> None:
        """Loads the reference that write_reference has written. Raises UserError as the function read_reference does."""
        self.stored = read_reference(path, data)

    def loss(self, model: Model, batch: Pairs, split: str) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and the means (4,) of REWARDS of a batch. `split` is the batch's split, train or val."""
        reference = self._reference(model, batch, split)
        log_p, lengths = answers(model, batch)
        return losses(log_p, reference, lengths, self.tune).mean(), rewards(log_p, reference, self.tune)

    def _reference(self, model: Model, batch: Pairs, split: str) -> Tensor:
        if self.stored is not None:
            return self.stored[split][batch.numbers.cpu()].to(batch.x.device)
        with torch.no_grad(), without_tuning(model):
            return answers(model, batch).log_p


@contextmanager
def without_tuning(model: Model) -> Iterator[None]:
    """Makes the model compute without adapters and from an empty initial state in the `with` block."""
    tuned = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name or name.endswith(TIME_STATE)]
    saved = [parameter.data for parameter in tuned]
    try:
        for parameter in tuned:
            parameter.data = torch.zeros_like(parameter)
        yield
    finally:
        for parameter, values in zip(tuned, saved, strict=True):
            parameter.data = values


@torch.no_grad()
def write_reference(path: Path, model: Model, data: Corpus, batch_size: int, ctx_len: int, device: torch.device,
                    dtype: torch.dtype) -> None:
    """Writes the reference log-probabilities of all pairs. Pairs that training skips get NaN.

    `dtype` is float32 or the dtype of autocast.
    """
    assert data.conversations is not None
    model.to(device)
    log_p = {}
    for name, split in zip(SPLITS, data.conversations, strict=True):
        rows = PairRows(split.tokens, split.learnt, ctx_len)
        log_p[name] = torch.full((rows.n_pairs, 2), torch.nan)
        for first in range(0, len(rows), batch_size):
            batch = rows.__getitems__([*range(first, min(first + batch_size, len(rows)))])
            on_device = batch._replace(x=batch.x.to(device), y=batch.y.to(device), starts=batch.starts.to(device),
                                       answers=batch.answers.to(device))
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                log_p[name][batch.numbers] = answers(model, on_device).log_p.cpu()
    write_file(path, lambda file: file.write(save(log_p)))


def read_reference(path: Path, data: Corpus) -> dict[str, Tensor]:
    """Reads the file's tensors. Raises UserError if the file is missing or damaged, or belongs to different pairs."""
    assert data.conversations is not None
    try:
        log_p = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the reference log-probabilities in {path} cannot be read ({error}): restore the file, or start a new "
                        "run with init_from=") from None
    sizes = {name: (len(split.tokens.starts) // 2, 2) for name, split in zip(SPLITS, data.conversations, strict=True)}
    if {name: tuple(tensor.shape) for name, tensor in log_p.items()} != sizes:
        raise UserError(f"{path} does not match the pairs in data.path=: restore the original file or pairs, or start a new "
                        "run with init_from=")
    return log_p
