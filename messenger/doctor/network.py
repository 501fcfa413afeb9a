"""Checks of the network on this side: addresses and ports of the configuration, TCP's buffers.

Owns: these checks. Does not know: peers.
"""

import ipaddress
from collections.abc import Iterator
from typing import NamedTuple

from messenger.doctor.findings import Finding, Level, as_size
from messenger.doctor.machine import Machine
from messenger.rdma.topology import NicKind, find_nics
from mooncake.config.settings import Config
from mooncake.node.listeners import ListenAddress, listen_addresses

OUR_MODULES = (
    "conductor.process.service",
    "conductor.front.process.service",
    "kvstore.server.service",
    "workers.process.service",
)
_LISTEN = "0A"
_WANTED_BUFFER_BYTES = 4 << 20
"""Bytes of a TCP buffer that suffices for 10 Gbit/s with a round-trip time of 3 ms."""
_LOWEST_USER_PORT = 1024


class Listener(NamedTuple):
    """A listening socket of this machine."""

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    inode: int


def interfaces(machine: Machine) -> Iterator[Finding]:
    """Yield the interfaces that can carry transfers over TCP."""
    texts = []
    for nic in find_nics(NicKind.ETHERNET, machine.root / "sys"):
        speed = f"{nic.speed_mbps / 1000:g} Gbit/s" if nic.speed_mbps is not None else "speed unknown"
        texts.append(
            f"{nic.name} ({speed}, MTU {machine.read(f'sys/class/net/{nic.name}/mtu') or 'unknown'})"
        )
    if texts:
        yield Finding(Level.OK, "interfaces", ", ".join(texts))
    else:
        yield Finding(
            Level.WARN, "interfaces", "none but loopback is up", "other hosts cannot reach this one"
        )


def addresses(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about the addresses in messenger.hosts and messenger.listen_hosts.

    Other nodes must be able to use messenger.hosts, and this machine must have the addresses at which it
    listens.
    """
    if not config.has_pool:
        return
    good = []
    for host in config.messenger.hosts:
        trouble = _trouble(machine, host, is_alone=config.is_alone, is_own=not config.messenger.listen_hosts)
        if trouble is None:
            good.append(host)
        else:
            level, found = trouble
            advice = "name addresses at which the other nodes reach this one (ip addr lists this machine's)"
            yield Finding(level, "addresses", f"messenger.hosts: {host} {found}", advice)
    for host in config.messenger.listen_hosts:
        if not machine.has_address(host):
            found = f"messenger.listen_hosts: {host} is no address of this machine"
            yield Finding(Level.FAIL, "addresses", found, "name addresses of this machine, or 0.0.0.0 or ::")
    if good:
        whose = "told to other nodes" if config.messenger.listen_hosts else "of this machine"
        yield Finding(Level.OK, "addresses", f"messenger.hosts: {', '.join(good)} {whose}")


def ports(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about the configured ports: whether they are free, or which process has them."""
    wanted = listen_addresses(config)
    if not wanted:
        return
    listeners, texts, taken, closed = _listeners(machine), [], [], []
    for place in wanted:
        text = f"{place.host}:{place.port} ({place.key})"
        rival = next((listener for listener in listeners if _meet(place, listener)), None)
        owner = machine.owner_of_socket(rival.inode) if rival is not None else None
        if rival is None and place.port < _lowest_port(machine) and not machine.may_use_low_ports:
            closed.append(text)
        elif rival is None:
            texts.append(f"{text} is free")
        elif owner is not None and owner.name in OUR_MODULES:
            texts.append(f"{text} is served by {owner.name}, process {owner.pid}")
        else:
            who = (
                f"{owner.name}, process {owner.pid}"
                if owner is not None
                else "a process that cannot be seen from here"
            )
            taken.append(f"{text} belongs to {who}")
    if taken:
        yield Finding(Level.FAIL, "ports", "; ".join(taken), "end that process, or configure another port")
    if closed:
        found = f"{', '.join(closed)}: below {_lowest_port(machine)}, for root only"
        yield Finding(Level.FAIL, "ports", found, "configure a higher port")
    if texts:
        yield Finding(Level.OK, "ports", ", ".join(texts))


def tcp_buffers(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the kernel's limit of TCP buffers: a buffer must hold bandwidth times latency."""
    sizes = {}
    for name in ("tcp_rmem", "tcp_wmem"):
        words = (machine.read(f"proc/sys/net/ipv4/{name}") or "").split()
        if len(words) != 3 or not words[2].isdecimal():
            return
        sizes[name] = int(words[2])
    found = f"grow to {as_size(sizes['tcp_rmem'])} for receiving, {as_size(sizes['tcp_wmem'])} for sending"
    small = [name for name, size_bytes in sizes.items() if size_bytes < _WANTED_BUFFER_BYTES]
    if small:
        advice = "; ".join(f"sysctl -w net.ipv4.{name}='4096 131072 33554432'" for name in small)
        yield Finding(Level.WARN, "tcp buffers", found, f"as root: {advice}")
    else:
        yield Finding(Level.OK, "tcp buffers", found)


def _trouble(machine: Machine, host: str, *, is_alone: bool, is_own: bool) -> tuple[Level, str] | None:
    """Return why other nodes cannot use an address; None if other nodes can use it.

    `is_own`: whether the address has to be an address of this machine. If `is_alone`, there are no other
    nodes, and a loopback address is no fault.
    """
    try:
        found = machine.resolve(host)
    except OSError as error:
        return Level.FAIL, f"is no name that resolves ({error.strerror})"
    # If a name has IPv4 addresses, only these are used.
    found = [address for address in found if ":" not in address] or found
    foreign = [one for one in found if not machine.has_address(one)]
    if foreign and is_own:
        which = "" if foreign == [host] else f" ({', '.join(foreign)})"
        return Level.FAIL, f"is no address of this machine{which}"
    if not is_alone and any(ipaddress.ip_address(one).is_loopback for one in found):
        return Level.WARN, "can be reached from this machine only"
    return None


def _listeners(machine: Machine) -> list[Listener]:
    found = []
    for table in ("tcp", "tcp6"):
        for line in (machine.read(f"proc/net/{table}") or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            host, _, port = fields[1].partition(":")
            found.append(Listener(_as_address(bytes.fromhex(host)), int(port, 16), int(fields[9])))
    return found


def _as_address(raw: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IP address that the kernel shows as the bytes `raw`.

    `raw` has 32-bit words in the processor's byte order.
    """
    words = [raw[start : start + 4][::-1] for start in range(0, len(raw), 4)]
    return ipaddress.ip_address(b"".join(words))


def _meet(place: ListenAddress, listener: Listener) -> bool:
    """Return whether a listening socket has a configured address. A host name counts as any address."""
    if place.port != listener.port:
        return False
    try:
        address = ipaddress.ip_address(place.host)
    except ValueError:
        return True
    return address.is_unspecified or listener.address.is_unspecified or address == listener.address


def _lowest_port(machine: Machine) -> int:
    told = machine.read("proc/sys/net/ipv4/ip_unprivileged_port_start") or ""
    return int(told) if told.isdecimal() else _LOWEST_USER_PORT
