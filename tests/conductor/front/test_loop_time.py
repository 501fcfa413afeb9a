"""Nothing that a client can ask holds up the event loop, nor the interpreter that the loop needs.

The front is a process of its own with a probe in it: what each callback of the loop takes of its thread's
processor time, and what all other threads together take. Time on the clock says nothing on a busy machine.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conductor.front.openai.model import ServedModel
from conductor.front.openai.tool_calls import ToolFormat
from conductor.front.process.starting import announce
from mooncake.errors import RequestError
from mooncake.messages.fronts import ClusterState, TokenOutput
from mooncake.messages.requests import FinishReason, Ref, Request, TokenLogprobs
from mooncake.model.grammar import Grammars, Vocabulary
from mooncake.node.process import Ready
from tests.conductor.front.fakes import (
    EOS,
    MODEL_NAME,
    ByteDetokenizer,
    ByteTokenizer,
    FakeCluster,
    byte_backend,
    byte_model,
    running_front,
)
from tests.deadline import DEADLINE_S

MOST_S = 0.05
CONTEXT_LEN = 1 << 17
VOCAB_SIZE = 1 << 15
MIB = 1 << 20
CHAT, COMPLETIONS, CACHES = "/v1/chat/completions", "/v1/completions", "/v1/context_caches"
HI = [{"role": "user", "content": "hi"}]


class Cost(NamedTuple):
    """Processor time in seconds: of the loop's longest callback, and of all other threads."""

    callback: str
    longest_s: float
    beside_s: float


# -- the process with the front -----------------------------------------------------------------------


class Probe:
    """Of the one event loop that runs in this process, in a thread."""

    def __init__(self) -> None:
        self._loop_thread = 0
        self.reset()
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            begun_s = time.thread_time()
            run(handle)
            took_s = time.thread_time() - begun_s
            self._loop_thread = threading.get_native_id()
            if took_s > self._longest_s:
                self._longest_s, self._callback = took_s, repr(handle)[:300]

        asyncio.Handle._run = measured  # type: ignore[method-assign]

    def reset(self) -> None:
        self._longest_s, self._callback = 0.0, ""
        self._begun_s = self._others_s()

    def cost(self) -> Cost:
        return Cost(self._callback, self._longest_s, self._others_s() - self._begun_s)

    def _others_s(self) -> float:
        """Processor time of Python's other threads so far. Libraries' own threads hold up nobody."""
        own = (threading.get_native_id(), self._loop_thread)
        ids = [thread.native_id for thread in threading.enumerate() if thread.native_id not in own]
        stats = (Path(f"/proc/self/task/{number}/schedstat").read_text() for number in ids)
        return sum(int(stat.split()[0]) for stat in stats) / 1e9


