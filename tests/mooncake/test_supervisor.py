import array
import asyncio
import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from mooncake import supervisor
from mooncake.lives import Life
from mooncake.node import ChildSpec
from mooncake.supervisor import Child, Stopping, Supervisor
from tests.deadline import DEADLINE_S
from tests.mooncake.fake_child import FakeConfig


def child(name: str, behaviour: str, folder: Path) -> Child:
    config = FakeConfig.model_validate({"behaviour": behaviour, "lives_file": str(folder / name)})

    def config_of(life: Life) -> str:
        return config.model_copy(update={"previous_end": life.previous_end}).model_dump_json()

    spec = ChildSpec(name, "tests.mooncake.fake_child", config_of)
    return Child(spec, "warning")


def lives(folder: Path, name: str) -> list[int]:
    return [int(pid) for pid in (folder / name).read_text().split()] if (folder / name).exists() else []


def supervise(
    children: list[Child],
    until: str | None,
    capture: pytest.CaptureFixture[str],
    hang_timeout_s: float | None = None,
) -> tuple[int, str]:
    """Run until the output has `until`, then SIGTERM; exit code and output."""
    output = ""

    async def stop_when_seen() -> None:
        nonlocal output
        while until is not None and until not in output:
            captured = capture.readouterr()
            output += captured.out + captured.err
            await asyncio.sleep(0.01)
        if until is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    async def run() -> int:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(stop_when_seen())
            return await Supervisor(children, Stopping(), hang_timeout_s=hang_timeout_s).run()

    code = asyncio.run(run())
    captured = capture.readouterr()
    return code, output + captured.out + captured.err


def test_readiness_is_announced_once_all_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    children = [child("a", "serve", tmp_path), child("b", "serve", tmp_path)]
    code, output = supervise(children, "ready in", capsys)
    assert code == 0
    assert "[a] loading weights" in output
    assert "[b] ready served" in output
    assert "try 1" in output
    assert output.count("ready in") == 1


def test_a_child_that_dies_is_reported_and_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = supervise([child("a", "crash", tmp_path)], "ready in", capsys)
    assert code == 0
    assert "[a] died (signal 9); starting it again in 0.5 s" in output
    assert "these are my last words" in output
    assert len(lives(tmp_path, "a")) == 2


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
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.02)
    code, output = supervise([child("a", behaviour, tmp_path)], "ready served 4", capsys)
    assert code == 0
    assert re.findall(r"starting it again in (.*)\. Its last", output) == pauses


@pytest.mark.parametrize(
    ("behaviour", "end"), [("crash", "killed"), ("fault", "failed"), ("hang", "failed"), ("stop", "failed")]
)
def test_the_next_life_is_told_how_the_one_before_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], behaviour: str, end: str
) -> None:
    told = f"served 2 behind {end}"
    code, output = supervise([child("a", behaviour, tmp_path)], told, capsys, hang_timeout_s=3.0)
    assert code == 0
    assert told in output


def test_a_child_that_gives_no_sign_of_life_is_ended_and_restarted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no other one."""
    children = [child("a", "hang", tmp_path), child("b", "stop", tmp_path), child("c", "serve", tmp_path)]
    code, output = supervise(children, "[b] died (signal 9); starting it again", capsys, hang_timeout_s=3.0)
    assert code == 0
    assert "[a] no sign of life for 3 s (S (sleeping)), ending it" in output
    assert "[b] no sign of life for 3 s (T (stopped)), ending it" in output
    assert "[c] no sign" not in output


def test_lines_of_any_length_and_broken_statuses_do_no_harm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = supervise([child("a", "babble", tmp_path)], "ready in", capsys)
    assert code == 0
    assert "this is no status" in output
    assert "x" * 1000 in output


def test_a_fatal_error_ends_everything_with_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = supervise([child("a", "serve", tmp_path), child("b", "fatal", tmp_path)], None, capsys)
    assert code == 1
    assert output.splitlines()[-1] == "error: the model is not there"
    assert "Traceback" not in output
    assert len(lives(tmp_path, "b")) == 1


def test_output_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    config = FakeConfig(behaviour="babble-for-ever", lives_file=str(tmp_path / "a"))
    program = (
        "import asyncio, os, sys\n"
        "from mooncake.node import ChildSpec\n"
        "from mooncake.supervisor import Child, Stopping, Supervisor\n"
        f"spec = ChildSpec('a', 'tests.mooncake.fake_child', lambda _: {config.model_dump_json()!r})\n"
        "async def run():\n"
        "    supervisor = Supervisor([Child(spec, 'warning')], Stopping())\n"
        "    code = await supervisor.run()\n"
        "    os._exit(code if supervisor.is_stuck else 99)\n"
        "asyncio.run(run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        deadline_s = time.monotonic() + DEADLINE_S
        num_bytes, earlier = 0, -1
        while num_bytes == 0 or num_bytes != earlier:  # it no longer grows: the writer is stuck
            assert time.monotonic() < deadline_s
            time.sleep(0.3)
            num_bytes, earlier = pipe_len(process.stderr.fileno()), num_bytes
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_end_does_not_wait_for_the_memory_of_large_pools(tmp_path: Path, signum: signal.Signals) -> None:
    program = (
        "import asyncio, threading\n"
        "from mooncake import supervisor\n"
        "from mooncake.config import Config\n"
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
    assert (process.returncode, errors) == (0, b"")
    assert not list(tmp_path.iterdir())


def pipe_len(descriptor: int) -> int:
    buffer = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, buffer)
    return buffer[0]


@pytest.mark.cluster
def test_a_child_that_does_not_stop_is_killed_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started_s = time.monotonic()
    code, _ = supervise([child("a", "ignore-sigterm", tmp_path)], "ready in", capsys)
    assert code == 0
    assert time.monotonic() - started_s < 9
    [pid] = lives(tmp_path, "a")
    assert not Path(f"/proc/{pid}").exists()
