"""The Conductor's metrics, read from its state at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conductor.lifecycle import RUNNING_STATES
from conductor.policy import Conductor
from mooncake.messages import PREEMPTED_TO, PREFILL_SOURCES, DecodeStats, PoolStats, Role


class ConductorMetrics(Collector):
    """Instances, requests, and the instances' pools; registers itself.

    `num_refused` counts connections to the Conductor that did not show the cluster's key.
    """

    def __init__(
        self, conductor: Conductor, registry: CollectorRegistry, num_refused: Callable[[], int]
    ) -> None:
        self._conductor = conductor
        self._num_refused = num_refused
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One sample a role, a state, an instance."""
        instances = GaugeMetricFamily("mooncake_instances", "registered instances", labels=["role"])
        for role in Role:
            instances.add_metric([role.value], len(self._conductor.instances.of_role(role)))
        yield instances

        requests = GaugeMetricFamily(
            "mooncake_requests_by_state", "accepted requests by state", labels=["state"]
        )
        counts = Counter(tracked.state for tracked in self._conductor.requests.values())
        for state in RUNNING_STATES:
            requests.add_metric([state.name.lower()], counts[state])
        yield requests

        assigned = GaugeMetricFamily(
            "mooncake_instance_assigned_tokens", "prompt tokens assigned to an instance", labels=["instance"]
        )
        for instance in self._conductor.instances:
            assigned.add_metric([instance.name], instance.num_assigned_tokens)
        yield assigned

        engines = GaugeMetricFamily(
            "mooncake_instance_engine",
            "1 for what computes: on CPUs the kernels' instruction set, or torch at about half their speed",
            labels=["instance", "engine"],
        )
        for instance in self._conductor.instances:
            engines.add_metric([instance.name, instance.registration.engine], 1)
        yield engines

        yield CounterMetricFamily(
            "mooncake_conductor_strangers",
            "connections that were closed because they did not show the cluster's key",
            self._num_refused(),
        )
        yield from self._reported()

    def _reported(self) -> Iterator[Metric]:
        """What the instances said in their last heartbeats."""
        free = GaugeMetricFamily(
            "mooncake_instance_free_device_pages", "free pages of the device's KVCache", labels=["instance"]
        )
        requests = GaugeMetricFamily(
            "mooncake_instance_requests", "requests in the batch, and others", labels=["instance", "state"]
        )
        transferred = CounterMetricFamily(
            "mooncake_transfer_bytes", "KVCache moved", labels=["instance", "transport", "direction"]
        )
        prefilled = CounterMetricFamily(
            "mooncake_prefill_tokens",
            "prompt tokens of prefills by where their KVCache came from",
            labels=["instance", "source"],
        )
        heartbeats = {
            instance.name: instance.heartbeat
            for instance in self._conductor.instances
            if instance.heartbeat is not None
        }
        for name, heartbeat in heartbeats.items():
            free.add_metric([name], heartbeat.num_free_device_pages)
            requests.add_metric([name, "running"], heartbeat.num_running)
            requests.add_metric([name, "waiting"], heartbeat.num_waiting)
            if heartbeat.num_prefill_tokens:
                for source in PREFILL_SOURCES:
                    prefilled.add_metric([name, source], heartbeat.num_prefill_tokens.get(source, 0))
        pools = {name: pool for heartbeat in heartbeats.values() for name, pool in heartbeat.pools.items()}
        for name, pool in pools.items():
            for direction, by_transport in (("sent", pool.sent_bytes), ("received", pool.received_bytes)):
                for transport, num_bytes in by_transport.items():
                    transferred.add_metric([name, transport, direction], num_bytes)
        yield from (free, requests, transferred, prefilled)
        yield from decode_metrics({name: heartbeat.decode for name, heartbeat in heartbeats.items()})
        yield from pool_metrics(pools)


def decode_metrics(decodes: Mapping[str, DecodeStats]) -> Iterator[Metric]:
    """What the instances have decoded, by instance."""
    iterations = CounterMetricFamily(
        "mooncake_decode_iterations", "forward passes over a batch", labels=["instance"]
    )
    tokens = CounterMetricFamily("mooncake_decode_tokens", "tokens drawn in them", labels=["instance"])
    seconds = CounterMetricFamily(
        "mooncake_decode_seconds",
        "of the passes; of planning and sending, mostly beside them; without a pass though there was work",
        labels=["instance", "part"],
    )
    preemptions = CounterMetricFamily(
        "mooncake_decode_preemptions",
        "sequences that gave way to others, by where their KVCache waited",
        labels=["instance", "to"],
    )
    refusals = CounterMetricFamily(
        "mooncake_decode_refusals", "requests that would have missed the TBT SLO", labels=["instance"]
    )
    sealed = CounterMetricFamily(
        "mooncake_decode_sealed_blocks", "blocks of answers that went to the pool", labels=["instance"]
    )
    unsealed = CounterMetricFamily(
        "mooncake_decode_unsealed_answers", "answers that found no room in the pool", labels=["instance"]
    )
    prompts = CounterMetricFamily(
        "mooncake_decode_prompts",
        "requests by whether their prompt was computed here, in an iteration, or by a prefill instance",
        labels=["instance", "inlined"],
    )
    for name, decode in decodes.items():
        iterations.add_metric([name], decode.num_iterations)
        tokens.add_metric([name], decode.num_tokens)
        for part in ("forward", "host", "bubble"):
            seconds.add_metric([name, part], getattr(decode, f"{part}_s"))
        for to in PREEMPTED_TO:
            preemptions.add_metric([name, to], decode.num_preemptions.get(to, 0))
        refusals.add_metric([name], decode.num_refusals)
        sealed.add_metric([name], decode.num_sealed_blocks)
        unsealed.add_metric([name], decode.num_unsealed)
        prompts.add_metric([name, "yes"], decode.num_inlined)
        prompts.add_metric([name, "no"], decode.num_not_inlined)
    yield from (iterations, tokens, seconds, preemptions, refusals, sealed, unsealed, prompts)


