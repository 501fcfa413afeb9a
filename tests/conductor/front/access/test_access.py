"""Who is let in, and how much of it; over TLS; for web pages of other origins."""

import asyncio
import base64
import json
import logging
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from conductor.front.access.access import KeyLimits, KeyUse
from conductor.front.access.key_ring import KeyRing
from conductor.front.config import FrontConfig
from conductor.front.errors import RateLimitedError
from conductor.front.http.certificate import Certificate
from conductor.front.process import server
from conductor.front.requests.validation import ApiEndpoint, Job, read_job
from conductor.front.routes import app
from mooncake.bus.in_process import Inbox, InProcessLink
from mooncake.errors import ConfigError, RequestError
from mooncake.messages.fronts import QuotaClaim, Rejected
from mooncake.messages.requests import Request
from mooncake.security.api_keys import ApiKey, add_api_key, digest
from tests.certificates import self_signed
from tests.conductor.front.fakes import (
    CLUSTER_KEY,
    DEADLINE_S,
    MODEL_NAME,
    FakeCluster,
    Running,
    byte_model,
    running_front,
)

PROMPT = {"model": MODEL_NAME, "prompt": "x" * 40}


def key(name: str = "a", **limits: Any) -> ApiKey:
    return ApiKey(name=name, sha256=name * 64, **limits)


def test_a_rate_may_be_used_at_once_and_then_fills_up_evenly() -> None:
    limits, limited = KeyLimits(), key(requests_per_minute=3)
    for _ in range(3):
        limits.enter(limited, now_s=100.0)
    with pytest.raises(RateLimitedError) as caught:
        limits.enter(limited, now_s=105.0)
    assert caught.value.retry_after_s == pytest.approx(15)
    limits.enter(limited, now_s=120.0)
    with pytest.raises(RateLimitedError):
        limits.enter(limited, now_s=121.0)
    limits.enter(key("b", requests_per_minute=3), now_s=121.0)
    for _ in range(3):
        limits.enter(limited, now_s=1000.0)
    with pytest.raises(RateLimitedError):
        limits.enter(limited, now_s=1000.0)


def test_a_slow_rate_lets_the_first_request_in() -> None:
    limits, limited = KeyLimits(), key(requests_per_minute=0.5)
    limits.enter(limited, now_s=0.0)
    with pytest.raises(RateLimitedError) as caught:
        limits.enter(limited, now_s=60)
    assert caught.value.retry_after_s == pytest.approx(60)
    limits.enter(limited, now_s=120.0)


def test_as_many_run_as_may_and_what_was_refused_is_not_counted() -> None:
    limits, limited = KeyLimits(), key(max_concurrent=2, requests_per_minute=1000)
    limits.enter(limited, now_s=0.0)
    limits.enter(limited, now_s=0.0)
    for _ in range(3):
        with pytest.raises(RateLimitedError, match="running"):
            limits.enter(limited, now_s=0.0)
    limits.leave(limited)
    limits.enter(limited, now_s=0.0)


def test_each_choice_counts_as_one_that_runs() -> None:
    limits, limited = KeyLimits(), key(max_concurrent=4)

    def begun(num_choices: int) -> KeyUse:
        use = KeyUse(limited, limits, now_s=0.0)
        try:
            use.take(num_choices)
        except RequestError:
            use.end()
            raise
        return use

    first = begun(3)
    with pytest.raises(RateLimitedError, match="3 choices of the key 'a' are running; at most 4 may"):
        begun(2)
    second = begun(1)
    with pytest.raises(RateLimitedError, match="4 choices"):
        begun(1)
    first.end()
    with pytest.raises(RequestError, match="5 choices are more than the key 'a' may have") as caught:
        begun(5)  # which would not help later either
    assert (caught.value.status, caught.value.param) == (403, "n")
    third = begun(3)
    use = limits.use_of(limited)
    assert use is not None
    assert (use.num_running, use.num_let_in, use.num_limited) == (4, 3, 3)
    second.end()
    third.end()
    assert use.num_running == 0


