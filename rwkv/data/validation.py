"""Restricts validation to the first trainer.val_tokens tokens of the split, and measures the size and gzip -9 of this part."""

import zlib
from dataclasses import replace
from itertools import groupby, pairwise
from math import ceil
from operator import itemgetter

from rwkv.data.conversations import Tokenised
from rwkv.data.prepare import Corpus, join_sources


def limit_validation(corpus: Corpus, val_tokens: int | None, reach: int) -> Corpus:
    """Restricts the validation split to its first `val_tokens` predicted tokens.

    Returns the corpus unchanged if `val_tokens` is None or the split is shorter. Each source of data=mix keeps its share of the
    tokens. Conversations are never cut. The smallest number of conversations is kept that contains `val_tokens` tokens and an
    answer to predict. The answer must begin within the first `reach` tokens of a conversation, because validation reads no
    more. val_lost still describes the whole split.
    """
    if val_tokens is None or val_tokens + 1 >= len(corpus.val):
        return corpus
    if corpus.parts:
        return join_sources([part._replace(corpus=limit_validation(part.corpus, ceil(val_tokens * part.share), reach))
                             for part in corpus.parts])
    if corpus.conversations is None:
        val = corpus.val.first(val_tokens + 1)
        text = corpus.tokenizer.decode_bytes(val[1:].tolist())     # the first id is not predicted
        return replace(corpus, val=val, sizes=replace(
            corpus.sizes, val_tokens=len(val), val_bytes=len(text), gzip_bpb=_gzip_bpb(text)))
    train, whole = corpus.conversations
    end = _end_of_conversations(whole, val_tokens, reach)
    tokens = whole.tokens.first(end)
    learnt = whole.learnt.first(end)
    flagged = zip(learnt[:].tolist(), tokens[:].tolist(), strict=True)
    answers = b"".join(corpus.tokenizer.decode_bytes(token for _, token in run)
                       for is_learnt, run in groupby(flagged, itemgetter(0)) if is_learnt)
    part = whole._replace(tokens=tokens, learnt=learnt, bytes=len(corpus.tokenizer.decode_bytes(tokens[:].tolist())),
                          learnt_bytes=len(answers))
    return replace(corpus, val=tokens, conversations=(train, part), sizes=replace(
        corpus.sizes, val_tokens=end, val_bytes=part.bytes, gzip_bpb=_gzip_bpb(answers)))


def _end_of_conversations(split: Tokenised, val_tokens: int, reach: int) -> int:
    bounds = split.tokens.bounds[::2 if split.paired else 1].tolist()
    has_answer = False
    for begin, end in pairwise(bounds):
        if split.paired:
            has_answer = has_answer or end - begin - 2 <= reach
        else:
            has_answer = has_answer or bool(split.learnt[begin + 1:min(end, begin + 1 + reach)].any())
        if has_answer and end >= val_tokens:
            break
    return end


def _gzip_bpb(text: bytes) -> float:
    return 8 * len(zlib.compress(text, 9, 31)) / max(len(text), 1)
