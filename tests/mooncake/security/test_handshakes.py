"""Connections that end without admission are counted, with what is known of each."""

import random

import pytest
import zmq

from mooncake.security.handshakes import HANDSHAKE_MARGIN_S, HANDSHAKE_S, Handshakes

ACCEPTED, ADMITTED, GONE = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
UNFINISHED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def count(*events: tuple[int, int], now_s: float = 0.0) -> int:
    handshakes = Handshakes()
    for event, descriptor in events:
        handshakes.on_event(event, descriptor, 0.0)
    return handshakes.num_refused(now_s)


def test_connections_that_end_without_admission_are_refused() -> None:
    assert count((ACCEPTED, 7)) == 0
    assert count((ACCEPTED, 7), (GONE, 7)) == 1
    assert count((ACCEPTED, 7), (ADMITTED, 0)) == 0
    assert count((ACCEPTED, 7), (ADMITTED, 0), (GONE, 7)) == 0
    assert count((ACCEPTED, 7), (ADMITTED, 0), (GONE, 7), (ACCEPTED, 7), (GONE, 7)) == 1
    assert count((ACCEPTED, 7), (ACCEPTED, 8), (GONE, 8), (ADMITTED, 0)) == 1


def test_connections_that_end_in_the_middle_are_not_refused() -> None:
    assert count((ACCEPTED, 7), (UNFINISHED, 0), (GONE, 7)) == 0
    assert count((ACCEPTED, 7), (ACCEPTED, 8), (UNFINISHED, 0), (GONE, 7), (GONE, 8)) == 1


def test_stranger_among_friends_is_counted_when_all_are_decided() -> None:
    events = [(ACCEPTED, 7), (ACCEPTED, 8), (ADMITTED, 0), (GONE, 8)]  # was it 7 or 8 that was admitted?
    assert count(*events) <= 1
    assert count(*events, now_s=HANDSHAKE_S + HANDSHAKE_MARGIN_S) == 1


@pytest.mark.parametrize("seed", range(20))
def test_count_is_never_too_high_never_falls_and_is_right_in_the_end(seed: int) -> None:
    draw = random.Random(seed)
    handshakes, now_s, num_refused, num_unfinished, last_count = Handshakes(), 0.0, 0, 0, 0
    pending: dict[int, float] = {}
    admitted: set[int] = set()
    for _ in range(2000):
        now_s += draw.expovariate(10)
        # libzmq ends what has not got through in time
        expired = [number for number, since_s in pending.items() if now_s - since_s > HANDSHAKE_S]
        moves = [(GONE, number) for number in expired]
        if not expired:
            kinds = [ACCEPTED] + [ADMITTED, GONE] * bool(pending) + [GONE] * bool(admitted)
            kind = draw.choice(kinds)
            candidates = sorted(pending) if kind == ADMITTED else sorted(set(pending) | admitted)
            free = next(
                number for number in range(9, 5000) if number not in pending and number not in admitted
            )
            moves = [(kind, free if kind == ACCEPTED else draw.choice(candidates))]
        for kind, number in moves:
            is_unfinished = kind == GONE and number in pending and draw.random() < 0.3
            if is_unfinished:
                handshakes.on_event(UNFINISHED, 0, now_s)
                num_unfinished += 1
            handshakes.on_event(kind, 0 if kind == ADMITTED else number, now_s)
            if kind == ACCEPTED:
                pending[number] = now_s
            elif kind == ADMITTED:
                del pending[number]
                admitted.add(number)
            elif number in pending:
                del pending[number]
                num_refused += not is_unfinished
            else:
                admitted.remove(number)
        counted = handshakes.num_refused(now_s)
        assert last_count <= counted <= num_refused
        last_count = counted
    for number in list(pending):
        handshakes.on_event(GONE, number, now_s)
    assert handshakes.num_unfinished == num_unfinished
    final_s = now_s + HANDSHAKE_S + HANDSHAKE_MARGIN_S
    assert handshakes.num_refused(final_s) == num_refused + len(pending)
