"""Measure the effect of a killed Conductor on clients, whose front is in a process of its own.

  python -m benchmarks.restart [--streams N] [--tokens N] [--decode N] [--standby]

A Conductor, a front, a prefill instance and some decode instances are on nodes of their own. The workers
compute a tiny model, but take the time of a larger one for each pass (`benchmarks.overload`). All streams run
at once. Beside them a short request is sent every 0.2 s for a while. In the first run nothing is killed. In
the second run the Conductor's process is killed when these requests begin, and its supervisor starts it
again. With --standby there are two Conductors, and etcd (from Debian's packages) makes one of them the
leader. The leader's process is killed in the second run. In a third run its whole node is killed, so that no
supervisor tells etcd of its end. A stream that does not end with all its tokens counts as lost.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.debian import CannotFetchError, fetch
from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.overload.slowed import VOCAB_SIZE, write_model
from benchmarks.servers import ServerError, free_port, serving, telling_why
from benchmarks.tools.arguments import count
from mooncake.security.keys import ClusterKey

MODEL = "slowed"
NUM_PROMPT_TOKENS = 60
NUM_TOKENS_BEFORE = 30
"""The tokens that each stream must have before the kill."""
PROBE_PERIOD_S, PROBES_S = 0.2, 8.0
MAX_FACTOR, MAX_MORE_S, MAX_PROBE_S = 1.5, 0.5, 3.0
"""The limits (*bars*) of the longest gap, and of requests that arrive during the restart.

The longest gap is at most `MAX_FACTOR` times the first run's p99.9 plus `MAX_MORE_S` seconds. A request that
arrives during the restart has its first token within `MAX_PROBE_S` seconds.
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running nodes.

    `front` is the URL for clients. `conductors` has the supervisor of each Conductor's node, by URL.
    """

    front: str
    conductors: dict[str, int]

    def kill_process(self) -> None:
        """Kill the process of the leading Conductor, which is the only child of its supervisor."""
        os.kill(_child_of(self._leader), signal.SIGKILL)

    def kill_node(self) -> None:
        """Kill the leading Conductor and its supervisor, so that no process reports the end."""
        leader = self._leader
        child = _child_of(leader)
        os.kill(leader, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)

    @property
    def _leader(self) -> int:
        for url, pid in self.conductors.items():
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    return pid
        raise ServerError("no conductor leads")


def _child_of(supervisor: int) -> int:
    return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text())


@dataclass(slots=True)
class Answer:
    """The times at which the tokens of one answer arrived."""

    num_tokens: int
    began_s: float
    times_s: list[float] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when the answer has `NUM_TOKENS_BEFORE` tokens, or has ended."""
    is_whole: bool = False

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def ttft_s(self) -> float:
        """The seconds to the first token; infinite if no token came."""
        return self.times_s[0] - self.began_s if self.times_s else float("inf")


@contextlib.contextmanager
def cluster(num_decode: int, has_standby: bool, output: int) -> Iterator[Cluster]:
    """Make a context with all nodes running. Raises ServerError, CannotFetchError."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as nodes:
        folder = Path(name)
        write_model(folder)
        ClusterKey.generate().save(folder / "cluster.key")
        shared = [f"--security-key-file={folder / 'cluster.key'}", f"--served-model-name={MODEL}"]
        shared += [f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}", "--worker-max-batch=128"]
        if has_standby:
            shared.append(f"--cluster-etcd-endpoints={nodes.enter_context(etcd(folder, output))}")
        shared += ["--conductor-reply-endpoint=tcp://127.0.0.1:*", "--conductor-max-running-requests=1000"]
        shared += ["--kvcache-pool-bytes=64MiB", "--kvcache-device-bytes=64MiB", "--dtype=float32"]

        def node(role: str, *flags: str, path: str = "/ready") -> tuple[str, int]:
            port, ready = free_port(), free_port()
            command = [sys.executable, "-m", "benchmarks.overload.slowed", name, f"--role={role}", *shared]
            url = f"http://127.0.0.1:{port}"
            if role in ("prefill", "decode"):
                command += [f"--worker-metrics-listen=127.0.0.1:{ready}", *flags]
                server = serving(command, f"http://127.0.0.1:{ready}{path}", output=output)
            else:
                server = serving([*command, *flags, f"--port={port}"], f"{url}{path}", output=output)
            return url, nodes.enter_context(server).pid

        conductors = dict([node("conductor", path="/health")])
        if has_standby:
            own = f"--conductor-endpoint=tcp://127.0.0.1:{free_port()}"
            conductors |= [node("conductor", own, path="/health")]
        node("prefill", "--instance=p0")
        for index in range(num_decode):
            node("decode", f"--instance=d{index}")
        front, _ = node("front")
        yield Cluster(front, conductors)


@contextlib.contextmanager
def etcd(folder: Path, output: int) -> Iterator[str]:
    """Start an etcd of one member, and yield its URL. Raises ServerError, CannotFetchError."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [str(fetch("etcd-server") / "usr/bin/etcd"), f"--data-dir={folder / 'etcd'}"]
    command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
    command += ["--listen-peer-urls=http://127.0.0.1:0"]
    with serving(command, f"{url}/health", output=output):
        yield url


