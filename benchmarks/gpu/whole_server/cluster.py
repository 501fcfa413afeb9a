"""A server of a random model as a child process, used through the routes of clients and operators.

Owns: its process, its log, requests, metrics, orders. Does not know: the checks.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.report import Found
from benchmarks.servers import END_DEADLINE_S, ServerError, free_port
from benchmarks.serving import our_command

DEADLINE_S = 45.0
"""The most seconds for an answer, and for each event of a stream. A killed worker restarts in less time."""
_MOST_DEATHS = 3
_ROOT = Path(__file__).resolve().parents[3]


class Answer(NamedTuple):
    """One choice of an answer.

    It has the tokens, their logprobs (empty if not asked for), the seconds from the request to each token,
    and the number of the prompt's reused tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    times_s: list[float]
    num_cached: int


class Cluster:
    """A running `mooncake-serve --role all`.

    Methods that send a request raise an error if nothing arrives for `DEADLINE_S` seconds.
    """

    def __init__(self, name: str, folder: Path, flags: Sequence[str]) -> None:
        """Start a server without waiting for it. Its log is `folder/NAME.log`."""
        self.name, self._port = name, free_port()
        self.log = folder / f"{name}.log"
        self._run_dir = tempfile.TemporaryDirectory(prefix="mcg")
        environment = os.environ | {
            "XDG_RUNTIME_DIR": self._run_dir.name,
            "XDG_STATE_HOME": self._run_dir.name,
        }
        self._began_s = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                our_command(self._port, ["--log-level=info", *flags]),
                cwd=_ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        limits = httpx.Limits(max_connections=256)
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{self._port}", timeout=DEADLINE_S, limits=limits
        )

    def stop(self) -> None:
        """End the server's process, whatever its state."""
        self._http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._run_dir.cleanup()

    def wait_until_ready(self, deadline_s: float) -> float:
        """Wait until the server is ready, and return the seconds since its start. Raises ServerError."""
        while not self._is_ready():
            is_late = time.monotonic() - self._began_s > deadline_s
            if (
                is_late
                or self.process.poll() is not None
                or self.num_lines("starting it again") >= _MOST_DEATHS
            ):
                raise ServerError(f"{self.name} is not ready: {' / '.join(self._lines()[-6:])}")
            time.sleep(0.1)
        return time.monotonic() - self._began_s

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def num_lines(self, pattern: str) -> int:
        """Return the number of lines of the log that match `pattern` so far."""
        return sum(re.search(pattern, line) is not None for line in self._lines())

    def complaints(self) -> Found:
        """Return the errors and warnings in the log."""
        found = [line for line in self._lines() if re.search(r"Error|CUDA|out of memory| [WEC] \w+\.", line)]
        return Found(True, f"{len(found)} lines" + "".join(f"\n    {line[:300]}" for line in found[:6]))

    # -- requests -----------------------------------------------------------------------------------

    def post(self, path: str, content: object) -> httpx.Response:
        return self._http.post(path, json=content)

    def body(self, prompt: Sequence[int], num_tokens: int, **fields: object) -> dict[str, object]:
        """Return the body of a request for a greedy completion of exactly `num_tokens` tokens."""
        return {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }

    def events(self, content: dict[str, object]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream. A stream that is left early is closed.

        Raises RuntimeError for an answer or event that is an error.
        """
        with self._http.stream("POST", "/v1/completions", json={**content, "stream": True}) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code} {response.read()[:300].decode()}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"error in the stream: {event['error']}")
                    yield event

    def ask(self, prompt: Sequence[int], num_tokens: int, **fields: object) -> Answer:
        """Send a request made by `body`, and return its streamed answer."""
        content = self.body(prompt, num_tokens, stream_options={"include_usage": True}, **fields)
        began_s = time.perf_counter()
        tokens: list[int] = []
        logprobs: list[float] = []
        times_s: list[float] = []
        num_cached = 0
        for event in self.events(content):
            if event["choices"]:
                [choice] = event["choices"]
                tokens += choice["token_ids"]
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                times_s += [time.perf_counter() - began_s] * len(choice["token_ids"])
            if event.get("usage"):
                num_cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if len(tokens) != num_tokens:
            raise RuntimeError(f"expected {num_tokens} tokens, got {len(tokens)}")
        return Answer(tokens, logprobs, times_s, num_cached)

    def ask_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, num_at_once: int, **fields: object
    ) -> list[Answer]:
        with ThreadPoolExecutor(num_at_once) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, num_tokens, **fields), prompts))

    # -- what operators see and order ---------------------------------------------------------------

    def metrics(self, name: str, *labels: str) -> dict[str, float]:
        """Return the samples of a metric that have all these labels, by the text of a sample's labels."""
        text = self._http.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return {of: float(value) for of, value in found if all(label in of for label in labels)}

    def total(self, name: str, *labels: str) -> float:
        return sum(self.metrics(name, *labels).values())

    def order(self, path: str, **parameters: str) -> httpx.Response:
        """Send an order of an operator."""
        return self._http.post(f"/admin/{path}", params=parameters)

    def instances(self) -> dict[str, dict[str, Any]]:
        answer = self._http.get("/admin/instances").raise_for_status()
        return {one["name"]: one for one in answer.json()["instances"]}

    def running(self) -> list[tuple[str, str]]:
        """Return the requests that are being decoded, each with its decode instance."""
        state = self._http.get("/dashboard/state").json()
        return [
            (of["id"], of["decode"])
            for of in state["requests"]
            if not of["is_over"] and of["num_output_tokens"]
        ]

    def pid_of(self, name: str) -> int:
        """Return the process id of a worker such as `decode-0`."""
        parent = self.process.pid
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if arguments[2:4] == ["workers.process.service", name]:
                return int(pid)
        raise RuntimeError(f"no process of {name}")

    def idle(self) -> Found:
        """Wait until no request is left and all device pages are free, and return a finding about it."""

        def is_idle() -> bool:
            free, pages = (
                self.metrics(f"mooncake_instance_{kind}_pages") for kind in ("free_device", "device")
            )
            return self.total("mooncake_requests_running") == 0 and free == pages and bool(pages)

        elapsed_s = wait_for(is_idle, "no request is left, all device pages are free")
        num_pages = self.total("mooncake_instance_device_pages")
        return Found(True, f"all {num_pages:.0f} device pages free after {elapsed_s:.1f} s")


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> float:
    """Wait until a condition holds, and return the seconds that it took. Raises RuntimeError if too late."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > deadline_s:
            raise RuntimeError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - began_s
