import itertools
import subprocess
import sys

import msgspec
import numpy as np
import pytest

import conductor.policy
import kvstore.pool.allocator
import workers.decode.tbt_slo.prompt_budget
import workers.prefill.queue
from benchmarks.tools.simulator.cluster import prefill
from benchmarks.tools.simulator.cluster.cluster import FRONT, DisaggregatedCluster
from benchmarks.tools.simulator.cluster.decode import inlining
from benchmarks.tools.simulator.cluster.requests import Outcome, Results, SimulatedRequest
from benchmarks.tools.simulator.setup import Setup, simulate
from benchmarks.tools.traces.mixes import Mix, RequestClass, mixed
from benchmarks.tools.traces.request import TraceRequest, in_blocks
from conductor.view.rejection import Reason
from mooncake.config.policies import Overload, Scheduling
from mooncake.messages.fronts import Cancel
from tests.benchmarks.simulator.loads import SMALL, conversations
from tests.deadline import DEADLINE_S

COUPLED = msgspec.structs.replace(SMALL, num_prefill=0, num_decode=0, num_coupled=4)
INLINING = msgspec.structs.replace(SMALL, inlining=True, block_tokens=64)
BOTH = msgspec.structs.replace(SMALL, num_prefill=0, num_decode=0, num_both=4, block_tokens=64)
LOAD = conversations(250, rate_per_s=20.0, seed=1)


def run(setup: Setup) -> tuple[DisaggregatedCluster, Results]:
    cluster = setup.cluster()
    assert isinstance(cluster, DisaggregatedCluster)
    return cluster, cluster.run(in_blocks(LOAD, setup.block_tokens))


def test_drives_the_servers_own_code() -> None:
    cluster = SMALL.cluster()
    assert isinstance(cluster, DisaggregatedCluster)
    assert type(cluster.conductor) is conductor.policy.Conductor
    assert type(cluster.prefills[0].node.pool.allocator) is kvstore.pool.allocator.PageAllocator
    assert prefill.PrefillQueue is workers.prefill.queue.PrefillQueue
    assert inlining.PromptBudget is workers.decode.tbt_slo.prompt_budget.PromptBudget


def test_needs_no_torch() -> None:
    probe = "import sys; sys.modules['torch'] = None; import benchmarks.tools.simulator.cli; print('fine')"
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.stdout.split() == ["fine"], result.stderr


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_every_request_ends_once_with_all_its_tokens(scheduling: Scheduling) -> None:
    assert_all_end(msgspec.structs.replace(SMALL, scheduling=scheduling))


def assert_all_end(setup: Setup) -> DisaggregatedCluster:
    cluster, results = run(setup)
    assert results.num(Outcome.FINISHED) == len(results) == len(LOAD)
    assert sum(results["num_output_tokens"]) == sum(request.num_output_tokens for request in LOAD)
    assert sum(results["num_input_tokens"]) == sum(request.num_input_tokens for request in LOAD)
    assert (results["num_cached_tokens"] < results["num_input_tokens"]).all()
    assert (results["ttft_s"] > 0).all()
    assert_is_empty(cluster)
    return cluster


def test_decode_instances_compute_prompts_where_that_adds_the_least_waiting() -> None:
    cluster = assert_all_end(INLINING)
    num_inlined = sum(decode.inlined.num_computed for decode in cluster.decodes)
    assert 0 < num_inlined < len(LOAD)
    assert any(prefill.node.busy_s for prefill in cluster.prefills)


def test_instances_with_both_roles_compute_all_prompts() -> None:
    cluster = assert_all_end(BOTH)
    assert sum(decode.inlined.num_computed for decode in cluster.decodes) == len(LOAD)
    costs = [decode.predictors.prompt_cost for decode in cluster.decodes]
    assert all(cost.num_tokens_in(0.1, 4000) < cost.num_tokens_in(0.1, 0) for cost in costs), "learned"


@pytest.mark.parametrize("setup", [INLINING, BOTH], ids=["inlining", "both"])
def test_chunks_keep_the_tbt_slo_of_others_and_serve_more_prompts_than_two_prefill_instances(
    setup: Setup,
) -> None:
    slos = {"ttft_slo_s": 5.0, "tbt_slo_s": 0.05}
    cluster, results = run(msgspec.structs.replace(setup, **slos))
    _, pairs = run(msgspec.structs.replace(SMALL, **slos))
    assert results.num(Outcome.FINISHED) > 1.3 * pairs.num(Outcome.FINISHED)
    assert np.nanquantile(results["tbt_s"], 0.95) <= 0.05
    assert_is_empty(cluster)


def test_prompts_that_are_aborted_leave_nothing_behind() -> None:
    """A front that gives up on each request after a while, wherever its prompt is by then."""
    for after_s in (0.01, 0.05, 0.2):
        cluster = BOTH.cluster()
        assert isinstance(cluster, DisaggregatedCluster)
        submit = cluster._submit

        def and_cancel(request: SimulatedRequest) -> None:
            submit(request)  # noqa: B023
            cluster.clock.after(after_s, cancel, str(request.number))  # noqa: B023

        def cancel(request_id: str) -> None:
            if request_id in cluster._live:  # noqa: B023
                cluster._tell(FRONT, Cancel(request_id))  # noqa: B023
                cluster.results.end(cluster._live.pop(request_id), Outcome.FAILED, 0.0)  # noqa: B023

        cluster._submit = and_cancel  # type: ignore[method-assign]
        results = cluster.run(in_blocks(LOAD, BOTH.block_tokens))
        assert results.num(Outcome.FAILED) > 0
        assert_is_empty(cluster)


