"""Which congestion control connections have: within one host one that does not pace."""

import socket
from pathlib import Path

import pytest

from messenger.transport import pacing
from messenger.transport.listeners import listen_tcp
from messenger.transport.pacing import UNPACED, begin_unpaced, choose_by_peer, congestion_control_of


@pytest.fixture(params=[b"bbr", b"bbr3", b"cubic"])
def systems_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bytes:
    name: bytes = request.param
    monkeypatch.setattr(pacing, "systems_own", lambda: name)
    return name


def test_the_systems_own_is_that_of_a_new_socket() -> None:
    name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert pacing.systems_own() == name.encode()


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
            for end in (sock, accepted):
                choose_by_peer(end)
                assert congestion_control_of(end) == UNPACED


class Connected:
    """To another host."""

    def __init__(self, name: bytes, *, may_change: bool = True) -> None:
        self.name = name
        self._may_change = may_change

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 5000

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.2", 5000

    def getsockopt(self, level: int, option: int, num_bytes: int, /) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.name.ljust(num_bytes, b"\0")

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if not self._may_change:
            raise PermissionError("Operation not permitted")
        self.name = value


def test_between_hosts_the_system_decides(systems_own: bytes) -> None:
    connected = Connected(UNPACED)
    choose_by_peer(connected)
    assert connected.name == (systems_own if systems_own.startswith(b"bbr") else UNPACED)


def test_between_hosts_the_choice_of_a_route_is_left(systems_own: bytes) -> None:
    connected = Connected(b"dctcp")
    choose_by_peer(connected)
    assert connected.name == b"dctcp"


def test_a_choice_that_is_not_allowed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    connected = Connected(UNPACED, may_change=False)
    begin_unpaced(connected)
    choose_by_peer(connected)
    assert connected.name == UNPACED
    is_paced = pacing.systems_own().startswith(b"bbr")
    assert ("Operation not permitted" in caplog.text) == is_paced


def test_who_has_hung_up_already_is_found_out_later() -> None:
    with socket.socket() as sock:
        choose_by_peer(sock)
