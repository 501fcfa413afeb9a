import json
import re
from pathlib import Path

import pytest

from benchmarks.tools.simulator.cli import run
from mooncake.cli import steps
from tests.benchmarks.simulator.loads import conversations

CLUSTER = ["--model", "llama-3.1-8b", "--gpus", "1"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": int(1000 * request.arrival_s),
            "input_length": request.num_input_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": list(request.hash_ids),
        }
        for request in conversations(40, 20.0, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_reports_a_run_for_each_speed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--trace", str(trace), "--prefill", "1", "--decode", "1", "--speed", "1", "2"]
    slos = ["--ttft-slo", "30", "--tbt-slo", "0.5"]
    assert run([*arguments, *CLUSTER, *slos, "--out", str(out)]) == 0
    assert "1P+1D" in capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert [r["summary"]["num_finished"] for r in report["runs"]] == [40, 40]
    assert report["runs"][1]["rate_per_s"] == pytest.approx(2 * report["runs"][0]["rate_per_s"])
    assert {path.name for path in out.glob("*.svg")} == {"latencies.svg", "load.svg", "goodput.svg"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--prefill", "1", "--decode", "1", "--inlining"], "1P+1D, inlining"),
        (["--both", "2"], "2 both"),
        (["--both", "1", "--prefill", "1", "--decode", "1"], "1P+1D+1 both"),
    ],
)
def test_instances_that_compute_and_decode(
    trace: Path, arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--trace", str(trace), *arguments, *CLUSTER, "--block-tokens", "64"]) == 0
    assert name in capsys.readouterr().out


def test_prints_the_terms_of_the_objective_and_with_weights_its_value(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--trace", str(trace), "--prefill", "1", "--decode", "1", *CLUSTER, "--out", str(tmp_path)]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    for name in ("U_avg", "T_avg-latency, s", "Theta, output tokens/s"):
        assert name in printed
    assert not re.search(r"│ J +│", printed)
    assert run([*arguments, "--weights", "1", "0.5", "0.001"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    terms = report["runs"][0]["terms"]
    assert 0 < terms["utilisation"] < 1
    value = terms["utilisation"] - 0.5 * terms["latency_s"] + 0.001 * terms["output_tokens_per_s"]
    assert re.search(rf"│ J +│ +{value:.4g} │", capsys.readouterr().out)
    assert report["weights"] == [1.0, 0.5, 0.001]


@pytest.mark.parametrize(
    ("weights", "message"),
    [(["1"], "expected 3 arguments"), (["1", "-1", "1"], "expected 0 or a number above 0, got -1")],
)
def test_refuses_weights_that_are_too_few_or_negative(
    trace: Path, weights: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["--trace", str(trace), "--coupled", "1", "--weights", *weights])
    assert message in capsys.readouterr().err


def test_the_simulated_requests_are_told_without_a_terminal(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", 0.0)
    assert run(["--trace", str(trace), "--prefill", "1", "--decode", "1", *CLUSTER]) == 0
    assert re.search(r"^1P\+1D, x1: 1 of \d+ \(", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--coupled", "2", "--model", "lama3-70b"], "did you mean llama3-70b"),
        (["--coupled", "2", "--hardware", "h20"], "did you mean h200"),
        (["--coupled", "2", "--hardware", "tpu"], "there are a100, a800, h800, h200"),
        (["--coupled", "2", "--tbt-slo", "0.001"], "no request can meet a TBT SLO of 1 ms"),
        (["--coupled", "2", "--ttft-slo", "0.001"], "no request can meet a TTFT SLO of 1 ms"),
        (["--coupled", "2", "--gpus", "1"], "leave no room for KVCache"),
        (["--coupled", "2", "--weights", "0", "0", "0"], "at least one must be above 0"),
        (["--coupled", "2", "--rate", "3"], "change it with --speed"),
        (["--coupled", "2", "--profile", "/nowhere"], "/nowhere"),
        (
            ["--coupled", "2", "--scheduling", "random"],
            "--scheduling is for --prefill and --decode instances",
        ),
        (["--coupled", "2", "--prefill-layer-window"], "--prefill-layer-window is for"),
        (["--coupled", "2", "--no-rejection"], "coupled instances reject nothing"),
        (["--prefill", "2", "--decode", "1", "--chunk", "256"], "--chunk is for --coupled instances"),
        (["--coupled", "2", "--inlining"], "--inlining is for --prefill and --decode instances"),
        (["--both", "2", "--inlining"], "--inlining is for --prefill and --decode instances"),
        (["--both", "2", "--nic-gbps", "100"], "it changes nothing in 2 both"),
        (["--both", "2", "--chunk", "256"], "--chunk is for --coupled instances"),
        (["--both", "2", "--coupled", "2"], "say how many of which"),
        (["--both", "2", "--decode", "2"], "say how many of which"),
        (["--both", "2", "--block-tokens", "48"], "cannot be divided into blocks of 48"),
        (["--prefill", "2"], "say how many of which"),
        (["--prefill", "2", "--decode", "1", "--coupled", "2"], "say how many of which"),
    ],
)
def test_refuses_what_cannot_be(
    trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--trace", str(trace), *arguments]) == 2
    assert message in capsys.readouterr().err
