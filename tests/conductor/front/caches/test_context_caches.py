"""Context caches as clients see them, and what the cluster is asked to keep."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from conductor.front.caches.beginning import Beginning
from conductor.front.caches.cache_file import SCHEMA, CacheFile
from conductor.front.caches.context_caches import CacheUse, ContextCache, ContextCaches
from conductor.front.errors import UnavailableError
from conductor.front.generation.link import Link
from mooncake.errors import NotStoredError, RequestError
from mooncake.messages.blocks import block_keys, root_key
from mooncake.messages.costs import Costs
from mooncake.messages.fronts import ClusterState, DropContext, KeepContext
from mooncake.messages.requests import Request
from mooncake.node.state_file import StateFile
from mooncake.security.api_keys import ApiKey, add_api_key
from tests.conductor.front.fakes import (
    DEADLINE_S,
    MODEL_NAME,
    Behaviour,
    FakeCluster,
    Running,
    byte_model,
    raw_request,
    running_front,
)

PATH = "/v1/context_caches"
SYSTEM = {"role": "system", "content": "You know this text by heart: " + "x" * 40}
RENDERED = f"system: {SYSTEM['content']}\n"
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look"}}


def call(front: Running, method: str, path: str = "", body: Any = None, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, front.url + PATH + path, json=body, headers=headers, timeout=DEADLINE_S)


def complete(front: Running, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"model": MODEL_NAME, **fields}
    return httpx.post(front.url + path, json=body, headers=headers, timeout=DEADLINE_S)


@pytest.fixture(autouse=True)
def _no_caches(front: Running) -> Iterator[None]:
    yield
    dropped = [DropContext(cache["id"]) for cache in call(front, "GET").json()["data"]]
    for drop in dropped:
        call(front, "DELETE", f"/{drop.context_id}")
    # Or they would come while the next test looks at what comes.
    front.cluster.wait_until(lambda: all(drop in front.cluster.contexts for drop in dropped))


def code_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_a_conversation_goes_on_behind_its_cache(front: Running) -> None:
    made = call(front, "POST", body={"name": "book", "messages": [SYSTEM], "ttl": 60})
    assert made.status_code == 200
    cache = made.json()
    assert cache["object"] == "context_cache"
    assert (cache["name"], cache["status"], cache["tokens"]) == ("book", "ready", len(RENDERED))
    assert 55 <= cache["expires_at"] - time.time() <= 61
    computed = front.cluster.submitted[-1]
    assert bytes(computed.token_ids).decode() == RENDERED
    assert computed.sampling.max_tokens == 1
    front.cluster.wait_until(lambda: len(front.cluster.contexts) == 1)
    assert front.cluster.contexts == [KeepContext(cache["id"], computed.block_keys, 60.0)]

    for name in ("book", cache["id"]):
        answer = complete(front, messages=[HI], context_cache=name)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello!"
        used = front.cluster.submitted[-1]
        assert bytes(used.token_ids).decode() == RENDERED + "user: hi\nassistant: "
        assert used.block_keys[: len(computed.block_keys)] == computed.block_keys


def test_a_prompt_goes_on_behind_text_or_tokens(front: Running) -> None:
    call(front, "POST", body={"name": "text", "prompt": "a" * 20})
    call(front, "POST", body={"name": "tokens", "prompt": list(b"b" * 20)})
    call(front, "POST", body={"name": "talk", "messages": [SYSTEM]})
    for name, before in (("text", "a" * 20), ("tokens", "b" * 20), ("talk", RENDERED)):
        assert complete(front, prompt=["c", [100]], context_cache=name).status_code == 200
        last = [bytes(request.token_ids).decode() for request in front.cluster.submitted[-2:]]
        assert sorted(last) == [before + "c", before + "d"]


def test_what_is_saved_is_counted_by_cache_and_key(front: Running) -> None:
    def holding(num_cached_tokens: int) -> Behaviour:
        async def answer(cluster: FakeCluster, request: Request) -> None:
            await cluster.send_tokens(request, b"a", num_cached_tokens=num_cached_tokens)
            await cluster.say(request, "ab")

        return answer

    def counted(name: str) -> float:
        return front.metric(f"mooncake_context_cache_{name}_total", key="(none)")

    costs = Costs(constant_s=1.0, first_s=0.01, second_s=0.001)
    front.publish(msgspec.structs.replace(front.cluster.state, num_prefill=2, prefill_costs=costs))
    names = ("prompts", "saved_tokens", "saved_prefill_seconds")
    before = [counted(name) for name in names]
    for name in ("one", "two"):
        call(front, "POST", body={"name": name, "prompt": name * 12})
    for name, num_cached in (("one", 32), ("two", 16), ("one", 48), ("one", 0)):
        front.cluster.behaviour = holding(num_cached)
        complete(front, prompt="x" * 30, context_cache=name)
    # Of 48 tokens 36 are the cache's: the rest would have been there without it.
    prefill_s = sum(0.01 * saved + 0.001 * saved**2 / 2 for saved in (32, 36))
    one, two = (call(front, "GET", f"/{name}").json()["saved"] for name in ("one", "two"))
    assert one == {"prompts": 3, "tokens": 68, "prefill_seconds": pytest.approx(prefill_s)}
    assert (two["prompts"], two["tokens"]) == (1, 16)
    in_all = [4, 84, prefill_s + 0.16 + 0.128]
    assert [counted(name) - old for name, old in zip(names, before, strict=True)] == pytest.approx(in_all)
    assert front.metric("mooncake_context_caches", key="(none)") == 2
    assert front.metric("mooncake_context_cache_tokens", key="(none)") == 72


def test_list_extend_delete(front: Running) -> None:
    made = [call(front, "POST", body={"prompt": text * 20}).json() for text in "ab"]
    listed = call(front, "GET").json()
    assert [cache["id"] for cache in listed["data"]] == [cache["id"] for cache in made]
    assert listed["quota"] == {"tokens": 1 << 17, "used_tokens": 40}
    longer = call(front, "POST", f"/{made[0]['id']}", {"ttl": 90_000}).json()
    assert longer["expires_at"] - made[0]["expires_at"] > 80_000
    gone = call(front, "DELETE", f"/{made[0]['id']}").json()
    assert gone == {"id": made[0]["id"], "object": "context_cache", "deleted": True}
    front.cluster.wait_until(lambda: len(front.cluster.contexts) == 4)
    assert [type(message) for message in front.cluster.contexts] == [KeepContext] * 3 + [DropContext]
    for response in (
        call(front, "GET", f"/{made[0]['id']}"),
        call(front, "DELETE", f"/{made[0]['id']}"),
        call(front, "POST", f"/{made[0]['id']}", {"ttl": 5}),
    ):
        assert code_of(response) == (404, "context_cache_not_found", None)
    response = complete(front, prompt="x", context_cache=made[0]["id"])
    assert code_of(response) == (404, "context_cache_not_found", "context_cache")


def test_it_ends_with_its_time_to_live(front: Running) -> None:
    call(front, "POST", body={"name": "short", "prompt": "a" * 20, "ttl": 1})
    deadline_s = time.monotonic() + DEADLINE_S
    while call(front, "GET", "/short").status_code == 200:
        assert time.monotonic() < deadline_s
    assert call(front, "GET").json()["data"] == []
    assert call(front, "POST", body={"name": "short", "prompt": "a" * 20}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"prompt": "a" * 20, "messages": [SYSTEM]}, "messages"),
        ({"prompt": "a" * 20, "tools": [TOOL]}, "tools"),
        ({"prompt": "short"}, "prompt"),
        ({"messages": [HI]}, "messages"),
        ({"prompt": "a" * 20, "ttl": 0}, "ttl"),
        ({"prompt": "a" * 20, "name": "no spaces"}, "name"),
        ({"prompt": "a" * 20, "colour": "red"}, "colour"),
        ({"prompt": [300] * 20}, "prompt[0]"),
        ({"prompt": "a" * 1000}, "prompt"),
        ({"prompt": ["a" * 20, "b" * 20]}, "prompt"),
    ],
)
def test_what_cannot_be_cached_is_refused_by_name(front: Running, body: Any, param: str) -> None:
    response = call(front, "POST", body=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert front.cluster.submitted == []


def test_a_use_that_does_not_fit_is_refused(front: Running) -> None:
    call(front, "POST", body={"name": "text", "prompt": "a" * 20, "cache_salt": "s"})
    call(front, "POST", body={"name": "talk", "messages": [SYSTEM], "tools": [TOOL]})
    num_submitted = len(front.cluster.submitted)
    for fields, param in (
        ({"messages": [HI], "context_cache": "text"}, "context_cache"),
        ({"messages": [HI], "context_cache": "talk", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "context_cache": "text", "cache_salt": "t"}, "cache_salt"),
        ({"prompt": "x" * 990, "context_cache": "text"}, "prompt"),
    ):
        response = complete(front, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    odd = [{"role": "user", "content": 5}]
    wrong = complete(front, messages=odd, context_cache="talk", tool_choice="none")
    assert wrong.json()["error"]["param"] == "messages[0].content"
    assert len(front.cluster.submitted) == num_submitted
    response = call(front, "POST", body={"name": "text", "prompt": "b" * 20})
    assert code_of(response) == (409, "context_cache_exists", "name")


def test_tools_come_from_the_cache(front: Running) -> None:
    call(front, "POST", body={"name": "talk", "messages": [SYSTEM], "tools": [TOOL]})
    for choice in ("none", None):
        answer = complete(front, messages=[HI], context_cache="talk", tool_choice=choice)
        # The test's model is not known to write calls, so it cannot be told to.
        assert answer.status_code == (200 if choice == "none" else 400)
    assert bytes(front.cluster.submitted[-1].token_ids).startswith(b"look()\n" + RENDERED.encode())


def test_nothing_is_left_of_a_cache_that_could_not_be_made(front: Running) -> None:
    async def reject(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 429, "too much", 3.0)

    front.cluster.behaviour = reject
    refused = call(front, "POST", body={"name": "n", "prompt": "a" * 20})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")

    async def stall(cluster: FakeCluster, request: Request) -> None:
        """Computes for ever."""

    front.cluster.behaviour = stall
    connection = raw_request(front.address, PATH, b'{"name": "n", "prompt": "%s"}' % (b"a" * 20))
    front.cluster.wait_until(lambda: len(front.cluster.submitted) == 2)
    assert call(front, "GET", "/n").json()["status"] == "creating"
    assert code_of(call(front, "POST", "/n", {"ttl": 5})) == (409, "context_cache_not_ready", None)
    connection.close()
    front.cluster.wait_until(lambda: len(front.cluster.cancelled) == 1)
    deadline_s = time.monotonic() + DEADLINE_S
    while call(front, "GET").json()["data"]:
        assert time.monotonic() < deadline_s
    assert front.cluster.contexts == []


def test_caches_belong_to_their_key_and_its_quota(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice = add_api_key(keys, "alice", {"max_context_cache_tokens": 50})
    bob = add_api_key(keys, "bob", {})
    body = {"name": "n", "prompt": "a" * 20}
    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        assert call(front, "POST", body=body).status_code == 401
        made = call(front, "POST", body=body, key=alice).json()
        for name in ("n", made["id"]):
            assert call(front, "GET", f"/{name}", key=bob).status_code == 404
            assert call(front, "DELETE", f"/{name}", key=bob).status_code == 404
            assert complete(front, bob, prompt="x", context_cache=name).status_code == 404
        assert call(front, "GET", key=bob).json()["data"] == []
        assert complete(front, alice, prompt="x" * 12, context_cache="n").status_code == 200
        computed, used = front.cluster.submitted
        assert (computed.tenant, used.tenant) == ("alice", "alice")
        assert used.block_keys[0] == computed.block_keys[0]
        assert computed.block_keys != block_keys(computed.token_ids, 16, root_key("f" * 32))
        assert call(front, "POST", body=body, key=bob).status_code == 200  # names are each key's own

        too_much = call(front, "POST", body={"prompt": "b" * 31}, key=alice)
        assert code_of(too_much)[:2] == (403, "context_cache_quota_exceeded")
        assert call(front, "POST", body={"prompt": "b" * 30}, key=alice).status_code == 200
        call(front, "DELETE", "/n", key=alice)
        assert call(front, "POST", body={"prompt": "c" * 20}, key=alice).status_code == 200
        assert front.metric("mooncake_context_cache_tokens", key="alice") == 50


def test_openais_client_can_use_one(front: Running) -> None:
    call(front, "POST", body={"name": "book", "messages": [SYSTEM]})
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "hi"}],
        extra_body={"context_cache": "book"},
    )
    assert answer.choices[0].message.content == "Hello!"
    with pytest.raises(openai.NotFoundError, match="no context cache 'other'"):
        client.completions.create(model=MODEL_NAME, prompt="x", extra_body={"context_cache": "other"})


def test_without_a_cluster_nothing_is_promised(front: Running) -> None:
    front.publish(ClusterState(epoch=1, num_prefill=0, num_decode=0, max_sequence_blocks=0))

    async def unready(cluster: FakeCluster, request: Request) -> None:
        await cluster.reject(request, 503, "no prefill instance is ready", 1.0)

    front.cluster.behaviour = unready
    assert call(front, "POST", body={"prompt": "a" * 20}).status_code == 503
    assert call(front, "GET").json()["data"] == []


def test_caches_outlive_the_front(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    alice, bob = (add_api_key(keys, name, {}) for name in ("alice", "bob"))
    tool_use = [
        {"role": "user", "content": [{"type": "text", "text": "look" * 5, "cache_control": None}]},
        {"role": "assistant", "content": "I did", "refusal": None},
    ]
    bodies = (
        {"name": "talk", "messages": tool_use, "tools": [TOOL], "ttl": 90},
        {"name": "text", "prompt": "a" * 40, "cache_salt": "s", "ttl": 90},
        {"name": "gone", "prompt": "b" * 40},
    )
    uses = (
        {"messages": [HI], "context_cache": "talk", "tool_choice": "none"},
        {"prompt": "x", "context_cache": "text"},
    )
    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        made = [call(front, "POST", body=body, key=alice).json() for body in bodies]
        assert [complete(front, alice, **fields).status_code for fields in uses] == [200, 200]
        before = front.cluster.submitted[-2:]
        call(front, "POST", "/text", {"ttl": 50}, key=alice)
        call(front, "DELETE", "/gone", key=alice)
        shown = call(front, "GET", key=alice).json()
        front.cluster.wait_until(lambda: len(front.cluster.contexts) == 5)
        kept = {message.context_id: message for message in front.cluster.contexts[:3]}
    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        again = call(front, "GET", key=alice).json()
        assert again["quota"] == shown["quota"]
        stable = ("id", "name", "tokens", "created_at", "status")
        for old, new in zip(shown["data"], again["data"], strict=True):
            assert [old[field] for field in stable] == [new[field] for field in stable]
            assert abs(old["expires_at"] - new["expires_at"]) <= 1
        assert [cache["name"] for cache in again["data"]] == ["talk", "text"]
        front.cluster.wait_until(lambda: len(front.cluster.contexts) >= 2)
        for message in front.cluster.contexts:
            assert isinstance(message, KeepContext)
            assert message.keys == kept[message.context_id].keys
            assert 0 < message.ttl_s <= (90 if message.context_id == made[0]["id"] else 50)
        assert [complete(front, alice, **fields).status_code for fields in uses] == [200, 200]
        for old, new in zip(before, front.cluster.submitted, strict=True):
            assert (old.token_ids, old.block_keys) == (new.token_ids, new.block_keys)
        assert call(front, "GET", key=bob).json()["data"] == []
        assert complete(front, bob, prompt="x", context_cache=made[1]["id"]).status_code == 404
        assert call(front, "DELETE", "/talk", key=alice).status_code == 200
        assert front.metric("mooncake_context_caches", key="alice") == 1
    with running_front(tmp_path, byte_model(), api_keys_file=keys) as front:
        assert [cache["name"] for cache in call(front, "GET", key=alice).json()["data"]] == ["text"]


def test_what_cannot_be_stored_is_refused(front: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a full disk."""
    made = call(front, "POST", body={"name": "old", "prompt": "a" * 20}).json()

    async def fail(*_: object) -> None:
        raise NotStoredError("the disk is full")

    with monkeypatch.context() as patch:
        for name in ("put", "extend", "remove"):
            patch.setattr(CacheFile, name, fail)
        for method, path, body in (
            ("POST", "", {"name": "new", "prompt": "a" * 20}),
            ("POST", "/old", {"ttl": 90_000}),
            ("DELETE", "/old", None),
        ):
            assert code_of(call(front, method, path, body)) == (507, "context_cache_not_stored", None)
        assert [cache["id"] for cache in call(front, "GET").json()["data"]] == [made["id"]]
        assert call(front, "GET", "/old").json()["expires_at"] == made["expires_at"]
    assert len(front.cluster.contexts) == 1
    assert call(front, "POST", body={"name": "new", "prompt": "a" * 20}).status_code == 200


