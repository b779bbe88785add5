"""Drafts propose the next tokens of a row: n-grams of the text, or a smaller model.

A proposal never changes the sequence. A proposal saves time if the row then draws the proposed token. So a draft model draws
with the row's own options, penalties and next random numbers: given the same random number, similar distributions mostly yield
the same token.
"""

from array import array
from itertools import takewhile
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from rwkv.config import DRAFT_TOKENS
from rwkv.errors import UserError
from rwkv.generation.decoder import CDecoder
from rwkv.generation.proposal_cost import ProposalCost
from rwkv.generation.row import Row
from rwkv.generation.sampling import Penalties, draw_function_on, queue_tokens
from rwkv.model.base import Model, n_parameters
from rwkv.model.decoding.c_step import why_not
from rwkv.tokenizer.tokenizers import Tokenizer

WINDOW = 2**15                           # the last tokens of a sequence that an NGram searches
SHORTEST, LONGEST = 3, 8                 # minimum length of a match; maximum length compared to choose among matches
MOST_UNREAD = 64                         # if more tokens are unread, a draft model reads only the last ones
STEP_OVERHEAD = 1.25                     # measured: a 0.1b step takes 0.16 of a 1.5b step's time, with 0.127 of the parameters


class Draft(Protocol):
    """An object that proposes tokens.

    Attributes:
        cost: the cost of a proposed token, measured by all engines that use the draft.
        most_tokens: the largest number of tokens proposed per pass.
    """

    cost: ProposalCost
    most_tokens: int

    def propose(self, row: Row, n: int) -> list[int]:
        """Returns up to n tokens that may follow the last token drawn in the row, or [] if there is nothing to propose."""


class NGram:
    """Proposes the tokens that followed the last tokens of the sequence at an earlier place in the prompt or generated text.

    The longest match is used, and among equally long matches the latest. If fewer tokens than requested follow the match, these
    tokens are repeated.
    """

    def __init__(self, most_tokens: int = DRAFT_TOKENS) -> None:
        self.cost = ProposalCost(0.0)
        self.most_tokens = most_tokens
        self._ids: WeakKeyDictionary[Row, array[int]] = WeakKeyDictionary()
        self._drawn: WeakKeyDictionary[Row, int] = WeakKeyDictionary()       # counts the row's generated tokens in _ids

    def __str__(self) -> str:
        return "n-grams of the prompt and the generated text"

    def propose(self, row: Row, n: int) -> list[int]:
        if row not in self._ids:
            self._ids[row] = array("i", row.known_ids[-WINDOW:])
        ids = self._ids[row]
        ids.extend(row.sample.tokens[self._drawn.get(row, 0):])
        self._drawn[row] = len(row.sample.tokens)
        return continuation(np.frombuffer(ids, np.int32)[-WINDOW:], n)


def continuation(ids: np.ndarray, n: int) -> list[int]:
    """Returns the n tokens after the longest earlier match of the end of `ids`, or [] if no match has SHORTEST tokens.

    Among equally long matches, the latest is used.
    """
    data = ids.tobytes()
    end = data[-SHORTEST * ids.itemsize:]
    if data.find(end) == len(data) - len(end):           # a quick search, which suffices for most texts
        return []
    ends = np.flatnonzero(ids[:-1] == ids[-1:])          # the positions where the matches end
    for length in range(2, LONGEST + 1):
        longer = ends[ends >= length - 1]
        if len(longer):
            longer = longer[ids[longer - length + 1] == ids[-length]]
        if not len(longer):
            if length <= SHORTEST:
                return []
            break
        ends = longer
    repeated: list[int] = np.resize(ids[ends[-1] + 1:], n).tolist()
    return repeated


class ModelDraft:
    """Proposes the tokens that a smaller model draws.

    The smaller model reads the last MOST_UNREAD tokens of the prompt, and then the tokens that the row draws; after a pause,
    the last MOST_UNREAD of them. Raises UserError if the vocabulary sizes differ, or if CDecoder cannot run the smaller model.

    Args:
        model: the smaller model.
        target: the model that verifies the proposals.
    """

    def __init__(self, model: Model, target: Model, tokenizer: Tokenizer, most_tokens: int = DRAFT_TOKENS) -> None:
        if model.vocab_size != target.vocab_size:
            raise UserError(f"a draft must have the same vocabulary size as the model, {target.vocab_size}; got "
                            f"{model.vocab_size}")
        if reason := why_not(model):
            raise UserError(f"a draft model requires the C kernels, which cannot run this draft model: {reason}")
        sizes = [n_parameters(each.config, each.vocab_size) for each in (model, target)]
        self.cost = ProposalCost(STEP_OVERHEAD * sizes[0] / sizes[1])
        self.most_tokens = most_tokens
        self._model = model
        self._vocab_size = tokenizer.vocab_size
        self._draw, _ = draw_function_on(torch.device("cpu"), in_c=True)
        self._readers: WeakKeyDictionary[Row, _Reader] = WeakKeyDictionary()
        self._decoder = CDecoder(model, model.empty_state(0))

    def __str__(self) -> str:
        return f"{self._model.generation.NAME}, {n_parameters(self._model.config, self._model.vocab_size):,} parameters"

    @torch.inference_mode()
    def propose(self, row: Row, n: int) -> list[int]:
        reader = self._readers.get(row)
        if reader is None:
            decoder = self._decoder.with_state(self._model.empty_state(1))
            reader = self._readers[row] = _Reader(decoder, row.known_ids[-MOST_UNREAD:])
        logits = reader.read(row.sample.tokens)
        tokens: list[int] = []
        penalties = [row.penalties] if isinstance(row.penalties, Penalties) else None
        for number in row.next_uniform(n):
            uniform = torch.tensor([number], dtype=torch.float64, device="cpu")
            drawn = int(queue_tokens(logits[:, :self._vocab_size], uniform, row.request.sampling, penalties, self._draw))
            if drawn < 0:                # drawn is -1 if the logits are not finite
                break
            tokens.append(drawn)
            if len(tokens) < n:
                logits = reader.read_ahead(drawn)
        return tokens


class _Reader:
    """Keeps the draft model's position in one row. Reads the tokens that the row has drawn, and then proposed tokens."""

    def __init__(self, decoder: CDecoder, prompt: list[int]) -> None:
        self._decoder = decoder
        self._unread = prompt            # ids that the draft model has yet to read
        self._drawn = 0                  # the number of the row's generated tokens that have been read
        self._ahead: list[int] = []      # proposed tokens that have been read

    def read(self, tokens: list[int]) -> torch.Tensor:
        """Reads up to the row's last token, and returns the logits (1,V) after it."""
        unread = self._unread + tokens[self._drawn:]
        self._unread = []
        self._drawn = len(tokens)
        pairs = zip(self._ahead, unread[:-1], strict=False)              # the last token is always read, to get its logits
        n_right = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        self._decoder.advance(0, n_right)
        self._decoder.drop_ahead()
        self._ahead = []
        return self._decoder.read([torch.tensor(unread[n_right:][-MOST_UNREAD:], device="cpu")])

    def read_ahead(self, token: int) -> torch.Tensor:
        """Reads a proposed token, which the row has not drawn yet, and returns the logits (1,V) that follow."""
        self._ahead.append(token)
        return self._decoder.read_ahead([[token]])