def test_keys_come_and_go_with_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    first = add_api_key(path, "first", {})
    ring = KeyRing(path)
    assert ring.find(f"Bearer {first}", now_s=10.0).name == "first"
    second = add_api_key(path, "second", {})
    assert ring.find(f"bearer  {second}", now_s=20.0).name == "second"
    whole = path.read_text()
    with caplog.at_level(logging.ERROR):
        path.write_text(whole[:-30])  # half-way through an edit
        assert ring.find(f"Bearer {first}", now_s=30.0).name == "first"
    assert "stay as they were" in caplog.text
    path.write_text(whole[whole.index("- name: second") :])
    with pytest.raises(RequestError, match="revoked") as caught:
        ring.find(f"Bearer {first}", now_s=40.0)
    assert caught.value.status == 401
    assert first not in str(caught.value) + caplog.text
    assert ring.find(f"Bearer {second}", now_s=40.0).name == "second"
    for header in (None, "", first, f"Basic {second}", "Bearer ", "Bearer \xff"):
        with pytest.raises(RequestError):
            ring.find(header, now_s=40.0)


def job_of(of_key: ApiKey | None, **fields: Any) -> Job:
    body = json.dumps({**PROMPT, **fields}).encode()
    return read_job(ApiEndpoint.COMPLETION, body, byte_model(), MODEL_NAME, 8, of_key)


def test_a_key_limits_the_priority_of_its_requests() -> None:
    limited = key(priority=3)
    assert [job_of(of, priority=p).priority for of, p in ((None, -9), (limited, 3), (limited, 7))] == [
        -9,
        3,
        7,
    ]
    assert [job_of(of).priority for of in (None, key(), limited)] == [0, 0, 3]
    assert job_of(limited, priority=7).requests("ipc://x")[0].priority == 7
    assert job_of(key(priority=-3), priority=-3).priority == -3
    for of, wanted, first in ((limited, 2, 3), (key(), -1, 0), (key(priority=-3), -4, -3)):
        with pytest.raises(RequestError, match=f"{first} or more") as caught:
            job_of(of, priority=wanted)
        assert (caught.value.status, caught.value.param) == (403, "priority")


def test_kvcache_is_shared_within_a_key_only() -> None:
    def keys_of(key: ApiKey | None, **fields: Any) -> tuple[bytes, ...]:
        job = job_of(key, **fields)
        assert job.is_salted == bool(key or fields)
        return tuple(job.prompts[0].keys)

    alice, bob = key("a"), key("b")
    different = {keys_of(None), keys_of(alice), keys_of(bob), keys_of(alice, cache_salt="s")}
    assert len(different) == 4
    # Nobody gets at another's by naming its salt, least of all without a key.
    team = key("c", cache_group="team")
    different |= {keys_of(team), keys_of(team, cache_salt="s")}
    assert keys_of(key("d", cache_group="team")) == keys_of(team)
    for other in (alice, team):
        for named in (other.salt, f"{other.salt}\0s"):
            for thief in (None, bob):
                assert keys_of(thief, cache_salt=named) not in different
    assert keys_of(alice, cache_salt="") == keys_of(alice)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    folder = tmp_path_factory.mktemp("front")
    secret = add_api_key(folder / "keys", "alice", {"max_concurrent": 1})
    config = {"api_keys_file": folder / "keys", "cors_origins": ("https://page.example",)}
    with running_front(folder, byte_model(), **config) as front:
        yield front, secret


def test_only_who_has_a_key_is_served(guarded: tuple[Running, str]) -> None:
    front, secret = guarded
    for headers in ({}, {"authorization": "Bearer mck-wrong"}):
        response = httpx.post(f"{front.url}/v1/completions", json=PROMPT, headers=headers, timeout=DEADLINE_S)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        assert response.json()["error"]["code"] in ("missing_api_key", "invalid_api_key")
    for path in ("/v1/models", "/openapi.json", "/v1/nothing"):
        assert httpx.get(front.url + path, timeout=DEADLINE_S).status_code == 401
    for path in ("/health", "/live", "/ready", "/metrics", "/version"):
        assert httpx.get(front.url + path, timeout=DEADLINE_S).status_code == 200
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=secret, max_retries=0, timeout=DEADLINE_S)
    assert client.completions.create(**PROMPT).choices[0].text == "Hello!"  # type: ignore[call-overload]
    assert front.cluster.submitted[-1].is_salted
    assert front.metric("mooncake_requests_denied_total", reason="no_key") == 5