async def ask(url: str, prompt: list[int], answer: Answer) -> None:
    """Stream an answer. A failure leaves the answer incomplete."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": answer.num_tokens, "temperature": 0}
    content = json.dumps(body | {"ignore_eos": True, "stream": True, "return_token_ids": True}).encode()
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    num_tokens = 0
    try:
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                answer.is_whole = num_tokens == answer.num_tokens
                return
            if line.startswith(b"data: {"):
                num_new = sum(len(choice["token_ids"]) for choice in json.loads(line[6:]).get("choices", ()))
                num_tokens += num_new
                answer.times_s += [time.monotonic()] if num_new else []
                if num_tokens >= NUM_TOKENS_BEFORE:
                    answer.has_begun.set()
    finally:
        answer.has_begun.set()  # also if it has none
        writer.close()


async def run(
    front: str, num_streams: int, num_tokens: int, number: int, kill: Callable[[], None]
) -> tuple[list[Answer], list[Answer]]:
    """Do run `number` of the experiment: `kill` is called when all streams have begun.

    Returns the answers of the streams and of the short requests.
    """
    streams = [Answer(num_tokens, time.monotonic()) for _ in range(num_streams)]
    async with asyncio.TaskGroup() as group:
        for index, answer in enumerate(streams):
            prompt = [index % VOCAB_SIZE, index // VOCAB_SIZE, *range(NUM_PROMPT_TOKENS)]
            group.create_task(ask(front, prompt, answer))
        for answer in streams:
            await answer.has_begun.wait()
        kill()
        probes = []
        for index in range(round(PROBES_S / PROBE_PERIOD_S)):
            probes.append(Answer(2, time.monotonic()))
            group.create_task(ask(front, [number, index, *range(10)], probes[-1]))
            await asyncio.sleep(PROBE_PERIOD_S)
    return streams, probes


def _nothing() -> None:
    pass


def main() -> None:
    """Do all runs, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--streams", type=count, default=200)
    parser.add_argument("--tokens", type=count, default=300, help="of each stream")
    parser.add_argument("--decode", type=count, default=4, help="decode instances")
    parser.add_argument("--standby", action="store_true", help="two conductors, by etcd")
    arguments = parser.parse_args()
    rows, most_s = [], 0.0
    with (
        telling_why(ServerError, CannotFetchError) as output,
        cluster(arguments.decode, arguments.standby, output) as nodes,
    ):
        events = [("undisturbed", _nothing), ("conductor killed", nodes.kill_process)]
        events += [("its node killed", nodes.kill_node)] if arguments.standby else []
        for number, (name, kill) in enumerate(events):
            progress(name)
            streams, probes = asyncio.run(run(nodes.front, arguments.streams, arguments.tokens, number, kill))
            gaps_s = np.array([gap_s for answer in streams for gap_s in answer.gaps_s])
            p999_s, longest_s = float(np.quantile(gaps_s, 0.999)), float(gaps_s.max())
            most_s = most_s or MAX_FACTOR * p999_s + MAX_MORE_S
            ttfts_s = [answer.ttft_s for answer in probes]
            rows.append(
                (
                    name,
                    str(sum(not answer.is_whole for answer in streams)),
                    f"{1000 * float(np.median(gaps_s)):.0f} ms",
                    f"{1000 * p999_s:.0f} ms",
                    f"{1000 * longest_s:.0f} ms",
                    f"{np.median(ttfts_s):.2f} s",
                    f"{max(ttfts_s):.2f} s",
                    str(sum(not answer.is_whole for answer in probes)),
                )
            )
    rows.append(("bar", "0", "", "", f"{1000 * most_s:.0f} ms", "", f"{MAX_PROBE_S:.0f} s", "0"))
    columns = ("", "streams lost", "gap p50", "gap p99.9", "longest gap")
    meanwhile = ("TTFT p50 meanwhile", "longest TTFT meanwhile", "requests refused meanwhile")
    print_table(f"{arguments.streams} streams of {arguments.tokens} tokens", (*columns, *meanwhile), rows)


if __name__ == "__main__":
    main()
