"""The common part of all simulated instances: name, part of the pool, NICs, and link to the Conductor.

Owns: an instance's identity. Does not know: what it computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.tools.simulator.cluster.cache import SimulatedPool
from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.machines.costs import Costs
from benchmarks.tools.simulator.cluster.machines.machine import Machine
from benchmarks.tools.simulator.cluster.machines.network import Network, Port
from benchmarks.tools.simulator.cluster.traffic import Traffic
from mooncake.messages.blocks import KVLayout
from mooncake.messages.pools import MessengerAddress, PoolShard, PoolStats
from mooncake.messages.workers import FromWorker, Role

INCARNATION = 1


@dataclass(slots=True, eq=False)
class Node:
    """One instance's hardware. `send` sends a message to the Conductor."""

    name: str
    role: Role
    clock: Clock
    costs: Costs
    network: Network
    pool: SimulatedPool
    layout: KVLayout
    nic_bytes_per_s: float
    pcie_bytes_per_s: float
    send: Callable[[FromWorker], None]
    peers: Mapping[str, "Node"]
    """All instances by name."""
    machine: Machine | None = None
    """The machine that the instance shares with others; None if it has a machine of its own."""
    outgoing: Port = field(init=False)
    incoming: Port = field(init=False)
    traffic: Traffic = field(init=False)
    messenger: MessengerAddress = field(init=False)
    identity: bytes = field(init=False)
    """The identity of the instance's socket at the Conductor."""
    block_bytes: int = field(init=False)
    kv_bytes_per_token: float = field(init=False)
    busy_s: float = 0.0
    """Seconds for which the device was busy, up to the end of the latest pass or iteration."""

    def __post_init__(self) -> None:
        self.outgoing, self.incoming = Port(self.nic_bytes_per_s), Port(self.nic_bytes_per_s)
        self.traffic = Traffic(self.clock, self.network)
        self.messenger = MessengerAddress(self.name, INCARNATION, self.name, "", ())
        self.identity = f"{self.name}#{INCARNATION}".encode()
        self.block_bytes = self.layout.block_bytes
        self.kv_bytes_per_token = self.block_bytes / self.layout.block_size

    @property
    def shards(self) -> tuple[PoolShard, ...]:
        return (PoolShard(self.messenger, self.layout),)

    def pool_stats(self) -> PoolStats:
        """Return the pool's counters for heartbeats. Counters that no simulation reads stay zero."""
        allocator, num_pages = self.pool.allocator, self.pool.num_pages
        num_sealed = len(allocator.index)
        return PoolStats(
            num_pages=num_pages,
            num_free=allocator.num_free,
            num_reserved=num_pages - allocator.num_free - num_sealed,
            num_sealed=num_sealed,
            num_quarantined=0,
            num_used=num_pages - allocator.num_free - allocator.num_idle,
            num_reservations=0,
            num_leases=0,
            num_pins=0,
            block_bytes=self.block_bytes,
            eviction_policy=allocator.policy,
            tiers={},
            num_misses={},
            num_dropped=0,
            num_removed=0,
            num_demotions=0,
            num_promotions=0,
            num_expired_leases=0,
            num_checksum_failures=0,
            num_orphaned=0,
            sent_bytes={},
            received_bytes={},
            peers=self.traffic.stats(),
        )

    @property
    def factor(self) -> float:
        """The factor by which durations are longer at present, as other instances of the machine compute."""
        return 1.0 if self.machine is None else self.machine.factor(self.name)

    def computes(self, is_computing: bool) -> None:
        """Record that the instance computes from now on, or no longer.

        Others on its machine become slower or faster.
        """
        if self.machine is not None:
            self.machine.computes(self.name, is_computing)
