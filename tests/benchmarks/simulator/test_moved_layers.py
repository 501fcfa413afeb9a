"""Simulated layers at other instances."""

import pytest
from msgspec.structs import replace

from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.machines.costs import Profiled
from benchmarks.tools.simulator.moved_layers import Place, SharedDevices, TwoStages
from benchmarks.tools.simulator.setup import Leave, Setup
from benchmarks.tools.traces.request import TraceRequest
from mooncake.errors import ConfigError
from mooncake.messages.costs import Costs

DIVIDED = Setup(model="llama-13b", hardware="a100", num_gpus=1, num_prefill=1, num_decode=1, rejects=False)
MOVING = replace(DIVIDED, moves_layers=True)
LONG_ANSWERS = [TraceRequest(0.01 * number, 64, 1500) for number in range(120)]
"""Requests whose KVCache does not fit into one device, and whose prompts are computed at once."""
FEW = [TraceRequest(200.0 + number, 64, 200) for number in range(20)]
"""Requests that an instance serves with little of its time and memory."""


def test_the_slower_stage_sets_the_pace_of_two_micro_batches() -> None:
    whole = Profiled(Costs(0.0, 0.0, 0.0), Costs(0.010, 0.001, 1e-6))
    stages = TwoStages(whole, 0.25)
    assert stages.kv_token_s == pytest.approx(0.75e-6)
    assert stages.iteration_s((), 32) == pytest.approx(2 * 0.75 * (0.010 + 16 * 0.001))
    assert stages.iteration_s((), 2) == pytest.approx(whole.iteration_s((), 2)), "weights are read once"


def test_owner_and_helper_slow_each_other_while_both_compute() -> None:
    lent = SharedDevices({}, places={"d": Place("p", 0.5)})
    assert (lent.factor("d"), lent.factor("p"), lent.factor("other")) == (1.0, 1.0, 1.0)
    lent.computes("p", True)
    assert lent.factor("d") == 2.0  # the helper gives half of its time to layers that need all of it
    lent.computes("d", True)
    assert lent.factor("p") == 2.0
    lent.places["d"] = Place("p", 0.2)
    assert lent.factor("d") == 1.0
    assert lent.factor("p") == pytest.approx(1 / (1 - 0.2 / 0.8))


def test_layers_move_where_memory_is_short_and_come_back() -> None:
    """The owner has room for more requests meanwhile, so all of them end sooner."""
    seen = list[dict[str, Place]]()

    def look(cluster: DisaggregatedCluster) -> None:
        assert isinstance(cluster.machine, SharedDevices)
        seen.append(dict(cluster.machine.places))

    fixed, moving = DIVIDED.cluster(), MOVING.cluster(look)
    assert isinstance(fixed, DisaggregatedCluster)
    assert isinstance(moving, DisaggregatedCluster)
    alone, moved = (cluster.run([*LONG_ANSWERS, *FEW]) for cluster in (fixed, moving))
    (place,) = {place for places in seen for place in places.values()}
    assert place.helper == "prefill-0"
    assert not seen[-1]
    ((before,), (after,)) = fixed.decodes, moving.decodes
    assert (after.capacity_tokens, after.node.costs.kv_token_s) == (
        before.capacity_tokens,
        before.node.costs.kv_token_s,
    )
    assert after.num_preemptions < before.num_preemptions
    assert moved["end_s"][: len(LONG_ANSWERS)].max() < 0.9 * alone["end_s"][: len(LONG_ANSWERS)].max()


def test_nothing_moves_to_a_helper_without_memory() -> None:
    """Half of the layers of a larger model would find less room at a device that has all of them itself."""
    seen = list[dict[str, Place]]()

    def look(cluster: DisaggregatedCluster) -> None:
        assert isinstance(cluster.machine, SharedDevices)
        seen.append(dict(cluster.machine.places))

    setup = replace(MOVING, model="llama3-70b", num_gpus=2)
    setup.cluster(look).run([TraceRequest(0.01 * number, 64, 1500) for number in range(60)])
    assert not any(seen)


def test_nothing_moves_where_nothing_is_short() -> None:
    alone, moving = (setup.cluster().run(FEW)["end_s"].tolist() for setup in (DIVIDED, MOVING))
    assert moving == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(
    "setup",
    [
        replace(MOVING, inlining=True),
        replace(MOVING, num_prefill=0, num_decode=0, num_both=2),
        replace(MOVING, leaves=(Leave(10.0, "decode-0"),)),
    ],
)
def test_layers_move_only_in_a_fixed_division(setup: Setup) -> None:
    with pytest.raises(ConfigError, match="only in a fixed division"):
        setup.shape()
