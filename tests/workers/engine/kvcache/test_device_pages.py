"""The free pages of a device, here and at a helper."""

from fractions import Fraction

import pytest

from workers.engine.kvcache.device_pages import DevicePages, OutOfPages


@pytest.fixture
def pages() -> DevicePages:
    return DevicePages(6)


def test_allocates_every_page_once(pages: DevicePages) -> None:
    taken = pages.allocate(2) + pages.allocate(4)
    assert sorted(taken) == list(range(6))
    assert pages.num_free == 0


def test_refuses_with_numbers_and_takes_nothing(pages: DevicePages) -> None:
    pages.allocate(4)
    with pytest.raises(OutOfPages, match=r"wanted 3 .* 2 of 6"):
        pages.allocate(3)
    assert pages.num_free == 2


def test_freed_pages_can_be_allocated_again_and_not_freed_twice(pages: DevicePages) -> None:
    taken = pages.allocate(6)
    pages.free(taken[:3])
    with pytest.raises(AssertionError, match="already free"):
        pages.free(taken[2:])
    assert sorted(pages.allocate(3)) == sorted(taken[:3])


def test_pages_keep_their_numbers_and_use_in_another_arrangement(pages: DevicePages) -> None:
    used = pages.allocate(4)
    pages.free(used[1:2])
    pages.rearrange(9)
    assert (pages.num_pages, pages.num_own, pages.num_free) == (9, 6, 6)
    assert pages.used() == [0, 2, 3]
    more = pages.allocate(5)
    pages.close_from(6)
    pages.free(more[-1:])
    assert pages.num_usable == 6
    assert more[-1] not in pages.allocate(pages.num_free)
    assert pages.used(6) == [6]
    pages.free([6])
    pages.rearrange(6)
    assert (pages.num_pages, pages.num_free) == (6, 0)


def test_pages_that_are_freed_while_a_late_write_may_come_are_not_given_out(pages: DevicePages) -> None:
    used = pages.allocate(3)
    pages.keep_freed()
    pages.free(used)
    assert not set(pages.allocate(pages.num_free)) & set(used)
    pages.rearrange(6)
    assert set(pages.allocate(3)) == set(used)
    pages.free(used)
    assert pages.num_free == 3


def test_closed_pages_can_be_opened_again(pages: DevicePages) -> None:
    used = pages.allocate(2)
    pages.close_from(1)
    pages.free(used[1:])
    assert (pages.num_usable, pages.num_free) == (1, 0)
    pages.reopen()
    assert (pages.num_usable, pages.num_free) == (6, 5)


def test_sequences_get_their_share_there_or_all_where_room_is_short_here() -> None:
    pages = DevicePages(14)
    pages.rearrange(14, 18, Fraction(1, 2))
    assert (pages.num_free, pages.num_free_for(0), pages.num_free_for(5)) == (32, 14, 19)
    assert (pages.most_for(0), pages.most_for(100)) == (14, 32)
    halves = pages.allocate(8, 6)
    assert pages.num_hosted_of(halves) == 4
    assert halves == sorted(halves, key=lambda page: page < 14), "first tokens are there"
    most = pages.allocate(20, 13)
    assert pages.num_hosted_of(most) == 13
    with pytest.raises(OutOfPages, match=r"wanted 5 .* 4 of 32"):
        pages.allocate(5, 100)
    pages.close_from(14)
    pages.free(halves)
    pages.free(most)
    assert pages.num_free == pages.most_for(100) == 14
    pages.rearrange(14)
    assert (pages.num_pages, pages.num_free, pages.first_hosted) == (14, 14, 14)
