"""The description of a simulation, from which a cluster is made, and one run of it.

Owns: descriptions and their errors. Does not know: the command line, pictures.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.tools.simulator.cluster.cluster import UNLIMITED, DisaggregatedCluster
from benchmarks.tools.simulator.cluster.coupled_cluster import CoupledCluster
from benchmarks.tools.simulator.cluster.machines.cards import GBPS, STATED, hardware_card, model_card
from benchmarks.tools.simulator.cluster.machines.costs import Costs, Profiled, PromptShare, Roofline
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.cluster.shape import InstanceShape
from benchmarks.tools.simulator.moved_layers import LayerMoves, SharedDevices
from benchmarks.tools.simulator.report import SimulatedRun
from benchmarks.tools.simulator.summary import SLOs, summarize, terms_of
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceRequest, in_blocks
from conductor.membership.roles import SwitchEnd
from conductor.performance.model import DecodeCapacity
from conductor.settings import Limits, PolicySettings
from conductor.view.decision_stats import MigrationOutcome
from mooncake.config.policies import EvictionPolicy, Overload, Scheduling
from mooncake.config.profile import load_profile
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role

OnSecond = Callable[[DisaggregatedCluster], None]


class Join(msgspec.Struct, frozen=True):
    """An instance that joins the cluster."""

    at_s: float
    role: Role


class Leave(msgspec.Struct, frozen=True):
    """An instance that drains and leaves."""

    at_s: float
    name: str


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a cluster and its policies.

    A cluster has `num_prefill` and `num_decode` instances, or `num_both` instances, or all three, or else
    `num_coupled` instances. Defaults are those of the server (except `inlining`) and of Mooncake's testbed.
    """

    model: str = "llama3-70b"
    hardware: str = "a800"
    num_gpus: int | None = None
    """GPUs of an instance; None for a whole node."""
    profile: str | None = None
    """A file of measured costs that replace the costs of the cards."""
    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0
    """Instances with both roles, under the Conductor."""
    inlining: bool = False
    """Whether decode instances also compute prompts, where that adds the least waiting."""
    rebalancing: bool = False
    """Whether roles of instances follow the load, and requests move between decode instances."""
    moves_layers: bool = False
    """Whether layers of decode instances move to other instances, as BanaServe's Algorithm 1 says."""
    joins: tuple[Join, ...] = ()
    """Instances that join later."""
    leaves: tuple[Leave, ...] = ()
    """Instances that leave before the end."""
    num_coupled: int = 0
    chunk_tokens: int | None = None
    """Tokens of an iteration of coupled instances; None if they compute prompts whole."""
    scheduling: Scheduling = Scheduling.KVCACHE_CENTRIC
    kvcache_balancing_threshold: float | None = PolicySettings().kvcache_balancing_threshold
    load_threshold: float = PolicySettings().load_threshold
    overload: Overload = Overload.PREDICTION
    max_waiting: int = 0
    """The most requests that wait, instead of being rejected, while decode's load is too high."""
    eviction: EvictionPolicy = EvictionPolicy.LRU
    block_tokens: int = BLOCK_TOKENS
    """Tokens of a KVCache block. It must divide the blocks of loads, which have 512 tokens."""
    pool_tokens: int | None = None
    """Tokens of an instance's part of the pool; None for as many as its DRAM holds."""
    nic_gbps: float | None = None
    """Network bandwidth of an instance in Gbit/s; None for the bandwidth of its hardware."""
    prefill_chunk: int = 2048
    prefill_layer_window: bool = False
    max_batch: int = 256
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    rejects: bool = True
    """Whether requests that would miss an SLO are rejected; otherwise SLOs are only measured."""
    checks_reservations: bool = False
    """Whether the double check is also made when pages are reserved."""
    seed: int = 0

    @property
    def slos(self) -> SLOs:
        return SLOs(self.ttft_slo_s, self.tbt_slo_s)

    @property
    def name(self) -> str:
        """The cluster's name for tables."""
        if not self.num_coupled:
            pairs = f"{self.num_prefill}P+{self.num_decode}D" if self.num_prefill else ""
            both = f"{self.num_both} both" if self.num_both else ""
            return (
                "+".join(filter(None, (pairs, both)))
                + (", inlining" if self.inlining else "")
                + (", rebalancing" if self.rebalancing else "")
                + (", layers move" if self.moves_layers else "")
            )
        return f"{self.num_coupled} coupled" + (
            f", chunks of {self.chunk_tokens}" if self.chunk_tokens else ""
        )

    def shape(self) -> InstanceShape:
        """Return the shape of the instances.

        Raises ConfigError for unknown names and for SLOs that no instance can meet.
        """
        model, hardware = model_card(self.model), hardware_card(self.hardware)
        if self.num_gpus is not None:
            hardware = hardware.with_gpus(self.num_gpus)
        if self.nic_gbps is not None:
            hardware = replace(hardware, nic_bytes_per_s=self.nic_gbps * GBPS)
        costs: Costs = Roofline(model, hardware)
        if self.profile is not None:
            costs = Profiled(*load_profile(Path(self.profile)).costs)
        self._check(costs)
        return InstanceShape(
            model,
            hardware,
            costs,
            STATED,
            None if self.pool_tokens is None else max(1, self.pool_tokens // self.block_tokens),
            self.eviction,
            self.prefill_chunk,
            self.max_batch,
            self.checks_reservations,
            self.block_tokens,
            prefill_layer_window=self.prefill_layer_window,
        )

    @property
    def num_instances(self) -> int:
        """The number of all instances, including those that join later or leave."""
        return self.num_prefill + self.num_decode + self.num_both + self.num_coupled + len(self.joins)

    def decode_capacity(self) -> DecodeCapacity:
        """Return the capacity of an instance for decoding, in the form of the performance model.

        Raises ConfigError.
        """
        shape = self.shape()
        num_device_tokens = shape.num_device_blocks * shape.block_tokens
        return DecodeCapacity(shape.costs.profiled[1], self.max_batch, num_device_tokens, self.tbt_slo_s)

    def _check(self, costs: Costs) -> None:
        has_pairs = self.num_prefill > 0 and self.num_decode > 0
        is_whole = has_pairs or (self.num_both > 0 and not self.num_prefill and not self.num_decode)
        if (self.num_coupled > 0) == is_whole or (self.num_coupled and self.num_both):
            raise ConfigError(
                "a cluster has prefill and decode instances, some with both roles, or coupled ones: say how"
                " many of which"
            )
        is_not_fixed = self.num_both or self.inlining or self.rebalancing or self.joins or self.leaves
        if self.moves_layers and (is_not_fixed or not has_pairs):
            raise ConfigError("layers move only in a fixed division into prefill and decode instances")
        num_instances = self.num_prefill + self.num_decode + len(self.joins)
        if self.rebalancing and not self.num_coupled and num_instances < 3:
            raise ConfigError("no role can change among two instances: each stage keeps one")
        if BLOCK_TOKENS % self.block_tokens:
            raise ConfigError(
                f"the blocks of loads, {BLOCK_TOKENS} tokens, cannot be divided into blocks of"
                f" {self.block_tokens}"
            )
        for name, slo_s, least_s in (
            ("TTFT", self.ttft_slo_s, costs.iteration_s([PromptShare(1, 0)], 0)),
            ("TBT", self.tbt_slo_s, costs.iteration_s((), 1)),
        ):
            if slo_s is not None and slo_s <= least_s:
                raise ConfigError(
                    f"no request can meet a {name} SLO of {1000 * slo_s:g} ms: on an idle instance one token"
                    f" takes {1000 * least_s:.1f} ms"
                )

    def cluster(self, on_second: OnSecond | None = None) -> DisaggregatedCluster | CoupledCluster:
        """Return the cluster. Raises ConfigError."""
        shape = self.shape()
        if self.num_coupled:
            return CoupledCluster(shape, self.num_coupled, self.chunk_tokens)
        limits = Limits(
            max_running_requests=UNLIMITED,
            placement_timeout_s=UNLIMITED,
            ttft_slo_s=self.ttft_slo_s if self.rejects else None,
            tbt_slo_s=self.tbt_slo_s if self.rejects else None,
            max_waiting=self.max_waiting,
        )
        settings = PolicySettings(
            self.scheduling,
            self.kvcache_balancing_threshold,
            self.overload,
            self.seed,
            moves_requests=self.rebalancing,
            has_rebalancing=self.rebalancing,
            has_inlining=self.inlining,
            load_threshold=self.load_threshold,
        )
        devices = SharedDevices({}) if self.moves_layers else None
        moves = None if devices is None else LayerMoves(devices, shape)

        def each_second(cluster: DisaggregatedCluster) -> None:
            if moves is not None:
                moves.each_second(cluster)
            if on_second is not None:
                on_second(cluster)

        cluster = DisaggregatedCluster(
            shape,
            self.num_prefill,
            self.num_decode,
            limits,
            settings,
            on_second=each_second,
            num_both=self.num_both,
            machine=devices,
        )
        for join in self.joins:
            cluster.join_at(join.at_s, join.role)
        for leave in self.leaves:
            cluster.leave_at(leave.at_s, leave.name)
        return cluster


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Make a context in which garbage is collected less often.

    A run makes many objects, few of them in cycles. With the usual threshold, a twentieth of the run's time
    goes into the search for cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate(
    setup: Setup, load: Iterable[TraceRequest], load_name: str = "", on_second: OnSecond | None = None
) -> tuple[SimulatedRun, Results]:
    """Run one simulation, and return its figures and results. Raises ConfigError or TraceError."""
    cluster = setup.cluster(on_second)
    began_s = time.process_time()
    with _seldom_collected():
        results = cluster.run(in_blocks(load, setup.block_tokens))
    seconds = time.process_time() - began_s
    arrivals_s = results["arrival_s"]
    span_s = float(arrivals_s.max() - arrivals_s.min()) if len(results) else 0.0
    conductor, reasons = None, {}
    if isinstance(cluster, DisaggregatedCluster):
        outcomes = cluster.conductor.stats
        reasons = {str(reason): number for reason, number in outcomes.num_rejections.items()}
        num_moved = {
            reason: number
            for (reason, outcome), number in outcomes.migrations.num_ended.items()
            if outcome is MigrationOutcome.MOVED
        }
        conductor = {
            "mean_predicted_ttft_s": outcomes.ttft.predicted_s / max(1, sum(outcomes.ttft.counts)),
            "mean_ttft_error_s": outcomes.ttft.sum_s / max(1, sum(outcomes.ttft.counts)),
            "num_fetches": float(outcomes.num_fetches),
            "num_inlined": float(sum(of.decode.inlined.num_computed for of in cluster.instances)),
            "num_switches": float(cluster.conductor.roles.num_switches[SwitchEnd.DONE]),
            "num_moves": float(sum(num_moved.values())),
        }
    summary = summarize(results, setup.slos)
    costs, capacity = setup.shape().costs, setup.decode_capacity()
    run = SimulatedRun(
        setup.name,
        load_name,
        len(results) / span_s if span_s else 0.0,
        summary,
        terms_of(results, summary, costs, capacity, setup.num_instances),
        reasons,
        cluster.clock.num_events,
        seconds,
        conductor,
    )
    return run, results
