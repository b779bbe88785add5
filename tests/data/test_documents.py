"""trainer.tbptt's data: every token once an epoch, each segment of one document, one order for all, going on from any place."""

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import stream_of
from torch import Tensor

from rwkv.config import DataConfig, ModelConfig, TrainConfig, TrainerConfig
from rwkv.data.documents import LaneOrder, Pieces, Reading, Segments, Share, describe
from rwkv.data.loaders import DataModule
from rwkv.data.prepare import prepare
from rwkv.data.token_array import Stream
from rwkv.data.windows import EndlessPermutations
from rwkv.model.loss import IGNORED

END = 0                                  # end_of_text
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
FEWER = settings(max_examples=40)         # of what takes a while
SHAPES = st.builds(Share, rows=st.integers(1, 3), parts=st.integers(1, 3), rank=st.just(0), world=st.integers(1, 3))


def documents(folder: Path, sizes: list[int]) -> Stream:
    """end_of_text and then ids that occur once, so that an id says where it comes from."""
    ids = np.arange(1, sum(sizes) + 1, dtype=np.uint16)
    parts = np.split(ids, np.cumsum(sizes)[:-1])
    for part in parts:
        part[0] = END
    return stream_of(folder, *parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lanes")


def steps(tokens: Stream, ctx_len: int, K: int, share: Share, count: int, seed: int = 0) -> list[Segments]:
    """`count` steps, each as one batch of all lanes in order, from batches of all processes."""
    pieces, reading = Pieces(tokens, END, ctx_len, share.lanes), Reading(tokens, ctx_len)
    ranks = [[reading.__getitems__(rows) for rows in LaneOrder(pieces, K, share._replace(rank=rank), count * share.parts, seed)]
             for rank in range(share.world)]
    batches = [joined(common, lambda rows: torch.stack(rows, 1).flatten(0, 1)) for common in zip(*ranks, strict=True)]
    return [joined(batches[i:i + share.parts], torch.cat) for i in range(0, len(batches), share.parts)]


def joined(batches: Sequence[Segments], join: Callable[[list[Tensor]], Tensor]) -> Segments:
    x, y, opens = (join([getattr(batch, name) for batch in batches]) for name in ("x", "y", "opens"))
    parts = {batch.part: batch for batch in batches}
    return Segments(x, y, opens, batches[0].part, sum(batch.weight for batch in batches) / len(batches),
                    sum(batch.counted for batch in parts.values()))


def first_epoch(tokens: Stream, ctx_len: int, K: int, share: Share, seed: int) -> list[int]:
    """The targets of the pieces dealt first, each piece once: the last of them ends before a lane has read two shares."""
    pieces, targets, number, dealt = Pieces(tokens, END, ctx_len, share.lanes), [], [0] * share.lanes, 0
    two_shares = 2 * -(-int(pieces.segments.sum()) // share.lanes)
    for batch in steps(tokens, ctx_len, K, share, -(-two_shares // K), seed):
        for k in range(K):
            for lane in range(share.lanes):
                if batch.opens[lane, k]:
                    number[lane], dealt = dealt, dealt + 1
                if number[lane] < len(pieces):
                    targets += batch.y[lane, k].tolist()
    return [target for target in targets if target != IGNORED]


@FEWER
@given(sizes=SIZES, ctx_len=st.integers(1, 9), K=st.integers(1, 4), share=SHAPES, seed=st.integers(0, 3))
def test_every_token_is_predicted_once_in_an_epoch(folder: Path, sizes: list[int], ctx_len: int, K: int, share: Share,
                                                   seed: int) -> None:
    tokens = documents(folder, sizes)
    assert sorted(first_epoch(tokens, ctx_len, K, share, seed)) == sorted(tokens[1:].tolist())


@FEWER
@given(sizes=SIZES, ctx_len=st.integers(1, 9), K=st.integers(1, 4), share=SHAPES)
def test_a_segment_goes_on_where_its_lane_was_or_opens(folder: Path, sizes: list[int], ctx_len: int, K: int,
                                                       share: Share) -> None:
    tokens, following = documents(folder, sizes), [IGNORED] * share.lanes
    every = tokens[:].tolist()
    for batch in steps(tokens, ctx_len, K, share, 5):
        for k in range(K):
            for lane, (x, y) in enumerate(zip(batch.x[:, k].tolist(), batch.y[:, k].tolist(), strict=True)):
                counted = [target for target in y if target != IGNORED]
                assert y == counted + [IGNORED] * (ctx_len - len(counted))
                assert counted[:-1] == x[1:len(counted)]
                assert END not in x[1:len(counted)], "a second document"
                assert batch.opens[lane, k] or (x[0] == following[lane] != END)
                following[lane] = counted[-1] if len(counted) == ctx_len else IGNORED
                if len(counted) > 1 and x[0] != END:
                    assert every[every.index(x[0]) + 1] == counted[0]


@FEWER
@given(sizes=SIZES, ctx_len=st.integers(1, 9), K=st.integers(1, 3), rows=st.integers(1, 3), world=st.integers(1, 3),
       parts=st.integers(1, 3))
def test_the_order_hangs_on_no_process_accumulation_or_k(folder: Path, sizes: list[int], ctx_len: int, K: int, rows: int,
                                                         world: int, parts: int) -> None:
    tokens = documents(folder, sizes)
    split = steps(tokens, ctx_len, K, Share(rows, parts, 0, world), 6)
    whole = steps(tokens, ctx_len, 1, Share(rows * parts * world), 6 * K)
    for name in ("x", "y", "opens"):
        assert torch.equal(*(torch.cat([getattr(batch, name) for batch in batches], 1) for batches in (split, whole)))
    assert [batch.counted for batch in split] == [int((batch.y != IGNORED).sum()) for batch in split]
    assert [batch.weight for batch in split] == pytest.approx([float((batch.y != IGNORED).any()) for batch in split])


@FEWER
@given(sizes=SIZES, share=SHAPES, taken=st.integers(0, 20))
def test_the_order_continues_from_any_place(folder: Path, sizes: list[int], share: Share, taken: int) -> None:
    order = LaneOrder(Pieces(documents(folder, sizes), END, 4, share.lanes), 2, share, 20, seed=0)
    iterator, stored = iter(order), io.BytesIO()
    assert len(list(islice(iterator, taken))) == taken
    torch.save(iterator.state_dict(), stored)
    rest, resumed = list(iterator), iter(order)
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert list(resumed) == rest


def test_the_order_hangs_on_the_seed_and_the_epoch(folder: Path) -> None:
    tokens = documents(folder, [4] * 20)
    first, again, other = (steps(tokens, 4, 40, Share(1), 1, seed)[0].x.flatten().tolist() for seed in (0, 0, 1))
    assert first == again
    assert len({tuple(part) for part in (first[:80], first[80:], other[:80], tokens[:].tolist())}) == 4


@FEWER
@given(share=SHAPES, size=st.integers(1, 200))
def test_a_batch_counts_for_its_targets(folder: Path, share: Share, size: int) -> None:
    """The mean over processes and batches of weight times mean is the mean over all targets."""
    pieces = Pieces(documents(folder, [1, size, 3]), END, 4, share.lanes)
    order = [iter(LaneOrder(pieces, 2, share._replace(rank=rank), share.parts, 0)) for rank in range(share.world)]
    batches = [rows for rank in order for rows in rank]
    counts = [sum(cut.targets for row in rows.cuts for cut in row) for rows in batches]
    for rows, count in zip(batches, counts, strict=True):
        assert rows.weight * sum(counts) == pytest.approx(count * len(batches))


def test_one_long_document_is_read_at_a_different_place_in_each_lane(folder: Path) -> None:
    tokens = documents(folder, [400])
    for batch in steps(tokens, 4, 2, Share(5), 30):
        assert len({row[0] for row in batch.x[:, 0].tolist()}) == 5
    assert Pieces(tokens, END, 4, 5).segments.tolist() == [20] * 5


def test_without_end_of_text_between_documents_none_predicts_the_next(folder: Path) -> None:
    ids = np.arange(1, 11, dtype=np.uint16)
    tokens = stream_of(folder, ids[:6], ids[6:])
    assert sorted(first_epoch(tokens, 4, 1, Share(1), 0)) == [2, 3, 4, 5, 6, 8, 9, 10]


# Loaders


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    lines = (json.dumps({"text": f"line {number}, " * (number % 11)}) for number in range(60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(name="jsonl", path=str(tmp_path / "text.jsonl"), tokenizer="byte", batch_size=3,
                      cache_dir=str(tmp_path / "cache"))


def same(one: Segments, other: Segments) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


# macOS starts workers afresh, Linux by a fork, which Python 3.12 and later warn of in a process with threads.
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_continues_with_exactly_the_next_batch(config: DataConfig, workers: int) -> None:
    corpus = prepare(config, 16)
    alone = list(DataModule(corpus, config, 16, 0, 2).train_dataloader())
    data, stored = DataModule(corpus, dataclasses.replace(config, num_workers=workers), 16, 0, 2), io.BytesIO()
    loader = data.train_dataloader()
    taken = list(islice(iterator := iter(loader), 7))
    torch.save(loader.state_dict(), stored)
    del iterator
    resumed = data.train_dataloader()
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    found = [*taken, *resumed]
    assert len(found) == len(alone) > 10
    assert all(map(same, found, alone))


def test_a_run_goes_on_with_the_lanes_it_has(folder: Path) -> None:
    pieces = Pieces(documents(folder, [9]), END, 4, 3)
    lanes, windows = iter(LaneOrder(pieces, 2, Share(3), 4, 0)), iter(EndlessPermutations(9, 3, 4, 0))
    with pytest.raises(ValueError, match=r"begun with 3 lanes, and data\.batch_size times trainer\.accumulate is 6"):
        iter(LaneOrder(pieces, 2, Share(3, 2), 4, 0)).load_state_dict(lanes.state_dict())
    with pytest.raises(ValueError, match="begun with no lanes"):
        lanes.load_state_dict(windows.state_dict())
    with pytest.raises(ValueError, match=r"begun with trainer\.tbptt"):
        windows.load_state_dict(lanes.state_dict())


def test_what_a_step_reads_is_said(config: DataConfig) -> None:
    options = TrainConfig(model=ModelConfig(ctx_len=64), data=config, trainer=TrainerConfig(tbptt=4, accumulate=2))
    said = describe(options, prepare(config, 64))
    assert said.startswith("6 lanes of 4 segments a step, the state carried on; 48 documents, ")
    assert said.endswith(" % of their positions padding")


def test_lanes_are_not_for_fsdp() -> None:
    with pytest.raises(ValueError, match=r"trainer=fsdp gathers .*: use trainer=ddp"):
        TrainerConfig(strategy="fsdp", tbptt=2)
