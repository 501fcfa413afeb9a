"""Two hosts on this machine: network namespaces with two links between them, and messengers in them."""

import contextlib
import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mooncake.config.sections import MessengerConfig
from tests.deadline import DEADLINE_S
from tests.kvstore.forked import entered
from tests.kvstore.nodes import SEGMENT_PAGE_BYTES, Node

LINKS = ("link0", "link1")


class Unavailable(Exception):
    """Namespaces cannot be made on this machine. The message is the reason."""


class Host:
    """A host: a namespace with one end of each link."""

    def __init__(self, namespace: str, number: int) -> None:
        self.namespace = namespace
        self.network = Path("/run/netns") / namespace
        self.addresses = [f"10.77.{link}.{number}" for link in range(len(LINKS))]

    def set_link(self, link: str, *, up: bool) -> None:
        """Cut a link so that the kernel of this host notices it, or restore it."""
        _ip("-n", self.namespace, "link", "set", link, "up" if up else "down")

    def set_silent(self, link: str, *, silent: bool) -> None:
        """Drop all packets that leave over `link`, without any error, or stop that. Raises Unavailable."""
        change = ["add", "root", "blackhole"] if silent else ["del", "root"]
        command = ["tc", "-n", self.namespace, "qdisc", change[0], "dev", link, *change[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise Unavailable(f"tc cannot make a link silent: {done.stderr.strip()}")

    def sent_bytes(self) -> dict[str, int]:
        """Return the bytes that have left over each link."""
        shown = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show"))
        return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in shown if link["ifname"] in LINKS}

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which new processes are on this host."""
        return entered(self.network)


class HostNode(Node):
    """A messenger on a host, with all of the host's addresses."""

    def __init__(self, folder: Path, name: str, num_pages: int, host: Host) -> None:
        super().__init__(folder, name, num_pages * SEGMENT_PAGE_BYTES + 3 * 4096, "tcp")
        self.host = host
        self.network = host.network

    @property
    def settings(self) -> MessengerConfig:
        return MessengerConfig(transport=self.transport, hosts=self.host.addresses)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make a context with two hosts, which are removed at the end. Raises Unavailable."""
    run = secrets.token_hex(4)
    hosts = Host(f"mooncake-{run}-a", 1), Host(f"mooncake-{run}-b", 2)
    with contextlib.ExitStack() as made:
        try:
            for host in hosts:
                _ip("netns", "add", host.namespace)
                made.callback(_ip, "netns", "delete", host.namespace)  # and with it its ends of the links
                _ip("-n", host.namespace, "link", "set", "lo", "up")
            for link in LINKS:
                ends = [("netns", host.namespace) for host in hosts]
                _ip("link", "add", link, *ends[0], "type", "veth", "peer", "name", link, *ends[1])
            for host in hosts:
                for link, address in zip(LINKS, host.addresses, strict=True):
                    _ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", link)
                    host.set_link(link, up=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            raise Unavailable(f"no network namespaces with links here: {reason.strip()}") from None
        yield hosts


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout
