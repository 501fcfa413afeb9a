"""A Conductor with one instance of each role, and the messages of its peers."""

from collections.abc import Callable
from typing import Any

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits, PolicySettings
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import (
    ClusterState,
    FrontHello,
    Rejected,
)
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import HandedOver, PreCopied, Prepared
from mooncake.messages.operators import Migrate
from mooncake.messages.pools import Capacity, Grant, GrantedPage, MessengerAddress, PoolShard, PoolStats
from mooncake.messages.requests import FinishReason, Ref, Request, SamplingParams
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Finished,
    Prefilled,
    Register,
    Reserved,
    Role,
    WorkFailed,
)

EPOCH = 7
FRONT = b"front#1"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
P0, D0 = peer_identity("p0", 1), peer_identity("d0", 1)


def address(name: str) -> MessengerAddress:
    return MessengerAddress(name, 1, "host", "/path", (("127.0.0.1", 1),))


def registration(name: str, role: Role, incarnation: int = 1, pages: int = 100) -> Register:
    return Register(
        PROTOCOL_VERSION,
        name,
        incarnation,
        role,
        "model",
        LAYOUT,
        (PoolShard(address(name), LAYOUT),),
        Capacity(pages, pages, 256),
        "cpu",
    )


def request(request_id: str = "r", num_tokens: int = 9) -> Request:
    return Request(
        request_id, list(range(num_tokens)), [b"k" * 16] * (num_tokens // 4), SamplingParams(5), "ep"
    )


def told_to_front(effects: list[Effect]) -> list[tuple[int, int, int]]:
    """Return the states of the cluster that the front was told.

    Each is the number of prefill instances, of decode instances, and of the blocks that a sequence can have.
    """
    states = [effect.message for effect in effects if isinstance(effect.message, ClusterState)]
    return [(state.num_prefill, state.num_decode, state.max_sequence_blocks) for state in states]


def ref(attempt: int = 1, request_id: str = "r") -> Ref:
    return Ref(EPOCH, request_id, attempt)


POOL = PoolStats(
    num_pages=9,
    num_free=9,
    num_reserved=0,
    num_sealed=0,
    num_quarantined=0,
    num_used=0,
    num_reservations=0,
    num_leases=0,
    num_pins=0,
    block_bytes=4096,
    eviction_policy="lru",
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
)
HEARTBEAT = Heartbeat(0, 0, 0, {"p0": POOL})
GRANT = Grant(1, address("d0"), [GrantedPage(0, 5, 1), GrantedPage(1, 6, 1)])


def new_conductor(
    limits: Limits | None = None,
    settings: PolicySettings | None = None,
    costs: tuple[Costs, Costs] | None = None,
) -> Conductor:
    conductor = Conductor(EPOCH, "model", limits or Limits(), settings, costs)
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
    conductor.handle(P0, registration("p0", Role.PREFILL), 0.0)
    conductor.handle(D0, registration("d0", Role.DECODE), 0.0)
    return conductor


B0 = peer_identity("b0", 1)


def coupled_conductor(limits: Limits | None = None) -> Conductor:
    """Return a Conductor with one instance that has both roles."""
    conductor = Conductor(EPOCH, "model", limits or Limits())
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
    conductor.handle(B0, registration("b0", Role.BOTH), 0.0)
    return conductor


D1 = peer_identity("d1", 1)
TBT_SLO_S = 0.1


def two_decode_instances(limits: Limits | None = None) -> Conductor:
    conductor = new_conductor(limits or Limits(tbt_slo_s=TBT_SLO_S))
    conductor.handle(D1, registration("d1", Role.DECODE), 0.0)
    return conductor


def move_at_the_second_try(hear: Callable[[bytes, Any, float], object]) -> None:
    """Report a request whose first migration fails and whose second one succeeds.

    The request at "d0" is refused by "d1" from 3 to 4 s, moves there from 5 to 9 s, and ends at 10 s.
    """
    hear(D0, Reserved(ref(), GRANT), 1.0)
    hear(P0, Prefilled(ref(), 1, 0), 2.0)
    hear(FRONT, Migrate(1, "r", "d1"), 3.0)
    hear(D1, WorkFailed(ref(2), "no room", True), 4.0)
    hear(FRONT, Migrate(1, "r", "d1"), 5.0)
    hear(D0, PreCopied(ref(), [1]), 6.0)
    hear(D1, Prepared(ref(3), 8), 7.0)
    hear(D0, PreCopied(ref(), [1]), 8.0)
    hear(D0, HandedOver(ref(), [1, 2]), 9.0)
    hear(D1, Finished(ref(3), FinishReason.STOP, 4), 10.0)


def rejections_when_time_passes(conductor: Conductor, *moments_s: float) -> list[tuple[float, Rejected]]:
    """Return the rejections that come as time passes, each with its moment.

    The front and the instances send a heartbeat at each of `moments_s`.
    """
    rejections = []
    for now_s in moments_s:
        conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), now_s)
        for instance in conductor.instances:
            conductor.handle(instance.identity, HEARTBEAT, now_s)
        effects = conductor.tick(now_s)
        rejections += [(now_s, e.message) for e in effects if isinstance(e.message, Rejected)]
    return rejections
