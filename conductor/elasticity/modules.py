"""Adaptive module migration: layers and KV heads move from much used devices to little used ones.

It is Algorithm 1 of BanaServe (section 4.4.1):

    line 5     load[d] is the utilisation U of a device, compute and memory (equation 32)
    6, 7       overloaded: load[d] - min(load) > delta_up; underloaded: max(load) - load[d] > delta_up (33)
    10, 11     the pair with the largest gap Delta is taken (34)
    12 to 15   layers move, or KV heads for the rest of the gap: as many as level both loads, or as T_budget
               allows (2)
    17         the loads are updated to those after the move

A move must pay: benefit / cost >= rho (35). Modules at a helper return when the gap would be at most
delta_down afterwards (hysteresis). In one plan a device is either owner or helper, and a helper has one
owner.

Owns: this policy. Does not know: where figures come from, how modules move.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

from conductor.performance.utilisation import Used


class Kind(Enum):
    """The kinds of modules that this policy moves, coarser kind first.

    Pages of sequences (`ModuleKind.PAGES`) move by order of an operator alone.
    """

    LAYERS = "layers"
    HEADS = "KV heads"


class MovableModules(NamedTuple):
    """The modules of one kind that may leave a device. All of them are equal."""

    num: int
    used: Used
    """The shares of the device's compute and memory that one module takes."""
    transfer_s: float
    """Seconds to copy one module's state (equations 4 and 11)."""


class Away(NamedTuple):
    """Modules of a device that are at a helper device."""

    helper: str
    used: Used
    """The compute and memory that these modules take, as shares of a device."""


@dataclass(frozen=True, slots=True)
class Device:
    """An instance's device. It can exchange modules with other devices of its host."""

    name: str
    used: Used
    """The used shares of the device, by its own modules and by modules of other instances."""
    modules: dict[Kind, MovableModules]
    """The modules that may leave the device now. Kinds of which none may leave are missing."""
    away: Away | None = None
    sync_s: float = 0.0
    """Seconds that the device's requests wait during a move (T_sync)."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The parameters of Algorithm 1. Invariant: `0 <= delta_down < delta_up`."""

    delta_up: float = 0.5
    """The gap of utilisations, from 0 to 2, above which modules leave the busier device."""
    delta_down: float = 0.25
    """The gap of utilisations, from 0 to 2, up to which modules return from a helper."""
    rho: float = 0.5
    """The least benefit, as a difference of utilisations, for each second of cost."""
    budget_s: float = 2.0
    """The most seconds that a move may take (T_budget)."""

    def __post_init__(self) -> None:
        assert 0 <= self.delta_down < self.delta_up


class ModuleMove(NamedTuple):
    """A move of `num` modules of `owner` to `helper`.

    If `kind` is None, all modules of the owner return from the helper.
    """

    owner: str
    helper: str
    kind: Kind | None
    num: int
    benefit: float = 0.0
    """The gap of both devices' utilisations before the move, minus the gap after it."""
    cost_s: float = 0.0
    """Seconds that the move costs (T_transfer + T_sync)."""


def plan(devices: Sequence[Device], thresholds: Thresholds) -> list[ModuleMove]:
    """Return the moves that level the utilisation of devices: returns, then moves, largest gap first."""
    loads = {device.name: device.used.utilisation for device in devices}
    moves = list(_returns(devices, loads, thresholds))
    settled = {name for move in moves for name in (move.owner, move.helper)}
    able = [device for device in devices if device.away is None and device.name not in settled]
    given: dict[tuple[str, Kind], str] = {}
    """The helpers that this plan uses, by owner and kind of module."""
    while (move := _next(able, loads, given, thresholds)) is not None:
        assert move.kind is not None
        moves.append(move)
        given[move.owner, move.kind] = move.helper
        loads[move.owner] -= move.benefit / 2
        loads[move.helper] += move.benefit / 2
    return moves


def _returns(
    devices: Sequence[Device], loads: dict[str, float], thresholds: Thresholds
) -> Iterator[ModuleMove]:
    """Yield the returns of modules to their owners, and update `loads` accordingly."""
    for device in devices:
        if (away := device.away) is not None and away.helper in loads:
            amount = away.used.utilisation
            if loads[device.name] - loads[away.helper] + 2 * amount <= thresholds.delta_down:
                loads[device.name] += amount
                loads[away.helper] -= amount
                yield ModuleMove(device.name, away.helper, None, 0, cost_s=device.sync_s)


def _next(
    able: Sequence[Device],
    loads: dict[str, float],
    given: dict[tuple[str, Kind], str],
    thresholds: Thresholds,
) -> ModuleMove | None:
    """Return the next move that pays, between devices with the largest gap possible; None if no move pays."""
    least, most = min(loads.values(), default=0.0), max(loads.values(), default=0.0)
    delta, owner_of = thresholds.delta_up, {helper: owner for (owner, _), helper in given.items()}
    overloaded = [of for of in able if loads[of.name] - least > delta and of.name not in owner_of]
    giving = {owner for owner, _ in given}
    underloaded = [of for of in able if most - loads[of.name] > delta and of.name not in giving]
    gaps = [
        (loads[one.name] - loads[other.name], one, other) for one, other in product(overloaded, underloaded)
    ]
    for gap, owner, helper in sorted(gaps, key=lambda of: -of[0]):
        if gap <= delta:
            break
        if owner_of.get(helper.name, owner.name) != owner.name:
            continue
        for kind in Kind:
            if (owner.name, kind) not in given:
                move = _move(owner, helper, kind, gap, loads[owner.name], thresholds)
                if move is not None:
                    return move
    return None


def _move(
    owner: Device, helper: Device, kind: Kind, gap: float, load: float, thresholds: Thresholds
) -> ModuleMove | None:
    """Return the move of enough modules of a kind to level both devices; None if the move does not pay.

    `load` is the owner's utilisation after the plan's moves so far.
    """
    modules = owner.modules.get(kind)
    if modules is None or modules.used.utilisation <= 0:
        return None
    amount = modules.used.utilisation * load / owner.used.utilisation
    num = int(min(modules.num, gap / 2 / amount))
    left_s = thresholds.budget_s - owner.sync_s
    if left_s < 0:
        return None
    if num * modules.transfer_s > left_s:
        num = int(left_s / modules.transfer_s)
    if num < 1:
        return None
    benefit, cost_s = 2 * num * amount, num * modules.transfer_s + owner.sync_s
    if benefit < thresholds.rho * cost_s:
        return None
    return ModuleMove(owner.name, helper.name, kind, num, benefit, cost_s)
