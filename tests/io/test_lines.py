"""Tests lines for people in a file and in terminals of several widths."""

import os
import sys
from io import StringIO

import pytest

from rwkv.io.lines import COLUMN, count_of, escape_controls, labelled_line, wrap_labelled, wrap_text

TEXT = "4 layers, 192 wide, 2,712,576 parameters, vocabulary 2048, from " + "a_long_path/" * 8


@pytest.mark.skipif(sys.platform == "win32", reason="it has no pseudo-terminals of this kind")
@pytest.mark.parametrize("columns", [40, 80, 81, 132])
def test_a_terminal_breaks_a_line_between_words_and_keeps_the_column(columns: int) -> None:
    import fcntl
    import pty
    import struct
    import termios

    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(there, "w") as stream:
        first, *others = labelled_line("model", TEXT, stream).splitlines()
        unwrapped = labelled_line("model", TEXT, StringIO())
        assert wrap_labelled(unwrapped, stream).splitlines() == [first, *others], "a sweep must wrap a run's line the same way"
        assert wrap_labelled(TEXT, stream) == TEXT, "wrap_labelled must leave text without a label"
        lines = wrap_text(TEXT, stream).splitlines()
    os.close(here)
    assert " ".join(lines) == TEXT
    assert all(len(line) <= columns or " " not in line for line in lines)
    assert first.startswith(f"{'model':{COLUMN}}4 layers")
    assert others
    assert all(line[:COLUMN].isspace() and not line[COLUMN].isspace() for line in others)
    assert all(len(line) <= columns or " " not in line.strip() for line in (first[COLUMN:], *others)), "a path must stay whole"
    assert " ".join([first, *map(str.strip, others)]) == f"{'model':{COLUMN}}{TEXT}"


@pytest.mark.skipif(sys.platform == "win32", reason="it has no pseudo-terminals of this kind")
def test_control_characters_of_a_model_s_text_do_not_reach_a_terminal() -> None:
    here, there = os.openpty()
    with os.fdopen(there, "w") as stream:
        assert escape_controls("a\x1b[2J\tb\x9b1m\x7f\nc", stream) == "a\u241b[2J\tb\ufffd1m\u2421\nc"
        assert escape_controls("a\r\nb\rc", stream) == "a\r\nb\u240dc", "text after a lone return overwrites the line"
        assert escape_controls("a\r", stream) == "a\r", "the next piece of the text may begin with a newline"
    os.close(here)
    assert escape_controls("a\x1b[2J", StringIO()) == "a\x1b[2J"


def test_a_file_gets_one_line() -> None:
    assert labelled_line("model", TEXT, StringIO()) == f"{'model':{COLUMN}}{TEXT}"
    assert wrap_text(TEXT, StringIO()) == TEXT


@pytest.mark.parametrize(("n", "text"), [(0, "0 steps"), (1, "1 step"), (1.0, "1 step"), (1500, "1,500 steps"),
                                         (0.5, "0.5 steps")])
def test_the_number_one_has_a_singular_noun(n: float, text: str) -> None:
    assert count_of(n, "step") == text
