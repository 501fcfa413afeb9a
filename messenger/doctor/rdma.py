"""Checks of RDMA: devices, access to them, ports and their addresses, MTU, the limit on locked memory.

A machine without RDMA devices gets one line. A failed check is an error only if `messenger.transport` demands
RDMA; else transfers use TCP.

Owns: these checks. Does not know: verbs (callers pass a function that returns the ports that the transport
finds).
"""

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from messenger.doctor.findings import Finding, Level, as_size
from messenger.doctor.machine import Machine
from mooncake.config.settings import Config
from mooncake.errors import MooncakeError

DEVICES = "sys/class/infiniband"
CONTAINER_FLAGS = "--network host --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1"
_MELLANOX = "0x15b3"
_ROCE_V2 = "RoCE v2"
_ROCE_HEADER_BYTES = 96
"""Bytes of the largest headers.

Drivers choose RoCE's MTU so that headers fit into the interface's MTU too.
"""
_ROCE_MTUS = (4096, 2048, 1024, 512, 256)
_WANTED_INTERFACE_MTU = 4200
"""Bytes of an interface's MTU that leave room for 4,096 bytes of payload and RoCE's headers."""


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device, as sysfs shows it."""

    device: str
    number: str
    state: str
    link_layer: str
    rate: str
    addresses: tuple[tuple[int, ipaddress.IPv6Address], ...]
    """RoCEv2 GIDs with their indices; for InfiniBand all GIDs."""
    interface: str | None

    def __str__(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def is_active(self) -> bool:
        return "ACTIVE" in self.state

    @property
    def is_ethernet(self) -> bool:
        return self.link_layer == "Ethernet"

    @property
    def best_address(self) -> tuple[int, ipaddress.IPv6Address] | None:
        """The preferred address; None without an address.

        IPv4 addresses come before IPv6 addresses, and in each family link-local addresses come last.
        """
        return min(
            self.addresses,
            key=lambda entry: (entry[1].ipv4_mapped is None, entry[1].is_link_local, entry[0]),
            default=None,
        )


def devices(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about RDMA devices, and about the kernel's interface to them."""
    names = machine.names(DEVICES)
    modules = [name for name in ("ib_uverbs", "mlx5_ib", "rdma_rxe") if machine.exists(f"sys/module/{name}")]
    cards = [
        address
        for address in machine.names("sys/bus/pci/devices")
        if machine.read(f"sys/bus/pci/devices/{address}/vendor") == _MELLANOX
        and (machine.read(f"sys/bus/pci/devices/{address}/class") or "").startswith("0x02")
    ]
    if names and (machine.exists("sys/class/infiniband_verbs") or "ib_uverbs" in modules):
        yield Finding(Level.OK, "rdma", f"devices: {', '.join(names)}")
    elif names:
        found = f"devices: {', '.join(names)}, but the module ib_uverbs is not loaded"
        yield Finding(_level(config), "rdma", found, "as root on the host: modprobe ib_uverbs")
    elif cards:
        found = (
            f"{len(cards)} NVIDIA/Mellanox cards, but no RDMA device; modules: {', '.join(modules) or 'none'}"
        )
        advice = "as root on the host: modprobe mlx5_ib ib_uverbs (package rdma-core)"
        yield Finding(_level(config), "rdma", found, advice)
    elif _is_wanted(config):
        found = "messenger.transport is rdma, and this machine has no RDMA device"
        yield Finding(Level.FAIL, "rdma", found, "set messenger.transport to auto or tcp")
    else:
        yield Finding(Level.OK, "rdma", "no RDMA device here: transfers to other hosts use TCP")


