"""From token ids to the text that a client may see: incremental decoding and stop strings.

Owns: what is held back and where a text is cut. Does not know: requests, HTTP.
"""

from collections.abc import Sequence

import msgspec

from conductor.front.model import Detokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoded(msgspec.Struct, frozen=True):
    """`num_tokens` is how many of the pushed tokens belong to the answer; fewer than pushed after a stop.

    `offsets`: where in the text each of these tokens begins, in characters; if the stream counts them.
    """

    text: str
    num_tokens: int
    stopped: bool
    offsets: Sequence[int] = ()


class StopMatcher:
    """Finds the stop string that is complete first, and lets no part of one through.

    What comes out does not depend on how the text is divided into pieces: a text is cut before the stop
    string that ends first, and of several that end together, before the one that begins first.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._held = (
            ""  # always the longest end of the text so far that may be the beginning of a stop string
        )

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string was found."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """The text that was held back, now that no more follows."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for num in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            tail = text[len(text) - num :]
            if any(stop.startswith(tail) for stop in self._stops):
                return num
        return 0


class TextStream:
    """The text of one choice."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_chars", "_num_tokens", "plain")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        min_tokens: int = 0,
        counts_offsets: bool = False,
    ) -> None:
        """No stop string is looked for in the text of the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.plain = None if stops or counts_offsets else detokenizer
        """what it gives is shown as it is, until `flush`; None if tokens are looked at one by one"""
        self._num_tokens = 0
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> Decoded:
        """Decode more tokens. After `stopped` nothing more may be pushed."""
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
        """Characters decoded so far, of a stream that counts them."""
        return self._num_chars

    def flush(self) -> Decoded:
        """The rest, at the end of a generation. `num_tokens` is 0: they were counted when pushed."""
        # A character that max_tokens cut in two is left out rather than shown as garbage.
        text, stopped = self._matcher.push(self._detokenizer.flush().rstrip(_REPLACEMENT))
        return Decoded(text if stopped else text + self._matcher.flush(), 0, stopped)