@pytest.mark.parametrize("overload", list(Overload))
def test_what_is_rejected_leaves_nothing_behind(overload: Overload) -> None:
    setup = msgspec.structs.replace(SMALL, overload=overload, ttft_slo_s=0.8, tbt_slo_s=0.017)
    cluster, results = run(setup)
    assert 0 < results.num(Outcome.REJECTED) < len(LOAD)
    assert len(results) == len(LOAD)
    assert sum(cluster.conductor.stats.num_rejections.values()) == results.num(Outcome.REJECTED)
    assert_is_empty(cluster)


def test_what_decode_has_no_room_for_is_rejected_before_it_is_prefilled() -> None:
    """Section 7.4: while batches grow to all that the SLO allows, and behind that."""
    classes = tuple(RequestClass(1 / 3, 1_000, num_output_tokens) for num_output_tokens in (100, 200, 800))
    mix = Mix(classes, ttft_slo_s=5.0, tbt_slo_s=0.02)
    setup = msgspec.structs.replace(
        SMALL, ttft_slo_s=mix.ttft_slo_s, tbt_slo_s=mix.tbt_slo_s, pool_tokens=None
    )
    load = itertools.takewhile(lambda request: request.arrival_s < 60, mixed(mix, 20.0, 1.0, seed=3))
    simulated, _ = simulate(setup, load)
    assert list(simulated.reasons) == [Reason.TBT]
    assert simulated.reasons[Reason.TBT] > 0.2 * simulated.summary.num_finished


def assert_is_empty(cluster: DisaggregatedCluster) -> None:
    for instance in (*cluster.prefills, *cluster.decodes):
        assert not instance.node.pool.allocator.num_users.any()
        assert not instance.node.outgoing.transfers
    assert all(not prefill.num_queued for prefill in cluster.prefills)
    assert all(not decode.num_sequences and not decode.batch.size for decode in cluster.decodes)
    assert not any(decode.inlined or decode.inlined.num_device_tokens for decode in cluster.decodes)
    assert not cluster.conductor.requests


@pytest.mark.parametrize(
    "setup", [SMALL, INLINING, BOTH, COUPLED], ids=["disaggregated", "inlining", "both", "coupled"]
)
def test_equal_seeds_give_equal_runs(setup: Setup) -> None:
    (first, results), (again, results_again) = (simulate(setup, LOAD) for _ in range(2))
    assert first.summary == again.summary
    assert first.num_events == again.num_events
    assert np.array_equal(results["end_s"], results_again["end_s"])


@pytest.mark.parametrize("chunk_tokens", [None, 512])
def test_coupled_instances_end_every_request(chunk_tokens: int | None) -> None:
    simulated, results = simulate(msgspec.structs.replace(COUPLED, chunk_tokens=chunk_tokens), LOAD)
    assert simulated.summary.num_finished == len(LOAD)
    assert sum(results["num_output_tokens"]) == sum(request.num_output_tokens for request in LOAD)
    assert simulated.summary.cached_share > 0


@pytest.mark.parametrize("setup", [SMALL, COUPLED], ids=["disaggregated", "coupled"])
def test_what_never_fits_is_rejected_and_the_rest_served(setup: Setup) -> None:
    too_long = TraceRequest(0.0, 1_000_000, 10, ())
    simulated, _ = simulate(setup, [too_long, *LOAD[:20]])
    assert (simulated.summary.num_rejected, simulated.summary.num_finished) == (1, 20)


def test_chunks_shorten_the_gaps_of_coupled_instances() -> None:
    whole, _ = simulate(COUPLED, LOAD)
    chunked, _ = simulate(msgspec.structs.replace(COUPLED, chunk_tokens=512), LOAD)
    assert chunked.summary.tbt_s.p90 < whole.summary.tbt_s.p90


def test_prefills_do_not_disturb_decode_instances() -> None:
    coupled, _ = simulate(COUPLED, LOAD)
    disaggregated, _ = simulate(SMALL, LOAD)
    assert disaggregated.summary.tbt_s.p90 < coupled.summary.tbt_s.p90


def test_with_both_slos_the_first_token_waits_for_the_kvcache() -> None:
    slow = msgspec.structs.replace(SMALL, nic_gbps=20.0, tbt_slo_s=10.0)
    sent, at_once = simulate(slow, LOAD[:60])
    kept, held = simulate(msgspec.structs.replace(slow, ttft_slo_s=60.0), LOAD[:60])
    assert sent.summary.num_finished == kept.summary.num_finished == 60
    assert kept.summary.tbt_s.p90 < 0.5 * sent.summary.tbt_s.p90
    assert held["ttft_s"].mean() > at_once["ttft_s"].mean()
    assert held["ttft_s"].max() < 60


def test_a_batch_that_outgrows_the_device_preempts_and_goes_on() -> None:
    cluster = SMALL.cluster()
    assert isinstance(cluster, DisaggregatedCluster)
    for decode in cluster.decodes:
        decode.capacity_tokens = 8_000
    load = [request for request in LOAD if request.num_input_tokens < 7_000]
    results = cluster.run(load)
    assert sum(decode.num_preemptions for decode in cluster.decodes) > 0
    assert sum(results["num_output_tokens"]) == sum(request.num_output_tokens for request in load)
    assert_is_empty(cluster)
