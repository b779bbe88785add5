"""Runs a checkpoint as a model of EleutherAI's lm-evaluation-harness.

A context that several continuations share, as in multiple choice, is prefilled only once. Contexts may have any length, so
texts are not split into windows. The harness splits texts only for other models.

Source: EleutherAI/lm-evaluation-harness, lm_eval/api/model.py (the methods of a model) and lm_eval/models/huggingface.py (the
token that precedes a text).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from rwkv.checkpoint.files import read_checkpoint, tokenizer_of
from rwkv.errors import UserError
from rwkv.evaluation import EvaluatedSequence, score_batch, score_endings
from rwkv.generation.engine import generate_batch
from rwkv.pretrained import RWKV
from rwkv.tokenizer.lost_bytes import LossCounter
from rwkv.tools._lm_eval_options import engine_options, seeds_of

MODEL_ARGS = "checkpoint, tokenizer, end_of_text, kernel, dtype and chunk_len"
Pair = tuple[object, list[int], list[int]]  # (texts, context ids, continuation ids)


class Timemix(TemplateLM):
    """Implements the harness's model `timemix`, with log-likelihoods in nats.

    A forward pass reads `chunk_len` tokens of each of `batch_size` rows.
    """

    def __init__(self, checkpoint: str = "runs/latest", tokenizer: str | None = None, kernel: str = "auto",
                 dtype: str = "float32", chunk_len: int = 512, batch_size: int | str | None = None, device: str | None = None,
                 max_batch_size: int | None = None, end_of_text: str | None = None, **unknown: object) -> None:
        super().__init__()
        if unknown:
            raise UserError(f"--model_args has the unknown name {next(iter(unknown))}; the names are {MODEL_ARGS}")
        self._device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._tokenizer = tokenizer_of(read_checkpoint(checkpoint), tokenizer, end_of_text)
        self._model = RWKV.from_pretrained(checkpoint, kernel, str(self._device), dtype)
        self._chunk_len = _positive("chunk_len in --model_args", chunk_len)
        self._rows = _positive("--batch_size", batch_size or 1)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_text

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.hash

    def apply_chat_template(self, chat_history: object, add_generation_prompt: bool = True) -> str:
        raise UserError("--apply_chat_template requires a chat template, but the model timemix reads texts as the task writes "
                        "them: omit the option, or start serve.py and use --model local-chat-completions")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self._tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False,
                              **_: object) -> list[tuple[float, bool]]:
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_texts, context, _ids) in enumerate(requests):
            by_context.setdefault(tuple(context), []).append(index)
        alone = [indices[0] for indices in by_context.values() if len(indices) == 1]
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:
            for batch in _batches(alone, lambda index: len(requests[index][1]) + len(requests[index][2]), self._rows):
                scored = [EvaluatedSequence.with_ending(*requests[index][1:]) for index in batch]
                results |= zip(batch, _results(*score_batch(self._model, scored, self._chunk_len)), strict=True)
                bar.update(len(batch))
            for shared, indices in by_context.items():
                if len(indices) > 1:
                    endings = [requests[index][2] for index in indices]
                    nats, right = score_endings(self._model, shared, endings, self._chunk_len, self._rows)
                    results |= zip(indices, _results(nats, right), strict=True)
                    bar.update(len(indices))
        for index, (texts, _context, _ids) in enumerate(requests):
            self.cache_hook.add_partial("loglikelihood", texts, results[index])
        return [results[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        pairs = [((text,), [self.eot_token_id], self._tokenizer.encode(text)) for text in texts]
        lost = LossCounter(self._tokenizer).count(texts, [ids for _, _, ids in pairs])
        if lost.too_much:
            raise UserError(f"{lost.describe('the texts')}: metrics per byte and per word would ignore the lost text")
        totals: list[float] = [0.0] * len(pairs)
        with tqdm(total=len(pairs), desc="loglikelihood_rolling", disable=disable_tqdm) as bar:
            for batch in _batches(range(len(pairs)), lambda index: len(pairs[index][2]), self._rows):
                scored = [EvaluatedSequence.with_ending(*pairs[index][1:]) for index in batch]
                nats, _ = score_batch(self._model, scored, self._chunk_len)
                for index, value in zip(batch, nats.tolist(), strict=True):
                    totals[index] = -value
                bar.update(len(batch))
        for (args, _context, _ids), value in zip(pairs, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", args, value)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the generated answers. Repetitions of a request have consecutive seeds, beginning with --seed."""
        answers: list[str] = [""] * len(requests)
        by_options: dict[str, list[int]] = {}
        options = [engine_options(request.args[1], partial(self._count, request.args[0])) for request in requests]
        for index, each in enumerate(options):
            by_options.setdefault(repr(each), []).append(index)
        seeds = seeds_of([repr(request.args) for request in requests], torch.initial_seed())
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for indices in by_options.values():
                for batch in _batches(indices, lambda index: len(requests[index].args[0]), self._rows):
                    samples = generate_batch(self._model, self._tokenizer, [requests[index].args[0] for index in batch],
                                             seeds=[seeds[index] for index in batch], **options[batch[0]])
                    for index, sample in zip(batch, samples, strict=True):
                        answers[index] = sample.text
                    bar.update(len(batch))
        for request, text in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


def register() -> None:
    """Registers the model as `timemix`, because the harness does not discover plugins."""
    register_model("timemix")(Timemix)


def _positive(name: str, value: int | str) -> int:
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} must be a positive whole number; got {text}")
    return int(text)


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f"--device must be a device of PyTorch, such as cpu or cuda; got {name}") from None


def _results(nats: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[float, bool]]:
    return zip((-nats).tolist(), right.tolist(), strict=True)


def _batches(indices: Iterable[int], length: Callable[[int], int], rows: int) -> Iterator[list[int]]:
    """Yields batches of at most `rows` indices, so that the texts in a batch have similar lengths."""
    ordered = sorted(indices, key=length)
    return (ordered[first:first + rows] for first in range(0, len(ordered), rows))
