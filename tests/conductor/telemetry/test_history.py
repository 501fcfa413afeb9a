"""Timelines and rejections, as a real Conductor makes them."""

import msgspec
import pytest

from conductor.effects import ToConductor
from conductor.policy import Conductor
from conductor.settings import Limits
from conductor.telemetry.history import NUM_ENDED, NUM_REJECTIONS, History, RequestTimeline
from mooncake.messages.fronts import Cancel, FrontHello, InFlight, Resume, Submit
from mooncake.messages.heartbeats import Joining
from mooncake.messages.requests import FinishReason, Held, HeldStep
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    DecodeRefused,
    Finished,
    Leave,
    Prefilled,
    Register,
    Reserved,
    Role,
    WorkFailed,
)
from tests.conductor.small_cluster import (
    B0,
    D0,
    EPOCH,
    FRONT,
    GRANT,
    HEARTBEAT,
    P0,
    move_at_the_second_try,
    new_conductor,
    ref,
    registration,
    request,
    two_decode_instances,
)


class Watched:
    """A Conductor and its history."""

    def __init__(self, limits: Limits | None = None, conductor: Conductor | None = None) -> None:
        self.conductor: Conductor = conductor or new_conductor(limits)
        self.history = History()

    def hear(self, sender: bytes, message: ToConductor, now_s: float) -> None:
        self.history.observe(sender, message, self.conductor.handle(sender, message, now_s), now_s)

    def timeline(self, request_id: str = "r") -> RequestTimeline:
        timeline = self.history.find(request_id)
        assert timeline is not None
        return timeline

    def steps(self, request_id: str = "r") -> list[tuple[float, str, str | None]]:
        return [moment[:3] for moment in self.timeline(request_id).moments]


@pytest.fixture
def cluster() -> Watched:
    return Watched()


def prefilled(cluster: Watched) -> None:
    """A request whose decode was ordered at 4.0."""
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(D0, Reserved(ref(), GRANT), 2.0)
    cluster.hear(P0, Prefilled(ref(), 42, 8), 4.0)


def test_a_request_is_seen_through_all_its_steps(cluster: Watched) -> None:
    prefilled(cluster)
    assert not cluster.timeline().is_over
    cluster.hear(D0, Finished(ref(), FinishReason.STOP, 5, arrival_s=0.5, joining_s=0.25), 6.0)
    assert cluster.steps() == [
        (1.0, "queued", None),
        (1.0, "reserving", "d0"),
        (2.0, "prefilling", "p0"),
        (4.0, "transferring", "d0"),
        (4.5, "loading", "d0"),
        (4.75, "decoding", "d0"),
        (6.0, "finished", None),
    ]
    timeline = cluster.timeline()
    assert (timeline.prefill, timeline.decode, timeline.is_over) == ("p0", "d0", True)
    assert (timeline.num_prompt_tokens, timeline.num_cached_tokens, timeline.num_output_tokens) == (9, 8, 5)
    assert cluster.history.step_s["prefilling"] == 2.0
    assert cluster.history.step_s["decoding"] == 1.25
    assert not cluster.history.live


def test_a_request_is_seen_to_be_decoded_while_it_runs(cluster: Watched) -> None:
    prefilled(cluster)
    cluster.hear(D0, msgspec.structs.replace(HEARTBEAT, joining=[Joining(ref(), 0.5, None)]), 4.6)
    assert cluster.steps()[-1] == (4.5, "loading", "d0")
    cluster.hear(D0, msgspec.structs.replace(HEARTBEAT, joining=[Joining(ref(), 0.5, 0.25)]), 5.0)
    assert cluster.steps()[-1] == (4.75, "decoding", "d0")
    cluster.hear(D0, HEARTBEAT, 6.0)
    cluster.hear(D0, Finished(ref(), FinishReason.STOP, 5, arrival_s=0.5, joining_s=0.25), 7.0)
    assert [step for _, step, _ in cluster.steps()[-3:]] == ["loading", "decoding", "finished"]
    assert cluster.history.num_steps["decoding"] == 1


