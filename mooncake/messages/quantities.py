"""Bounded quantities in messages: the decoder refuses negative, infinite and far too large numbers.

A peer's numbers are added to sums and estimates that are kept for a long time. A NaN would stay in them for
ever, and a number too large for an integer array would end the process that stores it there.

Owns: these bounds. Does not know: messages, configuration.
"""

from typing import Annotated

import msgspec

_MOST_SECONDS = 1e10
"""The bound of seconds, totals included: 300 years."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number of tokens, blocks, bytes or requests, within a float's exact integers."""
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST_SECONDS)]
Span = Annotated[float, msgspec.Meta(ge=-_MOST_SECONDS, le=_MOST_SECONDS)]
"""Seconds from a first moment to a second one; negative if the second moment is earlier."""
BytesPerSecond = Annotated[float, msgspec.Meta(ge=1.0, le=1e15)]
