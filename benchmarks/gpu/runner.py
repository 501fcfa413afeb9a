"""Stages, each in a process of its own with a time limit, and the file of their results.

Owns: which stages run again, how they are ended, the file. Does not know: the work of stages.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.report import tables_of, write_json

ROOT = Path(__file__).resolve().parents[2]
SAME = ("device", "code")
"""The facts in a file's head on which results depend. If they differ, the file begins anew."""
_END_S = 20.0
"""Seconds after its time limit in which a stage can end its servers."""


def run_stages(
    stages: Mapping[str, str], head: Mapping[str, Any], out: Path, limit_s: float, *, again: bool
) -> dict[str, Any]:
    """Run the stages that have not passed yet, and return the contents of `out`.

    Args:
        stages: The module of each stage, by the stage's name. The module's `run(report)` is called.
        head: Facts of this run.
        out: The file for the head and all results so far. It is written after each stage.
        limit_s: The time limit of a stage in seconds.
        again: Whether stages that have passed run again.
    """
    before = json.loads(out.read_text()) if out.exists() else {}
    is_same = all(before.get(name) == head[name] for name in SAME)
    record: dict[str, Any] = {**head, "stages": before["stages"] if is_same else {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, module in stages.items():
        if not again and record["stages"].get(name, {}).get("status") == "passed":
            print(f"== {name}: has passed on this device already (--again)", file=sys.stderr)
            continue
        print(f"== {name}", file=sys.stderr, flush=True)
        record["stages"][name] = _run_stage(module, limit_s)
        write_json(out, record)
    return record


def _run_stage(module: str, limit_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gpu-stage") as folder:
        file = Path(folder) / "report.json"
        began_s = time.monotonic()
        # The stage's output is progress, so it goes to stderr: the tables come at the end.
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.stage", module, str(file)],
            cwd=ROOT,
            stdout=2,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            ended = {"status": "crashed", "error": f"ended with {process.returncode}"}
        except subprocess.TimeoutExpired:
            ended = {"status": "timed out", "error": f"took more than {limit_s:.0f} s"}
        finally:
            _end(process)
        found = json.loads(file.read_text()) if file.exists() else {}
        seconds = round(time.monotonic() - began_s, 1)
        return {"seconds": seconds, **({} if "status" in found else ended), **found}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a stage end its servers, then kill the processes of its session that are left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def markdown(record: Mapping[str, Any]) -> str:
    """Return the results of a run as a page in Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in record.items() if name != "stages")
    lines = [facts]
    for name, stage in record["stages"].items():
        lines += ["", f"## {name}: {stage['status']} ({stage['seconds']:.0f} s)", tables_of(stage)]
        if "error" in stage:
            lines += ["", "```", stage["error"].rstrip(), "```"]
    return "\n".join(lines)
