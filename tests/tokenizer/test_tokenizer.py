"""Tests of tokenizers: decode inverts encode, decoding id by id returns whole characters, and errors name the wrong input."""

import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from models import small_model
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rwkv.checkpoint.files import describe, read_checkpoint, tokenizer_of
from rwkv.config import OptimConfig
from rwkv.errors import UserError
from rwkv.pretrained import template_choice, template_line
from rwkv.tokenizer.tokenizers import END_OF_TEXT, ByteTokenizer, CharTokenizer, JsonTokenizer, Tokenizer
from rwkv.training.task import LanguageModel

SAMPLE = "def main(self):\n    return 'naïve café', \"你好, 世界\"  # 😀 👩‍👩‍👧\n" * 20
BPE = JsonTokenizer.train([SAMPLE], 320)
REPLACEMENT = "\ufffd"


def byte_fallback() -> JsonTokenizer:
    """Returns a tokenizer like SentencePiece's: words start with U+2581, and characters without a token are spelt in bytes."""
    tokens = ["</s>", "<unk>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581", *"abcdefghij", "ab", "\u2581c", "é"]
    library = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)},
                                              merges=[("a", "b"), ("\u2581", "c")], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["</s>", "<unk>"])
    return JsonTokenizer(library.to_str())


def like_neox() -> JsonTokenizer:
    """Returns a tokenizer like GPT-NeoX's file: NFC, byte-level, and runs of spaces as tokens that are matched first."""
    library = tokenizers.Tokenizer.from_str(JsonTokenizer.train([SAMPLE, "a \n b\t\n c\n\n d " * 50], 340).definition)
    library.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken(" " * length, normalized=True) for length in range(2, 8)])
    return JsonTokenizer(library.to_str())


FALLBACK = byte_fallback()
NEOX = like_neox()
EVERY = [ByteTokenizer(), CharTokenizer(SAMPLE), BPE, FALLBACK]
WORLD = [Tokenizer.named("world")] if find_spec("pyrwkv_tokenizer") else []


def kind(tokenizer: Tokenizer) -> str:
    """Returns the tokenizer's name in the names of tests."""
    return {id(NEOX): "neox", id(FALLBACK): "fallback"}.get(id(tokenizer), tokenizer.kind)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*map(decoder.push, ids), decoder.flush()]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_byte_decodes_any_text_back(text: str) -> None:
    assert ByteTokenizer().encode(text) == list(text.encode())
    assert ByteTokenizer().decode(text.encode()) == text


@given(st.text(st.sampled_from(SAMPLE)))
def test_char_decodes_text_of_its_characters_back(text: str) -> None:
    tokenizer = CharTokenizer(SAMPLE)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_text not in tokenizer.encode(text)


def test_char_ids_follow_the_sorted_characters_from_one_on() -> None:
    tokenizer = CharTokenizer("banana")
    assert tokenizer.characters == ["a", "b", "n"]
    assert (tokenizer.vocab_size, tokenizer.encode("nab")) == (4, [3, 1, 2])


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, FALLBACK, *WORLD], ids=kind)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters=f"\0{REPLACEMENT}\u2581")))
def test_decoding_id_by_id_shows_no_partial_character(tokenizer: Tokenizer, text: str) -> None:
    texts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(texts) == text
    assert not any(REPLACEMENT in piece for piece in texts)


def test_an_incomplete_character_is_replaced_at_the_end_or_at_what_cannot_continue_it() -> None:
    assert pieces(ByteTokenizer(), [0xE2, 0x82]) == ["", "", REPLACEMENT]
    assert pieces(ByteTokenizer(), [0xE2, 0x41]) == ["", f"{REPLACEMENT}A", ""]


@given(text=st.text())
def test_decoding_agrees_with_the_library(text: str) -> None:
    ids = FALLBACK.encode(text)
    assert FALLBACK.decode(ids) == FALLBACK._library.decode(ids)


@given(st.lists(st.integers(0, BPE.vocab_size - 1)))
def test_any_ids_decode_as_the_library_does(ids: list[int]) -> None:
    assert BPE.decode(ids) == BPE._library.decode(ids)


