"""The measured utilisation of instances (BanaServe, equation 32)."""

import msgspec
import pytest

from conductor.performance.utilisation import Utilisation
from mooncake.messages.heartbeats import DecodeStats, Heartbeat
from mooncake.messages.workers import Role
from tests.conductor.small_cluster import POOL

TOKEN_S = 0.002


def heartbeat(
    prefill_s: float = 0.0, num_tokens: int = 0, num_free: int = 100, num_used: int = 0
) -> Heartbeat:
    pools = {"p0": msgspec.structs.replace(POOL, num_pages=100, num_used=num_used)}
    stats = DecodeStats(num_tokens=num_tokens)
    return Heartbeat(0, 0, num_free, pools, decode=stats, prefill_s=prefill_s)


def test_prefill_counts_the_time_of_its_passes_and_the_pages_in_use() -> None:
    utilisation = Utilisation()
    utilisation.learn("p0", Role.PREFILL, heartbeat(1.0), 100, TOKEN_S, 10.0)
    assert utilisation.of("p0") is None
    utilisation.learn("p0", Role.PREFILL, heartbeat(2.5, num_used=30), 100, TOKEN_S, 12.0)
    used = utilisation.of("p0")
    assert used is not None
    assert used == pytest.approx((0.75, 0.3))
    assert used.utilisation == pytest.approx(1.05)


def test_decode_counts_its_tokens_as_in_full_batches() -> None:
    utilisation = Utilisation()
    utilisation.learn("d0", Role.DECODE, heartbeat(num_tokens=100), 100, TOKEN_S, 10.0)
    utilisation.learn("d0", Role.DECODE, heartbeat(num_tokens=300, num_free=40), 100, TOKEN_S, 12.0)
    used = utilisation.of("d0")
    assert used is not None
    assert used == pytest.approx((0.2, 0.6))


def test_a_new_life_of_an_instance_begins_anew() -> None:
    utilisation = Utilisation()
    for at_s, num_tokens in ((10.0, 5000), (11.0, 6000), (12.0, 10)):
        utilisation.learn("d0", Role.DECODE, heartbeat(num_tokens=num_tokens), 100, TOKEN_S, at_s)
    assert utilisation.of("d0") is None


def test_an_instance_that_has_gone_is_forgotten() -> None:
    utilisation = Utilisation()
    for name in ("d0", "d1"):
        for at_s in (10.0, 11.0):
            utilisation.learn(name, Role.DECODE, heartbeat(), 100, TOKEN_S, at_s)
    utilisation.forget("d0")
    assert utilisation.by_name().keys() == {"d1"}
