"""Heartbeats as Prometheus metrics.

The Conductor's /metrics has the heartbeats of all instances. The listener of an instance has the heartbeats
of this instance alone.

Owns: these metrics' names and labels. Does not know: scrapers, how a heartbeat arrived.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mooncake.messages.heartbeats import PREEMPTED_TO, DecodeStats, Heartbeat
from mooncake.messages.migration import MOVE_OUTCOMES, PAUSE_BOUNDS_S
from mooncake.messages.pools import PREFILL_SOURCES, PeerStats, PoolStats

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class InstanceReport(NamedTuple):
    """An instance's latest heartbeat, with the number of its device pages."""

    instance: str
    num_device_pages: int
    heartbeat: Heartbeat


class Family:
    """The samples of one metric in Prometheus' text format, added by `add` and joined by `text`.

    prometheus_client takes about 6 us a sample, which is too long for an event loop that sends tokens and
    reports on a hundred instances. This class takes about 1 us.
    """

    __slots__ = ("_head", "_lines", "name")

    def __init__(self, name: str, kind: str, help_text: str) -> None:
        self.name = name
        self._head = f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"
        self._lines: list[str] = []

    def add(self, label_text: str, value: float) -> None:
        """Add a sample. `label_text` is the result of `labels`; further labels may follow behind a comma."""
        self._lines.append(f"{self.name}{{{label_text}}} {value}\n")

    def add_histogram(
        self, label_text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> None:
        """Add the samples of a histogram.

        `counts`: the number of values in each bucket, one bucket up to each of the `bounds` and one beyond
        them. `total`: the sum of all values.
        """
        bounds_text = [*map(str, bounds), "+Inf"]
        for bound, number in zip(bounds_text, accumulate(counts), strict=True):
            self._lines.append(f'{self.name}_bucket{{{label_text},le="{bound}"}} {number}\n')
        self._lines.append(f"{self.name}_count{{{label_text}}} {sum(counts)}\n")
        self._lines.append(f"{self.name}_sum{{{label_text}}} {total}\n")

    @property
    def text(self) -> str:
        """The lines of the metric.

        A metric without samples has lines too, so that its name can be looked up.
        """
        return self._head + "".join(self._lines)


def labels(**values: str) -> str:
    """Return labels as the text between a sample's braces.

    Making this text takes most of a sample's time, so callers reuse it.
    """
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items()])


def instance_text(reports: Iterable[InstanceReport], model_name: str) -> str:
    """Return the reports in Prometheus' text format."""
    reports = list(reports)
    pools = {name: pool for report in reports for name, pool in report.heartbeat.pools.items()}
    families = [
        *_load(reports, model_name),
        *_decoding({report.instance: report.heartbeat.decode for report in reports}),
        *_modules(reports),
        *_pools(pools),
        *_tiers(pools),
        *_transfers(pools),
    ]
    return "".join([family.text for family in families])


def _gauge(name: str, help_text: str) -> Family:
    return Family(name, "gauge", help_text)


def _counter(name: str, help_text: str) -> Family:
    return Family(f"{name}_total", "counter", help_text)


def _load(reports: Iterable[InstanceReport], model_name: str) -> list[Family]:
    pages = _gauge("mooncake_instance_device_pages", "Pages of the device's KVCache")
    free = _gauge("mooncake_instance_free_device_pages", "Free pages of the device's KVCache")
    usage = _gauge("vllm:kv_cache_usage_perc", "Share of the device's KVCache that is in use, from 0 to 1")
    requests = _gauge("mooncake_instance_requests", "Requests in the batch (running), and others (waiting)")
    prefilled = _counter(
        "mooncake_prefill_tokens", "Prompt tokens of prefills by where their KVCache came from"
    )
    for instance, num_pages, heartbeat in reports:
        name = labels(instance=instance)
        pages.add(name, num_pages)
        free.add(name, heartbeat.num_free_device_pages)
        if num_pages:
            engine = labels(model_name=model_name, engine=instance)
            usage.add(engine, 1 - heartbeat.num_free_device_pages / num_pages)
        requests.add(f'{name},state="running"', heartbeat.num_running)
        requests.add(f'{name},state="waiting"', heartbeat.num_waiting)
        if heartbeat.num_prefill_tokens:
            for source in PREFILL_SOURCES:
                prefilled.add(f'{name},source="{source}"', heartbeat.num_prefill_tokens.get(source, 0))
    return [pages, free, usage, requests, prefilled]