def test_added_tokens_keep_letters_of_the_byte_level_alphabet() -> None:
    library = tokenizers.Tokenizer.from_str(BPE.definition)
    library.add_tokens(["il\u00d6ve", "\u0120x", "\u00e9"])    # with the bytes D6, 20 and E9
    tokenizer = JsonTokenizer(library.to_str())
    text = "il\u00d6ve \u0120x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokens_as_bytes()[-2:] == ["il\u00d6ve".encode(), "\u0120x".encode()]
    assert tokenizer.decode(tokenizer.encode("\u9a6c")) == "\u9a6c"   # the bytes E9 A9 AC


@given(st.lists(st.integers(1, 255)))
def test_any_bytes_decode_as_python_does(ids: list[int]) -> None:
    assert ByteTokenizer().decode(ids) == bytes(ids).decode("utf-8", "replace")


@given(st.lists(st.integers(1, 255)))
def test_bytes_that_are_not_text_are_kept(ids: list[int]) -> None:
    assert ByteTokenizer().decode_bytes([0, *ids]) == bytes(ids)
    text = bytes(ids).decode("utf-8", "ignore")
    for tokenizer in (BPE, byte_fallback()):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode_bytes(encoded) == tokenizer.decode(encoded).encode()


def test_text_already_returned_does_not_change_the_text_that_follows() -> None:
    whole, half = FALLBACK.encode("中")[-3:], FALLBACK.encode("中")[-3]
    assert pieces(FALLBACK, [*whole, half]) == ["", "", "中", "", REPLACEMENT]


def test_a_decoder_holds_back_a_bounded_number_of_ids() -> None:
    half = FALLBACK.encode("€")[-3]
    decoder = FALLBACK.decoder()
    assert any(decoder.push(half) for _ in range(10))


@pytest.mark.parametrize("tokenizer", EVERY, ids=kind)
def test_end_of_text_has_no_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text == 0
    assert tokenizer.decode([0, *tokenizer.encode("ace"), 0]) == "ace"


def test_a_batch_is_encoded_as_each_text_alone() -> None:
    texts = ["", "a", SAMPLE, f"x{END_OF_TEXT}"]
    assert BPE.encode_batch(texts) == [BPE.encode(text) for text in texts]


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, NEOX, FALLBACK], ids=kind)
@given(text=st.text(st.sampled_from("ab1' \n\r\t\xa0\u2028\u0301é.=你😀"), max_size=80) | st.text(st.sampled_from("ab \n\t")),
       sizes=st.lists(st.integers(1, 9), min_size=1))
def test_a_text_is_encoded_in_parts_as_whole(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ends = [0, *itertools.takewhile(lambda end: end < len(text), itertools.accumulate(itertools.cycle(sizes))), len(text)]
    parts = itertools.starmap(lambda start, end: text[start:end], itertools.pairwise(ends))
    assert [index for ids in tokenizer.encode_stream(parts) for index in ids] == tokenizer.encode(text)


@pytest.mark.parametrize("tokenizer", [NEOX, *WORLD], ids=kind)
def test_a_text_with_lines_is_encoded_in_bounded_pieces(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.decode(ids)) for ids in tokenizer.encode_stream(["a line of text\n"] * 999)]
    assert sum(lengths) == 999 * 15
    assert max(lengths) < 1000


def test_a_text_split_at_lines_has_the_ids_of_the_whole_even_if_tokens_look_across_them() -> None:
    """Tokens look across lines because of words with newlines, a space put before each text, a normaliser, a token that strips
    spaces, or a token that spans the place.
    """
    for change in ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
                   {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
                   {"normalizer": normalizers.Replace("a\n", "b")}, {"token": AddedToken("ab", rstrip=True)},
                   {"token": AddedToken("b\nb")}):
        library = tokenizers.Tokenizer.from_str(BPE.definition)
        for name, part in change.items():
            library.add_tokens([part]) if name == "token" else setattr(library, name, part)
        tokenizer = JsonTokenizer(library.to_str())
        assert [index for ids in tokenizer.encode_stream(["ab\n", "b a\n"]) for index in ids] == tokenizer.encode("ab\nb a\n")


@given(text=st.text())
def test_ids_equal_the_library_s(text: str) -> None:
    for tokenizer in (BPE, NEOX):
        library = tokenizers.Tokenizer.from_str(tokenizer.definition)
        assert tokenizer.encode(text) == library.encode(text).ids


