"""The report and the exit code."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from messenger.doctor import cli
from messenger.doctor.findings import Check, Finding, Level
from messenger.doctor.machine import Machine
from messenger.doctor.reachability import PeerAddress
from tests.messenger.doctor.machines import FakeMachine, config
from tests.messenger.trees import write


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Finding]], None]:
    """Lets the command make one check, which finds what it is told."""

    def find(findings: list[Finding]) -> None:
        monkeypatch.setattr(cli, "checks", lambda *_: [Check("fake", lambda: findings)])

    for variable in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(variable)
    return find


GOOD = Finding(Level.OK, "clock", "tsc")
POOR = Finding(Level.WARN, "memlock", "8 MiB may be locked", "raise it")
BAD = Finding(Level.FAIL, "ports", "8000 is taken", "end that process")
WORSE = Finding(Level.FAIL, "address", "10.0.0.9 is not here", "set messenger.hosts")


def test_the_worst_comes_last(
    quiet: Callable[[list[Finding]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet([WORSE, BAD, POOR, GOOD])
    assert cli.run([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:19].split() for line in lines[1:-1]] == [
        ["OK", "clock"],
        ["WARN", "memlock"],
        ["FAIL", "ports"],
        ["FAIL", "address"],
    ]
    assert lines[-2] == "FAIL  address        10.0.0.9 is not here -> set messenger.hosts"
    assert lines[-1] == "2 failed, 1 warning. Begin with: address."


def test_warnings_are_no_failure(
    quiet: Callable[[list[Finding]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet([GOOD, POOR])
    assert cli.run([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 failed, 1 warning."
    quiet([GOOD])
    assert cli.run([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Nothing is wrong."


def test_json_has_one_object_a_line(
    quiet: Callable[[list[Finding]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet([BAD])
    assert cli.run(["--json"]) == 1
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert facts[-1] == {
        "level": "FAIL",
        "title": "ports",
        "found": "8000 is taken",
        "advice": "end that process",
    }


def test_a_wrong_configuration_is_a_finding_and_not_the_end(
    quiet: Callable[[list[Finding]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet([GOOD])
    write(tmp_path, "config.yaml", "http: {prot: 1}")
    assert cli.run(["--config", str(tmp_path / "config.yaml")]) == 1
    output = capsys.readouterr().out
    assert "clock" in output
    assert "prot" in output.splitlines()[-2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--peer", "node-b"],
        ["--peer", "node-b:0"],
        ["--peer", ":7900"],
        ["--config", "/nonexistent.yaml"],
        ["--what"],
    ],
)
def test_wrong_use_ends_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(arguments)
    assert ended.value.code == 2


def test_a_peer_may_be_an_ipv6_address() -> None:
    assert cli._peer("[fd00::2]:7900") == PeerAddress("fd00::2", 7900)
    assert str(PeerAddress("fd00::2", 7900)) == "[fd00::2]:7900"


def test_every_check_gets_along_with_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    """Each finds something or nothing, and none fails itself."""
    silent = FakeMachine(tmp_path)
    findings = cli.look(
        check
        for check in cli.checks(silent, config(role="prefill"), PeerAddress("10.0.0.2", 7900), None)
        if check.title not in ("native code", "cpu kernels", "peer")
    )
    assert [finding for finding in findings if "this check itself failed" in finding.found] == []


def test_every_check_gets_along_with_this_machine(listener: PeerAddress, tmp_path: Path) -> None:
    findings = cli.look(cli.checks(Machine(), config(), listener, tmp_path / "no-key"))
    assert [finding for finding in findings if "this check itself failed" in finding.found] == []
    assert {"python", "memory", "ports", "peer"} <= {finding.title for finding in findings}
