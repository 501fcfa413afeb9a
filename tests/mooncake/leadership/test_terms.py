"""Who leads, by a real etcd: one at a time, in the order in which they have come."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from mooncake.config.cluster_section import ClusterConfig
from mooncake.config.conductor_section import ConductorConfig
from mooncake.errors import ConfigError
from mooncake.leadership import etcd
from mooncake.leadership.etcd import Etcd, FirstKey
from mooncake.leadership.leaders import Candidate, Fit, Leader, Reach, following
from mooncake.leadership.terms import LeadershipLostError, Standby, Term, end_lease, leading
from mooncake.versions import Versions
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.cluster
LIVES = itertools.count(1_800_000_000_000_000_000)
A, B = "tcp://10.0.0.1:7800", "tcp://10.0.0.2:7800"
LEASE_S = 30
"""A busy machine is not silent for so long."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


def config_of(server: EtcdServer, lease_s: int = LEASE_S) -> ClusterConfig:
    return ClusterConfig(etcd_endpoints=[server.url], etcd_lease_s=lease_s)


class Conductor:
    """A Conductor that leads as soon as it can, until it is told to end."""

    def __init__(self, config: ClusterConfig, endpoint: str, fit: Fit | None = None) -> None:
        self._config, self.life = config, next(LIVES)
        self._candidate = Candidate(endpoint, "http://h:8000", fit)
        self.reach = Reach()
        self.waits = asyncio.Queue[Standby]()
        """What it has waited for."""
        self.terms = asyncio.Queue[Term]()
        self.must_end = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with leading(
            self._config, self._candidate, self.life, self.reach, self.waits.put_nowait
        ) as term:
            self.terms.put_nowait(term)
            async with asyncio.TaskGroup() as group:
                ending = group.create_task(term.end())
                await self.must_end.wait()
                ending.cancel()


async def leader_and_standby(config: ClusterConfig) -> tuple[Conductor, Conductor]:
    """A Conductor that leads, and another one that waits."""
    leader = Conductor(config, A)
    await leader.terms.get()
    standby = Conductor(config, B)
    await standby.waits.get()
    return leader, standby


def end_leases(server: EtcdServer) -> None:
    """As if they had expired."""

    def ask(path: str, **fields: object) -> dict[str, list[dict[str, str]]]:
        answer = httpx.post(f"{server.url}/v3/{path}", json=fields, timeout=DEADLINE_S).raise_for_status()
        content: dict[str, list[dict[str, str]]] = answer.json()
        return content

    for lease in ask("lease/leases")["leases"]:
        ask("lease/revoke", **lease)


def fill(server: EtcdServer) -> None:
    """As if it had no room."""
    full = {"action": "ACTIVATE", "alarm": "NOSPACE"}
    httpx.post(f"{server.url}/v3/maintenance/alarm", json=full, timeout=DEADLINE_S).raise_for_status()


async def test_a_conductor_that_starts_while_etcd_is_gone_says_so_and_waits(server: EtcdServer) -> None:
    server.kill()
    async with asyncio.timeout(DEADLINE_S):
        conductor = Conductor(config_of(server), A)
        assert (await conductor.waits.get()).waits_for.startswith("waits for etcd: ")
        assert not conductor.reach.is_given
        server.start()
        await conductor.terms.get()
        assert conductor.reach.is_given
        conductor.must_end.set()
        await conductor.task


FIT = Fit(Versions(27, 28), "model", "key-1")


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(FIT, key_id="key-2"), "has another cluster key: key-1, here it is key-2"),
        (replace(FIT, versions=Versions(25, 26)), "speaks protocol 27 and 28, this one 25 and 26; upgrade"),
        (replace(FIT, fingerprint="other"), "serves another model, or with another dtype or block size"),
    ],
)
async def test_a_conductor_that_could_not_take_over_does_not_stand_by(
    server: EtcdServer, other: Fit, difference: str
) -> None:
    config = config_of(server)
    async with asyncio.timeout(DEADLINE_S):
        first = Conductor(config, A, FIT)
        await first.terms.get()
        with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=difference), flatten_subgroups=True):
            await Conductor(config, B, other).task
        # One of the release before or after can, and one that does not say.
        for fit in (replace(FIT, versions=Versions(28, 29)), None):
            standby = Conductor(config, B, fit)
            assert (await standby.waits.get()).leader == Candidate(A, "http://h:8000", FIT)
            standby.task.cancel()
        first.must_end.set()
        await first.task


