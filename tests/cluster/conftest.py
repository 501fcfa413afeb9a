"""One real cluster with the default model in float32, shared by the tests that do not break it."""

from collections.abc import Iterator

import pytest

from tests.cluster.harness import Server


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server("--dtype", "float32", run_dir=tmp_path_factory.mktemp("run")) as server:
        yield server
