"""Two hosts with two links between them go on transferring blocks when one of the links is cut."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.client.worker_client import WorkerClient
from mooncake.config.sections import MessengerConfig
from mooncake.errors import TransferError
from tests.cluster.namespaces import LINKS, Host, HostNode, Unavailable, two_hosts
from tests.core_clock import CoreClock
from tests.deadline import DEADLINE_S
from tests.kvstore.nodes import LAYOUT, assert_holds, prompt_keys, until, unused, write_layers

pytestmark = pytest.mark.cluster

NUM_PAGES = 300
NUM_AT_ONCE = 4
NUM_BLOCKS = 24
GONE_S = 10.0
"""until the connections of a host that is gone end"""
INTERRUPTION_S = 5.0
"""after a cut, until transfers succeed again"""
RETURN_S = 20.0
"""after the end of a cut, until the link is used again"""
PAUSE_S = 0.05
"""after each transfer, so that there is traffic all the time and others have a core"""
USED_BYTES = 1 << 20
"""over a link that is used"""


@dataclass
class Traffic:
    """Transfers one after the other, some at a time, until it is to stop."""

    prefill: WorkerClient
    decode: WorkerClient
    clock: CoreClock
    succeeded_s: list[float] = field(default_factory=list)
    slowest_s: float = 0.0
    """transfer, since somebody last set this to nothing"""
    failures: list[tuple[float, str]] = field(default_factory=list)
    is_stopping: bool = False
    num_begun: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(self._repeat())

    async def _repeat(self) -> None:
        while not self.is_stopping:
            begun_s = self.clock.now_s()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._transfer(next(self.num_begun))
                now_s = self.clock.now_s()
                self.succeeded_s.append(now_s)
                self.slowest_s = max(self.slowest_s, now_s - begun_s)
                await asyncio.sleep(PAUSE_S)
            except TransferError as error:
                self.failures.append((self.clock.now_s(), str(error)))

    async def _transfer(self, number: int) -> None:
        """Layer by layer, as a prefill does."""
        keys = prompt_keys(NUM_BLOCKS, first_token=number * 10_000)
        to = await self.decode.reserve(keys, 0)
        source = await self.prefill.reserve(keys, 0)
        try:
            grant = await self.decode.grant(to.reservation_id)
            await self.prefill.send(source.reservation_id, grant, f"transfer {number}")
            for layer in range(LAYOUT.num_layers):
                await write_layers(self.prefill, source, keys, range(layer, layer + 1))
            await self.prefill.wait_sent(source.reservation_id)
            await self.decode.wait_arrived(to.reservation_id)
            assert_holds(self.decode, to, keys)
        finally:
            await self.prefill.release(source.reservation_id)
            await self.decode.release(to.reservation_id)

    def longest_pause_s(self, since_s: float) -> float:
        """Between successes."""
        times = [since_s, *(at for at in self.succeeded_s if at > since_s)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


Cut = Callable[[Host, Host, bool], None]


def known_to_sender(prefill: Host, decode: Host, is_cut: bool) -> None:
    prefill.set_link(LINKS[0], up=not is_cut)


def known_to_receiver(prefill: Host, decode: Host, is_cut: bool) -> None:
    decode.set_link(LINKS[0], up=not is_cut)


def silent(prefill: Host, decode: Host, is_cut: bool) -> None:
    for host in (prefill, decode):
        host.set_silent(LINKS[0], silent=is_cut)


def answers_lost(prefill: Host, decode: Host, is_cut: bool) -> None:
    decode.set_silent(LINKS[0], silent=is_cut)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as made:
        try:
            hosts = made.enter_context(two_hosts())
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield hosts


async def within(clock: CoreClock, most_s: float, condition: Callable[[], bool], what: str) -> float:
    """Wait until `condition` holds. Returns how long it took."""
    begun_s = clock.now_s()
    while not condition():
        assert clock.now_s() - begun_s < most_s, f"not within {most_s:g} s: {what}"
        await asyncio.sleep(0.1)
    return clock.now_s() - begun_s


async def both_used(hosts: tuple[Host, Host], clock: CoreClock) -> float:
    """Waits until the first host has sent `USED_BYTES` more over each link. Returns how long it took."""
    before = hosts[0].sent_bytes()

    def are_used() -> bool:
        sent = hosts[0].sent_bytes()
        return all(sent[link] - before[link] >= USED_BYTES for link in LINKS)

    return await within(clock, RETURN_S, are_used, "both links are used")


def clock_of(nodes: list[HostNode]) -> CoreClock:
    """What messengers and their clients take, without what they wait for a core."""
    return CoreClock([os.getpid(), *(node.process.pid for node in nodes if node.process is not None)])


@contextlib.contextmanager
def nodes_on(hosts: tuple[Host, Host], folder: Path) -> Iterator[list[HostNode]]:
    """A messenger on each, started."""
    with contextlib.ExitStack() as running:
        nodes = [
            HostNode(folder, name, NUM_PAGES, host)
            for name, host in zip(("prefill", "decode"), hosts, strict=True)
        ]
        for node in nodes:
            running.callback(node.close)
            node.start()
        yield nodes


@contextlib.asynccontextmanager
async def traffic_between(hosts: tuple[Host, Host], folder: Path) -> AsyncIterator[Traffic]:
    """Runs over both links; afterwards nothing is in use."""
    with nodes_on(hosts, folder) as nodes:
        clients = [await node.connect() for node in nodes]
        traffic = Traffic(*clients, clock_of(nodes))
        task = asyncio.create_task(traffic.run())
        await both_used(hosts, traffic.clock)
        assert traffic.failures == []
        traffic.slowest_s = 0.0
        yield traffic
        assert not task.done(), task.exception()
        traffic.is_stopping = True
        await task
        for client in clients:
            await until(client, unused)
            await client.close()


@pytest.mark.parametrize("cut", [known_to_sender, known_to_receiver, silent, answers_lost])
async def test_transfers_go_on_over_the_other_link_and_over_both_when_it_is_back(
    hosts: tuple[Host, Host], tmp_path: Path, cut: Cut
) -> None:
    async with traffic_between(hosts, tmp_path) as traffic:
        make(cut, hosts)
        cut_s = traffic.clock.now_s()
        await over_one_link(traffic, hosts, cut_s, is_two_way=cut is not answers_lost)
        assert traffic.longest_pause_s(cut_s) < INTERRUPTION_S
        assert traffic.slowest_s < INTERRUPTION_S
        # A failure is an error that says what happened, soon; and what comes after it succeeds.
        assert all(at - cut_s < INTERRUPTION_S for at, _ in traffic.failures), traffic.failures
        slowest_s = traffic.slowest_s
        cut(*hosts, False)
        return_s = await both_used(hosts, traffic.clock)
        assert traffic.longest_pause_s(cut_s) < INTERRUPTION_S
        print(
            f"{cut.__name__}: {len(traffic.succeeded_s)} transfers, {len(traffic.failures)} failed,"
            f" slowest {slowest_s:.2f} s, both links again after {return_s:.1f} s"
        )


def both_silent(prefill: Host, decode: Host, is_cut: bool) -> None:
    for link in LINKS:
        prefill.set_silent(link, silent=is_cut)


def num_connections(node: HostNode) -> int:
    """Over TCP that its kernel takes for established."""
    assert node.process is not None
    lines = Path(f"/proc/{node.process.pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return sum(line.split()[3] == "01" for line in lines)


async def test_connections_of_a_host_that_is_gone_end_at_both_sides_though_nothing_is_sent(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    with nodes_on(hosts, tmp_path) as nodes:
        traffic = Traffic(*[await node.connect() for node in nodes], clock_of(nodes))
        await traffic._transfer(1)
        num_lanes = len(LINKS) * MessengerConfig().streams
        while [num_connections(node) for node in nodes] != [num_lanes, num_lanes]:
            await asyncio.sleep(0.1)
        make(both_silent, hosts)
        await within(
            traffic.clock, GONE_S, lambda: not any(map(num_connections, nodes)), "connections have ended"
        )
        for client in (traffic.prefill, traffic.decode):
            await until(client, unused)
            await client.close()


async def test_cut_of_both_links_fails_transfers_soon_and_the_next_succeed_when_they_are_back(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    async with traffic_between(hosts, tmp_path) as traffic:
        make(both_silent, hosts)
        cut_s = traffic.clock.now_s()
        while len(traffic.failures) < NUM_AT_ONCE:
            await asyncio.sleep(0.1)
        assert all("connection to decode" in reason for _, reason in traffic.failures)
        assert all(at - cut_s < INTERRUPTION_S for at, _ in traffic.failures)
        both_silent(*hosts, False)
        num_before = len(traffic.succeeded_s)
        await within(
            traffic.clock, RETURN_S, lambda: len(traffic.succeeded_s) >= num_before + 10, "transfers"
        )
        await both_used(hosts, traffic.clock)


def make(cut: Cut, hosts: tuple[Host, Host]) -> None:
    try:
        cut(*hosts, True)
    except Unavailable as reason:
        pytest.skip(str(reason))


async def over_one_link(
    traffic: Traffic, hosts: tuple[Host, Host], cut_s: float, *, is_two_way: bool
) -> None:
    """Until the time of an interruption has passed and transfers go on behind it."""
    while traffic.clock.now_s() < cut_s + INTERRUPTION_S:
        await asyncio.sleep(0.1)
    num_before, before = len(traffic.succeeded_s), hosts[0].sent_bytes()
    await within(
        traffic.clock, INTERRUPTION_S, lambda: len(traffic.succeeded_s) >= num_before + 10, "transfers"
    )
    sent = hosts[0].sent_bytes()
    assert sent[LINKS[1]] - before[LINKS[1]] >= USED_BYTES
    if is_two_way:
        assert sent[LINKS[0]] == before[LINKS[0]]
    else:
        assert sent[LINKS[0]] - before[LINKS[0]] < USED_BYTES  # attempts to connect again
