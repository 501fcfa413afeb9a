"""Fixtures for the doctor's tests: an ordinary machine, and an open port."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from messenger.doctor.reachability import PeerAddress
from tests.messenger.doctor.machines import FakeMachine
from tests.messenger.trees import write


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    write(tmp_path, "proc/sys/kernel/osrelease", "6.1.0-18-amd64")
    write(tmp_path, "proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nHugePages_Total:    0")
    limits = (
        "Limit             Soft Limit  Hard Limit  Units\n"
        "Max open files    1024        1048576     files\n"
        "Max locked memory 8388608     8388608     bytes"
    )
    write(tmp_path, "proc/self/limits", limits)
    write(tmp_path, "proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000")
    write(tmp_path, "proc/self/uid_map", "0 0 4294967295")
    return FakeMachine(tmp_path)


@pytest.fixture
def listener() -> Iterator[PeerAddress]:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield PeerAddress(*server.getsockname())
