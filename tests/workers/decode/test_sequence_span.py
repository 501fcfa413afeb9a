"""What the span of a request at a decode instance tells of its way."""

import pytest

from tests.workers.decode.test_runner import greedy, more_tokens
from tests.workers.decode_lab import Move, StartDecodeLab
from tests.workers.mini_cluster import Sizes, StartCluster, tokens_of
from tests.workers.recorded_spans import steps
from tests.workers.references import prompt_of

pytestmark = pytest.mark.cluster
NUM_TOKENS = 12


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
        assert span.error == "aborted"
        assert steps(span) == ["reserve", "await_prefill", "turn", "receive", "join"]


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
