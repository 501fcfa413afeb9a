"""The systemd unit is one that systemd takes, and ends instances as they need it."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mooncake.config.sections import WorkerConfig
from mooncake.node.supervisor import KILL_GRACE_S, STOP_GRACE_S
from tests.deadline import DEADLINE_S
from tests.debian import fetched
from tests.documented import ROOT

UNIT = ROOT / "configs/systemd/mooncake-serve@.service"
INSTALLED = "/opt/mooncake-serve"
MOUNT_NAMESPACES = re.compile(
    r"(?m)^(Private(Tmp|Devices|Mounts)|Protect(System|Home|KernelTunables|ControlGroups|Proc)"
    r"|(ReadWrite|ReadOnly|Inaccessible|Exec)Paths|BindPaths|TemporaryFileSystem|DynamicUser|RootDirectory)="
)


def settings() -> dict[str, str]:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    return dict(unit["Service"])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """As installed, but for where: what it starts must be there."""
    installed = shutil.which("systemd-analyze")
    program = Path(installed) if installed else fetched("systemd", "usr/bin/systemd-analyze")
    text = UNIT.read_text()
    assert "User=mooncake\n" in text  # a user that this host does not have
    unit = tmp_path / UNIT.name.replace("@", "@one")
    unit.write_text(text.replace(INSTALLED, str(ROOT)))
    done = subprocess.run(
        [program, "verify", "--man=no", "--generators=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    told = [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line]
    assert (done.returncode, told) == (0, [])


def test_stopping_waits_for_a_whole_drain() -> None:
    drain_s = WorkerConfig().drain_timeout_s
    assert float(settings()["TimeoutStopSec"]) > drain_s + STOP_GRACE_S + KILL_GRACE_S


def test_only_the_supervisor_is_told_to_stop() -> None:
    """A messenger that ends with SIGTERM takes the answers with it that its worker drains for."""
    assert settings()["KillMode"] == "mixed"
    assert "ExecStop" not in settings()


def test_units_of_one_host_share_memory() -> None:
    """Messengers whose mount namespaces differ take each other for those of two hosts."""
    assert MOUNT_NAMESPACES.search(UNIT.read_text()) is None


@pytest.mark.parametrize("limit", ["LimitMEMLOCK=infinity", "LimitNOFILE=65536", "OOMPolicy=continue"])
def test_limits_are_those_that_the_doctor_asks_for(limit: str) -> None:
    assert limit in UNIT.read_text().splitlines()
