"""The servers that are measured end with the program that has started them."""

import signal
import sys
from pathlib import Path

import pytest

from benchmarks.servers import free_port, serving


def test_sigterm_ends_the_server_and_the_program_as_ctrl_c_does(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind=127.0.0.1", f"--directory={tmp_path}", str(port)]

    def nobody_heeds_it(signum: int, frame: object) -> None:
        raise AssertionError(signal.Signals(signum).name)

    previous = signal.signal(signal.SIGTERM, nobody_heeds_it)
    try:
        with (
            (tmp_path / "log").open("w") as log,
            pytest.raises(KeyboardInterrupt),
            serving(command, f"http://127.0.0.1:{port}/", output=log.fileno()) as server,
        ):
            signal.raise_signal(signal.SIGTERM)
        assert not Path(f"/proc/{server.pid}").exists()
        assert signal.getsignal(signal.SIGTERM) is nobody_heeds_it
    finally:
        signal.signal(signal.SIGTERM, previous)
