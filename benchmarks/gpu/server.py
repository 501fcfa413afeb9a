"""Whole servers on one GPU: they must give exact answers, also while they change. Their speed is measured.

    python -m benchmarks.gpu.server [--small | --tiny] [--device cpu] [--only exact|speed] [--logs FOLDER]

Each check prints a line with its figure. After a failed check the others still run. Three servers run on the
device at the same time, each started by the command `mooncake-serve`, with random weights:

- pair: a prefill and two decode instances in float32, a small model. Greedy answers and their logprobs are
  compared with torch's own layers in this process: for computed prefixes, for prefixes reused from DRAM and
  SSD, and for 32 requests at once. Further checks are grammars, seeds, logprobs and penalties; moves, roles
  and drains; and workers that are killed.
- both: one instance with both roles, which computes prompts while it decodes. Its answers are compared, too.
- large: a prefill and a decode instance in bfloat16, Llama-3-8B's shape (--small: a model of 0.1 billion
  parameters), whose speed is measured. Then, without a server, the cost of layer-wise stores during a
  prefill.

`--device cpu --tiny` rehearses all of it without a GPU. Logs of the servers are kept in FOLDER. Exits with 1
if a check was wrong.

Owns: the order, models and flags. Does not know: how anything is checked.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.llama import LLAMA_3_8B
from benchmarks.gpu.model_directory import write_model
from benchmarks.gpu.whole_server.changes import Changes
from benchmarks.gpu.whole_server.cluster import Cluster
from benchmarks.gpu.whole_server.exact import Exactness
from benchmarks.gpu.whole_server.features import Features
from benchmarks.gpu.whole_server.overlap import measure_overlap
from benchmarks.gpu.whole_server.reference import Reference
from benchmarks.gpu.whole_server.speed import Speed
from benchmarks.report import Found, Report
from benchmarks.serving import PAIR
from mooncake.messages.blocks import KVDtype
from workers.engine.spec import ModelSpec

BLOCK_SIZE = 64
TINY = ModelSpec(
    "LlamaForCausalLM",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=4096,
)
SMALL = replace(
    TINY,
    vocab_size=32_000,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    max_position=32_768,
)
POOL_TOKENS = 16_384
"""The tokens that an instance's DRAM holds in servers that shall use SSD."""
LARGE_POOL_TOKENS = 49_152
"""The tokens that an instance's DRAM holds in the server whose speed is measured."""
DEVICE_TOKENS = 65_536
"""The tokens that an instance's device memory holds."""
START_DEADLINE_S = 120.0
DEFAULT_LOGS = Path(os.environ.get("OUT", tempfile.gettempdir())) / "server"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The served models, and the lengths of the prompts with which speed is measured."""

    exact: ModelSpec
    large: ModelSpec
    large_dtype: KVDtype
    prompt_len: int
    num_tokens: int
    long_len: int


GPU_SIZES = Sizes(SMALL, LLAMA_3_8B, "bfloat16", 1024, 128, 16_384)
TINY_SIZES = Sizes(TINY, TINY, "float32", 128, 32, 2048)


def run(report: Report) -> None:
    """Check all servers on the GPU."""
    check_servers(report, GPU_SIZES, "cuda:0", DEFAULT_LOGS)


def check_servers(report: Report, sizes: Sizes, device: str, logs: Path, only: str | None = None) -> None:
    """Check the servers, and add a row for each check. The servers' logs are written to `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    report.checks(f"Whole servers on {device}, logs in {logs}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mcm")))

        def start(name: str, spec: ModelSpec, dtype: str, *flags: str) -> Cluster:
            cluster = Cluster(name, logs, [*_flags(folder, spec, dtype, device), *flags])
            stack.callback(cluster.stop)
            return cluster

        exact = [] if only == "speed" else _start_exact(start, sizes.exact, folder)
        large = [] if only == "exact" else [
            start(
                "large",
                sizes.large,
                sizes.large_dtype,
                *PAIR,
                f"--kvcache-pool-bytes={LARGE_POOL_TOKENS * _token_bytes(sizes.large, sizes.large_dtype)}",
            )
        ]  # fmt: skip
        if exact:
            _check_exact(report, sizes.exact, device, *exact)
            for cluster in exact:
                report.check(f"what the log of {cluster.name} complains of", cluster.complaints)
                cluster.stop()
        for cluster in large:
            if _is_ready(report, cluster, device):
                speed = Speed(report, cluster, sizes.large.vocab_size)
                speed.measure(sizes.prompt_len, sizes.num_tokens, sizes.long_len)
                report.check("nothing is held", cluster.idle)
            report.check(f"what the log of {cluster.name} complains of", cluster.complaints)
    if only != "exact":  # the servers have left the device
        measure_overlap(report, sizes.large, sizes.large_dtype, device, sizes.long_len)


