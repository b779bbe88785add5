"""Opens the draft that draft= names for speculative decoding, and describes the draft in a line."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rwkv.checkpoint.files import read_checkpoint, require_tokenizer
from rwkv.checkpoint.memory import weights_nbytes
from rwkv.checkpoint.option_files import errors_of
from rwkv.config import MIB, NGRAM, DraftedConfig
from rwkv.errors import UserError
from rwkv.generation.draft import Draft, ModelDraft, NGram
from rwkv.generation.speculation import LARGEST_DRAFT_COST, LEAST_GAIN, MOST_ROWS
from rwkv.io.lines import wrap_text
from rwkv.model.base import Model, state_nbytes
from rwkv.model.decoding.c_step import why_not
from rwkv.model.operators import operator_for
from rwkv.pretrained import RWKV, OpenCheckpoint, compute_dtype
from rwkv.tokenizer.tokenizers import Tokenizer

if TYPE_CHECKING:
    from rwkv.checkpoint.files import Checkpoint


class OpenDraft(NamedTuple):
    """A draft that has been read and checked, but not loaded.

    Attributes:
        checkpoint: the draft's checkpoint; None for n-grams.
        dtype: the dtype of the model for which the draft proposes tokens.
    """

    name: str
    checkpoint: "Checkpoint | None"
    tokenizer: Tokenizer
    dtype: str
    most_tokens: int

    def load(self, model: Model) -> tuple[Draft | None, str]:
        """Returns the draft for this model, and a line about the draft. Returns None as the draft if it cannot be used.

        The draft must be small enough. Model and draft must use the decoding step in C, because only this step saves the state
        after each token.
        """
        if reason := why_not(model):
            return None, f"{self.name}, ignored: a draft requires the compiled decoding step ({reason})"
        draft: Draft = NGram(self.most_tokens)
        weights = 0
        if self.checkpoint is not None:
            wkv = operator_for(self.checkpoint.config, "auto", "cpu", compute_dtype(self.dtype, "cpu"))
            draft_model = RWKV.from_checkpoint(self.checkpoint, wkv, "cpu", self.dtype)
            if reason := why_not(draft_model):
                return None, f"{self.name}, ignored: the draft cannot use the compiled decoding step ({reason})"
            draft = ModelDraft(draft_model, model, self.tokenizer, self.most_tokens)
            weights = weights_nbytes(self.checkpoint, self.dtype)
        if (cost := draft.cost.draft_cost) > LARGEST_DRAFT_COST:
            return None, (f"{self.name}, ignored: the draft's step takes about {cost:.0%} of the time of the model's step. Use "
                          "a smaller draft")
        memory = weights + MOST_ROWS * (1 + self.most_tokens) * state_nbytes(model.config)
        return draft, (f"{draft}: up to {self.most_tokens} tokens per pass, in up to {memory / MIB:,.0f} MiB; pauses while it "
                       f"gains less than {LEAST_GAIN - 1:.0%}, and with more than {MOST_ROWS} sequences")


def open_draft(config: DraftedConfig, opened: OpenCheckpoint) -> OpenDraft | None:
    """Returns the draft that a configuration names, or None if draft= is not set.

    Raises UserError if the draft is missing or damaged, or if the draft and the model have different vocabularies.
    """
    if config.draft is None:
        return None
    if config.draft == NGRAM:
        return OpenDraft(NGRAM, None, opened.tokenizer, opened.dtype, config.draft_tokens)
    with errors_of(f"draft={config.draft}"):
        checkpoint = read_checkpoint(config.draft)
        _require_same_vocabulary(checkpoint, opened)
    return OpenDraft(Path(config.draft).name, checkpoint, opened.tokenizer, opened.dtype, config.draft_tokens)


def load_draft(opened: OpenDraft | None, model: Model) -> Draft | None:
    """Returns the draft for this model, if any. Prints a line about the draft on standard error."""
    if opened is None:
        return None
    draft, line = opened.load(model)
    print(wrap_text(f"draft: {line}", sys.stderr), file=sys.stderr)
    return draft


def _require_same_vocabulary(draft: "Checkpoint", opened: OpenCheckpoint) -> None:
    """Raises UserError if the draft's file shows that a token id stands for different text in draft and model."""
    target = opened.checkpoint
    if draft.vocab_size != target.vocab_size:
        raise UserError(f"a draft must have the same vocabulary size as the model, {target.vocab_size}; got {draft.vocab_size}")
    if draft.tokenizer is None:
        require_tokenizer(draft, opened.tokenizer, "the model's tokenizer")
        return
    tokenizer = Tokenizer.from_dict(draft.tokenizer)
    if tokenizer.hash != opened.tokenizer.hash and tokenizer.tokens_as_bytes() != opened.tokenizer.tokens_as_bytes():
        raise UserError("a draft must have the same tokenizer as the model, but in this draft the token ids stand for "
                        "different text. Choose a draft from the same model family")
