"""One request's trace from all processes of a cluster, and a cluster whose collector is gone."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import HTTP, STOP_DEADLINE_S, Server
from tests.cluster.tiny_cluster import TRANSFERS, body, complete, tiny_server
from tests.collector import Collector, running_collector
from tests.deadline import DEADLINE_S
from tests.ports import free_port

pytestmark = pytest.mark.cluster
CLIENT = "00f067aa0ba902b7"
PROMPT, NUM_TOKENS = list(range(3, 40)), 5


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tiny: Path, collector: Collector) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="mc-") as run_dir:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        flags = (TRANSFERS, "--num-decode=2", f"--tracing-otlp-endpoint={collector.url}")
        with tiny_server(tiny, Path(run_dir), *flags) as server:
            yield server


def stream(server: Server, trace_id: str, **fields: object) -> str:
    """The id of a streamed answer that a client asks for within its own trace."""
    content = body(PROMPT, stream=True, **fields)  # type: ignore[arg-type]
    headers = {
        "traceparent": f"00-{trace_id}-{CLIENT}-01",
        "tracestate": "vendor=value",
        "x-request-id": "mine",
    }
    with HTTP.stream(
        "POST", f"{server.url}/v1/completions", json=content, headers=headers, timeout=DEADLINE_S
    ) as answer:
        assert answer.status_code == 200
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    return str(httpx.Response(200, text=events[0].removeprefix("data: ")).json()["id"])


def test_one_trace_has_spans_of_all_processes(traced: Server, collector: Collector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer_id = stream(traced, trace_id, num_tokens=NUM_TOKENS)
    front, request, place, prefill, decode = (
        collector.wait_for(name, trace_id=trace_id)
        for name in ("POST /v1/completions", "conductor.request", "conductor.place", "prefill", "decode")
    )
    spans = collector.of_trace(trace_id)
    assert {span.trace_state for span in spans} == {"vendor=value"}
    assert front.parent_id == CLIENT
    assert request.parent_id == front.span_id
    assert {place.parent_id, prefill.parent_id, decode.parent_id} == {request.span_id}
    assert (front.process, request.process, prefill.process) == ("conductor", "conductor", "prefill-0")
    assert decode.process == place.attributes["mooncake.decode"]
    for span in spans:
        if "." in span.name and span.name.partition(".")[0] in ("prefill", "decode"):
            assert (
                span.parent_id == {"prefill": prefill, "decode": decode}[span.name.partition(".")[0]].span_id
            )
            assert span.process == {"prefill": prefill, "decode": decode}[span.name.partition(".")[0]].process
    names = {span.name for span in spans}
    assert names >= {f"prefill.{step}" for step in ("queue", "reserve", "pass", "store", "send")}
    assert names >= {
        f"decode.{step}" for step in ("reserve", "await_prefill", "receive", "join", "run", "seal")
    }
    assert all(not span.error and span.began_ns <= span.ended_ns for span in spans)
    assert front.events.keys() == {"first token", "last token"}
    assert (
        front.attributes.items()
        >= {
            "http.response.status_code": 200,
            "gen_ai.response.id": answer_id,
            "gen_ai.request.model": "tiny",
            "gen_ai.usage.input_tokens": len(PROMPT),
            "gen_ai.usage.output_tokens": NUM_TOKENS,
            "mooncake.http_request_id": "mine",
        }.items()
    )
    assert request.attributes["mooncake.request_id"] == f"{answer_id}-0"
    assert place.attributes["mooncake.predicted.ttft_s"] > 0
    of_passes = [span.attributes["mooncake.tokens"] for span in spans if span.name == "prefill.pass"]
    assert sum(of_passes) == len(PROMPT)
    [sent] = [span for span in spans if span.name == "prefill.send"]
    assert sent.attributes["mooncake.bytes"] > 0


def test_a_request_without_a_trace_begins_one(traced: Server, collector: Collector) -> None:
    answer_id = complete(traced, prompt=PROMPT, num_tokens=2)["id"]
    decode = collector.wait_for("decode", **{"mooncake.request_id": f"{answer_id}-0"})
    front = collector.wait_for("POST /v1/completions", trace_id=decode.trace_id)
    assert front.parent_id == ""
    assert front.attributes["gen_ai.response.id"] == answer_id


def test_a_dead_collector_delays_neither_requests_nor_the_end(
    tiny: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")  # then a batch is lost
    url = f"http://127.0.0.1:{free_port()}"
    with tiny_server(tiny, run_dir, TRANSFERS, f"--tracing-otlp-endpoint={url}") as server:
        for number in range(20):
            complete(server, prompt=[5 + number, *PROMPT], num_tokens=5)
        server.wait_for_line(f"spans do not reach {url}", count=3)
        assert server.stop() < STOP_DEADLINE_S
        assert server.process.returncode == 0
    assert server.num_lines("spans do not reach") == 3, server.lines  # one of each process
    assert server.num_lines("opentelemetry|Traceback") == 0, server.lines
