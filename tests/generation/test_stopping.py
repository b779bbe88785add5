"""Tests of stop strings: a text ends before the first complete stop string, however the text is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from rwkv.generation.stopping import StopStrings

TEXTS = st.text("abc", max_size=30)


def show(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    stopping, text = StopStrings(stops), ""
    for piece in pieces:
        text += stopping.push(piece)
        if stopping.matched is not None:
            return text, stopping.matched
    return text + stopping.flush(), None


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reads letter by letter until the text so far ends with a stop string, and chooses the longest such string.

    Returns the text before the stop string, and the stop string.
    """
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[:end - len(longest)], longest
    return text, None


@given(st.lists(TEXTS, max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_complete_stop_string(pieces: list[str], stops: list[str]) -> None:
    assert show(pieces, stops) == first_complete("".join(pieces), stops)


def test_a_possible_stop_string_is_held_back_until_it_is_decided() -> None:
    stopping = StopStrings(["\n\nUser:"])
    assert [stopping.push(piece) for piece in ("Hello", "\n", "\nU", "nited", "\n\nUs")] == ["Hello", "", "", "\n\nUnited", ""]
    assert stopping.flush() == "\n\nUs"


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    assert StopStrings(["END"]).push("the E") == "the "
    assert StopStrings([]).push("all of it") == "all of it"
