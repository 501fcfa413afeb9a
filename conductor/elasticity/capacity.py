"""The share of a load that a division into prefill and decode instances can serve within SLOs.

DistServe (OSDI 2024, section 4) chooses the division offline, for a known load; Splitwise (ISCA 2024, section
4.1) has a mixed pool whose machines join the stage that lacks machines. Here the division is judged again
every few seconds, for the load that arrives. The strain of a stage is:

    prefill    seconds of prefill that arrive in a second, divided by the number of instances
    decode     tokens to be drawn that arrive in a second, divided by the tokens that all instances draw in a
               second with the largest batch within the TBT SLO

Owns: this comparison. Does not know: how the load was measured, which changes follow, what a batch costs
(`conductor.performance.model`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from conductor.elasticity.demand import OfferedLoad
from conductor.performance.model import DecodeCapacity
from mooncake.messages.costs import TBT_SLO_SHARE
from mooncake.messages.workers import Role

FULL_SHARE = 0.85
"""The load of a stage, as a share of its capacity, above which requests begin to miss SLOs.

The share is below 1 because arrivals are uneven.
"""
_LEAST = 1e-9
"""The smallest divisor, used instead of 0."""


class Division(NamedTuple):
    """The numbers of prefill and of decode instances."""

    num_prefill: int
    num_decode: int


class Work(NamedTuple):
    """The work of a load by stage, in instances that the load would keep busy all the time."""

    prefill: float
    decode: float


class Strain(NamedTuple):
    """The work of each stage divided by the number of its instances. At 1 a stage is fully used."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        """Return the strain of the stage, prefill or decode, that instances of this role compute."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def served(self) -> float:
        """The share of requests, from 0 to 1, that is served within SLOs.

        The more strained stage decides, as each request needs both stages.
        """
        return min(1.0, FULL_SHARE / max(*self, _LEAST))


@dataclass(frozen=True, slots=True)
class DivisionCapacity:
    """The strain of one load on different divisions of instances."""

    load: OfferedLoad
    decode: DecodeCapacity
    has_inlining: bool = False

    @property
    def work(self) -> Work:
        """The work of the load, in instances that it would keep busy."""
        tokens_per_s = self.decode.tokens_per_s(self.load.mean_kv_tokens)
        return Work(self.load.prefill_s, self.load.num_output_tokens / tokens_per_s)

    def requests_per_s(self, division: Division) -> float:
        """Return the most requests a second, of this load's kind, that a division serves within SLOs."""
        return FULL_SHARE * self.load.num_requests / max(*self.strain(division), _LEAST)

    def strain(self, division: Division) -> Strain:
        """Return the strain of a division under this load.

        With inlining, prompts beyond the capacity of the prefill instances count for the decode instances, as
        far as the decode instances have time for prompts.
        """
        work, (num_prefill, num_decode) = self.work, division
        decode = work.decode / max(num_decode, _LEAST)
        beyond = max(0.0, work.prefill - FULL_SHARE * num_prefill) if self.has_inlining else 0.0
        if beyond:
            share = self._inlined_share(min(1.0, decode))
            beyond = min(beyond, FULL_SHARE * share * num_decode)
        return Strain((work.prefill - beyond) / max(num_prefill, _LEAST), decode)

    def _inlined_share(self, work: float) -> float:
        """Return the share of a decode instance's time that its decode work leaves for prompts.

        Iterations with chunks of prompts may take a share of the TBT SLO. The chunks get the time that the
        batch leaves of this share, or none if that is too little for a chunk. Without an SLO the chunks get
        all the time that decode does not need.

        Args:
            work: The instance's decode work, as a share of its decode capacity.
        """
        decode, kv_tokens = self.decode, self.load.mean_kv_tokens
        if decode.tbt_slo_s is None:
            return max(0.0, 1.0 - work)
        iteration_s = TBT_SLO_SHARE * decode.tbt_slo_s
        size = work * decode.tokens_per_s(kv_tokens) * iteration_s
        left_s = iteration_s - decode.tpot_s(size, kv_tokens)
        return left_s / iteration_s if left_s >= decode.least_chunk_s else 0.0
