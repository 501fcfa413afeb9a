"""Instances that are drained, by operators and because their workers were told to end."""

import pytest

from mooncake.messages.fronts import Submit
from mooncake.messages.operators import Drain
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import Finished, Prefilled, Reserved, Retire, Retired
from tests.conductor.small_cluster import D0, FRONT, GRANT, P0, new_conductor, ref, request


@pytest.mark.parametrize(
    ("orders", "is_for_good"), [("retire", False), ("drain, retire", True), ("retire, drain", True)]
)
def test_an_instance_leaves_for_good_if_an_operator_has_drained_it(orders: str, is_for_good: bool) -> None:
    """Else its supervisor starts it again."""
    conductor = new_conductor()
    conductor.handle(FRONT, Submit(request()), 1.0)
    conductor.handle(D0, Reserved(ref(), GRANT), 1.0)
    conductor.handle(P0, Prefilled(ref(), 42, 0), 1.0)
    for order in orders.split(", "):
        if order == "retire":
            conductor.handle(D0, Retire(), 1.0)
        else:
            conductor.handle(FRONT, Drain(1, "d0", force=True), 1.0)
    effects = conductor.handle(D0, Finished(ref(), FinishReason.STOP, 3), 2.0)
    assert [effect.message for effect in effects if effect.peer == D0] == [Retired(is_for_good)]
