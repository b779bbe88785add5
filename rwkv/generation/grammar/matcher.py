"""Computes which of a tokenizer's tokens a grammar allows next, with llguidance.

`require_ends` rejects grammars with dead ends, which are beginnings of texts that no token can continue.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from random import Random

from rwkv.errors import UserError
from rwkv.generation.grammar import Grammar
from rwkv.generation.grammar.library import LibraryMatcher, llguidance_module, short_message
from rwkv.tokenizer.tokenizers import ByteTokenizer, Tokenizer

COMPILED = 32                            # compiled grammars in the cache
WALKS, STEPS = 48, 160                   # number of random walks that look for dead ends, and tokens in each
LAST_WALKS, LAST_STEPS = 4, 8_000        # further, longer walks if none of these has completed a text
# Limits of llguidance's work per token. A lexer state takes 1 to 2 kB.
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}

CHARACTERS = (*range(0x20, 0x7f), *range(0x80, 0xc0), *range(0xc2, 0xf5))       # all bytes that UTF-8 text needs
BYTES = ByteTokenizer()


class Vocabulary:
    """Adapts a tokenizer's vocabulary for llguidance.TokenizerWrapper.

    The wrapper reads `tokens` and the attributes whose names end in _id or _ids, and calls the object to encode a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        llguidance = llguidance_module()
        self.tokens = tokenizer.tokens_as_bytes()
        self.ends = tokenizer.ends
        self.eos_token_id = tokenizer.end_of_text
        self.bos_token_id = None
        self.special_token_ids = [index for index, token in enumerate(self.tokens) if not token]
        self._tokenizer = tokenizer
        self._ids = {token: index for index, token in reversed([*enumerate(self.tokens)]) if token}
        self._longest = max(map(len, self._ids))
        self.closing = [self._ids[mark] for mark in (b'"', b"}", b"]", b":", b",") if mark in self._ids]
        self.has_all_characters = all(bytes([byte]) in self._ids for byte in CHARACTERS)
        self.library = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        """Encodes a text that the grammar prescribes.

        The tokenizer encodes the text if the tokens join to exactly this text. Otherwise, the longest matching tokens are used.
        llguidance's mask then allows only these tokens or, in place of the last token, a longer token that begins with it.
        """
        with suppress(ValueError):
            ids = self._tokenizer.encode_within([text.decode()])[0]
            if b"".join(self.tokens[index] for index in ids) == text:
                return ids
        return self._longest_matches(text)

    def _longest_matches(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((text[:n] for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._ids), None)
            if token is None:
                break
            ids.append(self._ids[token])
            text = text[len(token):]
        return ids


class Matcher:
    """Follows one sequence through one or more grammars, all of which must allow each token."""

    def __init__(self, libraries: Sequence[LibraryMatcher], vocabulary: Vocabulary, stop_tokens: Sequence[int] = ()) -> None:
        self._libraries = libraries
        self._end = vocabulary.ends[0]
        self._ends = {*vocabulary.ends, *{*stop_tokens}.intersection(vocabulary.special_token_ids)}

    def allowed_mask(self) -> bytearray | None:
        """Returns a mask of the allowed next tokens, or None if no token is allowed.

        The mask has one bit per token, which is 1 if the token is allowed. The lowest bit of each byte comes first.
        """
        bits = -1
        for library in self._libraries:
            if library.is_error():
                return None
            mask = library.compute_bitmask()
            if library.is_error():       # the grammar is too complex; the mask has only end-of-text
                return None
            bits &= int.from_bytes(mask, "little")
        allowed = bytearray(bits.to_bytes(len(mask), "little"))
        complete = bool(allowed[self._end // 8] >> self._end % 8 & 1)
        for token in self._ends:
            allowed[token // 8] = allowed[token // 8] & ~(1 << token % 8) | complete << token % 8
        return allowed if any(allowed) else None

    @property
    def too_complex(self) -> bool:
        """Returns True if llguidance has reached one of its limits on the work per token."""
        return any(library.stop_reason() in ("ParserTooComplex", "LexerTooComplex") for library in self._libraries)

    @property
    def error(self) -> str:
        return next((library.get_error() for library in self._libraries if library.is_error()), "")

    def push(self, token: int) -> None:
        """Advances by one token, which must be allowed and must not end the sequence."""
        for library in self._libraries:
            library.consume_token(token)


def matcher_of(grammar: Grammar, tokenizer: Tokenizer, stop_tokens: Sequence[int] = ()) -> Matcher:
    """Returns a matcher for a new sequence, which may also end at `stop_tokens`. Raises UserError as cached_matchers() does."""
    libraries = [library.deep_copy() for library in cached_matchers(grammar, tokenizer)]
    return Matcher(libraries, vocabulary(tokenizer), stop_tokens)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Returns the tokenizer's Vocabulary from a cache, because creating one takes half a second for the World tokenizer."""
    return Vocabulary(tokenizer)


@lru_cache(maxsize=COMPILED)
def cached_matchers(grammar: Grammar, tokenizer: Tokenizer) -> list[LibraryMatcher]:
    """Returns llguidance's matchers for the grammar, from a cache. Each sequence needs copies of these matchers.

    Raises UserError as Grammar.check and require_ends do.
    """
    return compile_grammar(grammar, tokenizer)


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer) -> list[LibraryMatcher]:
    libraries = [_library(grammar, tokenizer)]           # raises for a keyword with a wrong value, such as {"type": 3}
    if (finite := grammar.with_finite_numbers()) is not None:
        libraries.append(_library(finite, tokenizer))
    if not vocabulary(tokenizer).has_all_characters:
        require_ends(grammar, libraries, tokenizer)
    return libraries


def _library(grammar: Grammar, tokenizer: Tokenizer) -> LibraryMatcher:
    llguidance = llguidance_module()
    limits = llguidance.LLParserLimits(**LIMITS)
    library: LibraryMatcher = llguidance.LLMatcher(vocabulary(tokenizer).library, grammar.definition, log_level=0,
                                                   limits=limits)
    if library.is_error():
        grammar.check()
        raise UserError(f"{grammar.parts[0].where}: {short_message(library.get_error())}")
    return library


def require_ends(grammar: Grammar, libraries: Sequence[LibraryMatcher], tokenizer: Tokenizer, walks: int = WALKS) -> None:
    """Raises UserError if random walks reach a dead end, where no token is allowed, or if no walk completes a text.

    At a dead end, the grammar has allowed a prefix that cannot be completed, or the tokenizer lacks a character. A walk need
    not complete a text if the tokenizer has all characters.
    """
    vocab = vocabulary(tokenizer)
    walk = partial(_walk, libraries, vocab, grammar)
    n_completed = sum(walk(seed, STEPS) for seed in range(walks))
    if not (n_completed or vocab.has_all_characters or any(walk(seed, LAST_STEPS, STEPS) for seed in range(LAST_WALKS))):
        raise UserError(f"{grammar.parts[0].where}: the tokenizer's {len(vocab.tokens)} tokens cannot complete any allowed "
                        "text")


def _walk(libraries: Sequence[LibraryMatcher], vocab: Vocabulary, grammar: Grammar, seed: int, steps: int,
          closing: int | None = None) -> bool:
    """Draws at most `steps` random tokens. Returns True if these tokens complete a text.

    From the step `closing` on, tokens that close a string, list or object are preferred.
    """
    draw = Random(seed)
    matcher = Matcher([library.deep_copy() for library in libraries], vocab)
    text = b""
    for step in range(steps):
        mask = matcher.allowed_mask()
        if mask is None:
            if matcher.too_complex:
                return False
            raise UserError(f"{grammar.parts[0].where}: {_dead_end_reason(grammar, text, vocab, matcher.error)}")
        close = closing is not None and step >= closing
        preferred = [token for token in (*vocab.ends, *vocab.closing) if mask[token // 8] >> token % 8 & 1] if close else []
        token = draw.choice(preferred) if preferred else _random_token(mask, draw)
        if token in vocab.ends:
            return True
        matcher.push(token)
        text += vocab.tokens[token]
    return False


def _random_token(mask: bytearray, draw: Random) -> int:
    start = draw.randrange(len(mask))
    byte = next(byte % len(mask) for byte in range(start, start + len(mask)) if mask[byte % len(mask)])
    return byte * 8 + draw.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


def _dead_end_reason(grammar: Grammar, text: bytes, vocab: Vocabulary, error: str) -> str:
    if vocab.has_all_characters:
        reason = f" ({short_message(error).partition(';')[0]})" if error else ""
        return f"no text may follow {text.decode(errors='replace')[-40:]!r}, so the text could not be completed{reason}"
    libraries = [_library(each, BYTES) for each in (grammar, grammar.with_finite_numbers()) if each]
    matcher = Matcher([library.deep_copy() for library in libraries], vocabulary(BYTES))
    n = 0
    while (mask := matcher.allowed_mask()) and n < len(text) and mask[text[n] // 8] >> text[n] % 8 & 1:
        matcher.push(text[n])
        n += 1
    prefix = text[:n].decode(errors="replace")[-40:]
    needed = [chr(byte) for byte in range(33, 127) if mask and mask[byte // 8] >> byte % 8 & 1]
    return f"the text {prefix!r} must continue with {' or '.join(needed[:10]) or 'nothing'}, which the tokenizer lacks"
