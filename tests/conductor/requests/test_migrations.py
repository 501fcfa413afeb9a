"""Whatever happens in whichever step: a migration ends once, its request goes on or ends, nothing is left."""

from collections.abc import Callable

import msgspec
import pytest

from conductor.effects import Effect
from conductor.requests.lifecycle import RequestState
from conductor.requests.migration import MigrationStep, step_behind_copies
from conductor.requests.migrations import RETRY_AFTER_S
from conductor.settings import Limits
from conductor.view.decision_stats import MigrationOutcome, MigrationReason
from mooncake.messages.fronts import Cancel, Continue, Failed, FrontHello, Interrupted, Submit
from mooncake.messages.migration import HandedOver, ModulesPart, ModulesPlace, PreCopied, Prepared
from mooncake.messages.operators import Drain
from mooncake.messages.requests import FinishReason
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    DecodeRefused,
    Finished,
    Leave,
    Prefilled,
    Reserved,
    WorkFailed,
)
from tests.conductor.small_cluster import (
    D0,
    D1,
    FRONT,
    GRANT,
    HEARTBEAT,
    P0,
    ref,
    request,
    two_decode_instances,
)

OUTPUT = [1]
SOURCE, DESTINATION = ref(1), ref(2)


class Moving:
    """A request that is to move from d0 to d1."""

    def __init__(self) -> None:
        self.conductor = two_decode_instances(Limits())
        self.told: list[Effect] = []
        self.now_s = 1.0
        self.hear(FRONT, Submit(request()))
        self.hear(D0, Reserved(SOURCE, GRANT))
        self.hear(P0, Prefilled(SOURCE, 1, 0))
        tracked, destination = self.conductor.requests["r"], self.conductor.instances.get("d1")
        assert destination is not None
        self.told = self.conductor.migrations.begin(tracked, destination, MigrationReason.RELIEVE, self.now_s)

    def hear(self, sender: bytes, message: object) -> None:
        self.told += self.conductor.handle(sender, message, self.now_s)  # type: ignore[arg-type]

    def goes(self, peer: bytes) -> None:
        """A peer is gone."""
        self.told += self.conductor.peer_gone(peer, self.now_s)

    def is_late(self) -> None:
        """Nothing is said for longer than a migration may take."""
        self.now_s += 11.0
        self.hear(FRONT, FrontHello(PROTOCOL_VERSION, "model"))
        for worker in (P0, D0, D1):
            self.hear(worker, HEARTBEAT)
        self.told += self.conductor.tick(self.now_s)

    @property
    def aborts(self) -> list[tuple[bytes, int]]:
        """Each attempt that was told to stop, and where."""
        return [
            (effect.peer, effect.message.ref.attempt)
            for effect in self.told
            if isinstance(effect.message, Abort)
        ]

    @property
    def outcomes(self) -> list[MigrationOutcome]:
        return [outcome for (_, outcome), count in self.conductor.stats.migrations.num_ended.items() if count]


def copying(moving: Moving) -> None:
    """The source copies."""


def preparing(moving: Moving) -> None:
    moving.hear(D0, PreCopied(SOURCE, OUTPUT))


def copying_again(moving: Moving) -> None:
    preparing(moving)
    moving.hear(D1, Prepared(DESTINATION, 8))


def handing_over(moving: Moving) -> None:
    copying_again(moving)
    moving.hear(D0, PreCopied(SOURCE, OUTPUT))


BEFORE = [copying, preparing, copying_again]
STEPS = [*BEFORE, handing_over]
Event = Callable[[Moving], None]


def finish(moving: Moving) -> None:
    moving.hear(D0, Finished(SOURCE, FinishReason.STOP, 3))


def cancel(moving: Moving) -> None:
    moving.hear(FRONT, Cancel("r"))


def lose_front(moving: Moving) -> None:
    moving.goes(FRONT)


def fail_for_good(moving: Moving) -> None:
    moving.hear(D0, WorkFailed(SOURCE, "broken", retryable=False))