class TemplateTokenizer(ByteTokenizer):
    """Renders a template that writes a variable beside each message, as Llama 2's writes `bos_token`."""

    _template = ImmutableSandboxedEnvironment().from_string(
        "{% for m in messages %}{{ x }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )

    def render_chat(self, messages: Any, /, **variables: Any) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise RequestError("the model's chat template refused", param="messages")
        return self.encode(self._template.render(messages=messages, **variables))


def large_backend() -> tokenizers.Tokenizer:
    """Bytes, and as many other tokens as a model has."""
    backend = byte_backend()
    backend.add_tokens([f"<{number}>" for number in range(VOCAB_SIZE - backend.get_vocab_size())])
    return backend


def model() -> ServedModel:
    small = byte_model(CONTEXT_LEN)
    return ServedModel(
        TemplateTokenizer(),
        ByteDetokenizer,
        CONTEXT_LEN,
        257,
        small.fingerprint,
        small.block_size,
        Grammars(lambda: Vocabulary(large_backend(), (EOS,), VOCAB_SIZE)),
        ToolFormat.HERMES,
    )


class InStep:
    """A cluster whose choices of one request decode together: each message has a token of each choice.

    A request says by its priority how many choices it has, by `max_tokens` how many tokens they get.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Request]] = {}

    async def __call__(self, cluster: FakeCluster, request: Request) -> None:
        group = self._waiting.setdefault(request.request_id.rpartition("-")[0], [])
        group.append(request)
        if len(group) < request.priority:
            return
        num_tokens = request.sampling.max_tokens
        for position in range(num_tokens):
            finish = FinishReason.LENGTH if position == num_tokens - 1 else None
            await cluster.send_step(request.reply_to, [_output(one, position, finish) for one in group])
            await asyncio.sleep(0)


def _output(request: Request, position: int, finish: FinishReason | None) -> TokenOutput:
    num_top = request.sampling.num_logprobs
    logprobs = []
    if num_top is not None:
        logprobs = [TokenLogprobs(-1.0, list(range(num_top)), [-1.0] * num_top)]
    ref = Ref(epoch=1, request_id=request.request_id, attempt=1)
    return TokenOutput(ref, position, [97 + position % 2], 16, finish, logprobs)


def serve_with_probe(folder: Path) -> None:
    """Answers each line of stdin by the cost since the one before."""
    probe = Probe()
    options = {
        "new_event_loop": asyncio.new_event_loop,
        "max_request_bytes": 8 * MIB,
    }  # uvloop's has no probe
    with running_front(folder, model(), **options) as front:
        front.cluster.behaviour = InStep()
        front.publish(ClusterState(epoch=1, num_prefill=2, num_decode=1, max_sequence_blocks=1 << 20))
        announce(Ready(front.url))
        print(front.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps(probe.cost()), flush=True)
            probe.reset()


# -- the tests ----------------------------------------------------------------------------------------


class Probed:
    """A front, and what requests cost it."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process, self.url = process, url
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)

    def cost(self) -> Cost:
        """Since it was last asked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Cost(*json.loads(self._process.stdout.readline()))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    command = [sys.executable, "-m", __name__, str(tmp_path_factory.mktemp("front"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        probed = Probed(process, process.stdout.readline().strip())
        with probed.client as client:
            for _ in range(2):  # what the first request of all loads is not its cost
                client.post(CHAT, json=chat()).raise_for_status()
            yield probed
        process.stdin.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": HI, "max_tokens": 4, **fields}


def complete(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, **fields}


def schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": fields}}


def repeated(head: str, item: str, tail: str, size: int = 8 * MIB - 100) -> bytes:
    return (head + ",".join([item] * ((size - len(head)) // (len(item) + 1))) + tail).encode()


def many(choices: int) -> dict[str, Any]:
    """Fields of a request with so many choices; the fake cluster waits for them."""
    return {"n": choices, "priority": choices}


def tools(num: int, size: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(size)}}
    return [{"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(num)]


class Asked(NamedTuple):
    path: str
    body: Callable[[], bytes | dict[str, Any]]
    status: int = 200


HOSTILE = {
    "4M ids to detokenize": Asked("/detokenize", lambda: repeated('{"tokens":[', "1", "]}"), 400),
    "a context of ids to detokenize": Asked("/detokenize", lambda: {"tokens": [97] * CONTEXT_LEN}),
    "a text of 8 MiB": Asked("/tokenize", lambda: {"prompt": "a" * (8 * MIB - 100)}, 400),
    "a context to tokenize": Asked(
        "/tokenize", lambda: {"prompt": "a" * CONTEXT_LEN, "return_token_strs": True}
    ),
    "messages to tokenize": Asked(
        "/tokenize", lambda: repeated('{"messages":[', '{"role":"user","content":""}', "]}", 3 * MIB), 400
    ),
    "variables to tokenize": Asked(
        "/tokenize", lambda: {"messages": HI * 100, "chat_template_kwargs": {"x": "x" * 4000}}, 400
    ),
    "variables of a chat": Asked(
        CHAT, lambda: chat(messages=HI * 30, chat_template_kwargs={"x": "x" * 4000})
    ),
    "lists": Asked(CHAT, lambda: repeated(f'{{"model":"{MODEL_NAME}","messages":[', "[]", "]}"), 400),
    "objects": Asked(CHAT, lambda: repeated(f'{{"model":"{MODEL_NAME}","stop":[', "{}", "]}"), 400),
    "a prompt of 8 MiB": Asked(
        COMPLETIONS, lambda: repeated(f'{{"model":"{MODEL_NAME}","prompt":[', "1", "]}"), 400
    ),
    "128 long prompts": Asked(COMPLETIONS, lambda: complete([[97] * 8_000] * 128, max_tokens=2)),
    "an enum of 3,000 values": Asked(
        COMPLETIONS, lambda: complete(response_format=schema({"enum": [f"v{n}" for n in range(3000)]}))
    ),
    "a multiple of a prime": Asked(
        COMPLETIONS, lambda: complete(response_format=schema({"type": "integer", "multipleOf": 29_989}))
    ),
    "1,000 properties": Asked(
        COMPLETIONS,
        lambda: complete(response_format=schema(tools(1, 900)[0]["function"]["parameters"])),
    ),
    "a schema of 8 MiB": Asked(
        COMPLETIONS, lambda: complete(response_format=schema({"enum": ["v" * 20] * 300_000})), 400
    ),
    "128 tools": Asked(CHAT, lambda: chat(tools=tools(128, 3))),
    "128 tools that must be called": Asked(CHAT, lambda: chat(tools=tools(100, 2), tool_choice="required")),
    "large tools": Asked(CHAT, lambda: chat(tools=tools(128, 1000)), 400),
    "biases of 128 choices": Asked(
        COMPLETIONS,
        lambda: complete(logit_bias={str(n % 257): 1 for n in range(257)}, **many(128)),
    ),
    "too many biases": Asked(
        COMPLETIONS, lambda: complete(logit_bias={str(n): 1 for n in range(600_000)}), 400
    ),
    "bad words": Asked(COMPLETIONS, lambda: complete(bad_words=["x" * 1024] * 128)),
    "128 prompts that are too long together": Asked(COMPLETIONS, lambda: complete([[97] * 9_000] * 128), 400),
    "stop strings": Asked(
        COMPLETIONS,
        lambda: complete(stop=["ab" * 100 + "a" * n + "c" for n in range(16)], max_tokens=300, **many(128)),
    ),
    "stop strings that a text nearly has": Asked(
        COMPLETIONS,
        lambda: complete(stop=["ab" * 500 + "c" * (n + 1) for n in range(16)], max_tokens=1010, **many(64)),
    ),
    "logprobs of 128 choices": Asked(
        CHAT, lambda: chat(logprobs=True, top_logprobs=20, max_tokens=40, **many(128))
    ),
    "logprobs of 128 choices in columns": Asked(
        COMPLETIONS, lambda: complete(logprobs=20, max_tokens=40, **many(128))
    ),
    "a stream of logprobs": Asked(
        CHAT, lambda: chat(logprobs=True, top_logprobs=20, max_tokens=10, stream=True, **many(128))
    ),
    "counts of 128 prompts in each chunk": Asked(
        COMPLETIONS,
        lambda: complete(
            ["hi"] * 128,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            max_tokens=10,
            priority=128,
        ),
    ),
    "token ids of 128 choices": Asked(
        COMPLETIONS, lambda: complete(return_token_ids=True, max_tokens=300, **many(128))
    ),
    "a lifetime of 8 MiB": Asked(f"{CACHES}/x", lambda: repeated('{"ttl":[', "1", "]}"), 413),
    "a cache of 8 MiB": Asked(CACHES, lambda: repeated('{"prompt":[', "1", "]}"), 400),
}


def check(front: Probed) -> None:
    cost = front.cost()
    assert cost.longest_s <= MOST_S, cost
    assert cost.beside_s <= MOST_S, cost


@pytest.mark.parametrize("asked", HOSTILE.values(), ids=HOSTILE)
def test_a_request_that_takes_much(front: Probed, asked: Asked) -> None:
    body = asked.body()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    front.cost()
    answer = front.client.post(asked.path, content=content)
    assert answer.status_code == asked.status, answer.text[:300]
    assert front.client.get("/health").status_code == 200
    check(front)


def test_many_context_caches_and_prompts_behind_a_large_one(front: Probed) -> None:
    front.cost()
    for number in range(300):
        fields = {"prompt": f"{number:016}", "name": f"c{number}"}
        answer = front.client.post(CACHES, json=fields)
        assert answer.status_code == (200 if number < 256 else 403)
        check(front)
    assert len(front.client.get(CACHES).json()["data"]) == 256
    for number in range(256):
        front.client.delete(f"{CACHES}/c{number}").raise_for_status()
        check(front)
    large = {"prompt": [97] * (CONTEXT_LEN - 1000), "name": "large"}
    front.client.post(CACHES, json=large).raise_for_status()
    for num, status in ((8, 200), (128, 400)):
        behind = complete(["hi"] * num, context_cache="large", max_tokens=1, priority=num)
        assert front.client.post(COMPLETIONS, json=behind).status_code == status
    front.client.delete(f"{CACHES}/large").raise_for_status()
    check(front)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/openapi.json", "/" + "x" * 60_000, "/v1/models"])
def test_a_head_that_takes_much(front: Probed, path: str) -> None:
    front.cost()
    headers = [(f"x-{number}", "") for number in range(7_000 - len(path) // 10)]
    assert front.client.get(path, headers=headers).status_code == 400
    assert front.client.get(path, headers=headers[:240]).status_code in (200, 404)
    check(front)


def test_answers_that_wait_for_a_client(front: Probed) -> None:
    """What has come while a client read nothing is not sent in one go."""
    front.cost()
    body = chat(stream=True, max_tokens=2000, logprobs=True, top_logprobs=20)
    with front.client.stream("POST", CHAT, json=body) as answer:
        has_grown = threading.Event()
        while not has_grown.is_set():
            if front.client.get("/health").status_code == 200:
                has_grown.set()
        assert answer.read()
    check(front)


if __name__ == "__main__":
    serve_with_probe(Path(sys.argv[1]))
