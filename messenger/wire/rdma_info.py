"""The facts that two sides exchange to connect their queue pairs.

Owns: the form of these facts. Does not know: how the sides exchange them, verbs.
"""

from enum import StrEnum

import msgspec


class LinkLayer(StrEnum):
    """The link layer of a port."""

    INFINIBAND = "infiniband"
    ETHERNET = "ethernet"


class Scratch(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the other side that this side may write by RDMA, and that nobody reads."""

    address: int
    remote_key: int
    num_bytes: int


class EndpointInfo(msgspec.Struct, frozen=True):
    """The facts by which the other side connects to this queue pair."""

    qp_num: int
    psn: int
    gid: str
    lid: int
    link_layer: LinkLayer
    mtu_bytes: int
    max_message_bytes: int
    max_reads_in: int
