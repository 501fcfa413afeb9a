"""Hosts of a cluster on this machine: network namespaces on one bridge, whose links fail when told to.

The bridge is in a namespace of its own, the hub, where clients are. Faults are rules of nftables in the hub:
what a host sends, what it gets, and what goes from one host to another can each be lost, and nobody is told.

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
    """Namespaces or rules cannot be made here; the message is the reason."""


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
        """The address as it stands in a URL."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Threads and processes that are started within are here."""
        return entered(self.network)

    def pids(self) -> set[int]:
        """Ids of all processes that are here."""
        return {int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()}


class Network:
    """All hosts by name, and the hub. A fault lasts as long as its context."""

    def __init__(self, hub: Place, hosts: dict[str, Place], nft: Callable[..., str]) -> None:
        self.hub, self.hosts, self._nft = hub, hosts, nft

    def mute(self, host: str) -> contextlib.AbstractContextManager[None]:
        """All that the host sends gets lost."""
        return self._rule("prerouting", f"iifname {_port(host)}", "drop")

    def deaf(self, host: str) -> contextlib.AbstractContextManager[None]:
        """All that is sent to the host gets lost."""
        return self._rule("postrouting", f"oifname {_port(host)}", "drop")

    def one_way(self, sender: str, receiver: str) -> contextlib.AbstractContextManager[None]:
        """What one host sends to another one gets lost."""
        return self._rule("forward", f"iifname {_port(sender)} oifname {_port(receiver)}", "drop")

    def lossy(self, host: str, percent: int) -> contextlib.AbstractContextManager[None]:
        """A part of the host's packets gets lost."""
        return self._rule("prerouting", f"iifname {_port(host)} numgen random mod 100 < {percent}", "drop")

    @contextlib.contextmanager
    def slow(self, host: str, rate: str, longest: str) -> Iterator[None]:
        """The host's packets wait for their turn at this rate; those that would wait longer get lost."""
        at = ("dev", _port(host), "root")
        shape = ("tbf", "rate", rate, "burst", "8kb", "latency", longest)
        _run("tc", "-n", self.hub.namespace, "qdisc", "add", *at, *shape)
        try:
            yield
        finally:
            _run("tc", "-n", self.hub.namespace, "qdisc", "del", *at)

    @contextlib.contextmanager
    def pod_behind(self, host: str) -> Iterator[Place]:
        """Yield a namespace that others reach at the address of this host alone.

        The host forwards to it all that comes, and what it sends seems to come from the host.
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
    """Make hosts whose addresses are `prefix` and their number, from 1 on. Raises Unavailable."""
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
    """The bridge's end of a host's link."""
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
