"""The batches of decode instances, as values that rules can copy with changes.

Owns: predictions for a batch with or without a request, whether an instance can be emptied. Does not
know: where the figures come from (`conductor.elasticity.survey`), why a request moves.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from mooncake.messages.costs import Costs, batch_share, tbt_margin_s

DESTINATION_SHARE = 0.9
"""The largest share of a TBT SLO that a move may fill at its destination.

A full destination would be the next instance that needs relief.
"""
_ROOM_SHARE = 0.95
"""The largest share of a destination's device pages that a move may fill. Requests grow afterwards."""


class Resident(NamedTuple):
    """A request that an instance decodes."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    """The estimated number of tokens drawn so far. Workers report tokens to fronts, not to the Conductor."""
    max_num_tokens: int
    """Tokens of the prompt and of the longest output that is allowed."""
    tbt_slo_s: float | None = None
    priority: int = 0
    """The request's order number: lower goes first."""
    may_move: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output. Their KVCache must move with the request."""
        return self.num_prompt_tokens + self.num_output_tokens


class Coming(NamedTuple):
    """A request that is assigned to a decode instance and is not decoded there yet."""

    request_id: str
    num_prompt_tokens: int
    tbt_slo_s: float | None = None
    priority: int = 0
    has_waited_s: float = 0.0
    """Seconds for which the request has been waiting for device pages and nothing else."""


@dataclass(frozen=True, slots=True)
class InstanceBatch:
    """The requests of one decode instance, with predictions for them."""

    instance: str
    residents: tuple[Resident, ...]
    costs: Costs
    """Learned seconds of an iteration, as a polynomial in requests and in tokens of their prompts."""
    max_batch: int
    max_sequence_tokens: int
    """Tokens of the longest sequence that fits into the idle instance."""
    num_device_tokens: int
    num_free_tokens: int
    """Tokens of KVCache for which the device or a helper has free pages."""
    coming: tuple[Coming, ...] = ()
    correction: float = 1.0
    """Measured TBT divided by predicted TBT, from the latest heartbeat."""
    num_tokens_at_helper: int = 0
    """Tokens of KVCache for which a helper has pages.

    Requests that move to this instance cannot use these pages.
    """
    takes_requests: bool = True
    """Whether the instance may be a destination; False while it drains or switches its role."""

    @property
    def size(self) -> int:
        """The number of residents and coming requests."""
        return len(self.residents) + len(self.coming)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts of residents and coming requests."""
        return sum(of.num_prompt_tokens for of in self.residents) + self.num_coming_tokens

    @property
    def tbt_slo_s(self) -> float | None:
        """The strictest TBT SLO in seconds of residents and coming requests; None if none has one."""
        slos_s = [of.tbt_slo_s for of in self.residents] + [of.tbt_slo_s for of in self.coming]
        return min((slo_s for slo_s in slos_s if slo_s is not None), default=None)

    @property
    def tbt_s(self) -> float:
        """The predicted TBT of the residents in seconds."""
        return self._tbt_s(len(self.residents), sum(of.num_prompt_tokens for of in self.residents))

    @property
    def full_tbt_s(self) -> float:
        """The predicted TBT in seconds when all coming requests have joined."""
        return self._tbt_s(self.size, self.num_prompt_tokens)

    def _tbt_s(self, num_requests: int, num_tokens: int) -> float:
        batched, delay = batch_share(num_requests, self.max_batch)
        return self.correction * delay * self.costs.seconds(batched * num_requests, batched * num_tokens)

    @property
    def is_late(self) -> bool:
        """Whether the predicted TBT of the residents misses the strictest SLO among them."""
        slos_s = [of.tbt_slo_s for of in self.residents if of.tbt_slo_s is not None]
        return bool(slos_s) and self.tbt_s > min(slos_s)

    def is_within(self, share: float = 1.0) -> bool:
        """Return whether the predicted TBT with all coming requests is within `share` of the strictest SLO.

        The margin of a prediction (`tbt_margin_s`) is added to the TBT. Without an SLO, the result tells
        whether all requests have a batch slot.
        """
        if self.tbt_slo_s is None:
            return self.size <= self.max_batch
        tbt_s = self.full_tbt_s
        return tbt_s + tbt_margin_s(tbt_s, self.costs.constant_s) <= share * self.tbt_slo_s

    @property
    def num_coming_tokens(self) -> int:
        """Tokens of the prompts of coming requests."""
        return sum(of.num_prompt_tokens for of in self.coming)

    def may_take(self, resident: Resident, share: float = DESTINATION_SHARE) -> bool:
        """Return whether the request can move to this instance.

        A batch slot and device pages must be free, and the batch must stay within `share` of its SLO.
        """
        if not self.takes_requests or self.size >= self.max_batch:
            return False
        if resident.max_num_tokens > self.max_sequence_tokens:
            return False
        num_free_tokens = self.num_free_tokens - self.num_tokens_at_helper
        num_free_after = num_free_tokens - self.num_coming_tokens - resident.num_tokens
        has_pages = num_free_after >= (1 - _ROOM_SHARE) * self.num_device_tokens
        return has_pages and self.with_(resident).is_within(share)

    def with_(self, resident: Resident) -> "InstanceBatch":
        """Return the batch with one more request."""
        free = self.num_free_tokens - resident.num_tokens
        return replace(self, residents=(*self.residents, resident), num_free_tokens=free)

    def without(self, resident: Resident) -> "InstanceBatch":
        """Return the batch without one of its requests."""
        residents = tuple(other for other in self.residents if other.request_id != resident.request_id)
        free = self.num_free_tokens + resident.num_tokens
        return replace(self, residents=residents, num_free_tokens=free)

    def fixing(self, request_ids: Collection[str]) -> "InstanceBatch":
        """Return the batch with these requests marked as requests that may not move."""
        if not any(of.request_id in request_ids for of in self.residents):
            return self
        residents = tuple(
            of._replace(may_move=of.may_move and of.request_id not in request_ids) for of in self.residents
        )
        return replace(self, residents=residents)


