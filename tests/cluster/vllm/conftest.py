"""Fixtures for tests with vLLM for CPUs: its installation, a tiny model, a running pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import Server
from tests.cluster.vllm.server import installed
from tests.tiny_models import tiny_model


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    installed()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny random model."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("qwen3", directory, max_position_embeddings=2048)
    return directory


@pytest.fixture
def socket(run_dir: Path) -> Path:
    return run_dir / "pool.sock"


@pytest.fixture
def pool(run_dir: Path, socket: Path) -> Iterator[Server]:
    arguments = ["--role", "pool", "--kvcache-socket", str(socket), "--kvcache-pool-bytes", "64MiB"]
    with ForkedServer(*arguments, run_dir=run_dir) as server:
        yield server
