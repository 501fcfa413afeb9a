"""What Prometheus is told about the instances, from their heartbeats."""

import time

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from conductor.policy import Conductor
from conductor.settings import Limits
from conductor.telemetry.metrics import instances_text
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.blocks import KVLayout
from mooncake.messages.heartbeats import DecodeStats, Heartbeat, MixedIterations
from mooncake.messages.instance_metrics import InstanceReport, instance_text
from mooncake.messages.migration import PAUSE_BOUNDS_S, LayerRange, ModulesPart, ModulesPlace, MovesStats
from mooncake.messages.pools import (
    Capacity,
    MessengerAddress,
    PeerStats,
    PoolShard,
    PoolStats,
    Tier,
    TierStats,
)
from mooncake.messages.workers import PROTOCOL_VERSION, Register, Role

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


def parsed(text: str) -> dict[Sample, float]:
    """Samples as a scraper reads them, by name and labels."""
    samples: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in samples, "one sample for each set of labels"
            samples[key] = sample.value
    return samples


def scraped(**pools: PoolStats) -> dict[Sample, float]:
    """What is told of instances with these pools."""
    reports = [InstanceReport(name, 100, Heartbeat(0, 0, 25, {name: pool})) for name, pool in pools.items()]
    return parsed(instance_text(reports, "model"))


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
    text = instance_text([], "model")
    assert parsed(text) == {}
    assert text.count("# TYPE ") == text.count("\n") // 2 > 25


def test_the_use_of_the_device_is_told_under_vllms_name() -> None:
    samples = scraped(p0=STATS)
    assert of(samples, "vllm:kv_cache_usage_perc", model_name="model", engine="p0") == 0.75


def test_names_from_outside_cannot_break_the_format() -> None:
    nasty = 'a"b\\c\nd'
    peers = {nasty: PeerStats(1, None, 1, sent_bytes={"tcp": 2})}
    samples = scraped(p0=msgspec.structs.replace(STATS, peers=peers))
    labels = {"direction": "sent", "instance": "p0", "peer": nasty, "transport": "tcp"}
    assert of(samples, "mooncake_transfer_peer_bytes_total", **labels) == 2


def test_transfers_are_told_by_peer_and_transport() -> None:
    peer = PeerStats(
        1, 2.0, 3, sent_bytes={"shm": 4, "tcp": 5}, received_bytes={"shm": 6}, busy_s={"shm": 0.5, "tcp": 1.5}
    )
    stats = msgspec.structs.replace(
        STATS, peers={"d0": peer}, sent_bytes={"shm": 7}, received_bytes={"tcp": 8}
    )
    samples = scraped(p0=stats)
    told = {
        (name.removeprefix("mooncake_transfer_"), *sorted(dict(labels).values())): value
        for (name, labels), value in samples.items()
        if name.startswith("mooncake_transfer_")
    }
    assert told == {
        ("bytes_total", "p0", "sent", "shm"): 7,
        ("bytes_total", "p0", "received", "tcp"): 8,
        ("peer_bytes_total", "d0", "p0", "sent", "shm"): 4,
        ("peer_bytes_total", "d0", "p0", "sent", "tcp"): 5,
        ("peer_bytes_total", "d0", "p0", "received", "shm"): 6,
        ("peer_seconds_total", "d0", "p0", "shm"): 0.5,
        ("peer_seconds_total", "d0", "p0", "tcp"): 1.5,
        ("in_flight_bytes", "d0", "p0"): 1,
        ("bandwidth_bytes_per_second", "d0", "p0"): 2,
        ("streams", "d0", "p0"): 3,
    }


def test_a_hundred_instances_are_told_before_anybody_misses_the_event_loop() -> None:
    """Half of them send to each of the others. 50 ms of processor time are allowed; it takes about 15."""
    peers = {
        f"decode-{i}": PeerStats(1, 2.0, 3, {"tcp": 10**9}, {"tcp": 10**9}, {"tcp": 1.5}) for i in range(50)
    }
    reports = [
        InstanceReport(name, 100, Heartbeat(1, 2, 3, {name: msgspec.structs.replace(STATS, peers=whose)}))
        for i in range(50)
        for name, whose in ((f"prefill-{i}", peers), (f"decode-{i}", {}))
    ]
    took_s = []
    for _ in range(5):
        began_s = time.process_time()
        text = instance_text(reports, "model")
        took_s.append(time.process_time() - began_s)
    assert text.count("\n") > 20_000
    assert min(took_s) < 0.05


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
        Capacity(100, 100, 32),
        "cpu (torch)",
    )
    conductor.handle(p0, register, 0.0)
    pools = {"p0.0": STATS, "p0.1": STATS}
    conductor.handle(p0, Heartbeat(0, 0, 0, pools, {"computed": 50, "dram": 30, "remote": 20}), 1.0)
    samples = parsed(instances_text(conductor, "model"))
    for source, expected in {"computed": 50, "dram": 30, "ssd": 0, "remote": 20}.items():
        assert of(samples, "mooncake_prefill_tokens_total", instance="p0", source=source) == expected
    for name in ("p0.0", "p0.1"):  # a pool of its own each
        assert of(samples, "mooncake_pool_pages", instance=name, state="free") == STATS.num_free


