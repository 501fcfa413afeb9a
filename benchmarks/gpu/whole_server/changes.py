"""Checks that requests go on while their cluster changes: moves, roles, drains, and killed workers.

Owns: the changes. Does not know: how a server is started.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from benchmarks.gpu.whole_server.cluster import Answer, Cluster, wait_for
from benchmarks.gpu.whole_server.reference import Reference
from benchmarks.report import Found, Report

NUM_TOKENS = 800
_MOST_MORE_BYTES = 256 << 20
"""The bytes of device memory that a restarted worker may take beyond that of its former process."""


class Changes:
    """Checks of one server with two decode instances. `free_bytes` returns the device's free memory."""

    def __init__(
        self,
        report: Report,
        cluster: Cluster,
        reference: Reference,
        prompts: Sequence[Sequence[int]],
        free_bytes: Callable[[], int],
    ) -> None:
        self._report, self._cluster, self._prompts = report, cluster, prompts
        self._reference, self._free_bytes = reference, free_bytes
        self._expected: list[Answer] = []

    def check(self) -> None:
        if not self._report.check("answers where nothing changes", self._undisturbed):
            return
        for name, find in (
            ("running requests move between decode instances", self._move),
            ("a decode instance becomes a prefill instance and comes back", self._roles),
            ("a decode instance drains and serves again", self._drain),
            ("a decode instance is killed while it decodes", lambda: self._kill(None)),
            ("prefill-0 is killed with prompts in flight", lambda: self._kill("prefill-0")),
            ("nothing is held", self._cluster.idle),
        ):
            self._report.check(name, find)

    def _undisturbed(self) -> Found:
        began_s = time.perf_counter()
        self._expected = self._cluster.ask_all(self._prompts, NUM_TOKENS, len(self._prompts))
        return Found(
            True, f"{len(self._prompts)} streams of {NUM_TOKENS} in {time.perf_counter() - began_s:.1f} s"
        )

    def _while_streaming(self, change: Callable[[], str], salt: str, *, at_once: bool = False) -> Found:
        """Make a change while all requests are being decoded, and compare their answers.

        With `at_once` the change does not wait until all of them are being decoded.
        """
        with ThreadPoolExecutor(len(self._prompts)) as threads:
            asked: list[Future[Answer]] = [
                threads.submit(self._cluster.ask, prompt, NUM_TOKENS, cache_salt=salt)
                for prompt in self._prompts
            ]
            if not at_once:
                wait_for(
                    lambda: len(self._cluster.running()) == len(asked) or any(of.done() for of in asked),
                    "all requests are being decoded",
                )
            places = Counter(here for _, here in self._cluster.running())
            figure = f"{dict(places)} before; {change()}"
        errors = [of.exception() for of in asked if of.exception() is not None]
        num_wrong = sum(
            not self._reference.are_alike(prompt, expected.tokens, of.result().tokens)
            for prompt, expected, of in zip(self._prompts, self._expected, asked, strict=True)
            if of.exception() is None
        )
        if errors:
            figure += f"; {len(errors)} errors, the first {errors[0]}"
        return Found(not errors and not num_wrong, f"{figure}; {num_wrong} of {len(asked)} answers differ")

    def _move(self) -> Found:
        others = {"decode-0": "decode-1", "decode-1": "decode-0"}

        def move() -> str:
            refusals = []
            for _ in range(3):
                for request_id, here in self._cluster.running():
                    answer = self._cluster.order(f"requests/{request_id}/migrate", to=others[here])
                    if answer.status_code not in (200, 404, 409):
                        refusals.append(answer.text[:200])
            return f"{refusals} refused" if refusals else "all orders taken"

        found = self._while_streaming(move, "move")
        num = self._cluster.total("mooncake_migrations_total", 'reason="by_hand"', 'outcome="moved"')
        seconds = self._cluster.total("mooncake_migration_seconds_total")
        return Found(found.is_good and num > 0, f"{num:.0f} moves, {seconds:.2f} s in all; {found.figure}")

    def _busiest(self) -> str:
        """Return the decode instance with the most requests."""
        [(name, _)] = Counter(here for _, here in self._cluster.running()).most_common(1)
        return name

    def _roles(self) -> Found:
        def change() -> str:
            name = self._busiest()
            times = [self._become(name, role) for role in ("prefill", "decode")]
            return f"{name}: {times[0]:.1f} s there, {times[1]:.1f} s back"

        return self._while_streaming(change, "role")

    def _become(self, name: str, role: str) -> float:
        answer = self._cluster.order(f"instances/{name}/role", role=role)
        if answer.status_code >= 400:
            raise RuntimeError(answer.text[:300])

        def has_role() -> bool:
            shown = self._cluster.instances().get(name, {})
            return (shown.get("role"), shown.get("state")) == (role, "serving")

        return wait_for(has_role, f"{name} is {role}")

    def _drain(self) -> Found:
        def drain() -> str:
            name = self._busiest()
            self._cluster.order(f"instances/{name}/drain", stay="true").raise_for_status()
            elapsed_s = wait_for(
                lambda: self._cluster.instances()[name]["num_requests"] == 0, f"{name} is empty"
            )
            self._cluster.order(f"instances/{name}/serve").raise_for_status()
            return f"{name} is empty after {elapsed_s:.1f} s"

        return self._while_streaming(drain, "drain")

    def _kill(self, victim: str | None) -> Found:
        """Kill the worker `victim` with prompts in flight.

        If `victim` is None, kill the decode instance with the most requests while they are decoded.
        """
        free_bytes = self._free_bytes()

        def kill() -> str:
            name = victim or self._busiest()
            num_starts = self._cluster.num_lines(rf"\[{name}\] ready")
            began_s = time.monotonic()
            os.kill(self._cluster.pid_of(name), signal.SIGKILL)
            is_back = partial(self._is_back, name, num_starts)
            wait_for(is_back, f"{name} is back", deadline_s=60.0)
            return f"{name} is back after {time.monotonic() - began_s:.1f} s"

        found = self._while_streaming(kill, f"kill {victim}", at_once=victim is not None)
        self._cluster.idle()
        more_bytes = free_bytes - self._free_bytes()
        figure = f"{found.figure}; {more_bytes / 2**20:+.0f} MiB of the device's memory"
        return Found(found.is_good and more_bytes <= _MOST_MORE_BYTES, figure)

    def _is_back(self, name: str, num_starts: int) -> bool:
        return self._cluster.num_lines(rf"\[{name}\] ready") > num_starts
