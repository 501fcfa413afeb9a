"""Where a process listens, what it says where it cannot, and whom it lets wait."""

import asyncio
import socket

import pytest

from messenger.transport.listeners import accept, listen_tcp
from mooncake.errors import ConfigError


def test_a_port_that_is_taken_is_named() -> None:
    with listen_tcp("127.0.0.1", 0) as listener:
        place, port = listener.getsockname()
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: .*in use"):
            listen_tcp(place, port).__enter__()


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0: .*assign"):
        listen_tcp("192.0.2.1", 0).__enter__()


@pytest.mark.parametrize(("host", "caller"), [("::1", "::1"), ("::", "::1"), ("0.0.0.0", "127.0.0.1")])
def test_a_process_listens_at_ipv4_and_at_ipv6(host: str, caller: str) -> None:
    with listen_tcp(host, 0) as listener:
        socket.create_connection((caller, listener.getsockname()[1])).close()


def test_a_name_without_an_address_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at no\.invalid: it has no address"):
        listen_tcp("no.invalid", 0).__enter__()


async def test_a_crowd_at_the_door_does_not_keep_others_waiting() -> None:
    turns: list[int] = []
    with listen_tcp("127.0.0.1", 0) as listener:
        crowd = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        for number in range(3):
            asyncio.get_running_loop().call_soon(turns.append, number)
            (await accept(listener)).close()
            assert turns == list(range(number + 1))
        for sock in crowd:
            sock.close()
