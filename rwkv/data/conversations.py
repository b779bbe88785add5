"""Tokenises the conversations of data=chat and packs them into rows. Only the assistant's answers are targets of the loss.

    row 0   [ conversation 3 ....... ][ conversation 0 .. ][ conversation 8 ]   T = ctx_len positions; [ resets the state
    row 1   [ conversation 5 ................................. ] padding

An id is called learnt if it is a target of the loss. The parts of a conversation are encoded separately, just as generation
encodes a prompt and its answer (rwkv/chat/encoding.py). Each conversation ends in end_of_text, which is added unless the chat
template wrote it. The end_of_text after an answer is learnt, so that a tuned model stops. No end_of_text precedes a
conversation, because none precedes a prompt in generation.

Rows are filled by best fit, the longest conversations first. A conversation longer than a row is truncated. With trainer.tbptt,
training reads whole conversations (tbptt_segments.py). Validation does the same if any conversation is longer than a row.

The folder cache/chat-KEY contains the ids, one byte per id (1 if the id is learnt), and the offsets of the conversations.
"""

import zlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rwkv.chat.encoding import decode_with_special_names, encode, encode_each, for_tokenizer, visible_text
from rwkv.config import DataConfig
from rwkv.data.files import crc32
from rwkv.data.shards import SPLITS, dtype_of
from rwkv.data.sources.chat import Conversation, conversations, template_of
from rwkv.data.token_array import DocumentOffsets, Part, TokenArray
from rwkv.data.windows import ShuffleIterator, ShuffleSampler
from rwkv.errors import UserError
from rwkv.io.cache import cannot_write, read_json, sha256, write, write_bytes, write_json
from rwkv.io.json_types import JsonObject
from rwkv.io.lines import count_of
from rwkv.model.loss import IGNORED
from rwkv.tokenizer.lost_bytes import NOTHING, LossCounter, Lost
from rwkv.tokenizer.tokenizers import Tokenizer

VERSION = 6                              # version of the cache files' format
AT_ONCE = 1000                           # conversations per call of the tokenizer


class Tokenised(NamedTuple):
    """A tokenised training or validation split of data=chat.

    Attributes:
        tokens: the ids of the conversations.
        learnt: 1 for each learnt id and 0 for each other id.
        bytes, learnt_bytes: the size of all text, and of the learnt text.
        lost, learnt_lost: the part of all text, and of the learnt text, that the tokenizer cannot represent.
        left_out: the number of conversations or pairs that are in neither split because none of their answers is learnt.
        copies: the number of conversations or pairs in both splits that equal an earlier one (documents/copies.py).
        paired: True if sequences 2i and 2i+1 contain the chosen and the rejected answer to the same prompt (pairs.py).
    """

    tokens: TokenArray
    learnt: TokenArray
    bytes: int
    learnt_bytes: int
    lost: Lost
    learnt_lost: Lost
    left_out: int = 0
    copies: int = 0
    paired: bool = False


class Packed(NamedTuple):
    """A batch of packed rows.

    Attributes:
        x, y (B,T): the input ids and the target ids, int64.
        starts (B,T): True at each position before which the state is reset.
        weight: the factor for the batch's mean loss. Averaging the weighted losses over all batches and processes of an
            optimiser step gives the mean over all targets of the step.
    """

    x: Tensor
    y: Tensor
    starts: Tensor
    weight: float = 1.0


class Whole(NamedTuple):
    """A validation batch with one whole conversation per row.

    `x` and `y` (B,L) are the input ids and the target ids, int64. The model reads `T` of the L positions at a time.
    """

    x: Tensor
    y: Tensor
    T: int


class Rows(NamedTuple):
    """The numbers of the rows in a batch, and the batch's weight (see Packed)."""

    numbers: list[int]
    weight: float


