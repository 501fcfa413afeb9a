"""The supervisor, which starts this node's processes, reports on them, restarts and ends them.

It holds the descriptors of the pool segments, so sealed KVCache outlives the processes that map it.

Owns: when each child is started and ended, the run directory (sockets). Does not know: how a child is started
(`mooncake.node.child`), what the children do.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time

from mooncake.config.settings import Config
from mooncake.node.child import Child
from mooncake.node.console import Console
from mooncake.node.plan import ChildSpec, plan_node
from mooncake.node.process import BEAT_S, FATAL_EXIT_CODE, Draining, Fatal, Left, Progress, Ready, Status
from mooncake.node.rundir import RunDirectory

STOP_GRACE_S = 4.0
"""Seconds in which processes may end by themselves."""
TOGETHER_S = 0.1
"""Seconds in which several signals are one: `timeout` signals a process, and at once the process's group."""
KILL_GRACE_S = 2.0
"""Seconds, at most, for which killed processes are waited for: a grandchild may hold a pipe open."""


async def supervise(config: Config) -> int:
    """Run all processes of this node until SIGINT or SIGTERM, and return the exit code of the command.

    Raises ConfigError, but only before any process has been started.
    """
    started_at_s = time.monotonic()
    stopping = Stopping()  # before there is anything that a signal could leave behind
    with RunDirectory() as run_dir:
        if config.has_pool:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                size = config.kvcache.pool_bytes.human_readable()
                print(f"taking memory for the KVCache pool, {size} an instance", file=sys.stderr, flush=True)
        specs = await _planned(config, run_dir, stopping)
        if specs is None:
            run_dir.remove()
            os._exit(0)  # the interpreter would wait for the thread that takes memory
        children = [Child(spec, config.log_level) for spec in specs]
        hang_timeout_s = None if config.hang_timeout_s == "never" else config.hang_timeout_s
        drain_s = config.worker.drain_timeout_s
        supervisor = Supervisor(children, stopping, drain_s, hang_timeout_s, started_at_s)
        code = await supervisor.run()
    if supervisor.is_stuck:
        os._exit(code)  # the interpreter would wait for the console's writer
    return code


