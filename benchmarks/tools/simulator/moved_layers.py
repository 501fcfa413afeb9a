"""Layers of simulated decode instances at other instances, as BanaServe moves them (sections 4.1 and 4.4.1).

An instance and its helper are a pipeline of two stages. A batch is decoded in two micro-batches, so each
stage reads its weights twice in an iteration, unless the undivided batch is quicker. A helper that computes
passes of its own gives at most half of its time to the owner's layers. The KVCache of these layers is at the
helper, so the owner has room for more tokens.

The server's own Algorithm 1 (`conductor.elasticity.modules`) says which layers move. As in the paper, and
unlike in the server, prefill instances are helpers too, and a helper gets the weights from the owner, over
the devices' own link. Activations between the stages, and KVCache on its way back, cost nothing: this favours
the policy.

Owns: where layers are, and what times and memory follow. Does not know: why a layer moves, batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.decode.instance import DecodeInstance
from benchmarks.tools.simulator.cluster.machines.costs import Costs, PromptShare
from benchmarks.tools.simulator.cluster.machines.machine import Machine
from benchmarks.tools.simulator.cluster.shape import InstanceShape
from conductor.elasticity.control import THRESHOLDS
from conductor.elasticity.modules import Away, Device, Kind, ModuleMove, MovableModules, plan
from conductor.performance.utilisation import Used
from mooncake.messages.workers import Role

PERIOD_S = 2
"""Seconds between two plans: fewer than in the server, as loads of half a minute are simulated."""
LINK_BYTES_PER_S = 300e9
"""Bytes a second between two devices of a node: NVLink of an A100, in one direction (data sheet)."""
_MOST_LENT = 0.5
"""The largest share of its time that a helper with passes of its own gives to an owner's layers.

Owner and helper have the same right to this time.
"""


class Place(NamedTuple):
    """The helper of an instance, and the share of the instance's layers that the helper has, at most half."""

    helper: str
    share: float


