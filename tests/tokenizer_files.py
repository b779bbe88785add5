"""Makes small files of the library `tokenizers`, one for each common kind, with special tokens and the letters a to h."""

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

LETTERS = "abcdefgh"
TEXT = "bad cab fed a beg dab ace bag\n"
LLAMA = ["<unk>", "<s>", "</s>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def sentencepiece_bpe(specials: list[str] = LLAMA) -> str:
    """Returns a file like Llama 2's: words begin with U+2581, and characters that the vocabulary lacks are encoded as bytes."""
    tokens = [*specials, *(f"<0x{value:02X}>" for value in range(256)), "\u2581", *LETTERS, "ab", "\u2581c", "\u2581b"]
    library = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)},
                                              [("a", "b"), ("\u2581", "c"), ("\u2581", "b")], unk_token="<unk>",
                                              byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    return _with(library, specials)


def unigram() -> str:
    """Returns a file like T5's, in which the special tokens are also pieces of the vocabulary."""
    specials = ["<pad>", "</s>", "<unk>"]
    pieces = [(name, 0.0) for name in specials] + [(piece, -2.0) for piece in ("\u2581", *LETTERS, *"<>/sunkpad")]
    library = tokenizers.Tokenizer(models.Unigram([*dict(pieces).items(), ("\u2581ca", -1.0)], unk_id=2))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    return _with(library, specials)


def wordpiece() -> str:
    tokens = [*BERT, *LETTERS, *(f"##{letter}" for letter in LETTERS), "cab"]
    library = tokenizers.Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    return _with(library, BERT)


def wordlevel() -> str:
    specials = ["[UNK]", "[SEP]", "[PAD]"]               # unk has id 0
    tokens = [*specials, *TEXT.split(), *LETTERS]
    library = tokenizers.Tokenizer(models.WordLevel({token: index for index, token in enumerate(dict.fromkeys(tokens))},
                                                    unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with(library, specials)


def word_end_bpe() -> str:
    """Returns a file like that of OpenAI's first GPT, in which words end with </w>.

    Merges can produce the special token </s> from its letters.
    """
    tokens = ["<unk>", "</s>", *"<>/s", "</", "s>", *LETTERS, *(f"{letter}</w>" for letter in f"{LETTERS}>s/<")]
    library = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)},
                                              [("<", "/"), ("s", ">"), ("</", "s>")], unk_token="<unk>",
                                              end_of_word_suffix="</w>"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    return _with(library, ["<unk>", "</s>"])


def chatml(specials: list[str] = CHATML, first: bool = True, ignore_merges: bool = False) -> str:
    """Returns byte-level BPE like Qwen's. With first=False, the special tokens have the last ids, as in Llama 3."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator([TEXT * 9], trainers.BpeTrainer(
        vocab_size=280, show_progress=False, special_tokens=specials if first else [],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return _with(library, specials)


def _with(library: tokenizers.Tokenizer, specials: list[str]) -> str:
    library.add_special_tokens(specials)
    return str(library.to_str())


KINDS = {"sentencepiece BPE": sentencepiece_bpe(), "unigram": unigram(), "wordpiece": wordpiece(), "wordlevel": wordlevel(),
         "word-end BPE": word_end_bpe(), "byte-level BPE": chatml(),
         "ignore_merges": chatml(["<|end_of_text|>", "<|eot_id|>"], first=False, ignore_merges=True)}
