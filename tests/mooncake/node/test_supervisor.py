import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake.config.settings import load_config
from mooncake.errors import ConfigError
from mooncake.node import supervisor
from mooncake.node.child import Child
from mooncake.node.lives import Life
from mooncake.node.plan import ChildSpec
from mooncake.node.supervisor import Stopping, Supervisor
from tests.deadline import DEADLINE_S
from tests.mooncake.fake_child import FakeConfig


def child(
    name: str,
    behaviour: str,
    folder: Path,
    instance: str | None = None,
    pass_fds: tuple[int, ...] = (),
    *,
    drains: bool = False,
) -> Child:
    config = FakeConfig.model_validate({"behaviour": behaviour, "lives_file": str(folder / name)})

    def config_of(life: Life) -> str:
        return config.model_copy(update={"previous_end": life.previous_end}).model_dump_json()

    spec = ChildSpec(name, "tests.mooncake.fake_child", config_of, pass_fds, drains, instance)
    return Child(spec, "warning")


def lives(folder: Path, name: str) -> list[int]:
    return [int(pid) for pid in (folder / name).read_text().split()] if (folder / name).exists() else []


def supervise(
    children: list[Child],
    until: Sequence[str],
    capture: pytest.CaptureFixture[str],
    hang_timeout_s: float | None = None,
) -> tuple[int, str]:
    """Run until the output has all of `until`, then SIGTERM, or else to the end; exit code and output."""
    output = ""

    async def stop_when_seen() -> None:
        nonlocal output
        while not all(text in output for text in until):
            captured = capture.readouterr()
            output += captured.out + captured.err
            await asyncio.sleep(0.01)
        if until:
            os.kill(os.getpid(), signal.SIGTERM)

    async def run() -> int:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(stop_when_seen())
            return await Supervisor(children, Stopping(), hang_timeout_s=hang_timeout_s).run()

    code = asyncio.run(run())
    captured = capture.readouterr()
    return code, output + captured.out + captured.err


def test_what_takes_long_at_the_start_is_said_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []

    def plan_node(*_: object) -> list[ChildSpec]:
        said.append(capsys.readouterr().err)
        raise ConfigError("seen")

    monkeypatch.setattr(supervisor, "plan_node", plan_node)
    for role in ("all", "conductor"):
        with pytest.raises(ConfigError):
            asyncio.run(supervisor.supervise(load_config(None, {}, {("role",): role})))
    assert said == ["taking memory for the KVCache pool, 1.0GiB an instance\n", ""]


def test_the_time_until_all_serve_counts_from_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ""

    async def run() -> None:
        nonlocal output
        stopping = Stopping()
        began_at_s = time.monotonic() - 1000
        supervisor = Supervisor([child("a", "serve", tmp_path)], stopping, started_at_s=began_at_s)
        running = asyncio.create_task(supervisor.run())
        while "ready in" not in output:
            output += capsys.readouterr().err
            await asyncio.sleep(0.01)
        stopping.is_wanted.set()
        await running

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert "ready in 10" in output


def test_readiness_is_announced_once_all_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    children = [child("a", "serve", tmp_path), child("b", "serve", tmp_path)]
    code, output = supervise(children, ["ready in"], capsys)
    assert code == 0
    assert "[a] loading weights" in output
    assert "[b] ready served" in output
    assert "try 1" in output
    assert output.count("ready in") == 1


def test_a_child_that_dies_is_reported_and_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = supervise([child("a", "crash", tmp_path)], ["ready in"], capsys)
    assert code == 0
    assert "[a] died (signal 9); starting it again in 0.5 s" in output
    assert "these are my last words" in output
    assert len(lives(tmp_path, "a")) == 2


def test_what_follows_an_end_is_done_before_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarted = child("a", "crash", tmp_path)
    ended, started = list[Life](), list[Life]()

    async def after_end(life: Life) -> None:
        assert started == [*ended, life]
        ended.append(life)

    def config_of(life: Life) -> str:
        started.append(life)
        return config_before(life)

    config_before = restarted.spec.config
    restarted.spec = replace(restarted.spec, config=config_of, after_end=after_end)
    supervise([restarted], ["ready in"], capsys)
    assert len(ended) == 2
    assert ended == started


