"""BanaServe's Algorithm 1, by its properties."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.elasticity.modules import Away, Device, Kind, ModuleMove, MovableModules, Thresholds, plan
from conductor.performance.utilisation import Used

THRESHOLDS = Thresholds()
NUM_LAYERS, NUM_HEADS = 30, 3


def device(
    name: str,
    compute: float,
    memory: float,
    *,
    num_layers: int = NUM_LAYERS - 1,
    num_heads: int = NUM_HEADS - 1,
    transfer_s: float = 0.01,
    sync_s: float = 0.02,
) -> Device:
    """A device whose layers take all of it, and whose heads a fourth of its compute and all memory."""
    modules = {
        Kind.LAYERS: MovableModules(num_layers, Used(compute / NUM_LAYERS, memory / NUM_LAYERS), transfer_s),
        Kind.HEADS: MovableModules(num_heads, Used(compute / 4 / NUM_HEADS, memory / NUM_HEADS), transfer_s),
    }
    return Device(name, Used(compute, memory), modules, sync_s=sync_s)


shares = st.floats(0, 1)
devices = st.lists(
    st.builds(
        device,
        st.just(""),
        shares,
        shares,
        num_layers=st.integers(0, NUM_LAYERS - 1),
        num_heads=st.integers(0, NUM_HEADS - 1),
        transfer_s=st.floats(0, 1),
        sync_s=st.floats(0, 1),
    ),
    max_size=6,
).map(lambda found: [replace(of, name=f"d{number}") for number, of in enumerate(found)])


def after(found: list[Device], moves: list[ModuleMove]) -> list[Device]:
    """The devices when all has moved; one with modules elsewhere gives no others."""
    by_name = {of.name: of for of in found}
    for move in moves:
        owner, helper = by_name[move.owner], by_name[move.helper]
        if move.kind is None:
            assert owner.away is not None
            used, away = Used(*(-share for share in owner.away.used)), None
        else:
            whole = next(of for of in found if of.name == move.owner)
            left = owner.used.utilisation / whole.used.utilisation
            used = Used(*(move.num * left * share for share in owner.modules[move.kind].used))
            assert used.utilisation == pytest.approx(move.benefit / 2)
            before = Used(0.0, 0.0) if owner.away is None else owner.away.used
            away = Away(move.helper, Used(*map(sum, zip(used, before, strict=True))))
        by_name[move.owner] = replace(
            owner, used=Used(*(a - b for a, b in zip(owner.used, used, strict=True))), away=away
        )
        by_name[move.helper] = replace(
            helper, used=Used(*(a + b for a, b in zip(helper.used, used, strict=True)))
        )
    return list(by_name.values())


def loads_of(found: list[Device]) -> list[float]:
    return [of.used.utilisation for of in found]


@given(devices)
def test_never_more_moves_than_there_is_nor_longer_than_the_budget_and_each_move_pays(
    found: list[Device],
) -> None:
    by_name = {of.name: of for of in found}
    for move in plan(found, THRESHOLDS):
        assert move.kind is not None
        assert 1 <= move.num <= by_name[move.owner].modules[move.kind].num
        assert move.cost_s <= THRESHOLDS.budget_s + 1e-9
        assert move.benefit >= THRESHOLDS.rho * move.cost_s


@given(devices)
def test_a_device_gives_or_takes_each_kind_once_and_a_helper_has_one_owner(found: list[Device]) -> None:
    moves = plan(found, THRESHOLDS)
    assert not {move.owner for move in moves} & {move.helper for move in moves}
    assert len({(move.owner, move.kind) for move in moves}) == len(moves)
    assert len({move.helper for move in moves}) == len({(move.helper, move.owner) for move in moves})


@given(devices)
def test_the_most_used_device_is_used_less_and_the_least_used_more(found: list[Device]) -> None:
    moves = plan(found, THRESHOLDS)
    before, later = loads_of(found), loads_of(after(found, moves))
    if moves:
        assert max(later) <= max(before) + 1e-9
        assert min(later) >= min(before) - 1e-9
        assert sum(later) == pytest.approx(sum(before))
    by_name = {of.name: of.used.utilisation for of in after(found, moves)}
    for move in moves:
        assert by_name[move.owner] >= by_name[move.helper] - 1e-9, "the gap does not turn round"


@given(devices)
def test_what_has_moved_neither_comes_back_nor_follows_itself_under_the_same_load(
    found: list[Device],
) -> None:
    moved = plan(found, THRESHOLDS)
    later = after(found, moved)
    owners = {move.owner for move in moved}
    assert not [move for move in plan(later, THRESHOLDS) if move.owner in owners]


@given(st.lists(st.tuples(shares, shares), min_size=1, max_size=6), st.floats(0, 0.5))
def test_nothing_moves_while_no_gap_is_above_the_threshold(
    used: list[tuple[float, float]], width: float
) -> None:
    """Used shares are squeezed until utilisations differ by `width` at most."""
    found = [
        device(f"d{number}", 0.4 + width * compute / 2, 0.3 + width * memory / 2)
        for number, (compute, memory) in enumerate(used)
    ]
    assert plan(found, THRESHOLDS) == []


def test_a_hundred_quiet_periods_move_nothing() -> None:
    rng = random.Random(1)
    for _ in range(100):
        found = [
            device(f"d{n}", 0.6 + rng.uniform(-0.1, 0.1), 0.5 + rng.uniform(-0.1, 0.1)) for n in range(4)
        ]
        assert plan(found, THRESHOLDS) == []


def test_layers_go_first_and_heads_for_what_is_left() -> None:
    found = [device("busy", 0.9, 0.9, num_layers=5), device("idle", 0.0, 0.0)]
    layers, heads = plan(found, THRESHOLDS)
    assert (layers.owner, layers.helper, layers.kind, layers.num) == ("busy", "idle", Kind.LAYERS, 5)
    assert layers.benefit == pytest.approx(2 * 5 * 1.8 / NUM_LAYERS)
    assert (heads.owner, heads.helper, heads.kind, heads.num) == ("busy", "idle", Kind.HEADS, 1)
    busy, idle = loads_of(after(found, [layers, heads]))
    assert busy - idle < 1.8 - layers.benefit


def test_layers_halve_the_gap_where_they_may() -> None:
    (move,) = plan([device("busy", 0.9, 0.9), device("idle", 0.1, 0.1)], THRESHOLDS)
    assert (move.kind, move.num) == (Kind.LAYERS, 13)  # 0.06 each, of a gap of 1.6


def test_heads_alone_go_where_layers_cannot() -> None:
    busy = device("busy", 0.8, 0.8)
    (move,) = plan(
        [replace(busy, modules={Kind.HEADS: busy.modules[Kind.HEADS]}), device("idle", 0, 0)], THRESHOLDS
    )
    assert (move.kind, move.num) == (Kind.HEADS, 2)


def test_a_move_that_takes_longer_than_it_is_worth_or_than_the_budget_is_smaller_or_not_made() -> None:
    idle = device("idle", 0.0, 0.0)
    (move,) = plan([device("busy", 0.9, 0.9, transfer_s=0.2, num_heads=0), idle], Thresholds(rho=0.1))
    assert (move.num, move.cost_s) == (9, pytest.approx(1.82))
    assert plan([device("busy", 0.9, 0.9, transfer_s=3.0), idle], THRESHOLDS) == []
    assert plan([device("busy", 0.9, 0.9, transfer_s=0.3, num_heads=0), idle], THRESHOLDS) == []


def test_modules_come_back_when_the_gap_is_small_without_them_not_before() -> None:
    away = Away("idle", Used(0.2, 0.2))

    def home(busy: float, idle: float) -> list[ModuleMove]:
        owner, helper = device("busy", busy / 2, busy / 2), device("idle", idle / 2, idle / 2)
        return plan([replace(owner, away=away, modules={}), helper], THRESHOLDS)

    assert home(0.9, 0.9) == []  # it would be 1.3 and 0.5
    assert home(0.5, 0.9) == []  # 0.9 and 0.5
    (move,) = home(0.4, 1.0)  # 0.8 and 0.6
    assert (move.owner, move.helper, move.kind) == ("busy", "idle", None)
    assert home(0.4, 1.4) == [move]


@given(devices)
def test_a_steady_load_comes_to_rest(found: list[Device]) -> None:
    for _ in range(2 * len(found)):
        moves = plan(found, THRESHOLDS)
        found = after(found, moves)
    assert plan(found, THRESHOLDS) == []
