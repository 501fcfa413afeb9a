"""Discovery on a machine that has two devices."""

import ipaddress
import subprocess

from messenger.rdma.devices import find_devices
from messenger.rdma.networks import network_of
from messenger.wire.rdma_info import LinkLayer


def test_both_devices_are_found_with_their_ipv4_address() -> None:
    (first, second), reasons = find_devices()
    assert not reasons
    assert (str(first), str(second)) == ("rxe0/1", "rxe1/1")
    assert first.gid == "0000:0000:0000:0000:0000:ffff:0a4d:0001"
    assert first.link_layer is LinkLayer.ETHERNET
    assert first.mtu_bytes == 4096
    assert first.network == "::ffff:a4d:1/128"
    assert not first.is_on_network_of(second.gid)


def test_network_of_an_address_is_that_of_its_interface() -> None:
    add = ["ip", "addr", "add", "10.99.1.1/24", "dev", "rdma0"]
    subprocess.run(add, check=True)
    try:
        network = network_of(ipaddress.IPv6Address("::ffff:10.99.1.1"), LinkLayer.ETHERNET, "rdma0")
        assert network == ipaddress.IPv6Network("::ffff:10.99.1.0/120")
    finally:
        subprocess.run(["ip", "addr", "del", *add[3:]], check=True)
    (device,), _reasons = find_devices(["rxe0"], gid_index=0)
    assert device.network == "fe80::/64"


def test_devices_can_be_restricted_by_name() -> None:
    devices, reasons = find_devices(["rxe1", "mlx5_0"])
    assert [device.name for device in devices] == ["rxe1"]
    assert reasons == ["RDMA device mlx5_0 does not exist; there are rxe0, rxe1"]


def test_index_of_the_address_can_be_chosen() -> None:
    (device,), _reasons = find_devices(["rxe0"], gid_index=0)
    assert device.gid_index == 0
    assert device.gid.startswith("fe80")
    devices, reasons = find_devices(["rxe0"], gid_index=77)
    assert not devices
    assert "no address at GID index 77" in reasons[0]


def test_port_that_is_down_is_left_out() -> None:
    subprocess.run(["ip", "link", "add", "rdma9", "type", "veth"], check=True)
    subprocess.run(["rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "rdma9"], check=True)
    try:
        devices, reasons = find_devices()
        assert [device.name for device in devices] == ["rxe0", "rxe1"]
        assert reasons == ["RDMA port rxe9/1 is not active; bring its network interface up"]
    finally:
        subprocess.run(["rdma", "link", "delete", "rxe9"], check=True)
        subprocess.run(["ip", "link", "delete", "rdma9"], check=True)
