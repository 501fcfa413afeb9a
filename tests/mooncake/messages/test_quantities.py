"""What is no possible number never reaches who would reckon with it."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.inspect import FloatType, IntType, StructType, multi_type_info

from mooncake.messages.fronts import FromFront, Tokens
from mooncake.messages.heartbeats import DecodeLoad, DecodeStats, Heartbeat
from mooncake.messages.pools import PeerStats
from mooncake.messages.requests import Ref
from mooncake.messages.workers import DecodeRefused, FromWorker, Prefilled

NAMES_ONLY = {"protocol_version", "newest_version", "version", "incarnation", "epoch", "attempt", "grant_id"}
"""compared with one's own, and with nothing else"""
OF_DRAWS = {"SamplingParams", "TokenLogprobs"}
"""go through the Conductor as they are, from front to worker or back"""
NAN, INFINITE = math.nan, math.inf
TOO_MANY = (1 << 53) + 1


def unbounded(type_: Any, path: str, seen: set[type]) -> Iterator[str]:
    """Paths of the numbers in it that may be anything."""
    match type_:
        case IntType() | FloatType():
            if (None, None) in ((type_.ge, type_.gt), (type_.le, type_.lt)):
                yield path
        case StructType(cls=cls, fields=fields) if cls not in seen:
            seen.add(cls)
            for field in fields:
                if field.encode_name not in NAMES_ONLY:
                    yield from unbounded(field.type, f"{cls.__name__}.{field.name}", seen)
        case _:
            for name in ("types", "item_types"):
                for part in getattr(type_, name, ()):
                    yield from unbounded(part, path, seen)
            for name in ("item_type", "key_type", "value_type"):
                if (part := getattr(type_, name, None)) is not None:
                    yield from unbounded(part, path, seen)


def test_every_number_that_the_conductor_or_a_front_reckons_with_is_bounded() -> None:
    (of_conductor, of_front) = multi_type_info([FromWorker | FromFront, Tokens])
    paths = [path for told in (of_conductor, of_front) for path in unbounded(told, "", set())]
    assert len(paths) > 0, "draws have some"
    assert {path.split(".")[0] for path in paths} <= OF_DRAWS


HEARTBEAT = Heartbeat(0, 0, 0, {})


def heartbeat(load: DecodeLoad = HEARTBEAT.decode_load, stats: DecodeStats = HEARTBEAT.decode) -> Heartbeat:
    return msgspec.structs.replace(HEARTBEAT, decode=stats, decode_load=load)


REF = Ref(1, "r", 0)


@pytest.mark.parametrize(
    "lie",
    [
        heartbeat(DecodeLoad(num_awaiting_turn=-1)),
        heartbeat(DecodeLoad(num_requests=TOO_MANY)),
        heartbeat(DecodeLoad(num_requests=1, tbt_s=NAN)),
        heartbeat(DecodeLoad(num_requests=1, tbt_s=INFINITE)),
        heartbeat(stats=DecodeStats(forward_s=NAN)),
        heartbeat(stats=DecodeStats(forward_s=-0.1)),
        Prefilled(REF, 1, -1),
        Prefilled(REF, 1 << 32, 0),
        DecodeRefused(REF, "", -1, 0.1),
        DecodeRefused(REF, "", 1, NAN),
    ],
)
def test_a_worker_that_tells_what_cannot_be_is_not_heard(lie: FromWorker) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(lie), type=FromWorker)


@pytest.mark.parametrize("bytes_per_s", [NAN, INFINITE, -1.0, 0.0])
def test_no_network_is_as_quick_or_slow(bytes_per_s: float) -> None:
    told = msgspec.msgpack.encode(PeerStats(0, bytes_per_s, 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(told, type=PeerStats)


def test_what_can_be_is_heard() -> None:
    truth = heartbeat(DecodeLoad(2, 1, 0.1), DecodeStats(1, 2, 0.1, 0.0, 0.0, 0.0))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(truth), type=FromWorker) == truth
    whole = msgspec.msgpack.encode({"num_requests": 1, "tbt_s": 1})
    assert msgspec.msgpack.decode(whole, type=DecodeLoad).tbt_s == 1.0
