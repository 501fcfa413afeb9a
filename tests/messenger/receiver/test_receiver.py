"""A receiver and a sender that knows the key and keeps to no rule: it costs him his connection at most."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from messenger.receiver.fetch_answerer import MOST_FETCHES
from messenger.wire.messages import (
    Abandon,
    Close,
    Fetch,
    FetchDone,
    Hello,
    Open,
    Probe,
    RefusalKind,
    TransferEnded,
    Write,
    WriteAck,
    WriteEntry,
)
from messenger.wire.protocol import MAX_FRAME_BYTES, MAX_FRAME_ENTRIES, encode_frame
from tests.messenger.fabric import LARGE, TINY, Fabric, fabric, key, until
from tests.messenger.receiver.writes import SESSION, Said, entry, write
from tests.messenger.wire import Wire

RULES_BROKEN: dict[str, Callable[[Fabric], list[Said]]] = {
    "no entries": lambda node: [(Write(1, 1, []), b"")],
    "too many entries": lambda node: [write(node, *[node.entry(0)] * (MAX_FRAME_ENTRIES + 1))],
    "too many bytes": lambda node: [
        (Write(1, 1, [entry(node, 0, layer_end=2 + MAX_FRAME_BYTES // TINY.layer_bytes)]), b"")
    ],
    "too few bytes": lambda node: [(Write(1, 1, [node.entry(0)]), b"123")],
    "more bytes than entries": lambda node: [(Write(1, 1, [node.entry(0)]), bytes(TINY.block_bytes + 1))],
    "done without a fetch": lambda node: [(FetchDone(), b"")],
    "done twice": lambda node: [
        (Fetch([key(1)], 0, 1), b""),
        (FetchDone(), b""),
        (FetchDone(), b""),
        (FetchDone(), b""),
    ],
    "damage without a block": lambda node: [(Fetch([key(99)], 0, 1), b""), (FetchDone([0]), b"")],
    "damage of a block that nobody asked for": lambda node: [
        (Fetch([key(1)], 0, 1), b""),
        (FetchDone([1]), b""),
    ],
    "a greeting": lambda node: [(Hello(2, b"n" * 32), b"")],
    "an answer": lambda node: [(WriteAck(), b"")],
    "payload where none belongs": lambda node: [(Close(1, None), b"123")],
    "read by itself by who sees nothing": lambda node: [(Fetch([key(1)], 0, 1, is_read=True), b"")],
    "too many fetches": lambda node: [(Fetch([key(1)], 0, 1), b"")] * (MOST_FETCHES + 1),
}


@pytest.mark.parametrize("said", RULES_BROKEN.values(), ids=RULES_BROKEN.keys())
async def test_a_broken_rule_costs_the_connection(
    tmp_path: Path, said: Callable[[Fabric], list[Said]]
) -> None:
    async with fabric(tmp_path, TINY) as node:
        grant = node.pages.grant(1, [0])
        node.publish([1])
        node.pages.may_read.clear()
        wire = await Wire.introduced(node)
        await wire.say(Open(1, 1, "grant 1"))
        await until(lambda: grant.writers)
        for message, payload in said(node):
            await wire.say(message, payload)
        await wire.assert_closed()
        wire.close()
        await until(lambda: grant.failure is not None)
        node.pages.may_read.set()
        await node.assert_works()
        assert node.received.num_unauthenticated == 0


async def test_a_frame_that_is_none_costs_the_connection(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        for data in (b"\xff" * 64, b"\x04\0\0\0\0\0\0\0\xc1\xc1\xc1\xc1", bytes(8)):
            wire = await Wire.introduced(node)
            await wire.say_bytes(data)
            await wire.assert_closed()
            wire.close()
        await node.assert_works()


REFUSED: dict[str, dict[str, object]] = {
    "an unknown page": {"page": 99},
    "a negative page": {"page": -1},
    "another generation": {"generation": 2},
    "no layers": {"layer_begin": 1, "layer_end": 1, "checksums": b""},
    "layers that there are not": {"layer_begin": 1, "layer_end": 3},
    "fewer than no layers": {"layer_begin": 2, "layer_end": 0},
    "layers before the first": {"layer_begin": -2, "layer_end": 0},
    "checksums missing": {"checksums": b""},
}


@pytest.mark.parametrize("changed", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("is_complete", [False, True])
async def test_a_write_that_fits_no_grant_places_nothing(
    tmp_path: Path, changed: dict[str, object], is_complete: bool
) -> None:
    async with fabric(tmp_path, TINY) as node:
        grant = node.pages.grant(1, [0])
        wire = await Wire.introduced(node)
        if is_complete:
            await wire.say(*write(node, node.entry(0)))
            assert await wire.hear() == WriteAck()
        wrong = entry(node, 0, **changed)
        num_bytes = max(0, wrong.num_layers) * TINY.layer_bytes
        await wire.say(Write(7, 1, [wrong]), bytes(num_bytes))
        try:
            answer = await wire.hear()
        except ConnectionError:
            pass
        else:
            assert isinstance(answer, WriteAck)
            assert answer.refusal is not None
        assert grant.is_complete == is_complete
        wire.close()
        await until(lambda: node.num_served == 0)
        await node.assert_works()


async def test_damaged_bytes_are_refused_and_fail_the_grant(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        grant = node.pages.grant(1, [0, 1])
        wire = await Wire.introduced(node)
        message, payload = write(node, node.entry(0), node.entry(1))
        await wire.say(message, payload[:-1] + bytes([payload[-1] ^ 1]))
        answer = await wire.hear()
        assert isinstance(answer, WriteAck)
        assert answer.refusal is RefusalKind.CORRUPT
        assert grant.arrived == {}  # all of a write, or none
        assert grant.failure == "checksum of page 1 from sender does not match its bytes"
        await wire.say(message, payload)
        answer = await wire.hear()
        assert isinstance(answer, WriteAck)
        assert answer.refusal is RefusalKind.STALE
        wire.close()


async def test_a_lane_number_is_taken_once(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        node.pages.grant(1, [0])
        first = await Wire.introduced(node, SESSION, 3)
        second = await Wire.introduced(node, SESSION, 3)
        await second.assert_closed()
        second.close()
        await first.say(*write(node, node.entry(0)))
        assert await first.hear() == WriteAck()
        other = await Wire.introduced(node, SESSION, -4)
        await other.say(Probe(), b"123")
        assert await other.hear() == WriteAck()
        first.close()
        other.close()


async def test_a_lane_is_abandoned_with_what_it_had_begun(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4) as node:
        grant = node.pages.grant(1, [0])
        dead, alive = [await Wire.introduced(node, SESSION, lane) for lane in range(2)]
        message, payload = write(node, node.entry(0))
        await dead.say_bytes(encode_frame(message, len(payload)) + payload[: len(payload) // 2])
        await until(lambda: grant.receiving)
        await alive.say(Abandon(0))
        await alive.say(message, payload)
        assert await alive.hear() == WriteAck()
        assert grant.is_complete
        await dead.assert_closed()
        dead.close()
        alive.close()


async def test_a_write_is_given_up_if_the_lane_is_cancelled_just_when_it_begins(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4) as node:
        grant = node.pages.grant(1, [0])
        before = asyncio.all_tasks()
        wire = await Wire.introduced(node, SESSION, 0)
        await wire.say(Open(7, 1, "a transfer"))
        await until(lambda: grant.writers)
        ours, begin = asyncio.all_tasks() - before, node.pages.begin

        def begin_and_cancel(grant_id: int, entry: WriteEntry, heads: range | None) -> memoryview | None:
            for task in ours:
                task.cancel()
            return begin(grant_id, entry, heads)

        node.pages.begin = begin_and_cancel  # type: ignore[method-assign]
        message, payload = write(node, node.entry(0))
        await wire.say_bytes(encode_frame(message, len(payload)) + payload[:100])
        await until(lambda: grant.failure is not None)
        assert node.pages.num_begun == 0
        assert not grant.receiving
        wire.close()


async def test_a_write_whose_grant_is_revoked_under_it_is_refused(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4) as node:
        grant = node.pages.grant(1, [0])
        wire = await Wire.introduced(node)
        message, payload = write(node, node.entry(0))
        half = len(payload) // 2
        await wire.say_bytes(encode_frame(message, len(payload)) + payload[:half])
        await until(lambda: grant.receiving)
        node.pages.revoke(1, "nobody wants it")
        assert await wire.hear() == TransferEnded(7, "nobody wants it")
        await wire.say_bytes(payload[half:])
        assert await wire.hear() == WriteAck(RefusalKind.STALE, "revoked meanwhile")
        assert grant.arrived == {}
        wire.close()
        await node.assert_works()


async def test_a_write_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4, ack_timeout_s=0.2) as node:
        grant = node.pages.grant(1, [0])
        wire = await Wire.introduced(node, SESSION, 0)
        message, payload = write(node, node.entry(0))
        await wire.say_bytes(encode_frame(message, len(payload)) + payload[:100])
        await until(lambda: grant.receiving)
        await until(lambda: grant.failure is not None)
        assert not grant.receiving
        wire.close()
        await node.assert_works()


@pytest.mark.parametrize("lane", [0, 1, -1, 1 << 60])
async def test_abandoning_oneself_or_nobody_changes_nothing(tmp_path: Path, lane: int) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.introduced(node, SESSION, 0)
        await wire.say(Abandon(lane))
        await wire.say(Probe(), b"123")
        assert await wire.hear() == WriteAck()
        wire.close()


async def test_lanes_that_abandon_each_other_both_end(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY, ack_timeout_s=0.3) as node:
        wires = [await Wire.introduced(node, SESSION, lane) for lane in range(2)]
        for wire, other in zip(wires, (1, 0), strict=True):
            wire.stream.send_now([memoryview(encode_frame(Abandon(other)))])
        for wire in wires:
            await wire.assert_closed()
            wire.close()
        await until(lambda: node.num_served == 0)
        await node.assert_works()


async def test_a_session_is_its_senders_alone(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        grant = node.pages.grant(1, [0, 1])
        first = await Wire.introduced(node, SESSION, 0)
        stranger = await Wire.introduced(node, b"t" * 16, 1)
        await first.say(Open(7, 1, "grant 1"))
        await until(lambda: grant.writers)
        for message in (Abandon(0), Close(7, "not mine")):
            await stranger.say(message)
        await stranger.say(Probe(), b"1")
        assert await stranger.hear() == WriteAck()
        assert grant.failure is None
        await first.say(*write(node, node.entry(0)))
        assert await first.hear() == WriteAck()
        stranger.close()
        first.close()
        await until(lambda: grant.failure is not None)


async def test_the_loss_of_the_last_lane_fails_what_it_had_open(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        grant = node.pages.grant(1, [0])
        wires = [await Wire.introduced(node, SESSION, lane) for lane in range(2)]
        await wires[0].say(Open(1, 1, "grant 1"))
        await until(lambda: grant.writers)
        wires[0].close()
        await until(lambda: node.num_served == 1)
        assert grant.failure is None
        wires[1].close()
        await until(lambda: grant.failure is not None)
        assert grant.failure is not None
        assert grant.failure.startswith("connection from sender was lost: ")


async def test_one_transfer_writes_to_one_grant(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        grants = [node.pages.grant(grant_id, [grant_id]) for grant_id in range(2)]
        wire = await Wire.introduced(node)
        for grant_id in range(2):
            await wire.say(Open(1, grant_id, "grant"))
        await wire.assert_closed()
        wire.close()
        await until(lambda: grants[0].failure is not None)
        assert not grants[1].writers
        wire = await Wire.introduced(node)
        node.pages.grant(2, [2])
        await wire.say(Open(1, 2, "grant 2"))
        await wire.say(Write(1, 1, [node.entry(1)]), bytes(node.sender_memory.page(1)))
        await wire.assert_closed()
        wire.close()


async def test_closing_what_is_not_open_does_nothing(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        wire = await Wire.introduced(node)
        await wire.say(Close(9, None))
        await wire.say(Close(10, "given up"))
        await wire.say(Open(9, 77, "unknown"))
        assert await wire.hear() == TransferEnded(9, "grant 77 is unknown here")
        node.pages.grant(78, [0])
        await wire.say(Open(10, 78, "too late"))
        assert await wire.hear() == TransferEnded(10, "the transfer was given up")
        assert node.pages.grants[78].writers == []
        wire.close()
        await until(lambda: node.num_served == 0)
