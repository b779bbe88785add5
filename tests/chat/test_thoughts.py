"""Tests the separation of reasoning from the answer, for any split into pieces, and the fields that request reasoning."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rwkv.chat.thoughts import (
    END,
    START,
    ThoughtParser,
    answer_message,
    parser_arguments,
    thoughts_at_end,
    thoughts_end,
    with_hint,
)

# a case has the end of the prompt, the generated text, the reasoning and the answer
ANSWERS: list[tuple[str, str, str, str]] = [
    ("", "Yes.", "", "Yes."), ("", " \n Yes.", "", "Yes."), ("", "", "", ""),
    ("", "<think>\n2 + 2\n\nis 4\n</think>\n\n4", "2 + 2\n\nis 4", "4"), ("", " <think>a</think>b", "a", "b"),
    ("", "<think>cut", "cut", ""), ("", "<think></think>4", "", "4"), ("", "<think>\n\n</think>\n4\n", "", "4\n"),
    ("", "a <think>b</think>", "", "a <think>b</think>"), ("", "<thin", "", "<thin"), ("", "<thinking>", "", "<thinking>"),
    ("", "</think>a", "", "</think>a"),
    ("<think", ">\na\n</think>\nb", "a", "b"), ("<think", ">a</thi", "a</thi", ""), ("<think", "", "", ""),
    ("<think", " without a bracket", "without a bracket", ""), ("<think", ">\n</think>\n4", "", "4"),
    ("<think", ">a</think>b</think>c", "a", "b</think>c"),
    ("<think", ">a < b </b> </think> c <think>d", "a < b </b>", "c <think>d"),
    ("<think>", "a</think>b", "a", "b"), ("<think>\n", "a", "a", ""), ("<think>\n", ">a</think>", ">a", ""),
    ("<think></think", ">\n4", "", "4"), ("<think></think", "4", "", "4"), ("<think>\n</think", ">> 4", "", "> 4"),
    ("<think>\n\n</think>\n\n", "> 4", "", "> 4"), ("<think></think>\n", "<think>a</think>b", "", "<think>a</think>b")]


def parse(start: str, pieces: list[str]) -> tuple[str, str]:
    parser = ThoughtParser(start)
    pairs = [parser.push(piece) for piece in pieces] + [parser.push("", last=True)]
    written = "".join(pieces)
    text = "".join(text for _, text in pairs)
    assert written[parser.text_place:] == text, "text_place must be where the text begins"
    assert parser.decided == len(written)
    return "".join(thoughts for thoughts, _ in pairs), text


@pytest.mark.parametrize(("start", "written", "thoughts", "text"), ANSWERS)
def test_reasoning_is_separated_from_the_text(start: str, written: str, thoughts: str, text: str) -> None:
    assert ThoughtParser(start).push(written, last=True) == (thoughts, text)
    assert parse(start, list(written)) == (thoughts, text)
    message = answer_message(start, written)
    assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, text.rstrip())


@pytest.mark.parametrize("answer", [written for start, written, _, _ in ANSWERS if not start])
def test_an_answer_that_is_cut_and_continued_has_the_same_thoughts_and_text(answer: str) -> None:
    inside = {place + cut for mark in (START, END) for place in range(len(answer)) if answer.startswith(mark, place)
              for cut in range(1, len(mark))}
    thoughts, text = ThoughtParser().push(answer, last=True)
    for cut in set(range(1, len(answer))) - inside:
        beginning, rest = answer[:cut], answer[cut:]
        if START.startswith(beginning.strip()):
            continue                     # the beginning is too short to decide
        first = ThoughtParser().push(beginning, last=True)
        start, continues = parser_arguments(beginning, thinks=True)
        parser = ThoughtParser(start, continues=continues)
        pairs = [*(parser.push(piece) for piece in rest), parser.push("", last=True)]
        second = ["".join(pair[part] for pair in pairs) for part in (0, 1)]
        assert "".join((first[0] + second[0]).split()) == "".join(thoughts.split()), beginning
        assert "".join((first[1] + second[1]).split()) == "".join(text.split()), beginning
        assert rest[parser.text_place:] == second[1]
        if continues and not start:
            assert second == ["", rest], "white space, too"


@given(st.sampled_from(["", "<think", "<think></think", "<think>\n"]), st.lists(st.one_of(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", ">", " ", "\n"]), st.text("a<>/ \n", max_size=4))))
@example("<think", ["a ", " </thi", "n b", " </", "think", "> ", " c"])
def test_the_pieces_do_not_matter(start: str, pieces: list[str]) -> None:
    assert parse(start, pieces) == ThoughtParser(start).push("".join(pieces), last=True)


def test_text_that_is_certain_is_shown_at_once() -> None:
    parser = ThoughtParser("<think")
    results = [parser.push(piece) for piece in (">", "\na", " b", "</", "b", "</think>", "\n", "c", " <think>")]
    assert results == [("", ""), ("a", ""), (" b", ""), ("", ""), ("</b", ""), ("", ""), ("", ""), ("", "c"), ("", " <think>")]


def test_without_thoughts_everything_is_text() -> None:
    assert ThoughtParser(thinks=False).push(" <think>a</think>", last=True) == ("", "<think>a</think>")


@pytest.mark.parametrize(("prompt", "beginning"), [
    ("Assistant: <think", "<think"), ("Assistant: <think>\n</think", "<think>\n</think"), ("bot\n<think>\n\n</think>\n\n",
     "<think>\n\n</think>\n\n"), ("<think>\n", "<think>\n"), ("Assistant:", ""), ("<think>a</think>", ""), ("<thinking", "")])
def test_the_beginning_of_thoughts_is_found_in_a_prompt(prompt: str, beginning: str) -> None:
    assert thoughts_at_end(prompt) == beginning


@pytest.mark.parametrize(("start", "ended"), [
    ("<think", "<think>\n</think>\n"), ("<think>\n", "<think>\n\n</think>\n"), ("<think></think", "<think></think>\n"),
    ("<think>\n\n</think>", "<think>\n\n</think>\n")])
def test_the_end_of_reasoning_completes_its_beginning_in_a_prompt(start: str, ended: str) -> None:
    assert start + thoughts_end(start) == ended
    assert ThoughtParser(ended).push("{}", last=True) == ("", "{}")


def test_a_hint_follows_the_last_text_of_the_user() -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c \n"}, {"role": "tool", "content": "d"}]
    for effort, hint in (("low", " (think a bit)"), ("medium", " (think)"), ("high", " (think a lot)")):
        assert [message["content"] for message in with_hint(conversation, effort)] == ["a", "b", f"c{hint}", "d"]
    assert with_hint(conversation, None) == conversation
    hinted = with_hint(conversation, "low")
    assert with_hint(hinted, "high") == hinted, "the user's own hint must stay"
    assert with_hint([{"role": "assistant", "content": "b"}], "low") == [{"role": "assistant", "content": "b"}]
