"""A worker of the product that also records the times of its passes.

It writes a JSON line for each pass, to the file that the variable `BENCH_TRACE` names.

Owns: the stopwatch. Does not know: the comparison.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mooncake.node.process import child_main
from mooncake.node.process_config import WorkerProcess
from workers.execution import loading
from workers.execution.executor import Executor
from workers.kvcache.layerwise import LayerTransfers, PassPart
from workers.process.service import serve

TRACE_VARIABLE = "BENCH_TRACE"


class TracedExecutor(Executor):
    """An executor that records its passes by the machine's monotonic clock, which all processes share."""

    def prefill(
        self,
        parts: Sequence[PassPart],
        transfers: LayerTransfers,
        hidden: torch.Tensor | None = None,
        most_at_once: int | None = None,
    ) -> torch.Tensor:
        begin_s = time.monotonic()
        computed = super().prefill(parts, transfers, hidden, most_at_once)
        chunk = parts[0].chunk
        with Path(os.environ[TRACE_VARIABLE]).open("a") as trace:
            spent = {"begin_s": begin_s, "end_s": time.monotonic()}
            told = {"first_layer": self.model.layers.start, "start": chunk.start, "n": len(chunk.token_ids)}
            print(json.dumps({**told, **spent}), file=trace)
        return computed


if __name__ == "__main__":
    loading.Executor = TracedExecutor  # type: ignore[attr-defined]
    child_main(WorkerProcess, serve)
