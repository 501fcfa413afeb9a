"""Which cluster of this host `mooncake-kv` means, by the run directories of the runs."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.clusters import check_of_one_cluster, clusters, pools_of
from mooncake.errors import ConfigError, PoolError
from mooncake.node.rundir import Run, RunDirectory

CONDUCTOR = "tcp://10.0.0.1:7800"


@pytest.fixture(autouse=True)
def runs(short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    """They run until the test is over."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp_path))
    with contextlib.ExitStack() as runs:
        yield runs


def start(runs: contextlib.ExitStack, run: Run, num_pools: int = 1) -> RunDirectory:
    run_dir = runs.enter_context(RunDirectory())
    run_dir.describe(run)
    for index in range(num_pools):
        Path(run_dir.socket(f"worker-{index}")).touch()
    return run_dir


def pool(run_dir: RunDirectory, index: int = 0) -> str:
    return f"unix:{run_dir.socket(f'worker-{index}')}"


def test_the_only_cluster_needs_no_name(runs: contextlib.ExitStack) -> None:
    run_dir = start(runs, Run("all", "ipc:///a", 8000), num_pools=2)
    assert pools_of(None) == [pool(run_dir, 0), pool(run_dir, 1)]


def test_no_run_or_none_with_pools_is_told(runs: contextlib.ExitStack) -> None:
    start(runs, Run("conductor", CONDUCTOR, 8000), num_pools=0)
    with pytest.raises(PoolError, match="no mooncake-serve of this user runs here"):
        pools_of(None)


def test_runs_of_one_conductor_are_one_cluster(runs: contextlib.ExitStack) -> None:
    start(runs, Run("conductor", CONDUCTOR, 8000), num_pools=0)
    prefill, decode = (start(runs, Run(role, CONDUCTOR)) for role in ("prefill", "decode"))
    both = sorted([pool(prefill), pool(decode)])
    for name in (None, "8000", "7800", str(decode.path), decode.path.name, f"{prefill.path}/"):
        assert pools_of(name) == both
    check_of_one_cluster(both)


def test_several_clusters_are_refused_unless_one_is_named(runs: contextlib.ExitStack) -> None:
    first, second = (start(runs, Run("all", f"ipc:///{port}", port)) for port in (8000, 8001))
    with pytest.raises(ConfigError, match=r"2 clusters .* say which with --cluster: .*8001 \(") as error:
        pools_of(None)
    assert str(first.path) in str(error.value)
    assert pools_of("8001") == [pool(second)]
    with pytest.raises(ConfigError, match=r"--cluster 8002: there is no such cluster; those .* 8000"):
        pools_of("8002")


def test_a_name_that_two_clusters_have_is_refused(runs: contextlib.ExitStack) -> None:
    first, _ = (start(runs, Run("all", f"ipc:///{name}", 8000)) for name in "ab")
    with pytest.raises(ConfigError, match="2 clusters"):
        pools_of("8000")
    assert pools_of(str(first.path)) == [pool(first)]


def test_a_run_whose_supervisor_was_killed_is_none(runs: contextlib.ExitStack) -> None:
    killed = start(runs, Run("all", "ipc:///a", 8000))
    alive = start(runs, Run("all", "ipc:///b", 8001))
    assert len(clusters()) == 2
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, killed._lock)  # frees the lock; what closes it at the end is still open
    os.close(descriptor)
    assert pools_of(None) == [pool(alive)]


def test_pools_are_of_one_cluster_only_if_that_is_certain(runs: contextlib.ExitStack) -> None:
    first, second = (start(runs, Run("all", f"ipc:///{name}"), num_pools=2) for name in "ab")
    check_of_one_cluster([pool(first, 0), pool(first, 1)])
    check_of_one_cluster([pool(first)])
    check_of_one_cluster(["unix:/somewhere/else.sock"])
    check_of_one_cluster(["tcp://10.0.0.1:7950", "tcp://10.0.0.2:7950"])
    for mixed in (
        [pool(first), pool(second)],
        [pool(first), "tcp://10.0.0.1:7950"],
        [pool(first), "unix:/somewhere/else.sock"],
    ):
        with pytest.raises(ConfigError, match="not known to be of one cluster"):
            check_of_one_cluster(mixed)
