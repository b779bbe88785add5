"""Tests of batches of windows: token arrays in many files, the windows, their order, and resuming from any position."""

import dataclasses
import errno
import io
import os
import pickle
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_arrays import token_array_of
from torch import Tensor

from rwkv.config import DataConfig
from rwkv.data.loaders import DataModule, require_workers
from rwkv.data.prepare import prepare
from rwkv.data.token_array import DocumentOffsets, Part, TokenArray
from rwkv.data.windows import ShuffleSampler, Windows
from rwkv.errors import UserError
from rwkv.model.loss import IGNORED

TEXT = "".join(f"line {number}: the quick brown fox — {number * number % 97}\n" for number in range(400))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return DataConfig(name="text", path=str(tmp_path / "text.txt"), tokenizer="char", batch_size=4,
                      cache_dir=str(tmp_path / "cache"))


def module(config: DataConfig, ctx_len: int = 16, seed: int = 0) -> DataModule:
    return DataModule(prepare(config, ctx_len), config, ctx_len, seed)


# Token arrays


@given(sizes=st.lists(st.integers(0, 9), max_size=6), bounds=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_many_files_read_as_one_array(tmp_path_factory: pytest.TempPathFactory, sizes: list[int],
                                     bounds: tuple[int, int]) -> None:
    numbers = iter(range(1000))
    parts = [np.array([next(numbers) for _ in range(size)], np.uint16) for size in sizes]
    whole, tokens = np.arange(sum(sizes)), token_array_of(tmp_path_factory.getbasetemp(), *parts)
    assert len(tokens) == len(whole)
    assert tokens[slice(*bounds)].tolist() == whole[slice(*bounds)].tolist()
    assert pickle.loads(pickle.dumps(tokens))[:].tolist() == whole.tolist()


def test_a_token_array_may_be_a_part_of_a_file(tmp_path: Path) -> None:
    np.arange(10, dtype=np.int32).tofile(tmp_path / "ids")
    np.save(tmp_path / "starts.npy", np.array([0, 3, 6, 8]))
    tokens = TokenArray([Part(tmp_path / "ids", "int32", 6, 4)], DocumentOffsets(tmp_path / "starts.npy", 2, 2, 6))
    assert (tokens[:].tolist(), tokens[1:3].tolist(), tokens.starts.tolist()) == ([6, 7, 8, 9], [7, 8], [0, 2])


# Windows


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), ctx_len=st.integers(1, 20))
def test_windows_cover_every_token_once(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], ctx_len: int) -> None:
    random = np.random.default_rng(sum(sizes))
    parts = [random.integers(0, 1000, size).astype(np.uint16) for size in sizes]
    tokens = np.concatenate(parts)
    array = token_array_of(tmp_path_factory.getbasetemp(), *parts)
    whole, every = Windows(array, ctx_len), Windows(array, ctx_len, partial=True)
    assert len(whole) == (len(tokens) - 1) // ctx_len
    targets = [target for index in range(len(every)) for target in every[index][1].tolist()]
    assert [target for target in targets if target != IGNORED] == tokens[1:].tolist()
    for index in range(len(whole)):
        x, y = whole[index]
        start = index * ctx_len
        assert x.tolist() == tokens[start:start + ctx_len].tolist()
        assert y.tolist() == tokens[start + 1:start + ctx_len + 1].tolist()


