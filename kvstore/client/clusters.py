"""The clusters that this Unix user runs on this host, and the choice between them.

Owns: which pools belong together. Does not know: calls to pools.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mooncake.errors import ConfigError, PoolError
from mooncake.node.rundir import Run, running

UNIX = "unix:"


class Cluster(NamedTuple):
    """The runs of `mooncake-serve` on this host that have the same Conductor, by run directory."""

    runs: dict[Path, Run]

    @property
    def names(self) -> list[str]:
        """The names by which `--cluster` may name this cluster, the shortest first."""
        ports = [str(run.http_port) for run in self.runs.values() if run.http_port is not None]
        conductor_port = next(iter(self.runs.values())).cluster.rpartition(":")[2]
        ports += [conductor_port] if conductor_port.isdecimal() else []
        return [*dict.fromkeys(ports), *(text for path in self.runs for text in (str(path), path.name))]

    @property
    def pools(self) -> list[str]:
        """The addresses of this cluster's pools on this host."""
        sockets = [socket for path in self.runs for socket in path.glob("worker-*[0-9].sock")]
        return [f"{UNIX}{socket}" for socket in sorted(sockets)]

    def __str__(self) -> str:
        return f"{self.names[0]} ({', '.join(map(str, self.runs))})"


def clusters() -> list[Cluster]:
    """Return the clusters that have pools on this host."""
    by_conductor: dict[str, Cluster] = {}
    for path, run in running():
        by_conductor.setdefault(run.cluster, Cluster({})).runs[path] = run
    return [cluster for cluster in by_conductor.values() if cluster.pools]


def pools_of(name: str | None) -> list[str]:
    """Return the addresses of the pools of the cluster with this name; with None, of the only cluster.

    Raises PoolError if no cluster runs here, ConfigError if no cluster or several clusters match.
    """
    found = clusters()
    if not found:
        raise PoolError("no mooncake-serve of this user runs here; name a pool with --pool")
    told = ", ".join(map(str, found))
    meant = [cluster for cluster in found if name is None or name.rstrip("/") in cluster.names]
    if not meant:
        raise ConfigError(f"--cluster {name}: there is no such cluster; those of this user here are {told}")
    if len(meant) > 1:
        raise ConfigError(f"{len(meant)} clusters of this user run here; say which with --cluster: {told}")
    return meant[0].pools


def check_of_one_cluster(addresses: Sequence[str]) -> None:
    """Check that these pools certainly belong to one cluster. Raises ConfigError.

    Pools at tcp:// addresses belong to one cluster if the same key opens all: nodes of a cluster share a key.
    """
    local = [address for address in addresses if address.startswith(UNIX)]
    if not local or len(addresses) == 1:
        return
    sockets = _sockets(local)
    of_one = any(sockets <= _sockets(cluster.pools) for cluster in clusters())
    if len(local) < len(addresses) or not of_one:
        raise ConfigError(
            "these pools are not known to be of one cluster: drop their blocks one pool at a time"
        )


def _sockets(addresses: Iterable[str]) -> set[Path]:
    return {Path(address.removeprefix(UNIX)).resolve() for address in addresses}
