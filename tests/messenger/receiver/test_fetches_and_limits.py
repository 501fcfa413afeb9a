"""Fetches that a receiver answers, peers that keep to no rule, and limits."""

import asyncio
import logging
from pathlib import Path
from typing import Any, NoReturn

import pytest

from messenger.receiver import incoming_session, receiver
from messenger.receiver.fetch_answerer import MOST_FETCHES, FetchAnswerer
from messenger.transport.handshake import check_introduction
from messenger.wire.messages import (
    Close,
    Fetch,
    FetchDone,
    Found,
    FoundBlock,
    Message,
    Open,
    RefusalKind,
    TransferEnded,
    Write,
    WriteAck,
)
from messenger.wire.protocol import encode_frame
from mooncake.errors import TransferError
from tests.deadline import DEADLINE_S
from tests.messenger.fabric import LARGE, SMALL, TINY, fabric, key, until
from tests.messenger.receiver.writes import write
from tests.messenger.wire import Wire


@pytest.mark.parametrize(
    "fetch",
    [
        Fetch([key(1)], 0, 3),
        Fetch([key(1)], -1, 1),
        Fetch([key(1)], 1, 1),
        Fetch([key(1)], 2, 1),
        Fetch([key(1)] * 40_000, 0, 2),
    ],
)
async def test_a_fetch_that_cannot_be_is_answered_with_the_reason(tmp_path: Path, fetch: Fetch) -> None:
    async with fabric(tmp_path, TINY) as node:
        node.publish([1])
        wire = await Wire.introduced(node)
        await wire.say(fetch)
        answer = await wire.hear()
        assert isinstance(answer, Found)
        assert answer.failure
        await wire.say(FetchDone())
        await wire.say(Fetch([], 0, 1))
        assert await wire.hear() == Found([])
        wire.close()


@pytest.mark.parametrize("buffer_bytes", [None, 1])
async def test_fetches_are_answered_in_their_order(tmp_path: Path, buffer_bytes: int | None) -> None:
    """Also if the kernel does not take all of an answer at once."""
    async with fabric(tmp_path, LARGE) as node:
        node.answer_buffer_bytes = buffer_bytes
        node.publish([1, 2])
        wire = await Wire.introduced(node)
        for page in (1, 2, 1):
            await wire.say(Fetch([key(page)], 0, LARGE.num_layers))
            frame = await wire.frames.next()
            checksums = node.receiver_memory.checksums(page, range(LARGE.num_layers))
            assert frame.message == Found([FoundBlock(0, checksums, node.receiver_memory.offset(page, 0))])
            payload = memoryview(bytearray(frame.payload_bytes))
            await wire.stream.receive_into([payload])
            assert payload == node.receiver_memory.page(page)
        await until(lambda: node.pages.num_leases == 3)
        await wire.say(FetchDone())
        await until(lambda: node.pages.num_leases == 2)
        wire.close()
        await until(lambda: node.num_served == 0)


async def test_a_peer_that_never_reads_its_answers_is_cut_off(tmp_path: Path) -> None:
    async with fabric(tmp_path, SMALL) as node:
        node.answer_buffer_bytes = 4096
        wire = await Wire.introduced(node)
        frames = encode_frame(Write(1, 99, [node.entry(0, range(1))]), SMALL.layer_bytes)
        frames += bytes(SMALL.layer_bytes)

        async def say_without_end() -> None:
            while True:
                await wire.say_bytes(frames * 16)

        saying = asyncio.create_task(say_without_end())
        await until(lambda: node.num_served == 0)
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
        wire.close()
        await node.assert_works()


async def test_blocks_that_nobody_reads_stay_leased_and_are_given_back_at_the_end(tmp_path: Path) -> None:
    async with fabric(tmp_path, LARGE, 4) as node:
        node.publish([0])
        wire = await Wire.introduced(node)
        for _ in range(MOST_FETCHES):
            await wire.say(Fetch([key(0)], 0, LARGE.num_layers))
        await until(lambda: node.pages.num_leases == MOST_FETCHES)
        wire.close()
        await until(lambda: node.pages.num_leases == 0)


