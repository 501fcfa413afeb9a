"""What Prometheus is told about the prefix index."""

from conductor.index.event_stream import EventStream
from conductor.index.prefix_index import PrefixIndex
from conductor.telemetry.index_metrics import index_metrics
from mooncake.messages.kv_events import KVEvents, KVSnapshot, KVStored, ReplayDone
from mooncake.messages.pools import Tier


def test_the_index_is_told_by_the_pools_that_are_followed() -> None:
    prefixes, streams = PrefixIndex(), {name: EventStream(name, 1) for name in ("p0.0", "p0.1")}
    prefixes.add_instance("p0", list(streams))
    stored = KVStored(Tier.SSD, [bytes(16), bytes(15) + b"1"])
    prefixes.apply("p0.0", [stored, KVStored(Tier.DRAM, [bytes(16)])])
    stream = streams["p0.0"]
    stream.tick(0.0)
    stream.receive(KVSnapshot("p0.0", 1, 4, Tier.DRAM, [], is_last=True), 0.0)
    stream.receive(KVEvents("p0.0", 1, 6, []), 0.0)
    stream.receive(ReplayDone("p0.0", 1, 5), 0.0)
    stream.receive(KVEvents("p0.0", 1, 5, []), 0.0)
    samples = {
        (sample.name.removeprefix("mooncake_"), *sorted(sample.labels.values())): sample.value
        for family in index_metrics(prefixes, streams)
        for sample in family.samples
    }
    assert samples == {
        ("index_keys",): 2,
        ("index_blocks", "dram", "p0.0"): 1,
        ("index_blocks", "p0.0", "ssd"): 2,
        ("index_blocks", "dram", "p0.1"): 0,
        ("index_blocks", "p0.1", "ssd"): 0,
        ("index_current", "p0.0"): 1,
        ("index_current", "p0.1"): 0,
        ("kv_event_batches_total", "p0.0"): 2,
        ("kv_event_batches_total", "p0.1"): 0,
        ("kv_event_gaps_total", "p0.0"): 0,
        ("kv_event_gaps_total", "p0.1"): 0,
        ("kv_event_snapshots_total", "p0.0"): 1,
        ("kv_event_snapshots_total", "p0.1"): 0,
    }
