"""Data: what is read and how it is split, token files that survive damage and company, and the order of the batches."""

import dataclasses
import errno
import gzip
import hashlib
import io
import math
import pickle
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rwkv import corpus
from rwkv.config import DataConfig
from rwkv.data import DataModule, EndlessPermutations, Windows
from rwkv.loss import IGNORED
from rwkv.tokens import Corpus, load, prepare

TEXT = "".join(f"line {number}: the quick brown fox — {number * number % 97}\n" for number in range(400))
ROOT = Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "text.txt").write_bytes(TEXT.encode())
    return DataConfig(name="text", path=str(tmp_path / "text.txt"), tokenizer="char", batch_size=4,
                      cache_dir=str(tmp_path / "cache"))


def with_text(config: DataConfig, content: bytes) -> DataConfig:
    Path(str(config.path)).write_bytes(content)
    return config


def module(config: DataConfig, ctx_len: int = 16, seed: int = 0) -> DataModule:
    return DataModule(prepare(config, ctx_len), config, ctx_len, seed)


def tokens_of(prepared: Corpus) -> tuple[list[int], list[int]]:
    return load(prepared.train).tolist(), load(prepared.val).tolist()


# What is read


def test_a_file_is_split_at_nine_tenths_of_its_characters(config: DataConfig) -> None:
    text = corpus.read(config)
    cut = int(len(TEXT) * 0.9)
    assert (text.train, text.val) == ([TEXT[:cut]], [TEXT[cut:]])
    assert text.sha256 == hashlib.sha256(TEXT.encode()).hexdigest()


def test_the_standard_library_is_split_by_file() -> None:
    text = corpus.read(DataConfig())
    train, val = corpus.utf8_bytes(text.train), corpus.utf8_bytes(text.val)
    assert 5e6 < train + val < 20e6
    assert 0.1 <= val / (train + val) < 0.13
    assert any("class HTTPServer" in document for document in text.train + text.val)
    assert corpus.read(DataConfig()) == text


