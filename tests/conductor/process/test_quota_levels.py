"""What is left of tenants' quotas over a restart of the Conductor."""

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import pytest

from conductor.admission.quotas import Quotas
from conductor.process.quota_levels import SCHEMA, LevelFile, LevelKeys, LevelStore, QuotaLevels
from mooncake.config.cluster_section import ClusterConfig
from mooncake.leadership import etcd as leadership_etcd
from mooncake.leadership.etcd import Etcd
from mooncake.leadership.state_keys import StateKeys
from mooncake.leadership.terms import conductor_key
from mooncake.messages.fronts import QuotaClaim
from mooncake.node.state_file import StateFile
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer

PER_MINUTE = 60_000
OpenStore = Callable[[], AbstractAsyncContextManager[LevelStore]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine answers may be late."""
    monkeypatch.setattr(leadership_etcd, "ANSWER_TIMEOUT_S", DEADLINE_S)


@asynccontextmanager
async def in_file(path: Path) -> AsyncIterator[LevelStore]:
    with closing(StateFile(path, (SCHEMA,))) as file:
        yield LevelFile(file)


@asynccontextmanager
async def in_etcd(server: EtcdServer, life: int) -> AsyncIterator[LevelStore]:
    cluster = ClusterConfig(etcd_endpoints=[server.url])
    async with Etcd(cluster) as etcd:
        await etcd.grant(life, 600)
        await etcd.create(conductor_key(cluster, life), b"", life)
        yield LevelKeys(StateKeys(etcd, cluster, life))


@pytest.fixture(params=["file", pytest.param("etcd", marks=pytest.mark.cluster)])
def open_store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """What each Conductor opens, one after the other."""
    if request.param == "file":
        yield lambda: in_file(tmp_path / "state.db")
    else:
        with EtcdServer(tmp_path) as server:
            lives = iter(range(1, 9))
            yield lambda: in_etcd(server, next(lives))


@asynccontextmanager
async def conductor(open_store: OpenStore) -> AsyncIterator[tuple[Quotas, QuotaLevels]]:
    quotas = Quotas()
    async with open_store() as store:
        levels = QuotaLevels(store, quotas)
        await levels.restore()
        yield quotas, levels


def use(quotas: Quotas, tenant: str, num_tokens: int, now_s: float) -> bool:
    refused = quotas.rejection(tenant, QuotaClaim(PER_MINUTE, None, 1, num_tokens), 0, now_s)
    if refused is None:
        quotas.charge(tenant, num_tokens, now_s)
    return refused is None


async def test_debts_and_what_was_used_outlive_the_conductor(open_store: OpenStore) -> None:
    now_s = time.monotonic()
    async with conductor(open_store) as (quotas, levels):
        assert use(quotas, "used", 60_000, now_s)
        assert use(quotas, "in-debt", 10, now_s)
        quotas.charge("in-debt", 1_000_000, now_s)
        assert use(quotas, "long-ago", 60_000, now_s - 61.0)
        await levels.save()
        quotas.charge("used", 5, now_s)
        await levels.save()
        await levels.save()  # nothing new
        assert use(quotas, "rejected", 60_000, now_s)
        await levels.save()
        quotas.refund("rejected", 60_000)
        await levels.save()
    async with conductor(open_store) as (quotas, levels):
        assert sorted(quotas.by_tenant) == ["in-debt", "used"]
        left = {tenant: tokens.left(now_s) for tenant, tokens in quotas.by_tenant.items()}
        assert left == pytest.approx({"used": -5.0, "in-debt": -940_010.0}, abs=100.0)
        assert not use(quotas, "used", 10_000, now_s + 1.0)
        assert use(quotas, "used", 10_000, now_s + 11.0)
        assert not use(quotas, "in-debt", 10, now_s + 900.0)
        assert use(quotas, "in-debt", 10, now_s + 950.0)
        assert use(quotas, "long-ago", 60_000, now_s)


async def test_a_clock_that_was_set_back_makes_no_tokens(open_store: OpenStore) -> None:
    """Nor does it take more than what was charged."""
    later_s = time.monotonic() + 3600.0
    async with conductor(open_store) as (quotas, levels):
        assert use(quotas, "t", 50_000, later_s)
        await levels.save()
    now_s = time.monotonic()
    async with conductor(open_store) as (quotas, levels):
        assert quotas.by_tenant["t"].left(now_s + 1.0) == pytest.approx(11_000.0, abs=1000.0)
