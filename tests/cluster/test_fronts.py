"""A front in a process of its own beside the Conductor's, with instances that compute nothing."""

import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.front import instant_workers
from mooncake.security.api_keys import add_api_key
from mooncake.security.keys import ClusterKey
from tests.cluster.forked import ForkedServer, launch
from tests.cluster.harness import HTTP, Server, eventually
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.cluster
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Fronts:
    """`own` is the Conductor's node, which has its own front; `other` has nothing but a front."""

    own: Server
    other: Server

    def metric(self, name: str) -> float:
        """What the Conductor shows: the sum of all its samples."""
        text = HTTP.get(f"{self.own.url}/metrics", timeout=DEADLINE_S).text
        return sum(map(float, re.findall(rf"^{name}.* (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    with two_fronts(tmp_path_factory.mktemp("fronts")) as started:
        yield started


@contextlib.contextmanager
def two_fronts(folder: Path, *flags: str) -> Iterator[Fronts]:
    """Fronts of one Conductor, both with these flags."""
    (folder / MODEL).mkdir()
    tiny_model("smollm2", folder / MODEL, max_position_embeddings=100_000)
    write_tiny_tokenizer(folder / MODEL)
    ClusterKey.generate().save(folder / "key")
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    shared = [f"--model={folder / MODEL}", f"--security-key-file={folder / 'key'}"]
    shared += [f"--conductor-endpoint={endpoint}", "--conductor-reply-endpoint=tcp://127.0.0.1:*"]
    workers = launch(_be_instant_workers, shared, dict(os.environ), output=1)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="mc-") as run_dir,
            ForkedServer("--role=conductor", *shared, *flags, run_dir=Path(run_dir)) as own,
            ForkedServer("--role=front", *shared, *flags, run_dir=Path(run_dir)) as other,
        ):
            for server in (own, other):
                eventually(lambda url=server.url: is_ready(url), "there is a pair", DEADLINE_S)
            yield Fronts(own, other)
    finally:
        workers.kill()
        workers.wait()


def _be_instant_workers(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    instant_workers.main()


def is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/ready", timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False


def begin(client: httpx.Client, num_tokens: int) -> httpx.Response:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": num_tokens, "stream": True}
    request = client.build_request("POST", "/v1/completions", json=body | {"return_token_ids": True})
    return client.send(request, stream=True)


def rest(response: httpx.Response) -> list[int]:
    found = re.findall(r'"token_ids":\s*\[([\d, ]*)\]', response.read().decode())
    return [int(token_id) for part in found for token_id in part.split(",") if token_id.strip()]


def test_both_fronts_give_the_same_answer(fronts: Fronts) -> None:
    answers = []
    for server in (fronts.own, fronts.other):
        with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
            answers.append(rest(begin(client, num_tokens=20)))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 20


def test_what_only_the_conductors_own_front_knows_is_refused_by_others(fronts: Fronts) -> None:
    naming = {"model": MODEL, "prompt": "x", "context_cache": "book"}
    for path, body in (("context_caches", {"prompt": "x" * 100}), ("completions", naming)):
        refused = HTTP.post(f"{fronts.other.url}/v1/{path}", json=body, timeout=DEADLINE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "context_caches_elsewhere")
    assert HTTP.get(f"{fronts.own.url}/v1/context_caches", timeout=DEADLINE_S).status_code == 200
    pages = [
        HTTP.get(f"{server.url}/dashboard", timeout=DEADLINE_S).status_code
        for server in (fronts.own, fronts.other)
    ]
    assert pages == [200, 404]


def test_what_a_killed_front_had_ends_and_others_go_on(fronts: Fronts) -> None:
    with (
        httpx.Client(base_url=fronts.own.url, timeout=DEADLINE_S) as staying,
        httpx.Client(base_url=fronts.other.url, timeout=DEADLINE_S) as lost,
    ):
        # 20 ms a token: one takes ten times as long as anything here may, the other not much longer than
        # until a front counts as dead, after 5 s. Headers come with the first token.
        goes = begin(lost, num_tokens=90_000)
        stays = begin(staying, num_tokens=350)
        os.kill(fronts.other.pid_of("front"), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            goes.read()  # its first tokens, and then no more
        failed = 'mooncake_ended_requests_total{outcome="failed"}'
        eventually(lambda: fronts.metric(failed) == 1, "what it had is given up")
        assert len(rest(stays)) == 350
        eventually(lambda: fronts.metric("mooncake_requests_by_state") == 0, "both are over")
    # Its supervisor has started it again.
    eventually(lambda: is_ready(fronts.other.url), "the front is back", DEADLINE_S)
    with httpx.Client(base_url=fronts.other.url, timeout=DEADLINE_S) as client:
        assert len(rest(begin(client, num_tokens=5))) == 5


def test_without_its_conductor_a_front_is_unavailable_until_there_is_one_again(fronts: Fronts) -> None:
    fronts.own.stop()
    eventually(lambda: not is_ready(fronts.other.url), "the front misses its conductor", DEADLINE_S)
    with httpx.Client(base_url=fronts.other.url, timeout=DEADLINE_S) as client:
        refused = begin(client, num_tokens=5)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
    with fronts.own:
        eventually(lambda: is_ready(fronts.other.url), "the front has found the new conductor", DEADLINE_S)
        with httpx.Client(base_url=fronts.other.url, timeout=DEADLINE_S) as client:
            assert len(rest(begin(client, num_tokens=5))) == 5


def test_a_keys_limits_hold_at_all_fronts_together(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice = add_api_key(keys, "alice", {"tokens_per_minute": 60})
    bob = add_api_key(keys, "bob", {"max_concurrent": 2})

    def client(server: Server, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE_S
        )

    def ask(client: httpx.Client, num_prompt_tokens: int, num_tokens: int = 5) -> httpx.Response:
        body = {"model": MODEL, "prompt": [5] * num_prompt_tokens, "max_tokens": num_tokens}
        return client.post("/v1/completions", json=body)

    def code(response: httpx.Response) -> tuple[int, str]:
        return response.status_code, response.json()["error"]["code"]

    with (
        two_fronts(tmp_path, f"--http-api-keys-file={keys}") as fronts,
        client(fronts.own, alice) as own,
        client(fronts.other, alice) as other,
    ):
        assert code(ask(own, 61)) == (403, "invalid_value")
        assert ask(own, 25).status_code == 200
        assert ask(other, 25, num_tokens=300).status_code == 200  # what it takes minutes to gain
        charged = 'mooncake_tenant_tokens_total{kind="charged",tenant="alice"}'
        eventually(lambda: fronts.metric(charged) == 355, "the outputs are charged")
        for asked in (own, other):
            refused = ask(asked, 5)
            assert code(refused) == (429, "rate_limit_exceeded")
            assert 1 <= int(refused.headers["retry-after"]) <= 300
        refusals = 'mooncake_rejections_total{reason="tokens_per_minute"}'
        eventually(lambda: fronts.metric(refusals) == 2, "both refusals are counted")

        with client(fronts.own, bob) as own, client(fronts.other, bob) as other:
            streams = [begin(asked, num_tokens=90_000) for asked in (own, other)]
            for asked in (own, other):
                assert code(ask(asked, 5)) == (429, "rate_limit_exceeded")
            streams[0].close()
            eventually(lambda: ask(other, 5).status_code == 200, "one ends, another may begin")
            streams[1].close()