def test_gpt_neox_ids_equal_the_library_s(request: pytest.FixtureRequest) -> None:
    """The text has many scripts. benchmarks/tokenization.py compares random strings."""
    path = request.config.getoption("--neox")
    if not path:
        pytest.skip("pytest --neox FILE, with GPT-NeoX's 20B_tokenizer.json, compares its ids")
    tokenizer, library = Tokenizer.named(path), tokenizers.Tokenizer.from_file(path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50277, 0)
    assert tokenizer.encode("Hello world") == [12092, 1533]
    for text in (SAMPLE, SAMPLE.replace(" ", "   "), "".join(map(chr, range(0x2000)))):
        assert tokenizer.encode(text) == library.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == library.normalizer.normalize_str(text)


@pytest.mark.parametrize("tokenizer", [*EVERY, *WORLD], ids=kind)
def test_a_description_restores_the_tokenizer(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert (again.hash, again.vocab_size, again.kind) == (tokenizer.hash, tokenizer.vocab_size, tokenizer.kind)
    assert again.encode(SAMPLE) == tokenizer.encode(SAMPLE)


def test_different_tokenizers_have_different_hashes() -> None:
    different = [*EVERY, CharTokenizer("ab"), JsonTokenizer.train([SAMPLE], 300)]
    assert len({tokenizer.hash for tokenizer in different}) == len(different)


def test_a_file_of_any_layout_is_read_and_its_truncation_ignored(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(BPE.definition)
    library.enable_truncation(3)
    library.enable_padding(length=9999)
    path = tmp_path / "tokenizer.json"
    path.write_text(library.to_str(pretty=True), encoding="utf-8")
    assert Tokenizer.named(str(path)).encode(SAMPLE) == BPE.encode(SAMPLE)


def test_bpe_dropout_of_a_file_is_ignored() -> None:
    """A tokenizer that was trained with dropout would give a text other ids in each call."""
    definition = json.loads(BPE.definition)
    definition["model"]["dropout"] = 0.9
    tokenizer = JsonTokenizer(json.dumps(definition))
    assert tokenizer.encode(SAMPLE) == BPE.encode(SAMPLE)
    assert tokenizer.encode_within([SAMPLE]) == BPE.encode_within([SAMPLE])


WRONG = {
    "no separator": '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
    "not JSON": "def main",
    "other JSON": '{"a": 1}',
    "truncated": BPE.definition[:1000],
    "a huge id": '{"model": {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "a": 4294967295}, "unk_token": "a"}}',
    "a Git LFS pointer": "version https://git-lfs.github.com/spec/v1\n",
    "empty": "",
    # the library raises a BaseException that is not an Exception
    "a panic of the library": json.dumps(json.loads(BPE.definition) | {
        "model": json.loads(BPE.definition)["model"] | {"continuing_subword_prefix": "longer than any token"}}),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        Tokenizer.named(str(path))
    assert "tokenizer.json" in str(error.value)


def test_a_missing_or_binary_file_and_an_unknown_name_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name in (str(tmp_path / "missing.json"), str(tmp_path / "binary.json"), "bpee"):
        with pytest.raises(UserError) as error:
            Tokenizer.named(name, "data.tokenizer")
        assert name in str(error.value)
    with pytest.raises(UserError):
        JsonTokenizer.train(["a"], 100)


def test_a_vocabulary_without_a_token_for_a_word_is_an_error() -> None:
    tokenizer = JsonTokenizer(tokenizers.Tokenizer(models.WordLevel({END_OF_TEXT: 0}, unk_token="[UNK]")).to_str())
    with pytest.raises(UserError):
        tokenizer.encode("word")


def test_the_place_of_a_character_is_counted_over_all_parts_of_a_text() -> None:
    with pytest.raises(UserError, match="character 5 "):
        list(ByteTokenizer().encode_stream(["abc\n", "d\0"]))


def test_characters_that_cannot_be_encoded_are_named() -> None:
    with pytest.raises(UserError, match="'z', '€'"):
        CharTokenizer("ab").encode("a€z")
    with pytest.raises(UserError, match="character 1 "):
        ByteTokenizer().encode("a\0")
    for tokenizer in EVERY:
        with pytest.raises(UserError, match="character 1 "):
            tokenizer.encode_batch(["a\ud800"])


@pytest.mark.parametrize("tokenizer", EVERY, ids=kind)
@pytest.mark.parametrize("beyond", [-1, 0, 10 ** 6])
def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer, beyond: int) -> None:
    wrong = beyond if beyond < 0 else tokenizer.vocab_size + beyond
    with pytest.raises(UserError, match=f" {wrong} "):
        tokenizer.decode([wrong])


@pytest.mark.parametrize("definition", [{}, {"kind": "world"}, {"kind": "char"}, {"kind": "json", "definition": 3}, []])
def test_another_definition_is_an_error(definition: dict) -> None:
    with pytest.raises(UserError):
        Tokenizer.from_dict(definition)


# With a checkpoint


def test_a_checkpoint_s_own_tokenizer_is_used_and_another_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "model.ckpt", tmp_path / "other.json"
    small_model("conv1d", NEOX.vocab_size).save_pretrained(path, BPE)
    other.write_text(JsonTokenizer.train([SAMPLE[::-1]], 320).definition, encoding="utf-8")
    same = tmp_path / "same.json"
    same.write_text(json.dumps(json.loads(BPE.definition), indent=4), encoding="utf-8")
    checkpoint = read_checkpoint(path)
    assert tokenizer_of(checkpoint).hash == tokenizer_of(checkpoint, str(same)).hash == BPE.hash
    with pytest.raises(UserError):
        tokenizer_of(checkpoint, str(other))
    checkpoint.tokenizer = NEOX.to_dict()
    with pytest.raises(UserError):
        tokenizer_of(checkpoint)


@pytest.mark.parametrize(("vocab_size", "suggested"), [(50277, "20B_tokenizer.json"), (256, "FILE.json")])
def test_weights_alone_need_a_tokenizer_to_be_named(tmp_path: Path, vocab_size: int, suggested: str) -> None:
    small_model("conv1d", vocab_size, n_layer=1, n_embd=2).save_pretrained(tmp_path / "bare.pth")
    checkpoint = read_checkpoint(tmp_path / "bare.pth")
    with pytest.raises(UserError, match=rf"bare\.pth.*tokenizer={suggested}"):
        tokenizer_of(checkpoint)
    with pytest.raises(UserError):
        tokenizer_of(checkpoint, "neox")
    if vocab_size > 256:
        with pytest.raises(UserError):
            tokenizer_of(checkpoint, "byte")
    else:
        assert tokenizer_of(checkpoint, "byte").hash == ByteTokenizer().hash


def test_a_line_states_the_template_and_the_context_length_of_a_checkpoint(tmp_path: Path) -> None:
    model = small_model("conv1d", 256, n_layer=1, n_embd=2)
    for name, length in (("rwkv7-g1k-0.1b-ctx25600.pth", "25,600"), ("bare.pth", None), ("rwkv7-g1k.safetensors", "32")):
        model.save_pretrained(tmp_path / name)           # only the last file has the configuration
        checkpoint = read_checkpoint(tmp_path / name)
        line = template_line(checkpoint, template_choice(checkpoint))
        assert line.startswith("g1 (" if "g1k" in name else "world (")
        assert f"up to {length} tokens" in line if length else "tokens" not in line


def test_weights_without_a_tokenizer_and_with_world_s_vocabulary_size_use_world(tmp_path: Path) -> None:
    pytest.importorskip("pyrwkv_tokenizer", reason="pyrwkv-tokenizer, which carries the vocabulary, is not installed")
    small_model("conv1d", 65536, n_layer=1, n_embd=2).save_pretrained(tmp_path / "bare.pth")
    checkpoint = read_checkpoint(tmp_path / "bare.pth")
    assert tokenizer_of(checkpoint).hash == Tokenizer.named("world").hash
    with pytest.raises(UserError):
        tokenizer_of(checkpoint, "byte")


def test_a_run_does_not_go_on_with_another_tokenizer() -> None:
    """The tokenizer differs, for example, if the text that a bpe was trained on has changed since."""
    task = LanguageModel(small_model("conv1d", BPE.vocab_size), OptimConfig(), 1, 1.0)
    task.entry = describe({}, BPE.vocab_size, BPE)
    task.on_load_checkpoint({"timemix": describe({}, BPE.vocab_size, BPE)})
    ending = JsonTokenizer(FALLBACK.definition, end_of_text="<unk>")
    for own, other in ((BPE, NEOX), (FALLBACK, ending)):
        task.entry = describe({}, own.vocab_size, own)
        with pytest.raises(UserError):
            task.on_load_checkpoint({"timemix": describe({}, other.vocab_size, other)})
