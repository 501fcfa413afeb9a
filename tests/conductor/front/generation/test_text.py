"""Stop strings never leak and never depend on how text is divided; characters are never sent in parts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conductor.front.generation.text import Decoded, StopMatcher, TextStream
from tests.conductor.front.fakes import ByteDetokenizer

_texts = st.text("abé", max_size=30)
_stops = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)], True
    return text, False


@given(_texts, _stops, st.lists(st.integers(0, 30), max_size=6))
def test_stop_strings_cut_the_text_however_it_is_divided(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    bounds = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(bounds):
        piece, stopped = matcher.push(text[start:end])
        shown += piece
        # What is shown can never be taken back, so it must be right at every moment.
        assert _expected(text, stops)[0].startswith(shown)
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == _expected(text, stops)


@given(_texts, _stops, st.integers(1, 7))
def test_tokens_are_counted_up_to_the_stop_string(text: str, stops: list[str], step: int) -> None:
    data = text.encode()
    stream = TextStream(ByteDetokenizer(), stops)
    shown, num_tokens, stopped = "", 0, False
    for start in range(0, len(data), step):
        decoded = stream.push(data[start : start + step])
        shown, num_tokens, stopped = shown + decoded.text, num_tokens + decoded.num_tokens, decoded.stopped
        if stopped:
            break
    if not stopped:
        shown += stream.flush().text
    expected, stops_there = _expected(text, stops)
    assert (shown, stopped) == (expected, stops_there)
    if stopped:
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert num_tokens == len(text[: min(ends)].encode())
    else:
        assert num_tokens == len(data)


def test_text_is_shown_as_soon_as_it_cannot_begin_a_stop_string() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("x</") == ("x", False)
    assert matcher.push("b") == ("</b", False)
    assert matcher.push("</end") == ("", False)
    assert matcher.flush() == "</end"


def test_character_cut_by_the_last_token_is_left_out() -> None:
    stream = TextStream(ByteDetokenizer(), ())
    assert stream.push("a🎉".encode()[:3]).text == "a"
    assert stream.flush().text == ""


def test_stop_string_may_be_completed_by_what_was_held_back() -> None:
    class HoldsEverything(ByteDetokenizer):
        def push(self, ids: object, /) -> str:
            return ""

        def flush(self) -> str:
            return "ab stop c"

    stream = TextStream(HoldsEverything(), ["stop"])
    assert stream.push([1, 2]).text == ""
    assert stream.flush() == Decoded("ab ", 0, True)
