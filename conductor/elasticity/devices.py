"""The instances of a host, as devices with modules for Algorithm 1 of BanaServe.

Instances of any role can be helpers. Layers leave instances of any role, KV heads only those that decode.

The compute of an instance that decodes is measured by the tokens that it draws, so the measure includes the
work of its modules at a helper. The compute of a prefill instance is the time of its passes, which both sides
compute at the same time. Here the work of each module is counted for the device that has the module: for a
layer its part of the iteration or pass, for a KV head its part of attention.

Owns: the translation of view and heartbeats into devices. Does not know: which modules move.
"""

from collections import defaultdict

from conductor.elasticity.modules import Away, Device, Kind, MovableModules
from conductor.membership.modules import Modules, host_of, place_of
from conductor.performance.utilisation import Used
from conductor.view.cluster_view import ClusterView
from conductor.view.instances import Instance, Instances
from mooncake.messages.workers import InstanceState, Role


def devices_by_host(view: ClusterView, instances: Instances, modules: Modules) -> list[list[Device]]:
    """Return the serving instances whose modules can move, as devices: one list for each host.

    Instances without a measured utilisation are left out.
    """
    by_host = defaultdict[str, list[Instance]](list)
    for instance in instances:
        if instance.state is InstanceState.SERVING and not instance.registration.modules.why_not:
            by_host[host_of(instance)].append(instance)
    return [_devices(view, of_host, modules) for of_host in by_host.values()]


def _devices(view: ClusterView, instances: list[Instance], modules: Modules) -> list[Device]:
    hosted = defaultdict[str, float](float)
    """The share of compute that modules of other instances take, by helper."""
    found = []
    for instance in instances:
        used = view.utilisation.of(instance.name)
        if used is not None:
            of_role = _prefill_device if instance.role is Role.PREFILL else _device
            device, computed_away = of_role(view, instance, used, modules)
            found.append(device)
            if device.away is not None:
                hosted[device.away.helper] += computed_away
    return [_with_hosted(device, hosted[device.name]) for device in found]


def _with_hosted(device: Device, compute: float) -> Device:
    used = device.used._replace(compute=device.used.compute + compute)
    return Device(device.name, used, device.modules, device.away, sync_s=device.sync_s)


def _device(view: ClusterView, instance: Instance, used: Used, modules: Modules) -> tuple[Device, float]:
    """Return an instance as a device without hosted modules, and the compute of its modules at its helper.

    The compute is a share of the instance's time, from 0 to 1.
    """
    slot, layout, place = view.slot_of(instance.name), instance.registration.layout, place_of(instance)
    assert slot is not None
    num_requests, num_tokens = view.loads.num_decoding.item(slot), view.loads.num_decoding_tokens.item(slot)
    iteration_s = view.decode_costs.predict_s(slot, num_requests, num_tokens)
    attention = num_tokens * view.decode_costs.second_s.item(slot) / iteration_s if iteration_s > 0 else 0.0
    transfer_s = _transfer_s(view, instance)
    num_layers, num_heads = layout.num_layers, layout.num_kv_heads
    movable = {
        Kind.LAYERS: MovableModules(
            num_layers - 1,
            Used(used.compute / num_layers, used.memory / num_layers),
            transfer_s / num_layers,
        ),
        Kind.HEADS: MovableModules(
            num_heads - 1,
            Used(attention * used.compute / num_heads, used.memory / num_heads),
            transfer_s / num_heads,
        ),
    }
    away, computed_away = None, 0.0
    if place.are_elsewhere:
        of_layers = 0 if place.part.layers is None else place.part.layers.count / num_layers
        of_attention = place.part.num_heads / num_heads + place.part.share
        computed_away = used.compute * (of_layers + attention * of_attention)
        beyond = instance.num_device_pages / max(1, instance.registration.capacity.num_device_pages) - 1
        away = Away(place.helper, Used(computed_away, max(0.0, beyond) * used.memory))
    here = used._replace(compute=used.compute - computed_away)
    may_give = not place.are_elsewhere and not modules.owners_at(instance)
    return Device(instance.name, here, movable if may_give else {}, away, sync_s=iteration_s), computed_away


def _prefill_device(
    view: ClusterView, instance: Instance, used: Used, modules: Modules
) -> tuple[Device, float]:
    """Do what `_device` does for a prefill instance.

    Its requests do not wait for a move, and the memory that counts is its pool, which has all layers.
    """
    num_layers, place = instance.registration.layout.num_layers, place_of(instance)
    num_away = 0 if place.part.layers is None else place.part.layers.count
    of_layer = Used(used.compute / max(num_away, num_layers - num_away), 0.0)
    computed_away = num_away * of_layer.compute
    away = Away(place.helper, Used(computed_away, 0.0)) if place.are_elsewhere else None
    here = used._replace(compute=(num_layers - num_away) * of_layer.compute)
    transfer_s = _transfer_s(view, instance) / num_layers
    movable = {Kind.LAYERS: MovableModules(num_layers - 1, of_layer, transfer_s)}
    may_give = away is None and not modules.owners_at(instance)
    return Device(instance.name, here, movable if may_give else {}, away), computed_away


def _transfer_s(view: ClusterView, instance: Instance) -> float:
    """Return the seconds in which the KVCache of all used device pages of an instance is copied."""
    slot = view.slot_of(instance.name)
    assert slot is not None
    assert instance.heartbeat is not None
    num_used = instance.num_device_pages - instance.heartbeat.num_free_device_pages
    num_bytes = num_used * instance.registration.layout.block_bytes
    return num_bytes * view.transfers.costs(slot, 0.0)[1]
