"""The pages of a device's KVCache by their numbers: which are free, and which of them a sequence gets.

Owns: the free pages. Does not know: the memory of pages, their owners.
"""

import bisect
from collections.abc import Iterable, Sequence
from fractions import Fraction

GROWTH_SHARE = 1 / 16
"""The room to grow of a sequence, as a share of the sequence's pages.

When a sequence gets pages, so many pages of this process shall stay free. If fewer would stay free, more of
the sequence's pages go to a helper.
"""
LONG_SHARE = 1 / 32
"""The least share of this process's pages with which a sequence counts as long.

For shorter sequences the exchange with a helper costs more than it saves.
"""


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for."""

    def __init__(self, num_wanted: int, num_free: int, num_pages: int) -> None:
        super().__init__(
            f"wanted {num_wanted} KVCache pages, {num_free} of {num_pages} are free; free some or wait"
        )
        self.num_wanted, self.num_free, self.num_pages = num_wanted, num_free, num_pages


class DevicePages:
    """The pages `[0, num_pages)`: those of this process, then those that a helper has, if there are any.

    Pages whose memory is lent, and closed pages, are not allocated.
    """

    def __init__(self, num_pages: int) -> None:
        """Begin with free pages, all of this process."""
        self.num_pages = num_pages
        self.num_own = num_pages
        """The number of pages while no helper has modules."""
        self.num_usable = num_pages
        """Pages that are neither lent nor closed, of this process and at a helper."""
        self.first_hosted = num_pages
        """The number of this process's pages, which is the number of the first page that a helper has."""
        self._hosted_share = Fraction(0)
        """The share of a sequence's pages that is to be at the helper."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._free_hosted: list[int] = []
        self._is_free = [True] * num_pages
        self._num_open = num_pages
        """The number of the first closed page. No page from this number on is allocated."""
        self._keeps_freed = False
        """Whether pages that are freed stay closed until `rearrange`."""

    # -- questions ----------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """The number of free pages, here and at a helper."""
        return len(self._free) + len(self._free_hosted)

    def num_free_for(self, num_full: int, num_own_coming: int = 0, num_hosted_coming: int = 0) -> int:
        """Return how many free pages a sequence can get, now or once other pages have been freed.

        Args:
            num_full: The number of the sequence's pages, the first ones, that are full of tokens. Only these
                can be at a helper.
            num_own_coming: The number of pages of this process that count as free because they will be freed.
            num_hosted_coming: The number of pages at a helper that count as free because they will be freed.
        """
        num_hosted = min(num_full, len(self._free_hosted) + num_hosted_coming)
        return len(self._free) + num_own_coming + num_hosted

    def most_for(self, num_full: int) -> int:
        """Return how many pages a sequence can get if no other sequence has any.

        Only the sequence's first `num_full` pages, which are full of tokens, can be at a helper.
        """
        num_own = min(self.num_usable, self.first_hosted)
        return num_own + min(num_full, self.num_usable - num_own)

    @property
    def are_closed(self) -> bool:
        """Whether some pages are closed, so that `rearrange` or `reopen` will give more free ones."""
        return self._keeps_freed or self._num_open < self.num_pages

    @property
    def next_free(self) -> list[int]:
        """The free pages of this process, in the order in which they are allocated."""
        return self._free[::-1]

    def used(self, first: int = 0) -> list[int]:
        """Return the numbers of pages from `first` on that are not free."""
        return [page for page in range(first, self.num_pages) if not self._is_free[page]]

    def num_hosted_of(self, pages: Sequence[int]) -> int:
        """Return how many of a sequence's pages a helper has. They are the sequence's first pages."""
        first = self.first_hosted
        return bisect.bisect_left(pages, True, key=lambda page: page < first)

    def num_to_host(
        self,
        num_pages: int,
        num_full: int,
        held: Sequence[int] = (),
        num_going: int = 0,
        num_kept: int = 0,
    ) -> int:
        """Return how many of a sequence's pages shall be at a helper.

        The result is the configured share (`HostedPages.share`) of the pages, and 0 for a short sequence. If
        the sequence would have little room here to grow, the result is all pages that can be at the helper.

        Args:
            num_pages: The number of the sequence's pages.
            num_full: How many of them, the first ones, are full of tokens.
            held: The pages that the sequence has already.
            num_going: The number of pages of other sequences that are about to go to the helper. This process
                will have so many more free pages, and the helper so many fewer.
            num_kept: The number of free pages of this process that do not count as room for this sequence.
        """
        if self.first_hosted == self.num_pages:
            return 0
        num_there, num_wanted = self.num_hosted_of(held), 0
        most = min(num_full, len(self._free_hosted) - num_going + num_there)
        if num_pages >= LONG_SHARE * self.first_hosted:
            num_wanted = round(num_pages * self._hosted_share)
        num_here = len(held) - num_there
        num_free = len(self._free) + num_going - num_kept
        num_left = num_free + num_here - (num_pages - min(num_wanted, most))
        return most if num_left < GROWTH_SHARE * num_pages else min(num_wanted, most)

    # -- allocation ---------------------------------------------------------------------------------

    def allocate(self, num_pages: int, num_full: int = 0) -> list[int]:
        """Take `num_pages` free pages, whose content is undefined. Raises OutOfPages if there are fewer.

        Some of the first `num_full` pages may be at a helper: these pages are written by loads only.
        """
        if num_pages > self.num_free_for(num_full):
            raise OutOfPages(num_pages, self.num_free_for(num_full), self.num_pages)
        num_hosted = self.num_to_host(num_pages, num_full)
        pages = self.allocate_hosted(num_hosted)
        pages += [self._free.pop() for _ in range(num_pages - num_hosted)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def allocate_hosted(self, num_pages: int) -> list[int]:
        """Take `num_pages` free pages of the helper, which must have as many."""
        pages = [self._free_hosted.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free pages. They can be allocated again at once.

        The exceptions are closed pages, and all pages that are freed after `keep_freed`.
        """
        for page in pages:
            assert not self._is_free[page], f"page {page} is already free"
            self._is_free[page] = True
            if page < self._num_open and not self._keeps_freed:
                (self._free if page < self.first_hosted else self._free_hosted).append(page)

    def lend(self, num_pages: int) -> list[int]:
        """Take this process's free pages with the highest numbers until `end_loan`. Raises OutOfPages."""
        if num_pages > len(self._free):
            raise OutOfPages(num_pages, len(self._free), self.num_pages)
        self._free.sort(reverse=True)
        pages, self._free = self._free[:num_pages][::-1], self._free[num_pages:]
        for page in pages:
            self._is_free[page] = False
        self.num_usable -= num_pages
        return pages

    def end_loan(self, pages: list[int]) -> None:
        """Free pages that were lent."""
        self.num_usable += len(pages)
        self.free(pages)

    # -- other arrangements -------------------------------------------------------------------------

    def rearrange(self, num_here: int, num_hosted: int = 0, hosted_share: Fraction = Fraction(0)) -> None:
        """Change the numbers of pages: `num_here` of this process, and `num_hosted` at a helper.

        Page numbers stay. Pages that do not exist in the new arrangement must be free. No page is closed
        afterwards. `hosted_share` is the share of a sequence's pages that is to be at the helper.
        """
        num_pages = num_here + num_hosted
        assert all(self._is_free[num_pages:])
        self._is_free = (self._is_free + [True] * num_pages)[:num_pages]
        self.num_pages, self.first_hosted, self._hosted_share = num_pages, num_here, hosted_share
        self._keeps_freed = False
        self.reopen()

    def close_from(self, first: int) -> None:
        """Stop allocating pages from `first` on until `rearrange` or `reopen`."""
        self._num_open = self.num_usable = first
        self._free = [page for page in self._free if page < first]
        self._free_hosted = [page for page in self._free_hosted if page < first]

    def keep_freed(self) -> None:
        """Let pages that are freed from now on be closed until `rearrange`.

        A lost helper may still write to these pages.
        """
        self._keeps_freed = True

    def reopen(self) -> None:
        """Allow the allocation of closed pages again."""
        assert not self._keeps_freed
        self.num_usable = self._num_open = self.num_pages
        free = [page for page in range(self.num_pages - 1, -1, -1) if self._is_free[page]]
        self._free = [page for page in free if page < self.first_hosted]
        self._free_hosted = [page for page in free if page >= self.first_hosted]
