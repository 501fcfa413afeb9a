"""Fixtures for tests of a front: one front with its fake cluster for all tests of a module."""

from collections.abc import Iterator

import pytest

from tests.conductor.front.fakes import Running, byte_model, running_front


@pytest.fixture(scope="module")
def _front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_front(tmp_path_factory.mktemp("front"), byte_model(), max_request_bytes=100_000) as front:
        yield front


@pytest.fixture
def front(_front: Running) -> Running:
    """Return a front that is ready, with a cluster that answers "Hello!"."""
    _front.cluster.reset()
    _front.publish(_front.cluster.state)
    return _front
