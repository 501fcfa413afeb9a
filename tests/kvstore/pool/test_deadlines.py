"""Deadlines of leases and pins, against a dict."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.pool.deadlines import Deadlines

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.integers(0, 6)),
    )
)


@given(steps=steps)
def test_names_expire_at_the_last_deadline_that_they_were_given(steps: list[tuple[str, int, int]]) -> None:
    deadlines, expected, now_s = Deadlines[int](), dict[int, int](), 0
    for what, name, number in steps:
        if what == "set":
            deadlines.set(name, number)
            expected[name] = number
        elif what == "remove" and name in expected:
            deadlines.remove(name)
            del expected[name]
        elif what == "pass":
            now_s += number
            expired = {name for name, deadline_s in expected.items() if deadline_s <= now_s}
            assert sorted(deadlines.take_expired(now_s)) == sorted(expired)
            expected = {name: deadline_s for name, deadline_s in expected.items() if name not in expired}


def test_names_that_are_renewed_or_removed_again_and_again_leave_nothing_behind() -> None:
    deadlines = Deadlines[int]()
    for number in range(5000):
        deadlines.set(1, 1e9 + number)
        deadlines.set(2, 1e9)
        deadlines.remove(2)
    assert deadlines.num_entries < 1500
    assert list(deadlines.take_expired(1e9 + 4998)) == []
    assert list(deadlines.take_expired(1e9 + 4999)) == [1]
