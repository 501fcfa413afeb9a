"""The discovery of each cluster's fronts by name, and the check of each front's readiness every second.

Owns: names, their addresses, the requests to /ready. Does not know: the choice of a front
(`conductor.picker.fronts`).
"""

import asyncio
import logging
import socket
from urllib.parse import urlsplit

import httpx

from conductor.picker.fronts import WatchedFronts

PERIOD_S = 1.0
TIMEOUT_S = 2.0
NOT_READY = 503
log = logging.getLogger(__name__)


async def watch(cluster: str, fronts: WatchedFronts) -> None:
    """Poll the fronts of a cluster until cancelled.

    Args:
        cluster: The URL of the cluster's fronts: http:// or https://, a host name with all their addresses,
            and a port.
        fronts: The fronts to update.
    """
    url = urlsplit(cluster)
    assert url.hostname is not None
    assert url.port is not None
    # Certificates are not verified: they have the names that clients use, and only readiness is asked.
    async with httpx.AsyncClient(verify=False, timeout=TIMEOUT_S, trust_env=False) as client:
        addresses: set[str] = set()
        while True:
            resolved = await _resolved(url.hostname, url.port)
            if resolved is not None:
                addresses = resolved
                for address in fronts.addresses(cluster) - addresses:
                    fronts.is_gone(address)
            # If the name has no answer now, the fronts known so far are asked: they may still answer.
            asked = [_ask(client, url.scheme, address, cluster, fronts) for address in addresses]
            await asyncio.gather(*asked)
            await asyncio.sleep(PERIOD_S)


async def _resolved(host: str, port: int) -> set[str] | None:
    """Return the addresses of a host name; None if the name cannot be resolved now."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            return set()
        log.warning("the addresses of %s are not known: %s", host, error.strerror)
        return None
    hosts = {str(address[0]) for *_, address in found}
    return {f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts}


async def _ask(
    client: httpx.AsyncClient, scheme: str, address: str, cluster: str, fronts: WatchedFronts
) -> None:
    try:
        answer = await client.get(f"{scheme}://{address}/ready")
        if answer.is_success:
            fronts.is_ready(address, cluster, int(answer.json()["num_decode"]))
        elif answer.status_code != NOT_READY:
            fronts.is_gone(address)
    except httpx.TimeoutException:
        pass  # the front may be busy: it stays ready for `READY_FOR_S` after its last report
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        fronts.is_gone(address)
