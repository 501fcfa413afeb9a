"""Work in other processes: what it may take, whose turn it is, and that nothing of it is left."""

import asyncio
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conductor.front.requests.offload import MAX_WAITING_OF_TENANT, Offload, Queue
from conductor.front.requests.task_process import TaskResult
from mooncake.errors import GrammarError, OverloadedError, RequestError
from tests.deadline import DEADLINE_S


def autogroup() -> str | None:
    """The nice of this process's session, where Linux shares the processor between sessions."""
    file = Path("/proc/self/autogroup")
    return file.read_text().split()[-1] if file.exists() else None


def work(task: Any, body: bytes) -> TaskResult:
    """What the tests ask for."""
    match task:
        case "refuse":
            raise RequestError("no", param="x", code="y")
        case "refuse a grammar":
            raise GrammarError("no")
        case "compute for ever":
            while True:
                pass
        case "take memory":
            return TaskResult(len(bytearray(4 << 30)))
        case "die":
            os.abort()
        case "a bug":
            raise KeyError("a bug")
        case "say who gives way":
            return TaskResult((os.nice(0), os.getsid(0) == os.getpid(), autogroup()))
        case ("wait for", str(path)):
            Path(f"{path}.begun").touch()
            while not Path(path).exists():
                os.sched_yield()
        case ("tell", str(path), str(name)):
            with Path(path).open("a") as file:
                file.write(f"{name}\n")
    return TaskResult(os.getpid(), [b"whole", bytes(1 << 20), body])


@pytest.fixture
def second_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit tasks to a second of computing, in processes that are forked after this."""
    monkeypatch.setattr("conductor.front.requests.task_process._MAX_CPU_S", 1)


@pytest.fixture
async def offload() -> AsyncIterator[Offload]:
    """Work in other processes, of which none is left after the test."""
    before = children()
    offload = Offload({Queue.SHORT: work, Queue.LONG: work})
    task = asyncio.create_task(offload.run())
    yield offload
    task.cancel()
    await asyncio.wait([task])
    assert children() == before


async def begun(path: Path) -> None:
    """Until somebody waits for `path`."""
    while not Path(f"{path}.begun").exists():  # noqa: ASYNC240 - another process makes it
        await asyncio.sleep(0)


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


async def test_what_is_read_beside_the_server_gives_way_to_who_computes(offload: Offload) -> None:
    nice, has_session, of_session = (await offload.do(Queue.SHORT, "say who gives way")).value
    assert nice > os.nice(0)
    assert has_session
    assert of_session in (None, str(nice))


async def test_tasks_are_done_in_one_other_process_a_queue(offload: Offload) -> None:
    pieces = [random.Random(seed).randbytes(1 << 18) for seed in range(32)]
    answers = [await offload.do(Queue.SHORT, "", body=pieces) for _ in range(2)]
    other = await offload.do(Queue.LONG, "")
    assert answers[0] == answers[1]
    assert len({os.getpid(), answers[0].value, other.value}) == 3
    assert answers[0].parts[2] == b"".join(pieces)
    assert [len(part) for part in other.parts] == [5, 1 << 20, 0]


@pytest.mark.usefixtures("second_of_computing")
@pytest.mark.parametrize("costly", ["compute for ever", "take memory", "die"])
async def test_what_takes_too_much_is_refused_and_the_next_is_done(costly: str, offload: Offload) -> None:
    tasks = [asyncio.create_task(offload.do(Queue.SHORT, task)) for task in (costly, "next")]
    with pytest.raises(RequestError, match="make it simpler") as caught:
        await tasks[0]
    assert caught.value.code == "request_too_costly"
    assert (await tasks[1]).parts[0] == b"whole"


async def test_a_first_process_that_is_stopped_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.front.requests.offload._FORK_S", 0.01)
    before = children()
    offload = Offload({Queue.SHORT: work})
    [first] = set(children()) - set(before)
    os.kill(int(first), signal.SIGSTOP)
    asking = asyncio.create_task(offload.do(Queue.SHORT, ""))
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="forks others has not answered")):
        await offload.run()
    asking.cancel()
    assert children() == before


async def test_a_process_that_computes_or_is_stopped_ends_with_the_server() -> None:
    offload = Offload({Queue.SHORT: work})
    running = asyncio.create_task(offload.run())
    pid = (await offload.do(Queue.SHORT, "")).value
    os.kill(pid, signal.SIGSTOP)
    process = os.pidfd_open(pid)
    running.cancel()
    await asyncio.wait([running])
    ended, _, _ = await asyncio.to_thread(select.select, [process], [], [], DEADLINE_S)
    os.close(process)
    assert ended


SERVER = """
import asyncio
from conductor.front.requests.offload import Offload, Queue
from tests.conductor.front.requests.test_offload import children, work

