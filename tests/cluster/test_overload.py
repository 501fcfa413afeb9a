"""A fresh server, with the SLOs of its configuration as shipped, under ten times the load that it can take.

Its workers are slowed (`tests.cluster.slowed`), so the load is too much for the instances, and not for the
machine that the test shares with others.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.overload.slowed import VOCAB_SIZE, write_model
from tests.cluster.harness import Server
from tests.cluster.slowed import SlowedServer
from tests.cluster.tiny_cluster import PAIR_FLAGS
from tests.deadline import DEADLINE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
MAX_BATCH = 4
NUM_CLIENTS = 10 * MAX_BATCH
NUM_EACH = 3
NUM_INPUT, NUM_OUTPUT = 32, 40


@pytest.fixture
def server(run_dir: Path, tmp_path: Path) -> Iterator[Server]:
    model = tmp_path / "slowed"
    model.mkdir()
    write_model(model)
    with SlowedServer(
        *(f"--model={model}", "--load-format=dummy"),
        *("--config=configs/local-cpu.yaml", *PAIR_FLAGS, f"--worker-max-batch={MAX_BATCH}"),
        *("--kvcache-pool-bytes=64MiB", "--kvcache-device-bytes=64MiB"),
        run_dir=run_dir,
    ) as server:
        yield server


async def client(number: int, to: httpx.AsyncClient) -> list[httpx.Response]:
    """Send one request after the other, each as soon as the one before is answered."""
    answers = []
    for index in range(NUM_EACH):
        prompt = [number % VOCAB_SIZE, index, *range(1, NUM_INPUT - 1)]
        body = {"model": "slowed", "prompt": prompt, "max_tokens": NUM_OUTPUT, "ignore_eos": True}
        answers.append(await to.post("/v1/completions", json=body))
    return answers


async def health(to: httpx.AsyncClient, until: asyncio.Event) -> list[int]:
    """Ask for it again and again, and once more at the end."""
    statuses = []
    while not until.is_set():
        statuses.append((await to.get("/health")).status_code)
    statuses.append((await to.get("/health")).status_code)
    return statuses


async def test_what_is_too_much_is_refused_before_anything_is_computed_for_it(server: Server) -> None:
    no_limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=no_limits) as to:
        ended = asyncio.Event()
        asked = asyncio.create_task(health(to, ended))
        crowd = await asyncio.gather(*(client(number, to) for number in range(NUM_CLIENTS)))
        ended.set()
        assert set(await asked) == {200}
        metrics = (await to.get("/metrics")).text
    answers = [answer for answers in crowd for answer in answers]
    by_status = Counter(answer.status_code for answer in answers)
    assert set(by_status) == {200, 429}, by_status
    assert by_status[200] >= MAX_BATCH, "a full batch is served"
    assert by_status[429] > len(answers) / 2, by_status
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["message"].startswith("the cluster is overloaded")
        else:
            assert answer.json()["usage"]["completion_tokens"] == NUM_OUTPUT
    computed = sum(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("mooncake_prefill_tokens_total{") and 'source="computed"' in line
    )
    # The double check may refuse a request behind its prefill, but hardly ever does.
    assert 0 < computed < (by_status[200] + by_status[429] / 4) * NUM_INPUT