def tokenise(config: DataConfig, identity: Sequence[str], tokenizer: Tokenizer, cache: Path,
             pairs: bool = False) -> tuple[Tokenised, Tokenised, float]:
    """Tokenises the conversations of `config`, or reads their tokens from the cache.

    Returns the training split, the validation split, and the bits per byte of `gzip -9` on the validation answers. Raises
    UserError if a line is not a conversation or cannot be encoded.

    Args:
        identity: strings that identify the conversations and the way they are split.
        pairs: whether each entry of the files is a pair of answers.
    """
    kind = ["pairs"] if pairs else []
    folder = cache / f"chat-{sha256([*identity, tokenizer.data_key, str(VERSION), *kind])[:16]}"
    manifest = read_json(folder / "manifest.json")
    checksums = {name: crc32(folder / name) for name in manifest["files"] if (folder / name).is_file()} if manifest else {}
    if not manifest or checksums != manifest["files"]:
        manifest = _write_tokens(config, tokenizer, folder, pairs)
    train, val = (_read_split(folder, manifest, split)._replace(paired=pairs) for split in SPLITS)
    return train, val, manifest["gzip_bpb"]


def _write_tokens(config: DataConfig, tokenizer: Tokenizer, folder: Path, pairs: bool) -> JsonObject:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from None
    counter = LossCounter(tokenizer)
    dtype = dtype_of(tokenizer)
    ids: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    learnt: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    sizes: dict[str, dict[str, int]] = {split: {"bytes": 0, "learnt_bytes": 0} for split in SPLITS}
    lost = {split: [NOTHING, NOTHING] for split in SPLITS}         # index 1 is for learnt text
    packer = zlib.compressobj(9, wbits=31)
    packed = 0
    left_out = copies = 0
    for conversation, part_ids in _encode_conversations(config, tokenizer, pairs):
        if not conversation.learnt:
            left_out += 1
            continue
        copies += conversation.copy
        split = SPLITS[conversation.val]
        for (rendered, is_learnt), part in zip(conversation.parts, part_ids, strict=True):
            text = visible_text(rendered)
            lost[split][is_learnt] += counter.count([text], [part])
            content = text.encode()
            sizes[split]["bytes"] += len(content)
            sizes[split]["learnt_bytes"] += len(content) * is_learnt
            packed += len(packer.compress(content)) if conversation.val and is_learnt else 0
        flags = [np.full(len(part), is_learnt, np.uint8)
                 for part, (_, is_learnt) in zip(part_ids, conversation.parts, strict=True)]
        if part_ids[-1][-1:] != [tokenizer.end_of_text]:
            part_ids.append([tokenizer.end_of_text])
            flags.append(np.array([conversation.parts[-1][1]], np.uint8))
        ids[split].append(np.array([*chain.from_iterable(part_ids)], dtype))
        learnt[split].append(np.concatenate(flags))
    packed += len(packer.flush())
    for split in SPLITS:
        lengths = [len(conversation) for conversation in ids[split]]
        write_bytes(folder / f"{split}.ids", np.concatenate(ids[split]).tobytes())
        write_bytes(folder / f"{split}.learnt", np.concatenate(learnt[split]).tobytes())
        write(folder / f"{split}-starts.npy", partial(np.save, arr=np.cumsum([0, *lengths])[:-1]))
        sizes[split] |= {"tokens": sum(lengths), "conversations": len(lengths)}
    names = [f"{split}{ending}" for split in SPLITS for ending in (".ids", ".learnt", "-starts.npy")]
    manifest = {"dtype": dtype.name, "splits": sizes, "left_out": left_out // (1 + pairs), "copies": copies // (1 + pairs),
                "gzip_bpb": 8 * packed / max(sizes["val"]["learnt_bytes"], 1),
                "files": {name: crc32(folder / name) for name in names},
                "lost": {split: [asdict(text) for text in lost[split]] for split in SPLITS}}
    write_json(folder / "manifest.json", manifest)
    return manifest


def _encode_conversations(config: DataConfig, tokenizer: Tokenizer,
                          pairs: bool) -> Iterator[tuple[Conversation, list[list[int]]]]:
    remaining = conversations(config, for_tokenizer(template_of(config), tokenizer), pairs)
    while batch := list(islice(remaining, AT_ONCE)):
        try:
            ids = encode_each(tokenizer, [[text for text, _ in conversation.parts] for conversation in batch])
        except ValueError:
            _raise_with_place(batch, tokenizer)
            raise
        yield from zip(batch, ids, strict=True)


