"""Random changes of messages and of bytes, by seed."""

import copy
import math
import struct
from random import Random
from typing import Any

import msgspec

EXTREME_INTS = (
    *(-1, 0, 1, 2, 4, 5, 255, 1024, 1025, 4096),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    *(-(2**31), -(2**32), -(2**63)),
)
EXTREME_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308)
EXTREME_TEXTS = ("", "\0", "a" * 3000, "é" * 99, "../../x", "%s%n", "127.0.0.1", "\x1b[2J\n")
OTHER_TYPES = (None, True, 0, -1, 1.5, "text", b"bytes", [], {}, [[[]]], {"type": "Write"})
HEADER = struct.Struct("<II")


class Mutator:
    """A source of random changes. With equal seeds they are equal."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def fields(self, message: msgspec.Struct) -> bytes:
        """Return `message` in msgpack, with one to three values replaced, left out, doubled or made huge."""
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            if tree:
                self._change(*self._place(tree))
        try:
            return msgspec.msgpack.encode(tree)
        except OverflowError:  # a number that msgpack does not have
            return self.fields(message)

    def frame(self, meta: bytes, payload: bytes) -> bytes:
        """Return a frame with damaged lengths, meta or payload, or a frame that is cut or doubled."""
        random = self._random
        match random.randrange(8):
            case 0 | 1:
                return HEADER.pack(len(meta), len(payload)) + self.flipped(meta) + payload
            case 2:
                return HEADER.pack(len(meta), len(payload)) + meta + self.flipped(payload)
            case 3:
                return HEADER.pack(self._length(len(meta)), len(payload)) + meta + payload
            case 4:
                return HEADER.pack(len(meta), self._length(len(payload))) + meta + payload
            case 5:
                whole = HEADER.pack(len(meta), len(payload)) + meta + payload
                return whole[: random.randrange(len(whole))]
            case 6:
                return (HEADER.pack(len(meta), len(payload)) + meta + payload) * 2
            case _:
                return HEADER.pack(len(payload), len(meta)) + payload + meta

    def flipped(self, data: bytes) -> bytes:
        """Return the bytes with some bits flipped."""
        damaged = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8)) if data else 0):
            damaged[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def _length(self, num_bytes: int) -> int:
        """Return a wrong length."""
        choices = (0, num_bytes - 1, num_bytes + 1, 2 * num_bytes, 1 << 20, (1 << 20) + 1, 2**31, 2**32 - 1)
        return max(0, self._random.choice(choices))

    def _place(self, tree: Any) -> tuple[Any, Any]:
        """Return a container in `tree`, and an index or key of it; seldom that of the message's own tag."""
        random = self._random
        while True:
            places = list(range(len(tree)) if isinstance(tree, list) else tree)
            inner = [place for place in places if isinstance(tree[place], list | dict) and tree[place]]
            if inner and random.random() < 0.75:
                tree = tree[random.choice(inner)]
                continue
            place = random.choice(places)
            if place != "type" or random.random() < 0.1 or len(places) == 1:
                return tree, place

    def _change(self, container: Any, place: Any) -> None:
        kind = self._random.random()
        if kind < 0.80:
            container[place] = self._extreme(container[place])
        elif kind < 0.86:
            container[place] = copy.deepcopy(self._random.choice(OTHER_TYPES))
        elif kind < 0.91:
            del container[place]
        elif isinstance(container, list):
            container.insert(place, container[place])
        else:
            container["unknown"] = container[place]

    def _extreme(self, value: Any) -> Any:
        """Return another value of the same type."""
        random = self._random
        match value:
            case bool():
                return not value
            case int():
                if random.random() < 0.15:
                    return random.choice(EXTREME_INTS)
                return random.choice((value - 1, value + 1, value + 2, value ^ 1 << random.randrange(5)))
            case float():
                return random.choice(EXTREME_FLOATS)
            case str():
                return random.choice((*EXTREME_TEXTS, value + "x"))
            case bytes():
                return random.choice(
                    (
                        b"",
                        value[:-1],
                        value + b"\0",
                        self.flipped(value),
                        random.randbytes(len(value)),
                        value * 9,
                    )
                )
            case list():
                if random.random() < 0.05:
                    return random.choice(([], value * (2000 // max(1, len(value)))))
                return random.choice((value[:1], value[::-1], value + value[:1], value * 2))
            case _:
                return copy.deepcopy(random.choice(OTHER_TYPES))