def test_what_is_said_of_an_earlier_attempt_is_not_taken_for_this_one(cluster: Watched) -> None:
    prefilled(cluster)
    late = msgspec.structs.replace(HEARTBEAT, joining=[Joining(ref(0), 0.5, 0.25)])
    cluster.hear(D0, late, 4.6)
    assert cluster.steps()[-1] == (4.0, "transferring", "d0")


def test_an_inlined_prompt_has_no_prefill_and_no_transfer(cluster: Watched) -> None:
    cluster.hear(P0, Leave(), 0.5)
    cluster.hear(D0, Leave(), 0.5)
    cluster.hear(B0, registration("b0", Role.BOTH), 0.5)
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(B0, Reserved(ref(), GRANT), 2.0)
    cluster.hear(B0, Prefilled(ref(), 3, 4), 2.5)
    cluster.hear(B0, Finished(ref(), FinishReason.LENGTH, 5), 3.0)
    assert cluster.timeline().num_cached_tokens == 4
    steps = [step for _, step, _ in cluster.steps()]
    assert steps == ["queued", "reserving", "inlined", "decoding", "finished"]


def test_a_failed_attempt_says_why_and_the_next_one_follows(cluster: Watched) -> None:
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(D0, WorkFailed(ref(), "no pages", retryable=True), 2.0)
    again = cluster.timeline().moments[2]
    assert (again.step, again.note) == ("queued", "d0: no pages")
    assert [step for _, step, _ in cluster.steps()] == ["queued", "reserving", "queued", "reserving"]
    cluster.hear(D0, Reserved(ref(1), GRANT), 3.0)  # late: of the attempt that failed
    assert cluster.steps()[-1][1] == "reserving"


def test_a_lost_instance_puts_its_requests_back_into_the_queue(cluster: Watched) -> None:
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(D0, Reserved(ref(), GRANT), 2.0)
    cluster.hear(P0, Leave(), 3.0)
    assert cluster.steps()[-1] == (3.0, "queued", None)
    cluster.hear(b"p1#1", registration("p1", Role.PREFILL), 4.0)
    assert cluster.steps()[-1] == (4.0, "reserving", "d0")


def test_a_client_that_goes_ends_the_timeline_once(cluster: Watched) -> None:
    prefilled(cluster)
    cluster.hear(b"other#1", Cancel("r"), 4.5)
    assert not cluster.timeline().is_over
    cluster.hear(FRONT, Cancel("r"), 5.0)
    cluster.hear(D0, Finished(ref(), FinishReason.STOP, 5), 6.0)
    assert cluster.steps()[-1][:2] == (5.0, "aborted")
    assert +cluster.history.num_ended == {"aborted": 1}


@pytest.mark.parametrize(("is_refused", "end"), [(False, "failed"), (True, "refused")])
def test_a_refusal_is_no_failure(cluster: Watched, is_refused: bool, end: str) -> None:
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(D0, WorkFailed(ref(), "logprobs", retryable=False, is_refused=is_refused), 2.0)
    last = cluster.timeline().last
    assert (last.step, last.note) == (end, "logprobs")
    assert +cluster.history.num_ended == {end: 1}


def test_rejections_are_kept_with_their_reason() -> None:
    cluster = Watched(Limits(max_running_requests=1))
    cluster.hear(FRONT, Submit(request("a")), 1.0)
    cluster.hear(FRONT, Submit(request("b")), 2.0)
    (rejection,) = cluster.history.rejections
    assert (rejection.request_id, rejection.status, rejection.reason) == ("b", 429, "max_running_requests")
    assert (rejection.at_s, rejection.prompt_len) == (2.0, 9)
    assert "the limit is 1" in rejection.message
    assert cluster.steps("b")[-1][1] == "rejected"


