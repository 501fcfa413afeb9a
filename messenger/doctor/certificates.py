"""Checks of TLS between messengers: whether this node's files belong together and are valid now.

Owns: these checks. Does not know: the certificates of other nodes.
"""

import time
from collections.abc import Callable, Iterator

from messenger.doctor.findings import Finding, Level
from messenger.transport.tls import Tls
from mooncake.config.settings import Config

_SOON_S = 14 * 86400.0
"""The check warns if a certificate ends within this many seconds: two weeks."""


def tls(config: Config, now_s: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Yield findings about this node's certificate and the time until its end.

    Raises ConfigError for unusable files.
    """
    found = Tls.of(config.security)
    if found is None:
        yield Finding(Level.OK, "tls", "not configured: what messengers say over TCP can be read on its way")
        return
    until_s = found.good_until_s()
    text = f"{config.security.tls_cert} is good until {time.strftime('%Y-%m-%d', time.gmtime(until_s))}"
    if until_s < now_s() + _SOON_S:
        yield Finding(Level.WARN, "tls", text, "make a new certificate in time, and restart the node with it")
    else:
        yield Finding(Level.OK, "tls", text)
