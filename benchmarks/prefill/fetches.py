"""Prefixes that are fetched from another host while the prompt is computed, over links of several bandwidths.

These are the quantities of BanaServe, section 4.2, layer by layer: T_KV, the time between the arrivals of two
layers, and T_F,layer, the time to compute a layer.

Owns: the stopwatch of layers, the comparison with `overlapped_s`, its tables and limit. Does not know: how a
prefill is run.
"""

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from benchmarks.other_host import limit, other_host
from benchmarks.prefill.bench import BLOCK_SIZE, LAYOUT, Bench, instances, seal
from benchmarks.prefill.links import OverLink, crossover, needed_bits_per_s
from kvstore.client.worker_client import WorkerClient
from mooncake.messages.pools import PoolShard, PrefixSource
from workers.kvcache.copies import Mark
from workers.kvcache.layerwise import LayerTransfers, PassPart

PROMPTS = ((512, 1024), (1024, 2048), (1536, 2048), (2048, 4096), (3072, 4096), (4096, 5472))
"""The cached tokens and all tokens of each prompt: half or three quarters are cached."""
FACTORS = (math.inf, 2.0, 1.25, 1.0, 0.8, 0.5)
"""The bandwidths of the link, as multiples of the bandwidth at which T_KV = T_F,layer."""
MOST_OF_MODEL = 1.25
"""The most time of a prefill, as a multiple of the model's."""
GBIT = 1e9


class TimedPool(WorkerClient):
    """A worker's client that records when layers arrive. `arrivals_s` has the seconds of each layer."""

    arrivals_s: Sequence[float] = ()

    async def fetch(
        self,
        reservation_id: int,
        sources: Sequence[PoolShard],
        blocks: Sequence[int],
        on_layers: Callable[[int, int], None],
    ) -> tuple[list[int], list[int]]:
        """Fetch as `WorkerClient.fetch` does, and time the arrivals.

        Layers that arrive together share the time since the previous arrival.
        """
        arrivals_s, last_s = list[float](), time.perf_counter()
        self.arrivals_s = arrivals_s

        def on_layers_timed(num_blocks: int, num_layers: int) -> None:
            nonlocal last_s
            if num_new := num_layers - len(arrivals_s):
                now_s = time.perf_counter()
                arrivals_s.extend([(now_s - last_s) / num_new] * num_new)
                last_s = now_s
            on_layers(num_blocks, num_layers)

        return await super().fetch(reservation_id, sources, blocks, on_layers_timed)


class TimedTransfers(LayerTransfers):
    """The transfers of one prefill, which record when its layers are computed.

    `computed_s` has the seconds of each layer, in all passes together.
    """

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.computed_s: defaultdict[int, float] = defaultdict(float)
        self._begun_s = 0.0

    def wait_loaded(self, loading: "Future[list[Mark]] | None", parts: Sequence[PassPart]) -> None:
        """Wait as `LayerTransfers.wait_loaded` does. Then the layer's computation begins."""
        super().wait_loaded(loading, parts)
        self._begun_s = time.perf_counter()

    def launch_store(self, layer: int, parts: Sequence[PassPart]) -> None:
        """Begin to store a layer, whose computation has just ended."""
        self.computed_s[layer] += time.perf_counter() - self._begun_s
        super().launch_store(layer, parts)


class Measured(NamedTuple):
    """The seconds of each layer of each round, and the summary."""

    transfer_s: list[float]
    compute_s: list[float]
    summary: OverLink


