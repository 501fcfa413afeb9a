"""Fixtures for tests of whole clusters, and the order of these tests.

The files with the longest tests are run first.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

LONGEST = (
    *("test_documentation.py", "upgrades/test_upgrades.py", "test_equality.py", "test_links.py"),
    *("test_moved_modules.py", "test_conductor_kills.py", "vllm/test_sharing.py", "test_roles.py"),
    *("test_standby.py", "test_faults.py", "test_pipeline.py", "test_fronts.py", "test_lifecycle.py"),
    *("test_other_clients.py", "test_tensor_parallel.py", "test_chaos.py"),
)
"""The files that take longest, the longest first. The tests that begin last determine the total time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front, so that they run at the same time."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Yield a folder for the sockets of supervisors. pytest's own paths are too long for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="mc-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny model, which is served by the name `tiny`. Tests must not change it."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("smollm2", directory)
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """Yield a server of the default model that no test may break.

    Each test process keeps one until its end, so the server takes little memory.
    """
    arguments = ["--dtype=float32", "--http-tool-parser=hermes"]
    memory = ["--kvcache-device-bytes=512MiB", "--kvcache-pool-bytes=256MiB"]
    with (
        tempfile.TemporaryDirectory(prefix="mc-") as run_dir,
        ForkedServer(*arguments, *memory, run_dir=Path(run_dir)) as server,
    ):
        yield server
