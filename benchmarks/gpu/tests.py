"""The tests of kernels and engine, run on the GPU.

One of their checks is that greedy tokens equal those of transformers.

Owns: the choice of tests. Does not know: the subjects of tests.
"""

import os
import subprocess
import sys

from benchmarks.gpu.runner import ROOT
from benchmarks.report import Found, Report

_FOLDERS = ("tests/kernels/cuda", "tests/workers/engine")
_MOST_PROCESSES = 14
"""The most processes. Each one compiles kernels, and has a CUDA context of its own."""


def run(report: Report) -> None:
    """Run the tests of each folder, and add a row for each folder."""
    report.checks("Tests, on this GPU")
    for folder in _FOLDERS:
        report.check(folder, lambda folder=folder: _tested(folder))  # type: ignore[misc]


def _tested(folder: str) -> Found:
    num_processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(num_processes), "-m", "not soak", folder]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    lines = result.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Found(result.returncode == 0, "; ".join([*failed, *lines[-1:]]))