@given(size=st.integers(2, 60), ctx_len=st.integers(1, 20), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_every_epoch_has_the_same_pairs_cut_elsewhere(tmp_path_factory: pytest.TempPathFactory, size: int, ctx_len: int,
                                                      seed: int, epoch: int) -> None:
    """Each token is an input once per epoch, and its target is the next token, wherever the windows begin."""
    windows = Windows(token_array_of(tmp_path_factory.getbasetemp(), np.arange(size, dtype=np.uint16)), ctx_len, seed=seed)
    pairs = [windows[epoch * len(windows) + index] for index in range(len(windows))]
    x, y = (torch.cat(part).tolist() for part in zip(*pairs, strict=True)) if pairs else ([], [])
    assert sorted(x) == list(range(len(windows) * ctx_len))
    assert y == [token + 1 for token in x]


def test_epochs_and_seeds_are_cut_elsewhere(config: DataConfig) -> None:
    tokens = prepare(config, 16).train
    first = {(seed, epoch): Windows(tokens, 16, seed=seed)[epoch * ((len(tokens) - 1) // 16)][0].tolist()
             for seed in range(3) for epoch in range(4)}
    assert first[0, 0] == first[1, 0] == first[2, 0]
    assert len({tuple(x) for x in first.values()}) > 5


def test_windows_travel_to_a_worker_as_paths(config: DataConfig) -> None:
    windows = Windows(prepare(config, 16).train, 16)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[3][0], windows[3][0])


def test_validation_predicts_every_token_once_in_order(config: DataConfig) -> None:
    data = module(config)
    batches = list(data.val_dataloader())
    targets = torch.cat([y.flatten() for _, y in batches])
    assert targets[targets != IGNORED].tolist() == data.corpus.val[1:].tolist()
    assert all(x.shape[0] <= 4 for x, _ in batches)


# Order


@given(size=st.integers(1, 40), batch_size=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_number_comes_once_in_each_epoch(size: int, batch_size: int, seed: int) -> None:
    numbers = [number for batch in ShuffleSampler(size, batch_size, 3 * size, seed) for number in batch]
    for start in range(0, len(numbers) - size + 1, size):
        assert sorted(numbers[start:start + size]) == list(range(start, start + size))


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    first, again, other = ([[number % 50 for number in batch] for batch in ShuffleSampler(50, 50, 2, seed)]
                           for seed in (0, 0, 1))
    assert first == again
    assert len({tuple(batch) for batch in [*first, *other, list(range(50))]}) == 5


@given(size=st.integers(1, 50), batch_size=st.integers(1, 4), world=st.integers(1, 5), seed=st.integers(0, 3))
def test_processes_share_one_order(size: int, batch_size: int, world: int, seed: int) -> None:
    """In each step, the batches of all processes together are the whole batch of a single process."""
    together = list(ShuffleSampler(size, batch_size * world, 9, seed))
    apart = [list(ShuffleSampler(size, batch_size, 9, seed, rank, world)) for rank in range(world)]
    for common, *each in zip(together, *apart, strict=True):
        assert common == [index for place in zip(*each, strict=True) for index in place]


@given(taken=st.integers(0, 60))
def test_a_sampler_continues_from_any_place(taken: int) -> None:
    sampler = ShuffleSampler(17, 3, 60, 0)
    iterator = iter(sampler)
    assert len(list(islice(iterator, taken))) == taken
    resumed = iter(sampler)
    resumed.load_state_dict(iterator.state_dict())
    assert list(resumed) == list(iterator)


@pytest.mark.thorough
# On Linux, workers are forked. Since Python 3.12, a fork in a process with threads causes a warning.
@pytest.mark.parametrize(("workers", "later"), [(0, 0), (2, 2), (0, 2), (2, 1), (2, 0)])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_continues_with_exactly_the_next_batch(config: DataConfig, workers: int, later: int) -> None:
    alone = [x for x, _ in module(config).train_dataloader()]
    data = module(dataclasses.replace(config, num_workers=workers))
    loader = data.train_dataloader()
    iterator = iter(loader)
    first_batches = [next(iterator)[0] for _ in range(7)]
    stored = io.BytesIO()
    torch.save(loader.state_dict(), stored)
    resumed = module(dataclasses.replace(config, num_workers=later)).train_dataloader()
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert_equal([*first_batches, *(x for x, _ in resumed)], alone)
    assert not any(x.is_shared() for x in first_batches), "a container's /dev/shm is small"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.ENOSYS])
def test_workers_without_semaphores_are_refused(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Semaphores are missing in a container whose /dev/shm is full, read-only or missing."""
    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    require_workers(0)
    with pytest.raises(UserError, match=r"data\.num_workers=2 "):
        require_workers(2)


def assert_equal(batches: list[Tensor], expected: list[Tensor]) -> None:
    assert len(batches) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(batches, expected, strict=True))


def test_loaders_do_not_change_the_global_random_state(config: DataConfig) -> None:
    data, before = module(config), torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_does_not_continue_with_other_data(config: DataConfig) -> None:
    state = module(config).state_dict()
    module(config).load_state_dict(state)
    Path(str(config.path)).write_bytes(TEXT.replace("fox", "oxf").encode())
    with pytest.raises(UserError):
        module(config).load_state_dict(state)
