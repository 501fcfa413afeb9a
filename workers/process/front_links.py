"""The connections of a session to the fronts that get its tokens.

Owns: these connections. Does not know: requests, where they are decoded.
"""

import logging
from collections import defaultdict

from mooncake.bus.zeromq import Dealer, PeerGoneError
from mooncake.errors import ConfigError
from mooncake.messages.fronts import ToFront, TokenOutput, Tokens
from mooncake.security.keys import ClusterKey

log = logging.getLogger(__name__)


class FrontLinks:
    """The links to fronts, by endpoint. A link is opened when its front first gets tokens."""

    def __init__(self, identity: bytes, key: ClusterKey) -> None:
        self._identity, self._key = identity, key
        self._links: dict[str, Dealer[ToFront]] = {}

    async def emit(self, outputs: list[tuple[str, TokenOutput]]) -> None:
        """Send outputs to fronts, in one message to each front.

        Each output comes with the endpoint of its front. Outputs to a front that cannot be reached are
        dropped: the front learns from the Conductor that they were sent.
        """
        by_front: defaultdict[str, list[TokenOutput]] = defaultdict(list)
        for endpoint, output in outputs:
            by_front[endpoint].append(output)
        for endpoint, of_front in by_front.items():
            try:
                if endpoint not in self._links:
                    self._links[endpoint] = Dealer(endpoint, self._identity, ToFront, self._key)
                await self._links[endpoint].send(Tokens(of_front))
            except (ConfigError, PeerGoneError) as error:
                log.warning("tokens for the front at %s are lost: %s", endpoint, error)
                if (link := self._links.pop(endpoint, None)) is not None:
                    link.close()

    def close(self, linger_s: float) -> None:
        """Close all links. The last tokens may still leave within `linger_s` seconds."""
        for link in self._links.values():
            link.close(linger_s=linger_s)
