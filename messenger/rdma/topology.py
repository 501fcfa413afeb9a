"""The NICs for each memory location: a matrix of preferred and secondary NICs, read from sysfs.

    {"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": [["mlx5_1"], ["mlx5_0"]]}

`cpu:N` is the memory of NUMA node N, `cuda:N` the memory of a GPU. The first list has the nearest NICs: for a
GPU the NICs behind the same PCIe switch or root port, else the NICs of its NUMA node; for a node its own
NICs. If no NIC is near, or the firmware does not tell nodes, all NICs count as equally near and are
preferred.

Owns: distances, the matrix, its form as JSON. Does not know: connections, which NIC has failed.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from mooncake.errors import ConfigError

SYS_ROOT = Path("/sys")
NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_LOCATION = re.compile(r"(cpu|cuda):(0|[1-9]\d*)")
_PCI_ADDRESS = re.compile(r"([0-9a-f]{4,}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_LOOPBACK = "772"  # ARPHRD_LOOPBACK
_FORM = '{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}: preferred, then secondary NICs of each location'


class NicKind(Enum):
    """The kinds of NICs of a topology matrix. The value is the name of their folder in sysfs."""

    RDMA = "infiniband"
    ETHERNET = "net"


class Choice(NamedTuple):
    """The NICs of one location, the nearest first."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC that could carry transfers now."""

    name: str
    numa_node: int | None
    pci_path: tuple[str, ...]
    """The PCI addresses from the root port down to the device; empty for a virtual device."""
    speed_mbps: int | None
    """The speed of an Ethernet interface in Mbit/s; None if the driver does not tell."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU; `cuda:N` is the N-th in the order of PCI addresses."""

    pci_path: tuple[str, ...]
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Topology:
    """The matrix of NICs by location. Invariant: no NIC is twice in one location."""

    matrix: Mapping[str, Choice]

    @classmethod
    def discover(
        cls,
        sys_root: Path = SYS_ROOT,
        environ: Mapping[str, str] | None = None,
        kind: NicKind = NicKind.RDMA,
    ) -> "Topology":
        """Return the matrix of this machine. Without NICs all lists of the matrix are empty.

        CUDA_VISIBLE_DEVICES in `environ` counts if it is numeric. Ethernet interfaces that are much slower
        than the fastest one are secondary, wherever they are.
        """
        nics = find_nics(kind, sys_root)
        fastest_mbps = max((nic.speed_mbps or 0 for nic in nics), default=0)
        slow = {nic.name for nic in nics if nic.speed_mbps is not None and 2 * nic.speed_mbps < fastest_mbps}
        gpus = _visible(find_gpus(sys_root), (environ or {}).get("CUDA_VISIBLE_DEVICES"))
        of_nodes = {f"cpu:{node}": _choose(nics, slow, (), node) for node in _numa_nodes(sys_root)}
        of_gpus = {
            f"cuda:{index}": _choose(nics, slow, gpu.pci_path, gpu.numa_node)
            for index, gpu in enumerate(gpus)
        }
        return cls(of_nodes | of_gpus)

    @classmethod
    def parse(cls, text: str, sys_root: Path = SYS_ROOT, kind: NicKind = NicKind.RDMA) -> "Topology":
        """Return a configured matrix. Raises ConfigError, which names the fault of the text.

        Locations that this machine lacks are allowed, so that equal nodes can share a text. NICs that this
        machine lacks are not allowed.
        """
        try:
            content = json.loads(text, object_pairs_hook=_without_repetition)
        except json.JSONDecodeError as error:
            raise ConfigError(f"messenger.topology: no valid JSON ({error}); expected {_FORM}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"messenger.topology: expected {_FORM}; found {type(content).__name__}")
        existing = _names(sys_root / "class" / kind.value)
        return cls({name: _parse_choice(name, value, existing) for name, value in content.items()})

    def nics(self, location: str) -> Choice:
        """Return the preferred and the secondary NICs of `location`.

        For a location that the matrix does not name, all NICs are secondary.
        """
        if location in self.matrix:
            return self.matrix[location]
        return Choice(
            (), tuple(dict.fromkeys(nic for choice in self.matrix.values() for nic in _all(choice)))
        )

    def order(self, location: str, failed: Set[str] = frozenset()) -> list[str]:
        """Return the NICs to try for `location`, the best first, without failed NICs."""
        return [nic for nic in _all(self.nics(location)) if nic not in failed]


def find_nics(kind: NicKind, sys_root: Path = SYS_ROOT) -> list[Nic]:
    """Return the NICs that could carry transfers now, by name.

    RDMA devices need an active port. Ethernet interfaces must be up. Loopback is left out, and so is each
    member of a bond or bridge: the bond or bridge stands for its members.
    """
    folder = sys_root / "class" / kind.value
    is_usable = _has_active_port if kind is NicKind.RDMA else _is_usable_interface
    return [_nic(folder / name) for name in _names(folder) if is_usable(folder / name)]


def find_gpus(sys_root: Path = SYS_ROOT) -> list[Gpu]:
    """Return all NVIDIA GPUs, in the order of their PCI addresses.

    CUDA counts in this order if all GPUs are of one model, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    folder = sys_root / "bus" / "pci" / "devices"
    gpus = [
        Gpu(_pci_path(folder / name), _numa_node(folder / name))
        for name in _names(folder)
        if read_line(folder / name / "vendor") == NVIDIA
        and (read_line(folder / name / "class") or "").startswith(_GPU_CLASSES)
    ]
    return sorted(gpus, key=lambda gpu: _as_numbers(gpu.pci_path[-1]))


def read_line(path: Path) -> str | None:
    """Return the stripped text of a file of sysfs or procfs; None if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# -- the matrix -------------------------------------------------------------------------------------


def _choose(nics: Iterable[Nic], slow: Set[str], pci_path: Sequence[str], node: int | None) -> Choice:
    """Return the NICs, nearest first.

    `slow` NICs are last. Among equals, NICs that share more switches with `pci_path` come first. If these are
    equal too, NICs of NUMA node `node` come first.
    """

    def distance(nic: Nic) -> tuple[bool, int, bool]:
        return nic.name in slow, -_num_shared(pci_path, nic.pci_path), node is None or nic.numa_node != node

    by_distance = sorted(nics, key=lambda nic: (distance(nic), nic.name))
    num_preferred = sum(distance(nic) == distance(by_distance[0]) for nic in by_distance)
    names = tuple(nic.name for nic in by_distance)
    return Choice(names[:num_preferred], names[num_preferred:])


def _num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the number of root ports and switches above both devices."""
    num_shared = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        num_shared += 1
    return num_shared


def _visible(gpus: Sequence[Gpu], listed: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA may use.

    `listed` is the value of CUDA_VISIBLE_DEVICES; None means all GPUs. Indices after the first invalid one do
    not count. A list with anything but numbers, such as UUIDs, cannot be resolved here, and means all GPUs.
    """
    if listed is None or not re.fullmatch(r"\s*(-?\d+\s*(,\s*-?\d+\s*)*)?", listed):
        return list(gpus)
    visible: list[Gpu] = []
    for index in map(int, filter(str.strip, listed.split(","))):
        if not 0 <= index < len(gpus):
            break
        visible.append(gpus[index])
    return visible


def _all(choice: Choice) -> tuple[str, ...]:
    return choice.preferred + choice.secondary


def _parse_choice(location: str, value: object, existing: Sequence[str]) -> Choice:
    if not _LOCATION.fullmatch(location):
        raise ConfigError(f"messenger.topology: {location!r} is no memory location; expected cpu:N or cuda:N")
    if not isinstance(value, list) or len(value) != 2 or not all(_is_list_of_names(part) for part in value):
        raise ConfigError(f"messenger.topology: {location} has {json.dumps(value)}; expected {_FORM}")
    choice = Choice(tuple(value[0]), tuple(value[1]))
    names = _all(choice)
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"messenger.topology: {location} names {name} twice; name each NIC once")
        if name not in existing:
            raise ConfigError(
                f"messenger.topology: {location} names {name}, which this machine does not have;"
                f" it has {', '.join(existing) or 'none'}"
            )
    return choice


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"messenger.topology: {twice} is given twice; give each location once")
    return content