def _decoding(decodes: Mapping[str, DecodeStats]) -> list[Family]:
    iterations = _counter("mooncake_decode_iterations", "Forward passes over a batch")
    tokens = _counter("mooncake_decode_tokens", "Tokens drawn in them")
    seconds = _counter(
        "mooncake_decode_seconds",
        "Of the passes (forward); of planning and sending, mostly beside them (host); "
        "without a pass though there was work (bubble); left to prompts on the same cores (pause)",
    )
    preemptions = _counter(
        "mooncake_decode_preemptions", "Sequences that gave way to others, by where their KVCache waited"
    )
    refusals = _counter("mooncake_decode_refusals", "Requests that would have missed the TBT SLO")
    sealed = _counter(
        "mooncake_decode_sealed_blocks",
        "Blocks stored for other requests or instances: of answers, inlined prompts, pre-copies",
    )
    unsealed = _counter("mooncake_decode_unsealed_answers", "Answers that found no room in the pool")
    prompts = _counter(
        "mooncake_decode_prompts",
        "Requests by whether their prompt was computed here, in an iteration, or by a prefill instance",
    )
    inlined = _counter("mooncake_decode_inlined_tokens", "Prompt tokens computed in iterations")
    for instance, decode in decodes.items():
        name = labels(instance=instance)
        iterations.add(name, decode.num_iterations)
        tokens.add(name, decode.num_tokens)
        for part in ("forward", "host", "bubble", "pause"):
            seconds.add(f'{name},part="{part}"', getattr(decode, f"{part}_s"))
        for to in PREEMPTED_TO:
            preemptions.add(f'{name},to="{to}"', decode.num_preemptions.get(to, 0))
        refusals.add(name, decode.num_refusals)
        sealed.add(name, decode.num_sealed_blocks)
        unsealed.add(name, decode.num_unsealed)
        prompts.add(f'{name},inlined="yes"', decode.num_inlined)
        prompts.add(f'{name},inlined="no"', decode.num_not_inlined)
        inlined.add(name, decode.mixed.num_prompt_tokens)
    return [iterations, tokens, seconds, preemptions, refusals, sealed, unsealed, prompts, inlined]


def _modules(reports: Iterable[InstanceReport]) -> list[Family]:
    heads = _gauge("mooncake_instance_moved_heads", "KV heads of the instance that a helper has")
    layers = _gauge("mooncake_instance_moved_layers", "Layers of the instance that a helper has")
    shares = _gauge(
        "mooncake_instance_moved_sequence_ratio", "Share of the instance's sequences that a helper has"
    )
    moves = _counter("mooncake_module_moves", "Moves of modules of the instance, by their end")
    copied = _counter("mooncake_module_copied_bytes", "KVCache that was copied in these moves")
    pauses = Family(
        "mooncake_module_pause_seconds", "histogram", "Pauses between two iterations in these moves"
    )
    for instance, _, heartbeat in reports:
        name, place, totals = labels(instance=instance), heartbeat.modules, heartbeat.moves
        away = f"{name},{labels(helper=place.helper)}"
        heads.add(away, place.part.num_heads)
        layers.add(away, 0 if place.part.layers is None else place.part.layers.count)
        shares.add(away, place.part.share)
        for outcome in MOVE_OUTCOMES:
            moves.add(f'{name},outcome="{outcome}"', totals.num_moves.get(outcome, 0))
        copied.add(name, totals.copied_bytes)
        num_pauses = totals.num_pauses or [0] * (len(PAUSE_BOUNDS_S) + 1)
        if len(num_pauses) == len(PAUSE_BOUNDS_S) + 1:  # those of another release may have other bounds
            pauses.add_histogram(name, PAUSE_BOUNDS_S, num_pauses, totals.pause_s)
    return [heads, layers, shares, moves, copied, pauses]