def test_a_web_page_is_told_of_a_bug(guarded: tuple[Running, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> None:
        raise KeyError("bug")

    front, secret = guarded
    monkeypatch.setattr(app, "check_model", bug)
    headers = {"authorization": f"Bearer {secret}", "origin": "https://page.example"}
    response = httpx.get(f"{front.url}/v1/models/x", headers=headers, timeout=DEADLINE_S)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    assert response.headers["x-request-id"]


def test_a_key_may_have_no_more_requests_than_it_may(guarded: tuple[Running, str]) -> None:
    front, secret = guarded
    may_end = threading.Event()

    async def stall(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        await cluster.loop.run_in_executor(None, may_end.wait, DEADLINE_S)
        await cluster.say(request, "ab")

    front.cluster.behaviour = stall
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=secret, max_retries=0, timeout=DEADLINE_S)
    stream = client.completions.create(**PROMPT, stream=True)  # type: ignore[call-overload]
    next(stream)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**PROMPT)  # type: ignore[call-overload]
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    may_end.set()
    list(stream)
    front.cluster.reset()


def test_a_key_may_have_no_more_choices_than_it_may(tmp_path: Path) -> None:
    may_end = threading.Event()

    async def stall(cluster: FakeCluster, request: Request) -> None:
        await cluster.send_tokens(request, b"a")
        await cluster.loop.run_in_executor(None, may_end.wait, DEADLINE_S)
        await cluster.say(request, "ab")

    secret = add_api_key(tmp_path / "keys", "alice", {"max_concurrent": 2})
    with running_front(tmp_path, byte_model(), api_keys_file=tmp_path / "keys") as front:
        front.cluster.behaviour = stall
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=secret, max_retries=0, timeout=DEADLINE_S)
        with pytest.raises(openai.PermissionDeniedError, match="3 choices are more than the key 'alice' may"):
            client.completions.create(**PROMPT, n=3)  # type: ignore[call-overload]
        stream = client.completions.create(**PROMPT, stream=True, n=2)  # type: ignore[call-overload]
        next(stream)
        with pytest.raises(openai.RateLimitError, match="2 choices of the key 'alice' are running") as caught:
            client.completions.create(**PROMPT)  # type: ignore[call-overload]
        assert caught.value.code == "rate_limit_exceeded"
        may_end.set()
        list(stream)


def test_the_conductor_is_told_what_a_key_may_use_in_the_cluster(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice = add_api_key(keys, "alice", {"tokens_per_minute": 40, "max_concurrent": 9})
    bob = add_api_key(keys, "bob", {"requests_per_minute": 100})

    async def refuse(cluster: FakeCluster, request: Request) -> None:
        await cluster.to_front(Rejected(request.request_id, "tokens_per_minute", 429, "too many", 7.5))

    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        clients = [
            openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S)
            for key in (alice, bob)
        ]
        for client in clients:
            client.completions.create(model=MODEL_NAME, prompt=["a" * 12, "b" * 20], n=2)
        claims = [claim for claim in front.cluster.claims if claim is not None]
        assert len(front.cluster.claims) == 8
        assert claims == [QuotaClaim(40, 9, num_running=4, num_tokens=32)]
        with pytest.raises(openai.PermissionDeniedError, match="41 tokens, and the key 'alice' may use 40"):
            clients[0].completions.create(model=MODEL_NAME, prompt="a" * 41)
        front.cluster.behaviour = refuse
        with pytest.raises(openai.RateLimitError, match="too many") as caught:
            clients[0].completions.create(**PROMPT)  # type: ignore[call-overload]
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "8"


def test_web_pages_of_named_origins_may_ask(guarded: tuple[Running, str]) -> None:
    front, _ = guarded
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, status in (("https://page.example", 200), ("https://other.example", 400)):
        headers = {"origin": origin, **asking}
        response = httpx.options(f"{front.url}/v1/completions", headers=headers, timeout=DEADLINE_S)
        assert response.status_code == status
    response = httpx.get(
        f"{front.url}/v1/models", headers={"origin": "https://page.example"}, timeout=DEADLINE_S
    )
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://page.example"


