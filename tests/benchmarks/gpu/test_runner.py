"""Stages run one after the other whatever becomes of them, and those that have passed do not run again."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.runner import ROOT, markdown, run_stages
from tests.deadline import DEADLINE_S

HEAD = {"device": "a GPU", "code": "abc", "date": "today"}
TABLE = "    report.table('Times', '', 'time')\n    report.row('a copy', '3 us', time_s=3e-6)\n"
Stage = Callable[[str, str], str]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Writes the module of a stage, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def write(name: str, lines: str) -> str:
        count = f"    open({str(tmp_path / name)!r}, 'a').write('x')\n"
        (tmp_path / f"{name}_stage.py").write_text(f"import os, time\ndef run(report):\n{count}{lines}")
        return f"{name}_stage"

    return write


def run(stages: dict[str, str], folder: Path, head: Any = HEAD, **others: Any) -> dict[str, Any]:
    settings = {"limit_s": DEADLINE_S, "again": False, **others}
    record = run_stages(stages, head, folder / "out/gpu.json", **settings)
    assert json.loads((folder / "out/gpu.json").read_text()) == json.loads(json.dumps(record))
    return record


def test_a_stage_that_fails_does_not_end_the_others(tmp_path: Path, stage: Stage) -> None:
    stages = {
        "wrong": stage("wrong", f"{TABLE}    report.check('a sum', lambda: (False, '3 instead of 4'))\n"),
        "raises": stage("raises", f"{TABLE}    raise ValueError('no memory')\n"),
        "dies": stage("dies", f"{TABLE}    os._exit(3)\n"),
        "absent": "no_such_stage",
        "fine": stage("fine", TABLE),
    }
    record = run(stages, tmp_path)
    found = record["stages"]
    statuses = {name: stage["status"] for name, stage in found.items()}
    assert statuses == {
        "wrong": "failed",
        "raises": "crashed",
        "dies": "crashed",
        "absent": "crashed",
        "fine": "passed",
    }
    assert "ValueError: no memory" in found["raises"]["error"]
    assert found["dies"]["error"] == "ended with 3"
    assert found["dies"]["tables"] == found["fine"]["tables"]
    assert found["fine"]["tables"][0]["values"] == [{"time_s": 3e-6}]
    page = markdown(record)
    assert "device a GPU, code abc" in page
    assert "## fine: passed" in page
    assert "\n| | time |\n|---|---|\n| a copy | 3 us |\n" in page
    assert "| a sum | 3 instead of 4 |" in page
    assert "| **WRONG** |" in page
    assert "ended with 3" in page


def test_a_stage_that_runs_out_of_time_is_ended_with_its_processes(tmp_path: Path, stage: Stage) -> None:
    child = tmp_path / "child"
    lines = (
        f"{TABLE}    import subprocess\n"
        "    process = subprocess.Popen(['sleep', '1000'])\n"
        f"    open({str(child)!r}, 'w').write(str(process.pid))\n"
        "    process.wait()\n"
    )
    limit_s = 1.0
    while not child.exists():  # the limit was too short for Python to start in
        record = run(
            {"hangs": stage("hangs", lines), "fine": stage("fine", TABLE)}, tmp_path, limit_s=limit_s
        )
        limit_s *= 2
    hung = record["stages"]["hangs"]
    assert hung["status"] == "timed out"
    assert hung["tables"][0]["rows"] == [["a copy", "3 us"]]
    assert "fine" in record["stages"]
    assert_ends(int(child.read_text()))


def assert_ends(pid: int) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_only_what_has_not_passed_on_this_device_with_this_code_runs_again(
    tmp_path: Path, stage: Stage
) -> None:
    stages = {"fine": stage("fine", TABLE), "raises": stage("raises", "    raise ValueError\n")}

    def times() -> list[int]:
        return [len((tmp_path / name).read_text()) for name in stages]

    run(stages, tmp_path)
    record = run(stages, tmp_path, {**HEAD, "date": "tomorrow"})
    assert (times(), record["date"], list(record["stages"])) == ([1, 2], "tomorrow", ["fine", "raises"])
    run({"fine": stages["fine"]}, tmp_path, again=True)
    assert times() == [2, 2]
    record = run({"fine": stages["fine"]}, tmp_path, {**HEAD, "device": "another GPU"})
    assert times() == [3, 2]
    assert list(record["stages"]) == ["fine"]
    run({"fine": stages["fine"]}, tmp_path, {**HEAD, "code": "abd"})
    assert times() == [4, 2]
