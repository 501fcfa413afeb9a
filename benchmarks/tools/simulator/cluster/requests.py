"""The life of each simulated request, and the facts that are recorded of it.

Owns: times and outcomes. Does not know: which instance serves a request, SLOs.
"""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from benchmarks.tools.simulator.cluster.batch import Member, tbt_s, tpot_s
from benchmarks.tools.simulator.cluster.machines.machine import IterationJitter
from benchmarks.tools.traces.request import BLOCK_TOKENS, TraceRequest
from mooncake.messages.blocks import KEY_BYTES, BlockKey

ANY_TOKEN = 0
"""The token id of every output token."""


class Outcome(IntEnum):
    """The ways in which a request ends. Each request ends in exactly one."""

    FINISHED = 0
    REJECTED = 1
    FAILED = 2


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in progress. Times are in seconds of the simulation."""

    number: int
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    block_keys: list[BlockKey]
    """The keys of the request's full blocks; none if it shares nothing."""
    block_tokens: int = BLOCK_TOKENS
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    """Cached tokens that came from other instances."""
    prefill_s: float = 0.0
    """Seconds of a device that the request's prefill has taken."""
    first_token_s: float | None = None
    gaps: list[tuple[int, float]] = field(default_factory=list)
    """Gaps between the request's tokens, as pairs (number of gaps, seconds of each)."""
    member: Member | None = None
    """The request as a member of a batch, also while it migrates; None before it is decoded."""

    @classmethod
    def of(cls, number: int, request: TraceRequest, block_tokens: int = BLOCK_TOKENS) -> "SimulatedRequest":
        """Return the simulated request for a trace's request.

        Block keys are made from the trace's ids, as both stand for a block and all tokens before it.
        """
        num_full = request.num_input_tokens // block_tokens
        keys = [hash_id.to_bytes(KEY_BYTES, "little") for hash_id in request.hash_ids[:num_full]]
        return cls(
            number, request.arrival_s, request.num_input_tokens, request.num_output_tokens, keys, block_tokens
        )

    @property
    def num_pages(self) -> int:
        """The number of pool pages for the prompt."""
        return -(-self.num_input_tokens // self.block_tokens)

    @property
    def num_private_pages(self) -> int:
        """The number of the prompt's pages whose blocks have no key."""
        return self.num_pages - len(self.block_keys)

    @property
    def num_reusable_tokens(self) -> int:
        """The number of prompt tokens that can be reused: all but one, as at least one is computed."""
        return self.num_input_tokens - 1


_TIMES = ("arrival_s", "ttft_s", "tpot_s", "tbt_s", "end_s", "prefill_s")
_COUNTS = ("num_input_tokens", "num_output_tokens", "num_cached_tokens", "num_fetched_tokens", "outcome")
_NEVER = float("nan")


class Results:
    """The results of all requests that have ended, as columns. `results[name]` is a column as an array.

    `ttft_s`, `tpot_s` and `tbt_s` are NaN where a request had no such time. Tokens of requests that did not
    finish do not count as output. A request takes 88 bytes.
    """

    def __init__(self, jitter: IterationJitter | None = None) -> None:
        self._jitter = jitter
        self._columns: dict[str, array[Any]] = {name: array("d") for name in _TIMES}
        self._columns |= {name: array("q") for name in _COUNTS}

    def end(self, request: SimulatedRequest, outcome: Outcome, now_s: float) -> None:
        """Record the end of a request. To be called once for each request."""
        ttft_s = tpot = tbt = None
        if outcome is Outcome.FINISHED:
            assert request.first_token_s is not None
            gaps = request.gaps if self._jitter is None else self._jitter.applied(request.gaps)
            ttft_s, tpot, tbt = request.first_token_s - request.arrival_s, tpot_s(gaps), tbt_s(gaps)
        num_output_tokens = request.num_output_tokens if ttft_s is not None else 0
        row = (
            request.arrival_s,
            _NEVER if ttft_s is None else ttft_s,
            _NEVER if tpot is None else tpot,
            _NEVER if tbt is None else tbt,
            now_s,
            request.prefill_s,
            request.num_input_tokens,
            num_output_tokens,
            request.num_cached_tokens,
            request.num_fetched_tokens,
            outcome,
        )
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns["end_s"])

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array(self._columns[name])

    def num(self, outcome: Outcome) -> int:
        """Return the number of requests with this outcome."""
        return self._columns["outcome"].count(outcome)
