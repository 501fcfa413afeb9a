"""Which request goes next, and on which lane."""

from dataclasses import dataclass, field

import pytest

from messenger.sender.outlet import BulkPace
from messenger.sender.queues import BULK_LETS_BY_S, BULK_WAITS_S, Queues
from messenger.sender.rdma_outlet import RdmaOutlet
from messenger.sender.requests import FetchRequest, LaneRequest, ProbeRequest, Urgency
from messenger.sender.shm_outlet import ShmOutlet
from messenger.sender.tcp_outlet import TcpOutlet
from messenger.transport.transports import Path, Transport
from messenger.wire.messages import Fetch
from messenger.wire.protocol import MAX_FRAME_BYTES

NOW_S = 100.0
LATER_S = NOW_S + 2 * BULK_WAITS_S
CALM_S = NOW_S + 10.0


@dataclass(eq=False)
class Lane:
    bulk_pace: BulkPace = TcpOutlet.bulk_pace
    is_standby: bool = False
    has_capacity: bool = True
    under_way: dict[Urgency, int] = field(default_factory=lambda: dict.fromkeys(Urgency, 0))

    @property
    def path(self) -> Path:
        return Path(Transport.TCP, "there", is_standby=self.is_standby)

    @property
    def outstanding_bytes(self) -> int:
        return sum(self.under_way.values())

    def outstanding_bytes_of(self, urgency: Urgency) -> int:
        return self.under_way[urgency]


def queues(*lanes: Lane) -> Queues[Lane]:
    result: Queues[Lane] = Queues()
    result.set_lanes(lanes)
    return result


def put(waiting: Queues[Lane], urgency: Urgency, num_bytes: int = 1, now_s: float = NOW_S) -> LaneRequest:
    request = ProbeRequest(memoryview(bytes(num_bytes)), urgency, lambda _: None)
    waiting.begun(request, now_s)
    waiting.put(request)
    return request


def taken_bytes(waiting: Queues[Lane], lane: Lane, now_s: float) -> int:
    """Takes for `lane` what it may."""
    while (request := waiting.take(lane, now_s)) is not None:
        lane.under_way[request.urgency] += request.num_bytes
    return lane.outstanding_bytes


def test_the_only_lane_that_does_not_stand_by_takes_bulk_too() -> None:
    rdma, tcp = Lane(RdmaOutlet.bulk_pace), Lane(is_standby=True)
    waiting = queues(rdma, tcp)
    urgent = put(waiting, Urgency.LATENCY)
    assert waiting.take(rdma, NOW_S) is urgent
    waiting.ended(urgent)
    bulk = put(waiting, Urgency.BULK)
    assert waiting.take(tcp, NOW_S) is None
    assert waiting.take(rdma, NOW_S) is bulk


def test_bulk_waits_for_those_in_a_hurry_but_not_for_ever() -> None:
    lane = Lane()
    waiting = queues(lane)
    bulk = [put(waiting, Urgency.BULK)]
    urgent = [put(waiting, Urgency.LATENCY) for _ in range(2)]
    # Nothing of it was sent for long.
    assert [waiting.take(lane, NOW_S) for _ in range(4)] == [*urgent, bulk[0], None]
    bulk += [put(waiting, Urgency.BULK) for _ in range(2)]
    assert waiting.take(lane, NOW_S) is None
    assert [waiting.take(lane, LATER_S) for _ in range(2)] == [bulk[1], None]
    for request in urgent:
        waiting.ended(request)
    assert waiting.take(lane, LATER_S) is bulk[2]


