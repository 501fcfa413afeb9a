"""Which congestion control connections have: within one host one that does not pace."""

import socket

import pytest

from kvstore.service import listen_tcp
from messenger import pacing
from messenger.pacing import UNPACED, begin_unpaced, choose, congestion_control_of


@pytest.fixture(params=[b"bbr", b"bbr3", b"cubic"])
def systems_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bytes:
    name: bytes = request.param
    monkeypatch.setattr(pacing, "systems_own", lambda: name)
    return name


def test_the_systems_own_is_that_of_a_new_socket() -> None:
    with socket.socket() as sock:
        assert pacing.systems_own() == congestion_control_of(sock) != b""


def test_where_the_system_paces_sockets_begin_without_it(systems_own: bytes) -> None:
    with socket.socket() as sock, listen_tcp("127.0.0.1", 0) as listener:
        before = congestion_control_of(sock)
        begin_unpaced(sock)
        sock.connect(listener.getsockname())
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            expected = UNPACED if systems_own.startswith(b"bbr") else before
            assert congestion_control_of(sock) == congestion_control_of(accepted) == expected
            choose(sock)
            assert congestion_control_of(sock) == UNPACED


class Connected:
    """To another host."""

    def __init__(self) -> None:
        self.chosen: list[bytes] = []

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 5000

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.2", 5000

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        self.chosen.append(value)


def test_between_hosts_the_system_decides(systems_own: bytes) -> None:
    connected = Connected()
    choose(connected)
    assert connected.chosen == ([systems_own] if systems_own.startswith(b"bbr") else [])


def test_who_has_hung_up_already_is_found_out_later() -> None:
    with socket.socket() as sock:
        choose(sock)
