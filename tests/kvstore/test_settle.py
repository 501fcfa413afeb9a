"""Moving the segment into huge pages, beside those who use it."""

import asyncio
from types import SimpleNamespace

import pytest

from kvstore.server.store import Store


class Segment:
    """Six chunks, of which the kernel cannot move some."""

    def __init__(self, stuck: set[int]) -> None:
        self._stuck = stuck
        self.tried: list[int] = []
        self.buffer = memoryview(b"")

    def huge_chunks(self) -> range:
        return range(6)

    def use_huge_pages(self, start: int) -> bool:
        self.tried.append(start)
        return start not in self._stuck

    def lock(self) -> bool:
        return True


class Cards:
    """One, which waits for the segment."""

    names = ("a card",)

    def __init__(self) -> None:
        self.registered: list[memoryview] = []

    async def register(self, buffer: memoryview) -> None:
        self.registered.append(buffer)


@pytest.mark.parametrize(
    ("stuck", "num_tried"), [(set[int](), 6), ({0}, 6), ({1, 3, 5}, 6), ({2, 3}, 4), (set(range(6)), 2)]
)
def test_a_page_on_its_way_does_not_keep_the_rest_from_huge_pages(stuck: set[int], num_tried: int) -> None:
    """Two chunks that cannot be moved, one after the other, are the kernel's answer for all."""
    segment, cards = Segment(stuck), Cards()
    asyncio.run(Store.settle(SimpleNamespace(segment=segment, cards=cards)))  # type: ignore[arg-type]
    assert segment.tried == list(range(num_tried))
    assert cards.registered == [segment.buffer]
