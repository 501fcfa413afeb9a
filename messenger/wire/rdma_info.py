"""What two sides tell each other to join their queue pairs.

Owns: its form. Does not know: how the sides get it, verbs.
"""

from enum import StrEnum

import msgspec


class LinkLayer(StrEnum):
    """What a port's packets travel on."""

    INFINIBAND = "infiniband"
    ETHERNET = "ethernet"


class Scratch(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the other side that may be written through its queue pair and is never read."""

    address: int
    remote_key: int
    num_bytes: int


class EndpointInfo(msgspec.Struct, frozen=True):
    """What the other side needs to connect to this queue pair."""

    qp_num: int
    psn: int
    gid: str
    lid: int
    link_layer: LinkLayer
    mtu_bytes: int
    max_message_bytes: int
    max_reads_in: int
