"""The share of a load that a division into prefill and decode can serve within its SLOs.

DistServe (OSDI 2024, section 4) chooses the division offline, for a load that is known; Splitwise (ISCA 2024,
section 4.1) lets machines of a mixed pool do what is short. Here the same question is asked every few
seconds, of the load that arrives.

    prefill    seconds of prefill that arrive in a second, by instances
    decode     tokens that arrive in a second, by what instances draw in a second with the largest batch
               within the TBT SLO

Owns: this model. Does not know: how the load was measured, what is done about it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from conductor.elasticity.demand import Load
from mooncake.messages.costs import TBT_MARGIN, TBT_SLO_SHARE, Costs
from mooncake.messages.workers import Role

FULL_SHARE = 0.85
"""The load of a stage, as a share of its capacity, above which requests begin to miss SLOs, as arrivals are
uneven."""
_ROOM_SHARE = 0.9
"""The share of device pages that batches fill."""
_LEAST = 1e-9


class Division(NamedTuple):
    """Numbers of instances."""

    num_prefill: int
    num_decode: int


class Work(NamedTuple):
    """A load in instances that would be busy all the time."""

    prefill: float
    decode: float


class Strain(NamedTuple):
    """The work of each stage divided by its instances. At 1 they are fully used."""

    prefill: float
    decode: float

    def of(self, role: Role) -> float:
        """Return the strain of the stage that instances of a role belong to."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def served(self) -> float:
        """The share of requests that is served within SLOs. Each request needs both stages."""
        return min(1.0, FULL_SHARE / max(*self, _LEAST))


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Tokens that a mean decode instance can draw."""

    costs: Costs
    """Seconds of an iteration, by requests and tokens of KVCache."""
    max_batch: float
    num_device_tokens: float
    tbt_slo_s: float | None
    least_chunk_s: float = 0.0
    """Seconds that the shortest chunk of a prompt takes."""

    def batch_size(self, load: Load) -> float:
        """Return the largest batch of the load's requests within the TBT SLO, the slots and the device's
        pages."""
        of_request_s = self.costs.first_s + load.mean_kv_tokens * self.costs.second_s
        size = min(self.max_batch, _ROOM_SHARE * self.num_device_tokens / max(load.mean_kv_tokens, 1.0))
        if self.tbt_slo_s is not None and of_request_s > 0:
            left_s = self.tbt_slo_s - self.costs.constant_s
            size = min(size, left_s / ((1 + TBT_MARGIN) * of_request_s))
        return max(1.0, size)

    def tokens_per_s(self, load: Load) -> float:
        """Tokens drawn in a second with such a batch."""
        size = self.batch_size(load)
        return size / max(self.costs.seconds(size, size * load.mean_kv_tokens), _LEAST)

    def inlined_share(self, load: Load, work: float) -> float:
        """Return the share of its time in which a decode instance can compute prompts beside its part of the
        load.

        Iterations with chunks of prompts may take a share of the TBT SLO, and the chunks get what the batch
        leaves of it. Without an SLO only the batch's own work is a limit.

        Args:
            load: The load.
            work: The instance's decode work, as a share of all that it can do.
        """
        if self.tbt_slo_s is None:
            return max(0.0, 1.0 - work)
        iteration_s = TBT_SLO_SHARE * self.tbt_slo_s
        size = work * self.tokens_per_s(load) * iteration_s
        left_s = iteration_s - self.costs.seconds(size, size * load.mean_kv_tokens)
        return left_s / iteration_s if left_s >= self.least_chunk_s else 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Shares of a load that divisions of instances can serve."""

    load: Load
    decode: DecodeCapacity
    has_inlining: bool = False

    @property
    def work(self) -> Work:
        """The load in instances."""
        return Work(self.load.prefill_s, self.load.num_output_tokens / self.decode.tokens_per_s(self.load))

    def strain(self, division: Division) -> Strain:
        """Return the strain of a division under this load.

        With inlining decode instances compute the prompts that are too many for the prefill instances, as far
        as they can.
        """
        work, (num_prefill, num_decode) = self.work, division
        decode = work.decode / max(num_decode, _LEAST)
        beyond = max(0.0, work.prefill - FULL_SHARE * num_prefill) if self.has_inlining else 0.0
        if beyond:
            share = self.decode.inlined_share(self.load, min(1.0, decode))
            beyond = min(beyond, FULL_SHARE * share * num_decode)
        return Strain((work.prefill - beyond) / max(num_prefill, _LEAST), decode)