def _start_exact(start: Callable[..., Cluster], spec: ModelSpec, folder: Path) -> list[Cluster]:
    """Start the servers `pair` and `both`."""
    ssd = folder / "ssd"
    ssd.mkdir()
    by_hand = (
        "--worker-prefill-chunk=256",
        "--conductor-rebalancing=false",
        "--conductor-migrate-for-slos=false",
    )
    pool_bytes = POOL_TOKENS * _token_bytes(spec, "float32")
    pair = start(
        "pair",
        spec,
        "float32",
        *by_hand,
        "--num-decode=2",
        "--conductor-inlining=false",
        f"--kvcache-pool-bytes={pool_bytes}",
        f"--kvcache-ssd-dirs={ssd}",
        f"--kvcache-ssd-bytes={8 * pool_bytes}",
    )
    both = start("both", spec, "float32", *by_hand, "--num-both=1", f"--kvcache-pool-bytes={pool_bytes}")
    return [pair, both]


def _check_exact(report: Report, spec: ModelSpec, device: str, pair: Cluster, both: Cluster) -> None:
    reference = Reference(spec, device, num_tokens=2048)
    if _is_ready(report, pair, device):
        exactness = Exactness(report, pair, reference, spec.vocab_size, POOL_TOKENS)
        exactness.pair()
        Features(report, pair, exactness.new_prompt(100)).check()
    if _is_ready(report, both, device):
        Exactness(report, both, reference, spec.vocab_size, POOL_TOKENS).coupled()
    if pair.process.poll() is None:
        prompts = [exactness.new_prompt(length) for length in (40, 100, 200, 300, 40, 500, 70, 90)]
        Changes(report, pair, reference, prompts, lambda: _free_bytes(device)).check()


def _is_ready(report: Report, cluster: Cluster, device: str) -> bool:
    def find() -> Found:
        ready_s = cluster.wait_until_ready(START_DEADLINE_S)
        engines = sorted(set(cluster.metrics("mooncake_instance_engine")))
        computes = "torch)" not in str(engines) and (device == "cpu" or "triton" in str(engines))
        return Found(computes, f"{ready_s:.1f} s; {'; '.join(engines)}")

    report.check(f"{cluster.name} is ready", find)
    return cluster.process.poll() is None


def _flags(folder: Path, spec: ModelSpec, dtype: str, device: str) -> list[str]:
    """Write the model's directory if it does not exist, and return the flags for serving the model."""
    directory = folder / f"{spec.num_layers}-{spec.vocab_size}"
    if not directory.exists():
        directory.mkdir()
        write_model(directory, spec)
    return [
        f"--model={directory}",
        "--served-model-name=model",
        "--load-format=dummy",
        f"--dtype={dtype}",
        f"--worker-device={device}",
        f"--kvcache-block-size={BLOCK_SIZE}",
        f"--kvcache-device-bytes={DEVICE_TOKENS * _token_bytes(spec, dtype)}",
    ]


def _token_bytes(spec: ModelSpec, dtype: str) -> int:
    num_bytes = 4 if dtype == "float32" else 2
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * num_bytes


def _free_bytes(device: str) -> int:
    """Return the device's free memory in bytes; 0 on a CPU, whose memory is not compared."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.server", description="see the module's docstring"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="0.1 billion parameters instead of 8")
    parser.add_argument("--tiny", action="store_true", help="for a rehearsal on a CPU")
    parser.add_argument("--only", choices=("exact", "speed"))
    parser.add_argument("--logs", type=Path, default=DEFAULT_LOGS)
    chosen = parser.parse_args(arguments)
    sizes = TINY_SIZES if chosen.tiny else GPU_SIZES
    if chosen.small:
        sizes = replace(sizes, large=SMALL)
    report = Report()
    check_servers(report, sizes, chosen.device, chosen.logs, chosen.only)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
