"""The TCP ports at which the processes of a node listen, and whether they are free.

Owns: which ports follow from a configuration. Does not know: which process listens there, and with what.
"""

import errno
import socket
from collections.abc import Iterator
from typing import NamedTuple

from mooncake.config.settings import Config, env_name, flag_name, host_and_port
from mooncake.errors import ConfigError
from mooncake.messages.workers import Role

_ANY_PORT = "*"


class ListenAddress(NamedTuple):
    """An address at which a process listens, and its configuration key."""

    key: str
    host: str
    port: int


class Part(NamedTuple):
    """An instance, or one of its stages or ranks: a messenger, with a worker unless the role is `pool`."""

    stage: int
    leads: bool
    """Whether the part is the instance's first stage and rank."""


def parts_of(config: Config) -> list[Part]:
    """Return the parts that run on this node, in the order in which their ports are numbered."""
    pipeline = config.pipeline
    if config.role == "pool":
        return [Part(0, leads=False)] * config.worker.tensor_parallel
    return [
        Part(stage, leads=stage == 0 and rank == 0)
        for role, count in config.num_instances.items()
        for _ in range(count)
        for stage in _stages(role, pipeline.stages, pipeline.stage)
        for rank in range(config.worker.tensor_parallel)
    ]


def _stages(role: Role, num_stages: int, only: int | None) -> range | list[int]:
    if only is not None:
        return [only]
    return range(num_stages if role is Role.PREFILL else 1)


def listen_addresses(config: Config) -> list[ListenAddress]:
    """Return the listening addresses whose ports are known before anything runs."""
    wanted = [*_of_front(config), *_of_conductor(config), *_of_parts(config, parts_of(config))]
    return [address for address in wanted if address.port]


def check_free(wanted: list[ListenAddress]) -> None:
    """Check that all ports are free and distinct.

    Raises ConfigError for the first port that is in use, is named twice, or cannot be bound.
    """
    keys: dict[tuple[str, int], str] = {}
    for key, host, port in wanted:
        if (rival := keys.setdefault((host, port), key)) != key:
            raise ConfigError(f"{key}: port {port} on {host} is {rival}'s too; choose another")
        try:
            _bind(host, port)
        except socket.gaierror as error:
            raise ConfigError(f"{key}: cannot listen on {host}: {error.strerror}") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                path = tuple(key.split("."))
                raise ConfigError(
                    f"port {port} on {host} is in use; choose another with {flag_name(path)} or"
                    f" {env_name(path)}"
                ) from None
            raise ConfigError(f"{key}: cannot listen on port {port} of {host}: {error.strerror}") from None


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _of_front(config: Config) -> Iterator[ListenAddress]:
    if not config.has_api:
        return
    yield ListenAddress("http.port", config.http.host, config.http.port)
    if config.http.admin_listen is not None:
        yield ListenAddress("http.admin_listen", *host_and_port(config.http.admin_listen))


def _of_conductor(config: Config) -> Iterator[ListenAddress]:
    bound = {"conductor": ("", "reply_"), "front": ("reply_",)}
    for kind in bound.get(config.role, ()):
        own = f"{kind}listen_endpoint"
        if getattr(config.conductor, own) is None:
            own = f"{kind}endpoint"
        yield from _of_endpoint(f"conductor.{own}", getattr(config.conductor, own))


def _of_parts(config: Config, parts: list[Part]) -> Iterator[ListenAddress]:
    kvcache, messenger = config.kvcache, config.messenger
    for index, part in enumerate(parts):
        if messenger.port:
            yield from (
                ListenAddress("messenger.port", host, messenger.port + index) for host in messenger.listens_at
            )
        if kvcache.listen is not None:
            yield _higher(ListenAddress("kvcache.listen", *host_and_port(kvcache.listen)), index)
        for name in ("vllm_events", "vllm_replay"):
            endpoint = getattr(kvcache, name)
            yield from (_higher(place, index) for place in _of_endpoint(f"kvcache.{name}", endpoint or ""))
        if config.worker.modules_listen is not None:
            listen = host_and_port(config.worker.modules_listen)
            yield _higher(ListenAddress("worker.modules_listen", *listen), index)
        if config.worker.metrics_listen is not None and part.leads:
            listen = host_and_port(config.worker.metrics_listen)
            yield _higher(ListenAddress("worker.metrics_listen", *listen), index)
        if part.stage < len(config.pipeline.endpoints):
            own = config.pipeline.listen_endpoint
            key = "pipeline.endpoints" if own is None else "pipeline.listen_endpoint"
            yield from _of_endpoint(key, own or config.pipeline.endpoints[part.stage])


def _higher(place: ListenAddress, num_ports: int) -> ListenAddress:
    return place._replace(port=place.port + num_ports) if place.port else place


def _of_endpoint(key: str, endpoint: str) -> Iterator[ListenAddress]:
    """Yield the address of a ZeroMQ endpoint if its TCP port is known; `*` is any address."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "tcp" and not rest.endswith(f":{_ANY_PORT}"):
        host, port = host_and_port(rest)
        yield ListenAddress(key, "" if host == "*" else host, port)