async def over_links(num_rounds: int, prompts: Sequence[tuple[int, int]] = PROMPTS) -> bool:
    """Measure each prompt at several bandwidths around the one at which T_KV = T_F,layer.

    Only root can make the other host. Returns whether all prefills take at most `MOST_OF_MODEL` times what
    the model says.
    """
    found: list[list[OverLink]] = []
    print(
        "| cached of tokens | link, Gbit/s | T_KV, ms: mean, p90 | by equation 13 | T_F,layer, ms: mean, p90"
        " | computation alone | with the fetch | by the model |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with other_host() as host:
        async with instances(host=host, client=TimedPool) as (pool, holder):
            rig = _Rig(Bench(pool), holder, host)
            await rig.fetched(1024, 2048, math.inf)  # first calls allocate and connect
            for num_cached, num_tokens in prompts:
                alone_s = await rig.alone_s(num_cached, num_tokens, num_rounds)
                needed = needed_bits_per_s(num_cached, alone_s)
                found.append([])
                for factor in FACTORS:
                    measured = await rig.measured(
                        num_cached, num_tokens, factor * needed, alone_s, num_rounds
                    )
                    found[-1].append(measured.summary)
                    print(_row(measured), flush=True)
    print()
    print("| cached of tokens | T_KV = T_F,layer at, Gbit/s | 5% longer below, by the model | measured |")
    print("|---|---|---|---|")
    for links in found:
        one = links[0]
        by_model = crossover([(link.bits_per_s, link.model_s / link.alone_s) for link in links])
        shown = crossover([(link.bits_per_s, link.total_s / one.total_s) for link in links])
        told = ["" if at is None else f"{at / GBIT:.3f}" for at in (by_model, shown)]
        needed = needed_bits_per_s(one.num_cached, one.alone_s) / GBIT
        print(f"| {one.num_cached} of {one.num_tokens} | {needed:.3f} | {' | '.join(told)} |")
    return all(link.total_s <= MOST_OF_MODEL * link.model_s for link in itertools.chain(*found))


def _row(measured: Measured) -> str:
    link = measured.summary
    transfer, compute = (
        f"{1e3 * statistics.fmean(of):.1f}, {1e3 * statistics.quantiles(of, n=10)[-1]:.1f}"
        for of in (measured.transfer_s, measured.compute_s)
    )
    bandwidth = "no limit" if math.isinf(link.bits_per_s) else f"{link.bits_per_s / GBIT:.3f}"
    return (
        f"| {link.num_cached} of {link.num_tokens} | {bandwidth} | {transfer}"
        f" | {1e3 * link.link_s:.1f} | {compute} | {link.alone_s:.3f} s"
        f" | {link.total_s:.3f} s ({link.total_s / link.alone_s - 1:+.0%})"
        f" | {link.model_s:.3f} s ({link.model_s / link.alone_s - 1:+.0%}) |"
    )


class _Rig:
    """A worker here, and an instance on another host that holds its prefixes."""

    def __init__(self, bench: Bench, holder: WorkerClient, host: str) -> None:
        self._bench, self._holder, self._host = bench, holder, host

    async def alone_s(self, num_cached: int, num_tokens: int, num_rounds: int) -> float:
        """Return the median seconds of a prompt's computation without any transfer."""
        times_s = []
        for _ in range(num_rounds):
            tokens, transfers = self._bench.new_prompt(num_tokens), self._bench.no_transfers()
            await seal(self._bench.pool, tokens, num_cached // BLOCK_SIZE)
            times_s.append(await self._bench.prefill_s(tokens, transfers, num_cached_tokens=num_cached))
        return statistics.median(times_s)

    async def measured(
        self, num_cached: int, num_tokens: int, bits_per_s: float, alone_s: float, num_rounds: int
    ) -> Measured:
        rounds = [await self.fetched(num_cached, num_tokens, bits_per_s) for _ in range(num_rounds)]
        total_s = statistics.median(elapsed_s for elapsed_s, _, _ in rounds)
        transfer_s = [layer_s for _, arrivals_s, _ in rounds for layer_s in arrivals_s]
        compute_s = [layer_s for _, _, computed_s in rounds for layer_s in computed_s]
        means = statistics.fmean(transfer_s), statistics.fmean(compute_s)
        summary = OverLink(num_cached, num_tokens, bits_per_s, *means, alone_s, total_s)
        return Measured(transfer_s, compute_s, summary)

    async def fetched(
        self, num_cached: int, num_tokens: int, bits_per_s: float
    ) -> tuple[float, list[float], list[float]]:
        """Return a prefill's seconds, the seconds between arrivals of layers, and those to compute layers."""
        limit(self._host, math.inf)
        tokens = self._bench.new_prompt(num_tokens)
        await seal(self._holder, tokens, num_cached // BLOCK_SIZE)
        source = PrefixSource((PoolShard(self._holder.address, LAYOUT),), num_cached // BLOCK_SIZE)
        transfers, pool = self._bench.transfers(kind=TimedTransfers), self._bench.pool
        assert isinstance(transfers, TimedTransfers)
        assert isinstance(pool, TimedPool)
        limit(self._host, bits_per_s)
        elapsed_s = await self._bench.prefill_s(
            tokens, transfers, source=source, num_cached_tokens=num_cached
        )
        return elapsed_s, list(pool.arrivals_s), list(transfers.computed_s.values())
