"""A worker's connection to the Conductor breaks, and takes with it what was on its way."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer
from tests.cluster.harness import eventually
from tests.cluster.tiny_cluster import TRANSFERS, body, post, tiny_server
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.relay import relay_to

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(("behind_the_relay", "state"), [("prefill", "prefilling"), ("decode", "reserving")])
def test_a_request_whose_order_was_lost_is_answered(
    tiny: Path, run_dir: Path, tmp_path: Path, behind_the_relay: str, state: str
) -> None:
    ClusterKey.generate().save(tmp_path / "cluster.key")
    port = free_port()
    common = [
        f"--security-key-file={tmp_path / 'cluster.key'}",
        f"--conductor-reply-endpoint=tcp://127.0.0.1:{free_port()}",
    ]

    def server(role: str, conductor_port: int, until: str) -> ForkedServer:
        endpoint = f"--conductor-endpoint=tcp://127.0.0.1:{conductor_port}"
        return tiny_server(tiny, run_dir, TRANSFERS, f"--role={role}", *common, endpoint, until=until)

    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(relay_to(port))
        conductor = stack.enter_context(server("conductor", port, "^ready in"))
        for role in ("prefill", "decode"):
            stack.enter_context(server(role, relay.port if role == behind_the_relay else port, "^ready in"))
        client = stack.enter_context(httpx.Client(base_url=conductor.url, timeout=DEADLINE_S))
        eventually(lambda: client.get("/ready").status_code == 200, "the cluster is ready")
        pool = stack.enter_context(ThreadPoolExecutor())
        relay.swallows = True
        answer = pool.submit(post, conductor, body([5, 6, 7], num_tokens=3))
        eventually(lambda: f'state="{state}"}} 1.0' in client.get("/metrics").text, "it has been ordered")
        relay.break_connections()
        relay.swallows = False
        assert answer.result().raise_for_status().json()["usage"]["completion_tokens"] == 3
