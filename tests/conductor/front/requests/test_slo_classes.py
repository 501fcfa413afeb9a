"""Which class a request is in, and for whom it is asked."""

import pytest

from conductor.front.requests.slo_classes import in_class
from conductor.front.requests.validation import ApiEndpoint, Job, UsageShown
from mooncake.errors import RequestError
from mooncake.security.api_keys import ApiKey

JOB = Job(
    ApiEndpoint.CHAT, "chatcmpl-1", [], 1, [], None, (), False, UsageShown.NOWHERE, False, None, b"", False
)
PRIORITIES = {"interactive": -1, "batch": 5}


def key(priority: int | None) -> ApiKey:
    return ApiKey(name="ann", sha256="0" * 64, priority=priority)


def test_a_class_gives_its_priority_and_a_key_is_a_tenant() -> None:
    job = in_class(JOB, "batch", PRIORITIES, key(None))
    assert (job.slo_class, job.priority, job.tenant) == ("batch", 5, "ann")
    without = in_class(JOB, None, PRIORITIES, None)
    assert (without.slo_class, without.priority, without.tenant) == ("", 0, "")


@pytest.mark.parametrize(("name", "priority", "status"), [("unheard-of", None, 400), ("interactive", 0, 403)])
def test_unknown_classes_and_those_above_a_key_are_refused(
    name: str, priority: int | None, status: int
) -> None:
    with pytest.raises(RequestError, match=name) as refusal:
        in_class(JOB, name, PRIORITIES, key(priority))
    assert refusal.value.status == status
