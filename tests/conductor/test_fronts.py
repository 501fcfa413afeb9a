"""Fronts that come and go, and what they and the Conductor know of their requests."""

from collections import Counter

import pytest

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.fronts import (
    ClusterState,
    Continue,
    Failed,
    FrontHello,
    InFlight,
    Interrupted,
    Rejected,
    Resume,
    Submit,
    Unknown,
)
from mooncake.messages.requests import Ref
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    SPOKEN,
    Abort,
    Leave,
    RegisterRefused,
    Reserve,
    Returning,
    Role,
)
from tests.conductor.small_cluster import (
    D0,
    EPOCH,
    FRONT,
    HEARTBEAT,
    LAYOUT,
    P0,
    new_conductor,
    ref,
    registration,
    rejections_when_time_passes,
    request,
)


def test_a_front_is_told_which_of_its_requests_the_conductor_does_not_have() -> None:
    """The Conductor never received these requests, or its last message about them was lost."""
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request("here")), 1.0)
    [answer] = conductor.handle(FRONT, InFlight(["swallowed", "here"]), 1.5)
    assert answer == Effect(FRONT, Unknown(["swallowed"]))
    assert conductor.num_open == 1
    other_front = peer_identity("front1", 1)
    assert conductor.handle(other_front, InFlight(["here"]), 1.5) == [Effect(other_front, Unknown(["here"]))]


def test_a_request_that_its_front_does_not_have_ends_at_the_second_heartbeat() -> None:
    """The last tokens have reached the front a moment before the Conductor hears of them, or its cancellation
    was swallowed."""
    conductor = new_conductor()
    for request_id in ("cancelled", "other"):
        conductor.handle(FRONT, Submit(request(request_id)), 1.0)
    assert conductor.handle(FRONT, InFlight(["other"]), 1.5) == []
    assert conductor.handle(FRONT, InFlight(["cancelled", "other"]), 2.5) == []
    assert conductor.handle(FRONT, InFlight(["other"]), 3.5) == []
    other_front = peer_identity("front1", 1)
    for _ in range(3):
        assert conductor.handle(other_front, InFlight([]), 4.0) == []
    effects = conductor.handle(FRONT, InFlight(["other"]), 4.5)
    assert {effect.message for effect in effects if isinstance(effect.message, Abort)} == {
        Abort(ref(request_id="cancelled"))
    }
    assert set(conductor.requests) == {"other"}


@pytest.mark.parametrize(
    ("offer", "version"),
    [
        ((SPOKEN.oldest, None), SPOKEN.oldest),
        ((SPOKEN.oldest - 1, SPOKEN.oldest), SPOKEN.oldest),
        (SPOKEN, SPOKEN.newest),
        ((SPOKEN.newest, SPOKEN.newest + 1), SPOKEN.newest),
    ],
)
def test_a_front_hears_the_newest_common_version(offer: tuple[int, int | None], version: int) -> None:
    conductor, front = new_conductor(), b"front#2"
    hello = FrontHello(offer[0], "model", newest_version=offer[1])
    [effect] = conductor.handle(front, hello, 1.0)
    effects = [effect, *conductor.handle(D0, Leave(), 1.5)]
    told = [of.message.version for of in effects if isinstance(of.message, ClusterState) and of.peer == front]
    assert told == [version, version]
    assert conductor.versions["front"] == Counter([SPOKEN.newest, version])


def test_fronts_that_do_not_fit_are_refused() -> None:
    for hello in (FrontHello(99, "model"), FrontHello(PROTOCOL_VERSION, "other")):
        [effect] = new_conductor().handle(b"front#2", hello, 1.0)
        assert isinstance(effect.message, RegisterRefused)


def test_requests_of_a_vanished_front_end_and_it_is_told_should_it_return() -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    assert known(conductor, 1.5)
    for identity in (P0, D0):
        conductor.handle(identity, HEARTBEAT, 7.0)
    [*aborts, failed] = conductor.tick(7.0)
    assert [effect.message for effect in aborts] == [Abort(ref()), Abort(ref())]
    assert failed.peer == FRONT
    assert isinstance(failed.message, Failed)
    assert failed.message.may_retry
    assert conductor.num_open == 0
    # It may not have heard that.
    assert not known(conductor, 8.0)
    assert known(conductor, 9.0)


