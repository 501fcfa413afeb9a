"""BanaServe's Algorithm 2 on values; tests/conductor/golden/rivals.txt has it in a Conductor."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conductor.scheduling.algorithm1 import zeroed_candidates
from conductor.scheduling.choices import Candidates, LeastUtilised
from conductor.view.loads import Loads
from mooncake.messages.workers import Role

THRESHOLD = 1.5


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[float], list[int], list[bool]]:
    """U, numbers of requests and whether the prompt fits, by slot; it fits one at least."""
    size = draw(st.integers(1, 6))
    used = draw(st.lists(st.floats(0, 2), min_size=size, max_size=size))
    requests = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    fits = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    return used, requests, fits


def chosen(used: list[float], requests: list[int], fits: list[bool]) -> int:
    loads = Loads()
    for slot, (utilisation, num_requests) in enumerate(zip(used, requests, strict=True)):
        loads.reset(slot, Role.PREFILL, 100)
        loads.utilisation[slot], loads.num_assigned[slot] = utilisation, num_requests
    queue_s, rest_s, ttft_s, is_remote, again_s = zeroed_candidates(len(used))
    ttft_s[:] = np.where(fits, 1.0, np.inf)
    return LeastUtilised(THRESHOLD)(Candidates(queue_s, rest_s, ttft_s, is_remote, again_s, 0), loads)


@given(instances())
def test_the_least_used_that_has_room_is_chosen_and_the_shortest_queue_when_all_are_full(
    state: tuple[list[float], list[int], list[bool]],
) -> None:
    used, requests, fits = state
    slot, able = chosen(used, requests, fits), [slot for slot, has_room in enumerate(fits) if has_room]
    assert fits[slot]
    if min(used[of] for of in able) < THRESHOLD - 1e-4:
        assert used[slot] <= min(used[of] for of in able) + 1e-4
    elif min(used[of] for of in able) >= THRESHOLD:
        assert requests[slot] == min(requests[of] for of in able)


def test_of_equally_used_ones_the_shorter_queue_is_chosen() -> None:
    assert chosen([0.5, 0.5, 0.5], [3, 1, 2], [True, True, True]) == 1


def test_a_prompt_counts_by_its_prediction_until_the_next_heartbeat() -> None:
    loads = Loads()
    loads.reset(0, Role.PREFILL, 100)
    loads.utilisation[0] = 0.5
    loads.assign_prefill(0, "r", 0.25)
    assert loads.utilisation.item(0) == 0.75
