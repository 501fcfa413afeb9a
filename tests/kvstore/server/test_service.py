"""Where a pool listens for clients on other hosts."""

import pytest

from kvstore.server.service import listen_clients
from messenger.transport.listeners import listen_tcp
from mooncake.errors import ConfigError


def test_a_port_for_clients_that_is_taken_is_named_with_its_setting() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        place, port = listener.getsockname()
        with pytest.raises(ConfigError, match=f"kvcache.listen: cannot listen at 127.0.0.1:{port}"):
            listen_clients(f"{place}:{port}").__enter__()