# -- sysfs ------------------------------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []


def _nic(folder: Path) -> Nic:
    speed = read_line(folder / "speed")  # -1 or an error where it is not known
    is_known = speed is not None and speed.isdecimal() and int(speed) > 0
    device = folder / "device"
    return Nic(
        folder.name,
        _numa_node(device),
        _pci_path(device),
        int(speed) if speed is not None and is_known else None,
    )


def _numa_node(device: Path) -> int | None:
    """Return the NUMA node of a device; None if unknown.

    If the device has no node (a virtio device), the node is that of the nearest device above it.
    """
    place = device.resolve()
    told = (read_line(folder / "numa_node") for folder in (place, *place.parents))
    node = next((line for line in told if line is not None), None)
    return int(node) if node is not None and node.isdecimal() else None


def _pci_path(device: Path) -> tuple[str, ...]:
    if not device.exists():
        return ()
    return tuple(part for part in device.resolve().parts if _PCI_ADDRESS.fullmatch(part))


def _as_numbers(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def _numa_nodes(sys_root: Path) -> list[int]:
    names = _names(sys_root / "devices" / "system" / "node")
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name)) or [0]


def _has_active_port(device: Path) -> bool:
    states = [read_line(device / "ports" / port / "state") for port in _names(device / "ports")]
    return not states or any(state is None or "ACTIVE" in state for state in states)


def _is_usable_interface(interface: Path) -> bool:
    """Return whether an Ethernet interface can carry transfers.

    The interface must be up, and must not be loopback or a member of a bond or bridge. The state "unknown",
    which a virtual interface may report, counts as up.
    """
    return (
        read_line(interface / "type") != _LOOPBACK
        and read_line(interface / "operstate") in ("up", "unknown")
        and not (interface / "master").exists()
    )
