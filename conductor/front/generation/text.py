"""The text of a choice, from token ids: incremental decoding and stop strings.

Owns: which text is held back, and where a text is cut. Does not know: requests, HTTP.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from conductor.front.openai.model import Detokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoded(msgspec.Struct, frozen=True):
    """New text of a choice.

    `num_tokens` is the number of pushed tokens that belong to the answer. If a stop string was found, the
    last of them is the token that completes the stop string.

    `offsets` has for each of these tokens the index of its first character in the choice's text, if the
    stream counts characters.
    """

    text: str
    num_tokens: int
    stopped: bool
    offsets: Sequence[int] = ()


class _StopStrings:
    """An automaton of all stop strings (Aho and Corasick).

    A state stands for the longest suffix of the text that is a prefix of a stop string. So the cost of a
    character does not depend on the number and length of stop strings.
    """

    __slots__ = ("fallback", "following", "held", "longest")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self.following: list[dict[str, int]] = [{}]
        """The next state, by state and next character."""
        self.held = [0]
        """The number of characters of the suffix for which each state stands."""
        self.fallback = [0]
        """The state of the next shorter suffix that is a prefix of a stop string, by state."""
        self.longest = [0]
        """The length of the longest stop string with which each state ends; 0 without one."""
        for stop in stops:
            self._add(stop)
        states = deque(self.following[0].values())
        while states:
            state = states.popleft()
            self.longest[state] = self.longest[state] or self.longest[self.fallback[state]]
            for character, longer in self.following[state].items():
                self.fallback[longer] = self.after(self.fallback[state], character)
                states.append(longer)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            longer = self.following[state].get(character)
            if longer is None:
                longer = self.following[state][character] = len(self.following)
                self.following.append({})
                self.held.append(self.held[state] + 1)
                self.fallback.append(0)
                self.longest.append(0)
            state = longer
        self.longest[state] = len(stop)

    def after(self, state: int, character: str) -> int:
        """Return the automaton's state after one more character."""
        following, fallback = self.following, self.fallback
        while state and character not in following[state]:
            state = fallback[state]
        return following[state].get(character, 0)


_stop_strings = lru_cache(maxsize=4)(_StopStrings)
"""Return the automaton of stop strings. Cached, as all choices of a request have the same stop strings."""


class StopMatcher:
    """A matcher that cuts a text at a stop string, and holds back text that may begin a stop string.

    The text is cut before the stop string that ends first; if several end together, before the longest. The
    result does not depend on how the text is divided into pieces.
    """

    __slots__ = ("_held", "_state", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = _stop_strings(tuple(stops)) if stops else None
        self._state = 0
        self._held = (
            ""  # always the longest end of the text so far that may be the beginning of a stop string
        )

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string was found."""
        stops = self._stops
        if stops is None:
            return text, False
        num_held, state = len(self._held), self._state
        text = self._held + text
        for index in range(num_held, len(text)):
            state = stops.after(state, text[index])
            if stops.longest[state]:
                self._held, self._state = "", 0
                return text[: index + 1 - stops.longest[state]], True
        self._state = state
        num_shown = len(text) - stops.held[state]
        self._held = text[num_shown:]
        return text[:num_shown], False

    def flush(self) -> str:
        """Return the text that was held back, at the end of a generation."""
        held, self._held, self._state = self._held, "", 0
        return held


class TextStream:
    """The text of one choice, decoded and cut at stop strings."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_chars", "_num_tokens", "plain")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int = 0,
        counts_offsets: bool = False,
    ) -> None:
        """Make the stream of one choice. Stop strings are ignored in its first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.plain = None if stops or counts_offsets else detokenizer
        """The detokenizer, if its text is shown unchanged until `flush`, else None.

        With stop strings or offsets, each token must be looked at.
        """
        self._num_tokens = 0
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> Decoded:
        """Return the text of more tokens. No tokens may be pushed after a stop string was found."""
        if self.plain is not None:
            return Decoded(self.plain.push(token_ids), len(token_ids), False)
        shown, offsets = "", []
        # One by one: the number of tokens up to a stop string must not depend on how they were sent.
        for num_tokens, token_id in enumerate(token_ids, start=1):
            offsets.append(self._num_chars)
            decoded = self._detokenizer.push([token_id])
            self._num_chars += len(decoded)
            self._num_tokens += 1
            text, stopped = decoded, False
            if self._num_tokens > self._min_tokens:
                text, stopped = self._matcher.push(decoded)
            shown += text
            if stopped:
                return Decoded(shown, num_tokens, True, offsets)
        return Decoded(shown, len(token_ids), False, offsets)

    @property
    def num_chars(self) -> int:
        """The number of characters decoded so far, if the stream counts them; else 0."""
        return self._num_chars

    def flush(self) -> Decoded:
        """Return the remaining text at the end of a generation.

        `num_tokens` is 0: tokens are counted when pushed.
        """
        # A character that max_tokens cut in two is left out rather than shown as garbage.
        text, stopped = self._matcher.push(self._detokenizer.flush().rstrip(_REPLACEMENT))
        return Decoded(text if stopped else text + self._matcher.flush(), 0, stopped)
