"""What callers are told to do about a failed completion."""

import pytest

from messenger.rdma.errors import completion_error
from messenger.transport.transports import Remedy


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (5, Remedy.RETRY),  # flushed
        (13, Remedy.RETRY),  # receiver not ready
        (12, Remedy.OTHER_PATH),  # retries exceeded
        (19, Remedy.OTHER_PATH),  # fatal device error
        (10, Remedy.GIVE_UP),  # remote access
        (4, Remedy.GIVE_UP),  # local protection
        (77, Remedy.OTHER_PATH),  # not known
    ],
)
def test_remedy_follows_from_the_status(status: int, remedy: Remedy) -> None:
    error = completion_error(status, "decode-1")
    assert error.remedy is remedy
    assert "decode-1" in str(error)
    assert str(status) in str(error)
