"""The share of a load that a division into prefill and decode can serve within its SLOs.

DistServe (OSDI 2024, section 4) chooses the division offline, for a load that is known; Splitwise (ISCA 2024,
section 4.1) lets machines of a mixed pool do what is short. Here the same question is asked every few
seconds, of the load that arrives.

    prefill    seconds of prefill that arrive in a second, by instances
    decode     tokens that arrive in a second, by what instances draw in a second with the largest batch
               within the TBT SLO

Owns: this comparison. Does not know: how the load was measured, what is done about it; costs of a batch
(`conductor.performance.model`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from conductor.elasticity.demand import OfferedLoad
from conductor.performance.model import DecodeCapacity
from mooncake.messages.costs import TBT_SLO_SHARE
from mooncake.messages.workers import Role

FULL_SHARE = 0.85
"""The load of a stage, as a share of its capacity, above which requests begin to miss SLOs, as arrivals are
uneven."""
_LEAST = 1e-9
"""The divisor that replaces 0."""


class Division(NamedTuple):
    """Numbers of prefill and decode instances."""

    num_prefill: int
    num_decode: int


class Work(NamedTuple):
    """A load of both stages, in instances that it would keep busy all the time."""

    prefill: float
    decode: float


class Strain(NamedTuple):
    """The work of each stage divided by its instances. At 1 they are fully used."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        """Return the strain of the stage, prefill or decode, to which instances of this role belong."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def served(self) -> float:
        """The share of requests, from 0 to 1, that is served within SLOs. Each request needs both stages."""
        return min(1.0, FULL_SHARE / max(*self, _LEAST))


@dataclass(frozen=True, slots=True)
class DivisionCapacity:
    """Shares of one load that different divisions of instances can serve."""

    load: OfferedLoad
    decode: DecodeCapacity
    has_inlining: bool = False

    @property
    def work(self) -> Work:
        """The load, in instances that it would keep busy."""
        tokens_per_s = self.decode.tokens_per_s(self.load.mean_kv_tokens)
        return Work(self.load.prefill_s, self.load.num_output_tokens / tokens_per_s)

    def requests_per_s(self, division: Division) -> float:
        """Return the requests a second, of this load's kind, up to which all are served within their SLOs."""
        return FULL_SHARE * self.load.num_requests / max(*self.strain(division), _LEAST)

    def strain(self, division: Division) -> Strain:
        """Return the strain of a division under this load.

        With inlining decode instances compute the prompts that are too many for the prefill instances, as far
        as they can.
        """
        work, (num_prefill, num_decode) = self.work, division
        decode = work.decode / max(num_decode, _LEAST)
        beyond = max(0.0, work.prefill - FULL_SHARE * num_prefill) if self.has_inlining else 0.0
        if beyond:
            share = self._inlined_share(min(1.0, decode))
            beyond = min(beyond, FULL_SHARE * share * num_decode)
        return Strain((work.prefill - beyond) / max(num_prefill, _LEAST), decode)

    def _inlined_share(self, work: float) -> float:
        """Return the share of its time in which a decode instance can compute prompts beside its part of the
        load.

        Iterations with chunks of prompts may take a share of the TBT SLO, and the chunks get what the batch
        leaves of it. Without an SLO only the batch's own work is a limit.

        Args:
            work: The instance's decode work, as a share of all that it can do.
        """
        decode, kv_tokens = self.decode, self.load.mean_kv_tokens
        if decode.tbt_slo_s is None:
            return max(0.0, 1.0 - work)
        iteration_s = TBT_SLO_SHARE * decode.tbt_slo_s
        size = work * decode.tokens_per_s(kv_tokens) * iteration_s
        left_s = iteration_s - decode.tpot_s(size, kv_tokens)
        return left_s / iteration_s if left_s >= decode.least_chunk_s else 0.0