async def serve():
    offload = Offload({Queue.SHORT: work})
    running = asyncio.create_task(offload.run())
    print(*children(), (await offload.do(Queue.SHORT, "")).value, flush=True)
    await running

asyncio.run(serve())
"""


def test_processes_that_are_stopped_end_with_a_server_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        processes = [os.pidfd_open(pid) for pid in pids]
        for process in processes:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
        server.kill()
    try:
        assert len(processes) == 2
        for process in processes:
            assert select.select([process], [], [], DEADLINE_S)[0]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


async def test_errors_are_those_of_the_work(offload: Offload) -> None:
    with pytest.raises(RequestError, match="no") as caught:
        await offload.do(Queue.SHORT, "refuse")
    assert (caught.value.param, caught.value.code, caught.value.status) == ("x", "y", 400)
    with pytest.raises(GrammarError, match="no"):
        await offload.do(Queue.SHORT, "refuse a grammar")
    with pytest.raises(RuntimeError, match="KeyError: 'a bug'"):
        await offload.do(Queue.SHORT, "a bug")


async def test_tenants_take_turns(tmp_path: Path, offload: Offload) -> None:
    """One that has sent many is not before another that has sent one."""
    go, told = tmp_path / "go", tmp_path / "told"

    first = asyncio.create_task(offload.do(Queue.SHORT, ("wait for", str(go)), "many"))
    await begun(go)
    tasks = [
        asyncio.create_task(offload.do(Queue.SHORT, ("tell", str(told), name), name.split()[0]))
        for name in ("many 1", "many 2", "many 3", "one", "other")
    ]
    await asyncio.sleep(0)
    go.touch()
    await asyncio.gather(first, *tasks)
    assert told.read_text().splitlines() == ["many 1", "one", "other", "many 2", "many 3"]


async def test_what_nobody_waits_for_is_not_begun_and_too_much_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offload: Offload,
) -> None:
    monkeypatch.setattr("conductor.front.requests.offload.MAX_WAITING_OF_TENANT", 2)
    go, told = tmp_path / "go", tmp_path / "told"

    first = asyncio.create_task(offload.do(Queue.SHORT, ("wait for", str(go)), "a"))
    await begun(go)
    gone = asyncio.create_task(offload.do(Queue.SHORT, ("tell", str(told), "gone"), "a"))
    there = asyncio.create_task(offload.do(Queue.SHORT, ("tell", str(told), "there"), "a"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await offload.do(Queue.SHORT, "", "a")
    other = asyncio.create_task(offload.do(Queue.SHORT, "", "b"))
    gone.cancel()
    go.touch()
    await asyncio.gather(first, there, other)
    assert told.read_text() == "there\n"
    assert [offload.num_waiting(Queue.SHORT, tenant) for tenant in "ab"] == [0, 0]


async def test_bodies_that_wait_are_bounded_and_each_tenant_may_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: Offload
) -> None:
    monkeypatch.setattr("conductor.front.requests.offload.MAX_WAITING_BYTES", 25)
    monkeypatch.setattr("conductor.front.requests.offload.MAX_WAITING_BYTES_OF_TENANT", 15)
    go, body = tmp_path / "go", [b"12345", b"67890"]

    def ask(tenant: str) -> asyncio.Task[TaskResult]:
        return asyncio.create_task(offload.do(Queue.SHORT, "", tenant, body))

    first = asyncio.create_task(offload.do(Queue.SHORT, ("wait for", str(go)), "a"))
    await begun(go)
    tasks = [ask(tenant) for tenant in "aabbcc"]
    await asyncio.sleep(0)
    go.touch()
    await first
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, OverloadedError) for answer in answers] == [False, True] * 3
    assert isinstance(await ask("a"), TaskResult)


class _Body(bytearray):
    """A body to which weak references are possible."""


@pytest.mark.parametrize("task", ["answer", "die"])
async def test_a_body_is_forgotten_when_its_task_has_ended(offload: Offload, task: str) -> None:
    body = _Body(b"a long body")
    kept = weakref.ref(body)
    try:
        await offload.do(Queue.SHORT, task, "", [body])
    except RequestError as error:
        error.__traceback__ = None  # as the routes do
    del body
    async with asyncio.timeout(DEADLINE_S):
        while kept() is not None:
            await asyncio.sleep(0)


async def test_bodies_of_clients_that_have_gone_do_not_count(offload: Offload, tmp_path: Path) -> None:
    path = tmp_path / "may end"
    running = asyncio.create_task(offload.do(Queue.SHORT, ("wait for", str(path))))
    await begun(path)
    gone = [
        asyncio.create_task(offload.do(Queue.SHORT, "answer", "", [b"a body"]))
        for _ in range(MAX_WAITING_OF_TENANT)
    ]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    waiting = asyncio.create_task(offload.do(Queue.SHORT, "answer"))
    await asyncio.sleep(0)
    path.touch()
    await asyncio.gather(running, waiting)
