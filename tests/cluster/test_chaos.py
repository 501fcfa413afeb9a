"""A short part of `make chaos`: faults happen to a cluster on three hosts, and it comes back each time."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import running
from tests.chaos.network import Unavailable
from tests.chaos.rounds import Chaos, chaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
LONGEST_S = 2.0
SEED = 4


@pytest.fixture(scope="module")
def going() -> Iterator[Chaos]:
    with tempfile.TemporaryDirectory(prefix="mc-") as folder:
        try:
            with running(Path(folder)) as cluster, chaos(cluster, SEED) as going:
                yield going
        except Unavailable as reason:
            pytest.skip(str(reason))


@pytest.mark.parametrize(
    "names",
    [
        ["kill leader", "one way: two hosts"],
        pytest.param(["kill front", "kill decode"], marks=pytest.mark.soak),
        pytest.param(["deaf host"], marks=pytest.mark.soak),
        pytest.param(["stop messenger", "full disk"], marks=pytest.mark.soak),
    ],
    ids="+".join,
)
def test_it_comes_back(going: Chaos, names: list[str]) -> None:
    done = going.go_through(names, LONGEST_S)
    assert done.problems == []
