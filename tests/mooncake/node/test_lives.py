"""Whose doing the end of a process was."""

import signal

import pytest

from mooncake.node.lives import ProcessEnd, end_of, num_oom_kills


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_whoever_is_told_to_end_has_not_failed(signum: signal.Signals) -> None:
    assert end_of(-signum, hung=False, num_oom_kills=0) is ProcessEnd.KILLED
    assert end_of(0, hung=False, num_oom_kills=0) is ProcessEnd.KILLED


@pytest.mark.parametrize("returncode", [1, 3, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL])
def test_errors_and_faults_are_a_process_s_own(returncode: int) -> None:
    assert end_of(returncode, hung=False, num_oom_kills=0) is ProcessEnd.FAILED


def test_whoever_hangs_or_takes_all_memory_has_failed_though_it_was_killed() -> None:
    assert end_of(-signal.SIGKILL, hung=True, num_oom_kills=0) is ProcessEnd.FAILED
    assert end_of(-signal.SIGKILL, hung=False, num_oom_kills=1) is ProcessEnd.FAILED
    assert num_oom_kills() >= 0
