"""Runs the tests of `guest/` where there are RDMA devices: in an emulated machine."""

import pytest

from tests.deadline import DEADLINE_S
from tests.rdma.vm.__main__ import GUEST_TESTS, run
from tests.rdma.vm.image import CannotBuildError

TIMEOUT_S = 6 * DEADLINE_S  # of all tests in the guest, each of which has less


@pytest.mark.cluster
@pytest.mark.timeout(TIMEOUT_S + 180.0)  # the machine may have to be built first
@pytest.mark.parametrize("chosen", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_guest_tests_pass_in_the_machine(chosen: str) -> None:
    output = bytearray()
    try:
        status = run([*GUEST_TESTS, "-m", chosen], timeout_s=TIMEOUT_S, on_output=output.extend)
    except CannotBuildError as error:
        pytest.skip(f"no machine with RDMA devices: {error}")
    assert status == 0, output.decode(errors="replace")[-8000:]
