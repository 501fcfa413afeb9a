"""Quotas of tenants in the whole cluster: tokens a minute, and choices that run at the same time.

Each front knows the limits of API keys and its own running requests. The Conductor knows the tokens and the
running requests of all fronts. A prompt is charged when its request is accepted. The output is charged when
the request has finished or is cancelled, as its length is unknown before. So the tokens left can fall below
0. The output of a failed request is not charged. A request is rejected while fewer tokens are left than its
prompts need.

Owns: the tokens that each tenant has left. Does not know: API keys, which requests run.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from conductor.view.rejection import Reason
from mooncake.messages.fronts import QuotaClaim


class QuotaRejection(NamedTuple):
    """The rejection of a request that would exceed its tenant's quota.

    `retry_after_s`: seconds until the quota may allow the request.
    """

    reason: Reason
    message: str
    retry_after_s: float


@dataclass(slots=True)
class TokenBudget:
    """The token quota of one tenant, as of the time `at_s`. Invariant: `num_left <= tokens_per_minute`."""

    tokens_per_minute: float
    num_left: float
    at_s: float
    num_charged: int = 0
    """All charged tokens, of prompts and of outputs."""
    num_refunded: int = 0
    """The charged tokens of requests that were rejected later."""

    def left(self, now_s: float) -> float:
        """Return the tokens left at `now_s`: at most a minute's tokens, below 0 after long outputs."""
        gained = max(0.0, now_s - self.at_s) * self.tokens_per_minute / 60
        return min(self.tokens_per_minute, self.num_left + gained)


class Quotas:
    """The tokens that each tenant has left. A tenant without a token limit is not counted."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, TokenBudget] = {}
        """Tenants in the order in which they were first seen."""

    def rejection(
        self, tenant: str, claim: QuotaClaim, num_elsewhere: int, now_s: float
    ) -> QuotaRejection | None:
        """Return why a request exceeds its tenant's quota; None if it fits. Charges nothing.

        Args:
            tenant: The tenant of the request.
            claim: The tenant's limits and the tokens of the request's prompts.
            num_elsewhere: Requests of the tenant that run at other fronts.
            now_s: The time.
        """
        most, num_running = claim.max_concurrent, claim.num_running + num_elsewhere
        if most is not None and num_running > most:
            message = f"{num_running} choices of the key {tenant!r} would run; at most {most} may"
            return QuotaRejection(Reason.MAX_CONCURRENT, message, 1.0)
        per_minute = claim.tokens_per_minute
        if per_minute is None:
            return None
        # A prompt longer than a minute's tokens, which fronts refuse, needs them all.
        num_missing = min(claim.num_tokens, per_minute) - self._renewed(tenant, per_minute, now_s).num_left
        if num_missing <= 0:
            return None
        message = (
            f"the key {tenant!r} may use {per_minute:g} tokens a minute, and has used so many that"
            f" {math.ceil(num_missing)} are missing for prompts of {claim.num_tokens}"
        )
        return QuotaRejection(Reason.TOKENS_PER_MINUTE, message, num_missing * 60 / per_minute)

    def restore(self, tenant: str, tokens: TokenBudget) -> None:
        """Restore a tenant's budget from `tokens`, the budget as an earlier Conductor stored it.

        What this Conductor has charged already is subtracted.
        """
        since = self.by_tenant.get(tenant)
        if since is not None:
            tokens.num_charged, tokens.num_refunded = since.num_charged, since.num_refunded
            tokens.num_left = min(
                tokens.tokens_per_minute, tokens.num_left - since.num_charged + since.num_refunded
            )
        self.by_tenant[tenant] = tokens

    def charge(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """Charge tokens to a tenant. A tenant without a token limit is not charged."""
        tokens = self.by_tenant.get(tenant)
        if tokens is not None:
            tokens.num_left, tokens.at_s = tokens.left(now_s) - num_tokens, max(now_s, tokens.at_s)
            tokens.num_charged += num_tokens

    def refund(self, tenant: str, num_tokens: int) -> None:
        """Give back the tokens that a tenant was charged for a request that is now rejected."""
        tokens = self.by_tenant.get(tenant)
        if tokens is not None:
            tokens.num_left = min(tokens.tokens_per_minute, tokens.num_left + num_tokens)
            tokens.num_refunded += num_tokens

    def _renewed(self, tenant: str, per_minute: float, now_s: float) -> TokenBudget:
        """Return the tenant's token budget, refilled for the time that has passed, under its present limit.

        The budget of a new tenant is full.
        """
        tokens = self.by_tenant.get(tenant)
        if tokens is None:
            tokens = self.by_tenant[tenant] = TokenBudget(per_minute, per_minute, now_s)
        tokens.num_left, tokens.at_s = tokens.left(now_s), max(now_s, tokens.at_s)
        if tokens.tokens_per_minute != per_minute:
            tokens.tokens_per_minute = per_minute
            tokens.num_left = min(tokens.num_left, per_minute)
        return tokens