def certificate(folder: Path) -> Path:
    """A new one, with its key, and a copy that stays."""
    cert, _ = self_signed(folder)
    copy = folder / f"{cert.stat().st_mtime_ns}.pem"
    copy.write_bytes(cert.read_bytes())
    return copy


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_with_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    def answer_to(trusted: Path) -> str:
        trusting = ssl.create_default_context(cafile=trusted)
        with httpx.Client(base_url=front.url, verify=trusting, timeout=DEADLINE_S) as client:
            while client.get("/ready").status_code == 503:  # it has not heard of its cluster yet
                assert time.monotonic() < deadline_s
            text: str = client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"]
        return text

    deadline_s = time.monotonic() + 2 * DEADLINE_S
    first = certificate(tmp_path)
    paths = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with running_front(tmp_path, byte_model(), **paths) as front:
        assert front.url.startswith("https://")
        assert answer_to(first) == "Hello!"
        second = certificate(tmp_path)
        while True:
            try:
                assert answer_to(second) == "Hello!"
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline_s
        with pytest.raises(httpx.ConnectError):
            answer_to(first)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_is_half_written_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate(tmp_path)
    used = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    (tmp_path / "cert.pem").write_text("no certificate")
    used.look()
    assert "the certificate stays as it was: http.tls_cert" in caplog.text
    caplog.clear()
    used.look()
    assert not caplog.text
    certificate(tmp_path)
    used.look()
    assert "read again" in caplog.text


def test_an_unusable_certificate_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"http\.tls_cert"):
        Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_the_address_of_the_admin_listener_may_be_taken(tmp_path: Path) -> None:
    with server.listen("127.0.0.1", 0) as taken:
        config = FrontConfig(
            port=0,
            admin_listen=f"127.0.0.1:{taken.getsockname()[1]}",
            reply_endpoint=f"ipc://{tmp_path}/reply",
            cluster_key=CLUSTER_KEY,
            served_model_name=MODEL_NAME,
        )
        with pytest.raises(ConfigError, match="in use; choose another with --http-admin-listen"):
            asyncio.run(
                server.serve(config, byte_model(), InProcessLink(Inbox(), Inbox()), CollectorRegistry())
            )


def test_what_keys_may_and_do_is_measured_and_no_key_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = tmp_path / "keys"
    secret = add_api_key(keys, "alice", {"requests_per_minute": 2, "max_context_cache_tokens": 5})
    wrong, login = "mck-" + "w" * 43, ("anyone", secret)
    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        told = []
        for _ in range(4):
            for key in (secret, wrong):
                headers = {"authorization": f"Bearer {key}"}
                response = httpx.post(
                    f"{front.url}/v1/completions", json=PROMPT, headers=headers, timeout=DEADLINE_S
                )
                told += [response.text, str(response.headers)]
        for path in ("/v1/completions", "/dashboard", "/metrics"):
            told.append(httpx.get(front.url + path, auth=login, timeout=DEADLINE_S).text)
        add_api_key(keys, "bob", {})
        bare = httpx.post(
            f"{front.url}/v1/completions", json=PROMPT, headers={"authorization": secret}, timeout=DEADLINE_S
        )
        told.append(bare.text)
        assert front.metric("mooncake_api_key_limit", key="alice", limit="requests_per_minute") == 2
        assert front.metric("mooncake_api_key_limit", key="alice", limit="max_context_cache_tokens") == 5
        assert front.metric("mooncake_api_key_requests_total", key="alice", outcome="let_in") == 2
        assert front.metric("mooncake_api_key_requests_total", key="alice", outcome="limited") == 2
        assert front.metric("mooncake_api_key_running", key="alice") == 0
    told += [caplog.text, Path("/proc/self/cmdline").read_text()]
    basic = base64.b64encode(":".join(login).encode()).decode()
    for text in told:
        for hidden in (secret, wrong, basic, digest(secret), digest(wrong), CLUSTER_KEY.to_text()):
            assert hidden not in text
