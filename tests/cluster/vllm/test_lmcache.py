"""LMCache's real classes over our plugin and a pool: any LMCache finds what one has stored."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.client import KVCachePool
from tests.cluster.harness import Server
from tests.cluster.vllm.server import installed, messenger_of
from tests.deadline import DEADLINE_S
from tests.kvstore.pools import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
DRIVER = Path(__file__).with_name("lmcache_driver.py")


class LMCacheError(Exception):
    """What LMCache's process complains of."""


class LMCache:
    """A process with LMCache's adapter."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def call(self, *call: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise LMCacheError(answer["error"])
        return answer["answer"]

    def connect(self, **params: object) -> None:
        """Make the adapter, which any other call needs. It may be tried again."""
        self.call(params)


@contextmanager
def lmcache(log: Path) -> Iterator[LMCache]:
    vllm = installed()
    environment = vllm.connector_environment
    environment["PYTHONPATH"] += f":{vllm.lmcache()}"
    python = Path(vllm.serve_command(0)[0]).with_name("python")
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [python, DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        ) as process,
    ):
        yield LMCache(process)


def test_objects_are_shared_by_all_who_use_the_pool(pool: Server, socket: Path, tmp_path: Path) -> None:
    address = f"unix:{socket}"
    with lmcache(tmp_path / "a") as first, lmcache(tmp_path / "b") as second:
        first.connect(pool=address)
        second.connect(pool=[address])
        assert first.call("look_up", [1]) == []
        assert first.call("store", [1, 2, 3])
        assert first.call("store", [2, 4], "a tenant")
        assert second.call("look_up", [1, 9, 3]) == [0, 2]
        assert second.call("load", [1, 9, 3]) == [0, 2]
        assert second.call("look_up", [1, 2], "a tenant") == [1]
        assert second.call("load", [2, 4], "a tenant") == [0, 1]
        with KVCachePool.connect(address, timeout_s=DEADLINE_S) as client:
            until(client, lambda stats: stats.num_leases == 2)
            second.call("unlock", [1])
            second.call("unlock", [3, 9])
            second.call("unlock", [2], "a tenant")
            until(client, lambda stats: stats.num_leases == 0)
        assert first.call("used") == 5
        first.call("delete", [2])
        assert second.call("look_up", [1, 2, 3]) == [0, 2]
        # The messenger ends and comes again.
        os.kill(messenger_of(pool), signal.SIGKILL)
        pool.wait_for_line("messenger] ready", 2)
        assert second.call("load", [1, 2, 3]) == [0, 2]


def test_what_is_wrong_is_named_or_costs_a_hit(socket: Path, tmp_path: Path) -> None:
    with lmcache(tmp_path / "log") as alone:
        with pytest.raises(LMCacheError, match="unknown key pol; known keys are pool, key_file"):
            alone.connect(pol=f"unix:{socket}")
        with pytest.raises(LMCacheError, match="pool is missing"):
            alone.connect()
        alone.connect(pool=f"unix:{socket}")
        assert not alone.call("store", [1])
        assert alone.call("look_up", [1]) == []
        assert alone.call("load", [1]) == []
