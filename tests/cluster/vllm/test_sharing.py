"""Two real vLLM servers share a pool: the same tokens as alone, whatever becomes of the pool."""

import contextlib
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.harness import Server, eventually
from tests.cluster.vllm.server import (
    TINY_OPTIONS,
    VllmServer,
    draw_prompts,
    installed,
    messenger_of,
    until_stored,
    whole_pages,
)
from tests.tiny_models import VOCAB_SIZE

NUM_TOKENS = 400
NUM_SHARED = whole_pages(NUM_TOKENS)
_draw = random.Random(7)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def prompts(num: int) -> list[list[int]]:
    """Prompts that nobody has asked so far."""
    return draw_prompts(_draw, num, range(NUM_TOKENS, NUM_TOKENS + 1), range(VOCAB_SIZE))


def alone(server: VllmServer, prompt: list[int]) -> list[int]:
    """What a server answers that shares nothing: a tenant's salt is like no other."""
    return server.complete(prompt, cache_salt=_draw.randbytes(16).hex())


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_a_server_loads_what_it_has_stored(model: Path, pool: Server, socket: Path, tmp_path: Path) -> None:
    # What is found comes from the pool, and a long prompt takes several steps.
    options = [*TINY_OPTIONS, "--no-enable-prefix-caching", "--max-num-batched-tokens", "512"]
    with VllmServer(model, tmp_path / "a.log", *options, pool=f"unix:{socket}").start() as server:
        some = prompts(8)
        expected = [alone(server, prompt) for prompt in some]
        assert [server.complete(prompt) for prompt in some] == expected
        assert server.num_loaded() == 0
        until_stored(f"unix:{socket}", some)
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(server.complete, some)) == expected
        assert server.num_loaded() == 8 * NUM_SHARED
        assert_a_seed_decides_what_is_drawn_whatever_the_steps_of_a_prompt(server, f"unix:{socket}")
        os.kill(messenger_of(pool), signal.SIGKILL)
        more = prompts(4)
        answers = [server.complete(prompt) for prompt in more]
        assert answers == [alone(server, prompt) for prompt in more]


def assert_a_seed_decides_what_is_drawn_whatever_the_steps_of_a_prompt(server: VllmServer, pool: str) -> None:
    drawn = {"temperature": 1.0, "seed": 3}
    prompt, num_before = _draw.choices(range(VOCAB_SIZE), k=1200), server.num_loaded()
    in_three_steps = server.complete(prompt, **drawn)
    until_stored(pool, [prompt])
    assert server.complete(prompt, **drawn) == in_three_steps
    assert server.num_loaded() - num_before == whole_pages(len(prompt)), "the rest was computed in one step"


@pytest.mark.soak
def test_two_servers_share_prefixes(model: Path, pool: Server, socket: Path, tmp_path: Path) -> None:
    with (
        VllmServer(model, tmp_path / "a.log", *TINY_OPTIONS, pool=f"unix:{socket}").start() as first,
        VllmServer(model, tmp_path / "b.log", *TINY_OPTIONS, pool=f"unix:{socket}").start() as second,
    ):
        some = prompts(8)
        expected = [alone(first, prompt) for prompt in some]
        assert [first.complete(prompt) for prompt in some] == expected
        assert first.num_loaded() == 0
        until_stored(f"unix:{socket}", some)
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
            answer = first.complete(prompt)
            until_stored(f"unix:{socket}", [prompt])
            assert second.complete(prompt) == answer
            return second.num_loaded() == num_loaded + NUM_SHARED

        eventually(is_back, "the pool is used again")


@pytest.mark.soak
def test_the_default_model_finds_prefixes_on_ssd_and_survives_damage(
    run_dir: Path, socket: Path, tmp_path: Path
) -> None:
    default_model = installed().model
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
        VllmServer(default_model, tmp_path / "a.log", *options, pool=f"unix:{socket}").start() as first,
        VllmServer(default_model, tmp_path / "b.log", *options, pool=f"unix:{socket}").start() as second,
    ):
        some = [_draw.choices(range(1000, 40000), k=1500) for _ in range(8)]
        expected = [first.complete(prompt) for prompt in some]
        until_stored(f"unix:{socket}", some[-1:])
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
        VllmServer(default_model, tmp_path / "c.log", *options, pool=f"unix:{socket}").start() as third,
    ):
        assert [third.complete(prompt) for prompt in some] == expected
        assert [third.complete(prompt) for prompt in some] == expected


@pytest.mark.soak
def test_a_pool_that_comes_and_goes_changes_no_token(
    model: Path, run_dir: Path, socket: Path, tmp_path: Path
) -> None:
    arguments = ["--role", "pool", "--kvcache-socket", str(socket), "--kvcache-pool-bytes", "16MiB"]
    with (
        VllmServer(model, tmp_path / "a.log", *TINY_OPTIONS, pool=f"unix:{socket}").start() as first,
        VllmServer(model, tmp_path / "b.log", *TINY_OPTIONS, pool=f"unix:{socket}").start() as second,
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