class TwoStages:
    """The costs of a batch that is decoded by two stages. The second one has `share` of the layers."""

    def __init__(self, whole: Costs, share: float) -> None:
        """Derive the costs of two stages from `whole`, the costs of one device with all layers."""
        self._whole, self._first = whole, 1 - share
        self.kv_token_s = self._first * whole.kv_token_s
        self.profiled = whole.profiled

    def iteration_s(self, shares: Sequence[PromptShare], batch_size: int) -> float:
        """Return the seconds of both micro-batches, at the first stage's pace, or of the undivided batch."""
        assert not shares, "an instance with layers elsewhere computes no prompts in simulations"
        divided_s = 2 * self._first * self._whole.iteration_s((), -(-batch_size // 2))
        return min(divided_s, self._whole.iteration_s((), batch_size))


@dataclass(slots=True)
class SharedDevices(Machine):
    """Instances that compute layers of others, and take longer for their own passes meanwhile."""

    places: dict[str, Place] = field(default_factory=dict)
    """The place of the layers of each owner, by its name."""

    def factor(self, name: str) -> float:
        """Return the present factor of an instance's durations."""
        if (place := self.places.get(name)) is not None:
            is_alone = place.helper not in self._computing
            return 1.0 if is_alone else max(1.0, place.share / (1 - place.share) / _MOST_LENT)
        for owner, place in self.places.items():
            if place.helper == name and owner in self._computing:
                return 1 / (1 - min(_MOST_LENT, place.share / (1 - place.share)))
        return 1.0

    def place(self, owner: str, place: Place | None) -> None:
        """Record where moved layers of `owner` are; None if all of its layers are at `owner`."""
        before = self.places.pop(owner, None)
        if place is not None:
            self.places[owner] = place
        for of in (before, place):
            if of is not None and of.helper in self.on_change:
                self.on_change[of.helper]()


class LayerMoves:
    """The moves of layers in a cluster whose `machine` is `devices`."""

    def __init__(self, devices: SharedDevices, shape: InstanceShape) -> None:
        self._shared, self._shape = devices, shape
        self._num_layers = shape.layout.num_layers
        self._whole_tokens = shape.num_device_blocks * shape.block_tokens
        self._num_seconds = self._num_moving = 0

    def each_second(self, cluster: DisaggregatedCluster) -> None:
        """Plan the moves of this period, and carry each out after the time that it costs.

        Nothing is planned while layers are moving.
        """
        self._num_seconds += 1
        if self._num_seconds % PERIOD_S or self._num_moving:
            return
        for move in plan(self._devices(cluster), THRESHOLDS):
            if move.kind is None or self._has_room(move):
                self._num_moving += 1
                cluster.clock.after(move.cost_s, self._carry_out, cluster, move)

    def _has_room(self, move: ModuleMove) -> bool:
        """Return whether the helper has no layers of another instance, and memory for those of this one."""
        is_free = all(place.helper != move.helper for place in self._shared.places.values())
        return is_free and self._capacity_tokens(self._place_after(move)) > self._whole_tokens

    def _place_after(self, move: ModuleMove) -> Place:
        return Place(move.helper, move.num / self._num_layers)

    def _devices(self, cluster: DisaggregatedCluster) -> list[Device]:
        """Return all instances as devices; none until each has been measured."""
        found, hosted = dict[str, Device](), dict[str, Used]()
        for instance in cluster.instances:
            name, decode = instance.node.name, instance.decode
            measured = cluster.conductor.view.utilisation.of(name)
            if measured is None:
                return []
            is_decode = instance.node.role is not Role.PREFILL
            num_tokens = decode.capacity_tokens - decode.num_free_tokens
            used = Used(measured.compute, num_tokens / decode.capacity_tokens if is_decode else 0.0)
            away, modules = None, dict[Kind, MovableModules]()
            if (place := self._shared.places.get(name)) is not None:
                of_layers = Used(
                    measured.compute * place.share, num_tokens * place.share / self._whole_tokens
                )
                away, hosted[place.helper] = Away(place.helper, of_layers), of_layers
                used = used._replace(compute=measured.compute - of_layers.compute)
            elif is_decode:
                modules[Kind.LAYERS] = self._movable(decode, used)
            found[name] = Device(name, used, modules, away, decode.iteration_s)
        for name, of_layers in hosted.items():
            device = found[name]
            # A prefill instance counts the time of its passes, in which it may have computed these layers.
            compute = min(1.0, device.used.compute + of_layers.compute)
            found[name] = replace(
                device, used=Used(compute, device.used.memory + of_layers.memory), modules={}
            )
        return list(found.values())

    def _movable(self, decode: DecodeInstance, used: Used) -> MovableModules:
        num_tokens = decode.capacity_tokens - decode.num_free_tokens
        num_bytes = self._shape.model.weights_bytes + num_tokens * self._shape.model.kv_bytes_per_token
        of_layer = Used(used.compute / self._num_layers, used.memory / self._num_layers)
        seconds = num_bytes / self._num_layers / LINK_BYTES_PER_S
        return MovableModules(self._num_layers - 1, of_layer, seconds)

    def _carry_out(self, cluster: DisaggregatedCluster, move: ModuleMove) -> None:
        (decode,) = (of.decode for of in cluster.instances if of.node.name == move.owner)
        decode.between_iterations(lambda: self._apply(decode, move))

    def _apply(self, decode: DecodeInstance, move: ModuleMove) -> None:
        self._num_moving -= 1
        node, whole = decode.node, self._shape.costs
        if move.kind is None:
            self._shared.place(node.name, None)
            node.costs, decode.capacity_tokens = whole, self._whole_tokens
        else:
            place = self._place_after(move)
            self._shared.place(node.name, place)
            node.costs, decode.capacity_tokens = (
                TwoStages(whole, place.share),
                self._capacity_tokens(place),
            )

    def _capacity_tokens(self, place: Place) -> int:
        """Return the tokens for which an owner and its helper have memory.

        The helper keeps its own weights. KVCache of its own is not counted.
        """
        model = self._shape.model
        freed_bytes = place.share * model.weights_bytes
        here = (self._whole_tokens + freed_bytes / model.kv_bytes_per_token) / (1 - place.share)
        there = (self._whole_tokens - freed_bytes / model.kv_bytes_per_token) / place.share
        return int(min(here, there))