@pytest.mark.parametrize("event", [finish, cancel, lose_front, fail_for_good])
@pytest.mark.parametrize("step", STEPS)
def test_a_request_that_ends_ends_its_migration(step: Event, event: Event) -> None:
    moving = Moving()
    step(moving)
    event(moving)
    assert moving.conductor.requests == {}
    assert moving.outcomes == [MigrationOutcome.ENDED]
    assert moving.aborts.count((D1, 2)) == 1
    assert not any(instance.requests for instance in moving.conductor.instances)
    assert not moving.conductor.view.loads.batch_size.any()


def source_is_lost(moving: Moving) -> None:
    moving.goes(D0)


def source_leaves(moving: Moving) -> None:
    moving.hear(D0, Leave())


def source_fails(moving: Moving) -> None:
    moving.hear(D0, WorkFailed(SOURCE, "broken", retryable=True))


@pytest.mark.parametrize("event", [source_is_lost, source_leaves, source_fails])
@pytest.mark.parametrize("step", STEPS)
def test_a_request_whose_source_fails_runs_again_behind_what_its_front_has(step: Event, event: Event) -> None:
    moving = Moving()
    step(moving)
    event(moving)
    assert moving.conductor.requests["r"].state is RequestState.INTERRUPTED
    assert Effect(FRONT, Interrupted("r")) in moving.told
    assert moving.outcomes == [MigrationOutcome.SOURCE_FAILED]
    assert moving.aborts.count((D1, 2)) == 1
    moving.hear(FRONT, Continue(request().continued(OUTPUT, 4)))
    assert moving.conductor.requests["r"].ref == ref(3)


def refuse(moving: Moving) -> None:
    """Section 3's double check: the first token has not left."""
    moving.hear(D0, DecodeRefused(SOURCE, "slow", 2, 0.2))


@pytest.mark.parametrize("step", STEPS)
def test_a_request_that_its_source_refuses_is_placed_elsewhere(step: Event) -> None:
    moving = Moving()
    step(moving)
    refuse(moving)
    tracked = moving.conductor.requests["r"]
    assert (tracked.state, tracked.decode, tracked.ref) == (RequestState.RESERVING, "d1", ref(3))
    assert moving.aborts.count((D1, 2)) == 1


def destination_is_lost(moving: Moving) -> None:
    moving.goes(D1)


def destination_refuses(moving: Moving) -> None:
    moving.hear(D1, WorkFailed(DESTINATION, "no room", retryable=True))


def destination_fails_for_good(moving: Moving) -> None:
    moving.hear(D1, WorkFailed(DESTINATION, "broken", retryable=False))


def destination_drains(moving: Moving) -> None:
    moving.hear(FRONT, Drain(1, "d1", stays=True))


ENDS_OF_DESTINATION = {
    destination_is_lost: MigrationOutcome.DESTINATION_LOST,
    destination_refuses: MigrationOutcome.REFUSED,
    destination_fails_for_good: MigrationOutcome.REFUSED,
}


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        *ENDS_OF_DESTINATION.items(),
        (destination_drains, MigrationOutcome.CALLED_OFF),
        (Moving.is_late, MigrationOutcome.LATE),
    ],
)
@pytest.mark.parametrize("step", BEFORE)
def test_before_the_hand_over_the_source_just_goes_on(
    step: Event, event: Event, outcome: MigrationOutcome
) -> None:
    moving = Moving()
    step(moving)
    event(moving)
    tracked = moving.conductor.requests["r"]
    assert (tracked.state, tracked.decode, tracked.ref) == (RequestState.DECODING, "d0", SOURCE)
    assert (moving.outcomes, tracked.failures) == ([outcome], [])
    assert moving.aborts == ([] if event is destination_is_lost else [(D1, 2)])
    moving.hear(D0, PreCopied(SOURCE, OUTPUT))  # late words of it change nothing
    moving.hear(D1, Prepared(DESTINATION, 8))
    assert moving.conductor.requests["r"] is tracked
    finish(moving)
    assert moving.conductor.requests == {}


