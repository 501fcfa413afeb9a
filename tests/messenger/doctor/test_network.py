"""Addresses, ports and buffers."""

import pytest

from messenger.doctor import network
from messenger.doctor.findings import Level
from tests.messenger.doctor.machines import FakeMachine, config, only
from tests.messenger.trees import add_interface, write


@pytest.mark.parametrize(
    ("role", "address", "level"),
    [
        ("all", "127.0.0.1", Level.OK),
        ("prefill", "127.0.0.1", Level.WARN),
        ("prefill", "10.0.0.1", Level.OK),
        ("prefill", "node-a", Level.OK),
        ("prefill", "10.0.0.9", Level.FAIL),
        ("prefill", "no-such-name", Level.FAIL),
        ("prefill", "2001:db8::1", Level.OK),
    ],
)
def test_the_address_of_the_messenger_is_one_of_this_machine(
    machine: FakeMachine, role: str, address: str, level: Level
) -> None:
    own = ("127.0.0.1", "10.0.0.1", "2001:db8::1")
    machine = FakeMachine(machine.root, hosts={"node-a": ["10.0.0.1", "2001:db8::9"]}, addresses=own)
    assert only(network.addresses(machine, config(role=role, messenger={"hosts": [address]}))).level is level


def test_each_bad_address_of_the_messenger_is_told(machine: FakeMachine) -> None:
    machine = FakeMachine(machine.root, addresses=("10.0.0.1",))
    settings = config(role="prefill", messenger={"hosts": ["10.0.0.9", "10.0.0.1", "10.0.1.9"]})
    first, second, good = network.addresses(machine, settings)
    assert first.found == "messenger.hosts: 10.0.0.9 is no address of this machine"
    assert second.found == "messenger.hosts: 10.0.1.9 is no address of this machine"
    assert (good.level, good.found) == (Level.OK, "messenger.hosts: 10.0.0.1 of this machine")


def test_others_may_reach_a_messenger_at_an_address_that_is_not_of_this_machine(machine: FakeMachine) -> None:
    machine = FakeMachine(machine.root, addresses=("10.0.0.1",))
    told = {"hosts": ["192.0.2.9"]}
    good = only(
        network.addresses(machine, config(role="prefill", messenger=told | {"listen_hosts": ["0.0.0.0"]}))
    )
    assert (good.level, good.found) == (Level.OK, "messenger.hosts: 192.0.2.9 told to other nodes")
    bad, _ = network.addresses(
        machine, config(role="prefill", messenger=told | {"listen_hosts": ["10.0.0.9"]})
    )
    assert (bad.level, bad.found) == (
        Level.FAIL,
        "messenger.listen_hosts: 10.0.0.9 is no address of this machine",
    )


def test_the_conductor_has_no_messenger(machine: FakeMachine) -> None:
    assert list(network.addresses(machine, config(role="conductor"))) == []


def listen_at(machine: FakeMachine, address: str, inode: int, table: str = "tcp") -> None:
    line = f"   0: {address} 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0  0 {inode} 1"
    write(machine.root, f"proc/net/{table}", f"  sl  local_address rem_address   st\n{line}")


def own_socket(machine: FakeMachine, pid: int, inode: int, cmdline: str, comm: str = "python") -> None:
    write(machine.root, f"proc/{pid}/cmdline", cmdline)
    write(machine.root, f"proc/{pid}/comm", comm)
    (machine.root / f"proc/{pid}/fd").mkdir()
    (machine.root / f"proc/{pid}/fd/3").symlink_to(f"socket:[{inode}]")


def test_ports_are_free(machine: FakeMachine) -> None:
    listen_at(machine, "0100007F:1F41", 5)  # 127.0.0.1:8001
    assert only(network.ports(machine, config())).found == "127.0.0.1:8000 (http.port) is free"


