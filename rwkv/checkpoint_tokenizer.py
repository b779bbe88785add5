"""Which tokenizer goes with a checkpoint: the one that it carries, or a named one that may be it."""

from rwkv.checkpoint import Checkpoint, require_tokenizer
from rwkv.tokenizer import Tokenizer

SUGGESTED = {50277: "20B_tokenizer.json (a vocabulary of 50277 is that of the Pile models, GPT-NeoX's)",
             65536: "world (a vocabulary of 65536 is that of the World models)"}


def tokenizer_of(checkpoint: Checkpoint, name: str | None = None) -> Tokenizer:
    """The tokenizer that a checkpoint carries, or the one of that name (as in `Tokenizer.named`).

    Raises ValueError where there is none, where its hash is not the one that the checkpoint was saved with, and where it does
    not fit the vocabulary.
    """
    if name is not None:
        tokenizer, what = Tokenizer.named(name), f"tokenizer={name}"
    elif checkpoint.tokenizer is not None:
        tokenizer, what = Tokenizer.from_dict(checkpoint.tokenizer), "the tokenizer in the file"
    else:
        suggested = SUGGESTED.get(checkpoint.vocab_size, "FILE.json")
        raise ValueError(f"{checkpoint.path} carries no tokenizer: name its file with tokenizer={suggested}")
    require_tokenizer(checkpoint, tokenizer, what)
    return tokenizer