def test_a_refusal_of_every_decode_instance_is_a_rejection(cluster: Watched) -> None:
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(D0, DecodeRefused(ref(), "TBT would be 0.5 s", 2, 0.5), 2.0)
    assert [step for _, step, _ in cluster.steps()] == ["queued", "reserving", "queued", "rejected"]
    assert cluster.history.num_rejected["double_check"] == 1


def test_an_id_in_use_is_rejected_and_its_owner_is_left_alone(cluster: Watched) -> None:
    cluster.hear(FRONT, Submit(request()), 1.0)
    cluster.hear(FRONT, Submit(request()), 2.0)
    assert not cluster.timeline().is_over
    assert cluster.history.num_rejected["duplicate"] == 1
    assert cluster.history.num_ended["rejected"] == 0


def test_what_is_kept_is_bounded() -> None:
    cluster = Watched(Limits(max_running_requests=1))
    cluster.hear(FRONT, Submit(request("first")), 0.0)
    num = max(NUM_ENDED, NUM_REJECTIONS) + 10
    for number in range(num):
        cluster.hear(FRONT, Submit(request(f"r{number}")), 1.0)
    assert (len(cluster.history.ended), len(cluster.history.rejections)) == (NUM_ENDED, NUM_REJECTIONS)
    assert cluster.history.find("r0") is None
    assert cluster.history.find(f"r{num - 1}") is not None
    assert cluster.history.find("first") is not None
    assert cluster.history.num_rejected["max_running_requests"] == num


def test_messages_of_instances_that_have_nothing_to_do_with_requests_are_ignored(cluster: Watched) -> None:
    message: Register = registration("p9", Role.PREFILL)
    cluster.hear(b"p9#1", message, 1.0)
    cluster.hear(D0, Reserved(ref(), GRANT), 1.0)
    assert not cluster.history.live
    assert not cluster.history.ended


def test_a_migration_shows_on_which_instances_the_request_ran() -> None:
    cluster = Watched(conductor=two_decode_instances(Limits()))
    cluster.hear(FRONT, Submit(request()), 0.0)
    move_at_the_second_try(cluster.hear)
    timeline = cluster.timeline()
    assert cluster.steps()[-3:] == [
        (2.0, "transferring", "d0"),
        (9.0, "decoding", "d1"),
        (10.0, "finished", None),
    ]
    assert timeline.moments[-2].note == "moved from d0"
    assert (timeline.num_attempts, timeline.num_moves, timeline.decode) == (1, 1, "d1")


def test_requests_of_an_earlier_conductor_are_seen_where_they_have_gone_on() -> None:
    cluster = Watched(conductor=Conductor(EPOCH + 1, "model", Limits()))
    cluster.hear(FRONT, FrontHello(PROTOCOL_VERSION, "model", EPOCH), 9.0)
    held = [Held(ref(request_id=name), HeldStep.DECODING) for name in ("told", "before")]
    cluster.hear(FRONT, Resume(request("told"), 4.0), 10.0)
    cluster.hear(FRONT, Resume(request("nowhere"), 1.0), 10.0)
    cluster.hear(D0, msgspec.structs.replace(registration("d0", Role.DECODE), epoch=EPOCH, held=held), 11.0)
    cluster.hear(FRONT, Resume(request("before"), 7.0), 12.0)
    assert cluster.steps("told") == [(6.0, "queued", None), (11.0, "decoding", "d0")]
    assert cluster.steps("before") == [(5.0, "queued", None), (12.0, "decoding", "d0")]
    cluster.hear(D0, Finished(ref(request_id="told"), FinishReason.STOP, 5), 13.0)
    assert cluster.steps("told")[2:] == [(13.0, "finished", None)]
    # Their front has all of it, or its client has gone, before it has heard of this Conductor.
    for now_s in (13.0, 14.0):
        cluster.hear(FRONT, InFlight([]), now_s)
    assert not cluster.history.live
    assert not cluster.conductor.requests
    assert cluster.history.num_ended["aborted"] == 2
