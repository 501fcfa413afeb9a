"""What is left of tenants' quotas over a restart of the Conductor."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from conductor.admission.quotas import Quotas
from conductor.process.quota_levels import SCHEMA, QuotaLevels
from mooncake.messages.fronts import QuotaClaim
from mooncake.node.state_file import StateFile

PER_MINUTE = 60_000


@contextmanager
def conductor(path: Path) -> Iterator[tuple[Quotas, QuotaLevels]]:
    quotas = Quotas()
    with closing(StateFile(path / "state.db", (SCHEMA,))) as file:
        yield quotas, QuotaLevels(file, quotas)


def use(quotas: Quotas, tenant: str, num_tokens: int, now_s: float) -> bool:
    refused = quotas.refusal(tenant, QuotaClaim(PER_MINUTE, None, 1, num_tokens), 0, now_s)
    if refused is None:
        quotas.charge(tenant, num_tokens, now_s)
    return refused is None


def test_debts_and_what_was_used_outlive_the_conductor(tmp_path: Path) -> None:
    now_s = time.monotonic()
    with conductor(tmp_path) as (quotas, levels):
        assert use(quotas, "used", 60_000, now_s)
        assert use(quotas, "in-debt", 10, now_s)
        quotas.charge("in-debt", 1_000_000, now_s)
        assert use(quotas, "long-ago", 60_000, now_s - 61.0)
        asyncio.run(levels.save())
        quotas.charge("used", 5, now_s)
        asyncio.run(levels.save())
        asyncio.run(levels.save())  # nothing new
    with conductor(tmp_path) as (quotas, levels):
        assert sorted(quotas.by_tenant) == ["in-debt", "used"]
        left = {tenant: tokens.left(now_s) for tenant, tokens in quotas.by_tenant.items()}
        assert left == pytest.approx({"used": -5.0, "in-debt": -940_010.0}, abs=100.0)
        assert not use(quotas, "used", 10_000, now_s + 1.0)
        assert use(quotas, "used", 10_000, now_s + 11.0)
        assert not use(quotas, "in-debt", 10, now_s + 900.0)
        assert use(quotas, "in-debt", 10, now_s + 950.0)
        assert use(quotas, "long-ago", 60_000, now_s)


def test_a_clock_that_was_set_back_makes_no_tokens(tmp_path: Path) -> None:
    """Nor does it take more than what was charged."""
    later_s = time.monotonic() + 3600.0
    with conductor(tmp_path) as (quotas, levels):
        assert use(quotas, "t", 50_000, later_s)
        asyncio.run(levels.save())
    now_s = time.monotonic()
    with conductor(tmp_path) as (quotas, levels):
        assert quotas.by_tenant["t"].left(now_s + 1.0) == pytest.approx(11_000.0, abs=1000.0)
