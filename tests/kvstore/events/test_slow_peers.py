"""Peers and subscribers that do not read: others do not wait for them."""

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvstore.events import publisher as event_publisher
from mooncake.messages.kv_events import (
    GetSnapshot,
    ReplayDone,
    ReplayEvents,
)
from tests.kvstore.events.publishers import (
    DECODE,
    DRAM,
    ENCODE,
    KEY,
    KEYS,
    SSD,
    FakePool,
    connected,
    first_message,
    internal,
    replayed,
    running,
    with_large_snapshot,
)


@pytest.mark.usefixtures("small_queues")
async def test_peer_that_does_not_read_its_answer_holds_up_nobody_and_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_parts = 60

    with caplog.at_level(logging.WARNING):
        pool = FakePool()
        publisher = with_large_snapshot(pool, tmp_path, num_parts)
        async with running(publisher):
            with (
                connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1) as stuck,
                connected(zmq.DEALER, publisher.request_endpoint, key=KEY) as other,
                connected(zmq.SUB, publisher.endpoint, key=KEY) as subscriber,
            ):
                await stuck.send(ENCODE(GetSnapshot()))
                await stuck.poll()  # the answer has begun
                await first_message(subscriber, lambda: pool.flip(DRAM, KEYS[0]))
                while "does not read" not in caplog.text:
                    await other.send(ENCODE(ReplayEvents(pool.log.next_sequence)))
                    assert isinstance((await replayed(other))[1], ReplayDone)
                # It is only this answer that was given up.
                num_read = 0
                while await stuck.poll(200):
                    await stuck.recv()
                    num_read += 1
                assert 0 < num_read < num_parts
                await stuck.send(ENCODE(ReplayEvents(0)))
                assert (await replayed(stuck))[0]


async def test_peer_that_reads_slowly_gets_all_of_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "ANSWER_QUEUE_LEN", 2)
    num_batches = 3_000
    pool = FakePool(capacity_batches=num_batches)
    pool.store_batches(num_batches)
    publisher = internal(pool, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1) as dealer:
            await dealer.send(ENCODE(ReplayEvents(0)))
            batches, end = await replayed(dealer)
            assert [batch.sequence for batch in batches] == list(range(num_batches))
            assert isinstance(end, ReplayDone)


@pytest.mark.usefixtures("small_queues")
async def test_no_more_than_so_many_peers_are_answered_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_publisher, "MAX_ANSWERS", 2)

    with caplog.at_level(logging.WARNING):
        publisher = with_large_snapshot(FakePool(), tmp_path, num_parts=40)
        async with running(publisher):
            with contextlib.ExitStack() as sockets:
                for _ in range(2):
                    stuck = sockets.enter_context(
                        connected(zmq.DEALER, publisher.request_endpoint, key=KEY, rcvhwm=1)
                    )
                    await stuck.send(ENCODE(GetSnapshot()))
                    await stuck.poll()
                other = sockets.enter_context(connected(zmq.DEALER, publisher.request_endpoint, key=KEY))
                await other.send(ENCODE(ReplayEvents(0)))
                assert isinstance((await replayed(other))[1], ReplayDone)
                assert "does not read" in caplog.text, "it waited for its turn"


async def test_subscriber_that_does_not_read_loses_batches_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "PUB_QUEUE_LEN", 10)
    num_batches = 2_000
    pool = FakePool(capacity_batches=num_batches)
    publisher = internal(pool, tmp_path, flush_interval_s=0.0)
    async with running(publisher):
        with connected(zmq.SUB, publisher.endpoint, key=KEY, rcvhwm=10) as stuck:
            await first_message(stuck, lambda: pool.flip(SSD, KEYS[0]))
            with connected(zmq.SUB, publisher.endpoint, key=KEY) as subscriber:
                await first_message(subscriber, lambda: pool.flip(SSD, KEYS[0]))
                for _ in range(num_batches):
                    for key in KEYS:
                        pool.flip(DRAM, key)
                    pool.log.seal()
                    await asyncio.sleep(0)
                last_sequence, sequence = pool.log.next_sequence - 1, 0
                while sequence < last_sequence:  # a burst like this one is too much for any subscriber
                    frames = await first_message(subscriber, lambda: pool.flip(SSD, KEYS[0]))
                    sequence = DECODE(frames[1]).sequence
            sequences = []
            while await stuck.poll(100):
                sequences.append(DECODE((await stuck.recv_multipart())[1]).sequence)
            assert sequences == sorted(sequences)
            assert len(sequences) < 800  # those that the kernel buffers, and the queues
