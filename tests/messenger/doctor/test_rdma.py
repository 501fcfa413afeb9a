"""RDMA devices as sysfs shows them."""

import pytest

from messenger.doctor import gpu, rdma
from messenger.doctor.findings import Finding, Level
from mooncake.config.settings import Config
from mooncake.errors import TransferError
from tests.messenger.doctor.machines import FakeMachine, config, only
from tests.messenger.trees import ROCE_V2, add_interface, add_pci, add_rdma, write

IPV4_GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"  # 10.0.0.1
GLOBAL_GID = "fd00:0000:0000:0000:0000:0000:0000:0001"
LINK_LOCAL_GID = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"


def add_uverbs(machine: FakeMachine, device: str, *, with_node: bool = True) -> None:
    write(machine.root, "sys/class/infiniband_verbs/uverbs0/ibdev", device)
    write(machine.root, "sys/class/infiniband_verbs/abi_version", 6)
    if with_node:
        write(machine.root, "dev/infiniband/uverbs0", "")


def all_of_rdma(machine: FakeMachine, settings: Config) -> list[Finding]:
    return [
        *rdma.devices(machine, settings),
        *rdma.access(machine, settings),
        *rdma.locked_memory(machine, settings),
        *rdma.ports(machine, settings),
        *rdma.mtu(machine),
        *rdma.verbs(machine, settings, lambda: (["mlx5_0/1"], [])),
        *gpu.peer_memory(machine),
    ]


def test_a_machine_without_rdma_gets_one_line(machine: FakeMachine) -> None:
    finding = only(all_of_rdma(machine, config()))
    assert finding.level is Level.OK
    assert "TCP" in finding.found


def test_a_good_machine_gets_no_advice(machine: FakeMachine) -> None:
    gids = [(LINK_LOCAL_GID, "IB/RoCE v1"), (GLOBAL_GID, ROCE_V2), (IPV4_GID, ROCE_V2)]
    add_rdma(machine.root, "mlx5_0", ("0000:17:01.0", "0000:18:00.0"), 0, gids=gids, netdev="ens1")
    add_interface(machine.root, "ens1", mtu=9000)
    add_uverbs(machine, "mlx5_0")
    findings = all_of_rdma(machine, config(kvcache={"pool_bytes": 8 << 20}))
    assert [finding.title for finding in findings if finding.level is not Level.OK] == []
    (ports,) = (finding.found for finding in findings if finding.title == "rdma ports")
    assert ports == "mlx5_0/1 Ethernet 100 Gb/sec, address 10.0.0.1 at GID index 2"


def test_what_is_wrong_fails_if_rdma_was_asked_for(machine: FakeMachine) -> None:
    add_rdma(machine.root, "mlx5_0", state="1: DOWN")
    asked = rdma_config()
    for check in (rdma.devices, rdma.ports, rdma.locked_memory):
        assert only(check(machine, config())).level is Level.WARN
        assert only(check(machine, asked)).level is Level.FAIL


def rdma_config() -> Config:
    """As if `rdma` had been configured."""
    settings = config()
    return settings.model_copy(
        update={"messenger": settings.messenger.model_copy(update={"transport": "rdma"})}
    )


def test_rdma_without_a_device_fails_if_it_was_asked_for(machine: FakeMachine) -> None:
    assert only(rdma.devices(machine, rdma_config())).level is Level.FAIL


def test_a_card_without_its_driver_is_seen(machine: FakeMachine) -> None:
    add_pci(machine.root, ("0000:17:01.0", "0000:18:00.0"), 0)
    finding = only(rdma.devices(machine, config()))
    assert finding.level is Level.WARN
    assert "modprobe mlx5_ib" in finding.advice


def test_a_container_without_the_devices_is_told_its_flags(machine: FakeMachine) -> None:
    add_rdma(machine.root, "mlx5_0")
    add_uverbs(machine, "mlx5_0", with_node=False)
    assert "modprobe" in only(rdma.access(machine, config())).advice
    write(machine.root, ".dockerenv", "")
    assert rdma.CONTAINER_FLAGS in only(rdma.access(machine, config())).advice


def test_a_user_who_may_not_open_a_device_is_told_so(machine: FakeMachine) -> None:
    class Stranger(FakeMachine):
        def is_usable(self, path: str) -> bool:
            return False

    add_rdma(machine.root, "mlx5_0")
    add_uverbs(machine, "mlx5_0")
    assert "group" in only(rdma.access(Stranger(machine.root), config())).advice