@pytest.mark.parametrize(("event", "outcome"), ENDS_OF_DESTINATION.items())
def test_a_request_that_nobody_takes_over_runs_again_and_no_attempt_is_counted(
    event: Event, outcome: MigrationOutcome
) -> None:
    moving = Moving()
    handing_over(moving)
    event(moving)
    assert moving.conductor.requests["r"].state is RequestState.DECODING, "the source has yet to stop"
    moving.hear(D0, HandedOver(SOURCE, OUTPUT))
    tracked = moving.conductor.requests["r"]
    assert (tracked.state, tracked.failures) == (RequestState.INTERRUPTED, [])
    assert moving.outcomes == [outcome]


def test_a_source_that_does_not_hand_over_loses_the_request() -> None:
    moving = Moving()
    handing_over(moving)
    moving.is_late()
    assert moving.conductor.requests["r"].state is RequestState.INTERRUPTED
    assert moving.outcomes == [MigrationOutcome.LATE]
    moving.told.clear()
    moving.hear(D0, HandedOver(SOURCE, OUTPUT))
    assert moving.aborts == [(D0, 1)]


def test_a_destination_that_drains_takes_over_what_is_handed_over_to_it() -> None:
    moving = Moving()
    handing_over(moving)
    destination_drains(moving)
    moving.hear(D0, HandedOver(SOURCE, OUTPUT))
    tracked = moving.conductor.requests["r"]
    assert (tracked.decode, tracked.ref) == ("d1", DESTINATION)
    assert moving.outcomes == [MigrationOutcome.MOVED]


def test_a_hand_over_that_nobody_has_ordered_costs_the_source_the_request() -> None:
    moving = Moving()
    moving.hear(D0, HandedOver(SOURCE, OUTPUT))
    assert moving.conductor.requests["r"].state is RequestState.INTERRUPTED
    assert not [effect for effect in moving.told if isinstance(effect.message, Failed)]


@pytest.mark.parametrize(("num_free", "name"), [(103, None), (104, "d1")])
def test_no_request_moves_to_an_instance_whose_free_pages_may_be_those_of_its_helper(
    num_free: int, name: str | None
) -> None:
    moving = Moving()
    destination_refuses(moving)
    moving.now_s += RETRY_AFTER_S
    place = ModulesPlace(helper="d2", part=ModulesPart(share=0.5), num_device_pages=200)
    moving.hear(D1, msgspec.structs.replace(HEARTBEAT, num_free_device_pages=num_free, modules=place))
    tracked = moving.conductor.requests["r"]
    best = moving.conductor.migrations.best_destination(tracked, moving.now_s)
    assert (best and best.name) == name
    batches = moving.conductor.elasticity._survey.batches(moving.now_s)
    assert [batch.num_tokens_at_helper for batch in batches] == [0, 100 * 4]


@pytest.mark.parametrize(
    ("num_lacking", "num_rounds", "has_waited", "step"),
    [
        (2000, 0, False, MigrationStep.PREPARING),  # nothing has been copied
        (1, 0, False, MigrationStep.PREPARING),  # and the destination has no room yet
        (16, 1, False, MigrationStep.HANDING_OVER),
        (17, 1, False, MigrationStep.COPYING),  # soon it is a block
        (32, 1, False, MigrationStep.COPYING),  # the newest token has no KVCache
        (33, 1, False, MigrationStep.PREPARING),
        (33, 2, True, MigrationStep.PREPARING),
        (17, 2, True, MigrationStep.HANDING_OVER),
    ],
)
def test_what_follows_copies(
    num_lacking: int, num_rounds: int, has_waited: bool, step: MigrationStep
) -> None:
    assert step_behind_copies(num_lacking, num_rounds, 32, has_waited=has_waited) is step