def test_decoding_is_told_by_instance() -> None:
    stats = DecodeStats(
        num_iterations=1,
        num_tokens=2,
        forward_s=3.0,
        host_s=4.0,
        bubble_s=5.0,
        pause_s=12.0,
        num_preemptions={"host": 6},
        num_refusals=7,
        num_sealed_blocks=8,
        num_unsealed=9,
        num_inlined=10,
        num_not_inlined=11,
        mixed=MixedIterations(num_prompt_tokens=13),
    )
    text = instance_text([InstanceReport("d0", 100, Heartbeat(0, 0, 0, {}, decode=stats))], "model")
    samples = {
        (name, *sorted(dict(labels).values())): value
        for (name, labels), value in parsed(text).items()
        if name.startswith("mooncake_decode_")
    }
    assert samples == {
        ("mooncake_decode_iterations_total", "d0"): 1,
        ("mooncake_decode_tokens_total", "d0"): 2,
        ("mooncake_decode_seconds_total", "d0", "forward"): 3,
        ("mooncake_decode_seconds_total", "d0", "host"): 4,
        ("mooncake_decode_seconds_total", "bubble", "d0"): 5,
        ("mooncake_decode_seconds_total", "d0", "pause"): 12,
        ("mooncake_decode_preemptions_total", "d0", "pool"): 0,
        ("mooncake_decode_preemptions_total", "d0", "host"): 6,
        ("mooncake_decode_refusals_total", "d0"): 7,
        ("mooncake_decode_sealed_blocks_total", "d0"): 8,
        ("mooncake_decode_unsealed_answers_total", "d0"): 9,
        ("mooncake_decode_prompts_total", "d0", "yes"): 10,
        ("mooncake_decode_prompts_total", "d0", "no"): 11,
        ("mooncake_decode_inlined_tokens_total", "d0"): 13,
    }


def test_modules_elsewhere_and_their_moves_are_told() -> None:
    num_pauses = [0] * (len(PAUSE_BOUNDS_S) + 1)
    num_pauses[1], num_pauses[-1] = 3, 1
    beats = {
        "d0": Heartbeat(0, 0, 0, {}, modules=ModulesPlace(helper="d1", part=ModulesPart(2))),
        "d1": Heartbeat(0, 0, 0, {}, moves=MovesStats({"moved": 2, "slow": 1}, 5000, num_pauses, 12.5)),
        "d2": Heartbeat(
            0, 0, 0, {}, modules=ModulesPlace(helper="d1", part=ModulesPart(layers=LayerRange(3, 7)))
        ),
        "d3": Heartbeat(0, 0, 0, {}, modules=ModulesPlace(helper="d1", part=ModulesPart(share=0.25))),
    }
    reports = [InstanceReport(name, 100, beat) for name, beat in beats.items()]
    samples = parsed(instance_text(reports, "model"))
    assert of(samples, "mooncake_instance_moved_sequence_ratio", instance="d3", helper="d1") == 0.25
    assert of(samples, "mooncake_instance_moved_heads", instance="d0", helper="d1") == 2
    assert of(samples, "mooncake_instance_moved_layers", instance="d2", helper="d1") == 4
    assert of(samples, "mooncake_instance_moved_heads", instance="d1", helper="") == 0
    for outcome, expected in {"moved": 2, "back": 0, "slow": 1, "lost": 0, "refused": 0}.items():
        assert of(samples, "mooncake_module_moves_total", instance="d1", outcome=outcome) == expected
    assert of(samples, "mooncake_module_copied_bytes_total", instance="d1") == 5000
    pauses = "mooncake_module_pause_seconds"
    for bound, expected in {"0.001": 0, "0.005": 3, "10.0": 3, "+Inf": 4}.items():
        assert of(samples, f"{pauses}_bucket", instance="d1", le=bound) == expected
    assert of(samples, f"{pauses}_sum", instance="d1") == 12.5
    assert of(samples, f"{pauses}_count", instance="d0") == 0