def test_the_processes_of_an_instance_that_leaves_end_and_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool, other_end = os.pipe()
    children = [
        child("conductor", "serve", tmp_path),
        child("messenger of d0", "serve", tmp_path, "d0", (pool,)),
        child("d0", "leave", tmp_path, "d0"),
        child("d1", "serve", tmp_path, "d1"),
    ]
    code, output = supervise(children, ["[d0] has left the cluster", "[messenger of d0] has ended"], capsys)
    assert code == 0
    assert "died" not in output
    assert len(lives(tmp_path, "d0")) == 1
    assert "[conductor] has ended" not in output
    with pytest.raises(BrokenPipeError):
        os.write(other_end, b"its pool has no other user")
    os.close(other_end)


def test_a_process_of_an_instance_that_leaves_is_killed_if_it_does_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.05)
    children = [
        child("messenger of d0", "ignore-sigterm", tmp_path, "d0"),
        child("d0", "leave", tmp_path, "d0"),
        child("d1", "serve", tmp_path, "d1"),
    ]
    code, output = supervise(children, ["[messenger of d0] has ended"], capsys)
    assert code == 0
    assert "died" not in output
    assert output.count("[messenger of d0] has ended") == 1, "it is not started again"


def test_a_node_ends_with_its_last_instance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    children = [child("messenger", "serve", tmp_path, "d0"), child("d0", "leave", tmp_path, "d0")]
    code, output = supervise(children, [], capsys)
    assert code == 0
    assert "died" not in output


@pytest.mark.parametrize(
    ("behaviour", "pauses"),
    [
        ("fail-to-start", ["0.02 s", "0.04 s", "0.08 s"]),
        ("is-killed", ["0.02 s"] * 3),
        ("is-killed-while-it-starts", ["0.02 s"] * 3),
    ],
)
def test_pauses_grow_with_starts_that_fail_and_with_nothing_else(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    pauses: list[str],
) -> None:
    monkeypatch.setattr("mooncake.node.child.FIRST_BACKOFF_S", 0.02)
    code, output = supervise([child("a", behaviour, tmp_path)], ["ready served 4"], capsys)
    assert code == 0
    assert re.findall(r"starting it again in (.*)\. Its last", output) == pauses


def beat_with(monkeypatch: pytest.MonkeyPatch, *serving: Child) -> None:
    """The supervisor beats as quickly as these children give signs of life, however long that takes."""

    async def next_beat() -> None:
        await asyncio.sleep(0.001)
        while any(child.is_ready and child.num_missed_beats for child in serving):
            await asyncio.sleep(0.001)

    monkeypatch.setattr(supervisor, "next_beat", next_beat)


@pytest.mark.parametrize(
    ("behaviour", "end"), [("crash", "killed"), ("fault", "failed"), ("hang", "failed"), ("stop", "failed")]
)
def test_the_next_life_is_told_how_the_one_before_has_ended(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    end: str,
) -> None:
    beat_with(monkeypatch)
    told = f"served 2 behind {end}"
    code, _ = supervise([child("a", behaviour, tmp_path)], [told], capsys, hang_timeout_s=3.0)
    assert code == 0