# -- a receiver that keeps to no rule ---------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [
        Found([FoundBlock(1, bytes(16), 0)]),
        Found([FoundBlock(-1, bytes(16), 0)]),
        Found([FoundBlock(0, bytes(16), 0)] * 2),
        WriteAck(),
    ],
)
async def test_an_answer_to_nothing_that_was_asked_costs_the_connection(
    tmp_path: Path, found: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fabric(tmp_path, TINY) as node:

        def answer(answers: FetchAnswerer, fetch: Fetch) -> None:
            answers._replies.post(encode_frame(found))

        monkeypatch.setattr(FetchAnswerer, "fetch", answer)
        before = bytes(node.sender_memory.view)
        with pytest.raises(TransferError, match="was lost"):
            await node.fetch([0])
        assert node.sender_memory.view == before
        await node.assert_works()


async def test_a_source_that_breaks_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # a traceback would keep what the test has opened
    async with fabric(tmp_path, TINY) as node:

        async def lease(*_: object) -> NoReturn:
            raise OSError("the disk is gone")

        node.pages.may_read.clear()  # it takes a while
        node.pages.lease = lease  # type: ignore[method-assign]
        with pytest.raises(TransferError, match="was lost"):
            async with asyncio.timeout(DEADLINE_S):
                await node.fetch([0])
        await node.assert_works()


async def test_open_transfers_of_one_sender_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_session, "MOST_TRANSFERS", 3)
    async with fabric(tmp_path, TINY) as node:
        node.pages.grant(1, [0])
        wire = await Wire.introduced(node)
        for transfer_id in range(3):
            await wire.say(Open(transfer_id, 1, "one of three"))
        await wire.say(Close(0, None))
        await wire.say(Open(3, 1, "there is room again"))
        await wire.say(Open(4, 1, "one too many"))
        answer = await wire.hear()
        assert isinstance(answer, TransferEnded)
        assert answer.transfer_id == 4
        assert "has 3 transfers open already" in answer.reason
        wire.close()
        await until(lambda: node.num_served == 0)
        await node.assert_works()


async def test_a_late_write_does_not_open_a_transfer_again_that_was_given_up(tmp_path: Path) -> None:
    async with fabric(tmp_path, TINY) as node:
        grant = node.pages.grant(1, [0, 1])
        wire = await Wire.introduced(node)
        await wire.say(Open(5, 1, "grant 1"))
        await wire.say(Close(5, "cancelled"))
        _, payload = write(node, node.entry(0))
        await wire.say(Write(5, 1, [node.entry(0)]), payload)
        ack = await wire.hear()
        assert isinstance(ack, WriteAck)
        assert ack.refusal is RefusalKind.STALE
        assert grant.writers == []
        wire.close()
        await until(lambda: node.num_served == 0)


async def test_strangers_at_once_have_a_limit_and_make_room_for_whoever_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MOST_UNKNOWN", 3)
    async with fabric(tmp_path, TINY) as node:
        silent = [await Wire.connect(node) for _ in range(3)]
        await until(lambda: node.num_served == 3)
        friend = await Wire.introduced(node)
        await silent[0].assert_closed()
        await until(lambda: node.received.num_unauthenticated == 1)
        for wire in [*silent, friend]:
            wire.close()
        await until(lambda: node.num_served == 0)
        await node.assert_works()


async def test_who_has_shown_the_key_stands_in_no_strangers_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MOST_UNKNOWN", 1)
    is_known, may_enter = asyncio.Event(), asyncio.Event()

    async def wait(*arguments: Any) -> None:
        is_known.set()
        await may_enter.wait()
        await check_introduction(*arguments)

    monkeypatch.setattr(receiver, "check_introduction", wait)
    async with fabric(tmp_path, TINY, connect_timeout_s=5.0) as node:
        entering = []
        for _ in range(2):
            is_known.clear()
            entering.append(asyncio.create_task(Wire.introduced(node)))
            await is_known.wait()
        may_enter.set()
        for wire in await asyncio.gather(*entering):
            wire.close()
        await until(lambda: node.num_served == 0)
        assert node.received.num_unauthenticated == 0
