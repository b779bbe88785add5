"""Tests of trainer.tbptt's data.

An epoch has every token once, each segment is of one document, and the order resumes from any position.
"""

import dataclasses
import io
import json
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_arrays import token_array_of
from torch import Tensor

from rwkv.config import DataConfig
from rwkv.data.loaders import DataModule
from rwkv.data.prepare import prepare
from rwkv.data.tbptt_segments import DocumentChunks, SegmentDataset, Segments, SegmentSampler, describe
from rwkv.data.token_array import TokenArray
from rwkv.data.windows import ShuffleSampler, StepLayout
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED

END = 0                                  # end_of_text
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
FEWER = settings(max_examples=40)         # for tests that take a while
LAYOUTS = st.builds(StepLayout, rows=st.integers(1, 3), parts=st.integers(1, 3), rank=st.just(0), world=st.integers(1, 3))


def documents(folder: Path, sizes: list[int]) -> TokenArray:
    """Returns documents of end_of_text and ids that occur only once, so that an id identifies its position."""
    ids = np.arange(1, sum(sizes) + 1, dtype=np.uint16)
    parts = np.split(ids, np.cumsum(sizes)[:-1])
    for part in parts:
        part[0] = END
    return token_array_of(folder, *parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams")


def steps(tokens: TokenArray, ctx_len: int, K: int, layout: StepLayout, count: int, seed: int = 0) -> list[Segments]:
    """Returns `count` steps.

    Each step is one batch of all streams in order, joined from the batches of all processes.
    """
    chunks, reading = DocumentChunks(tokens, END, ctx_len, layout.streams), SegmentDataset(tokens, ctx_len)
    layouts = [layout._replace(rank=rank) for rank in range(layout.world)]
    samplers = [SegmentSampler(chunks, K, each, count * layout.parts, seed) for each in layouts]
    ranks = [[reading.__getitems__(plan) for plan in sampler] for sampler in samplers]
    batches = [join_batches(common, lambda rows: torch.stack(rows, 1).flatten(0, 1)) for common in zip(*ranks, strict=True)]
    return [join_batches(batches[i:i + layout.parts], torch.cat) for i in range(0, len(batches), layout.parts)]


def join_batches(batches: Sequence[Segments], join: Callable[[list[Tensor]], Tensor]) -> Segments:
    x, y, starts = (join([getattr(batch, name) for batch in batches]) for name in ("x", "y", "starts_document"))
    parts = {batch.part: batch for batch in batches}
    return Segments(x, y, starts, batches[0].part, sum(batch.weight for batch in batches) / len(batches),
                    sum(batch.tokens for batch in parts.values()))


def first_epoch(tokens: TokenArray, ctx_len: int, K: int, layout: StepLayout, seed: int) -> list[int]:
    """Returns the targets of the first epoch's chunks.

    All these chunks end before any stream has read two shares of all segments.
    """
    chunks, targets, number, assigned = DocumentChunks(tokens, END, ctx_len, layout.streams), [], [0] * layout.streams, 0
    two_shares = 2 * -(-int(chunks.segments.sum()) // layout.streams)
    for batch in steps(tokens, ctx_len, K, layout, -(-two_shares // K), seed):
        for k in range(K):
            for stream in range(layout.streams):
                if batch.starts_document[stream, k]:
                    number[stream], assigned = assigned, assigned + 1
                if number[stream] < len(chunks):
                    targets += batch.y[stream, k].tolist()
    return [target for target in targets if target != IGNORED]


@pytest.mark.thorough
@FEWER
@given(sizes=SIZES, ctx_len=st.integers(1, 9), K=st.integers(1, 4), layout=LAYOUTS, seed=st.integers(0, 3))
def test_every_token_is_predicted_once_in_an_epoch(folder: Path, sizes: list[int], ctx_len: int, K: int, layout: StepLayout,
                                                   seed: int) -> None:
    tokens = documents(folder, sizes)
    assert sorted(first_epoch(tokens, ctx_len, K, layout, seed)) == sorted(tokens[1:].tolist())


@FEWER
@given(sizes=SIZES, ctx_len=st.integers(1, 9), K=st.integers(1, 4), layout=LAYOUTS)
def test_a_segment_continues_its_stream_or_starts_a_document(folder: Path, sizes: list[int], ctx_len: int, K: int,
                                                       layout: StepLayout) -> None:
    tokens, following = documents(folder, sizes), [IGNORED] * layout.streams
    every = tokens[:].tolist()
    for batch in steps(tokens, ctx_len, K, layout, 5):
        for k in range(K):
            for stream, (x, y) in enumerate(zip(batch.x[:, k].tolist(), batch.y[:, k].tolist(), strict=True)):
                counted = [target for target in y if target != IGNORED]
                assert y == counted + [IGNORED] * (ctx_len - len(counted))
                assert counted[:-1] == x[1:len(counted)]
                assert END not in x[1:len(counted)], "a second document"
                assert batch.starts_document[stream, k] or (x[0] == following[stream] != END)
                following[stream] = counted[-1] if len(counted) == ctx_len else IGNORED
                if len(counted) > 1 and x[0] != END:
                    assert every[every.index(x[0]) + 1] == counted[0]


@FEWER
@given(sizes=SIZES, ctx_len=st.integers(1, 9), K=st.integers(1, 3), rows=st.integers(1, 3), world=st.integers(1, 3),
       parts=st.integers(1, 3))
def test_the_order_does_not_depend_on_processes_or_k(folder: Path, sizes: list[int], ctx_len: int, K: int, rows: int,
                                                     world: int, parts: int) -> None:
    tokens = documents(folder, sizes)
    split = steps(tokens, ctx_len, K, StepLayout(rows, parts, 0, world), 6)
    whole = steps(tokens, ctx_len, 1, StepLayout(rows * parts * world), 6 * K)
    for name in ("x", "y", "starts_document"):
        assert torch.equal(*(torch.cat([getattr(batch, name) for batch in batches], 1) for batches in (split, whole)))
    assert [batch.tokens for batch in split] == [
        int((batch.x != END).sum() + (batch.x[:, :, 0] == END).sum()) for batch in split], "END elsewhere is padding"
    assert [batch.weight for batch in split] == pytest.approx([float((batch.y != IGNORED).any()) for batch in split])


@FEWER
@given(sizes=SIZES, layout=LAYOUTS, taken=st.integers(0, 20))
def test_the_order_continues_from_any_place(folder: Path, sizes: list[int], layout: StepLayout, taken: int) -> None:
    order = SegmentSampler(DocumentChunks(documents(folder, sizes), END, 4, layout.streams), 2, layout, 20, seed=0)
    iterator, stored = iter(order), io.BytesIO()
    assert len(list(islice(iterator, taken))) == taken
    torch.save(iterator.state_dict(), stored)
    rest, resumed = list(iterator), iter(order)
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert list(resumed) == rest


def test_a_saved_position_keeps_its_keys(folder: Path) -> None:
    """Checkpoints of earlier versions contain these keys."""
    sampler = SegmentSampler(DocumentChunks(documents(folder, [9, 5]), END, 4, 2), 2, StepLayout(2), 20, seed=0)
    resumed = iter(sampler)
    resumed.load_state_dict({"batches": 1, "lanes": {"dealt": 2, "piece": [1, 0], "left": [1, 0]}})
    assert resumed.state_dict() == {"batches": 1, "lanes": {"dealt": 2, "piece": [1, 0], "left": [1, 0]}}
    assert iter(ShuffleSampler(9, 3, 4, 0)).state_dict() == {"drawn": 0}


def test_the_order_depends_on_the_seed_and_the_epoch(folder: Path) -> None:
    tokens = documents(folder, [4] * 20)
    first, again, other = (steps(tokens, 4, 40, StepLayout(1), 1, seed)[0].x.flatten().tolist() for seed in (0, 0, 1))
    assert first == again
    assert len({tuple(part) for part in (first[:80], first[80:], other[:80], tokens[:].tolist())}) == 4


@FEWER
@given(layout=LAYOUTS, size=st.integers(1, 200))
def test_a_batch_is_weighted_by_its_targets(folder: Path, layout: StepLayout, size: int) -> None:
    """The mean over processes and batches of weight times mean is the mean over all targets."""
    chunks = DocumentChunks(documents(folder, [1, size, 3]), END, 4, layout.streams)
    order = [iter(SegmentSampler(chunks, 2, layout._replace(rank=rank), layout.parts, 0)) for rank in range(layout.world)]
    batches = [plan for rank in order for plan in rank]
    counts = [sum(segment.targets for row in plan.rows for segment in row) for plan in batches]
    for plan, count in zip(batches, counts, strict=True):
        assert plan.weight * sum(counts) == pytest.approx(count * len(batches))


def test_one_long_document_is_read_at_a_different_place_in_each_stream(folder: Path) -> None:
    tokens = documents(folder, [400])
    for batch in steps(tokens, 4, 2, StepLayout(5), 30):
        assert len({row[0] for row in batch.x[:, 0].tolist()}) == 5
    assert DocumentChunks(tokens, END, 4, 5).segments.tolist() == [20] * 5


def test_without_end_of_text_no_document_predicts_the_next(folder: Path) -> None:
    ids = np.arange(1, 11, dtype=np.uint16)
    tokens = token_array_of(folder, ids[:6], ids[6:])
    assert sorted(first_epoch(tokens, 4, 1, StepLayout(1), 0)) == [2, 3, 4, 5, 6, 8, 9, 10]


# Loaders


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    lines = (json.dumps({"text": f"line {number}, " * (number % 11)}) for number in range(60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(name="jsonl", path=str(tmp_path / "text.jsonl"), tokenizer="byte", batch_size=3,
                      cache_dir=str(tmp_path / "cache"))


def same(one: Segments, other: Segments) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


# On Linux, workers are forked; Python 3.12 and later warn about a fork in a process with several threads.
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_continues_with_exactly_the_next_batch(config: DataConfig, workers: int) -> None:
    corpus = prepare(config, 16)
    alone = list(DataModule(corpus, config, 16, 0, 2).train_dataloader())
    data, stored = DataModule(corpus, dataclasses.replace(config, num_workers=workers), 16, 0, 2), io.BytesIO()
    loader = data.train_dataloader()
    first_batches = list(islice(iterator := iter(loader), 7))
    torch.save(loader.state_dict(), stored)
    del iterator
    resumed = data.train_dataloader()
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    batches = [*first_batches, *resumed]
    assert len(batches) == len(alone) > 10
    assert all(map(same, batches, alone))


def test_a_run_continues_with_the_same_number_of_streams(folder: Path) -> None:
    chunks = DocumentChunks(documents(folder, [9]), END, 4, 3)
    streams, windows = iter(SegmentSampler(chunks, 2, StepLayout(3), 4, 0)), iter(ShuffleSampler(9, 3, 4, 0))
    more = iter(SegmentSampler(chunks, 2, StepLayout(3, 2), 4, 0))
    for sampler, state in ((more, streams.state_dict()), (streams, windows.state_dict()), (windows, streams.state_dict())):
        with pytest.raises(UserError):
            sampler.load_state_dict(state)


def test_the_plan_describes_a_step(config: DataConfig) -> None:
    text = describe(prepare(config, 64), 64, 2 * config.batch_size, 4)
    assert re.findall(r"\d+", text)[:2] == ["6", "4"]
    assert " 48 documents" in text
    assert "padding" in text
