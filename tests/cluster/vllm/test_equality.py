"""Greedy answers of the default model in float32 are those of vLLM alone, wherever its blocks come from."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import Server
from tests.cluster.namespaces import Host, Unavailable, two_hosts
from tests.cluster.vllm.server import (
    PAGE_TOKENS,
    VllmServer,
    draw_prompts,
    installed,
    until_stored,
    whole_pages,
)
from tests.kvstore.pools import key_file_in

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(7200)]
NUM_PROMPTS = 200
PROMPTS = draw_prompts(random.Random(27), NUM_PROMPTS, range(50, 500), range(1000, 40000))
NUM_SHARED = sum(whole_pages(len(prompt)) for prompt in PROMPTS)
OPTIONS = ["--block-size", str(PAGE_TOKENS), "--no-enable-prefix-caching"]
"""What is found comes from the pool."""


def answers(server: VllmServer) -> list[list[int]]:
    return [server.complete(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM without a connector answers."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with VllmServer(installed().model, log, *OPTIONS).start() as server:
        return answers(server)


def on_pool(log: Path, *addresses: str, **extra_config: object) -> VllmServer:
    return VllmServer(installed().model, log, *OPTIONS, pool=list(addresses), **extra_config).start()


def test_from_dram_and_ssd(expected: list[list[int]], run_dir: Path, socket: Path, tmp_path: Path) -> None:
    ssd, address = tmp_path / "ssd", f"unix:{socket}"
    ssd.mkdir()
    arguments = [
        *("--role", "pool", "--instance", "a", "--kvcache-socket", str(socket)),
        *("--kvcache-pool-bytes", "4GiB", "--kvcache-ssd-dirs", str(ssd), "--kvcache-ssd-bytes", "8GiB"),
    ]
    with Server(*arguments, run_dir=run_dir), on_pool(tmp_path / "a.log", address) as first:
        assert answers(first) == expected
        until_stored(address, PROMPTS)
        with on_pool(tmp_path / "b.log", address) as second:
            assert answers(second) == expected
            assert second.num_loaded() == NUM_SHARED
    with Server(*arguments, run_dir=run_dir), on_pool(tmp_path / "c.log", address) as third:
        assert answers(third) == expected
        assert third.num_loaded() > NUM_SHARED // 2, "a busy disk may have had no room for some"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as made:
        try:
            hosts = made.enter_context(two_hosts())
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield hosts


def test_from_another_host(
    expected: list[list[int]], hosts: tuple[Host, Host], run_dir: Path, tmp_path: Path
) -> None:
    key_file = key_file_in(run_dir)
    doors, sockets = (
        [f"{host.addresses[0]}:7100" for host in hosts],
        [f"{run_dir}/{name}.sock" for name in "ab"],
    )

    def pool(number: int) -> Server:
        directory = run_dir / str(number)
        directory.mkdir()
        arguments = [
            *("--role", "pool", "--kvcache-socket", sockets[number], "--kvcache-pool-bytes", "4GiB"),
            *("--kvcache-listen", doors[number], "--security-key-file", str(key_file)),
        ]
        return Server(*arguments, run_dir=directory)

    def vllm(number: int, log: Path) -> VllmServer:
        addresses = f"unix:{sockets[number]}", f"tcp://{doors[1 - number]}"
        return on_pool(log, *addresses, key_file=str(key_file))

    with contextlib.ExitStack() as running:
        for number, host in enumerate(hosts):
            with host.entered():
                running.enter_context(pool(number))
        with hosts[0].entered(), vllm(0, tmp_path / "a.log") as first:
            assert answers(first) == expected
            until_stored(f"unix:{sockets[0]}", PROMPTS)
        with hosts[1].entered(), vllm(1, tmp_path / "b.log") as second:
            assert answers(second) == expected
            assert second.num_loaded() == NUM_SHARED
