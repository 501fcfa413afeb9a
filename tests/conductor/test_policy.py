"""The Conductor as commands in and effects out."""

from dataclasses import replace

import msgspec
import pytest

from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.requests.registry import Requests
from conductor.scheduling.algorithm1 import Scheduler
from conductor.settings import Limits
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.block_orders import Pin, Unpin
from mooncake.messages.fronts import (
    ClusterState,
    FrontHello,
    KeepContext,
    Rejected,
    Submit,
)
from mooncake.messages.kv_events import KVStored
from mooncake.messages.pools import Tier
from mooncake.messages.requests import Request
from mooncake.messages.workers import PROTOCOL_VERSION, Role
from tests.conductor.small_cluster import (
    D0,
    EPOCH,
    FRONT,
    HEARTBEAT,
    P0,
    new_conductor,
    registration,
    request,
)


def test_least_loaded_pair_is_chosen() -> None:
    conductor = new_conductor()
    d1 = peer_identity("d1", 1)
    conductor.handle(d1, registration("d1", Role.DECODE), 0.0)
    conductor.handle(FRONT, Submit(request("a", 20)), 1.0)
    assert conductor.handle(FRONT, Submit(request("b", 4)), 1.0)[0].peer == d1
    assert conductor.handle(FRONT, Submit(request("c", 4)), 1.0)[0].peer == d1


@pytest.mark.parametrize(
    ("order", "status", "word"),
    [
        (request(num_tokens=396), 400, "KVCache of a decode instance holds at most 100 blocks of 4 tokens"),
        (request("taken"), 409, "already running"),
    ],
)
def test_impossible_requests_are_rejected(order: Request, status: int, word: str) -> None:
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request("taken")), 1.0)
    [effect] = conductor.handle(FRONT, Submit(order), 1.0)
    assert isinstance(effect.message, Rejected)
    assert effect.message.status == status
    assert word in effect.message.message
    assert conductor.num_open == 1


def test_full_and_empty_clusters_say_when_to_come_back() -> None:
    conductor = new_conductor(Limits(max_running_requests=1))
    conductor.handle(FRONT, Submit(request("a")), 1.0)
    [full] = conductor.handle(FRONT, Submit(request("b")), 1.0)
    without_instances = Conductor(EPOCH, "model", Limits())
    without_instances.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 1.0)
    [empty] = without_instances.handle(FRONT, Submit(request()), 1.0)
    for effect, status in ((full, 429), (empty, 503)):
        assert isinstance(effect.message, Rejected)
        assert (effect.message.status, effect.message.retry_after_s) == (status, 1.0)


def test_a_flood_of_one_tenant_beyond_the_limit_is_rejected_cheaply(monkeypatch: pytest.MonkeyPatch) -> None:
    conductor = new_conductor(Limits(max_running_requests=2))
    for name in ("a", "b"):
        conductor.handle(FRONT, Submit(request(name, 16)), 0.0)

    def not_called(*_: object, **__: object) -> None:
        raise AssertionError("nothing yields, wherever the request would be placed")

    monkeypatch.setattr(Scheduler, "schedule", not_called)
    monkeypatch.setattr(Requests, "has_not_begun", not_called)
    [effect] = conductor.handle(FRONT, Submit(request("c", 16)), 0.0)
    assert isinstance(effect.message, Rejected)


def test_the_conductors_own_silence_is_not_held_against_others() -> None:
    conductor = new_conductor(Limits(peer_timeout_s=5.0))
    conductor.tick(1.0)
    assert conductor.tick(60.0) == []  # it was stopped for a minute
    assert len(list(conductor.instances)) == 2
    for now_s in (61.0, 62.0, 63.0, 64.0, 65.5):
        conductor.tick(now_s)
    assert list(conductor.instances) == []


def test_the_conductors_own_silence_does_not_hide_a_death() -> None:
    conductor = new_conductor(Limits(peer_timeout_s=5.0))
    conductor.tick(1.0)
    conductor.handle(D0, HEARTBEAT, 600.0)
    conductor.tick(600.1)
    for now_s in (602.0, 604.0, 605.5):
        conductor.tick(now_s)
    assert list(conductor.instances) == []


def test_same_input_same_output() -> None:
    transcripts = []
    for _ in range(2):
        conductor = new_conductor(replace(Limits(), max_running_requests=2))
        effects = [conductor.handle(FRONT, Submit(request(name)), 1.0) for name in "abc"]
        transcripts.append([*effects, conductor.tick(30.0)])
    assert transcripts[0] == transcripts[1]


def test_a_context_cache_is_pinned_and_the_front_learns_what_prefill_costs() -> None:
    conductor = new_conductor()
    keys = [b"k" * 16]
    conductor.prefixes.apply("p0", [KVStored(Tier.DRAM, keys)])
    effects = conductor.handle(FRONT, KeepContext("c", keys, 30.0), 1.0)
    assert effects == [Effect(P0, Pin(keys, 30.0))]
    (answer,) = conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 1.0)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(answer.message), type=ClusterState)
    assert decoded.prefill_costs is not None
    assert decoded.prefill_costs.seconds(100, 0) > 0
    assert conductor.tick(2.0) == []
    (dropped,) = conductor.tick(31.0)[-1:]
    assert dropped == Effect(P0, Unpin(keys))
