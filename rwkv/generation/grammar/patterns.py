"""Converts regular expressions from ECMA 262 to Rust's crate regex, and builds patterns that exclude given texts."""

# ECMA 262 defines white space and line ends like this; Rust's crate regex differs
WHITE_SPACE = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
NUL = r"\x00"                            # excluded in each [^...], or llguidance 1.9.1 lets [^"] match an escaped "
NO_LINE_END = r"[^\n\r\u{2028}\u{2029}]"


def rust_pattern(pattern: str) -> str:
    """Converts an ECMA 262 pattern to the syntax of Rust's crate regex.

    The two differ in white space, in the dot, and, inside brackets, in [, && and ~~.
    """
    output = []
    in_class = False
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\" and place + 1 < len(pattern):
            escape = pattern[place:place + 2]
            output.append({r"\s": f"[{WHITE_SPACE}]", r"\S": f"[^{WHITE_SPACE}]"}.get(escape, escape))
            place += 2
            continue
        if in_class:
            in_class = character != "]"
            output.append(f"\\{character}" if character in "[&~" else character)
        elif character == "[":
            in_class = True
            output.append("[")
            if pattern[place + 1:place + 2] == "^":
                output.append(f"^{NUL}")
                place += 1
        else:
            output.append(NO_LINE_END if character == "." else character)
        place += 1
    return "".join(output)


def escaped(text: str) -> str:
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
    alternatives = [f"{escaped(first)}{exclusion_pattern(*rests)}"
                    for first, rests in sorted(following.items()) if "" not in rests[0]]
    alternatives.append(f"[^{NUL}{''.join(map(escaped, sorted(following)))}](?s:.*)")
    return f"({'|'.join(alternatives)}){'?' if may_end else ''}"