def test_only_sources_of_the_library_itself_are_read(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "sub/c.py", "test/d.py", "sub/tests/e.py", "encodings/f.py", "site-packages/g.py", "h.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(f"# {name}\r\n".encode())
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_bytes(b"")
    text = corpus.read_stdlib(tmp_path, 0.1)
    assert sorted(text.train + text.val) == ["# a.py\n", "# b.py\n", "# sub/c.py\n"]
    assert (len(text.train), len(text.val)) == (2, 1)


def test_a_new_file_leaves_the_order_of_the_others(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.py").write_text(name * 100)
    before = corpus.read_stdlib(tmp_path, 0.5)
    (tmp_path / "i.py").write_text("i")
    after = corpus.read_stdlib(tmp_path, 0.5)
    assert [document for document in after.val + after.train if document != "i"] == before.val + before.train


# What is kept


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_tokens_are_each_split_after_end_of_text(config: DataConfig, tokenizer: str) -> None:
    prepared = prepare(dataclasses.replace(config, tokenizer=tokenizer, vocab_size=300), 16)
    text = corpus.read(config)
    for split, ids in zip((text.train, text.val), tokens_of(prepared), strict=True):
        assert ids == [0, *prepared.tokenizer.encode(split[0])]
    sizes = prepared.sizes
    assert (sizes.train_tokens, sizes.val_tokens) == tuple(map(len, tokens_of(prepared)))
    assert (sizes.train_bytes, sizes.val_bytes) == tuple(len(split[0].encode()) for split in (text.train, text.val))
    assert sizes.gzip_bpb == 8 * len(gzip.compress(text.val[0].encode(), 9)) / sizes.val_bytes


def test_every_document_of_the_standard_library_follows_an_end_of_text(tmp_path: Path) -> None:
    config = DataConfig(tokenizer="byte", cache_dir=str(tmp_path))
    prepared, text = prepare(config, 128), corpus.read(config)
    train, val = (load(path).astype(np.uint8).tobytes() for path in (prepared.train, prepared.val))
    assert train == b"".join(b"\0" + document.encode() for document in text.train)
    assert val == b"".join(b"\0" + document.encode() for document in text.val)
    assert f"{len(text.val)} of them for validation" in prepared.describe()


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight(config: DataConfig) -> None:
    prepared = prepare(dataclasses.replace(config, tokenizer="byte"), 16)
    assert prepared.bits_per_byte(math.log(256)) == pytest.approx(8)


def test_a_wide_vocabulary_takes_wider_integers(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(prepare(config, 16).train).dtype == np.uint16
    with_text(config, "".join(map(chr, range(0x20000, 0x20000 + 70_000))).encode())
    assert load(prepare(config, 16).train).dtype == np.uint32


def test_what_is_cached_is_not_made_again(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(config, tokenizer="bpe", vocab_size=300)
    first = prepare(config, 16)
    monkeypatch.setattr("rwkv.tokens._encode", None)
    monkeypatch.setattr("rwkv.tokenizer.JsonTokenizer.train", None)
    second = prepare(config, 16)
    assert (second.sizes, second.tokenizer.hash, second.train) == (first.sizes, first.tokenizer.hash, first.train)
    assert sorted(path.suffix for path in Path(config.cache_dir).iterdir()) == [".json", ".json", ".npy", ".npy"]


def test_other_text_split_or_tokenizer_is_another_entry(config: DataConfig) -> None:
    others = [config, dataclasses.replace(config, tokenizer="byte"), dataclasses.replace(config, val_fraction=0.2)]
    paths = {prepare(other, 16).train for other in others}
    paths.add(prepare(with_text(config, TEXT.replace("fox", "cat").encode()), 16).train)
    assert len(paths) == 4


DAMAGE = {
    "truncated": lambda content: content[:-10],
    "emptied": lambda content: b"",
    "a bit flipped": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "longer": lambda content: content + b"\0" * 64,
    "overwritten": lambda content: b"?" * len(content),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("victim", ["*-train.npy", "*-val.npy", "tokens-*.json", "bpe-*.json"])
def test_a_damaged_file_is_made_again(config: DataConfig, victim: str, damage) -> None:
    config = dataclasses.replace(config, tokenizer="bpe", vocab_size=300)
    before = prepare(config, 16)
    expected = tokens_of(before)
    (path,) = Path(config.cache_dir).glob(victim)
    path.write_bytes(damage(path.read_bytes()))
    after = prepare(config, 16)
    assert tokens_of(after) == expected
    assert after.sizes == before.sizes


def test_an_interrupted_write_leaves_nothing_behind(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: BinaryIO, arr: np.ndarray) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match=r"cannot write .*: No space left on device; data\.cache_dir"):
        prepare(config, 16)
    assert list(Path(config.cache_dir).iterdir()) == []


def test_another_run_may_finish_in_the_middle_of_a_write(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    save, others = np.save, []

    def overtaken(file: BinaryIO, arr: np.ndarray) -> None:
        file.write(b"half of it")
        monkeypatch.setattr(np, "save", save)
        others.append(prepare(config, 16))
        file.seek(0)
        save(file, arr)

    monkeypatch.setattr(np, "save", overtaken)
    mine = prepare(config, 16)
    assert others == [dataclasses.replace(mine, tokenizer=others[0].tokenizer)]
    assert tokens_of(mine)[1] == [0, *mine.tokenizer.encode(corpus.read(config).val[0])]


def test_two_runs_may_start_at_once(config: DataConfig, tmp_path: Path) -> None:
    script = ("import sys, time; from pathlib import Path\n"
              "from rwkv.config import DataConfig; from rwkv.tokens import prepare\n"
              "Path(sys.argv[3]).touch()\n"
              "while not Path(sys.argv[4]).exists(): time.sleep(0.001)\n"
              "print(prepare(DataConfig(name='text', path=sys.argv[1], vocab_size=400, cache_dir=sys.argv[2]), 16).sizes)")
    ready, go = [tmp_path / "ready0", tmp_path / "ready1"], tmp_path / "go"
    runs = [subprocess.Popen([sys.executable, "-c", script, str(config.path), config.cache_dir, mark, go], cwd=ROOT,
                             stdout=subprocess.PIPE, text=True) for mark in ready]
    deadline = time.monotonic() + 60
    while not all(mark.exists() for mark in ready) and time.monotonic() < deadline:
        time.sleep(0.001)
    go.touch()
    printed = [run.communicate(timeout=60)[0] for run in runs]
    alone = prepare(dataclasses.replace(config, tokenizer="bpe", vocab_size=400), 16)
    assert printed == [f"{alone.sizes}\n"] * 2
    assert not list(Path(config.cache_dir).glob(".*"))


# What is refused


WRONG = {
    "missing": (None, r"cannot read data\.path=.*text\.txt: No such file or directory"),
    "empty": (b"", r"data\.path=.*text\.txt is empty"),
    "one character": (b"a", "has 1 characters: too few to split"),
    "latin-1": ("name,ort\nJosé,Köln\n".encode("latin1") * 99, r"not UTF-8: its byte 12 is 0xe9; convert it, .* iconv"),
    "short": (b"abcdefghij" * 10, r"the validation text is shorter .* at most 11 tokens, and model\.ctx_len=16 needs 17"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_gets_a_sentence(config: DataConfig, content: bytes | None, message: str) -> None:
    if content is None:
        Path(str(config.path)).unlink()
    else:
        with_text(config, content)
    with pytest.raises(ValueError, match=message):
        prepare(config, 16)
    assert not Path(config.cache_dir).exists()


def test_text_too_short_once_tokenised_gets_a_sentence(config: DataConfig) -> None:
    with_text(config, b"the same line again\n" * 300)
    with pytest.raises(ValueError, match=r"the validation text is shorter .* has \d+ tokens, .*=500 needs 501"):
        prepare(dataclasses.replace(config, tokenizer="bpe", vocab_size=300), 500)


def test_a_folder_a_missing_path_and_a_useless_cache_dir_get_a_sentence(config: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Is a directory"):
        prepare(dataclasses.replace(config, path=str(tmp_path)), 16)
    with pytest.raises(ValueError, match=r"data=text needs data\.path=FILE"):
        prepare(dataclasses.replace(config, path=None), 16)
    with pytest.raises(ValueError, match=r"cannot write .*data\.cache_dir must be a folder"):
        prepare(dataclasses.replace(config, cache_dir=str(config.path)), 16)
    with pytest.raises(ValueError, match=r"no \.py sources: use data=text"):
        corpus.read_stdlib(tmp_path, 0.1)


# Windows


@given(size=st.integers(1, 60), ctx_len=st.integers(1, 20))
def test_windows_cover_every_token_once(tmp_path_factory: pytest.TempPathFactory, size: int, ctx_len: int) -> None:
    path = tmp_path_factory.getbasetemp() / "tokens.npy"
    tokens = np.random.default_rng(size).integers(0, 1000, size).astype(np.uint16)
    np.save(path, tokens)
    whole, every = Windows(path, ctx_len), Windows(path, ctx_len, partial=True)
    assert len(whole) == (size - 1) // ctx_len
    targets = [target for index in range(len(every)) for target in every[index][1].tolist()]
    assert [target for target in targets if target != IGNORED] == tokens[1:].tolist()
    for index in range(len(whole)):
        x, y = whole[index]
        start = index * ctx_len
        assert x.tolist() == tokens[start:start + ctx_len].tolist()
        assert y.tolist() == tokens[start + 1:start + ctx_len + 1].tolist()


def test_windows_travel_to_a_worker_as_a_path(config: DataConfig) -> None:
    windows = Windows(prepare(config, 16).train, 16)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[3][0], windows[3][0])


def test_a_batch_is_int64_and_contiguous(config: DataConfig) -> None:
    x, y = next(iter(module(config).train_dataloader()))
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((4, 16), (4, 16), torch.int64, torch.int64)
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_validation_predicts_every_token_once_in_order(config: DataConfig) -> None:
    data = module(config)
    batches = list(data.val_dataloader())
    targets = torch.cat([y.flatten() for _, y in batches])
    assert targets[targets != IGNORED].tolist() == load(data.corpus.val)[1:].tolist()
    assert all(x.shape[0] <= 4 for x, _ in batches)


# Order


@given(size=st.integers(1, 40), batch_size=st.integers(1, 9), seed=st.integers(0, 5))
def test_every_index_once_in_each_epoch(size: int, batch_size: int, seed: int) -> None:
    drawn = [index for batch in EndlessPermutations(size, batch_size, 3 * size, seed) for index in batch]
    for start in range(0, len(drawn) - size + 1, size):
        assert sorted(drawn[start:start + size]) == list(range(size))


def test_the_order_hangs_on_the_seed_and_the_epoch() -> None:
    first, again, other = (list(EndlessPermutations(50, 50, 2, seed)) for seed in (0, 0, 1))
    assert first == again
    assert len({tuple(batch) for batch in [*first, *other, list(range(50))]}) == 5


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_one_order(world: int) -> None:
    together = list(EndlessPermutations(50, 2 * world, 30, 0))
    apart = [list(EndlessPermutations(50, 2, 30, 0, rank, world)) for rank in range(world)]
    for common, *each in zip(together, *apart, strict=True):
        assert sorted(common) == sorted(index for batch in each for index in batch)


@given(taken=st.integers(0, 60))
def test_a_sampler_continues_from_any_place(taken: int) -> None:
    sampler = EndlessPermutations(17, 3, 60, 0)
    iterator = iter(sampler)
    assert len(list(islice(iterator, taken))) == taken
    resumed = iter(sampler)
    resumed.load_state_dict(iterator.state_dict())
    assert list(resumed) == list(iterator)


# macOS starts workers afresh, Linux by a fork, which Python 3.12 and later warn of in a process with threads.
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_loader_continues_with_exactly_the_next_batch(config: DataConfig, workers: int) -> None:
    alone = [x for x, _ in module(config).train_dataloader()]
    data = module(dataclasses.replace(config, num_workers=workers))
    loader = data.train_dataloader()
    iterator = iter(loader)
    taken = [next(iterator)[0] for _ in range(7)]
    stored = io.BytesIO()
    torch.save(loader.state_dict(), stored)
    resumed = data.train_dataloader()
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert_equal([*taken, *(x for x, _ in resumed)], alone)


def assert_equal(batches: list[Tensor], expected: list[Tensor]) -> None:
    assert len(batches) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(batches, expected, strict=True))


def test_loaders_leave_the_global_random_state_alone(config: DataConfig) -> None:
    data, before = module(config), torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


class Recorder(lightning.LightningModule):
    """Learns nothing, and notes the batches that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return self.weight * 1

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAfter(lightning.Callback):
    def __init__(self, batches: int, path: Path) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: object) -> None:
        if args[-1] == self.batches - 1:
            trainer.save_checkpoint(self.path)


def seen_in(data: DataModule, steps: int, accumulate: int, save: SaveAfter | None = None, resume: Path | None = None) -> list:
    recorder = Recorder()
    trainer = lightning.Trainer(max_steps=steps, max_epochs=-1, accumulate_grad_batches=accumulate, accelerator="cpu",
                                logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, callbacks=save)
    trainer.fit(recorder, data, ckpt_path=resume, weights_only=True)
    return recorder.seen


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*does not have many workers", "ignore:GPU available but not used")
@pytest.mark.parametrize(("saved", "stopped", "steps", "accumulate"), [(13, 13, 300, 1), (5, 9, 9, 3), (300, 300, 310, 1)])
def test_lightning_resumes_where_the_checkpoint_was_saved(config: DataConfig, tmp_path: Path, saved: int, stopped: int,
                                                          steps: int, accumulate: int) -> None:
    """Across the end of an epoch, with accumulation, and on to more steps than were first asked for."""
    data, checkpoint = module(config), tmp_path / "saved.ckpt"
    whole = seen_in(data, steps, accumulate)
    before = seen_in(data, stopped, accumulate, SaveAfter(saved, checkpoint))
    assert before[:saved] + seen_in(data, steps, accumulate, resume=checkpoint) == whole