@pytest.mark.parametrize("error", [UnavailableError("the conductor is gone"), asyncio.CancelledError()])
def test_a_cache_of_which_its_client_is_not_told_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Something fails between the store and the answer: the Conductor goes, or the server ends."""

    async def fail(*_: object) -> None:
        raise error

    with running_front(tmp_path, byte_model()) as front:
        with monkeypatch.context() as patch:
            patch.setattr(Link, "tell", fail)
            assert call(front, "POST", body={"name": "n", "prompt": "a" * 20}).status_code == 503
        assert call(front, "GET").json()["data"] == []
    with running_front(tmp_path, byte_model()) as front:
        assert call(front, "GET").json()["data"] == []


def test_a_restarted_conductor_is_told_of_them_again(front: Running) -> None:
    made = call(front, "POST", body={"prompt": "a" * 20, "ttl": 100}).json()
    state = front.cluster.state
    front.publish(ClusterState(epoch=2, num_prefill=2, num_decode=1, max_sequence_blocks=1000))
    front.cluster.wait_until(lambda: len(front.cluster.contexts) == 2)
    before, again = front.cluster.contexts
    assert isinstance(before, KeepContext)
    assert isinstance(again, KeepContext)
    assert (again.context_id, again.keys) == (made["id"], before.keys)
    assert 0 < again.ttl_s <= 100
    front.publish(state)


def made_of(text: bytes, caches: ContextCaches, key: ApiKey | None = None) -> ContextCache:
    return caches.add(key, None, Beginning(list(text), None, None), b"root", [], 0.0)


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[ContextCaches]:
    with closing(StateFile(tmp_path / "caches.db", (SCHEMA,))) as file:
        yield ContextCaches(100, CacheFile(file), [], "model", 16, now_s=0.0)


def test_only_what_a_prompt_has_in_common_with_its_cache_is_its_merit(caches: ContextCaches) -> None:
    """A chat template may end a conversation's beginning differently when it goes on."""
    cache = made_of(b"abcdefgh", caches)
    CacheUse(cache, [cache.beginning.num_shared(list(b"abcdXYZ"))]).count(0, 7, None)
    assert (cache.saved.num_tokens, cache.saved.prefill_s) == (4, 0.0)
    shared = [cache.beginning.num_shared(list(prompt)) for prompt in (b"abcd", b"abcdefghi")]
    CacheUse(cache, shared).count(1, 9, Costs(5.0, 1.0, 0.0))
    assert (cache.saved.num_tokens, cache.saved.prefill_s) == (12, 8.0)


def test_a_new_key_of_an_old_name_has_none_of_its_caches(caches: ContextCaches) -> None:
    old, new = (ApiKey(name="alice", sha256=digit * 64) for digit in "ab")
    cache = made_of(b"abc", caches, old)
    with pytest.raises(RequestError, match="no context cache"):
        caches.find(new, cache.id, 1.0)
    assert caches.find(old, cache.id, 1.0) is cache
