"""Tenants' shares of the DRAM tier, which protect blocks of one tenant from the load of other tenants.

Blocks of a tenant that has no more than its share are evicted after other blocks. (Softly pinned blocks of
any tenant are evicted last of all.)

A block belongs to the tenant that has reserved its page, or that is the first to use it after a restart. The
share of an active tenant is three quarters of an equal part of the pages; the last quarter is headroom, so
that some block can always be evicted. A tenant may use pages that other tenants leave unused. Blocks without
a tenant, or of a tenant that has used nothing for a while, are not protected: they are evicted in the order
of the policy, like the blocks of tenants above their share. A tenant's pages in use count towards its share,
but are never evicted: running requests go before shares.

Owns: the tenant of each page. Does not know: which pages are free, the order of eviction, requests.
"""

from collections.abc import Sequence

import numpy as np

from kvstore.pool.pages import Array

ACTIVE_S = 600.0
"""Seconds for which a tenant keeps its share after its last use of the pool."""
PROTECTED = 0.75
"""A tenant's protected share, as a fraction of an equal part of the pages."""
NO_TENANT = 0


class Shares:
    """The tenant of each page, by number.

    A number is used again when its tenant has neither pages nor a share.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._tenant_of: Array = np.zeros(num_pages, np.int32)
        self._numbers: dict[str, int] = {}
        self._last_use_s: dict[int, float] = {}
        """Time at which each active tenant last used the pool, by tenant number."""
        self.now_s = 0.0
        """The time, as of the latest tick."""

    def num_pages_of(self, tenant: str) -> int:
        """Return the number of pages that belong to this tenant, pages that have become free included."""
        return int(np.count_nonzero(self._tenant_of == self._numbers.get(tenant, -1)))

    def enter(self, tenant: str) -> int:
        """Record that a tenant uses the pool now, and return its number.

        The number of an empty name stands for no tenant.
        """
        if not tenant:
            return NO_TENANT
        number = self._numbers.get(tenant)
        if number is None:
            number = self._unused_number()
            self._numbers[tenant] = number
        self._last_use_s[number] = self.now_s
        return number

    def use(self, number: int, pages: Sequence[int], found: Sequence[int]) -> None:
        """Record that a tenant has got fresh `pages`, and uses found blocks in the pages `found`.

        Pages in `found` that have no tenant become pages of this tenant.
        """
        self._tenant_of[pages] = number
        if found:
            unowned = np.asarray(found)[self._tenant_of[found] == NO_TENANT]
            self._tenant_of[unowned] = number

    def move(self, pages: Sequence[int], to_pages: Sequence[int]) -> None:
        """Record that the contents of `pages` are in `to_pages` now, in the same order."""
        self._tenant_of[to_pages] = self._tenant_of[pages]
        self._tenant_of[pages] = NO_TENANT

    def tick(self, now_s: float) -> None:
        """End the shares of tenants that have not used the pool for `ACTIVE_S` seconds at `now_s`."""
        self.now_s = now_s
        for number in [one for one, used_s in self._last_use_s.items() if used_s < now_s - ACTIVE_S]:
            del self._last_use_s[number]

    def num_disposable(self, in_use: Array) -> Array | None:
        """Return how many pages of each tenant are not protected by the tenant's share.

        The result is an int array, indexed by tenant number. The result is None if there are fewer than two
        active tenants: then no tenant is protected from another one. `in_use` are the pages that are not
        free, `[n]`.
        """
        if len(self._last_use_s) < 2:
            return None
        num_used = np.bincount(self._tenant_of[in_use], minlength=max(self._numbers.values()) + 1)
        share = int(PROTECTED * self._num_pages / len(self._last_use_s))
        active = np.fromiter(self._last_use_s, np.int64, len(self._last_use_s))
        num_used[active] = np.maximum(num_used[active] - share, 0)
        return num_used

    def tenants_of(self, pages: Array) -> Array:
        """Return the tenant number of each page."""
        tenants: Array = self._tenant_of[pages]
        return tenants

    def _unused_number(self) -> int:
        """Return an unused number for a tenant. Tenants without pages and share are forgotten."""
        kept = {*np.unique(self._tenant_of).tolist(), *self._last_use_s}
        self._numbers = {name: number for name, number in self._numbers.items() if number in kept}
        taken = set(self._numbers.values())
        return next(number for number in range(1, len(taken) + 2) if number not in taken)
