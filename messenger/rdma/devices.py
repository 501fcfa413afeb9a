"""The RDMA devices of this machine: the active ports, and the address of each.

Owns: discovery, choice of the GID. Does not know: memory, connections.
"""

import ipaddress
import socket
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from messenger.rdma.errors import RdmaUnavailableError
from messenger.rdma.networks import network_of
from messenger.rdma.verbs import load_verbs
from messenger.wire.rdma_info import LinkLayer

_MTU_BYTES: Final = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}  # enum ibv_mtu
_PORT_ACTIVE: Final = 4
_ROCE_V2: Final = 2  # enum ibv_gid_type
_MAX_GIDS: Final = 1024  # rows of 32 bytes in an answer of at most 64 KiB


_LINK_LAYERS: Final = {1: LinkLayer.INFINIBAND, 2: LinkLayer.ETHERNET}


class GidEntry(NamedTuple):
    """A row of a port's address table."""

    gid_index: int
    gid: ipaddress.IPv6Address
    kind: int
    """The value of enum ibv_gid_type."""
    interface: str | None
    """The name of the Ethernet interface; None for InfiniBand."""


class RdmaDevice(msgspec.Struct, frozen=True):
    """An active port of a device.

    `gid` is the address for peers, `gid_index` its index in the port's table.
    """

    name: str
    port: int
    mtu_bytes: int
    link_layer: LinkLayer
    lid: int
    gid: str
    gid_index: int
    max_message_bytes: int
    network: str | None
    """The network of `gid`; None if the kernel does not tell."""

    def is_on_network_of(self, gid: str) -> bool:
        """Return whether another port's address `gid` is on the same network."""
        try:
            return self.network is not None and ipaddress.IPv6Address(gid) in ipaddress.IPv6Network(
                self.network
            )
        except ValueError:  # what somebody sends may be no address
            return False

    def __str__(self) -> str:
        return f"{self.name}/{self.port}"


class FoundDevices(NamedTuple):
    """Usable devices, and `reasons`: why other devices are not usable, or why there are none.

    The caller logs the reasons once.
    """

    devices: list[RdmaDevice]
    reasons: list[str]


def find_devices(names: Collection[str] | None = None, gid_index: int | None = None) -> FoundDevices:
    """Return the usable ports of all devices, and why other ports are not usable.

    `names` restricts the devices; None: all. `gid_index` overrides the choice of address.
    """
    try:
        verbs = load_verbs()
    except RdmaUnavailableError as error:
        return FoundDevices([], [str(error)])
    try:
        present = [device.name.decode() for device in verbs.device.get_device_list()]
    except verbs.Error as error:
        present, why = [], f" ({error})"
    else:
        why = ""
    if not present:
        return FoundDevices([], [f"this machine has no RDMA device{why}"])
    devices: list[RdmaDevice] = []
    reasons = [
        f"RDMA device {missing} does not exist; there are {', '.join(sorted(present))}"
        for missing in sorted(set(names or ()) - set(present))
    ]
    for name in sorted(present):
        if names is not None and name not in names:
            continue
        try:
            found = _ports(name, gid_index)
        except verbs.Error as error:
            reasons.append(f"RDMA device {name} cannot be used: {error}")
        else:
            devices += found.devices
            reasons += found.reasons
    return FoundDevices(devices, reasons)


def choose_gid(link_layer: LinkLayer, entries: Sequence[GidEntry]) -> GidEntry | None:
    """Return the address to use; None if no address can be used.

    Over Ethernet only RoCEv2 addresses count: IPv4 addresses first, link-local addresses last.
    """
    if link_layer is LinkLayer.INFINIBAND:
        return min(entries, key=lambda entry: entry.gid_index, default=None)

    def rank(entry: GidEntry) -> tuple[bool, bool, int]:
        return entry.gid.ipv4_mapped is None, entry.gid.is_link_local, entry.gid_index

    return min((entry for entry in entries if entry.kind == _ROCE_V2), key=rank, default=None)


def _ports(name: str, gid_index: int | None) -> FoundDevices:
    context = load_verbs().device.Context(name=name)
    try:
        entries: dict[int, list[GidEntry]] = {}
        for row in context.query_gid_table(_MAX_GIDS):
            entry = GidEntry(
                row.gid_index, ipaddress.IPv6Address(row.gid_str()), row.gid_type, _interface(row)
            )
            entries.setdefault(row.port_num, []).append(entry)
        devices, reasons = [], []
        for port in range(1, context.query_device().phys_port_cnt + 1):
            found = _port(name, port, context.query_port(port), entries.get(port, []), gid_index)
            if isinstance(found, RdmaDevice):
                devices.append(found)
            else:
                reasons.append(found)
        return FoundDevices(devices, reasons)
    finally:
        context.close()


def _port(
    name: str, port: int, attributes: Any, entries: Sequence[GidEntry], gid_index: int | None
) -> RdmaDevice | str:
    """Return the port, or the reason why it cannot be used."""
    if attributes.state != _PORT_ACTIVE:
        return f"RDMA port {name}/{port} is not active; bring its network interface up"
    link_layer = _LINK_LAYERS.get(attributes.link_layer, LinkLayer.INFINIBAND)
    if gid_index is None:
        chosen = choose_gid(link_layer, entries)
    else:
        chosen = next((entry for entry in entries if entry.gid_index == gid_index), None)
    if chosen is None:
        what = "RoCEv2 address" if gid_index is None else f"address at GID index {gid_index}"
        return f"RDMA port {name}/{port} has no {what}; give its network interface an IP address"
    network = network_of(chosen.gid, link_layer, chosen.interface)
    return RdmaDevice(
        name=name,
        port=port,
        mtu_bytes=_MTU_BYTES.get(attributes.active_mtu, max(_MTU_BYTES.values())),
        link_layer=link_layer,
        lid=attributes.lid,
        gid=chosen.gid.exploded,
        gid_index=chosen.gid_index,
        max_message_bytes=attributes.max_msg_sz,
        network=None if network is None else str(network),
    )


def _interface(row: Any) -> str | None:
    try:
        return socket.if_indextoname(row.ndev_ifindex)
    except OSError:  # no interface, or one of another network namespace
        return None
