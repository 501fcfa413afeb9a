"""Two real vLLM servers share a pool: the same tokens as alone, whatever becomes of the pool."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Server, eventually
from tests.cluster.vllm_server import VllmServer, installed
from tests.tiny_models import VOCAB_SIZE, tiny_model

NUM_TOKENS, PAGE_TOKENS = 400, 32
NUM_SHARED = (NUM_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
OPTIONS = ["--skip-tokenizer-init", "--block-size", str(PAGE_TOKENS)]
_draw = random.Random(7)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    installed()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("qwen3", directory, max_position_embeddings=2048)
    return directory


@pytest.fixture
def socket(run_dir: Path) -> Path:
    return run_dir / "pool.sock"


@pytest.fixture
def pool(run_dir: Path, socket: Path) -> Iterator[Server]:
    arguments = ["--role", "pool", "--kvcache-socket", str(socket), "--kvcache-pool-bytes", "64MiB"]
    with Server(*arguments, run_dir=run_dir) as server:
        yield server


def prompts(num: int) -> list[list[int]]:
    """Prompts that nobody has asked so far."""
    return [_draw.choices(range(VOCAB_SIZE), k=NUM_TOKENS) for _ in range(num)]


def alone(server: VllmServer, prompt: list[int]) -> list[int]:
    """What a server answers that shares nothing: a tenant's salt is like no other."""
    return server.complete(prompt, cache_salt=_draw.randbytes(16).hex())


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def messenger_of(pool: Server) -> int:
    [pid] = [pid for name, pid in pool.children().items() if name.endswith("/messenger")]
    return pid


@pytest.mark.soak  # the installation takes minutes and 4 GB
def test_two_servers_share_prefixes(model: Path, pool: Server, socket: Path, tmp_path: Path) -> None:
    with (
        VllmServer(model, tmp_path / "a.log", *OPTIONS, pool=f"unix:{socket}").start() as first,
        VllmServer(model, tmp_path / "b.log", *OPTIONS, pool=f"unix:{socket}").start() as second,
    ):
        some = prompts(8)
        expected = [alone(first, prompt) for prompt in some]
        assert [first.complete(prompt) for prompt in some] == expected
        assert first.num_loaded() == 0
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(second.complete, some)) == expected
        assert second.num_loaded() == 8 * NUM_SHARED
        assert alone(second, some[0]) == expected[0]
        assert second.num_loaded() == 8 * NUM_SHARED, "tenants share nothing"

        os.kill(messenger_of(pool), signal.SIGKILL)
        more = prompts(4)
        answers = [second.complete(prompt) for prompt in more]
        pool.wait_for_line("messenger] ready", 2)
        assert answers == [alone(second, prompt) for prompt in more]

        def is_back() -> bool:
            [prompt] = prompts(1)
            num_loaded = second.num_loaded()
            assert first.complete(prompt) == second.complete(prompt)
            return second.num_loaded() == num_loaded + NUM_SHARED

        eventually(is_back, "the pool is used again")


@pytest.mark.soak
def test_the_default_model_finds_prefixes_on_ssd_and_survives_damage(
    run_dir: Path, socket: Path, tmp_path: Path
) -> None:
    vllm = installed()
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    # DRAM for two of the prompts, SSD for all of them.
    arguments = [
        *("--role", "pool", "--instance", "a", "--kvcache-socket", str(socket)),
        *("--kvcache-pool-bytes", "160MiB", "--kvcache-ssd-dirs", str(ssd), "--kvcache-ssd-bytes", "2GiB"),
    ]
    options = ["--no-enable-prefix-caching"]  # what is found comes from the pool
    with (
        Server(*arguments, run_dir=run_dir) as pool,
        VllmServer(vllm.model, tmp_path / "a.log", *options, pool=f"unix:{socket}").start() as first,
        VllmServer(vllm.model, tmp_path / "b.log", *options, pool=f"unix:{socket}").start() as second,
    ):
        some = [_draw.choices(range(1000, 40000), k=1500) for _ in range(8)]
        expected = [first.complete(prompt) for prompt in some]
        assert [second.complete(prompt) for prompt in some] == expected
        assert second.num_loaded() >= 4 * 1408, "a busy disk may have no room for some"
        pool.stop()
        [slab] = ssd.glob("*.slab")
        with slab.open("r+b") as file:  # in the middle of most blocks
            for offset in range(1 << 20, slab.stat().st_size, 1 << 20):
                file.seek(offset + 4321)
                file.write(b"damaged")
    with (
        Server(*arguments, run_dir=run_dir),
        VllmServer(vllm.model, tmp_path / "c.log", *options, pool=f"unix:{socket}").start() as third,
    ):
        assert [third.complete(prompt) for prompt in some] == expected
        assert [third.complete(prompt) for prompt in some] == expected


@pytest.mark.soak
def test_a_pool_that_comes_and_goes_changes_no_token(
    model: Path, run_dir: Path, socket: Path, tmp_path: Path
) -> None:
    arguments = ["--role", "pool", "--kvcache-socket", str(socket), "--kvcache-pool-bytes", "16MiB"]
    with (
        VllmServer(model, tmp_path / "a.log", *OPTIONS, pool=f"unix:{socket}").start() as first,
        VllmServer(model, tmp_path / "b.log", *OPTIONS, pool=f"unix:{socket}").start() as second,
    ):
        assert first.log.count("serving without the KVCache pool") == 1
        some = prompts(40)
        expected = [first.complete(prompt) for prompt in some]
        with Server(*arguments, run_dir=run_dir) as pool:
            eventually(lambda: "is used from now on" in first.log, "the first one has joined")
            eventually(lambda: "is used from now on" in second.log, "the second one has joined")
            with ThreadPoolExecutor(8) as threads:
                for number in range(12):
                    server = (first, second)[number % 2]
                    shuffled = _draw.sample(range(len(some)), len(some))
                    answers = threads.map(server.complete, [some[index] for index in shuffled])
                    messenger = messenger_of(pool)
                    if number % 3 == 1:
                        os.kill(messenger, signal.SIGKILL)
                    elif number % 3 == 2:
                        os.kill(messenger, signal.SIGSTOP)
                        threading.Timer(3.0, resume, (messenger,)).start()
                    assert list(answers) == [expected[index] for index in shuffled]
                    pool.wait_for_line("messenger] ready", 1 + (number + 2) // 3)


@pytest.mark.soak
def test_what_does_not_match_is_refused_by_name(
    model: Path, pool: Server, socket: Path, tmp_path: Path
) -> None:
    with VllmServer(model, tmp_path / "a.log", *OPTIONS, pool=f"unix:{socket}").start() as first:
        first.complete(prompts(1)[0])
    other = tmp_path / "other"
    tiny_model("qwen3", other, max_position_embeddings=2048, rope_theta=5.0)
    refused = {
        "model fingerprint differs": VllmServer(other, tmp_path / "b.log", *OPTIONS, pool=f"unix:{socket}"),
        "dtype differs: ours is bfloat16, theirs is float32": VllmServer(
            model, tmp_path / "c.log", *OPTIONS, "--dtype", "bfloat16", pool=f"unix:{socket}"
        ),
        "unknown key pol; did you mean pool": VllmServer(
            model, tmp_path / "d.log", *OPTIONS, pol=f"unix:{socket}"
        ),
        "block size differs": VllmServer(
            model, tmp_path / "e.log", *OPTIONS, pool=f"unix:{socket}", block_size=64
        ),
    }
    for message, server in refused.items():
        assert message in server.start().wait()