def _raise_with_place(batch: list[Conversation], tokenizer: Tokenizer) -> None:
    for conversation in batch:
        try:
            encode(tokenizer, ["".join(text for text, _ in conversation.parts)])
        except ValueError as error:
            raise UserError(f"{conversation.where}: {error}") from None


def _read_split(folder: Path, manifest: JsonObject, split: str) -> Tokenised:
    sizes = manifest["splits"][split]
    offsets = DocumentOffsets(folder / f"{split}-starts.npy", 0, sizes["conversations"], 0)
    tokens, learnt = (TokenArray([Part(folder / f"{split}{ending}", dtype, 0, sizes["tokens"])], offsets)
                      for ending, dtype in ((".ids", manifest["dtype"]), (".learnt", "uint8")))
    unlearnt_lost, learnt_lost = (Lost(**text) for text in manifest["lost"][split])
    return Tokenised(tokens, learnt, sizes["bytes"], sizes["learnt_bytes"], unlearnt_lost + learnt_lost, learnt_lost,
                     manifest["left_out"], manifest["copies"])


def annotated_conversations(split: Tokenised, tokenizer: Tokenizer) -> Iterator[str]:
    """Yields the text of each conversation, with learnt text in [[ ]] and with end_of_text as "<end of text>"."""
    for begin, end in pairwise(split.tokens.bounds.tolist()):
        pairs = zip(split.learnt[begin:end].tolist(), split.tokens[begin:end].tolist(), strict=True)
        pieces = []
        before: list[int] = []
        for is_learnt, run in groupby(pairs, itemgetter(0)):
            ids = [token for _, token in run]
            text = _decode_with_ends(ids, before, tokenizer)
            pieces.append(f"[[{text}]]" if is_learnt else text)
            before = ids
        yield "".join(pieces)


def _decode_with_ends(ids: list[int], before: list[int], tokenizer: Tokenizer) -> str:
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == tokenizer.end_of_text:
            pieces.append([])
        else:
            pieces[-1].append(token)
    first, *others = pieces
    return "<end of text>".join([decode_with_special_names(tokenizer, first, before),
                                 *(decode_with_special_names(tokenizer, piece) for piece in others)])


