"""A prefill instance of several stages, as a user starts it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.harness import Server, eventually
from tests.cluster.tiny_cluster import (
    PROMPT,
    TRANSFERS,
    cached_tokens,
    complete,
    is_ready,
    kill_at_random,
    metric,
    text_of,
    tiny_server,
    wait_until_idle,
)
from tests.ports import free_port

pytestmark = pytest.mark.cluster
LONG = [3 + number % 400 for number in range(300)]
NUM_STAGES = 2
CHUNK = "--worker-prefill-chunk=32"


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A stage that a test stops is not missed before the test goes on."""
    flags = [TRANSFERS, CHUNK, f"--pipeline-stages={NUM_STAGES}"]
    flags += ["--conductor-peer-timeout-s=30", "--hang-timeout-s=never"]
    with tiny_server(tiny, tmp_path_factory.mktemp("mc"), *flags) as running:
        yield running


def test_text_is_that_of_an_unsplit_instance(tiny: Path, server: Server, run_dir: Path) -> None:
    prompts = [LONG, PROMPT, LONG[:200] + PROMPT, PROMPT[:3]]
    with tiny_server(tiny, run_dir, TRANSFERS, CHUNK) as unsplit:
        expected = [text_of(complete(unsplit, prompt=prompt, num_tokens=20)) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        for _ in range(2):
            answers = threads.map(lambda prompt: complete(server, prompt=prompt, num_tokens=20), prompts)
            assert [text_of(answer) for answer in answers] == expected
    assert cached_tokens(complete(server, prompt=LONG, num_tokens=2)) == 296
    wait_until_idle(server, num_stages=NUM_STAGES)


VICTIMS = [
    name for part in ("prefill-0.0", "prefill-0.1", "decode-0") for name in (part, f"{part}/messenger")
]


@pytest.mark.parametrize(
    "victims",
    [
        VICTIMS[::2] + VICTIMS[3::2],
        pytest.param(5 * VICTIMS, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
    ids=["each", "soak"],
)
def test_process_that_is_killed_in_mid_prefill_fails_no_request(server: Server, victims: list[str]) -> None:
    prompts = [LONG[number:] for number in range(4)]
    expected = [text_of(complete(server, prompt=prompt, num_tokens=30)) for prompt in prompts]
    for number, victim in enumerate(victims):
        before = server.children()
        last_stage = server.pid_of("prefill-0.1")
        os.kill(last_stage, signal.SIGSTOP)  # so that no prompt is through
        with ThreadPoolExecutor(len(prompts)) as threads:
            try:
                answers = [
                    threads.submit(complete, server, prompt=prompt, num_tokens=30, cache_salt=f"{number}")
                    for prompt in prompts
                ]
                eventually(lambda: are_prefilling(server, len(prompts)), "all prompts are being prefilled")
                os.kill(server.pid_of(victim), signal.SIGKILL)
            finally:
                with contextlib.suppress(ProcessLookupError):  # it may be the victim
                    os.kill(last_stage, signal.SIGCONT)
            try:
                assert [text_of(answer.result()) for answer in answers] == expected, victim
            except httpx.TimeoutException as late:
                late.add_note(f"the victim was {victim}")
                raise
        wait_until_idle(server, num_stages=NUM_STAGES)
        assert {name for name, _ in server.children().items() - before.items()} == {victim}


def are_prefilling(server: Server, num_requests: int) -> bool:
    return metric(server, "mooncake_requests_by_state", state="prefilling") == num_requests


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_random_kills_and_hang_ups_never_change_a_text(server: Server, num_kills: int) -> None:
    prompts = [LONG[40 * index :] for index in range(5)]
    kill_at_random(server, prompts, num_tokens=20, num_kills=num_kills, num_stages=NUM_STAGES, hang_ups=0.3)


def test_stages_on_different_nodes_find_each_other_again_after_one_was_stopped_for_good(
    tiny: Path, run_dir: Path, tmp_path: Path
) -> None:
    """One supervisor a stage, as on two nodes."""
    ClusterKey.generate().save(tmp_path / "key")
    conductor, reply, link = free_port(), free_port(), free_port()
    common = [
        CHUNK,
        f"--security-key-file={tmp_path / 'key'}",
        f"--conductor-endpoint=tcp://127.0.0.1:{conductor}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{reply}",
    ]
    stages = [
        [
            "--role=prefill",
            "--instance=split",
            "--pipeline-stages=2",
            f"--pipeline-stage={number}",
            f"--pipeline-endpoints=tcp://127.0.0.1:{link}",
        ]
        for number in range(2)
    ]
    stages[0].append(f"--pipeline-listen-endpoint=tcp://0.0.0.0:{link}")
    waiting = "waiting for stage 0"
    folders = [run_dir / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    with (
        tiny_server(tiny, run_dir, TRANSFERS, "--role=conductor", *common) as front,
        tiny_server(tiny, folders[0], "--role=decode", *common),
        tiny_server(tiny, folders[1], *stages[1], *common, "--hang-timeout-s=8", until=waiting) as last,
        tiny_server(tiny, folders[2], *stages[0], *common),
    ):
        answer = complete(front, prompt=LONG, num_tokens=5)
        assert cached_tokens(answer) == 0
        pid = last.pid_of("split.1")
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: not is_ready(front), "the group has left")
        last.wait_for_line(r"no sign of life for 8 s \(T \(stopped\)\), ending it")
        eventually(lambda: is_ready(front), "the group is back")
        again = complete(front, prompt=LONG, num_tokens=5)
        assert (text_of(again), cached_tokens(again)) == (text_of(answer), 296)
