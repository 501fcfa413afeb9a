"""A supervised process that behaves as its configuration says."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from mooncake.errors import ModelError
from mooncake.node import process
from mooncake.node.lives import ProcessEnd
from mooncake.node.process import (
    STATUS_FD_VARIABLE,
    Draining,
    Left,
    Measured,
    Progress,
    Ready,
    child_main,
    drain_on_sigterm,
    report,
    stop,
)
from tests.deadline import DEADLINE_S


class FakeConfig(BaseModel):
    """The configuration. The behaviour is that of the first start; later starts serve.

    Starts are counted in `lives_file`.
    """

    behaviour: Literal[
        "serve",
        "crash",
        "fatal",
        "ignore-sigterm",
        "babble",
        "babble-for-ever",
        "measure",
        "hang",
        "stop",
        "fail-to-start",
        "is-killed",
        "is-killed-while-it-starts",
        "fault",
        "leave",
        "leave-a-grandchild",
        "drain",
        "fatal-when-restarted",
    ]
    lives_file: str
    previous_end: ProcessEnd | None = None


NUM_SHORT_LIVES = 3
"""The number of starts that end soon, for behaviours in which several do."""


def record_life(file: Path) -> int:
    """Add this process to the file, and return the number of processes in it."""
    with file.open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    return len(file.read_text().splitlines())


async def serve(config: FakeConfig) -> None:
    num_lives = record_life(Path(config.lives_file))
    report(Progress("loading weights", 1, 2))
    if config.behaviour == "crash" and num_lives == 1:
        print("these are my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if config.behaviour == "fail-to-start" and num_lives <= NUM_SHORT_LIVES:
        raise RuntimeError("this start has failed")
    if config.behaviour == "is-killed-while-it-starts" and num_lives <= NUM_SHORT_LIVES:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.behaviour == "babble":
        print("x" * 1_000_000, flush=True)
        os.write(int(os.environ[STATUS_FD_VARIABLE]), b"this is no status\n")
    if config.behaviour == "fatal" or (config.behaviour == "fatal-when-restarted" and num_lives > 1):
        raise ModelError("the model is not there")
    while config.behaviour == "babble-for-ever":
        print("x" * 1000, flush=True)
        await asyncio.sleep(0.001)
    if config.behaviour == "measure":
        report(Measured("prefill", 16, 0, 0.5, "cpu", "Z80"))
        report(Measured("decode", 1, 65, 0.25, "cpu", "Z80"))
        return
    if config.behaviour == "drain":  # until SIGUSR1
        drain_on_sigterm(lambda: report(Draining("2 open answers")), timeout_s=DEADLINE_S)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stop)
    report(Ready(f"served {num_lives} behind {config.previous_end}", f"try {num_lives}"))
    if config.behaviour == "leave":
        report(Left())
        return
    if config.behaviour == "is-killed" and num_lives <= NUM_SHORT_LIVES:
        os.kill(os.getpid(), signal.SIGKILL)
    if config.behaviour == "fault" and num_lives == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if num_lives == 1 and config.behaviour in ("hang", "stop"):
        await asyncio.sleep(0)  # after a first sign of life
        if config.behaviour == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.sigtimedwait([signal.SIGUSR1], 60)
    if config.behaviour == "leave-a-grandchild":
        nothing = asyncio.subprocess.DEVNULL
        grandchild = await asyncio.create_subprocess_exec("sleep", "1000", stdin=nothing)
        print(f"grandchild {grandchild.pid}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        if config.behaviour == "ignore-sigterm":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            while True:
                signal.sigtimedwait([signal.SIGUSR1], 60)


if __name__ == "__main__":
    process.BEAT_S = 0.01
    child_main(FakeConfig, serve)