def pool_metrics(pools: Mapping[str, PoolStats]) -> Iterator[Metric]:
    """The instances' parts of the KVCache pool, by instance and, where it differs, by tier."""
    pages = GaugeMetricFamily("mooncake_pool_pages", "pages of DRAM by state", labels=["instance", "state"])
    users = GaugeMetricFamily(
        "mooncake_pool_users", "what keeps pages in use, by kind", labels=["instance", "kind"]
    )
    orphaned = GaugeMetricFamily(
        "mooncake_pool_orphaned_pages", "pages that nobody will free: should be 0", labels=["instance"]
    )
    misses = CounterMetricFamily(
        "mooncake_pool_misses", "blocks that were wanted and not there", labels=["instance", "reason"]
    )
    blocks = CounterMetricFamily(
        "mooncake_pool_blocks", "blocks by what happened to them", labels=["instance", "event"]
    )
    for name, pool in pools.items():
        for state in ("free", "reserved", "sealed", "quarantined"):
            pages.add_metric([name, state], getattr(pool, f"num_{state}"))
        for kind in ("reservations", "leases", "pins"):
            users.add_metric([name, kind], getattr(pool, f"num_{kind}"))
        orphaned.add_metric([name], pool.num_orphaned)
        for reason, num_blocks in pool.num_misses.items():
            misses.add_metric([name, reason], num_blocks)
        for event in ("dropped", "removed", "demotions", "promotions", "expired_leases", "checksum_failures"):
            blocks.add_metric([name, event], getattr(pool, f"num_{event}"))
    yield from (pages, users, orphaned, misses, blocks)
    yield from _tier_metrics(pools)
    yield from _peer_metrics(pools)


def _tier_metrics(pools: Mapping[str, PoolStats]) -> Iterator[Metric]:
    labels = ["instance", "tier"]
    slots = GaugeMetricFamily("mooncake_pool_slots", "blocks that a tier can hold", labels=labels)
    held = GaugeMetricFamily("mooncake_pool_held_blocks", "blocks that can be found", labels=labels)
    held_bytes = GaugeMetricFamily("mooncake_pool_held_bytes", "bytes of those", labels=labels)
    healthy = GaugeMetricFamily("mooncake_pool_tier_healthy", "1 while all of a tier works", labels=labels)
    hits = CounterMetricFamily("mooncake_pool_hits", "blocks that were wanted and there", labels=labels)
    evictions = CounterMetricFamily(
        "mooncake_pool_evictions", "blocks that made room for others", labels=[*labels, "policy"]
    )
    damaged = CounterMetricFamily(
        "mooncake_pool_damaged", "blocks dropped because of their checksums", labels=labels
    )
    errors = CounterMetricFamily("mooncake_pool_errors", "reads and writes that failed", labels=labels)
    for name, pool in pools.items():
        for tier, stats in pool.tiers.items():
            slots.add_metric([name, tier.value], stats.num_slots)
            held.add_metric([name, tier.value], stats.num_blocks)
            held_bytes.add_metric([name, tier.value], stats.num_blocks * pool.block_bytes)
            healthy.add_metric([name, tier.value], stats.is_healthy)
            hits.add_metric([name, tier.value], stats.num_hits)
            evictions.add_metric([name, tier.value, pool.eviction_policy], stats.num_evictions)
            damaged.add_metric([name, tier.value], stats.num_checksum_failures)
            errors.add_metric([name, tier.value], stats.num_errors)
    yield from (slots, held, held_bytes, healthy, hits, evictions, damaged, errors)


def _peer_metrics(pools: Mapping[str, PoolStats]) -> Iterator[Metric]:
    labels = ["instance", "peer"]
    in_flight = GaugeMetricFamily(
        "mooncake_transfer_in_flight_bytes", "bytes under way or waiting for it", labels=labels
    )
    bandwidth = GaugeMetricFamily(
        "mooncake_transfer_bandwidth_bytes_per_second", "of the latest transfers", labels=labels
    )
    streams = GaugeMetricFamily("mooncake_transfer_streams", "open connections", labels=labels)
    strangers = CounterMetricFamily(
        "mooncake_messenger_strangers",
        "connections from whoever has not the cluster's key",
        labels=["instance"],
    )
    for name, pool in pools.items():
        strangers.add_metric([name], pool.num_strangers)
        for peer, stats in pool.peers.items():
            in_flight.add_metric([name, peer], stats.in_flight_bytes)
            streams.add_metric([name, peer], stats.num_streams)
            if stats.bandwidth_bytes_per_s is not None:
                bandwidth.add_metric([name, peer], stats.bandwidth_bytes_per_s)
    yield from (in_flight, bandwidth, streams, strangers)
