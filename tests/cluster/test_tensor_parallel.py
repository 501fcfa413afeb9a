"""Instances of several ranks, as a user starts them: of any degree, and with ranks that die or hang."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.test_equality import reference
from tests.cluster.tiny_cluster import ONE_THREAD, TRANSFERS, body, is_ready, samples
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
PROMPTS = [[3 + number % 400 for number in range(length)] for length in (100, 9, 65)]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    """Two ranks cannot share its KV heads out evenly."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    model = tiny_model("smollm2", directory, num_key_value_heads=3, num_hidden_layers=2)
    write_tiny_tokenizer(directory)
    return directory, model


@pytest.fixture
def common(model: tuple[Path, object], run_dir: Path) -> list[str]:
    """What all nodes of a cluster are told."""
    ClusterKey.generate().save(run_dir / "key")
    return [
        f"--model={model[0]}",
        "--kvcache-block-size=8",
        ONE_THREAD,
        "--kvcache-pool-bytes=8MiB",
        "--kvcache-device-bytes=1MiB",
        "--worker-prefill-chunk=32",
        "--conductor-peer-timeout-s=3",
        f"--security-key-file={run_dir / 'key'}",
        f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}",
    ]


@pytest.fixture
def front(common: list[str], run_dir: Path) -> Iterator[Server]:
    with ForkedServer("--role=conductor", TRANSFERS, *common, run_dir=run_dir) as running:
        yield running


def complete(front: Server, prompt: list[int]) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt were reused."""
    fields = body(prompt, NUM_TOKENS, return_token_ids=True)
    answer = HTTP.post(f"{front.url}/v1/completions", json=fields, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    num_cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
    return content["choices"][0]["token_ids"], num_cached


def wait_until_idle(front: Server, num_pools: int) -> None:
    """No page of any rank is held by anybody."""

    def is_idle() -> bool:
        held, states = samples(front, "mooncake_pool_users", "mooncake_requests_by_state")
        return len(held) == 3 * num_pools and not any((*held.values(), *states.values()))

    eventually(is_idle, "everything is given back")


@pytest.mark.parametrize(
    ("degrees", "ends"),
    [
        (
            {"prefill": 2, "decode": 1},
            [("prefill.1/messenger", signal.SIGKILL), ("prefill.1", signal.SIGKILL)],
        ),
        ({"prefill": 1, "decode": 2}, [("decode.1", signal.SIGSTOP), ("decode.0", signal.SIGKILL)]),
        ({"both": 2}, [("both.1", signal.SIGSTOP), ("both.0", signal.SIGKILL)]),
    ],
    ids=["prefill", "decode", "both"],
)
def test_ranks_answer_as_one_does_and_no_request_is_lost_with_one(
    degrees: dict[str, int],
    ends: list[tuple[str, signal.Signals]],
    model: tuple[Path, transformers.PreTrainedModel],
    common: list[str],
    front: Server,
    run_dir: Path,
) -> None:
    expected = [reference(model[1], prompt, NUM_TOKENS) for prompt in PROMPTS]

    def node(role: str) -> Server:
        (run_dir / role).mkdir()
        arguments = [f"--role={role}", f"--instance={role}", f"--worker-tensor-parallel={degrees[role]}"]
        return ForkedServer(*arguments, *common, run_dir=run_dir / role)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        nodes = {role: stack.enter_context(node(role)) for role in degrees}

        def asked() -> list[tuple[list[int], int]]:
            return list(threads.map(lambda prompt: complete(front, prompt), PROMPTS))

        assert [tokens for tokens, _ in asked()] == expected
        assert asked() == [
            (tokens, (len(p) - 1) // 8 * 8) for tokens, p in zip(expected, PROMPTS, strict=True)
        ]
        group = next(nodes[role] for role, degree in degrees.items() if degree > 1)
        for name, end in ends:
            pid = group.pid_of(name)
            answers = threads.submit(asked)
            os.kill(pid, end)
            if end is signal.SIGSTOP:
                eventually(lambda: not is_ready(front), "the group has left")
                os.kill(pid, signal.SIGCONT)
            assert [tokens for tokens, _ in answers.result()] == expected
            eventually(lambda: is_ready(front), "the group is back")
        wait_until_idle(front, num_pools=sum(degrees.values()))


def test_more_ranks_than_kv_heads_are_refused(common: list[str], run_dir: Path) -> None:
    server = ForkedServer("--role=decode", "--worker-tensor-parallel=4", *common, run_dir=run_dir).start()
    try:
        server.wait_for_line("worker.tensor_parallel: 4 ranks for a model of 3 KV heads")
    finally:
        server.__exit__()
    assert server.process.returncode == 1
