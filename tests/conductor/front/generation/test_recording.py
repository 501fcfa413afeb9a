"""The trace of a front's requests: what it says, what it keeps to itself, and that it can be played again."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.tools.load.cli import run as bench
from benchmarks.tools.simulator.cli import run as simulate
from benchmarks.tools.traces.reading import TraceFile
from conductor.front.generation import recording
from conductor.front.generation.recording import Recorder, hash_ids
from conductor.front.openai.model import ServedModel
from mooncake.errors import ConfigError
from mooncake.messages.requests import Request, SamplingParams
from tests.conductor.front.fakes import MODEL_NAME, byte_model, running_front
from tests.deadline import DEADLINE_S

SECRET = "what nobody else may read"
MOST_BYTES = 1 << 20
BEGINNING = list(range(512))


def request(name: str, token_ids: list[int], root_key: bytes = b"root") -> Request:
    return Request(name, token_ids, [], SamplingParams(9), "ep", root_key=root_key)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(path: Path, *prompts: list[int]) -> list[dict[str, Any]]:
    """The lines of requests with these prompts, each ended before the next one begins."""
    recorder = Recorder(path, MOST_BYTES)
    for number, prompt in enumerate(prompts):
        recorder.began(request(str(number), prompt))
        recorder.ended(str(number), 7)
    recorder.close()
    return lines_of(recorder.path)


def test_equal_beginnings_have_equal_ids(tmp_path: Path) -> None:
    first, longer, other = recorded(
        tmp_path / "t.jsonl", [*BEGINNING, 1, 2], [*BEGINNING, *BEGINNING, 3], [9, *BEGINNING]
    )
    assert (first["input_length"], first["output_length"], len(first["hash_ids"])) == (514, 7, 2)
    assert len(longer["hash_ids"]) == 3
    assert first["hash_ids"][0] == longer["hash_ids"][0]
    assert len({*first["hash_ids"], *longer["hash_ids"], *other["hash_ids"]}) == 2 + 2 + 2
    assert 0 <= first["timestamp"] <= longer["timestamp"] <= other["timestamp"]


def test_a_block_of_another_tenant_or_another_file_is_another_one(tmp_path: Path) -> None:
    assert hash_ids(BEGINNING, b"salt", b"a") != hash_ids(BEGINNING, b"salt", b"b")
    [one], [other] = (recorded(tmp_path / "t.jsonl", BEGINNING) for _ in range(2))
    assert one["hash_ids"] != other["hash_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.1.jsonl", "t.jsonl"]


def test_lines_are_in_order_of_arrival_whenever_requests_end(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", MOST_BYTES)
    for name in "abcd":
        recorder.began(request(name, [ord(name)] * ord(name)))
    for name in "cbd":
        recorder.ended(name, 5)
    recorder.ended("unknown", 5)
    recorder.close()
    lines = lines_of(recorder.path)
    assert [line["input_length"] for line in lines] == [ord(name) for name in "abcd"]
    assert [line["output_length"] for line in lines] == [0, 5, 5, 5], "the first one was still running"


def test_what_was_drawn_before_a_failover_is_no_prompt(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", MOST_BYTES)
    recorder.began(request("r", [1, 2, 3]).continued([4, 5], 16))
    recorder.ended("r", 2)
    recorder.close()
    [line] = lines_of(recorder.path)
    assert (line["input_length"], line["output_length"]) == (3, 2)


def test_a_file_has_a_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, recording.__name__)
    recorder = Recorder(tmp_path / "t.jsonl", 1000)
    for number in range(100):
        recorder.began(request(str(number), [1]))
        recorder.ended(str(number), 1)
    recorder.close()
    size_bytes = recorder.path.stat().st_size
    assert 800 < size_bytes <= 1000
    assert len(lines_of(recorder.path)) < 100
    assert [message for message in caplog.messages if "is full (conductor.record_bytes)" in message]


def test_requests_that_come_faster_than_they_are_hashed_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, recording.__name__)
    monkeypatch.setattr(recording, "MOST_QUEUED", -1)
    recorder = Recorder(tmp_path / "t.jsonl", MOST_BYTES)
    recorder.began(request("r", [1]))
    recorder.ended("r", 1)
    recorder.close()
    assert lines_of(recorder.path) == []
    assert "1 requests are not in" in caplog.text


def test_the_file_is_its_owners_alone_and_its_folder_must_be_there(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", MOST_BYTES)
    recorder.close()
    assert recorder.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"conductor.record: cannot write .*t\.jsonl: No such file"):
        Recorder(tmp_path / "nowhere" / "t.jsonl", MOST_BYTES)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return byte_model()


def test_a_front_s_recording_is_played_by_simulator_and_benchmark(tmp_path: Path, model: ServedModel) -> None:
    trace = tmp_path / "t.jsonl"
    with running_front(tmp_path, model, record=trace) as front:
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": SECRET}], "n": 2}
        for _ in range(3):
            url = f"{front.url}/v1/chat/completions"
            assert httpx.post(url, json=body, timeout=DEADLINE_S).status_code == 200
    requests = list(TraceFile(trace))
    assert [request.num_output_tokens for request in requests] == [7] * 6
    assert len({(request.num_input_tokens, request.hash_ids) for request in requests}) == 1, "one prompt"
    assert SECRET not in trace.read_text()
    cluster = ["--prefill", "1", "--decode", "1", "--model", "llama-3.1-8b", "--gpus", "1"]
    out = tmp_path / "simulated"
    assert simulate(["--trace", str(trace), *cluster, "--out", str(out)]) == 0
    [simulated] = json.loads((out / "report.json").read_text())["runs"]
    assert simulated["summary"]["num_finished"] == 6
    out = tmp_path / "played"
    with running_front(tmp_path, model) as front:
        assert (
            bench(["run", front.url, "--trace", str(trace), "--token-ids", "0:200", "--out", str(out)]) == 0
        )
    [played] = json.loads((out / "report.json").read_text())["runs"]
    assert played["summary"]["num_requests"] == 6