async def _planned(config: Config, run_dir: RunDirectory, stopping: "Stopping") -> list[ChildSpec] | None:
    """Return the plan once the memory of the pools is allocated, which takes seconds.

    Returns None if a signal comes first. Raises ConfigError.
    """
    planning = asyncio.create_task(asyncio.to_thread(plan_node, config, run_dir))
    ending = asyncio.create_task(stopping.is_wanted.wait())
    await asyncio.wait((planning, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    return await planning if planning.done() else None


class Stopping:
    """The signals SIGINT and SIGTERM to the supervisor.

    The first one ends the node once its requests are done, or have had their time; a later one ends that
    wait. Signals within `TOGETHER_S` of the first one are one with it.
    """

    def __init__(self) -> None:
        self.is_wanted, self.is_urgent = asyncio.Event(), asyncio.Event()
        self._first_at_s: float | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal)

    def _on_signal(self) -> None:
        now_s = time.monotonic()
        if self._first_at_s is None:
            self._first_at_s = now_s
        elif now_s - self._first_at_s > TOGETHER_S:
            self.is_urgent.set()
        self.is_wanted.set()


class Supervisor:
    """The supervisor of a set of children.

    The node ends in two steps. First, children that drain have `drain_s` seconds to finish their requests;
    with 0 they end at once. Meanwhile the others live, and are restarted if they die: the requests need them.
    Then everything ends.

    A child that serves, and gives no sign of life for `hang_timeout_s` seconds, is killed, and restarted like
    a child that has died.
    """

    def __init__(
        self,
        children: list[Child],
        stopping: Stopping,
        drain_s: float = 0.0,
        hang_timeout_s: float | None = None,
        started_at_s: float | None = None,
    ) -> None:
        self._children, self._drain_s = children, drain_s
        self._stop, self._hurry = stopping.is_wanted, stopping.is_urgent
        self._drained = asyncio.Event()
        """An event that is set when the node's end waits for no requests any more."""
        self._hang_timeout_s = hang_timeout_s
        self._console = Console([child.spec.name for child in children])
        self._fatal: str | None = None
        self._hint = ""
        self._announced = False
        self._started_at_s = time.monotonic() if started_at_s is None else started_at_s

    @property
    def is_stuck(self) -> bool:
        """Whether the output has no reader; valid once `run` has ended."""
        return self._console.is_stuck

    async def run(self) -> int:
        """Start all children, wait for the end, and stop all. Returns 1 after a fatal error, else 0."""
        with self._console:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(child)) for child in self._children]
                watching = group.create_task(self._watch())
                await self._stop.wait()
                await self._drain(keepers)
                self._drained.set()
                watching.cancel()
                await self._stop_children(keepers)
            if self._fatal is not None:
                self._console.error(self._fatal)
        return 1 if self._fatal is not None else 0

    async def _drain(self, keepers: list[asyncio.Task[None]]) -> None:
        """Let the children that drain finish their requests before any other child ends."""
        draining = [
            keeper for child, keeper in zip(self._children, keepers, strict=True) if child.spec.drains
        ]
        if not self._drain_s or not draining or self._hurry.is_set():
            return
        for child in self._children:
            if child.spec.drains:
                child.signal(signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry.wait())
        ended = asyncio.create_task(asyncio.wait(draining))
        await asyncio.wait([hurry, ended], timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (hurry, ended):
            waiting.cancel()

    async def _keep(self, child: Child) -> None:
        end = self._stop if child.spec.drains else self._drained
        while not end.is_set() and not child.has_left:
            async for item in child.start():
                self._on_output(child, item)
            if end.is_set():
                return
            if child.has_left:
                self._console.line(child.spec.name, "has ended")
                child.close_descriptors()
                self._end_with(child)
                return
            assert child.process is not None
            if child.process.returncode == FATAL_EXIT_CODE:
                self._fail(f"{child.spec.name} cannot serve")
                return
            backoff_s = child.backoff_s
            self._console.died(child.spec.name, child.process.returncode, child.last_lines, backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), backoff_s)

    def _fail(self, message: str) -> None:
        """End everything at once with an error. The first error counts."""
        self._fatal = self._fatal or message
        self._stop.set()
        self._hurry.set()

    def _end_with(self, left: Child) -> None:
        """End the other processes of an instance that has left, and everything if no instance is left."""
        for child in self._children:
            if child.spec.instance == left.spec.instance and not child.has_left:
                child.has_left = True
                child.signal(signal.SIGINT)
                # A process that is being started can lose the signal.
                asyncio.get_running_loop().call_later(STOP_GRACE_S, child.signal, signal.SIGKILL)
        if all(child.has_left for child in self._children):
            self._stop.set()

    async def _watch(self) -> None:
        """Kill children that hang or are paused, except those that do not serve yet, as loading may block.

        Silence is counted in beats of this process: while the supervisor itself is held up no beat passes,
        and messages of children are read before the next beat.
        """
        while self._hang_timeout_s is not None:
            await next_beat()
            for child in self._children:
                if child.num_missed_beats is None or not child.is_ready:
                    continue
                child.num_missed_beats += 1
                if child.num_missed_beats * BEAT_S > self._hang_timeout_s:
                    silence = f"no sign of life for {self._hang_timeout_s:g} s"
                    self._console.line(child.spec.name, f"{silence} ({child.end_hung()}), ending it")
                    child.num_missed_beats = 0

    def _on_output(self, child: Child, item: Status | str) -> None:
        name = child.spec.name
        match item:
            case str():
                if not self._drained.is_set():  # what processes say of one another's end is noise
                    self._console.line(name, item)
            case Progress():
                self._console.progress(name, item)
            case Ready():
                self._console.ready(name, item.detail)
                self._hint = item.hint or self._hint
                self._announce_when_all_are_ready()
            case Draining(work):
                self._console.draining(name, work, self._drain_s if self._stop.is_set() else None)
            case Left():
                child.has_left = True
                self._console.line(name, "has left the cluster")
            case Fatal(message):
                self._fail(message)

    def _announce_when_all_are_ready(self) -> None:
        if self._announced or not all(child.is_ready for child in self._children):
            return
        self._announced = True
        self._console.announce(time.monotonic() - self._started_at_s, self._hint)

    async def _stop_children(self, keepers: list[asyncio.Task[None]]) -> None:
        for child in self._children:
            child.signal(signal.SIGINT)
        _, pending = await asyncio.wait(keepers, timeout=STOP_GRACE_S)
        if pending:
            for child in self._children:
                child.signal(signal.SIGKILL)
            # A grandchild that holds on to a pipe must not hold up the end.
            _, pending = await asyncio.wait(pending, timeout=KILL_GRACE_S)
            for keeper in pending:
                keeper.cancel()


async def next_beat() -> None:
    """Wait until the next sign of life of every child is due."""
    await asyncio.sleep(BEAT_S)