def test_a_child_that_gives_no_sign_of_life_is_ended_and_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other one."""
    serving = child("c", "serve", tmp_path)
    beat_with(monkeypatch, serving)
    expected = [
        "[a] no sign of life for 3 s (S (sleeping)), ending it",
        "[b] no sign of life for 3 s (T (stopped)), ending it",
        "[a] died (signal 9); starting it again",
        "[b] died (signal 9); starting it again",
    ]
    children = [child("a", "hang", tmp_path), child("b", "stop", tmp_path), serving]
    code, output = supervise(children, expected, capsys, hang_timeout_s=3.0)
    assert code == 0
    assert "[c] no sign" not in output


def test_a_signal_to_a_process_that_has_just_died_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the process has ended is still told, when the signal comes before its exit code is taken."""
    dying = child("a", "crash", tmp_path)
    waitpid = os.waitpid

    def signal_and_wait(pid: int, options: int) -> tuple[int, int]:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        dying.end_hung()
        return waitpid(pid, options)

    monkeypatch.setattr(os, "waitpid", signal_and_wait)
    code, output = supervise([dying], ["ready in"], capsys)
    assert code == 0
    assert "[a] died (signal 9)" in output


def test_lines_of_any_length_and_broken_statuses_do_no_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = supervise([child("a", "babble", tmp_path)], ["ready in"], capsys)
    assert code == 0
    assert "this is no status" in output
    assert "x" * 1000 in output


def test_a_fatal_error_ends_everything_with_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = supervise([child("a", "serve", tmp_path), child("b", "fatal", tmp_path)], [], capsys)
    assert code == 1
    assert output.splitlines()[-1] == "error: the model is not there"
    assert "Traceback" not in output
    assert len(lives(tmp_path, "b")) == 1


def test_output_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    config = FakeConfig(behaviour="babble-for-ever", lives_file=str(tmp_path / "a"))
    program = (
        "import asyncio, os, select, signal\n"
        "from mooncake.node.plan import ChildSpec\n"
        "from mooncake.node.child import Child\n"
        "from mooncake.node.supervisor import Stopping, Supervisor\n"
        f"spec = ChildSpec('a', 'tests.mooncake.fake_child', lambda _: {config.model_dump_json()!r})\n"
        "async def stop_when_stuck(writes):\n"
        "    while select.select([], [2], [], 0)[1] or writes.qsize() < 2:\n"
        "        await asyncio.sleep(0.001)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "async def run():\n"
        "    supervisor = Supervisor([Child(spec, 'warning')], Stopping())\n"
        "    stopping = asyncio.create_task(stop_when_stuck(supervisor._console._writes))\n"
        "    code = await supervisor.run()\n"
        "    os._exit(code if supervisor.is_stuck and stopping.done() else 99)\n"
        "asyncio.run(run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_end_does_not_wait_for_the_memory_of_large_pools(tmp_path: Path, signum: signal.Signals) -> None:
    program = (
        "import asyncio, threading\n"
        "from mooncake.node import supervisor\n"
        "from mooncake.config.settings import Config\n"
        "def plan_node(config, run_dir):\n"
        "    print('taking memory', flush=True)\n"
        "    threading.Event().wait()\n"
        "supervisor.plan_node = plan_node\n"
        "asyncio.run(supervisor.supervise(Config()))\n"
    )
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taking memory\n"
        assert list(tmp_path.iterdir())
        process.send_signal(signum)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors.count(b"\n")) == (0, 1)  # what takes the time
    assert not list(tmp_path.iterdir())


@pytest.mark.cluster
def test_a_child_that_does_not_stop_is_killed_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supervisor.STOP_GRACE_S + supervisor.KILL_GRACE_S < 9
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.05)
    code, _ = supervise([child("a", "ignore-sigterm", tmp_path)], ["ready in"], capsys)
    assert code == 0
    [pid] = lives(tmp_path, "a")
    assert not Path(f"/proc/{pid}").exists()


def test_a_grandchild_that_holds_a_pipe_leaves_nothing_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transports that are open when the loop is closed fail when they are collected."""
    monkeypatch.setattr(supervisor, "STOP_GRACE_S", 0.05)
    monkeypatch.setattr(supervisor, "KILL_GRACE_S", 0.05)
    failures = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    children = [child("a", "leave-a-grandchild", tmp_path)]
    code, output = supervise(children, ["grandchild"], capsys)
    assert code == 0
    os.kill(int(re.findall(r"grandchild (\d+)", output)[0]), signal.SIGKILL)
    del children
    gc.collect()
    assert failures == []
