"""How many accepted requests each tenant has, at all fronts together and at each one.

Owns: these numbers. Does not know: the requests, what tenants may have (`conductor.admission.quotas`).
"""

from collections import Counter


class TenantCounts:
    """The numbers of accepted requests, by tenant and front."""

    def __init__(self) -> None:
        self._num_of_tenant: Counter[str] = Counter()
        self._num_at_front: Counter[tuple[str, bytes]] = Counter()

    def add(self, tenant: str, front: bytes) -> None:
        """Count one more request of the tenant at `front`."""
        self._num_of_tenant[tenant] += 1
        self._num_at_front[tenant, front] += 1

    def remove(self, tenant: str, front: bytes) -> None:
        """Count one request less of the tenant at `front`."""
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]
        self._num_at_front[tenant, front] -= 1
        if not self._num_at_front[tenant, front]:
            del self._num_at_front[tenant, front]

    def is_within_equal_part(self, tenant: str, limit: int) -> bool:
        """Return whether one more request leaves the tenant within an equal part of `limit` requests."""
        num_tenants = len(self._num_of_tenant) + (tenant not in self._num_of_tenant)
        return (self._num_of_tenant[tenant] + 1) * num_tenants <= limit

    def num_elsewhere(self, tenant: str, front: bytes) -> int:
        """Return the number of the tenant's requests at fronts other than `front`."""
        return self._num_of_tenant[tenant] - self._num_at_front[tenant, front]
