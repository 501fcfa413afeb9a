"""Reasons for which a request is rejected, with their HTTP status. Pure values.

`Rejection` has the client's text for an SLO that a prediction misses. The texts of other reasons are in the
modules that find them: `conductor.policy`, `conductor.requests.placer`, `conductor.admission.quotas`. With
DOUBLE_CHECK the text is the decode instance's (`DecodeRefused.reason`).
"""

from enum import StrEnum
from typing import Literal, NamedTuple


class Reason(StrEnum):
    """The reason for which a request is rejected. SLOs are named by their configuration keys."""

    UNREADY = "unready"
    DUPLICATE = "duplicate"
    TOO_LARGE = "too_large"
    TOO_MANY = "max_running_requests"
    MAX_CONCURRENT = "max_concurrent"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOO_MANY_WAIT = "max_waiting"
    TTFT = "ttft_slo_s"
    TBT = "tbt_slo_s"
    DOUBLE_CHECK = "double_check"
    NEVER_PLACED = "placement_timeout_s"

    @property
    def status(self) -> int:
        """The HTTP status of the rejection."""
        return _STATUS.get(self, 429)


_STATUS = {Reason.UNREADY: 503, Reason.NEVER_PLACED: 503, Reason.DUPLICATE: 409, Reason.TOO_LARGE: 400}
SLOReason = Literal[Reason.TTFT, Reason.TBT]
"""The reasons that are a predicted time beyond an SLO. Their values are the names of keys of `conductor`."""
_WOULD_TAKE: dict[SLOReason, str] = {
    Reason.TTFT: "its first token would take",
    Reason.TBT: "a token would take",
}
_KEPT_FOR: dict[SLOReason, str] = {Reason.TTFT: "for longer prompts", Reason.TBT: "as a margin"}


class Rejection(NamedTuple):
    """The rejection of a request that has missed an SLO, or is predicted to miss one (Algorithm 1, line 26).

    `conductor.requests.placer` tries other placements for a missed TTFT SLO, and lets requests wait for a
    missed TBT SLO. Rejections for other reasons have their own texts (`Endings.reject`).
    """

    reason: SLOReason
    predicted_s: float
    slo_s: float
    retry_after_s: float
    """Seconds after which the request may be admitted if it is sent again."""
    prompt_s: float = 0.0
    """The predicted seconds of the prompt on an idle instance.

    Only rejections for a predicted TTFT have this number; it is 0 in others.
    """
    kept_s: float = 0.0
    """Seconds of the SLO that are kept free: headroom for longer prompts, or the margin of a TBT."""

    @property
    def message(self) -> str:
        """The text of the rejection for the client."""
        kept = f", {1000 * self.kept_s:.1f} ms of them {_KEPT_FOR[self.reason]}" if self.kept_s else ""
        return (
            f"the cluster is overloaded: {_WOULD_TAKE[self.reason]} {1000 * self.predicted_s:.1f} ms, at most"
            f" {1000 * self.slo_s:g} ms are allowed (conductor.{self.reason}){kept}; come back later"
        )
