"""What prompts take on groups of prefill nodes."""

from pathlib import Path

import pytest

from benchmarks.reproduction.experiment import Trace
from benchmarks.reproduction.experiments.placement import prefill_groups
from benchmarks.reproduction.experiments.placement.prefill_groups import NUM_NODES, WAYS, Arrival, nodes_with
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from benchmarks.tools.simulator.prefill_groups import STEP_S, Attention, PrefillNodes

INSTANT = nodes_with(1e9)
LONG = 131_072


def whole_s(nodes: PrefillNodes, num_tokens: int) -> float:
    return Roofline(nodes.model, nodes.hardware).iteration_s([PromptShare(num_tokens, 0)], 0)


def test_one_node_computes_a_prompt_as_the_roofline_says() -> None:
    for attention in Attention:
        assert INSTANT.sp_s(LONG, 1, attention) == pytest.approx(whole_s(INSTANT, LONG))


@pytest.mark.parametrize("num_nodes", [2, 4, 8])
def test_striped_attention_is_balanced_and_a_ring_computes_what_is_masked(num_nodes: int) -> None:
    """Of N steps with blocks of equal size, N / 2 blocks are needed; a ring's last node has N - 1/2."""
    flops = INSTANT.hardware.num_gpus * INSTANT.hardware.gpu_flops * 0.5
    block_s = (LONG / num_nodes) ** 2 * 4 * INSTANT.model.num_layers * INSTANT.model.hidden / flops
    ring_s, striped_s = (INSTANT.sp_s(LONG, num_nodes, attention) for attention in Attention)
    assert ring_s - striped_s == pytest.approx((num_nodes - 1) / 2 * block_s)
    assert striped_s == pytest.approx(whole_s(INSTANT, LONG) / num_nodes, rel=0.02)


def test_transfers_of_sequence_parallelism_count_where_attention_does_not_cover_them() -> None:
    assert nodes_with(800).sp_s(LONG, 4, Attention.STRIPED) == INSTANT.sp_s(LONG, 4, Attention.STRIPED)
    slow = nodes_with(1)
    sent_s = slow.sent_bytes(LONG, 4, is_pipeline=False) / slow.link_bytes_per_s / 0.87
    waited_s = slow.sp_s(LONG, 4, Attention.STRIPED) - INSTANT.sp_s(LONG, 4, Attention.STRIPED)
    covered_s = sent_s + 3 * STEP_S * slow.model.num_layers - waited_s
    assert 0 < covered_s < whole_s(INSTANT, LONG) / 4


def test_chunks_of_a_pipeline_are_the_whole_prompt_and_take_equally_long() -> None:
    chunks = INSTANT.chunks(LONG, 4)
    assert [token for chunk in chunks for token in chunk] == list(range(LONG))
    times_s = [INSTANT.stage_s(chunk, 4) for chunk in chunks]
    assert max(times_s) < 1.05 * min(times_s)


def test_a_pipeline_does_not_depend_on_a_link_that_carries_hidden_states() -> None:
    times_s = [WAYS["CPP"](nodes_with(gbps), [Arrival(0.0, LONG)])[0] for gbps in (800, 25)]
    assert times_s[1] == pytest.approx(times_s[0], rel=0.02)
    assert times_s[0] == pytest.approx(whole_s(INSTANT, LONG) / NUM_NODES, rel=0.15)


def test_prompts_follow_one_another_in_a_pipeline_without_a_gap() -> None:
    nodes, arrivals = nodes_with(800), [Arrival(0.0, LONG)] * 3
    first_s, second_s, third_s = WAYS["CPP"](nodes, arrivals)
    busy_s = sum(nodes.stage_s(chunk, NUM_NODES) for chunk in nodes.chunks(LONG, NUM_NODES))
    assert third_s - second_s == pytest.approx(busy_s, rel=0.02)
    assert first_s > second_s - first_s


def test_elastic_groups_take_as_many_nodes_as_are_worth_it() -> None:
    fast, slow, short = nodes_with(800), nodes_with(1), [Arrival(0.0, 8192)] * 2
    assert WAYS["elastic, striped"](fast, short) == WAYS["striped"](fast, short)
    assert WAYS["elastic, striped"](slow, short) == WAYS["nodes apart"](slow, short)


def test_a_remark_says_what_the_figures_beside_it_say(tmp_path: Path) -> None:
    outcome = prefill_groups.run(Trace(tmp_path / "none"), tmp_path)
    assert "the pipeline with 25 Gbit/s" in prefill_groups.remark(outcome)
