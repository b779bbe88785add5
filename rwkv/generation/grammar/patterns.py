"""Converts regular expressions from ECMA 262 to Rust's crate regex, and builds patterns that exclude given texts.

Rust's crate has no lookaheads. Lookaheads at the beginning of a pattern, such as those of zod's emails and of rules for
passwords, become further patterns, all of which a text must match.
"""

import re

# ECMA 262's definition of white space and line terminators, from which Rust's crate regex differs
WHITE_SPACE = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
NUL = r"\x00"                            # excluded in each [^...], or llguidance 1.9.1 lets [^"] match an escaped "
ESCAPES = {r"\s": f"[{WHITE_SPACE}]", r"\S": f"[^{WHITE_SPACE}]", r"\<": "<", r"\>": ">"}         # in Rust, \< begins a word
NO_LINE_END = r"[^\n\r\u{2028}\u{2029}]"


PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)          # an escape, a bracket expression or a character
CHARACTER = r"(?:\\[^\w\s$|]|[^\\.\[\](){}*+?^$|])"         # a pattern of one literal character
LITERALS = re.compile(rf"{CHARACTER}+\$?(?:\|{CHARACTER}+\$?)*")
CONTAINED = re.compile(rf"\.\*({CHARACTER}{{1,2}})")
BRACKETS = r"\[(\^?)((?:\\.|[^\]\\])+)\]"
CONTAINED_CLASS = re.compile(rf"\.\*{BRACKETS}", re.DOTALL)
ONLY_CLASS = re.compile(rf"\^?{BRACKETS}([*+])\$", re.DOTALL)


def rust_patterns(pattern: str) -> list[str]:
    """Converts an ECMA 262 pattern to patterns of Rust's crate regex, all of which a text must match.

    There is more than one pattern if `pattern` begins with lookaheads. The result then matches the same single-line texts, but
    may match fewer others. A lookahead of any other kind remains in the result, and llguidance rejects it.
    """
    rest = pattern.removeprefix("^")
    conditions = []
    while rest.startswith(("(?=", "(?!")):
        inner, after = _split_group(rest)
        condition = rust_pattern(f"^(?:{inner})") if rest.startswith("(?=") else _negation(inner)
        if condition is None or not inner:
            return [rust_pattern(pattern)]
        conditions.append(condition)
        rest = after
    if not pattern.startswith("^") or _has_alternatives(rest):
        return [rust_pattern(pattern)]
    return [rust_pattern(f"^{rest}"), *conditions]


def _split_group(pattern: str) -> tuple[str, str]:
    """Splits a pattern that begins with a lookahead into the content of the lookahead and the rest of the pattern.

    The content is "" if the lookahead does not end.
    """
    depth = 0
    for part in PART.finditer(pattern):
        depth += (part[0] == "(") - (part[0] == ")")
        if depth == 0:
            return pattern[3:part.start()], pattern[part.end():]
    return "", ""


def _has_alternatives(pattern: str) -> bool:
    """Returns True if the pattern has a | outside of groups."""
    depth = 0
    for part in PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False


def _negation(pattern: str) -> str | None:
    """Returns a Rust pattern of the texts whose beginning does not match `pattern`, or None if no such pattern is known."""
    literal = re.sub(r"\\(.)", r"\1", pattern)
    if LITERALS.fullmatch(pattern):
        whole = {text for text in literal.split("|") if text.endswith("$")}
        return f"^{exclusion_pattern({*literal.split('|')} - whole, {text[:-1] for text in whole})}$"
    if CONTAINED.fullmatch(pattern):
        first, *second = map(escape_text, literal.removeprefix(".*"))
        if not second:
            return f"^[^{NUL}{first}]*$"
        beginning = first if second == [first] else f"{first}+"
        return f"^([^{NUL}{first}]|{beginning}[^{NUL}{first}{second[0]}])*({beginning})?$"
    if match := CONTAINED_CLASS.fullmatch(pattern):
        return rust_pattern(f"^[{'' if match[1] else '^'}{match[2]}]*$")
    if match := ONLY_CLASS.fullmatch(pattern):
        other = rust_pattern(f"[{'' if match[1] else '^'}{match[2]}]")
        return other if match[3] == "*" else f"^$|{other}"
    return None


def rust_pattern(pattern: str) -> str:
    """Converts an ECMA 262 pattern to the syntax of Rust's crate regex.

    The two differ in white space, in the dot, in \\< and \\>, and, inside brackets, in [, &&, ~~ and --.
    """
    output = []
    in_class = False
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\" and place + 1 < len(pattern):
            escape = pattern[place:place + 2]
            output.append(ESCAPES.get(escape, escape))
            place += 2
            continue
        if in_class:
            in_class = character != "]"
            if pattern.startswith("--", place):          # a range that ends with a hyphen; in Rust, -- subtracts
                output.append(r"-\-")
                place += 1
            else:
                output.append(f"\\{character}" if character in "[&~" else character)
        elif character == "[":
            in_class = True
            output.append("[")
            if pattern[place + 1:place + 2] == "^":
                output.append(f"^{NUL}")
                place += 1
            if pattern[place + 1:place + 2] == "-":      # would form a range with NUL
                output.append(r"\-")
                place += 1
        else:
            output.append(NO_LINE_END if character == "." else character)
        place += 1
    return "".join(output)


def escape_text(text: str) -> str:
    return "".join(character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}"
                   for character in text)


def exclusion_pattern(beginnings: set[str], texts: set[str]) -> str:
    """Returns a pattern for all texts that begin with none of `beginnings` and equal none of `texts`.

    The pattern matches such a text as a whole.
    """
    following: dict[str, tuple[set[str], set[str]]] = {}
    for i, group in enumerate((beginnings, texts)):
        for text in group:
            if text:
                following.setdefault(text[0], (set(), set()))[i].add(text[1:])
    may_end = "" not in texts
    if not following:
        return "(?s:.*)" if may_end else "(?s:.+)"
    alternatives = [f"{escape_text(first)}{exclusion_pattern(*rests)}"
                    for first, rests in sorted(following.items()) if "" not in rests[0]]
    alternatives.append(f"[^{NUL}{''.join(map(escape_text, sorted(following)))}](?s:.*)")
    return f"({'|'.join(alternatives)}){'?' if may_end else ''}"
