"""Fronts that come and go, and what they and the Conductor know of their requests."""

from conductor.effects import Effect
from conductor.policy import Conductor
from mooncake.messages.bus import peer_identity
from mooncake.messages.fronts import (
    ClusterState,
    Failed,
    FrontHello,
    InFlight,
    Rejected,
    Submit,
    Unknown,
)
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    RegisterRefused,
)
from tests.conductor.small_cluster import (
    D0,
    FRONT,
    HEARTBEAT,
    P0,
    new_conductor,
    ref,
    request,
)


def test_fronts_that_were_not_accepted_submit_nothing() -> None:
    [effect] = new_conductor().handle(b"front#2", Submit(request()), 1.0)
    assert isinstance(effect.message, Rejected)
    assert effect.message.status == 503


def test_a_front_is_told_which_of_its_requests_the_conductor_does_not_have() -> None:
    """The Conductor never received these requests, or its last message about them was lost."""
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request("here")), 1.0)
    [answer] = conductor.handle(FRONT, InFlight(["swallowed", "here"]), 1.5)
    assert answer == Effect(FRONT, Unknown(["swallowed"]))
    assert conductor.num_running == 1
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
    assert conductor.num_running == 0
    # It may not have heard that.
    assert not known(conductor, 8.0)
    assert known(conductor, 9.0)


def known(conductor: Conductor, now_s: float) -> bool:
    """Whether the front is told that its requests are known."""
    [effect] = conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), now_s)
    assert isinstance(effect.message, ClusterState)
    return effect.message.known
