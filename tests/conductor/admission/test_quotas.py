"""Quotas of tenants: tokens a minute and choices at the same time, whatever front a request comes through."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.admission.quotas import Quotas, TokenBudget
from conductor.policy import Conductor
from conductor.settings import Limits
from conductor.view.rejection import Reason
from mooncake.messages.fronts import Cancel, FrontHello, QuotaClaim, Rejected, Submit
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import PROTOCOL_VERSION, DecodeRefused, Finished, Prefilled, Reserved
from tests.conductor.small_cluster import D0, FRONT, GRANT, P0, new_conductor, ref, request

OTHER_FRONT = b"front-elsewhere#1"


def claim(
    num_tokens: int, per_minute: int | None = 60, num_running: int = 1, most: int | None = None
) -> QuotaClaim:
    return QuotaClaim(per_minute, most, num_running, num_tokens)


@dataclass
class Step:
    passed_s: float
    num_prompt: int
    num_output: int


STEPS = st.lists(
    st.builds(Step, st.floats(0, 90), st.integers(1, 60), st.integers(0, 200)), min_size=1, max_size=40
)


@given(STEPS)
def test_no_more_prompts_are_accepted_than_a_minutes_and_what_time_brings(steps: list[Step]) -> None:
    """And outputs, which are known late, are paid by those that come after."""
    quotas, now_s, used = Quotas(), 0.0, 0
    for step in steps:
        now_s += step.passed_s
        is_in_debt = "t" in quotas.by_tenant and quotas.by_tenant["t"].left(now_s) < 0
        refused = quotas.rejection("t", claim(step.num_prompt), 0, now_s)
        if refused is None:
            assert not is_in_debt
            used += step.num_prompt
            quotas.charge("t", step.num_prompt, now_s)
            assert used <= 60 + now_s + 1e-6
            used += step.num_output
            quotas.charge("t", step.num_output, now_s)
        else:
            assert refused.reason is Reason.TOKENS_PER_MINUTE
            then_s = now_s + refused.retry_after_s
            assert quotas.rejection("t", claim(step.num_prompt), 0, then_s + 1e-6) is None
            # The look into the future has brought time on: the clock does not go back.
            now_s = then_s + 1e-6
        assert quotas.by_tenant["t"].left(now_s) <= 60


def test_each_tenant_has_its_own_and_a_new_limit_holds_at_once() -> None:
    quotas = Quotas()
    assert quotas.rejection("a", claim(60), 0, 0.0) is None
    quotas.charge("a", 60, 0.0)
    refused = quotas.rejection("a", claim(30), 0, 10.0)
    assert refused is not None
    assert (refused.retry_after_s, refused.reason) == (pytest.approx(20.0), Reason.TOKENS_PER_MINUTE)
    assert "'a' may use 60 tokens a minute" in refused.message
    assert quotas.rejection("b", claim(60), 0, 10.0) is None
    assert quotas.rejection("a", claim(30, per_minute=6000), 0, 10.5) is not None
    assert quotas.rejection("a", claim(30, per_minute=6000), 0, 11.0) is None
    assert quotas.rejection("a", claim(11, per_minute=10), 0, 11.0) is None, "what never fits needs them all"
    quotas.charge("a", 10, 11.0)
    assert quotas.rejection("a", claim(1, per_minute=10), 0, 11.0) is not None
    quotas.refund("a", 1000)
    assert quotas.by_tenant["a"].left(11.0) == 10.0
    quotas.charge("unlimited", 1000, 11.0)
    assert "unlimited" not in quotas.by_tenant


# -- in the Conductor -------------------------------------------------------------------------------


def conductor_of_two_fronts(limits: Limits | None = None) -> Conductor:
    conductor = new_conductor(limits)
    conductor.handle(OTHER_FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
    return conductor


def submit(
    conductor: Conductor, front: bytes, request_id: str, wanted: QuotaClaim | None, now_s: float = 1.0
) -> Rejected | None:
    effects = conductor.handle(front, Submit(request(request_id), wanted), now_s)
    rejected = [effect.message for effect in effects if isinstance(effect.message, Rejected)]
    return rejected[0] if rejected else None


def test_choices_at_all_fronts_count_together() -> None:
    conductor = conductor_of_two_fronts()
    assert submit(conductor, FRONT, "a-0", claim(9, None, 2, most=3)) is None
    assert submit(conductor, FRONT, "a-1", None) is None  # the same answer's second choice
    refused = submit(conductor, OTHER_FRONT, "b-0", claim(9, None, 2, most=3))
    assert refused is not None
    assert (refused.reason, refused.status) == ("max_concurrent", 429)
    assert submit(conductor, OTHER_FRONT, "c-0", claim(9, None, 1, most=3)) is None
    conductor.handle(FRONT, Cancel("a-1"), 2.0)
    assert submit(conductor, OTHER_FRONT, "d-0", claim(9, None, 2, most=3)) is None


def test_what_has_ended_for_its_front_does_not_count_there() -> None:
    """The Conductor may hear of it later than the client, who sends the next request through that front."""
    conductor = conductor_of_two_fronts()
    assert submit(conductor, FRONT, "first", claim(9, None, 1, most=1)) is None
    assert submit(conductor, FRONT, "second", claim(9, None, 1, most=1)) is None
    assert submit(conductor, OTHER_FRONT, "third", claim(9, None, 1, most=1)) is not None


def test_prompts_and_outputs_are_charged_at_all_fronts_together() -> None:
    conductor = conductor_of_two_fronts()
    assert submit(conductor, FRONT, "a", claim(9, 60)) is None
    left = conductor.quotas.by_tenant[""].left
    assert left(1.0) == 51
    first = ref(request_id="a")
    conductor.handle(D0, Reserved(first, GRANT), 1.0)
    conductor.handle(P0, Prefilled(first, 5, 0), 1.0)
    conductor.handle(D0, Finished(first, FinishReason.LENGTH, 40), 1.0)
    assert left(1.0) == 11
    assert submit(conductor, OTHER_FRONT, "b", claim(9, 60)) is None
    conductor.handle(OTHER_FRONT, Cancel("b", num_output_tokens=4), 1.0)
    assert left(1.0) == -2
    refused = submit(conductor, FRONT, "c", claim(9, 60), 2.0)
    assert refused is not None
    assert (refused.reason, refused.status) == ("tokens_per_minute", 429)
    assert refused.retry_after_s == pytest.approx(10.0)
    assert submit(conductor, FRONT, "d", claim(9, 60), 12.0) is None


def test_a_request_that_is_rejected_costs_nothing() -> None:
    conductor = conductor_of_two_fronts(Limits(max_running_requests=1))
    assert submit(conductor, FRONT, "a", claim(9, 60)) is None
    refused = submit(conductor, FRONT, "b", claim(9, 60))
    assert refused is not None
    assert refused.reason == "max_running_requests"
    assert conductor.quotas.by_tenant[""].left(1.0) == 51
    conductor.handle(D0, Reserved(ref(request_id="a"), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(request_id="a"), 5, 0), 1.0)
    conductor.handle(D0, DecodeRefused(ref(request_id="a"), "slow", 2, 0.2), 1.0)
    assert "a" not in conductor.requests
    assert conductor.quotas.by_tenant[""].left(1.0) == 60


def test_what_was_used_before_the_levels_were_read_counts() -> None:
    """They may come late, and a tenant has a whole minute's tokens until then."""
    quotas = Quotas()
    assert quotas.rejection("t", claim(40), 0, now_s=1.0) is None
    quotas.charge("t", 40, now_s=1.0)
    quotas.restore("t", TokenBudget(60.0, 30.0, at_s=1.0))
    assert quotas.by_tenant["t"].left(1.0) == -10.0
    quotas.refund("t", 40)
    assert quotas.by_tenant["t"].left(1.0) == 30.0
