"""Which network an address belongs to."""

from ipaddress import IPv6Address, IPv6Network

from messenger.rdma.networks import network_of
from messenger.wire.rdma_info import LinkLayer


def test_network_of_an_ipv4_address_is_as_large_as_its_interface_says() -> None:
    found = network_of(IPv6Address("::ffff:127.0.0.1"), LinkLayer.ETHERNET, "lo")
    assert found == IPv6Network("::ffff:127.0.0.0/104")


def test_network_of_an_infiniband_port_is_its_subnet() -> None:
    found = network_of(IPv6Address("fe80::7:1"), LinkLayer.INFINIBAND, None)
    assert found == IPv6Network("fe80::/64")


def test_network_that_the_kernel_does_not_tell_is_not_known() -> None:
    assert network_of(IPv6Address("::ffff:192.0.2.1"), LinkLayer.ETHERNET, "nothing") is None
    assert network_of(IPv6Address("::ffff:192.0.2.1"), LinkLayer.ETHERNET, None) is None
    assert network_of(IPv6Address("2001:db8::1"), LinkLayer.ETHERNET, None) is None