def _pools(pools: Mapping[str, PoolStats]) -> list[Family]:
    pages = _gauge("mooncake_pool_pages", "Pages of DRAM by state")
    users = _gauge("mooncake_pool_users", "What keeps pages in use, by kind")
    orphaned = _gauge("mooncake_pool_orphaned_pages", "Pages that nobody will free: should be 0")
    misses = _counter("mooncake_pool_misses", "Blocks that were wanted and not there")
    blocks = _counter("mooncake_pool_blocks", "Blocks by what happened to them")
    unauthenticated = _counter(
        "mooncake_messenger_unauthenticated_connections",
        "Connections of peers and clients without the cluster's key",
    )
    for part, pool in pools.items():
        name = labels(instance=part)
        for state in ("free", "reserved", "sealed", "quarantined"):
            pages.add(f'{name},state="{state}"', getattr(pool, f"num_{state}"))
        for kind in ("reservations", "leases", "pins"):
            users.add(f'{name},kind="{kind}"', getattr(pool, f"num_{kind}"))
        orphaned.add(name, pool.num_orphaned)
        for reason, num_blocks in pool.num_misses.items():
            misses.add(f"{name},{labels(reason=reason)}", num_blocks)
        for event in ("dropped", "removed", "demotions", "promotions", "expired_leases", "checksum_failures"):
            blocks.add(f'{name},event="{event}"', getattr(pool, f"num_{event}"))
        unauthenticated.add(name, pool.num_unauthenticated)
    return [pages, users, orphaned, misses, blocks, unauthenticated]


def _tiers(pools: Mapping[str, PoolStats]) -> list[Family]:
    slots = _gauge("mooncake_pool_slots", "Blocks that a tier can hold")
    held = _gauge("mooncake_pool_held_blocks", "Blocks that can be found")
    held_bytes = _gauge("mooncake_pool_held_bytes", "Bytes of those")
    healthy = _gauge("mooncake_pool_tier_healthy", "1 while all of a tier works")
    hits = _counter("mooncake_pool_hits", "Blocks that were wanted and there")
    evictions = _counter("mooncake_pool_evictions", "Blocks that made room for others")
    damaged = _counter("mooncake_pool_damaged", "Blocks dropped because of their checksums")
    errors = _counter("mooncake_pool_errors", "Reads and writes that failed")
    for part, pool in pools.items():
        for tier, stats in pool.tiers.items():
            name = labels(instance=part, tier=tier)
            slots.add(name, stats.num_slots)
            held.add(name, stats.num_blocks)
            held_bytes.add(name, stats.num_blocks * pool.block_bytes)
            healthy.add(name, int(stats.is_healthy))
            hits.add(name, stats.num_hits)
            evictions.add(f"{name},{labels(policy=pool.eviction_policy)}", stats.num_evictions)
            damaged.add(name, stats.num_checksum_failures)
            errors.add(name, stats.num_errors)
    return [slots, held, held_bytes, healthy, hits, evictions, damaged, errors]


def _transfers(pools: Mapping[str, PoolStats]) -> list[Family]:
    moved = _counter("mooncake_transfer_bytes", "KVCache moved, at whoever's request")
    by_peer = _counter(
        "mooncake_transfer_peer_bytes", "KVCache moved to and from a peer at the instance's request"
    )
    seconds = _counter("mooncake_transfer_peer_seconds", "Time in which any of that was in flight")
    in_flight = _gauge("mooncake_transfer_in_flight_bytes", "Bytes in flight or waiting to be")
    bandwidth = _gauge("mooncake_transfer_bandwidth_bytes_per_second", "Of the latest transfers")
    streams = _gauge("mooncake_transfer_streams", "Open connections")
    for part, pool in pools.items():
        name = labels(instance=part)
        for direction, by_transport in (("sent", pool.sent_bytes), ("received", pool.received_bytes)):
            for transport, num_bytes in by_transport.items():
                moved.add(f'{name},{labels(transport=transport)},direction="{direction}"', num_bytes)
        for peer, stats in pool.peers.items():
            path = f"{name},{labels(peer=peer)}"
            _add_peer(path, stats, by_peer, seconds)
            in_flight.add(path, stats.in_flight_bytes)
            streams.add(path, stats.num_streams)
            if stats.bandwidth_bytes_per_s is not None:
                bandwidth.add(path, stats.bandwidth_bytes_per_s)
    return [moved, by_peer, seconds, in_flight, bandwidth, streams]


def _add_peer(path: str, stats: PeerStats, by_peer: Family, seconds: Family) -> None:
    for direction, by_transport in (("sent", stats.sent_bytes), ("received", stats.received_bytes)):
        for transport, num_bytes in by_transport.items():
            by_peer.add(f'{path},transport="{transport}",direction="{direction}"', num_bytes)
    for transport, busy_s in stats.busy_s.items():
        seconds.add(f'{path},transport="{transport}"', busy_s)