def successor() -> Conductor:
    """A Conductor without instances, one of whose fronts had another before."""
    conductor = Conductor(EPOCH + 1, "model", Limits())
    [effect] = conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model", EPOCH, 2), 0.0)
    assert isinstance(effect.message, ClusterState)
    return conductor


def test_requests_wait_for_the_instances_of_an_earlier_conductor() -> None:
    conductor = successor()
    begun = request("begun").continued([7, 8], LAYOUT.block_size)
    assert conductor.handle(FRONT, Resume(begun, 3.0), 0.1) == []
    assert conductor.handle(FRONT, Resume(request("waits"), 1.0), 0.1) == []
    assert conductor.handle(FRONT, Submit(request("new")), 0.2) == []
    assert conductor.handle(FRONT, Resume(request("new"), 0.1), 0.3) == [], "it was in the socket's queue"
    conductor.handle(P0, registration("p0", Role.PREFILL), 0.4)
    assert conductor.num_open == 3
    effects = conductor.handle(D0, registration("d0", Role.DECODE), 0.5)
    assert Effect(FRONT, Interrupted("begun")) in effects, "it may have got further since"
    effects += conductor.handle(FRONT, Continue(begun.continued([7, 8, 9], LAYOUT.block_size)), 0.6)
    orders = [effect.message for effect in effects if isinstance(effect.message, Reserve)]
    assert [order.ref for order in orders] == [Ref(EPOCH + 1, name, 1) for name in ("waits", "new", "begun")]
    assert [order.may_refuse for order in orders] == [False, True, False]
    assert orders[-1].request.output == [7, 8, 9]
    assert [conductor.requests[name].submitted_s for name in ("begun", "new")] == [-2.9, 0.2]


def test_without_instances_requests_that_have_not_begun_are_refused_in_the_end() -> None:
    limits, conductor = Limits(), successor()
    conductor.handle(FRONT, Resume(request("begun").continued([7], LAYOUT.block_size), 0.0), 0.1)
    conductor.handle(FRONT, Submit(request("new")), 0.1)
    later = list(
        rejections_when_time_passes(conductor, 5.0, limits.return_grace_s, limits.return_grace_s + 1)
    )
    assert [(at_s, rejected.request_id, rejected.status) for at_s, rejected in later] == [
        (limits.return_grace_s + 1, "new", 503)
    ]
    assert later[0][1].retry_after_s is not None
    assert set(conductor.requests) == {"begun"}
    now_s = limits.return_grace_s + 2
    [rejected] = conductor.handle(FRONT, Submit(request("late")), now_s)
    assert isinstance(rejected.message, Rejected)


def test_an_instance_that_was_lost_before_is_waited_for_while_it_starts_again() -> None:
    conductor = successor()
    conductor.handle(D0, registration("d0", Role.DECODE), 0.1)
    conductor.handle(FRONT, Submit(request("new")), 0.2)
    conductor.handle(peer_identity("p0/returning", 2), Returning("p0", 2, []), 0.3)
    assert rejections_when_time_passes(conductor, 5.0, 10.0, 15.0, 20.0) == []
    again = conductor.handle(peer_identity("p0", 2), registration("p0", Role.PREFILL, 2), 21.0)
    assert [effect.message.ref.request_id for effect in again if isinstance(effect.message, Reserve)] == [
        "new"
    ]


def test_what_a_front_sends_before_it_has_said_hello_is_resumed_later() -> None:
    conductor = Conductor(EPOCH + 1, "model", Limits())
    assert conductor.handle(FRONT, Submit(request("r")), 0.0) == []
    assert conductor.handle(FRONT, Resume(request("r"), 0.0), 0.0) == []
    assert conductor.num_open == 0


def known(conductor: Conductor, now_s: float) -> bool:
    """Whether the front is told that its requests are known."""
    [effect] = conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), now_s)
    assert isinstance(effect.message, ClusterState)
    return effect.message.known
