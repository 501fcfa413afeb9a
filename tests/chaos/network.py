"""Hosts of a cluster on this machine: network namespaces on one bridge, whose links can fail.

The bridge is in a namespace of its own, the hub, where clients are. Faults are rules of nftables in the hub.
Packets that a host sends, packets to a host, and packets between two hosts can each be dropped, without any
error to sender or receiver.

Owns: namespaces, links, rules. Does not know: what runs on the hosts.
"""

import contextlib
import secrets
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.debian import CannotFetchError, environment, fetch
from tests.deadline import DEADLINE_S
from tests.kvstore.forked import entered

_TABLE = "bridge chaos"
_HUB_NUMBER = 254
_INNER = "192.168.77."


class Unavailable(Exception):
    """Namespaces or rules cannot be made on this machine. The message is the reason."""


@dataclass(frozen=True)
class Place:
    """A namespace with one address."""

    name: str
    namespace: str
    address: str

    @property
    def network(self) -> Path:
        return Path("/run/netns") / self.namespace

    @property
    def bracketed(self) -> str:
        """The address in the form that URLs need."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which new threads and processes are in this namespace."""
        return entered(self.network)

    def pids(self) -> set[int]:
        """Return the ids of all processes in this namespace."""
        return {int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()}


class Network:
    """The hosts by name, and the hub. A fault lasts as long as its context."""

    def __init__(self, hub: Place, hosts: dict[str, Place], nft: Callable[..., str]) -> None:
        self.hub, self.hosts, self._nft = hub, hosts, nft

    def mute(self, host: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all packets from a host are dropped."""
        return self._rule("prerouting", f"iifname {_port(host)}", "drop")

    def deaf(self, host: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all packets to a host are dropped."""
        return self._rule("postrouting", f"oifname {_port(host)}", "drop")

    def one_way(self, sender: str, receiver: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all packets from one host to another are dropped."""
        return self._rule("forward", f"iifname {_port(sender)} oifname {_port(receiver)}", "drop")

    def lossy(self, host: str, percent: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `percent` of the packets from a host are dropped."""
        return self._rule("prerouting", f"iifname {_port(host)} numgen random mod 100 < {percent}", "drop")

    @contextlib.contextmanager
    def slow(self, host: str, rate: str, longest: str) -> Iterator[None]:
        """Make a context in which packets to a host are limited to a rate.

        `rate` and `longest` are in the form of `tc`. Packets that would wait longer than `longest` are
        dropped.
        """
        at = ("dev", _port(host), "root")
        shape = ("tbf", "rate", rate, "burst", "8kb", "latency", longest)
        _run("tc", "-n", self.hub.namespace, "qdisc", "add", *at, *shape)
        try:
            yield
        finally:
            _run("tc", "-n", self.hub.namespace, "qdisc", "del", *at)

    @contextlib.contextmanager
    def pod_behind(self, host: str) -> Iterator[Place]:
        """Yield a namespace that other hosts can reach only at the address of this host.

        The host forwards all packets to it, and its own packets get the address of the host.
        """
        router = self.hosts[host]
        pod = Place("pod", f"{router.namespace}-pod", f"{_INNER}2")
        _run("ip", "netns", "add", pod.namespace)
        try:
            ends = ("type", "veth", "peer", "name", "link0", "netns", pod.namespace)
            _ip(router, "link", "add", "inner", *ends)
            _ip(pod, "link", "set", "lo", "up")
            for place, link, address in ((router, "inner", f"{_INNER}1"), (pod, "link0", pod.address)):
                _ip(place, "link", "set", link, "up")
                _ip(place, "address", "add", f"{address}/24", "dev", link)
            _ip(pod, "route", "add", "default", "via", f"{_INNER}1")
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            _run("ip", "netns", "exec", router.namespace, "sh", "-c", forward)
            nft = _nft_in(router)
            nft("add table ip nat")
            nft("add chain ip nat prerouting { type nat hook prerouting priority -100; }")
            nft("add chain ip nat postrouting { type nat hook postrouting priority 100; }")
            nft(f"add rule ip nat prerouting ip daddr {router.address} dnat to {pod.address}")
            nft(f"add rule ip nat postrouting ip saddr {pod.address} masquerade")
            yield pod
        finally:
            _run("ip", "netns", "delete", pod.namespace)

    @contextlib.contextmanager
    def _rule(self, chain: str, *words: str) -> Iterator[None]:
        added = self._nft("--echo", "--handle", f"add rule {_TABLE} {chain} {' '.join(words)}")
        handle = added.rsplit("handle", 1)[1].strip()
        try:
            yield
        finally:
            self._nft(f"delete rule {_TABLE} {chain} handle {handle}")


@contextlib.contextmanager
def hosts(names: tuple[str, ...], prefix: str = "10.88.0.") -> Iterator[Network]:
    """Make a context with hosts. Their addresses are `prefix` and a number from 1 on. Raises Unavailable."""
    run = secrets.token_hex(3)
    numbers = {name: number for number, name in enumerate(names, 1)}
    places = {name: Place(name, f"chaos-{run}-{name}", f"{prefix}{numbers[name]}") for name in names}
    hub = Place("hub", f"chaos-{run}-hub", f"{prefix}{_HUB_NUMBER}")
    with contextlib.ExitStack() as made:
        try:
            nft = _nft_in(hub)
            for place in (hub, *places.values()):
                _run("ip", "netns", "add", place.namespace)
                made.callback(_run, "ip", "netns", "delete", place.namespace)  # and with it its ends of links
                _ip(place, "link", "set", "lo", "up")
            _ip(hub, "link", "add", "bridge", "type", "bridge")
            for place in places.values():
                ends = (
                    "netns",
                    place.namespace,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    _port(place.name),
                    "netns",
                    hub.namespace,
                )
                _run("ip", "link", "add", "link0", *ends)
                _ip(hub, "link", "set", _port(place.name), "master", "bridge")
                _ip(hub, "link", "set", _port(place.name), "up")
                _address(place, "link0")
            _address(hub, "bridge")
            nft(f"add table {_TABLE}")
            for chain in ("prerouting", "forward", "postrouting"):
                nft(f"add chain {_TABLE} {chain} {{ type filter hook {chain} priority 0; }}")
        except (OSError, subprocess.CalledProcessError, CannotFetchError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            raise Unavailable(f"no hosts on a bridge here: {reason.strip()}") from None
        yield Network(hub, places, nft)


def _port(host: str) -> str:
    """Return the name of the bridge's end of a host's link."""
    return f"to-{host}"


def _address(place: Place, link: str) -> None:
    _ip(place, "link", "set", link, "up")
    mask = "64" if ":" in place.address else "24"
    flags = ("nodad",) if ":" in place.address else ()
    _ip(place, "address", "add", f"{place.address}/{mask}", "dev", link, *flags)


def _nft_in(place: Place) -> Callable[..., str]:
    program = fetch("nftables") / "usr/sbin/nft"
    libraries = environment("nftables")

    def nft(*words: str) -> str:
        return _run("ip", "netns", "exec", place.namespace, str(program), *words, environ=libraries)

    return nft


def _ip(place: Place, *words: str) -> None:
    _run("ip", "-n", place.namespace, *words)


def _run(*command: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=environ
    )
    return done.stdout
