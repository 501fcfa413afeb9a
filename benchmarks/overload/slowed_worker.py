"""A worker process whose passes take the time of a larger model. `slowed` starts it.

Owns: the durations of passes. Does not know: the load.
"""

import time
from collections.abc import Sequence

import torch

from mooncake.node.process import child_main
from mooncake.node.process_config import WorkerProcess
from workers.engine.batch import Batch
from workers.execution.draws import Drawn, Draws
from workers.execution.executor import Executor
from workers.kvcache.layerwise import LayerTransfers, PassPart
from workers.process.service import serve

PREFILL_TOKEN_S = 0.25e-3
ITERATION_S, REQUEST_S = 0.02, 0.001
"""The seconds of an iteration, and the seconds that each of its requests adds."""


def slow_down() -> None:
    """Slow down all passes of this process from now on.

    The device thread sleeps, and so leaves the core to other processes.
    """
    prefill, decode = Executor.prefill, Executor.decode

    def slow_prefill(
        self: Executor,
        parts: Sequence[PassPart],
        transfers: LayerTransfers,
        hidden: torch.Tensor | None = None,
        most_at_once: int | None = None,
    ) -> torch.Tensor:
        end_s = time.monotonic() + PREFILL_TOKEN_S * sum(len(part.chunk.token_ids) for part in parts)
        hidden = prefill(self, parts, transfers, hidden, most_at_once)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return hidden

    def slow_decode(self: Executor, batch: Batch, draws: Draws) -> Drawn:
        num_prompt_tokens = sum(batch.query_lens) - len(batch.query_lens)
        iteration_s = ITERATION_S + REQUEST_S * len(batch.query_lens) + PREFILL_TOKEN_S * num_prompt_tokens
        end_s = time.monotonic() + iteration_s
        drawn = decode(self, batch, draws)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return drawn

    Executor.prefill, Executor.decode = slow_prefill, slow_decode  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    child_main(WorkerProcess, serve)
