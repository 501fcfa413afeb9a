"""Quantities in messages, bounded: what is negative, no number, or beyond all measure is refused where a
message is decoded.

A peer's numbers go into sums and estimates that last. One that is not a number would stay in them for ever,
and one that no array of integers takes would end whoever puts it into one.

Owns: these bounds. Does not know: messages, configuration.
"""

from typing import Annotated

import msgspec

_MOST_SECONDS = 1e10
"""300 years: totals as well"""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""of tokens, blocks, bytes, requests: as exact as a float is"""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST_SECONDS)]
Span = Annotated[float, msgspec.Meta(ge=-_MOST_SECONDS, le=_MOST_SECONDS)]
"""seconds from one moment to another, which may have been before"""
BytesPerSecond = Annotated[float, msgspec.Meta(ge=1.0, le=1e15)]
