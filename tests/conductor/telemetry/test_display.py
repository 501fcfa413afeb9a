"""The state that the dashboard shows, and its cost."""

import re
import time
from importlib.resources import files

import msgspec
import pytest

from conductor.effects import ToConductor
from conductor.settings import Limits
from conductor.telemetry.display import NUM_PATHS, Display
from conductor.telemetry.history import History
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.fronts import KeepContext, Submit
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.kv_events import KVStored
from mooncake.messages.migration import LayerRange, ModulesPart, ModulesPlace
from mooncake.messages.pools import PeerStats, Tier
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import Finished, Leave, Prefilled, Reserved, Role
from tests.conductor.small_cluster import (
    D0,
    EPOCH,
    FRONT,
    GRANT,
    P0,
    POOL,
    new_conductor,
    ref,
    registration,
    request,
)

OFFSET_S = 1_000_000.0


class Shown:
    """A Conductor that is looked at."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.conductor, self.history = new_conductor(limits), History()
        self.display = Display(self.conductor, self.history, "m", OFFSET_S)

    def hear(self, sender: bytes, message: ToConductor, now_s: float = 1.0) -> None:
        self.history.observe(sender, message, self.conductor.handle(sender, message, now_s), now_s)


def no_tokens(request_id: str) -> None:
    return None


def test_traffic_is_summed_over_both_ends_that_asked_for_it() -> None:
    shown = Shown()
    to_decode = PeerStats(0, None, 1, sent_bytes={"tcp": 100}, received_bytes={"tcp": 7})
    to_prefill = PeerStats(0, None, 1, received_bytes={"tcp": 50, "shm": 1000})
    for sender, name, peer, stats in ((P0, "p0", "d0", to_decode), (D0, "d0", "p0", to_prefill)):
        pool = msgspec.structs.replace(POOL, peers={peer: stats})
        shown.hear(sender, Heartbeat(1, 2, 3, {name: pool}))
    paths = [tuple(path.values()) for path in shown.display.state(no_tokens)["paths"]]
    assert paths == [("p0", "d0", "shm", 1000), ("p0", "d0", "tcp", 150), ("d0", "p0", "tcp", 7)]


def test_a_running_request_shows_the_tokens_that_have_come() -> None:
    shown = Shown()
    shown.hear(FRONT, Submit(request()), 1.0)
    shown.hear(D0, Reserved(ref(), GRANT), 2.0)
    (running,) = shown.display.state({"r": 4}.get)["requests"]
    assert (running["step"], running["is_over"], running["num_output_tokens"]) == ("prefilling", False, 4)
    shown.hear(P0, Prefilled(ref(), 42, 8), 3.0)
    shown.hear(D0, Finished(ref(), FinishReason.STOP, 5), 4.0)
    timeline = shown.display.timeline("r", no_tokens)
    assert timeline is not None
    assert (timeline["submitted_s"], timeline["last_s"]) == (OFFSET_S + 1.0, OFFSET_S + 4.0)
    assert (timeline["num_output_tokens"], timeline["num_cached_tokens"]) == (5, 8)
    assert [moment["at_s"] - OFFSET_S for moment in timeline["moments"]] == [1.0, 1.0, 2.0, 3.0, 4.0]
    assert shown.display.timeline("other", no_tokens) is None


def test_transfers_of_instances_that_have_left_are_counted() -> None:
    shown = Shown()
    assert shown.display.state(no_tokens)["num_transfers"] == 0
    shown.hear(FRONT, Submit(request()), 1.0)
    shown.hear(D0, Reserved(ref(), GRANT), 2.0)
    shown.hear(P0, Prefilled(ref(), 42, 8), 3.0)
    shown.hear(D0, Finished(ref(), FinishReason.STOP, 5, arrival_s=0.5, joining_s=0.25), 4.0)
    shown.hear(P0, Leave(), 5.0)
    state = shown.display.state(no_tokens)
    assert (state["paths"], state["num_transfers"]) == ([], 1)


def test_the_id_of_an_answer_finds_its_first_choice() -> None:
    shown = Shown()
    shown.hear(FRONT, Submit(request("cmpl-1-0")))
    timeline = shown.display.timeline("cmpl-1", no_tokens)
    assert timeline is not None
    assert timeline["id"] == "cmpl-1-0"


def test_nothing_changes_by_time_alone() -> None:
    shown = Shown()
    shown.hear(FRONT, Submit(request()))
    before = msgspec.json.encode(shown.display.state(no_tokens))
    shown.conductor.tick(2.0)
    assert msgspec.json.encode(shown.display.state(no_tokens)) == before


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (ModulesPart(1), "1 of the KV heads"),
        (ModulesPart(layers=LayerRange(0, 1)), "layers 0:1"),
        (ModulesPart(share=0.5), "the first 50% of sequences"),
    ],
    ids=["heads", "layers", "sequences"],
)
def test_an_instance_shows_which_of_its_modules_are_at_which_helper(part: ModulesPart, what: str) -> None:
    shown = Shown()

    def modules_of(name: str) -> tuple[str, str]:
        [one] = [one for one in shown.display.state(no_tokens)["instances"] if one["name"] == name]
        return one["moved"], one["helper"]

    def beat(place: ModulesPlace) -> None:
        shown.hear(D0, Heartbeat(1, 2, 3, {"d0": POOL}, modules=place))

    assert modules_of("d0") == ("", ""), "before its first heartbeat"
    beat(ModulesPlace())
    assert modules_of("d0") == ("", "")
    beat(ModulesPlace(EPOCH, 1, "d1", is_moving=True))
    assert modules_of("d0") == ("", "d1"), "which has nothing yet"
    beat(ModulesPlace(EPOCH, 1, "d1", part))
    assert modules_of("d0") == (what, "d1")
    assert modules_of("p0") == ("", "")
    beat(ModulesPlace(EPOCH, 2))
    assert modules_of("d0") == ("", "")


def test_the_page_reads_of_an_instance_what_the_state_has_of_it() -> None:
    shown = Shown()
    shown.hear(D0, Heartbeat(1, 2, 3, {"d0": POOL}))
    [instance] = [one for one in shown.display.state(no_tokens)["instances"] if one["name"] == "d0"]
    page = files("conductor.front.routes.dashboard").joinpath("app.js").read_text()
    read = set(re.findall(r"\binstance\.(\w+)", page))
    assert {"moved", "helper"} <= read <= set(instance)


def test_an_open_page_costs_at_most_two_percent_of_a_core() -> None:
    """A second of the dashboard costs some 5 to 10 ms with 100 instances, of which half have 50 peers."""
    shown = Shown()
    used = PeerStats(1, 2.0, 3, {"tcp": 10**9}, {"tcp": 10**9}, {"tcp": 1.5})
    peers = {f"decode-{i}": used for i in range(50)}
    for i in range(50):
        for role, pool in ((Role.PREFILL, msgspec.structs.replace(POOL, peers=peers)), (Role.DECODE, POOL)):
            name = f"{role}-{i}"
            shown.hear(peer_identity(name, 1), registration(name, role))
            shown.hear(peer_identity(name, 1), Heartbeat(1, 2, 3, {name: pool}))
    for number in range(100):
        shown.hear(FRONT, Submit(request(f"r{number}")))
    took_s = []
    for _ in range(7):
        began_s = time.process_time()
        state = shown.display.state(no_tokens)
        msgspec.json.encode(state)
        took_s.append(time.process_time() - began_s)
    assert len(state["paths"]) == NUM_PATHS
    assert min(took_s) < 0.02


def test_context_caches_are_shown_with_their_holders_newest_first() -> None:
    shown, keys = Shown(), [bytes(15) + bytes([number]) for number in range(3)]
    shown.conductor.prefixes.apply("p0", [KVStored(Tier.DRAM, keys[:2])])
    for context_id, wanted in (("whole", keys[:2]), ("lost", keys[2:])):
        shown.hear(FRONT, KeepContext(context_id, wanted, 30.0))
    contexts = [tuple(context.values()) for context in shown.display.state(no_tokens)["contexts"]]
    assert contexts == [("lost", 1, 0, None, OFFSET_S + 31.0), ("whole", 2, 2, "p0", OFFSET_S + 31.0)]