@pytest.mark.parametrize(
    ("state", "link_layer", "gids", "found"),
    [
        ("1: DOWN", "Ethernet", [], "mlx5_0/1 is DOWN"),
        ("2: INIT", "InfiniBand", [], "mlx5_0/1 waits for a subnet manager"),
        ("4: ACTIVE", "Ethernet", [], "mlx5_0/1 has no RoCEv2 address"),
        ("4: ACTIVE", "Ethernet", [(IPV4_GID, "IB/RoCE v1")], "mlx5_0/1 has no RoCEv2 address"),
        ("4: ACTIVE", "Ethernet", [(LINK_LOCAL_GID, ROCE_V2)], "only the link-local RoCEv2 address"),
        ("4: ACTIVE", "Ethernet", [("0000:" * 7 + "0000", ROCE_V2)], "mlx5_0/1 has no RoCEv2 address"),
    ],
)
def test_trouble_of_a_port_is_named(
    machine: FakeMachine, state: str, link_layer: str, gids: list[tuple[str, str]], found: str
) -> None:
    add_rdma(machine.root, "mlx5_0", state=state, link_layer=link_layer, gids=gids)
    finding = only(rdma.ports(machine, config()))
    assert finding.level is Level.WARN
    assert found in finding.found
    assert finding.advice


def test_one_good_port_is_enough(machine: FakeMachine) -> None:
    add_rdma(machine.root, "mlx5_0", state="1: DOWN")
    add_rdma(machine.root, "mlx5_1", link_layer="InfiniBand", gids=[(LINK_LOCAL_GID, "IB/RoCE v1")])
    finding = only(rdma.ports(machine, config()))
    assert finding.level is Level.OK
    assert finding.found.startswith("mlx5_0/1 is DOWN; mlx5_1/1 InfiniBand 100 Gb/sec")


@pytest.mark.parametrize(
    ("interface_mtu", "roce_mtu", "level"),
    [(1500, 1024, Level.WARN), (4100, 2048, Level.WARN), (4200, 4096, Level.OK), (9000, 4096, Level.OK)],
)
def test_the_mtu_of_roce_follows_from_that_of_the_interface(
    machine: FakeMachine, interface_mtu: int, roce_mtu: int, level: Level
) -> None:
    add_rdma(machine.root, "mlx5_0", gids=[(IPV4_GID, ROCE_V2)], netdev="ens1")
    add_interface(machine.root, "ens1", mtu=interface_mtu)
    finding = only(rdma.mtu(machine))
    assert finding.level is level
    assert finding.found == f"mlx5_0/1 {roce_mtu} bytes (ens1 has {interface_mtu})"


def test_a_limit_on_locked_memory_below_the_pool_is_told(machine: FakeMachine) -> None:
    add_rdma(machine.root, "mlx5_0")
    finding = only(rdma.locked_memory(machine, config()))
    assert finding.level is Level.WARN
    assert finding.found == "8 MiB may be locked, but registering a pool locks 1 GiB"
    assert "LimitMEMLOCK=infinity" in finding.advice
    write(machine.root, ".dockerenv", "")
    assert "--ulimit memlock=-1" in only(rdma.locked_memory(machine, config())).advice


def test_a_capability_lifts_the_limit_outside_user_namespaces(machine: FakeMachine) -> None:
    add_rdma(machine.root, "mlx5_0")
    write(machine.root, "proc/self/status", "CapEff:\t0000000000004000")
    assert only(rdma.locked_memory(machine, config())).level is Level.OK
    write(machine.root, "proc/self/uid_map", "0 100000 65536")
    assert only(rdma.locked_memory(machine, config())).level is Level.WARN


def test_what_the_transport_cannot_use_is_told_with_its_reasons(machine: FakeMachine) -> None:
    def find_none() -> tuple[list[str], list[str]]:
        raise TransferError("no pyverbs for Python 3.11")

    add_rdma(machine.root, "mlx5_0")
    finding = only(rdma.verbs(machine, config(), find_none))
    assert finding.level is Level.WARN
    assert "no pyverbs for Python 3.11" in finding.found
    finding = only(rdma.verbs(machine, config(), lambda: (["mlx5_0/1"], ["mlx5_1/1 is not active"])))
    assert finding.found == "the messenger can use mlx5_0/1; not usable: mlx5_1/1 is not active"
