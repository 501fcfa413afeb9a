"""Choosing an address, and machines without RDMA."""

import ipaddress
import sys

import pytest

from messenger.rdma import verbs
from messenger.rdma.devices import GidEntry, choose_gid, find_devices
from messenger.wire.rdma_info import LinkLayer

INFINIBAND, ROCE_V1, ROCE_V2 = 0, 1, 2
LINK_LOCAL, GLOBAL, MAPPED = "fe80::1", "2001:db8::1", "::ffff:10.0.0.1"


def entry(gid_index: int, gid: str, kind: int) -> GidEntry:
    return GidEntry(gid_index, ipaddress.IPv6Address(gid), kind, None)


@pytest.mark.parametrize(
    ("entries", "chosen"),
    [
        ([(0, LINK_LOCAL, ROCE_V2), (1, GLOBAL, ROCE_V2), (2, MAPPED, ROCE_V1), (3, MAPPED, ROCE_V2)], 3),
        ([(0, LINK_LOCAL, ROCE_V2), (1, LINK_LOCAL, ROCE_V1), (5, GLOBAL, ROCE_V2)], 5),
        ([(0, MAPPED, ROCE_V1), (1, LINK_LOCAL, ROCE_V2)], 1),
        ([(4, MAPPED, ROCE_V2), (7, "::ffff:10.0.0.2", ROCE_V2)], 4),
    ],
)
def test_routable_ipv4_address_is_preferred_over_ethernet(
    entries: list[tuple[int, str, int]], chosen: int
) -> None:
    found = choose_gid(LinkLayer.ETHERNET, [entry(*each) for each in entries])
    assert found is not None
    assert found.gid_index == chosen


def test_port_without_rocev2_has_no_address() -> None:
    assert choose_gid(LinkLayer.ETHERNET, [entry(0, MAPPED, ROCE_V1)]) is None
    assert choose_gid(LinkLayer.ETHERNET, []) is None


def test_first_address_is_used_on_infiniband() -> None:
    found = choose_gid(
        LinkLayer.INFINIBAND, [entry(1, "fec0::2", INFINIBAND), entry(0, "fe80::2", INFINIBAND)]
    )
    assert found is not None
    assert found.gid_index == 0


def test_machine_without_pyverbs_has_no_devices_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(verbs, "SYSTEM_PACKAGES", tmp_path)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    verbs.load_verbs.cache_clear()
    path = list(sys.path)
    try:
        devices, reasons = find_devices()
    finally:
        verbs.load_verbs.cache_clear()
    assert devices == []
    assert len(reasons) == 1
    assert "install python3-pyverbs" in reasons[0]
    assert sys.path == path


def test_pyverbs_of_the_distribution_that_cannot_be_imported_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(verbs, "SYSTEM_PACKAGES", tmp_path)
    package = tmp_path / "pyverbs"
    package.mkdir()
    suffix = verbs.importlib.machinery.EXTENSION_SUFFIXES[0]
    (package / f"device{suffix}").write_bytes(b"not a library")
    (package / "__init__.py").write_text("")
    verbs.load_verbs.cache_clear()
    path = list(sys.path)
    before = set(sys.modules)
    try:
        devices, reasons = find_devices()
    finally:
        verbs.load_verbs.cache_clear()
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert devices == []
    assert "cannot be imported" in reasons[0]
    assert sys.path == path