@pytest.mark.parametrize(
    ("address", "table"),
    [
        ("0100007F:1F40", "tcp"),
        ("00000000:1F40", "tcp"),
        ("00000000000000000000000000000000:1F40", "tcp6"),
    ],
)
def test_who_has_a_port_is_named(machine: FakeMachine, address: str, table: str) -> None:
    listen_at(machine, address, 4711, table)
    own_socket(machine, 42, 4711, "/usr/sbin/nginx\0-g\0daemon off;", "nginx")
    finding = only(network.ports(machine, config()))
    assert (finding.level, finding.found) == (
        Level.FAIL,
        "127.0.0.1:8000 (http.port) belongs to nginx, process 42",
    )


def test_another_address_leaves_the_port_free(machine: FakeMachine) -> None:
    listen_at(machine, "0100000A:1F40", 4711)  # 10.0.0.1:8000
    assert only(network.ports(machine, config())).level is Level.OK
    assert only(network.ports(machine, config(http={"host": "0.0.0.0"}))).level is Level.FAIL


def test_a_port_of_a_running_cluster_is_fine(machine: FakeMachine) -> None:
    listen_at(machine, "0100007F:1F40", 4711)
    own_socket(machine, 42, 4711, "python\0-m\0conductor.process.service")
    finding = only(network.ports(machine, config()))
    assert (finding.level, finding.found) == (
        Level.OK,
        "127.0.0.1:8000 (http.port) is served by conductor.process.service, process 42",
    )


def test_an_owner_that_cannot_be_seen_is_somebody_else(machine: FakeMachine) -> None:
    listen_at(machine, "0100007F:1F40", 4711)
    assert only(network.ports(machine, config())).found.endswith(
        "belongs to a process that cannot be seen from here"
    )


def test_ports_follow_from_the_role(machine: FakeMachine) -> None:
    conductor = only(network.ports(machine, config(role="conductor"))).found
    assert conductor.split(", ") == [
        "127.0.0.1:8000 (http.port) is free",
        "127.0.0.1:7800 (conductor.endpoint) is free",
        "127.0.0.1:7801 (conductor.reply_endpoint) is free",
    ]
    front = only(network.ports(machine, config(role="front", http={"port": 0}))).found
    assert front == "127.0.0.1:7801 (conductor.reply_endpoint) is free"
    messenger = {"hosts": ["10.0.0.1", "10.0.1.1"], "port": 7999}
    listen_at(machine, "0101000A:1F3F", 4711)  # the second address
    taken, free = network.ports(machine, config(role="prefill", messenger=messenger))
    assert taken.found.startswith("10.0.1.1:7999 (messenger.port) belongs to")
    assert free.found == "10.0.0.1:7999 (messenger.port) is free"
    assert list(network.ports(machine, config(role="prefill"))) == []  # port 0 takes a free one
    pair = config(num_decode=1, kvcache={"listen": "0.0.0.0:7900"}, http={"port": 0})
    assert only(network.ports(machine, pair)).found == (
        "0.0.0.0:7900 (kvcache.listen) is free, 0.0.0.0:7901 (kvcache.listen) is free"
    )


def test_a_low_port_is_for_root(machine: FakeMachine) -> None:
    finding = only(network.ports(machine, config(http={"port": 80})))
    assert (finding.level, finding.found) == (
        Level.FAIL,
        "127.0.0.1:80 (http.port): below 1024, for root only",
    )
    write(machine.root, "proc/self/status", "CapEff:\t0000000000000400")
    assert only(network.ports(machine, config(http={"port": 80}))).level is Level.OK


def test_small_tcp_buffers_are_a_warning(machine: FakeMachine) -> None:
    write(machine.root, "proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456")
    write(machine.root, "proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304")
    assert only(network.tcp_buffers(machine)).level is Level.OK
    write(machine.root, "proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t262144")
    finding = only(network.tcp_buffers(machine))
    assert finding.level is Level.WARN
    assert "tcp_wmem" in finding.advice
    assert "tcp_rmem" not in finding.advice


def test_interfaces_tell_speed_and_mtu(machine: FakeMachine) -> None:
    assert only(network.interfaces(machine)).level is Level.WARN
    add_interface(machine.root, "ens1", speed=25_000, mtu=9000)
    add_interface(machine.root, "veth0", speed=-1)
    found = only(network.interfaces(machine)).found
    assert found == "ens1 (25 Gbit/s, MTU 9000), veth0 (speed unknown, MTU 1500)"
