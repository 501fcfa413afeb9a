"""What Prometheus is told about the instances' parts of the KVCache pool."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from conductor.metrics import ConductorMetrics, decode_metrics, pool_metrics
from conductor.policy import Conductor, Limits
from mooncake.blocks import KVLayout
from mooncake.bus import peer_identity
from mooncake.messages import (
    PROTOCOL_VERSION,
    Capacity,
    DecodeStats,
    Heartbeat,
    MessengerAddress,
    PoolShard,
    PoolStats,
    Register,
    Role,
    Tier,
    TierStats,
)

STATS = PoolStats(
    num_pages=100,
    num_free=1,
    num_reserved=2,
    num_sealed=3,
    num_quarantined=4,
    num_used=5,
    num_reservations=6,
    num_leases=7,
    num_pins=8,
    block_bytes=1000,
    eviction_policy="lfu",
    tiers={
        Tier.DRAM: TierStats(
            num_slots=11, num_blocks=12, num_hits=13, num_evictions=14, num_checksum_failures=15
        ),
        Tier.SSD: TierStats(
            num_slots=21,
            num_blocks=22,
            num_hits=23,
            num_evictions=24,
            num_checksum_failures=25,
            num_errors=26,
            is_healthy=False,
        ),
    },
    num_misses={"absent": 31, "evicted": 32},
    num_dropped=41,
    num_removed=42,
    num_demotions=43,
    num_promotions=44,
    num_expired_leases=45,
    num_checksum_failures=46,
    num_orphaned=47,
    sent_bytes={},
    received_bytes={},
)

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Pools:
    """Collects what `pool_metrics` yields."""

    def __init__(self, **pools: PoolStats) -> None:
        self.pools = pools

    def collect(self) -> object:
        return pool_metrics(self.pools)


def scraped(**pools: PoolStats) -> dict[Sample, float]:
    """Samples as a scraper reads them, by name and labels."""
    registry = CollectorRegistry()
    registry.register(Pools(**pools))  # type: ignore[arg-type]
    samples: dict[Sample, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in samples, "one sample for each set of labels"
            samples[key] = sample.value
    return samples


def of(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def test_pages_and_what_uses_them_are_told_by_kind() -> None:
    samples = scraped(p0=STATS)
    for state, expected in {"free": 1, "reserved": 2, "sealed": 3, "quarantined": 4}.items():
        assert of(samples, "mooncake_pool_pages", instance="p0", state=state) == expected
    for kind, expected in {"reservations": 6, "leases": 7, "pins": 8}.items():
        assert of(samples, "mooncake_pool_users", instance="p0", kind=kind) == expected
    assert of(samples, "mooncake_pool_orphaned_pages", instance="p0") == 47


def test_tiers_are_told_apart() -> None:
    samples = scraped(p0=STATS)
    for name, dram, ssd in [
        ("slots", 11, 21),
        ("held_blocks", 12, 22),
        ("held_bytes", 12_000, 22_000),
        ("tier_healthy", 1, 0),
        ("hits_total", 13, 23),
        ("damaged_total", 15, 25),
        ("errors_total", 0, 26),
    ]:
        assert of(samples, f"mooncake_pool_{name}", instance="p0", tier="dram") == dram
        assert of(samples, f"mooncake_pool_{name}", instance="p0", tier="ssd") == ssd
    for tier, expected in (("dram", 14), ("ssd", 24)):
        found = of(samples, "mooncake_pool_evictions_total", instance="p0", tier=tier, policy="lfu")
        assert found == expected


def test_misses_are_told_by_their_reason_and_blocks_by_what_happened_to_them() -> None:
    samples = scraped(p0=STATS)
    for reason, expected in {"absent": 31, "evicted": 32}.items():
        assert of(samples, "mooncake_pool_misses_total", instance="p0", reason=reason) == expected
    for event, expected in {
        "dropped": 41,
        "removed": 42,
        "demotions": 43,
        "promotions": 44,
        "expired_leases": 45,
        "checksum_failures": 46,
    }.items():
        assert of(samples, "mooncake_pool_blocks_total", instance="p0", event=event) == expected


def test_instances_are_told_apart_and_one_without_ssd_has_no_such_tier() -> None:
    other = msgspec.structs.replace(STATS, num_free=77, tiers={Tier.DRAM: STATS.tiers[Tier.DRAM]})
    samples = scraped(p0=STATS, d0=other)
    assert of(samples, "mooncake_pool_pages", instance="p0", state="free") == 1
    assert of(samples, "mooncake_pool_pages", instance="d0", state="free") == 77
    tiers = {
        (dict(labels)["instance"], dict(labels)["tier"])
        for name, labels in samples
        if name == "mooncake_pool_slots"
    }
    assert tiers == {("p0", "dram"), ("p0", "ssd"), ("d0", "dram")}


def test_without_instances_there_are_names_but_no_samples() -> None:
    assert scraped() == {}
    assert len(list(pool_metrics({}))) == len({family.name for family in pool_metrics({})}) > 10


def test_strangers_at_the_conductor_are_counted() -> None:
    registry = CollectorRegistry()
    ConductorMetrics(Conductor(1, "f" * 32, Limits()), registry, lambda: 7)
    assert "mooncake_conductor_strangers_total 7.0" in generate_latest(registry).decode()


def test_prefilled_tokens_are_told_by_their_source() -> None:
    conductor = Conductor(1, "model", Limits())
    address = MessengerAddress("p0", 1, "host", "/path", (("127.0.0.1", 1),))
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    p0 = peer_identity("p0", 1)
    register = Register(
        PROTOCOL_VERSION,
        "p0",
        1,
        Role.PREFILL,
        "model",
        layout,
        (PoolShard(address, layout),),
        Capacity(100, 100),
        "cpu (torch)",
    )
    conductor.handle(p0, register, 0.0)
    heartbeat = Heartbeat(0, 0, 0, {"p0.0": STATS, "p0.1": STATS}, {"computed": 50, "dram": 30, "remote": 20})
    conductor.handle(p0, heartbeat, 1.0)
    registry = CollectorRegistry()
    ConductorMetrics(conductor, registry, lambda: 0)
    for source, expected in {"computed": 50, "dram": 30, "ssd": 0, "remote": 20}.items():
        labels = {"instance": "p0", "source": source}
        assert registry.get_sample_value("mooncake_prefill_tokens_total", labels) == expected
    labels = {"instance": "p0", "engine": "cpu (torch)"}
    assert registry.get_sample_value("mooncake_instance_engine", labels) == 1
    for name in ("p0.0", "p0.1"):  # a pool of its own each
        pages = registry.get_sample_value("mooncake_pool_pages", {"instance": name, "state": "free"})
        assert pages == STATS.num_free


def test_decoding_is_told_by_instance() -> None:
    stats = DecodeStats(
        num_iterations=1,
        num_tokens=2,
        forward_s=3.0,
        host_s=4.0,
        bubble_s=5.0,
        num_preemptions={"host": 6},
        num_refusals=7,
        num_sealed_blocks=8,
        num_unsealed=9,
        num_inlined=10,
        num_not_inlined=11,
    )
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in decode_metrics({"d0": stats})
        for sample in family.samples
    }
    assert samples == {
        ("mooncake_decode_iterations_total", "d0"): 1,
        ("mooncake_decode_tokens_total", "d0"): 2,
        ("mooncake_decode_seconds_total", "d0", "forward"): 3,
        ("mooncake_decode_seconds_total", "d0", "host"): 4,
        ("mooncake_decode_seconds_total", "bubble", "d0"): 5,
        ("mooncake_decode_preemptions_total", "d0", "pool"): 0,
        ("mooncake_decode_preemptions_total", "d0", "host"): 6,
        ("mooncake_decode_refusals_total", "d0"): 7,
        ("mooncake_decode_sealed_blocks_total", "d0"): 8,
        ("mooncake_decode_unsealed_answers_total", "d0"): 9,
        ("mooncake_decode_prompts_total", "d0", "yes"): 10,
        ("mooncake_decode_prompts_total", "d0", "no"): 11,
    }
