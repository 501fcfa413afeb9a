"""Headroom for prompts as long as those that were refused."""

from conductor.admission.headroom import MAX_SHARE, MEMORY_S, Headroom, Terms

TERMS = Terms("", priority=0, ttft_slo_s=10.0)


def test_the_longest_of_the_latest_counts() -> None:
    headroom = Headroom()
    for at_s, prefill_s in ((0.0, 3.0), (1.0, 5.0), (2.0, 2.0), (3.0, 4.0)):
        headroom.rejected(TERMS, prefill_s, at_s)
    assert headroom.kept_s(TERMS, 1.0, 1.0, 4.0, 4.0) == 4.0
    later_s = MEMORY_S + 1.5  # the one of 5 s is forgotten
    assert headroom.kept_s(TERMS, 1.0, 1.0, later_s, later_s) == 3.0
    assert headroom.kept_s(TERMS, 6.0, 1.0, later_s, later_s) == 0.0
    assert headroom.kept_s(TERMS, 1.0, 1.0, 2 * MEMORY_S, 2 * MEMORY_S) == 0.0


def test_a_request_that_came_before_the_refusal_keeps_no_headroom() -> None:
    headroom = Headroom()
    headroom.rejected(TERMS, 5.0, 3.0)
    assert headroom.kept_s(TERMS, 1.0, 1.0, 2.9, 4.0) == 0.0
    assert headroom.kept_s(TERMS, 1.0, 1.0, 3.0, 4.0) == 4.0


def test_a_part_of_the_slo_is_never_headroom() -> None:
    headroom = Headroom()
    headroom.rejected(TERMS, 7.0, 0.0)
    assert headroom.kept_s(TERMS, 0.5, 1.5, 1.0, 1.0) == MAX_SHARE * TERMS.ttft_slo_s - 0.5


def test_nothing_is_kept_where_it_would_not_be_enough() -> None:
    headroom = Headroom()
    headroom.rejected(TERMS, 4.0, 0.0)
    headroom.rejected(TERMS, MAX_SHARE * TERMS.ttft_slo_s + 0.1, 0.0)
    assert headroom.kept_s(TERMS, 1.0, 1.0, 1.0, 1.0) == 3.0


def test_a_refused_prompt_takes_as_much_longer_as_predictions_do_now() -> None:
    headroom = Headroom()
    headroom.rejected(TERMS, 4.0, 0.0)
    assert headroom.kept_s(TERMS, 1.5, 1.5, 1.0, 1.0) == 1.5 * 4.0 - 1.5
    assert headroom.kept_s(TERMS, 1.0, 1.0, 2.0, 2.0) == 3.0
    assert headroom.kept_s(TERMS, 4.0, 1.0, 2.0, 2.0) == 0.0, "nothing for those of its own length"


def test_other_terms_are_another_queue_and_only_so_many_are_remembered() -> None:
    headroom = Headroom()
    headroom.rejected(TERMS, 5.0, 0.0)
    assert headroom.kept_s(TERMS._replace(priority=1), 1.0, 1.0, 1.0, 1.0) == 0.0
    assert headroom.kept_s(TERMS._replace(ttft_slo_s=9.0), 1.0, 1.0, 1.0, 1.0) == 0.0
    assert headroom.kept_s(TERMS._replace(tenant="another"), 1.0, 1.0, 1.0, 1.0) == 0.0
    for priority in range(1, 1001):
        headroom.rejected(TERMS._replace(priority=priority), 5.0, 0.0)
    assert headroom.kept_s(TERMS, 1.0, 1.0, 1.0, 1.0) == 0.0
    assert headroom.kept_s(TERMS._replace(priority=100), 1.0, 1.0, 1.0, 1.0) == 4.0
