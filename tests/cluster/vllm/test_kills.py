"""Engines and messengers are killed at random: no answer is wrong or lost, and no page stays in use."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvstore.client.client import KVCachePool
from tests.cluster.harness import Server
from tests.cluster.vllm.server import TINY_OPTIONS, VllmServer, draw_prompts, messenger_of
from tests.deadline import DEADLINE_S
from tests.kvstore.pools import nothing_reserved, until
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(7200)]
NUM_ROUNDS, PER_ROUND, NUM_AT_ONCE = 25, 40, 8
PAUSE_S = 0.2
"""before a request is sent again that nobody has answered"""


class Engine:
    """A vLLM server that is started again whenever it was killed."""

    def __init__(self, model: Path, folder: Path, pool: str) -> None:
        self._model, self._folder, self._pool = model, folder, pool
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        self._num_starts += 1
        log = self._folder / f"{self._num_starts}.log"
        # Few pages, so that requests are preempted.
        options = [*TINY_OPTIONS, "--num-gpu-blocks-override", "80"]
        self.server = VllmServer(self._model, log, *options, pool=self._pool).start()

    def wait(self) -> None:
        self.server.__enter__()

    def restart(self) -> None:
        self.server.kill()
        self.start()


def test_a_thousand_requests(model: Path, pool: Server, socket: Path, tmp_path: Path) -> None:
    draw = random.Random(int(os.environ.get("SEED", "27")))
    prompts = draw_prompts(draw, 60, range(40, 500), range(VOCAB_SIZE))
    prompts += [[*prompt[:200], *draw.choices(range(VOCAB_SIZE), k=60)] for prompt in prompts]
    engines = []
    for name in "ab":
        (tmp_path / name).mkdir()
        engines.append(Engine(model, tmp_path / name, f"unix:{socket}"))
    with VllmServer(model, tmp_path / "alone.log", *TINY_OPTIONS).start() as alone:
        expected = [alone.complete(prompt, 40) for prompt in prompts]
    is_ended = threading.Event()

    def answer(number: int) -> list[int]:
        """What one of the engines answers, sooner or later."""
        while not is_ended.is_set():
            for engine in draw.sample(engines, 2):
                try:
                    return engine.server.complete(prompts[number], 40)
                except (httpx.TransportError, AssertionError):
                    pass  # killed
            is_ended.wait(PAUSE_S)
        raise AssertionError("nobody has answered")

    num_messengers = 1
    try:
        for engine in engines:
            engine.wait()
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            for number in range(NUM_ROUNDS):
                asked = [draw.randrange(len(prompts)) for _ in range(PER_ROUND)]
                answers = [threads.submit(answer, index) for index in asked]
                is_ended.wait(draw.random())
                if number % 5 == 4:
                    engine = engines[number // 5 % 2]
                    engine.restart()
                    engines[1 - number // 5 % 2].wait()
                else:
                    os.kill(messenger_of(pool), signal.SIGKILL)
                    num_messengers += 1
                for index, result in zip(asked, answers, strict=True):
                    assert result.result(2 * DEADLINE_S) == expected[index]
                pool.wait_for_line("messenger] ready", num_messengers)
        for engine in engines:
            engine.wait()
        assert sum(engine.server.num_loaded() for engine in engines) > 0
        with KVCachePool.connect(f"unix:{socket}", timeout_s=DEADLINE_S) as client:
            until(client, nothing_reserved)
            until(client, lambda stats: stats.num_used == 0)
    finally:
        is_ended.set()
        for engine in engines:
            engine.server.kill()