def access(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about the files in /dev/infiniband, through which programs use devices."""
    missing, closed = [], []
    for node in machine.names("sys/class/infiniband_verbs"):
        device = machine.read(f"sys/class/infiniband_verbs/{node}/ibdev")
        if device is None:
            continue  # abi_version and the like
        path = f"dev/infiniband/{node}"
        if not machine.exists(path):
            missing.append(f"/{path} ({device})")
        elif not machine.is_usable(path):
            closed.append(f"/{path} ({device})")
    if missing:
        advice = (
            f"start the container with {CONTAINER_FLAGS}"
            if machine.is_container
            else "as root: modprobe ib_uverbs; udev makes these files"
        )
        yield Finding(_level(config), "rdma access", f"there is no {', '.join(missing)}", advice)
    if closed:
        advice = "add the user to the group of these files (often rdma), or chmod 666 them by a udev rule"
        yield Finding(_level(config), "rdma access", f"this user may not open {', '.join(closed)}", advice)
    if machine.names(DEVICES) and not missing and not closed:
        yield Finding(Level.OK, "rdma access", "this user may open all devices")


def verbs(
    machine: Machine, config: Config, find: Callable[[], tuple[list[str], list[str]]]
) -> Iterator[Finding]:
    """Yield findings about the ports that the transport itself can use.

    `find` returns the descriptions of these ports, and the reasons why other ports cannot be used.
    """
    if not machine.names(DEVICES):
        return
    try:
        usable, reasons = find()
    except (MooncakeError, ImportError) as error:
        usable, reasons = [], [str(error)]
    if usable:
        rest = f"; not usable: {'; '.join(reasons)}" if reasons else ""
        yield Finding(Level.OK, "rdma verbs", f"the messenger can use {', '.join(usable)}{rest}")
    else:
        advice = "install rdma-core and python3-pyverbs, for the Python version of the distribution"
        found = f"the messenger can use no device: {'; '.join(reasons) or 'no reason given'}"
        yield Finding(_level(config), "rdma verbs", found, advice)


def ports(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about the state and addresses of ports.

    One good port is enough, as other ports may have no cable on purpose.
    """
    found = read_ports(machine)
    if not found:
        return
    described = [(port, _trouble(port)) for port in found]
    text = "; ".join(trouble[0] if trouble else _describe(port) for port, trouble in described)
    if any(trouble is None for _, trouble in described):
        yield Finding(Level.OK, "rdma ports", text)
    else:
        advice = next(trouble[1] for _, trouble in described if trouble is not None)
        yield Finding(_level(config), "rdma ports", text, advice)


def mtu(machine: Machine) -> Iterator[Finding]:
    """Yield findings about RoCE packets: whether the interface's MTU allows 4096 bytes, RDMA's maximum."""
    small: list[tuple[str, str]] = []
    large: list[tuple[str, str]] = []
    for port in read_ports(machine):
        if not port.is_active or not port.is_ethernet or port.interface is None:
            continue
        interface_mtu = machine.read(f"sys/class/net/{port.interface}/mtu") or ""
        if not interface_mtu.isdecimal():
            continue
        roce_mtu = next((size for size in _ROCE_MTUS if size + _ROCE_HEADER_BYTES <= int(interface_mtu)), 0)
        text = f"{port} {roce_mtu} bytes ({port.interface} has {interface_mtu})"
        (large if roce_mtu == _ROCE_MTUS[0] else small).append((port.interface, text))
    if small:
        interface, _ = small[0]
        command = f"ip link set {interface} mtu {_WANTED_INTERFACE_MTU}"
        advice = f"{command} (or 9000), on every host and switch of this network"
        yield Finding(Level.WARN, "rdma mtu", "; ".join(text for _, text in small + large), advice)
    elif large:
        yield Finding(Level.OK, "rdma mtu", "; ".join(text for _, text in large))


def locked_memory(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about locked memory, which a messenger needs to register its pool.

    Yields nothing without RDMA devices.
    """
    if not machine.names(DEVICES):
        return
    limit = machine.limit("Max locked memory")
    needed = int(config.kvcache.pool_bytes)
    if machine.may_lock_all_memory:
        yield Finding(Level.OK, "memlock", "any amount may be locked (CAP_IPC_LOCK)")
    elif limit is None:
        yield Finding(Level.OK, "memlock", "any amount may be locked")
    elif limit >= needed:
        yield Finding(Level.OK, "memlock", f"{as_size(limit)} may be locked, a pool needs {as_size(needed)}")
    else:
        found = f"{as_size(limit)} may be locked, but registering a pool locks {as_size(needed)}"
        advice = (
            "start the container with --ulimit memlock=-1 --cap-add IPC_LOCK"
            if machine.is_container
            else "ulimit -l unlimited; for good: LimitMEMLOCK=infinity (systemd) or memlock in limits.conf"
        )
        yield Finding(_level(config), "memlock", found, advice)


def read_ports(machine: Machine) -> list[Port]:
    """Return all ports of all devices."""
    found = []
    for device in machine.names(DEVICES):
        for number in machine.names(f"{DEVICES}/{device}/ports"):
            folder = f"{DEVICES}/{device}/ports/{number}"
            link_layer = machine.read(f"{folder}/link_layer") or "?"
            gids = _gids(machine, folder, only_roce_v2=link_layer == "Ethernet")
            interfaces = [machine.read(f"{folder}/gid_attrs/ndevs/{index}") for index, _ in gids]
            found.append(
                Port(
                    device=device,
                    number=number,
                    state=machine.read(f"{folder}/state") or "?",
                    link_layer=link_layer,
                    rate=machine.read(f"{folder}/rate") or "?",
                    addresses=gids,
                    interface=next((name for name in interfaces if name), None)
                    or next(iter(machine.names(f"{DEVICES}/{device}/device/net")), None),
                )
            )
    return found


def _gids(
    machine: Machine, folder: str, *, only_roce_v2: bool
) -> tuple[tuple[int, ipaddress.IPv6Address], ...]:
    """Return the indices and values of a port's GIDs, without empty GIDs."""
    found = []
    for index in sorted(map(int, filter(str.isdecimal, machine.names(f"{folder}/gids")))):
        value = ipaddress.IPv6Address(machine.read(f"{folder}/gids/{index}") or "::")
        if not int(value) or (only_roce_v2 and machine.read(f"{folder}/gid_attrs/types/{index}") != _ROCE_V2):
            continue
        found.append((index, value))
    return tuple(found)


def _describe(port: Port) -> str:
    best = port.best_address
    address = f", address {best[1].ipv4_mapped or best[1]} at GID index {best[0]}" if best is not None else ""
    return f"{port} {port.link_layer} {port.rate.partition(' (')[0]}{address}"


def _trouble(port: Port) -> tuple[str, str] | None:
    """Return the fault of a port and its remedy; None without a fault."""
    if not port.is_active and port.link_layer == "InfiniBand" and "INIT" in port.state:
        return f"{port} waits for a subnet manager", "start opensm on one host, or the switch's manager"
    if not port.is_active:
        up = f"ip link set {port.interface} up" if port.interface else "bring its interface up"
        return f"{port} is {port.state.partition(': ')[2] or port.state}", f"plug the cable in; {up}"
    if not port.is_ethernet:
        return None
    best = port.best_address
    give = f"ip addr add ADDRESS/PREFIX dev {port.interface or 'INTERFACE'}; in a container: --network host"
    if best is None:
        return f"{port} has no RoCEv2 address", f"give its interface an IPv4 address: {give}"
    if best[1].is_link_local:
        return f"{port} has only the link-local RoCEv2 address", f"give its interface an IPv4 address: {give}"
    return None


def _is_wanted(config: Config) -> bool:
    return str(config.messenger.transport) == "rdma"


def _level(config: Config) -> Level:
    return Level.FAIL if _is_wanted(config) else Level.WARN
