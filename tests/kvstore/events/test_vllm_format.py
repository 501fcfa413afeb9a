"""KV events in vLLM's format, as its subscribers read them."""

import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstore.events.batches import BlockTokens, EventLog
from tests.kvstore.events.publishers import DRAM, SSD, connected, first_message, running, vllm


class VllmEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(VllmEvent):
    """Fields without a default must be there."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(VllmEvent):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


DECODE_VLLM = msgspec.msgpack.Decoder(VllmBatch).decode
END = b"\xff" * 8


def key(number: int) -> bytes:
    return b"\xaa" * 8 + number.to_bytes(8, "big")


def tokens(parent: int | None, *token_ids: int) -> BlockTokens:
    return BlockTokens(None if parent is None else key(parent), array("I", token_ids))


def stored(hashes: list[int], parent: int | None, token_ids: list[int], medium: str = "CPU") -> BlockStored:
    return BlockStored(hashes, parent, token_ids, 2 if token_ids else 0, None, medium, None)


async def published_events(tmp_path: Path, fill: Callable[[EventLog], None]) -> list[Any]:
    """What a router gets by replay of the one batch that `fill` makes."""
    events: list[Any] = []
    log = EventLog(10)
    log.seal()
    fill(log)
    log.seal()
    publisher = vllm(log, tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint) as dealer:
            while not events:  # until it has been published
                await dealer.send_multipart([b"", (1).to_bytes(8, "big")])
                while (frames := await dealer.recv_multipart())[-2] != END:
                    events.extend(DECODE_VLLM(frames[-1]).events)
    return events


async def test_live_frames_are_topic_number_and_batch(tmp_path: Path) -> None:
    log = EventLog(10)
    publisher = vllm(log, tmp_path)
    async with running(publisher):
        with connected(zmq.SUB, publisher.endpoint) as router:
            await first_message(router, log.cleared)
            log.stored(DRAM, key(2), tokens(None, 20, 21))
            log.stored(DRAM, key(2**64 - 1), tokens(2, 30, 31))
            log.removed(SSD, key(3))
            sequence = log.next_sequence
            while (frames := await router.recv_multipart())[1] != sequence.to_bytes(8, "big"):
                pass
            topic, _, payload = frames
            assert topic == b"kv@10.0.0.1@m"
            raw = msgspec.msgpack.decode(payload)
            assert raw[0] == 12.5
            assert raw[1][0]["type"] == "BlockStored"
            assert raw[2] == 0
            assert raw[1][1] == {"type": "BlockRemoved", "block_hashes": [3], "medium": "DISK"}
            assert DECODE_VLLM(payload).events == [
                stored([2, 2**64 - 1], None, [20, 21, 30, 31]),
                BlockRemoved([3], "DISK"),
            ]


@pytest.mark.parametrize("envelope", [[b""], []])
async def test_vllm_replay_repeats_the_live_messages_and_ends_with_minus_one(
    tmp_path: Path, envelope: list[bytes]
) -> None:
    log, times = EventLog(100), iter(range(1000))
    publisher = vllm(log, tmp_path, clock=lambda: float(next(times)))
    async with running(publisher):
        with (
            connected(zmq.SUB, publisher.endpoint) as router,
            connected(zmq.DEALER, publisher.request_endpoint) as peer,
            connected(zmq.REQ, publisher.request_endpoint) as simple_peer,
        ):
            live = [await first_message(router, log.cleared)]
            first_sequence = int.from_bytes(live[0][1], "big")
            for number in range(5):
                log.stored(DRAM, key(number), tokens(None, number, number))
                log.seal()
            last_sequence = log.next_sequence - 1
            while int.from_bytes(live[-1][1], "big") < last_sequence:
                live.append(await router.recv_multipart())

            for start in range(first_sequence, last_sequence + 2):
                await peer.send_multipart([*envelope, start.to_bytes(8, "big")])
                answer = [await peer.recv_multipart()]
                while answer[-1] != [*envelope, b"", END, b""]:
                    answer.append(await peer.recv_multipart())
                assert answer[:-1] == [[*envelope, *frames] for frames in live[start - first_sequence :]]
            await simple_peer.send(first_sequence.to_bytes(8, "big"))
            assert await simple_peer.recv_multipart() == live[0]


async def test_vllm_replay_begins_with_the_oldest_batch_that_is_left(tmp_path: Path) -> None:
    log = EventLog(3)
    publisher = vllm(log, tmp_path)
    async with running(publisher):
        with (
            connected(zmq.SUB, publisher.endpoint) as router,
            connected(zmq.DEALER, publisher.request_endpoint) as peer,
        ):
            while int.from_bytes((await first_message(router, log.cleared))[1], "big") < 5:
                pass
            await peer.send_multipart([b"", bytes(8)])
            sequences = []
            while (frames := await peer.recv_multipart())[2] != END:
                sequences.append(int.from_bytes(frames[2], "big"))
            assert len(sequences) == 3
            assert sequences == list(range(sequences[0], sequences[0] + 3))
            assert sequences[0] >= 3


async def test_vllm_life_begins_with_all_blocks_cleared(tmp_path: Path) -> None:
    publisher = vllm(EventLog(10), tmp_path)
    async with running(publisher):
        with connected(zmq.DEALER, publisher.request_endpoint) as peer:
            frames = [b"", b"", END, b""]
            while frames[2] == END:
                await peer.send_multipart([b"", bytes(8)])
                frames = await peer.recv_multipart()
            assert frames[2] == bytes(8)
            assert DECODE_VLLM(frames[3]).events == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b""], [b"1"], [b"", b"x" * 900], [b"x", bytes(8)], [b"", b"", bytes(8)]]
)
async def test_vllm_malformed_requests_are_logged_in_short_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frames: list[bytes]
) -> None:
    with caplog.at_level(logging.WARNING):
        publisher = vllm(EventLog(10), tmp_path)
        async with running(publisher):
            with connected(zmq.DEALER, publisher.request_endpoint) as peer:
                await peer.send_multipart(frames)
                await peer.send_multipart([b"", END])
                assert await peer.recv_multipart() == [b"", b"", END, b""]
    [record] = caplog.records
    assert "malformed" in record.message
    assert len(record.message) < 400


async def test_blocks_that_follow_each_other_are_one_event(tmp_path: Path) -> None:
    def fill(log: EventLog) -> None:
        log.stored(DRAM, key(1), tokens(None, 10, 11))
        log.stored(DRAM, key(2), tokens(1, 20, 21))
        log.stored(DRAM, key(5), tokens(4, 50, 51))
        log.stored(DRAM, key(6), tokens(5, 60, 61))
        log.stored(DRAM, key(1), tokens(None, 10, 11))  # routers refuse an event that names a block twice

    assert await published_events(tmp_path, fill) == [
        stored([1, 2], None, [10, 11, 20, 21]),
        stored([5, 6], 4, [50, 51, 60, 61]),
    ]


async def test_parents_come_before_their_children_whatever_the_order_of_sealing(tmp_path: Path) -> None:
    def fill(log: EventLog) -> None:
        log.stored(DRAM, key(4), tokens(2, 40, 41))
        log.stored(DRAM, key(3), tokens(2, 30, 31))
        log.stored(DRAM, key(5), tokens(3, 50, 51))
        log.stored(DRAM, key(2), tokens(1, 20, 21))
        log.stored(DRAM, key(1), tokens(None, 10, 11))

    assert await published_events(tmp_path, fill) == [
        stored([1, 2], None, [10, 11, 20, 21]),
        stored([4], 2, [40, 41]),
        stored([3, 5], 2, [30, 31, 50, 51]),
    ]


async def test_blocks_without_known_tokens_are_announced_by_their_hash_alone(tmp_path: Path) -> None:
    def fill(log: EventLog) -> None:
        log.stored(DRAM, key(7))
        log.stored(DRAM, key(1), tokens(None, 10, 11))
        log.stored(DRAM, key(8))
        log.stored(SSD, key(1))  # in the same batch, so its tokens are known
        log.stored(SSD, key(9))
        log.removed(DRAM, key(9))

    assert await published_events(tmp_path, fill) == [
        stored([1], None, [10, 11]),
        stored([7, 8], None, []),
        stored([1], None, [10, 11], "DISK"),
        stored([9], None, [], "DISK"),
        BlockRemoved([9], "CPU"),
    ]