async def test_a_standby_takes_over_in_a_full_etcd(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been waiting for longer than one watch lasts."""
    watches, first = asyncio.Queue[None](), Etcd.first

    def counted(self: Etcd, prefix: bytes) -> AsyncGenerator[FirstKey, None]:
        watches.put_nowait(None)
        return first(self, prefix)

    monkeypatch.setattr(etcd, "SILENCE_S", 0.5)
    monkeypatch.setattr(Etcd, "first", counted)
    config = config_of(server)
    async with asyncio.timeout(DEADLINE_S):
        leader, standby = await leader_and_standby(config)
        fill(server)
        for _ in range(watches.qsize() + 2):
            await watches.get()
        leader.must_end.set()
        await leader.task
        await standby.terms.get()
        standby.must_end.set()
        await standby.task


async def test_the_standby_leads_when_the_leader_ends_and_all_learn_of_it(server: EtcdServer) -> None:
    config = config_of(server)
    async with asyncio.timeout(DEADLINE_S), following(config, ConductorConfig()) as leaders:
        first = Conductor(config, A)
        term = await first.terms.get()
        assert await leaders.known() == Leader(A, term.epoch)
        second = Conductor(config, B)
        assert (await second.waits.get()).leader == Candidate(A, "http://h:8000")
        first.must_end.set()
        successor = await second.terms.get()
        assert successor.epoch > term.epoch
        assert await leaders.after(Leader(A, term.epoch)) == Leader(B, successor.epoch)
        second.must_end.set()
        await asyncio.gather(first.task, second.task)


async def test_who_loses_the_lease_leads_no_more_and_stands_by_no_more(server: EtcdServer) -> None:
    config = config_of(server)
    async with asyncio.timeout(DEADLINE_S):
        leader, standby = await leader_and_standby(config)
        end_leases(server)
        for candidate in (leader, standby):
            with pytest.raises(ExceptionGroup) as error:
                await candidate.task
            assert error.group_contains(LeadershipLostError)


async def test_the_lease_of_a_process_that_has_ended_is_ended_for_it(server: EtcdServer) -> None:
    config = config_of(server)
    async with asyncio.timeout(DEADLINE_S):
        leader = Conductor(config, A)
        await leader.terms.get()
        standby = Conductor(config, B)
        await end_lease(config, leader.life)
        await standby.terms.get()
        standby.must_end.set()
        await standby.task
        with pytest.raises(ExceptionGroup):
            await leader.task
        server.kill()
        await end_lease(config, standby.life)  # nobody hears it


async def test_while_etcd_is_gone_nothing_changes(server: EtcdServer) -> None:
    config = config_of(server)
    async with asyncio.timeout(DEADLINE_S), following(config, ConductorConfig()) as leaders:
        leader = Conductor(config, A)
        term = await leader.terms.get()
        known = await leaders.known()
        standby = Conductor(config, B)
        await standby.waits.get()
        server.kill()
        while term.reach.is_given:
            await asyncio.sleep(0.01)
        server.start()
        while not term.reach.is_given:
            await asyncio.sleep(0.01)
        assert not leader.task.done()
        assert standby.terms.empty()
        assert leaders.latest == known
        leader.must_end.set()
        assert (await standby.terms.get()).epoch > term.epoch
        await leaders.after(known)
        standby.must_end.set()
        await asyncio.gather(leader.task, standby.task)


async def test_an_etcd_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        candidate = Conductor(config_of(server), A)
        assert server.url in (await candidate.waits.get()).waits_for
        with server:
            await candidate.terms.get()
            candidate.must_end.set()
            await candidate.task


async def test_who_is_refused_at_the_start_ends(server: EtcdServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("wrong")
    config = ClusterConfig(
        etcd_endpoints=[server.url], etcd_user="moon", etcd_password_file=tmp_path / "password"
    )
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ExceptionGroup) as of_leader:
            await Conductor(config, A).task
        with pytest.raises(ExceptionGroup) as of_follower:
            async with following(config, ConductorConfig()) as leaders:
                await leaders.known()
    for error in (of_leader, of_follower):
        assert error.group_contains(ConfigError, match="cluster.etcd_endpoints: .*authentication")


async def test_without_etcd_a_conductor_leads_at_once() -> None:
    async with leading(ClusterConfig(), Candidate(A, ""), 5, Reach(), print) as term:
        assert term.epoch == 5
