"""What the span of a request at a decode instance tells of its way."""

import time

import msgspec
import pytest

from mooncake.messages.requests import Ref, Request
from tests.workers.decode.test_runner import greedy, more_tokens
from tests.workers.decode_lab import Move, StartDecodeLab
from tests.workers.mini_cluster import Sizes, StartCluster, tokens_of
from tests.workers.recorded_spans import errors, steps
from tests.workers.references import prompt_of
from workers.decode.sequence import PREPARE, CopyTimes, Sequence
from workers.decode.sequence_span import sequence_span

pytestmark = pytest.mark.cluster
NUM_TOKENS = 12
PROMPT = Request("r", prompt_of(1, 44), [], greedy(NUM_TOKENS), "")


async def test_each_step_is_told(start_cluster: StartCluster) -> None:
    async with start_cluster() as cluster:
        await tokens_of(cluster.submit("r", prompt_of(1, 44), greedy(NUM_TOKENS)))
        await cluster.assert_nothing_is_held()
        span = cluster.spans.of("d0", "r")
        assert steps(span) == ["reserve", "await_prefill", "turn", "receive", "join", "run", "seal"]
        assert [event.name for event in span.events] == ["first token", "last token"]
        assert span.attributes["mooncake.output_tokens"] == NUM_TOKENS
        assert span.attributes["mooncake.finish_reason"] == "length"
        assert (span.attributes["mooncake.inlined"], span.error) == (False, "")


async def test_an_inlined_prompt_is_told_as_such(start_cluster: StartCluster) -> None:
    async with start_cluster(Sizes(inline=True)) as cluster:
        await tokens_of(cluster.submit("r", prompt_of(1, 44), greedy(NUM_TOKENS)))
        await cluster.assert_nothing_is_held()
        span = cluster.spans.of("d0", "r")
        assert steps(span) == ["reserve", "join", "prefill", "run", "seal"]
        assert [event.name for event in span.events] == ["first token", "last token"]
        assert span.attributes["mooncake.inlined"] is True


async def test_a_request_whose_client_has_gone_is_told_as_such(start_cluster: StartCluster) -> None:
    async with start_cluster() as cluster:
        answer = cluster.submit("r", prompt_of(1, 44), greedy(300))
        await more_tokens(answer)
        cluster.cancel("r")
        await cluster.assert_nothing_is_held()
        span = cluster.spans.of("d0", "r")
        assert steps(span) == ["reserve", "await_prefill", "turn", "receive", "join", "run"]
        assert errors(span) == {"run": "aborted"}
        assert span.error == "aborted"


@pytest.mark.parametrize(
    ("is_inlined", "known", "last"),
    [
        (False, [], "reserve"),
        (False, ["reserved_s"], "await_prefill"),
        (False, ["reserved_s", "ordered_s"], "turn"),
        (False, ["reserved_s", "ordered_s", "turn_s"], "receive"),
        (False, ["reserved_s", "ordered_s", "turn_s", "arrived_s"], "join"),
        (False, ["reserved_s", "ordered_s", "turn_s", "arrived_s", "joined_s"], "run"),
        (False, ["reserved_s", "ordered_s", "turn_s", "arrived_s", "joined_s", "left_s"], "seal"),
        (True, ["reserved_s"], "join"),
        (True, ["reserved_s", "joined_s"], "prefill"),
        (True, ["reserved_s", "joined_s", "prefilled_s"], "run"),
    ],
)
def test_a_request_that_fails_has_failed_in_its_last_step(
    is_inlined: bool, known: list[str], last: str
) -> None:
    request, began_s = PROMPT, time.monotonic() - 10
    sequence = Sequence(0, Ref(1, "r", 1), request, list(request.token_ids), is_inlined, received_s=began_s)
    for number, name in enumerate(known, 1):
        setattr(sequence, name, began_s + number)
    span = sequence_span(sequence, "d0", "no luck")
    assert steps(span)[-1] == last
    assert len(steps(span)) == len(known) + 1
    assert errors(span) == {last: "no luck"}
    assert span.parts[-1].ended_s == span.ended_s


def test_a_move_that_fails_has_failed_in_its_last_round() -> None:
    request, began_s = PROMPT, time.monotonic() - 10
    rounds = [CopyTimes(PREPARE, began_s + 1).ended(began_s + 2, 32), CopyTimes(PREPARE, began_s + 3)]
    sequence = Sequence(
        0, Ref(1, "r", 1), request, list(request.token_ids), received_s=began_s, copies=rounds
    )
    span = sequence_span(sequence, "d1", "too slow")
    assert steps(span) == ["prepare", "prepare"]
    assert [part.error for part in span.parts] == ["", "too slow"]


def test_an_answer_of_one_token_joins_no_batch() -> None:
    request = msgspec.structs.replace(PROMPT, sampling=greedy(1))
    began_s = time.monotonic() - 10
    sequence = Sequence(0, Ref(1, "r", 1), request, [*request.token_ids, 3], received_s=began_s)
    for number, name in enumerate(["reserved_s", "ordered_s", "turn_s", "arrived_s", "left_s"], 1):
        setattr(sequence, name, began_s + number)
    assert steps(sequence_span(sequence, "d0", "")) == ["reserve", "await_prefill", "turn", "receive", "seal"]


async def test_both_sides_of_a_migration_are_told(start_decode_lab: StartDecodeLab) -> None:
    async with start_decode_lab() as lab:
        decoded = lab.begin("r", prompt_of(1, 45), greedy(300), lab.decodes[0])
        await more_tokens(decoded.answer)
        prepared = await Move(lab, decoded, lab.decodes[1]).run()
        assert prepared is not None
        await tokens_of(decoded.answer)
        await lab.assert_nothing_is_held()
        source, destination = lab.spans.of("d0", "r"), lab.spans.of("d1", "r")
        assert steps(source) == ["reserve", "join", "prefill", "run", "pre_copy", "seal"]
        assert steps(destination) == ["prepare", "run", "seal"]
        [prepare] = [part for part in destination.parts if part.name == "decode.prepare"]
        assert prepare.attributes["mooncake.tokens"] == prepared.num_tokens
        assert [
            source.attributes["mooncake.handed_over"],
            destination.attributes["mooncake.handed_over"],
        ] == [
            True,
            False,
        ]
        assert [event.name for event in source.events] == ["first token"]
        assert [event.name for event in destination.events] == ["last token"]
        assert source.error == destination.error == ""
