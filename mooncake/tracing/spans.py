"""Ended pieces of work, as values that become spans. Pure: no clock, no SDK.

Owns: their form. Does not know: their meaning, how they are exported.
"""

from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value | None]
"""The attributes of a span by name; None values are left out."""


def why_ended(error: BaseException) -> str:
    """Return the error text for a piece of work that `error` has ended."""
    return "aborted" if isinstance(error, CancelledError) else str(error) or type(error).__name__


class SpanEvent(NamedTuple):
    """A moment within a span."""

    at_s: float
    """The time in seconds by the monotonic clock, as all times in this module."""
    name: str
    attributes: Attributes = MappingProxyType({})


class EndedSpan(NamedTuple):
    """An ended piece of work, with its parts."""

    name: str
    began_s: float
    ended_s: float
    attributes: Attributes = MappingProxyType({})
    events: Sequence[SpanEvent] = ()
    error: str = ""
    """The reason why the work failed; empty if it did not."""
    parts: Sequence["EndedSpan"] = ()


class SpanEnd(NamedTuple):
    """The end of a request's time at an instance."""

    at_s: float
    error: str = ""
    """The reason for an early end; empty for none."""

    def step(
        self,
        name: str,
        began_s: float | None,
        ended_s: float | None,
        attributes: Attributes = MappingProxyType({}),
    ) -> EndedSpan | None:
        """Return the span of a step of the request; None for a step that has not begun.

        A step without `ended_s` ends at `at_s`, as the request failed or was aborted in this step.
        """
        if began_s is None:
            return None
        if ended_s is None:
            return EndedSpan(name, began_s, self.at_s, attributes, error=self.error)
        return EndedSpan(name, began_s, ended_s, attributes)
