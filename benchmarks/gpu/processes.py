"""Calls divided among processes. Kernels compile on several cores, and a failed call harms no other call.

Owns: the processes. Does not know: the calls.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


def results_of(calls: Sequence[Callable[[], Any]], num_processes: int) -> Iterator[Any]:
    """Yield the result of each call, or its exception, in the order of the calls.

    A call that raises an exception or ends its process is repeated in a process of its own. There are two
    reasons: after a fault the device refuses all further work of the same process, and when one process dies,
    the calls of all processes fail.
    """
    with (
        ProcessPoolExecutor(num_processes, _SPAWN) as pool,
        ThreadPoolExecutor(num_processes) as second_tries,
    ):
        first = [pool.submit(call) for call in calls]
        settled = [second_tries.submit(_settle, *pair) for pair in zip(first, calls, strict=True)]
        for future in settled:
            yield future.result()


def _settle(future: Future[Any], call: Callable[[], Any]) -> Any:
    return _alone(call) if future.exception() else future.result()


def _alone(call: Callable[[], Any]) -> Any:
    with ProcessPoolExecutor(1, _SPAWN) as pool:
        future = pool.submit(call)
        return future.exception() or future.result()
