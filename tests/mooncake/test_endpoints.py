"""Addresses at which sockets listen, and which others are told."""

import socket

import pytest
import zmq

from mooncake.endpoints import advertised, connect, is_any_address, listen, needs_ipv6, preferred


@pytest.mark.parametrize(
    ("listens_at", "told"),
    [
        ("tcp://0.0.0.0:*", "tcp://127.0.0.1:*"),
        ("tcp://*:*", "tcp://localhost:*"),
        ("tcp://[::]:*", "tcp://[::1]:*"),
        ("tcp://[::]:*", "tcp://127.0.0.1:*"),
        ("tcp://[::1]:*", "tcp://[::1]:*"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
    ],
)
def test_a_socket_is_reached_at_what_others_are_told(listens_at: str, told: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as listener, context.socket(zmq.PUSH) as caller:
        connect(caller, advertised(told, listen(listener, listens_at)))
        caller.send(b"here")
        assert listener.recv() == b"here"


def test_a_port_that_is_told_is_kept() -> None:
    assert advertised("tcp://pod.example:30800", "tcp://0.0.0.0:7800") == "tcp://pod.example:30800"
    assert advertised("ipc:///run/x*", "ipc:///run/x*") == "ipc:///run/x*"


def test_a_name_means_its_ipv4_addresses_if_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))
    assert preferred([six, four]) == (socket.AF_INET, "192.0.2.1")
    assert preferred([six]) == (socket.AF_INET6, "2001:db8::1")
    for found, needs in ([six, four], False), ([six], True):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert needs_ipv6("tcp://name:7800") is needs


def test_what_stands_for_any_address() -> None:
    assert all(map(is_any_address, ("", "*", "0.0.0.0", "::")))
    assert not any(map(is_any_address, ("127.0.0.1", "::1", "name")))
