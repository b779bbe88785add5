"""Tests of data=mix: sources and their kinds, the order of their windows, validation of each, and resuming."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from binidx_files import write
from hypothesis import given
from hypothesis import strategies as st
from programs import Run, compose, one_sentence
from training_runs import assert_same_training, done_here, losses, rows

from rwkv.config import DataConfig
from rwkv.data.loaders import DataModule
from rwkv.data.mixture import mixed_sources
from rwkv.data.mixture.windows import MixSampler
from rwkv.data.options import check_data
from rwkv.data.prepare import prepare
from rwkv.data.token_array import TokenArray
from rwkv.data.validation import limit_validation
from rwkv.data.windows import ShuffleSampler
from rwkv.errors import UserError

pytestmark = pytest.mark.thorough
LINES = [f"document {number} says {'again ' * (number % 7)}{number * number}" for number in range(80)]
TEXT = "".join(f"line {number}: the quick brown fox — {number * number % 97}\n" for number in range(200))
SOURCES = "data.sources=[{path: a.jsonl, weight: 0.6}, {name: ids, path: tokens, weight: 0.3}, {path: b.txt, weight: 0.1}]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    Path("b.txt").write_text(TEXT, encoding="utf-8")
    write(Path("tokens"), [[*f"number {number}\n".encode(), 0] for number in range(300)])
    return tmp_path


def mix(*sources: dict[str, Any], **options: Any) -> DataConfig:
    return DataConfig(name="mix", sources=[{"weight": 1, **source} for source in sources], tokenizer="byte", cache_dir="cache",
                      batch_size=4, **options)


# The option data.sources


def test_the_command_line_and_a_recipe_give_the_same_sources(folder: Path) -> None:
    Path("mine.yaml").write_text("data: mix\ndata.sources:\n- {path: a.jsonl, weight: 2}\n- {name: ß, path: büch er.txt, "
                                 "weight: 1, field: body}\n", encoding="utf-8")
    line = "data.sources=[{path: a.jsonl, weight: 2}, {name: 'ß', path: 'büch er.txt', weight: 1, field: body}]"
    one, other = compose("train", "data=mix", line).data, compose("train", "experiment=./mine.yaml").data
    assert one == other
    first, second = mixed_sources(one)
    assert (first.name, first.share, first.config.name, first.config.path) == ("a", 2 / 3, "jsonl", "a.jsonl")
    assert (second.name, second.config.name, second.config.field) == ("ß", "text", "body")


@pytest.mark.parametrize(("path", "kind", "name"), [
    ("a.jsonl", "jsonl", "a"), ("web/*.jsonl.gz", "jsonl", "web"), ("x.jsonl.zst", "jsonl", "x"), ("b.txt", "text", "b"),
    ("notes/**/*.md", "text", "notes"), ("t.parquet", "hf", "t"), ("ORG/NAME", "hf", "NAME"), ("tokens", "binidx", "tokens"),
    ("tokens.bin", "binidx", "tokens"), ("shards", "jsonl", "shards"), ("saved", "hf", "saved")])
def test_a_path_says_the_kind_and_the_name(folder: Path, path: str, kind: str, name: str) -> None:
    Path("shards/deep").mkdir(parents=True)
    for file in ("shards/README", "shards/.hidden", "shards/deep/part-2.jsonl.gz"):
        Path(file).touch()
    Path("saved").mkdir()
    Path("saved/state.json").touch()
    source, = mixed_sources(mix({"path": path}))
    assert (source.config.name, source.name) == (kind, name)
    other, = mixed_sources(mix({"path": path, "data": "text", "name": "mine"}))
    assert (other.config.name, other.name) == ("text", "mine")


@pytest.mark.parametrize(("sources", "named"), [
    ([], ("data.sources",)), ([{"path": "a.jsonl", "weight": 0}], ("weight", "positive", "0")),
    ([{"path": "a.jsonl", "weight": "much"}], ("weight", "much")),
    ([{"path": "a.jsonl", "weight": "1,5"}], ("weight", "'1,5'")),
    ([{"path": "a.jsonl", "weight": 1, "separator": False}], ("separator", "False")),
    ([{"path": "a.jsonl", "weight": float("nan")}], ("weight", "nan")),
    ([{"path": "a.jsonl", "weight": [1]}], ("weight", "[1]")),
    ([{"path": "a.jsonl", "weight": True}], ("weight",)),
    ([{"pth": "a.jsonl", "weight": 1}], ("pth", "path")), ([{"weight": 1}], ("data.sources[0]", "path")),
    ([{"path": "a.jsonl", "weight": 1}, {"path": "deep/a.jsonl", "weight": 1}], ("name", "a")),
    ([{"path": "a.what", "weight": 1}], ("a.what", "data:")), ([{"path": "a.jsonl", "data": "chat", "weight": 1}], ("chat",)),
    ([{"path": "absent.jsonl", "weight": 1}], ("absent", "does not exist")),
    ([{"path": "a.jsonl", "val_fraction": 2, "weight": 1}], ("val_fraction", "2")),
    ([{"path": "a.jsonl", "name": "a/b", "weight": 1}], ("name", "a/b")), (["a.jsonl"], ("a.jsonl",)),
    ([{"path": "tokens", "weight": 1}], ("tokens", "data.tokenizer"))])
def test_a_wrong_source_is_reported_in_one_sentence(folder: Path, sources: list[Any], named: tuple[str, ...]) -> None:
    of_ids = sources == [{"path": "tokens", "weight": 1}]
    config = DataConfig(name="mix", sources=sources, tokenizer="bpe" if of_ids else "byte")
    with pytest.raises(UserError) as caught:
        check_data(config)
    assert all(name in str(caught.value) for name in named)
    assert "\n" not in str(caught.value)


def test_a_path_that_needs_quotes_and_options_that_conflict_are_named(folder: Path, run: Run) -> None:
    one_sentence(run("train", "data=mix", "data.sources=[{path: büch.txt, weight: 1}]"), "data.sources", "quotes")
    one_sentence(run("train", "data=mix", SOURCES, "trainer.tbptt=2"), "trainer.tbptt", "data=mix")
    one_sentence(run("train", "data=mix", SOURCES, "data.path=b.txt"), "data.path", "data.sources")
    one_sentence(run("train", "data=text", "data.path=b.txt", SOURCES), "data.sources", "data=mix")


# The corpus


def test_each_source_is_split_as_in_a_run_on_it_alone(folder: Path) -> None:
    config = mix({"path": "a.jsonl"}, {"path": "tokens", "val_fraction": 0.05}, {"path": "b.txt", "weight": 3})
    corpus = prepare(config, 16)
    assert [part.share for part in corpus.parts] == [0.2, 0.2, 0.6]
    for part, source in zip(corpus.parts, mixed_sources(config), strict=True):
        alone = prepare(source.config, 16)
        assert (part.corpus.train[:].tolist(), part.corpus.val[:].tolist()) == (alone.train[:].tolist(), alone.val[:].tolist())
    for split in ("train", "val"):
        whole, parts = getattr(corpus, split), [getattr(part.corpus, split) for part in corpus.parts]
        assert whole[:].tolist() == list(itertools.chain.from_iterable(part[:].tolist() for part in parts))
        begins = [0, *itertools.accumulate(map(len, parts))]
        assert whole.starts.tolist() == [start + begin for part, begin in zip(parts, begins, strict=False)
                                         for start in part.starts.tolist()]
    assert corpus.sizes.train_tokens == len(corpus.train)


def test_validation_leaves_out_what_another_source_trains_on(folder: Path) -> None:
    Path("more.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in [*reversed(LINES), "only here"]))
    write(Path("ids"), [[*line.encode(), 0] for line in LINES[:40]], "int32")
    for _ in range(2):                   # the second round reads the cached hashes
        corpus = prepare(mix({"path": "a.jsonl"}, {"path": "more.jsonl"}, {"path": "ids"}, val_fraction=0.4), 16)
        train, val = ([{*bytes(getattr(part.corpus, split)[:].tolist()).strip(b"\0").split(b"\0")} for part in corpus.parts]
                      for split in ("train", "val"))
        for source, other in itertools.permutations(range(3), 2):
            assert not val[source] & train[other]
        assert all(val)
        for part, documents in zip(corpus.parts[:2], val, strict=False):
            assert part.corpus.sizes.val_bytes == sum(map(len, documents))
            assert part.corpus.sizes.val_tokens == len(part.corpus.val)
            assert len(part.corpus.val.starts) == len(documents)
    with pytest.raises(UserError, match="other sources"):
        prepare(mix({"path": "a.jsonl", "val_fraction": 0.05}, {"path": "a.jsonl", "name": "b", "val_fraction": 0.03}), 64)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
@pytest.mark.parametrize("end", ["\n", "\r\n\r\n", " "])
def test_copies_in_other_sources_may_differ_in_white_space(folder: Path, tokenizer: str, end: str) -> None:
    Path("shelf").mkdir()
    for number, line in enumerate(LINES):
        Path("shelf", f"{number}.txt").write_text(line + end, newline="")
    config = mix({"path": "a.jsonl"}, {"path": "shelf"}, val_fraction=0.4)
    corpus = prepare(dataclasses.replace(config, tokenizer=tokenizer, vocab_size=300), 16)
    train, val = ([{corpus.tokenizer.decode([*ids]).strip() for ids in documents(getattr(part.corpus, split))}
                   for part in corpus.parts] for split in ("train", "val"))
    assert all(val)
    assert not val[0] & train[1]
    assert not val[1] & train[0]


def documents(tokens: TokenArray) -> list[list[int]]:
    """Returns the ids of each document, without the end_of_text before it."""
    return [tokens[begin + 1:end].tolist() for begin, end in itertools.pairwise(tokens.bounds.tolist())]


def test_a_tokenizer_is_made_from_the_text_of_all_sources(folder: Path) -> None:
    for name in ("char", "bpe"):
        config = dataclasses.replace(mix({"path": "a.jsonl"}, {"path": "b.txt"}), tokenizer=name, vocab_size=300)
        tokenizer = prepare(config, 16).tokenizer
        assert tokenizer.decode(tokenizer.encode("— document")) == "— document"
        assert prepare(config, 16).tokenizer.hash == tokenizer.hash


def test_part_of_validation_is_part_of_each_source(folder: Path) -> None:
    corpus = prepare(mix({"path": "a.jsonl", "weight": 3}, {"path": "b.txt"}), 16)
    part = limit_validation(corpus, 100, 16)
    assert [len(one.corpus.val) for one in part.parts] == [76, 26]
    assert part.val[:].tolist() == [*corpus.parts[0].corpus.val[:76].tolist(), *corpus.parts[1].corpus.val[:26].tolist()]


# The order of windows


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), weights=st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
       world=st.sampled_from((1, 2, 3)), seed=st.integers(0, 99))
def test_every_source_has_its_share_and_its_own_order(sizes: list[int], weights: list[float], world: int, seed: int) -> None:
    shares = [weight / sum(weights[:len(sizes)]) for weight in weights[:len(sizes)]]
    samplers = [MixSampler(sizes, shares, 6 // world, 60, seed, rank, world) for rank in range(world)]
    batches = [place for together in zip(*samplers, strict=True)
               for place in itertools.chain.from_iterable(zip(*together, strict=True))]
    assert batches == list(itertools.chain.from_iterable(MixSampler(sizes, shares, 6, 60, seed)))
    whole = len(batches) // 64 * 64
    counts = np.bincount([place.source for place in batches[:whole]], minlength=len(sizes))
    assert np.abs(counts - whole * np.array(shares)).max() <= len(sizes)
    first = [place.number for place in batches if place.source == 0]
    alone = itertools.chain.from_iterable(ShuffleSampler(sizes[0], 1, len(first), seed))
    assert first == list(alone), "the first source is read as in a run on it alone"


@given(taken=st.integers(0, 40))
def test_an_order_continues_from_any_place(taken: int) -> None:
    sampler = MixSampler([7, 50, 3], [0.2, 0.7, 0.1], 5, 60, 4)
    iterator = iter(sampler)
    for _ in range(taken):
        next(iterator)
    continued = iter(sampler)
    continued.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    assert list(continued) == list(iterator)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_batches_are_the_same_for_any_number_of_workers(folder: Path, workers: int) -> None:
    config = mix({"path": "a.jsonl", "weight": 2}, {"path": "b.txt"})
    corpus = prepare(config, 16)
    one, other = (DataModule(corpus, dataclasses.replace(config, num_workers=count), 16, seed=3).train_dataloader()
                  for count in (0, workers))
    alike = [(x.tolist(), y.tolist()) for x, y in one] == [(x.tolist(), y.tolist()) for x, y in other]
    assert alike


def test_a_run_does_not_continue_with_other_weights(folder: Path) -> None:
    one, other = (DataModule(prepare(config, 16), config, 16, 0) for config in (
        mix({"path": "a.jsonl"}, {"path": "b.txt"}), mix({"path": "a.jsonl"}, {"path": "b.txt", "weight": 2})))
    other.load_state_dict(other.state_dict())
    with pytest.raises(UserError, match=r"b 50 %.*b 66.67 %"):
        other.load_state_dict(one.state_dict())


# Whole runs


@pytest.mark.programs
def test_a_run_validates_each_source_and_continues_bit_for_bit(folder: Path) -> None:
    run = ("debug=fast", "trainer=cpu", "logger=csv", "kernel=conv1d", "data=mix", SOURCES, "model.n_layer=1",
           "model.ctx_len=16", "data.val_fraction=0.1", "data.cache_dir=cache", "trainer.val_tokens=null",
           "trainer.val_every=4", "trainer.checkpoint_every=4")
    whole = done_here(folder, "train", *run, "trainer.max_steps=8", "out_dir=whole")
    assert whole.status == 0, whole.error
    assert "ids: tokens, 300 documents" in whole.error
    assert done_here(folder, "train", *run, "trainer.max_steps=8", "out_dir=other", "trainer.val_every=4").status == 0
    Path("other/checkpoints/last.ckpt").unlink()
    Path("other/checkpoints/last-1.ckpt").rename("other/checkpoints/last.ckpt")
    again = done_here(folder, "train", "resume=auto", "out_dir=other", "trainer.max_steps=8")
    assert again.status == 0, again.error
    assert_same_training(folder / "whole", folder / "other", own=("/timemix/run/out_dir", "/timemix/run/resume"))
    corpus = prepare(compose("train", *run).data, 16)
    sizes = [len(part.corpus.val) - 1 for part in corpus.parts]
    last = next(row for row in reversed(rows(folder / "whole")) if row["val/loss"])
    of_each = [float(last[f"val/loss/{name}"]) for name in ("a", "ids", "b")]
    assert float(last["val/loss"]) == pytest.approx(np.average(of_each, weights=sizes), rel=1e-5)
    assert losses(folder / "other", "val/loss/ids") == losses(folder / "whole", "val/loss/ids")
