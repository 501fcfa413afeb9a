"""The matrix of NICs, from trees of sysfs that the tests make."""

import json
from pathlib import Path

import pytest

from messenger.rdma.topology import Choice, NicKind, Topology, find_nics
from mooncake.errors import ConfigError
from tests.messenger.trees import add_gpu, add_interface, add_nodes, add_pci, add_rdma


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two NUMA nodes, four NICs, two GPUs.

    node 0: a switch with cuda:0 and mlx5_0; mlx5_1 at a root port of its own
    node 1: a root port with mlx5_2; a switch with mlx5_3 and cuda:1
    """
    add_nodes(tmp_path, 0, 1)
    add_rdma(tmp_path, "mlx5_0", ("0000:17:01.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"), 0)
    add_gpu(tmp_path, ("0000:17:01.0", "0000:18:00.0", "0000:19:01.0", "0000:1b:00.0"), 0)
    add_rdma(tmp_path, "mlx5_1", ("0000:30:01.0", "0000:31:00.0"), 0)
    add_rdma(tmp_path, "mlx5_2", ("0000:80:01.0", "0000:81:00.0"), 1)
    add_rdma(tmp_path, "mlx5_3", ("0000:97:01.0", "0000:98:00.0", "0000:99:00.0", "0000:9a:00.0"), 1)
    add_gpu(tmp_path, ("0000:97:01.0", "0000:98:00.0", "0000:99:01.0", "0000:9b:00.0"), 1)
    return tmp_path / "sys"


def test_memory_prefers_the_nics_of_its_node(two_nodes: Path) -> None:
    topology = Topology.discover(two_nodes)
    assert topology.nics("cpu:0") == Choice(("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3"))
    assert topology.nics("cpu:1") == Choice(("mlx5_2", "mlx5_3"), ("mlx5_0", "mlx5_1"))


def test_a_gpu_prefers_the_nic_behind_its_switch_and_then_its_node(two_nodes: Path) -> None:
    topology = Topology.discover(two_nodes)
    assert topology.nics("cuda:0") == Choice(("mlx5_0",), ("mlx5_1", "mlx5_2", "mlx5_3"))
    assert topology.nics("cuda:1") == Choice(("mlx5_3",), ("mlx5_2", "mlx5_0", "mlx5_1"))


def test_the_nearer_of_two_nics_below_one_root_port_is_preferred(tmp_path: Path) -> None:
    add_gpu(tmp_path, ("0000:17:01.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"), 0)
    add_rdma(tmp_path, "far", ("0000:17:01.0", "0000:18:01.0", "0000:20:00.0"), 0)
    add_rdma(tmp_path, "near", ("0000:17:01.0", "0000:18:00.0", "0000:19:01.0"), 0)
    assert Topology.discover(tmp_path / "sys").nics("cuda:0") == Choice(("near",), ("far",))


def test_a_gpu_without_a_nic_near_by_prefers_those_of_its_node(tmp_path: Path) -> None:
    add_nodes(tmp_path, 0, 1)
    add_gpu(tmp_path, ("0000:17:01.0", "0000:18:00.0"), 1)
    add_rdma(tmp_path, "mlx5_0", ("0000:30:01.0", "0000:31:00.0"), 0)
    add_rdma(tmp_path, "mlx5_1", ("0000:80:01.0", "0000:81:00.0"), 1)
    assert Topology.discover(tmp_path / "sys").nics("cuda:0") == Choice(("mlx5_1",), ("mlx5_0",))


def test_gpus_are_counted_by_pci_address(tmp_path: Path) -> None:
    add_gpu(tmp_path, ("10000:01:01.0", "10000:02:00.0"), 1)  # as text this address is before the next
    add_gpu(tmp_path, ("ffff:01:01.0", "ffff:02:00.0"), 0)
    add_rdma(tmp_path, "mlx5_0", ("ffff:01:01.0", "ffff:03:00.0"), 0)
    add_rdma(tmp_path, "mlx5_1", ("10000:01:01.0", "10000:03:00.0"), 1)
    topology = Topology.discover(tmp_path / "sys")
    assert [topology.nics(f"cuda:{index}").preferred for index in (0, 1)] == [("mlx5_0",), ("mlx5_1",)]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("1,0", {"cuda:0": "mlx5_3", "cuda:1": "mlx5_0"}),
        (" 1 ", {"cuda:0": "mlx5_3"}),
        ("1,-1,0", {"cuda:0": "mlx5_3"}),
        ("7", {}),
        ("", {}),
        ("GPU-5d1e2c", {"cuda:0": "mlx5_0", "cuda:1": "mlx5_3"}),
    ],
)
def test_cuda_visible_devices_counts_if_numeric(
    two_nodes: Path, listed: str, expected: dict[str, str]
) -> None:
    topology = Topology.discover(two_nodes, {"CUDA_VISIBLE_DEVICES": listed})
    found = {name: choice.preferred[0] for name, choice in topology.matrix.items() if name.startswith("cuda")}
    assert found == expected


def test_other_devices_of_the_vendor_are_no_gpus(tmp_path: Path) -> None:
    add_pci(tmp_path, ("0000:17:01.0", "0000:18:00.1"), 0, vendor="0x10de", kind="0x040300")
    assert list(Topology.discover(tmp_path / "sys").matrix) == ["cpu:0"]


def test_without_rdma_every_location_has_no_nic(tmp_path: Path) -> None:
    add_nodes(tmp_path, 0, 1)
    topology = Topology.discover(tmp_path / "sys")
    assert topology.matrix == {"cpu:0": Choice((), ()), "cpu:1": Choice((), ())}
    assert topology.order("cpu:0") == []


def test_nics_of_unknown_nodes_are_preferred_everywhere(tmp_path: Path) -> None:
    add_nodes(tmp_path, 0, 1)
    add_rdma(tmp_path, "mlx5_0", ("0000:17:01.0", "0000:18:00.0"), -1)
    add_rdma(tmp_path, "rxe0")
    topology = Topology.discover(tmp_path / "sys")
    assert set(topology.matrix.values()) == {Choice(("mlx5_0", "rxe0"), ())}


def test_a_nic_of_an_unknown_node_is_not_taken_for_near(tmp_path: Path) -> None:
    add_nodes(tmp_path, 0, 1)
    add_rdma(tmp_path, "mlx5_0", ("0000:17:01.0", "0000:18:00.0"), -1)
    add_rdma(tmp_path, "mlx5_1", ("0000:30:01.0", "0000:31:00.0"), 0)
    assert Topology.discover(tmp_path / "sys").nics("cpu:0") == Choice(("mlx5_1",), ("mlx5_0",))


def test_an_rdma_device_whose_ports_are_down_is_left_out(tmp_path: Path) -> None:
    add_rdma(tmp_path, "mlx5_0", state="1: DOWN")
    add_rdma(tmp_path, "mlx5_1")
    assert Topology.discover(tmp_path / "sys").nics("cpu:0") == Choice(("mlx5_1",), ())


def test_ethernet_interfaces_that_are_up_form_a_matrix_of_their_own(tmp_path: Path) -> None:
    add_nodes(tmp_path, 0, 1)
    near = add_pci(tmp_path, ("0000:30:01.0", "0000:31:00.0"), 1)
    add_interface(tmp_path, "ens1", near / "virtio0")
    (near / "virtio0").mkdir()  # its node is known to the PCI device only
    add_interface(tmp_path, "ens2", add_pci(tmp_path, ("0000:17:01.0", "0000:18:00.0"), 0))
    add_interface(tmp_path, "lo", state="unknown", kind=772)
    add_interface(tmp_path, "docker0", state="down")
    (add_interface(tmp_path, "ens3") / "master").mkdir()
    topology = Topology.discover(tmp_path / "sys", kind=NicKind.ETHERNET)
    assert topology.nics("cpu:1") == Choice(("ens1",), ("ens2",))
    assert [nic.numa_node for nic in find_nics(NicKind.ETHERNET, tmp_path / "sys")] == [1, 0]


def test_a_much_slower_interface_is_secondary_even_if_it_is_near(tmp_path: Path) -> None:
    add_nodes(tmp_path, 0, 1)
    add_interface(tmp_path, "eno1", add_pci(tmp_path, ("0000:30:01.0", "0000:31:00.0"), 1), speed=1_000)
    add_interface(tmp_path, "ens2", add_pci(tmp_path, ("0000:17:01.0", "0000:18:00.0"), 0), speed=100_000)
    add_interface(tmp_path, "veth0", speed=-1)  # not known is not slow
    topology = Topology.discover(tmp_path / "sys", kind=NicKind.ETHERNET)
    assert topology.nics("cpu:1") == Choice(("ens2", "veth0"), ("eno1",))


def test_failed_nics_are_not_in_the_order(two_nodes: Path) -> None:
    topology = Topology.discover(two_nodes)
    assert topology.order("cuda:1") == ["mlx5_3", "mlx5_2", "mlx5_0", "mlx5_1"]
    assert topology.order("cuda:1", {"mlx5_3", "mlx5_0"}) == ["mlx5_2", "mlx5_1"]


def test_a_location_that_the_matrix_does_not_name_may_use_every_nic(two_nodes: Path) -> None:
    topology = Topology.parse('{"cpu:0": [["mlx5_1"], ["mlx5_0"]]}', two_nodes)
    assert topology.nics("cuda:0") == Choice((), ("mlx5_1", "mlx5_0"))


def test_what_is_written_is_read_again(two_nodes: Path) -> None:
    topology = Topology.discover(two_nodes)
    text = json.dumps(topology.matrix)
    assert json.loads(text)["cuda:0"] == [["mlx5_0"], ["mlx5_1", "mlx5_2", "mlx5_3"]]
    assert Topology.parse(text, two_nodes) == topology


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no valid JSON"),
        ("[]", "found list"),
        ('{"cpu:0": ["mlx5_0"]}', 'cpu:0 has ["mlx5_0"]; expected'),
        ('{"cpu:0": [["mlx5_0"]]}', "preferred, then secondary"),
        ('{"cpu:0": [["mlx5_0"], [1]]}', "preferred, then secondary"),
        ('{"cpu:0": [["mlx5_0"], ["mlx5_0"]]}', "names mlx5_0 twice"),
        ('{"cpu:0": [[], []], "cpu:0": [[], []]}', "cpu:0 is given twice"),
        ('{"gpu:0": [[], []]}', "'gpu:0' is no memory location; expected cpu:N or cuda:N"),
        ('{"cuda:01": [[], []]}', "is no memory location"),
        ('{"cpu:0": [["mlx5_9"], []]}', "does not have; it has mlx5_0, mlx5_1, mlx5_2, mlx5_3"),
    ],
)
def test_a_wrong_text_is_refused_by_name(two_nodes: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Topology.parse(text, two_nodes)
    assert message in str(refused.value)
    assert str(refused.value).startswith("messenger.topology: ")


def test_a_nic_that_is_down_may_be_named(tmp_path: Path) -> None:
    add_rdma(tmp_path, "mlx5_0", state="1: DOWN")
    assert Topology.parse('{"cpu:0": [["mlx5_0"], []]}', tmp_path / "sys").order("cpu:0") == ["mlx5_0"]
