"""First tokens are told again to another Conductor unless the one before has surely heard them."""

from mooncake.messages.requests import HeldStep, Ref
from mooncake.messages.workers import Prefilled
from workers.process.unheard import UnheardPrompts


def prefilled(name: str) -> Prefilled:
    return Prefilled(Ref(1, name, 1), 7, 0)


def names(unheard: UnheardPrompts) -> list[str]:
    assert all(held.step is HeldStep.PROMPT for held in unheard.held)
    return [held.ref.request_id for held in unheard.held]


def test_only_the_answer_to_a_later_heartbeat_shows_that_a_message_was_heard() -> None:
    unheard = UnheardPrompts()
    unheard.beat()
    unheard.told(prefilled("a"))
    unheard.beat()
    unheard.told(prefilled("b"))
    unheard.answered()
    assert names(unheard) == ["a", "b"], "the first heartbeat was sent before both"
    unheard.answered()
    assert names(unheard) == ["b"]
    assert unheard.take_all() == [prefilled("b")]
    assert names(unheard) == []


def test_heartbeats_to_another_conductor_count_anew() -> None:
    unheard = UnheardPrompts()
    for _ in range(3):
        unheard.beat()  # nobody answers
    unheard.take_all()
    unheard.told(prefilled("c"))
    unheard.beat()
    unheard.answered()
    assert names(unheard) == []
