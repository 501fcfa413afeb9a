"""What arrives late, twice or with a gap never reaches a client as text; a lost Conductor is noticed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.front.errors import GenerationFailedError, UnavailableError
from conductor.front.generation import link as link_module
from conductor.front.generation import receptions
from conductor.front.generation.link import Link
from conductor.front.generation.reception import Event, Lost, Received, Reception
from mooncake.bus.in_process import Inbox, InProcessLink
from mooncake.errors import ConfigError, OverloadedError
from mooncake.leadership.leaders import Leader, Leaders
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.fronts import Accepted, ClusterState, Ended, Interrupted, TokenOutput, Unknown
from mooncake.messages.requests import FinishReason, Ref, Request, SamplingParams
from tests.conductor.front.fakes import CLUSTER_KEY, DEADLINE_S, FakeCluster, conductor_peer
from tests.examples import num_examples

BLOCK_SIZE = 4
REQUEST = Request("r", [1, 2], [], SamplingParams(max_tokens=9), "ep")


def output(
    position: int, token_ids: list[int], attempt: int = 1, finish: FinishReason | None = None
) -> TokenOutput:
    return TokenOutput(Ref(1, "r", attempt), position, token_ids, 0, finish)


def new_reception() -> Reception:
    return Reception(REQUEST, Inbox[Event]().put_nowait, 0.0)


def accepted(reception: Reception, *outputs: TokenOutput) -> list[int] | None:
    """The tokens that are new with these outputs; None if the last one is stale."""
    new: list[int] = []
    received: list[Received] | None = []
    for one in outputs:
        received = reception.accept(one)
        new += [token_id for event in received or [] for token_id in event.token_ids]
    return None if received is None else new


def test_only_new_tokens_of_the_latest_attempt_are_accepted() -> None:
    reception = new_reception()
    assert accepted(reception, output(0, [1, 2])) == [1, 2]
    assert accepted(reception, output(2, [3])) == [3]
    assert accepted(reception, output(0, [1], attempt=2)) == []
    assert accepted(reception, output(3, [9], attempt=1)) is None
    assert accepted(reception, output(1, [2, 3, 4], attempt=2)) == [4]
    assert accepted(reception, output(4, [], attempt=2)) == []


def test_another_attempt_with_other_tokens_fails_the_request() -> None:
    reception = new_reception()
    reception.accept(output(0, [1, 2, 3]))
    assert reception.accept(output(0, [1], attempt=2)) == []
    with pytest.raises(GenerationFailedError, match="attempt 2 drew other tokens from 1 on than"):
        reception.accept(output(1, [9, 3], attempt=2))


def test_tokens_that_overtake_others_wait_for_them() -> None:
    reception = new_reception()
    assert accepted(reception, output(0, [1])) == [1]
    assert accepted(reception, output(3, [4], attempt=2)) == []
    assert accepted(reception, output(4, [5], attempt=2, finish=FinishReason.LENGTH)) == []
    assert accepted(reception, output(1, [2], attempt=1)) == [2]
    assert accepted(reception, output(0, [1, 2], attempt=1)) == []
    received = reception.accept(output(2, [3], attempt=1))
    assert received is not None
    assert [event.token_ids for event in received] == [[3], [4], [5]]
    assert [event.finish_reason for event in received] == [None, None, FinishReason.LENGTH]


def test_an_attempt_behind_what_has_come_replaces_what_came_early() -> None:
    reception = new_reception()
    assert accepted(reception, output(0, [1]), output(3, [9], attempt=2)) == [1]
    assert accepted(reception, output(1, [2], attempt=3)) == [2]
    assert accepted(reception, output(4, [9], attempt=2)) is None
    assert accepted(reception, output(2, [3, 4], attempt=3)) == [3, 4]


@st.composite
def _arrivals(draw: st.DrawFn) -> tuple[int, list[TokenOutput]]:
    """The outputs of a source and of its destination, each in order, mixed; some of them come twice."""
    num_tokens, moved = draw(st.integers(1, 12)), draw(st.integers(0, 12))
    ends = [min(moved, num_tokens), num_tokens]
    lanes: list[list[TokenOutput]] = []
    start = 0
    for attempt, end in enumerate(ends, start=1):
        lane = list[TokenOutput]()
        position = draw(st.integers(0, start)) if attempt == 2 else 0
        while position < end:
            count = draw(st.integers(1, end - position))
            finish = FinishReason.STOP if position + count == num_tokens and attempt == 2 else None
            tokens = list(range(position, position + count))
            lane += [output(position, tokens, attempt, finish)] * draw(
                st.integers(1, 2 if finish is None else 1)
            )
            position += count
        lanes.append(lane)
        start = end
    if not lanes[1]:
        lanes[1] = [output(num_tokens, [], 2, FinishReason.STOP)]
    arrivals = []
    while any(lanes):
        lane = draw(st.sampled_from([lane for lane in lanes if lane]))
        arrivals.append(lane.pop(0))
    return num_tokens, arrivals


@given(_arrivals())
@settings(max_examples=num_examples(200))
def test_tokens_of_two_attempts_come_once_and_in_order(arrivals: tuple[int, list[TokenOutput]]) -> None:
    num_tokens, outputs = arrivals
    reception, token_ids, ends = new_reception(), list[int](), 0
    for one in outputs:
        for event in reception.accept(one) or []:
            assert not ends
            token_ids += event.token_ids
            ends += event.finish_reason is not None
        if ends:
            break
    assert token_ids == list(range(num_tokens))
    assert ends == 1


def request_to(link: Link, request_id: str = "r") -> Request:
    return Request(request_id, [1, 2], [], SamplingParams(max_tokens=9), link.reply_to)


async def no_answer(cluster: FakeCluster, request: Request) -> None:
    pass


@asynccontextmanager
async def connected(
    directory: Path, absence_timeout_s: float = DEADLINE_S, leaders: Leaders | None = None
) -> AsyncIterator[tuple[Link, FakeCluster, list[int]]]:
    """A link to a fake cluster that answers no request; the list has one entry for each dropped output."""
    cluster = FakeCluster(f"ipc://{directory}/control")
    cluster.behaviour = no_answer
    dropped: list[int] = []
    conductor = conductor_peer(f"ipc://{directory}/control", leaders)
    link = Link(
        conductor,
        f"ipc://{directory}/reply",
        CLUSTER_KEY,
        "f",
        BLOCK_SIZE,
        absence_timeout_s,
        lambda: dropped.append(1),
    )
    tasks = [asyncio.create_task(cluster.run()), asyncio.create_task(link.run())]
    try:
        yield link, cluster, dropped
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        conductor.close()


@asynccontextmanager
async def in_flight(directory: Path) -> AsyncIterator[tuple[Link, FakeCluster, Request, Inbox[Event]]]:
    """A link with a request that the cluster has, and where its events go."""
    async with connected(directory) as (link, cluster, _):
        inbox = Inbox[Event]()
        await until(lambda: link.cluster is not None)
        await link.submit(request := request_to(link), inbox.put_nowait)
        await until(lambda: len(cluster.submitted) == 1)
        yield link, cluster, request, inbox


@pytest.fixture
def _quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_logprobs_come_with_the_tokens_that_are_new(tmp_path: Path) -> None:
    async with connected(tmp_path) as (link, cluster, _):
        await until(lambda: link.cluster is not None)
        inbox = Inbox[Event]()
        sampling = SamplingParams(max_tokens=9, num_logprobs=1)
        request = Request("r", [1, 2], [], sampling, link.reply_to)
        await link.submit(request, inbox.put_nowait)
        await cluster.send_tokens(request, [1, 2], 0)
        await cluster.send_tokens(request, [1, 2, 3], 0, FinishReason.LENGTH, attempt=2)
        for expected in ([-1.0, -2.0], [-3.0]):
            received = await inbox.get()
            assert isinstance(received, Received)
            assert [of_token.logprob for of_token in received.logprobs] == expected


async def test_tokens_reach_their_request_and_others_are_counted(tmp_path: Path) -> None:
    async with connected(tmp_path) as (link, cluster, dropped):
        await until(lambda: link.cluster is not None)
        inbox = Inbox[Event]()
        request = request_to(link)
        await link.submit(request, inbox.put_nowait)
        await cluster.send_tokens(request_to(link, "another"), [1])
        await cluster.send_tokens(request, [1, 2], 0)
        await cluster.send_tokens(request, [1, 2, 3], 0, FinishReason.LENGTH, attempt=2)
        await cluster.send_tokens(request, [4], 3)
        assert await inbox.get() == Received("r", [1, 2], 16, None, [])
        assert await inbox.get() == Received("r", [3], 16, FinishReason.LENGTH, [])
        await until(lambda: len(dropped) == 2)
        assert len(inbox) == 0
        assert link.num_in_flight == 0
        await link.cancel("r")
        assert cluster.cancelled == []


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_tokens_that_do_not_come_are_asked_for(tmp_path: Path) -> None:
    async with in_flight(tmp_path) as (link, cluster, request, inbox):
        await cluster.send_tokens(request, [1], 0)
        await cluster.send_tokens(request, [4], 3, attempt=2)
        await until(lambda: len(cluster.continued) >= 2)
        assert cluster.continued[0].output == [1]
        assert set(cluster.attempts_to_replace) == {2}
        await cluster.send_tokens(request, [2, 3, 4], 1, FinishReason.LENGTH, attempt=3)
        assert await inbox.get() == Received("r", [1], 16, None, [])
        assert await inbox.get() == Received("r", [2, 3, 4], 16, FinishReason.LENGTH, [])
        assert link.num_in_flight == 0


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_an_end_that_comes_before_other_tokens_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receptions, "MAX_BEATS_FOR_LAST_TOKENS", 10_000)  # none of them is what is tested
    async with in_flight(tmp_path) as (link, cluster, request, inbox):
        await cluster.to_front(Ended("r", 4))
        cluster.state = ClusterState(1, 2, 1, 10)
        await until(lambda: link.cluster is not None and link.cluster.num_prefill == 2)
        await cluster.send_tokens(request, [3, 4], 2, FinishReason.STOP, attempt=2)
        num_hellos = cluster.num_hellos
        await until(lambda: cluster.num_hellos >= num_hellos + 4)
        assert cluster.continued == [], "it has ended: there is nothing to be run again"
        await cluster.send_tokens(request, [1, 2], 0)
        assert await inbox.get() == Received("r", [1, 2], 16, None, [])
        assert await inbox.get() == Received("r", [3, 4], 16, FinishReason.STOP, [])
        assert link.num_in_flight == 0


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_lost_last_tokens_are_noticed(tmp_path: Path) -> None:
    async with in_flight(tmp_path) as (link, cluster, request, inbox):
        await cluster.send_tokens(request, [1], 0)
        assert await inbox.get() == Received("r", [1], 16, None, [])
        await cluster.to_front(Ended("r", 2))
        event = await inbox.get()
        assert isinstance(event, Lost)
        assert event.error.status == 503, "it may be sent again"
        assert "lost" in str(event.error)
        assert link.num_in_flight == 0


@pytest.mark.parametrize("num_received", [0, 1])
@pytest.mark.usefixtures("_quick_heartbeats")
async def test_a_request_that_the_conductor_does_not_have_ends(tmp_path: Path, num_received: int) -> None:
    """A break of the connection has swallowed that it came, or how it ended."""
    async with in_flight(tmp_path) as (link, cluster, request, inbox):
        for position in range(num_received):
            await cluster.send_tokens(request, [1], position)
            assert isinstance(await inbox.get(), Received)
        cluster.unknown.add("r")
        event = await inbox.get()
        assert isinstance(event, Lost)
        assert event.error.status == 503, "it may be sent again"
        assert link.num_in_flight == 0


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_heartbeats_that_were_answered_late_and_at_once_do_a_request_no_harm(tmp_path: Path) -> None:
    async with connected(tmp_path) as (link, cluster, _):
        inbox = Inbox[Event]()
        await until(lambda: link.cluster is not None)
        await link.submit(request := request_to(link), inbox.put_nowait)
        for _ in range(2 * receptions.MAX_BEATS_FOR_LAST_TOKENS):
            await cluster.to_front(Unknown(["r"]))
        num_hellos = cluster.num_hellos
        await until(lambda: cluster.num_hellos >= num_hellos + 3 * receptions.MAX_BEATS_FOR_LAST_TOKENS)
        await cluster.send_tokens(request, [1], 0, FinishReason.STOP)
        assert isinstance(await inbox.get(), Received)


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_last_tokens_that_wait_to_be_read_after_a_pause_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receptions, "MAX_BEATS_FOR_LAST_TOKENS", 10_000)  # none of them is what is tested
    async with in_flight(tmp_path) as (link, cluster, request, inbox):
        await cluster.to_front(Ended("r", 1))
        cluster.state = ClusterState(1, 2, 1, 10)
        await until(lambda: link.cluster is not None and link.cluster.num_prefill == 2)
        monkeypatch.setattr(link_module, "_now", lambda: asyncio.get_running_loop().time() + 60)
        num_hellos = cluster.num_hellos
        await until(lambda: cluster.num_hellos >= num_hellos + 3)
        await cluster.send_tokens(request, [1], 0, FinishReason.STOP)
        assert await inbox.get() == Received("r", [1], 16, FinishReason.STOP, [])


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_another_conductor_takes_over_what_is_in_flight(tmp_path: Path) -> None:
    async with in_flight(tmp_path) as (link, cluster, request, inbox):
        await cluster.send_tokens(request, [3, 4], 0)
        assert await inbox.get() == Received("r", [3, 4], 16, None, [])
        # What the one before said of it holds no more: that all tokens were sent, that it is not known.
        await cluster.to_front(Ended("r", 9))
        cluster.state = ClusterState(2, 1, 1, 10)
        for _ in range(2 * receptions.MAX_BEATS_FOR_LAST_TOKENS):
            await cluster.to_front(Unknown(["r"]))
        await until(lambda: len(cluster.resumed) == 1)
        num_hellos = cluster.num_hellos
        await until(lambda: cluster.num_hellos >= num_hellos + 2 * receptions.MAX_BEATS_FOR_LAST_TOKENS)
        [resumed] = cluster.resumed  # once, though each heartbeat is answered with the new epoch
        assert (resumed.num_prompt_tokens, resumed.output) == (2, [3, 4])
        assert resumed.reply_to == link.reply_to
        await cluster.send_tokens(request, [3, 4, 5], 0, FinishReason.STOP, attempt=2)
        assert await inbox.get() == Received("r", [5], 16, FinishReason.STOP, [])
        assert (len(inbox), cluster.cancelled) == (0, [])


async def test_requests_of_which_the_conductor_knows_nothing_fail(tmp_path: Path) -> None:
    async with in_flight(tmp_path) as (_, cluster, _, inbox):
        await cluster.to_front(ClusterState(1, 1, 1, 10, known=False))
        event = await inbox.get()
        assert isinstance(event, Lost)
        assert "had lost its connection" in str(event.error)
        # It has come to know of it in the meantime, if it was submitted behind the heartbeat.
        await until(lambda: cluster.cancelled == ["r"])


@pytest.mark.usefixtures("_quick_heartbeats")
@pytest.mark.parametrize("num_received", [0, 1])
async def test_without_a_conductor_requests_fail_that_get_no_tokens_for_too_long(
    tmp_path: Path, num_received: int
) -> None:
    async with connected(tmp_path, absence_timeout_s=0.5) as (link, cluster, _):
        inbox = Inbox[Event]()
        assert link.cluster is None
        await until(lambda: link.cluster is not None)
        await link.submit(request := request_to(link), inbox.put_nowait)
        for position in range(num_received):
            await cluster.send_tokens(request, [1], position)
            assert isinstance(await inbox.get(), Received)
        cluster.silent = True
        await until(lambda: link.cluster is None)
        event = await inbox.get()
        assert isinstance(event, Lost)
        assert isinstance(event.error, UnavailableError)
        cluster.silent = False
        await until(lambda: link.cluster is not None)


async def test_a_process_that_was_stopped_does_not_miss_its_conductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.01)
    async with connected(tmp_path) as (link, _, _):
        await until(lambda: link.cluster is not None)
        time.sleep(0.01 * 10 * link_module.MAX_UNANSWERED)  # noqa: ASYNC251, nothing runs meanwhile
        for _ in range(100):
            assert link.cluster is not None
            await asyncio.sleep(0)


async def test_the_end_fails_what_is_in_flight_and_takes_nothing_new(tmp_path: Path) -> None:
    async with connected(tmp_path) as (link, cluster, _):
        inbox = Inbox[Event]()
        await link.submit(request_to(link), inbox.put_nowait)
        await link.end(UnavailableError("over"))
        event = await inbox.get()
        assert isinstance(event, Lost)
        assert str(event.error) == "over"
        await until(lambda: cluster.cancelled == ["r"])
        with pytest.raises(UnavailableError, match="over"):
            await link.submit(request_to(link), inbox.put_nowait)


async def test_rejection_carries_when_to_come_back(tmp_path: Path) -> None:
    async def reject(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 429, "full", 2.5)

    async with connected(tmp_path) as (link, cluster, _):
        cluster.behaviour = reject
        inbox = Inbox[Event]()
        await link.submit(request_to(link), inbox.put_nowait)
        event = await inbox.get()
        assert isinstance(event, Lost)
        assert isinstance(event.error, OverloadedError)
        assert event.error.retry_after_s == 2.5


@asynccontextmanager
async def first_of_three(
    directory: Path, version: int = link_module.ACCEPTED_SINCE
) -> AsyncIterator[tuple[bool, FakeCluster, Inbox[Event]]]:
    """The first choice of an answer, which the Conductor has and does not accept.

    The flag is whether the further choices must wait.
    """
    async with connected(directory) as (link, cluster, _):
        cluster.accepts = False
        cluster.state = ClusterState(1, 2, 1, 10, version=version)
        await until(lambda: link.cluster is not None and link.cluster.num_prefill == 2)
        inbox = Inbox[Event]()
        must_wait = await link.submit(request_to(link), inbox.put_nowait, num_choices=3)
        await until(lambda: len(cluster.submitted) == 1)
        yield must_wait, cluster, inbox


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_an_answer_goes_on_if_its_acceptance_is_lost(tmp_path: Path) -> None:
    async with first_of_three(tmp_path) as (must_wait, cluster, inbox):
        assert must_wait
        assert await inbox.get() == Accepted("r")
        await cluster.to_front(Accepted("r"))
        num_hellos = cluster.num_hellos
        await until(lambda: cluster.num_hellos >= num_hellos + 2)
        assert len(inbox) == 0, "it is told once"


async def test_an_answer_goes_on_if_its_tokens_overtake_its_acceptance(tmp_path: Path) -> None:
    async with first_of_three(tmp_path) as (_, cluster, inbox):
        await cluster.send_tokens(cluster.submitted[0], [1], 0, FinishReason.STOP)
        assert await inbox.get() == Accepted("r")
        assert await inbox.get() == Received("r", [1], 16, FinishReason.STOP, [])


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_an_answer_goes_on_under_another_conductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receptions, "MAX_UNACCEPTED_BEATS", 10_000)
    async with first_of_three(tmp_path) as (_, cluster, inbox):
        cluster.state = ClusterState(2, 1, 1, 10)
        assert await inbox.get() == Accepted("r")
        await until(lambda: [request.request_id for request in cluster.resumed] == ["r"])


@pytest.mark.usefixtures("_quick_heartbeats")
async def test_an_older_conductor_is_not_waited_for(tmp_path: Path) -> None:
    async with first_of_three(tmp_path, version=link_module.ACCEPTED_SINCE - 1) as (must_wait, _, _):
        assert not must_wait


async def test_unusable_endpoint_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Link(InProcessLink(Inbox(), Inbox()), "nonsense", CLUSTER_KEY, "f", BLOCK_SIZE, DEADLINE_S)


async def test_a_request_that_is_interrupted_goes_on_behind_the_tokens_that_have_come(tmp_path: Path) -> None:
    async with connected(tmp_path) as (link, cluster, _):
        await until(lambda: link.cluster is not None)
        inbox = Inbox[Event]()
        root = root_key("f", "salt")
        prompt = [1, 2, 3, 4, 5]
        keys = block_keys(prompt, BLOCK_SIZE, root)
        request = Request("r", prompt, keys, SamplingParams(max_tokens=9), link.reply_to, True, root)
        await link.submit(request, inbox.put_nowait)
        await cluster.send_tokens(request, [6, 7, 8, 9])
        await inbox.get()
        for _ in range(2):  # asked again, it says the same
            await cluster.to_front(Interrupted("r"))
        await until(lambda: len(cluster.continued) == 2)
        continued = cluster.continued[0]
        assert cluster.continued[1] == continued
        assert continued.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert (continued.num_prompt_tokens, continued.output) == (5, [6, 7, 8, 9])
        assert continued.block_keys == block_keys(continued.token_ids, BLOCK_SIZE, root)
        await cluster.send_tokens(request, [10], 4, FinishReason.STOP, attempt=2)
        assert await inbox.get() == Received("r", [10], 16, FinishReason.STOP, [])
        await cluster.to_front(Interrupted("r"))  # it has ended
        await until(lambda: cluster.cancelled == ["r"])


async def test_a_conductor_that_does_not_lead_any_more_is_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders = Leaders(Leader(f"ipc://{tmp_path}/control", 7))
    async with connected(tmp_path, leaders=leaders) as (link, cluster, _):
        monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.02)
        cluster.state = ClusterState(6, 1, 1, 10)
        await until(lambda: cluster.num_hellos > 3)
        assert link.cluster is None
        cluster.state = ClusterState(7, 1, 1, 10)
        await until(lambda: link.cluster is not None)


async def test_a_new_leader_is_told_at_once_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 2 * DEADLINE_S)
    other = FakeCluster(f"ipc://{tmp_path}/other")
    other.state = ClusterState(8, 1, 1, 10)
    leaders = Leaders(Leader(f"ipc://{tmp_path}/control", 7))
    async with connected(tmp_path, leaders=leaders) as (link, cluster, _):
        cluster.state = ClusterState(7, 1, 1, 10)
        running = asyncio.create_task(other.run())
        await until(lambda: link.cluster is not None)
        await link.submit(request_to(link), Inbox[Event]().put_nowait)
        leaders.tell(Leader(f"ipc://{tmp_path}/other", 8))
        await until(lambda: len(other.resumed) == 1)
        assert link.cluster == other.state
        running.cancel()
        await asyncio.wait([running])
