"""Small trees of sysfs, procfs and /dev, as the kernel would show them on other machines."""

from collections.abc import Sequence
from pathlib import Path

ROCE_V2 = "RoCE v2"


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def add_nodes(root: Path, *nodes: int) -> None:
    for node in nodes:
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)


def add_pci(
    root: Path, path: Sequence[str], node: int, vendor: str = "0x15b3", kind: str = "0x020000"
) -> Path:
    """Add a PCI device below the bridges that `path` names first."""
    device = root / "sys/devices" / f"pci{path[0][:7]}" / "/".join(path)
    device.mkdir(parents=True)
    for name, value in (("numa_node", node), ("vendor", vendor), ("class", kind)):
        write(device, name, value)
    link = root / "sys/bus/pci/devices" / path[-1]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)
    return device


def add_gpu(root: Path, path: Sequence[str], node: int) -> None:
    add_pci(root, path, node, vendor="0x10de", kind="0x030200")


def add_rdma(
    root: Path,
    name: str,
    path: Sequence[str] = (),
    node: int = -1,
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    gids: Sequence[tuple[str, str]] = (),
    netdev: str | None = None,
) -> None:
    """Add an RDMA device with one port. Without `path` it is a virtual device.

    `gids` are pairs of value and type.
    """
    folder = root / "sys/class/infiniband" / name
    port = folder / "ports/1"
    for file, text in (("state", state), ("link_layer", link_layer), ("rate", "100 Gb/sec (4X EDR)")):
        write(port, file, text)
    for index, (gid, kind) in enumerate(gids):
        write(port, f"gids/{index}", gid)
        write(port, f"gid_attrs/types/{index}", kind)
        if netdev is not None:
            write(port, f"gid_attrs/ndevs/{index}", netdev)
    if path:
        (folder / "device").symlink_to(add_pci(root, path, node))


def add_interface(
    root: Path,
    name: str,
    device: Path | None = None,
    *,
    state: str = "up",
    speed: int = 25_000,
    mtu: int = 1500,
    kind: int = 1,
) -> Path:
    folder = root / "sys/class/net" / name
    for file, value in (("operstate", state), ("speed", speed), ("mtu", mtu), ("type", kind)):
        write(folder, file, value)
    if device is not None:
        (folder / "device").symlink_to(device)
    return folder
