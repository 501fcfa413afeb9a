"""Load by wrk. It leaves more processor time to a server on the same cores than clients in Python do.

wrk measures whole answers; the clients of `mooncake-bench` measure each event.

Owns: the program wrk, from this host or from Debian's package, and its script. Does not know: what is
measured.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.debian import environment, fetch

_TIMEOUT_S = 100
_EXIT_S = 10
_SCRIPT = Path(__file__).with_suffix(".lua")


class WrkError(Exception):
    """The error of a run in which an answer was incomplete."""


class Answers(NamedTuple):
    """The answers of a run.

    `times_s`: sorted seconds from each request to the end of its answer. If an answer took more than twice
    the usual time, wrk adds the times of the requests that it could not send meanwhile. `mean_bytes`: the
    mean size of an answer with its head.
    """

    times_s: list[float]
    mean_bytes: float


class Wrk:
    """The program wrk. The constructor raises CannotFetchError if wrk is missing and cannot be fetched."""

    def __init__(self) -> None:
        self._environment: Mapping[str, str] = os.environ
        installed = shutil.which("wrk")
        if installed is not None:
            self._program = installed
        else:
            self._program = str(fetch("wrk") / "usr/bin/wrk")
            self._environment = environment("wrk")

    def post(
        self,
        url: str,
        bodies: Sequence[bytes],
        num_events: int,
        num_connections: int,
        spread_s: float,
        max_pause_s: float = 0.0,
    ) -> Answers:
        """Post each of `bodies` to `/v1/completions` once. Every answer must have `num_events` events.

        Connections stay open. After each answer a connection pauses for a random time of up to `max_pause_s`,
        and sends its next request. The first requests are spread over `spread_s` seconds, so that connections
        do not stay in step. Raises WrkError.
        """
        with tempfile.NamedTemporaryFile() as file:
            file.writelines(body + b"\n" for body in bodies)
            file.flush()
            command = [self._program, "--threads", "1", "--connections", str(num_connections)]
            command += ["--duration", str(_TIMEOUT_S), "--timeout", str(_TIMEOUT_S), "--script", str(_SCRIPT)]
            command += [url, "--", file.name, str(num_events), str(num_connections)]
            command += [str(1000 * spread_s), str(1000 * max_pause_s)]
            ended = subprocess.run(
                command,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S + _EXIT_S,
                check=False,
            )
        if ended.returncode != 0:
            raise WrkError(f"wrk ended with {ended.returncode}: {ended.stderr or ended.stdout}")
        num_whole, num_errors, num_bytes, *times_us = map(int, ended.stdout.splitlines()[-1].split())
        if num_whole != len(bodies) or num_errors:
            raise WrkError(
                f"of {len(bodies)} answers {num_whole} came whole within {_TIMEOUT_S} s, and wrk met"
                f" {num_errors} errors: {ended.stderr or 'it does not say more'}"
            )
        return Answers([time_us / 1e6 for time_us in times_us], num_bytes / num_whole)