def packed_rows(lengths: Sequence[int], T: int) -> list[list[int]]:
    """Packs sequences into rows of T positions by best fit, the longest first. Returns the sequence numbers in each row.

    A sequence longer than T fills a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []     # (positions left, row) of rows that are not full, ascending
    for sequence in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = min(lengths[sequence], T)
        place = bisect_left(room, (length, 0))
        if place == len(room):
            rows.append([])
        left, row = room.pop(place) if place < len(room) else (T, len(rows) - 1)
        rows[row].append(sequence)
        if left > length:
            insort(room, (left - length, row))
    return rows


class ConversationRows(Dataset[Packed]):
    """A dataset of the packed rows of a split. Row numbers from len(self) on denote the same rows in later epochs.

    Attributes:
        counts (rows,): the number of targets in each row.
        cut: the number of conversations that are truncated because they are longer than a row.
    """

    def __init__(self, tokens: TokenArray, learnt: TokenArray, ctx_len: int) -> None:
        self.tokens = tokens
        self.learnt = learnt
        self.ctx_len = ctx_len
        self._bounds = tokens.bounds
        lengths = np.diff(self._bounds) - 1                      # the last id, end_of_text, is only a target
        self.cut = count_longer_than(tokens, ctx_len)
        self._lengths = np.minimum(lengths, ctx_len)
        self._n_tokens = int(self._lengths.sum())            # counts the tokens in all rows
        self._rows = packed_rows(self._lengths.tolist(), ctx_len)
        before = np.cumsum(np.append(0, learnt[:]), dtype=np.int64)
        first = self._bounds[:-1] + 1
        targets = before[first + self._lengths] - before[first]
        self.counts = np.array([targets[row].sum() for row in self._rows])
        if not self.counts.any():
            raise UserError(f"in every conversation, the answer begins after the first model.ctx_len={ctx_len} tokens, so "
                            "there is nothing to learn or to validate. Raise model.ctx_len, or set trainer.tbptt to read whole "
                            "conversations")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: Rows | list[int]) -> Packed:
        """Returns the rows with these numbers as one batch. The state is also reset before the padding of a row."""
        numbers, weight = rows if isinstance(rows, Rows) else (rows, 1.0)
        x = np.zeros((len(numbers), self.ctx_len), np.int64)
        y = np.full_like(x, IGNORED)
        starts = np.zeros(x.shape, bool)
        for row, number in enumerate(numbers):
            column = 0
            for sequence in self._rows[number % len(self)]:
                begin = int(self._bounds[sequence])
                length = int(self._lengths[sequence])
                columns = slice(column, column + length)
                targets = slice(begin + 1, begin + length + 1)
                starts[row, column] = True
                x[row, columns] = self.tokens[begin:begin + length]
                y[row, columns] = np.where(self.learnt[targets], self.tokens[targets].astype(np.int64), IGNORED)
                column += length
            starts[row, column:column + 1] = True
        return Packed(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(starts), weight)

    def padding(self) -> float:
        """Returns the fraction of all positions that are padding."""
        return 1 - self._n_tokens / (len(self) * self.ctx_len)

    def describe(self) -> str:
        cut = (f"; {self.cut:,} of these conversations are longer than model.ctx_len={self.ctx_len} and are truncated "
               "(trainer.tbptt reads them whole)"
               if self.cut else "")
        conversations = count_of(len(self._lengths), "conversation")
        return (f"{conversations} in {count_of(len(self), 'row')}, {100 * self.padding():.1f} % of positions padding"
                f"{cut}; only the {count_of(int(self.counts.sum()), 'token')} of answers are learnt")


class WholeConversations(Dataset[Whole]):
    """A dataset of whole conversations, the longest first, so that conversations in the same batch have similar lengths."""

    def __init__(self, tokens: TokenArray, learnt: TokenArray, ctx_len: int) -> None:
        self.tokens = tokens
        self.learnt = learnt
        self.ctx_len = ctx_len
        self._bounds = tokens.bounds
        self._order = np.argsort(-np.diff(self._bounds), kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    def __getitems__(self, numbers: list[int]) -> Whole:
        spans = [slice(self._bounds[number], self._bounds[number + 1]) for number in self._order[numbers]]
        x = np.zeros((len(spans), max(span.stop - span.start for span in spans) - 1), np.int64)
        y = np.full_like(x, IGNORED)
        for row, span in enumerate(spans):
            ids = self.tokens[span]
            learnt = self.learnt[span]
            x[row, :len(ids) - 1] = ids[:-1]
            y[row, :len(ids) - 1] = np.where(learnt[1:], ids[1:].astype(np.int64), IGNORED)
        return Whole(torch.from_numpy(x), torch.from_numpy(y), self.ctx_len)


def count_longer_than(tokens: TokenArray, ctx_len: int) -> int:
    """Returns the number of conversations that are longer than a row of `ctx_len` positions."""
    return int((np.diff(tokens.bounds) - 1 > ctx_len).sum())


class RowSampler(ShuffleSampler):
    """A ShuffleSampler that also computes the weight of each batch.

    Args:
        counts (rows,): the number of targets in each row.
        parts: the number of batches per optimiser step.
    """

    def __init__(self, counts: np.ndarray, batch_size: int, batches: int, seed: int, rank: int, world: int, parts: int) -> None:
        super().__init__(len(counts), batch_size, batches, seed, rank, world)
        self.counts = counts
        self.parts = parts

    def __iter__(self) -> "RowIterator":
        return RowIterator(self)


class RowIterator(ShuffleIterator):
    sampler: RowSampler

    def __next__(self) -> Rows:                                  # type: ignore[override]
        sampler = self.sampler
        common = sampler.batch_size * sampler.world
        first = self.drawn // (common * sampler.parts) * common * sampler.parts
        in_step = sum(int(sampler.counts[self._order[position]])
                      for position in range(first, first + common * sampler.parts))
        numbers = super().__next__()
        in_batch = sum(int(sampler.counts[number % sampler.size]) for number in numbers)
        return Rows(numbers, in_batch * sampler.parts * sampler.world / max(1, in_step))
