"""What a division of instances into prefill and decode can serve of a load within its SLOs.

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
from mooncake.messages.costs import TBT_MARGIN, Costs

FULL_SHARE = 0.85
"""The load of a stage, by its capacity, above which requests begin to miss SLOs: arrivals are not even."""
_ROOM_SHARE = 0.9
"""The share of device pages that batches fill."""
_INLINED = 0.6
"""Prompt tokens that a decode instance computes beside its batch, by those of a prefill instance in the same
time."""
_LEAST = 1e-9


class Split(NamedTuple):
    """Numbers of instances."""

    num_prefill: int
    num_decode: int


class Work(NamedTuple):
    """A load in instances that would be busy all the time."""

    prefill: float
    decode: float


class Strain(NamedTuple):
    """The work of each stage by its instances; 1 is all that they can do."""

    prefill: float
    decode: float

    @property
    def served(self) -> float:
        """The share of requests that is served within SLOs. Each needs both stages."""
        return min(1.0, FULL_SHARE / max(*self, _LEAST))


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """What a mean decode instance can draw."""

    costs: Costs
    max_batch: float
    num_device_tokens: float
    tbt_slo_s: float | None

    def batch_size(self, load: Load) -> float:
        """The largest batch of the load's requests within the TBT SLO, the slots and the device's pages."""
        of_request_s = self.costs.first_s + load.mean_prompt_tokens * self.costs.second_s
        held = load.mean_prompt_tokens + load.mean_output_tokens / 2
        size = min(self.max_batch, _ROOM_SHARE * self.num_device_tokens / max(held, 1.0))
        if self.tbt_slo_s is not None and of_request_s > 0:
            left_s = self.tbt_slo_s - self.costs.constant_s
            size = min(size, left_s / ((1 + TBT_MARGIN) * of_request_s))
        return max(1.0, size)

    def tokens_per_s(self, load: Load) -> float:
        """Tokens drawn in a second with such a batch."""
        size = self.batch_size(load)
        return size / max(self.costs.seconds(size, size * load.mean_prompt_tokens), _LEAST)


def work_of(load: Load, capacity: DecodeCapacity) -> Work:
    """The load in instances."""
    return Work(load.prefill_s, load.num_output_tokens / capacity.tokens_per_s(load))


def strain_of(work: Work, split: Split, *, has_inlining: bool) -> Strain:
    """How much of what a division can do the work takes.

    With inlining decode instances compute the prompts that are too many for the prefill instances.
    """
    beyond = max(0.0, work.prefill - FULL_SHARE * split.num_prefill) if has_inlining else 0.0
    prefill = (work.prefill - beyond) / max(split.num_prefill, _LEAST)
    return Strain(prefill, (work.decode + beyond / _INLINED) / max(split.num_decode, _LEAST))