def test_bulk_has_its_turns_among_those_in_a_hurry_who_never_end() -> None:
    lane = Lane()
    waiting = queues(lane)
    bulk = {put(waiting, Urgency.BULK) for _ in range(2)}
    urgent, taken_s = put(waiting, Urgency.LATENCY), []
    for now_ms in range(1000):
        now_s = NOW_S + 1e-3 * now_ms
        request = waiting.take(lane, now_s)
        if request in bulk:
            taken_s.append(now_s - NOW_S)
        else:
            assert request is urgent
            waiting.ended(urgent)
            urgent = put(waiting, Urgency.LATENCY, now_s=now_s)
    first_s = BULK_LETS_BY_S - BULK_WAITS_S
    assert taken_s == pytest.approx([first_s, first_s + BULK_LETS_BY_S], abs=2e-3)


def test_bulk_that_comes_after_a_pause_goes_behind_those_in_a_hurry() -> None:
    lane = Lane()
    waiting = queues(lane)
    bulk = put(waiting, Urgency.BULK, now_s=CALM_S)
    urgent = put(waiting, Urgency.LATENCY, now_s=CALM_S)
    assert [waiting.take(lane, CALM_S) for _ in range(2)] == [urgent, bulk]


@pytest.mark.parametrize("num_fetched", [1, 0])
def test_of_bulk_fetched_over_shared_memory_those_in_a_hurry_wait_for_one_piece(num_fetched: int) -> None:
    lane = Lane(ShmOutlet.bulk_pace)
    waiting = queues(lane)
    urgent = put(waiting, Urgency.LATENCY)
    assert waiting.take(lane, NOW_S) is urgent
    waiting.ended(urgent)
    piece = memoryview(bytes(waiting.frame_bytes(Urgency.BULK, NOW_S)))
    for _ in range(3):
        request: LaneRequest = ProbeRequest(piece, Urgency.BULK, lambda _: None)
        if num_fetched:
            fetch = Fetch([b"key"], 0, 1)
            request = FetchRequest(fetch, [piece], len(piece), Urgency.BULK, lambda found, failure: None)
        waiting.begun(request, NOW_S)
        waiting.put(request)
    assert taken_bytes(waiting, lane, NOW_S) == (2 - num_fetched) * len(piece)


def test_each_class_has_a_window_of_its_own() -> None:
    lane = Lane()
    waiting = queues(lane)
    for _ in range(4):
        put(waiting, Urgency.BULK, MAX_FRAME_BYTES)
    assert taken_bytes(waiting, lane, CALM_S) == 2 * MAX_FRAME_BYTES
    for _ in range(4):
        put(waiting, Urgency.LATENCY, MAX_FRAME_BYTES)
    # Bulk under way keeps nobody from going, and what is in a hurry keeps bulk from nothing once it is sent.
    assert taken_bytes(waiting, lane, CALM_S) == 4 * MAX_FRAME_BYTES
    lane.under_way[Urgency.BULK] = 0
    assert taken_bytes(waiting, lane, CALM_S) == 4 * MAX_FRAME_BYTES
    assert lane.under_way[Urgency.BULK] == 2 * MAX_FRAME_BYTES


def test_a_lane_is_kept_free_of_bulk_while_others_are_in_a_hurry() -> None:
    lanes = [Lane(), Lane()]
    waiting = queues(*lanes)
    put(waiting, Urgency.BULK)
    assert waiting.lane_for(Urgency.BULK, NOW_S) is lanes[0]
    waiting.ended(put(waiting, Urgency.LATENCY))
    assert waiting.lane_for(Urgency.BULK, NOW_S) is lanes[1]
    assert waiting.lane_for(Urgency.BULK, CALM_S) is lanes[0]


@pytest.mark.parametrize("urgency", Urgency)
def test_a_lane_with_too_many_requests_takes_none_however_small(urgency: Urgency) -> None:
    full, other = Lane(ShmOutlet.bulk_pace, has_capacity=False), Lane(ShmOutlet.bulk_pace)
    waiting = queues(full, other)
    request = put(waiting, urgency)
    assert waiting.take(full, CALM_S) is None
    assert waiting.lane_for(urgency, CALM_S) is other
    assert waiting.take(other, CALM_S) is request
