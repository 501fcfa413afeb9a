"""Pieces of work that are over, as values that become spans. Pure: no clock, no SDK.

Owns: their form. Does not know: their meaning, how they are exported.
"""

from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value | None]
"""Attributes by name. None is left out."""


def why_ended(error: BaseException) -> str:
    """Return the text for a piece of work that `error` has ended."""
    return "aborted" if isinstance(error, CancelledError) else str(error) or type(error).__name__


class SpanEvent(NamedTuple):
    """A moment within a span."""

    at_s: float
    """Time by the monotonic clock, as all times here."""
    name: str
    attributes: Attributes = MappingProxyType({})


class EndedSpan(NamedTuple):
    """A piece of work, with the pieces of which it consisted."""

    name: str
    began_s: float
    ended_s: float
    attributes: Attributes = MappingProxyType({})
    events: Sequence[SpanEvent] = ()
    error: str = ""
    """Why it has failed; empty: it has not."""
    parts: Sequence["EndedSpan"] = ()


class SpanEnd(NamedTuple):
    """The end of a request's time at an instance."""

    at_s: float
    error: str = ""
    """Why the time ends early; empty: it does not."""

    def step(
        self,
        name: str,
        began_s: float | None,
        ended_s: float | None,
        attributes: Attributes = MappingProxyType({}),
    ) -> EndedSpan | None:
        """Return the span of a step of the request; None for a step that has not begun.

        A step without an end of its own has this one: in it the request has failed, or was aborted.
        """
        if began_s is None:
            return None
        if ended_s is None:
            return EndedSpan(name, began_s, self.at_s, attributes, error=self.error)
        return EndedSpan(name, began_s, ended_s, attributes)
