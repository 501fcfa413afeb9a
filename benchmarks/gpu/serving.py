"""A Llama-3-8B with random weights behind HTTP: one prefill and one decode instance on the one GPU.

Owns: its flags. Does not know: how requests are measured (`benchmarks/serving.py`).
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.layers import LLAMA_3_8B, PAGE_SIZE
from benchmarks.gpu.model_directory import write_model

_NEEDED = (
    "fastapi",
    "httpx",
    "msgspec",
    "pydantic",
    "tokenizers",
    "transformers",
    "uvicorn",
    "xxhash",
    "zmq",
)
_FLAGS = (
    "--load-format=dummy",
    "--worker-device=cuda:0",
    "--num-prefill=1",
    "--num-decode=1",
    f"--kvcache-block-size={PAGE_SIZE}",
    "--kvcache-device-bytes=16GiB",
    "--kvcache-pool-bytes=8GiB",
)


def serve() -> bool:
    """Prints the tables of `benchmarks/serving.py`; whether it ended well, or could not begin."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(f"\nserving: not measured, Python has no {', '.join(missing)}")
        return True
    print(
        "\nServing Llama-3-8B (random weights), one prefill and one decode instance on this GPU\n", flush=True
    )
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), LLAMA_3_8B)
        command = [sys.executable, "-m", "benchmarks.serving", f"--model={directory}", *_FLAGS]
        return subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=False).returncode == 0
