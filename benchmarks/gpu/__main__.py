"""The engine on a GPU: its correctness, its speed in relation to the device's limits, and whole servers.

    python -m benchmarks.gpu [--only STAGE ...] [--limit-s 600] [--out build/gpu.json] [--again]

- check: every kernel against its torch reference in float32, float16 and bfloat16; tiny models against torch.
- tests: the tests of the kernels and of the engine, on this GPU.
- kernels: GB/s and TFLOP/s at the shapes of Llama-3-8B, as shares of a copy and of a matrix product.
- steps: decode steps and prefill passes of Llama-3-8B with random weights.
- server: three whole servers, whose answers must be exact, also while the cluster changes (`server.py`).
- serving: the same model through HTTP, with one prefill and one decode instance on one GPU.
- gpudirect: the parts of GPUDirect RDMA that the machine allows.

Each stage is a process of its own. If a stage fails, the next one runs all the same. Stages that have passed
on this device with this code are skipped, so an interrupted run can be continued. The file has all results;
the tables are printed at the end, progress goes to stderr. The stages check, kernels and steps need torch,
numpy and triton only. Without a GPU the program prints that and exits with 0. It exits with 1 if a result is
wrong, a figure misses its limit (*bar*) or a stage does not end by itself.

Owns: the stages, the facts of a run. Does not know: the measurements, how stages run.
"""

import argparse
import hashlib
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu.runner import ROOT, markdown, run_stages
from kernels.cuda import why_unavailable

STAGES = {
    "check": "benchmarks.gpu.checks",
    "tests": "benchmarks.gpu.tests",
    "kernels": "benchmarks.gpu.layers",
    "steps": "benchmarks.gpu.steps",
    "server": "benchmarks.gpu.server",
    "serving": "benchmarks.gpu.serving",
    "gpudirect": "benchmarks.gpu.gpudirect",
}
_CODE = ("mooncake", "conductor", "workers", "messenger", "kvstore", "kernels", "benchmarks")
_CODE_SUFFIXES = {".py", ".cpp", ".h"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="see the module's docstring"
    )
    parser.add_argument("--only", choices=STAGES, nargs="+", default=list(STAGES), metavar="STAGE")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each stage")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"))
    parser.add_argument("--again", action="store_true", help="what has passed, too")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; nothing to check or measure")
        return 0
    if why_unavailable():
        print(why_unavailable())
        return 1
    head = {
        "device": torch.cuda.get_device_name(),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": torch.__version__,
        "triton": _triton(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "code": _digest(),
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
    }
    stages = {name: STAGES[name] for name in STAGES if name in chosen.only}
    record = run_stages(stages, head, chosen.out, chosen.limit_s, again=chosen.again)
    print(markdown(record))
    return 0 if all(record["stages"][name]["status"] == "passed" for name in stages) else 1


def _said(*command: str) -> str | None:
    """Return the output of a program; None if the program is missing or fails."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _triton() -> str:
    import triton

    return str(triton.__version__)


def _digest() -> str:
    """Return a digest of the code in the working tree. The code may differ from the latest commit."""
    digest = hashlib.sha256()
    paths = (path for package in _CODE for path in (ROOT / package).rglob("*"))
    for path in sorted(path for path in paths if path.suffix in _CODE_SUFFIXES):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
