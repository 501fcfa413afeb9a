"""Where a messenger listens, and what it says where it cannot."""

import pytest

from kvstore.service import listen_clients, listen_tcp
from mooncake.errors import ConfigError


def test_a_port_that_is_taken_is_named() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        place, port = listener.getsockname()
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            listen_tcp(place, port).__enter__()
        with pytest.raises(ConfigError, match=f"kvcache.listen: cannot listen at 127.0.0.1:{port}"):
            listen_clients(f"{place}:{port}").__enter__()


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0: .*assign"):
        listen_tcp("192.0.2.1", 0).__enter__()


@pytest.mark.parametrize("host", ["::1", "::", "no-such-name.invalid"])
def test_what_is_no_ipv4_address_is_refused_in_words(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen at {host}: it is, or has, no IPv4 address"):
        listen_tcp(host, 0).__enter__()
