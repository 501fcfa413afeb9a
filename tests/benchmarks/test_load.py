"""The load generator: what it sends, when, and what it makes of the answers."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from benchmarks.tools.load import cli
from benchmarks.tools.load.client import Answer, AnswerError, Client, EventStream
from benchmarks.tools.load.measures import Slo, summarize
from benchmarks.tools.load.outcomes import Kind, Outcome, RunResult
from benchmarks.tools.load.prompts import PromptMaker
from benchmarks.tools.load.sending import Sender
from benchmarks.tools.load.sources import MixSource, Plan, Planned, Run, SyntheticSource
from benchmarks.tools.traces.mixes import Mix, RequestClass
from benchmarks.tools.traces.request import TraceError
from benchmarks.tools.traces.synthetic import SyntheticLoad
from mooncake.cli import steps
from mooncake.cli.command_line import FAILED, INTERRUPTED, WRONG_USE
from tests.benchmarks.fake_server import FakeServer, answer, chunk, event, fake_server, tokens
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]
SLO = Slo(ttft_s=5.0, tbt_s=0.15, long_from=1024)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _obedient(server: FakeServer) -> None:
    server.behaviour = answer
    server.bodies.clear()


def a_run(url: str = "", num_input: int = 10, num_output: int = 3, **changes: Any) -> Run:
    mix = Mix((RequestClass(1.0, num_input, num_output),), 5.0, 0.15)
    run = Run(
        url=url,
        model="fake/model",
        source=MixSource(mix, 0.0),
        rate_per_s=100.0,
        num_requests=10,
        token_ids=(1000, 2000),
        timeout_s=DEADLINE_S,
    )
    return replace(run, **changes)


def outcomes_of(run: Run, share: int = 0, num_shares: int = 1) -> list[Outcome]:
    outcomes: list[Outcome] = []

    async def send() -> None:
        async with Client(run) as client, asyncio.timeout(DEADLINE_S):
            sender = Sender(run, client, share, num_shares, lambda: None, outcomes.append)
            await sender.send_all(time.monotonic())

    asyncio.run(send())
    return sorted(outcomes, key=lambda outcome: outcome.number)


# -- what the times mean ----------------------------------------------------------------------------


def heard(*events: tuple[float, dict[str, Any]]) -> Answer:
    so_far = Answer()
    for now_s, body in events:
        so_far.hear(json.dumps(body).encode(), now_s)
    return so_far


def test_gaps_are_those_between_tokens_as_they_come() -> None:
    so_far = heard(
        (1.0, {"choices": [{"text": ""}]}),  # a role, or nothing: no token
        (2.0, {"choices": [{"text": "a"}]}),
        (2.5, {"choices": [{"text": "b", "token_ids": [1, 2]}]}),
        (3.5, {"choices": [{"text": "", "finish_reason": "stop"}]}),
        (3.5, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}),
    )
    assert so_far.first_token_s == 2.0
    assert so_far.num_tokens == 4
    assert sorted(so_far.gaps_s) == [0.0, 0.5, 1.0]


def test_tokens_that_come_together_have_no_gap_of_their_own() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 6}
    first, second = {"choices": [{"text": "abc"}]}, {"choices": [{"text": "def"}], "usage": usage}
    assert sorted(heard((1.0, first), (2.0, second)).gaps_s) == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [(b'{"error": {"message": "lost"}}', "lost"), (b"{", "no completion chunk")],
)
def test_an_error_in_the_stream_is_one_of_the_answer(payload: bytes, reason: str) -> None:
    with pytest.raises(AnswerError, match=reason):
        Answer().hear(payload, 0.0)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_events_are_found_however_the_bytes_are_cut(newline: str) -> None:
    stream = (event('{"a": 1}') + ": ping\n\n" + event("[DONE]")).replace("\n", newline).encode()
    for size in range(1, len(stream) + 1):
        events = EventStream()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [e for piece in pieces for e in events.feed(piece)] == [b'{"a": 1}', b"[DONE]"]


# -- prompts ----------------------------------------------------------------------------------------


def prompt(maker: PromptMaker, num_tokens: int, *hash_ids: int, number: int = 0) -> list[int]:
    return maker.tokens(Planned(number, 0.0, num_tokens, 1, hash_ids))


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.37])
def test_prompts_share_the_tokens_of_the_blocks_that_they_share(scale: float) -> None:
    maker = PromptMaker((1000, 30_000), seed=0, scale_lengths=scale)
    first = prompt(maker, int(1400 * scale), 7, 8, 9)
    second = prompt(maker, int(1500 * scale), 7, 8, 10)
    num_shared = int(1024 * scale)
    assert first[:num_shared] == second[:num_shared]
    assert sum(a == b for a, b in zip(first[num_shared:], second[num_shared:], strict=False)) < 3
    assert (len(first), len(second)) == (int(1400 * scale), int(1500 * scale))
    assert all(1000 <= token_id < 30_000 for token_id in first)
    assert first[:num_shared] == prompt(maker, int(900 * scale), 7, 8) + first[int(900 * scale) : num_shared]


def test_prompts_without_shared_blocks_or_with_another_seed_share_nothing() -> None:
    maker, other = (PromptMaker((0, 1 << 20), seed, 1.0) for seed in (0, 1))
    prompts = [
        prompt(maker, 64, number=0),
        prompt(maker, 64, number=1),
        prompt(other, 64, number=0),
        prompt(maker, 64, 0),
        prompt(other, 64, 0),
    ]
    for one, another in itertools.combinations(prompts, 2):
        assert one[0] != another[0]
        assert not set(one) & set(another)


def test_text_shares_prefixes_as_tokens_do() -> None:
    maker = PromptMaker((1000, 30_000), 0, 1.0)
    first, second = (maker.text(Planned(0, 0.0, 600, 1, (1, last))) for last in (2, 3))
    assert first.split()[:512] == second.split()[:512]
    assert first.split()[512:] != second.split()[512:]


def test_a_plan_leaves_out_what_the_server_cannot_hold_and_scales_the_rest() -> None:
    load = SyntheticLoad(1.0, (1000, 3000, 60_000), (100,))
    plan = Plan(a_run(source=SyntheticSource(load), scale_lengths=0.1, context_len=2000, num_requests=200))
    requests = list(plan)
    assert [request.number for request in requests] == list(range(200))
    assert max(request.num_input_tokens for request in requests) < 2000
    assert {request.num_output_tokens for request in requests} == {10}
    assert 60 < plan.num_too_long < 140


def test_a_load_without_end_of_which_nothing_fits_is_an_error() -> None:
    load = SyntheticLoad(1.0, (3000,), (100,))
    with pytest.raises(TraceError, match="longer than the server's context, 2,000 tokens"):
        next(iter(Plan(a_run(source=SyntheticSource(load), context_len=2000, num_requests=1))))


# -- schedule ---------------------------------------------------------------------------------------


def test_a_stalled_server_shows_in_the_latency_of_every_request_that_was_due_meanwhile(
    server: FakeServer,
) -> None:
    """No coordinated omission: requests are sent, and their time counts, while nothing is answered."""
    stall_s = 0.5
    stalled = asyncio.Event()

    async def stall_once(body: dict[str, Any]) -> Response:
        if len(server.bodies) == 1:
            await asyncio.sleep(stall_s)
            stalled.set()
        await stalled.wait()
        return await answer(body)

    server.behaviour = stall_once
    outcomes = outcomes_of(a_run(server.url, num_requests=25, rate_per_s=50.0))
    assert [outcome.scheduled_s for outcome in outcomes] == pytest.approx([(i + 1) / 50 for i in range(25)])
    for outcome in outcomes:
        assert outcome.ttft_s is not None
        due_before_the_end_s = stall_s + outcomes[0].scheduled_s - outcome.scheduled_s
        assert outcome.ttft_s >= due_before_the_end_s - 0.02
    summary = summarize(RunResult(outcomes, 25, 1.0, 0.5), SLO)
    assert summary.ttft_s is not None
    assert summary.ttft_s.p50 > stall_s / 3


def test_a_late_client_counts_from_when_the_request_was_due(server: FakeServer) -> None:
    async def send_late() -> Outcome:
        run = a_run(server.url)
        async with Client(run) as client:
            request = next(iter(Plan(run)))
            now_s = time.monotonic()
            return await client.send(request, client.body(request), now_s - 1000, now_s - 2)

    outcome = asyncio.run(send_late())
    assert outcome.ttft_s is not None
    assert outcome.ttft_s > 2
    assert outcome.answered_s > 2
    assert 2 <= outcome.lag_s < 1000
    summary = summarize(RunResult([outcome], 1, 1.0, 1.0, [0.1]), SLO)
    assert summary.client.is_limit


def test_processes_share_the_requests_and_each_is_sent_once(server: FakeServer) -> None:
    numbers = [
        outcome.number
        for share in range(3)
        for outcome in outcomes_of(a_run(server.url, rate_per_s=1000.0), share, 3)
    ]
    assert sorted(numbers) == list(range(10))
    assert len(server.bodies) == 10


def test_a_closed_loop_keeps_so_many_requests_under_way(server: FakeServer) -> None:
    under_way, most = 0, 0

    async def count(body: dict[str, Any]) -> Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)

        async def counted() -> Any:
            nonlocal under_way
            async for text in tokens(body, gap_s=0.005):
                yield text
            under_way -= 1

        return StreamingResponse(counted())

    server.behaviour = count
    outcomes = outcomes_of(a_run(server.url, concurrency=4, num_requests=20))
    assert [outcome.kind for outcome in outcomes] == [Kind.FINISHED] * 20
    assert most == 4


# -- outcomes ---------------------------------------------------------------------------------------


def test_an_answer_is_timed_and_its_usage_is_kept(server: FakeServer) -> None:
    async def slowly(body: dict[str, Any]) -> Response:
        return StreamingResponse(tokens(body, gap_s=0.03))

    server.behaviour = slowly
    (outcome,) = outcomes_of(a_run(server.url, num_input=40, num_output=5, num_requests=1))
    assert outcome.kind is Kind.FINISHED
    assert outcome.ttft_s is not None
    assert outcome.tbt_s is not None
    assert 0.03 <= outcome.ttft_s < outcome.answered_s
    assert 0.03 <= outcome.tbt_s < outcome.answered_s
    assert (outcome.num_output_tokens, outcome.num_prompt_tokens, outcome.num_cached_tokens) == (5, 40, 10)
    (body,) = server.bodies
    assert (len(body["prompt"]), body["max_tokens"]) == (40, 5)
    assert body["stream"]
    assert body["ignore_eos"]


def test_rejections_and_failures_are_told_apart(server: FakeServer) -> None:
    def stream(*parts: str) -> Response:
        async def send() -> Any:
            for part in parts:
                yield part

        return StreamingResponse(send())

    answers = [
        JSONResponse({"error": {"message": "busy"}}, status_code=429),
        JSONResponse({"error": {"message": "broken"}}, status_code=500),
        stream(chunk("a")),
        stream(chunk("a", "stop"), event("[DONE]")),
        stream(event('{"error": {"message": "lost"}}')),
    ]

    async def one_after_the_other(_: dict[str, Any]) -> Response:
        return answers[len(server.bodies) - 1]

    server.behaviour = one_after_the_other
    outcomes = outcomes_of(a_run(server.url, concurrency=1, num_requests=len(answers)))
    assert [outcome.kind for outcome in outcomes] == [Kind.REJECTED, *[Kind.FAILED] * 4]
    reasons = ("429: .*busy", "500: .*broken", "without", "expected 3 tokens, got 1", "lost")
    for outcome, reason in zip(outcomes, reasons, strict=True):
        assert re.search(reason, outcome.error), outcome.error
    summary = summarize(RunResult(outcomes, 5, 1.0, 1.0), SLO)
    assert (summary.num_rejected, summary.num_failed, summary.goodput_per_s) == (1, 4, 0)
    assert summary.rejected_after_s is not None
    assert summary.ttft_s is None


def test_a_server_that_is_gone_is_a_failure_not_a_crash() -> None:
    outcomes = outcomes_of(a_run("http://127.0.0.1:9", num_requests=3))
    assert [outcome.kind for outcome in outcomes] == [Kind.FAILED] * 3
    assert "ClientConnectorError" in outcomes[0].error


def an_outcome(number: int, ttft_s: float, tbt_s: float | None, **changes: Any) -> Outcome:
    outcome = Outcome(number, Kind.FINISHED, float(number), 100, 0.0, 9.0, ttft_s, tbt_s, 10, 100, 25)
    fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    return Outcome(**{**fields, **changes})


def test_goodput_counts_requests_within_both_slos() -> None:
    outcomes = [
        an_outcome(0, 1.0, 0.1),
        an_outcome(1, 5.1, 0.1),
        an_outcome(2, 1.0, 0.16),
        an_outcome(3, 1.0, None, num_input_tokens=2000),
        an_outcome(4, 1.0, 0.1, num_input_tokens=2000, kind=Kind.REJECTED, answered_s=0.2),
        an_outcome(5, 1.0, 0.1, kind=Kind.UNFINISHED),
    ]
    summary = summarize(RunResult(outcomes, 6, 20.0, 10.0, [0.2, 0.5]), SLO)
    assert summary.goodput_per_s == pytest.approx(0.2)
    assert summary.offered_per_s == pytest.approx(0.6)
    assert summary.attainment == pytest.approx(2 / 5)
    assert summary.num_unfinished == 1
    assert summary.cached_share == pytest.approx(0.25)
    assert summary.by_class["short"].attainment == pytest.approx(1 / 3)
    assert (summary.by_class["long"].num_requests, summary.by_class["long"].num_rejected) == (2, 1)
    assert summary.rejected_after_s is not None
    assert summary.rejected_after_s.p50 == 0.2
    assert (summary.client.max_cpu_share, summary.client.is_limit) == (0.5, False)


# -- the command ------------------------------------------------------------------------------------


def test_the_command_compares_two_servers_and_writes_a_report(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", 0.0)
    with fake_server() as other:
        load = ["--mix", "chat-and-documents", "--rates", "40,80", "--num-requests", "8", "--rounds", "2"]
        how = ["--processes", "2", "--out", str(tmp_path)]
        assert cli.run(["run", server.url, "--against", other.url, *load, *how]) == 0
        ours, theirs = ([tuple(body["prompt"]) for body in fake.bodies] for fake in (server, other))
    assert sorted(ours) == sorted(theirs)
    assert len(set(ours)) == 2 + 2 * 2 * 8  # warm-up, and every round has prompts of its own
    report = json.loads((tmp_path / "report.json").read_text())
    runs = [(run["load"], run["server"]) for run in report["runs"]]
    assert runs == [(load, url) for load in ("40 req/s", "80 req/s") for url in (server.url, other.url)]
    assert {run["summary"]["num_finished"] for run in report["runs"]} == {16}
    assert {run["summary"]["cached_share"] for run in report["runs"]} == {0.25}
    assert (tmp_path / "requests.jsonl.gz").exists()
    assert (tmp_path / "latencies.svg").exists()
    assert (tmp_path / "goodput.svg").exists()
    seen = capsys.readouterr()
    assert "40 req/s" in seen.out
    title = re.escape(f"40 req/s, {server.url}")
    assert re.search(
        rf"^{title}: \d+ sent, \d+ ended, 0 rejected, 0 failed \(\d+ s\)$", seen.err, re.MULTILINE
    )


def test_ctrl_c_ends_with_a_report_of_what_ran(server: FakeServer, tmp_path: Path) -> None:
    async def stall_the_long_ones(body: dict[str, Any]) -> Response:
        if len(server.bodies) > 6:
            await asyncio.sleep(DEADLINE_S)
        return await answer(body)

    server.behaviour = stall_the_long_ones
    command = [sys.executable, "-m", "benchmarks.tools.load", "run", server.url, "--lengths", "10/2"]
    command += ["--rates", "50", "--duration", "60", "--out", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        deadline_s = time.monotonic() + DEADLINE_S
        while len(server.bodies) < 12:
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == INTERRUPTED, err
    assert "interrupted after" in out
    summary = json.loads((tmp_path / "report.json").read_text())["runs"][0]["summary"]
    assert summary["num_finished"] == 4  # two were the warm-up
    assert summary["num_unfinished"] >= 6
    assert summary["was_interrupted"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lengths", "10/2", "--rates", "1"], "has no end"),
        (["--lengths", "10/2", "--num-requests", "1"], "how many requests"),
        (["--mix", "chat-and-documents", "--rates", "1", "--speed", "2", "--duration", "1"], "--trace"),
        (["--trace", "TRACE", "--rates", "1"], "its own rate"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,input,output\n0,1,1\n")
    arguments = [str(trace) if argument == "TRACE" else argument for argument in arguments]
    assert cli.run(["run", "http://127.0.0.1:9", *arguments]) == WRONG_USE
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "code", "reason"),
    [
        ("http://127.0.0.1:9", FAILED, "http://127.0.0.1:9 does not answer: [Errno 111] Connection refused"),
        ("127.0.0.1:9", WRONG_USE, "'127.0.0.1:9' is no server's URL, which begins with http://"),
        ("SERVER/wrong", FAILED, "/wrong/v1/models answers with status 404\n"),
        ("SERVER/locked", FAILED, "answers with status 401; the variable OPENAI_API_KEY says which API key"),
    ],
)
def test_a_server_that_does_not_answer_is_an_error_before_anything_is_measured(
    server: FakeServer, capsys: pytest.CaptureFixture[str], url: str, code: int, reason: str
) -> None:
    arguments = ["--lengths", "10/2", "--concurrency", "1", "--num-requests", "1"]
    assert cli.run(["run", url.replace("SERVER", server.url), *arguments]) == code
    assert reason in capsys.readouterr().err


def test_fit_prints_and_writes_what_run_can_use(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, load = tmp_path / "trace.csv", tmp_path / "load.json"
    rows = "".join(f"{index / 10},{20 + index},4\n" for index in range(50))
    trace.write_text("arrival,input,output\n" + rows)
    assert cli.run(["fit", str(trace), "--out", str(load)]) == 0
    assert "mean_input_tokens\t44.5" in capsys.readouterr().out
    arguments = ["--synthetic", str(load), "--rates", "100", "--num-requests", "5"]
    assert cli.run(["run", server.url, *arguments]) == 0
    assert "100 req/s" in capsys.readouterr().out


def test_a_trace_is_replayed_with_its_prefixes(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 3]},
        {"timestamp": 3000, "input_length": 60_000, "output_length": 30, "hash_ids": [0, *range(4, 121)]},
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [121, 122]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--trace", str(trace), "--scale-lengths", "0.1", "--speed", "10", "--jitter", "3"]
    assert cli.run(["run", server.url, *arguments, "--seed", "7"]) == 0
    printed = capsys.readouterr()
    assert "1 requests left out: longer than the server's context" in printed.out
    assert "1 requests out of order" in printed.err
    prompts = [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies[2:]]
    assert sorted(prompts) == [(60, 1), (110, 3), (150, 2)]
    shared = [body["prompt"][:102] for body in server.bodies[2:] if len(body["prompt"]) > 100]
    assert shared[0] == shared[1]
