from functools import partial

import pytest

from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.machines.network import Network, Port


def test_transfers_share_the_busier_end() -> None:
    clock = Clock()
    network, source = Network(clock), Port(10.0)
    ended_s: dict[str, float] = {}

    def end(name: str) -> None:
        ended_s[name] = clock.now_s

    network.send(source, Port(10.0), 100.0, partial(end, "first"))
    clock.at(2.0, lambda: network.send(source, Port(10.0), 40.0, partial(end, "second")))
    clock.run()
    # Alone until 2 s, then both at 5 bytes/s until the second has come, then alone again.
    assert ended_s == pytest.approx({"second": 10.0, "first": 14.0})


def test_many_receivers_from_one_holder_take_as_long_as_its_nic() -> None:
    clock = Clock()
    network, source = Network(clock), Port(10.0)
    ended_s: list[float] = []
    for _ in range(5):
        network.send(source, Port(10.0), 10.0, lambda: ended_s.append(clock.now_s))
    clock.run()
    assert ended_s == pytest.approx([5.0] * 5)


def test_a_cancelled_transfer_leaves_its_share_to_others() -> None:
    clock = Clock()
    network, source = Network(clock), Port(10.0)
    ended_s: list[float] = []
    network.send(source, Port(10.0), 100.0, lambda: ended_s.append(clock.now_s))
    cancelled = network.send(source, Port(10.0), 100.0, lambda: pytest.fail("it was cancelled"))
    clock.at(4.0, network.cancel, cancelled)
    clock.at(5.0, network.cancel, cancelled)
    clock.run()
    assert ended_s == pytest.approx([12.0])
    assert not source.transfers
