"""The network of an RDMA port's address. Ports of one network reach each other directly.

Owns: the query to the kernel. Does not know: devices, the choice of a card.
"""

import fcntl
import socket
import struct
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from pathlib import Path
from typing import Final

from messenger.wire.rdma_info import LinkLayer

_SIOCGIFNETMASK: Final = 0x891B
_IFREQ: Final = struct.Struct("16sHH4s16x")  # name, then a sockaddr_in
_IF_INET6: Final = Path("/proc/net/if_inet6")
_SUBNET_BITS: Final = 64
"""The number of leading bits of an InfiniBand address that name its subnet."""
_MAPPED_BITS: Final = 96
"""Bits before the IPv4 address in an IPv4-mapped IPv6 address."""


def network_of(gid: IPv6Address, link_layer: LinkLayer, interface: str | None) -> IPv6Network | None:
    """Return the network of a port's address; None if the kernel does not tell.

    `interface` is the name of the port's Ethernet interface; None if the port has no such interface.
    """
    if link_layer is LinkLayer.INFINIBAND:
        num_bits: int | None = _SUBNET_BITS
    elif gid.ipv4_mapped is not None:
        num_bits = None if interface is None else _ipv4_bits(gid.ipv4_mapped, interface)
    else:
        num_bits = _ipv6_bits(gid)
    return None if num_bits is None else IPv6Network((gid, num_bits), strict=False)


def _ipv4_bits(address: IPv4Address, interface: str) -> int | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            request = _IFREQ.pack(interface.encode(), socket.AF_INET, 0, address.packed)
            _name, _family, _port, mask = _IFREQ.unpack(fcntl.ioctl(sock, _SIOCGIFNETMASK, request))
        except OSError:
            return None
    return _MAPPED_BITS + int.from_bytes(mask, "big").bit_count()


def _ipv6_bits(address: IPv6Address) -> int | None:
    try:
        lines = _IF_INET6.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for each, _index, num_bits, *_rest in map(str.split, lines):
        if bytes.fromhex(each) == address.packed:
            return int(num_bits, 16)
    return None