def destination_of(
    resident: Resident, batches: list[InstanceBatch], source: str, share: float = DESTINATION_SHARE
) -> InstanceBatch | None:
    """Return the batch that would have the least TBT with the request; None if no batch may take it.

    The batch of the instance `source` is left out.
    """
    able = [batch for batch in batches if batch.instance != source and batch.may_take(resident, share)]
    return min(able, key=lambda batch: batch.with_(resident).full_tbt_s, default=None)


def moved(
    batches: list[InstanceBatch], resident: Resident, source: str, destination: str
) -> list[InstanceBatch]:
    """Return the batches as they are after the request has moved."""
    return [
        batch.without(resident)
        if batch.instance == source
        else batch.with_(resident)
        if batch.instance == destination
        else batch
        for batch in batches
    ]


def can_be_emptied(source: InstanceBatch, batches: list[InstanceBatch]) -> bool:
    """Return whether all requests that `source` decodes fit into the other batches without breaking an SLO.

    In Llumnix (OSDI 2024, section 4.4) an instance that is to end, or is wanted for another use, counts as
    full, so its requests are moved away. Here requests are consolidated only if an instance is wanted empty.
    Otherwise the next requests would be placed there at once, as an empty instance has the least TBT.

    Long requests are assigned first, as they fit on fewer instances. Coming requests do not count on any
    instance: when they are decoded, other requests will have ended.
    """
    batches = [replace(batch, coming=()) for batch in batches]
    for resident in sorted(source.residents, key=lambda of: -of.num_tokens):
        if not resident.may_move:
            return False
        destination = destination_of(resident, batches, source.instance, share=1.0)
        if destination is None:
            return False
        batches = moved(batches, resident, source.instance, destination.instance)
    return True
