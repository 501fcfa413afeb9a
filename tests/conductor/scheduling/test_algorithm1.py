"""Algorithm 1: the compiled loops against the plain ones. What both decide is in the golden transcripts."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.index.prefix_index import PrefixMatch
from conductor.scheduling import native
from conductor.scheduling.algorithm1 import NO_FETCH, Decoding, LongestPrefix, Prompt, Scheduler
from conductor.scheduling.native import NativeScheduler, new_scheduler
from conductor.settings import PolicySettings
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import Costs
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import ModulesPart, ModulesPlace
from mooncake.messages.pools import Capacity, MessengerAddress, PoolShard
from mooncake.messages.requests import Request, SamplingParams
from mooncake.messages.workers import PROTOCOL_VERSION, Register, Role
from tests.conductor.transcript import replay
from tests.examples import num_examples

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
GOLDEN = Path(__file__).parents[1] / "golden"


def instance(number: int, role: Role, max_batch: int = 256, *, least_chunk_tokens: int = 0) -> Instance:
    name = f"i{number}"
    shard = PoolShard(MessengerAddress(name, 1, "host", "/path", ()), LAYOUT)
    capacity = Capacity(1000, 1000, max_batch)
    register = Register(
        PROTOCOL_VERSION, name, 1, role, "model", LAYOUT, (shard,), capacity, "cpu",
        least_chunk_tokens=least_chunk_tokens,
    )  # fmt: skip
    return Instance(register, name.encode(), last_seen_s=0.0)


def any_view(draw: np.random.Generator) -> ClusterView:
    """Some columns have few different values, so that there are ties."""
    view = ClusterView(PolicySettings(has_inlining=bool(draw.integers(2))))
    for number in range(draw.integers(1, 20)):
        view.add(instance(number, list(Role)[draw.integers(3)], int(draw.integers(1, 4))), 0.0)
    loads, transfers = view.loads, view.transfers
    for slot in np.flatnonzero(loads.is_decode).tolist():
        for num_tokens in draw.integers(1, 1100, draw.integers(4)).tolist():
            loads.assign_decode(slot, num_tokens)
            loads.begin_decode(slot, num_tokens)
        view.decode_changed(slot)
    for slot in np.flatnonzero(loads.is_prefill | loads.inlines).tolist():
        for request_id in "abc"[: draw.integers(4)]:
            loads.assign_prefill(slot, request_id, draw.uniform(0, 5), int(draw.integers(3)))
            if draw.integers(2):
                loads.order_prefill(slot, request_id, 0.0, draw.uniform(0, 5))
    costs = [
        column
        for estimator in (view.prefill_costs, view.decode_costs)
        for column in (estimator.constant_s, estimator.first_s, estimator.second_s)
    ]
    for column in (
        *costs,
        view.next_iteration_s,
        view.next_token_s,
        transfers.in_flight_bytes,
        transfers.ordered_bytes,
    ):
        few, many = draw.integers(2, size=len(column)) / 3, draw.uniform(0, 1, len(column))
        column[:] = few if draw.integers(2) else many
    for room_blocks in (loads.prefill_room_blocks, loads.decode_room_blocks):
        room_blocks *= draw.integers(2, size=len(room_blocks))
    loads.least_chunk_tokens[:] = draw.choice([0, 64, 2048], loads.num_slots)
    return view


def any_match(draw: np.random.Generator, num_slots: int) -> PrefixMatch:
    depths = sorted({int(depth) for depth in draw.integers(0, 64, draw.integers(1, 5))})
    depth_of = draw.choice(depths, num_slots)
    masks = [sum(1 << int(slot) for slot in np.flatnonzero(depth_of == depth)) for depth in depths]
    held = [(depth, mask) for depth, mask in zip(depths, masks, strict=True) if mask]
    on_ssd = [(int(draw.integers(1, 9)), int(draw.integers(1 << num_slots))) for _ in range(draw.integers(3))]
    return PrefixMatch(num_slots, [depth for depth, _ in held], [mask for _, mask in held], on_ssd)


@settings(max_examples=num_examples(300))
@given(st.integers(0, 2**32))
def test_compiled_loops_and_plain_ones_have_the_same_results_to_the_last_bit(seed: int) -> None:
    draw = np.random.default_rng(seed)
    view = any_view(draw)
    compiled, plain = new_scheduler(view, PolicySettings()), Scheduler(view, PolicySettings())
    assert isinstance(compiled, NativeScheduler)
    match = any_match(draw, view.loads.num_slots)
    if match.num_best_blocks:
        assert compiled.find_best_prefix_match(match) == plain.find_best_prefix_match(match)
    num_tokens = int(draw.integers(1, 1100))
    best = match.num_best_blocks
    prompt = Prompt(
        num_tokens,
        LAYOUT.num_blocks(num_tokens),
        16,
        num_stored_blocks=int(draw.integers(best + 1)),
        num_coming_blocks=int(draw.integers(best + 1)),
        load_block_s=draw.uniform(0, 1),
        priority=int(draw.integers(3)),
    )
    for fetch in (LongestPrefix(0, best, draw.uniform(0, 9), draw.uniform(0, 0.1), best / 1.25), NO_FETCH):
        found = compiled.estimate_ttft(prompt, match, fetch, 3.0)
        expected = plain.estimate_ttft(prompt, match, fetch, 3.0)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    refused = np.flatnonzero(draw.integers(4, size=view.loads.num_slots) == 0).tolist()
    request = Decoding(num_tokens, int(draw.integers(1, 1100)), refused)
    assert compiled.select_decoding_instance(request) == plain.select_decoding_instance(request)
    for budget_s in (math.inf, draw.uniform(0, 9)):
        arguments = prompt, match, request, budget_s, 3.0
        assert compiled.select_inlining_instance(*arguments) == plain.select_inlining_instance(*arguments)


@pytest.mark.parametrize("name", ["algorithm_1", "classes", "rivals"])
def test_without_a_compiler_the_same_is_decided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_or_do_without", lambda *_, **__: None)
    transcript = GOLDEN / f"{name}.txt"
    assert replay(transcript) == transcript.read_text()


@pytest.mark.parametrize("inlined", [False, True])
def test_beyond_the_slots_a_prediction_is_the_mean_gap_of_requests_that_take_turns(*, inlined: bool) -> None:
    costs = Costs(2e-2, 1e-4, 2e-8)
    view = ClusterView(PolicySettings(has_inlining=True), (Costs(1e-3, 2e-5, 1e-9), costs))
    view.add(instance(0, Role.PREFILL), 0.0)
    view.add(instance(1, Role.DECODE, max_batch=2), 0.0)
    for _ in range(5):
        view.loads.assign_decode(1, 100)
    view.decode_changed(1)
    request = Request("r", list(range(40)), [], SamplingParams(5), "front")
    placement = Scheduler(view, PolicySettings(has_inlining=True)).schedule(request, 0.0, inlined=inlined)
    assert placement is not None
    assert placement.is_inlined == inlined
    num_tokens_of_two = (5 * 100 + 40) * 2 / 6
    assert placement.prediction.gap_s == pytest.approx(6 / 2 * costs.seconds(2, num_tokens_of_two))


def test_a_prompt_that_fits_by_the_pages_of_a_helper_alone_is_not_inlined() -> None:
    view = ClusterView(PolicySettings(has_inlining=True))
    owner = instance(1, Role.DECODE)
    beat = Heartbeat(
        0, 0, 0, {}, modules=ModulesPlace(helper="i2", part=ModulesPart(share=0.5), num_device_pages=2000)
    )
    capacity = msgspec.structs.replace(owner.registration.capacity, num_pool_pages=3000)
    owner.registration = msgspec.structs.replace(owner.registration, capacity=capacity)
    owner.heartbeat = beat
    view.add(instance(0, Role.PREFILL), 0.0)
    view.add(owner, 0.0)
    scheduler = new_scheduler(view, PolicySettings(has_inlining=True))
    for num_blocks, can_be_inlined in ((1000, True), (1001, False)):
        request = Request("r", [0] * (num_blocks * 16), [], SamplingParams(5), "front")
        placement = scheduler.schedule(request, 0.0, inlined=True)
        assert (placement is not None and placement.is_inlined) == can_be_inlined


def test_arrays_are_read_where_they_are_after_an_instance_has_come_and_another_gone() -> None:
    view = ClusterView()
    compiled, first, second = (
        new_scheduler(view, PolicySettings()),
        instance(0, Role.DECODE),
        instance(1, Role.DECODE),
    )
    view.add(first, 0.0)
    assert compiled.select_decoding_instance(Decoding(1, 1, [])) == (
        0,
        view.next_iteration_s[0] + view.decode_costs.second_s[0],
    )
    view.add(second, 0.0)
    view.loads.assign_decode(0, 100)
    view.decode_changed(0)
    decoding = compiled.select_decoding_instance(Decoding(1, 1, []))
    assert decoding is not None
    assert decoding[0] == 1
    view.remove(second)
    decoding = compiled.select_decoding_instance(Decoding(1, 1, []))
    assert decoding is not None
    assert decoding[0] == 0
    assert compiled.select_decoding_instance(Decoding(1, 1, [0])) is None


@pytest.mark.parametrize(
    ("role", "tbt_slo_s", "is_busy", "is_inlined"),
    [
        (Role.DECODE, 0.1, True, False),  # 200 tokens of 1 ms
        (Role.DECODE, 0.1, False, True),
        (Role.DECODE, 0.4, True, True),
        (Role.DECODE, None, True, True),
        (Role.BOTH, 0.1, True, True),  # nobody else would compute it
    ],
)
def test_whole_prompts_are_not_computed_beside_requests_whose_slo_they_break(
    role: Role, tbt_slo_s: float | None, *, is_busy: bool, is_inlined: bool
) -> None:
    view = ClusterView(PolicySettings(has_inlining=True), (Costs(0.0, 1e-3, 0.0), Costs(0.01, 1e-4, 0.0)))
    view.add(instance(0, role, least_chunk_tokens=2048), 0.0)
    if is_busy:
        view.loads.assign_decode(0, 100)
        view.loads.begin_decode(0, 100)
        view.decode_changed(0)
    request = Request("r", list(range(200)), [], SamplingParams(5), "front")
    scheduler = new_scheduler(view, PolicySettings(has_inlining=True))
    placement = scheduler.schedule(request, 0.0, tbt_slo_s=tbt_slo_s, inlined=True)
    assert (placement is not None) == is_inlined
