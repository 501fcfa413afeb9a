"""Timeouts for tests with a real etcd on a machine that may be busy."""

import pytest

from mooncake.leadership import etcd, terms
from tests.deadline import DEADLINE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use long leases that are renewed early, and accept late answers."""
    monkeypatch.setattr(terms, "RENEWALS_PER_LEASE", 60)
    monkeypatch.setattr(etcd, "ANSWER_TIMEOUT_S", DEADLINE_S)
