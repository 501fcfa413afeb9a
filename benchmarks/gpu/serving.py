"""A Llama-3-8B with random weights behind HTTP: one prefill and one decode instance on one GPU.

Owns: its flags. Does not know: how requests are measured (`benchmarks/serving.py`).
"""

import tempfile
from pathlib import Path

from benchmarks.gpu.layers import PAGE_SIZE
from benchmarks.gpu.llama import LLAMA_3_8B
from benchmarks.gpu.model_directory import write_model
from benchmarks.report import Report
from benchmarks.servers import free_port, serving
from benchmarks.serving import PAIR, Client, measure, our_command

_FLAGS = (
    "--load-format=dummy",
    "--worker-device=cuda:0",
    *PAIR,
    f"--kvcache-block-size={PAGE_SIZE}",
    "--kvcache-device-bytes=16GiB",
    "--kvcache-pool-bytes=8GiB",
)


def run(report: Report) -> None:
    """Start the server, and measure the tables of `benchmarks/serving.py`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), LLAMA_3_8B)
        with serving(our_command(port, [f"--model={directory}", *_FLAGS]), f"{url}/ready"):
            measure(Client(url), report)
