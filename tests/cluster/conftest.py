"""Where clusters run, and one with the default model in float32 for the tests that do not break it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Where supervisors put their sockets; pytest's own directories are too long for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="mc-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="mc-") as run_dir,
        ForkedServer("--dtype", "float32", "--http-tool-parser", "hermes", run_dir=Path(run_dir)) as server,
    ):
        yield server
