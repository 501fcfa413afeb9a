"""The SLO class that a client names for a request, and the tenant of the request.

Owns: the header, the check that a key may have a class. Does not know: the limits of classes
(`conductor.settings`).
"""

from collections.abc import Mapping

from msgspec.structs import replace

from conductor.front.requests.validation import Job
from mooncake.errors import RequestError
from mooncake.security.api_keys import ApiKey

SLO_CLASS_HEADER = "x-mooncake-slo-class"


def in_class(job: Job, name: str | None, priorities: Mapping[str, int], key: ApiKey | None) -> Job:
    """Return the job with the SLO class `name`, and with the tenant that owns `key`.

    `name` is None if the client names no class: then the job's class and priority stay. `key` is None if
    clients need no keys. `priorities` has the priority of each class. The priority of the named class
    replaces the job's own. Raises RequestError if the class does not exist, or if the key may not have the
    priority of the class.
    """
    if name is None and key is None:
        return job
    tenant = "" if key is None else key.name
    if name is None:
        return replace(job, tenant=tenant)
    if name not in priorities:
        known = ", ".join(sorted(priorities)) or "none (conductor.slo_classes)"
        message = f"X-Mooncake-SLO-Class: there is no class {name[:64]!r}; there are {known}"
        raise RequestError(message, code="unknown_slo_class")
    if key is not None and key.priority is not None and priorities[name] < key.priority:
        message = f"X-Mooncake-SLO-Class: {name} has priority {priorities[name]}, this API key {key.priority}"
        raise RequestError(message, status=403, code="invalid_value")
    return replace(job, tenant=tenant, slo_class=name, priority=priorities[name])
