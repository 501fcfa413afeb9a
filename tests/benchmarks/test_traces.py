"""Readers of traces, how traces are played, and synthetic loads."""

import gzip
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tools.traces.arrivals import arrivals
from benchmarks.tools.traces.fitting import fit, values_of
from benchmarks.tools.traces.mixes import MIXES, mixed
from benchmarks.tools.traces.phases import Phase, in_phases
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.replay import at_speed, jittered, until
from benchmarks.tools.traces.request import TraceError, TraceRequest, in_blocks
from benchmarks.tools.traces.synthetic import Sampler, SyntheticLoad, synthesize


def line(timestamp: float, num_input: int, num_output: int, hash_ids: list[int] | None = None) -> str:
    entry: dict[str, Any] = {
        "timestamp": timestamp,
        "input_length": num_input,
        "output_length": num_output,
        "hash_ids": list(range(-(-num_input // 512))) if hash_ids is None else hash_ids,
    }
    return json.dumps(entry) + "\n"


def written(path: Path, text: str) -> TraceFile:
    path.write_text(text)
    return TraceFile(path)


def test_reads_the_mooncake_format_plain_and_compressed(tmp_path: Path) -> None:
    text = line(3000, 600, 10, [7, 8]) + "\n" + line(6000, 512, 1, [7])
    expected = [TraceRequest(0.0, 600, 10, (7, 8)), TraceRequest(3.0, 512, 1, (7,))]
    assert list(written(tmp_path / "a.jsonl", text)) == expected
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert list(TraceFile(tmp_path / "a.jsonl.gz")) == expected


def test_repairs_are_counted_and_told(tmp_path: Path) -> None:
    text = line(0, 10, 1) + line(5000, 10, 0) + line(6000, 10, 1) + line(4000, 10, 1) + line(7000, 0, 1)
    trace = written(tmp_path / "a.jsonl", text)
    for _ in range(2):
        assert [request.arrival_s for request in trace] == [0, 6, 6]
        assert (trace.num_dropped, trace.num_out_of_order) == (2, 1)
    assert trace.repairs == (
        "2 requests without input or output left out; 1 requests out of order arrive with the one before"
    )


@pytest.mark.parametrize(
    ("second_line", "reason"),
    [
        ('{"timestamp": 0}\n', "input_length"),
        ("not json\n", "malformed"),
        (line(0, -5, 1, []), "negative"),
        (line(0, 513, 1, [1]), "513 input tokens are 2 blocks of 512, but there are 1 hash_ids"),
        (line(0, 512, 1, [1, 2]), "1 blocks"),
        (line(0, 1500, 1, [1, 2, 1]), "one of the hash_ids occurs twice"),
        ('{"timestamp": 0, "input_length": "9", "output_length": 1, "hash_ids": []}\n', "Expected `int`"),
    ],
)
def test_what_is_no_request_is_an_error_that_names_the_line(
    tmp_path: Path, second_line: str, reason: str
) -> None:
    trace = written(tmp_path / "a.jsonl", line(0, 10, 1) + second_line)
    with pytest.raises(TraceError, match=rf"a\.jsonl:2: .*{reason}"):
        list(trace)


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,num_input_tokens,num_output_tokens\n5,100,7\n6.5,200,8\n",
        "Timestamp,Model,Request tokens,Response tokens\n5,G,100,7\n6.5,G,200,8\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.5000000,100,7\n2023-11-16 18:15:48.0000000,200,8\n",
    ],
)
def test_reads_csv_as_several_publishers_write_it(tmp_path: Path, text: str) -> None:
    assert list(written(tmp_path / "a.csv", text)) == [
        TraceRequest(0.0, 100, 7),
        TraceRequest(1.5, 200, 8),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("when,input,output\n", "1: expected a column called one of arrival_s, arrival, timestamp, got when"),
        ("arrival,input,output\n0,1,1\n1,2\n", "3: list index"),
        ("arrival,input,output\nnan,1,1\n", "2: expected a time"),
        ("arrival,input,output\n0,1,-1\n", "2: lengths cannot be negative"),
    ],
)
def test_bad_csv_is_an_error_that_names_the_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(TraceError, match=rf"a\.csv:{reason}"):
        list(written(tmp_path / "a.csv", text))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"expected a trace in a \.jsonl"):
        TraceFile(tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=r"none\.csv cannot be read: No such file or directory$"):
        list(TraceFile(tmp_path / "none.csv"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(line(0, 10, 1).encode())[:-9])
    with pytest.raises(TraceError, match=r"left\.jsonl has no request"):
        list(written(tmp_path / "left.jsonl", line(0, 10, 0)))
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz cannot be read"):
        list(TraceFile(tmp_path / "cut.jsonl.gz"))


def test_a_long_trace_is_read_as_it_is_consumed(tmp_path: Path) -> None:
    trace = written(tmp_path / "a.jsonl", line(0, 10, 1) * 3 + "the rest is no trace")
    assert len(list(itertools.islice(trace, 3))) == 3


def at(*arrivals_s: float) -> list[TraceRequest]:
    return [TraceRequest(arrival_s, 100 + index, 1) for index, arrival_s in enumerate(arrivals_s)]


def test_jitter_spreads_a_tick_up_to_the_next_one_and_keeps_the_order() -> None:
    requests = at(*[0] * 50, *[3] * 50, *[3.5] * 50, *[100] * 50)
    spread = list(jittered(requests, 3, seed=1))
    assert [request.num_input_tokens for request in spread] == list(range(100, 300))
    times = [request.arrival_s for request in spread]
    assert times == sorted(times)
    for first, low, high in ((0, 0, 3), (50, 3, 3.5), (100, 3.5, 6.5), (150, 100, 103)):
        of_tick = times[first : first + 50]
        assert low <= of_tick[0]
        assert of_tick[-1] < high
        assert of_tick[-1] - of_tick[0] > 0.7 * (high - low)
    assert list(jittered(requests, 3, seed=1)) == spread
    assert list(jittered(requests, 3, seed=2)) != spread
    assert list(jittered(requests, 0, seed=1)) == requests


def test_speed_and_duration() -> None:
    assert [r.arrival_s for r in until(at_speed(at(0, 1, 2, 3, 10), 2), 1.5)] == [0, 0.5, 1]


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    window_s, num_windows = 30, 2000
    counts = [0] * num_windows
    for arrival_s in arrivals(2.0, burstiness, random.Random(0)):
        if arrival_s >= window_s * num_windows:
            break
        counts[int(arrival_s // window_s)] += 1
    assert statistics.fmean(counts) == pytest.approx(60, rel=0.02)
    assert statistics.pvariance(counts) / 60 == pytest.approx(burstiness, rel=0.12, abs=0.05)


def test_a_mix_has_its_shares() -> None:
    requests = list(itertools.islice(mixed(MIXES["chat-and-documents"], 2.0, 1.0, seed=0), 5000))
    lengths = [(request.num_input_tokens, request.num_output_tokens) for request in requests]
    assert set(lengths) == {(120, 64), (1500, 16)}
    assert lengths.count((120, 64)) / 5000 == pytest.approx(0.8, abs=0.02)


def conversations(num_requests: int) -> list[TraceRequest]:
    """A trace with known figures: 512 shared tokens, then 3 turns of each conversation, 60 s apart."""
    rng = random.Random(0)
    next_id = itertools.count(1)
    trace = []
    for index in range(num_requests // 3):
        prompt: list[int] = [0]
        start_s = index + rng.random()
        for turn in range(3):
            prompt = [*prompt, *itertools.islice(next_id, rng.randint(1, 5))]
            output = rng.randint(50, 150)
            trace.append(TraceRequest(start_s + 60 * turn, 512 * len(prompt), output, tuple(prompt)))
    return sorted(trace)


def test_a_synthetic_load_reproduces_what_it_was_fitted_to() -> None:
    original = fit(conversations(6000))
    assert original.load.shared_prefix_tokens == 512
    assert original.load.follow_up_share == pytest.approx(2 / 3)
    assert original.load.turn_gap_s == pytest.approx([60] * 64)
    again = fit(itertools.islice(synthesize(original.load, seed=3), 6000))
    assert again.summary.mean_input_tokens == pytest.approx(original.summary.mean_input_tokens, rel=0.1)
    assert again.summary.mean_output_tokens == pytest.approx(original.summary.mean_output_tokens, rel=0.02)
    assert again.summary.block_hit_rate == pytest.approx(original.summary.block_hit_rate, abs=0.03)
    assert again.summary.token_hit_rate == pytest.approx(original.summary.token_hit_rate, abs=0.03)
    assert again.summary.duration_s == pytest.approx(original.summary.duration_s, rel=0.05)


def test_equal_ids_mean_equal_prefixes_in_a_synthetic_load() -> None:
    load = fit(conversations(3000)).load
    before: dict[int, tuple[int, ...]] = {}
    for request in itertools.islice(synthesize(load, seed=0), 2000):
        assert len(request.hash_ids) == -(-request.num_input_tokens // 512)
        for index, block in enumerate(request.hash_ids):
            assert before.setdefault(block, request.hash_ids[:index]) == request.hash_ids[:index]


def test_a_synthetic_load_is_the_same_for_the_same_seed() -> None:
    load = SyntheticLoad(1.0, (100, 2000), (10,), follow_up_share=0.5)
    first, again, other = (list(itertools.islice(synthesize(load, seed), 100)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_samples_keep_the_mean_of_what_they_resemble() -> None:
    rng = random.Random(0)
    original = [rng.lognormvariate(7, 1.5) for _ in range(5000)]
    sampler = Sampler(values_of(original))
    drawn = [sampler.draw(rng) for _ in range(50_000)]
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(original), rel=0.02)
    assert min(drawn) >= 0


def test_parameters_survive_a_file_and_bad_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    load = fit(conversations(300)).load
    load.save(path)
    assert SyntheticLoad.load(path) == load
    for text, reason in (
        ('{"rate_per_s": 0, "first_input_tokens": [1], "output_tokens": [1]}', "rate_per_s must be above 0"),
        ('{"rate_per_s": 1, "first_input_tokens": [2, 1], "output_tokens": [1]}', "first_input_tokens must"),
        ('{"rate_per_s": 1, "first_input_tokens": [1], "output_tokens": [1], "bust": 1}', "bust"),
    ):
        path.write_text(text)
        with pytest.raises(TraceError, match=rf"load\.json: .*{reason}"):
            SyntheticLoad.load(path)


def test_blocks_are_divided_into_equal_parts() -> None:
    load = [TraceRequest(0.0, 1000, 5, (7, 8)), TraceRequest(1.0, 600, 5, (7, 9))]
    first, second = in_blocks(load, 256)
    assert first == TraceRequest(0.0, 1000, 5, (14, 15, 16, 17))
    assert second.hash_ids == (14, 15, 18, 19)
    assert list(in_blocks(load, 512)) == load


def test_phases_follow_each_other_and_begin_again() -> None:
    phases = (Phase(60.0, 2.0, 1500, 30), Phase(30.0, 4.0, 150, 300))
    load = list(itertools.takewhile(lambda request: request.arrival_s < 180, in_phases(phases, 1.0, seed=1)))
    arrivals_s = [request.arrival_s for request in load]
    assert arrivals_s == sorted(arrivals_s)
    for request in load:
        phase = phases[request.arrival_s % 90 >= 60]
        assert (request.num_input_tokens, request.num_output_tokens) == phase[2:]
    assert len(load) == pytest.approx(480, rel=0.2)
