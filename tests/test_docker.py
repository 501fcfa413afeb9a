"""What can be known of docker/ without an engine: the linter's rules, and that all its settings are ours."""

import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from mooncake.config.settings import load_config
from mooncake.node.supervisor import KILL_GRACE_S, STOP_GRACE_S
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
OURS = {
    name: service for name, service in COMPOSE["services"].items() if service["image"] == "mooncake-serve"
}


def instructions(path: Path) -> list[list[str]]:
    """Words of each instruction."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line.split() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_keep_the_rules(path: Path) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [linter, "--config", DOCKER / "hadolint.yaml", path],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_sent_along(path: Path) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for words in instructions(path)
        if words[0] == "COPY" and not words[1].startswith("--from")
        for source in words[1:-1]
    }
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    assert copied <= sent
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages <= copied


def test_every_setting_of_the_services_is_a_valid_key() -> None:
    roles = set()
    for name, service in OURS.items():
        if name == "keys":
            continue
        settings = service["environment"] | {"MOONCAKE_WORKER_METRICS_LISTEN": "0.0.0.0:9100"}
        values = {
            key: value.partition(":-")[2].rstrip("}") if value.startswith("${") else value
            for key, value in settings.items()
            if value is not None  # from the host, if it is set there
        }
        roles.add(load_config(None, values, {}).role)
    assert roles == {"conductor", "prefill", "decode"}


def test_the_conductor_has_the_slos_of_the_shipped_configurations() -> None:
    environment = OURS["conductor"]["environment"]
    defaults = {
        key: environment[f"MOONCAKE_CONDUCTOR_{key.upper()}"].partition(":-")[2].rstrip("}")
        for key in ("ttft_slo_s", "tbt_slo_s")
    }
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        conductor = load_config(file, {}, {}).conductor
        assert (conductor.ttft_slo_s, conductor.tbt_slo_s) == tuple(map(float, defaults.values())), file.name


def test_services_have_the_time_to_drain_before_they_are_killed() -> None:
    end_s = load_config(None, {}, {}).worker.drain_timeout_s + STOP_GRACE_S + KILL_GRACE_S
    for name in ("conductor", "prefill", "decode"):
        assert float(OURS[name]["stop_grace_period"].removesuffix("s")) > end_s
    [alone] = re.findall(
        r"docker run .*--stop-timeout (\d+) .*mooncake-serve ", (ROOT / "docs/docker.md").read_text()
    )
    assert float(alone) > end_s


def test_instances_can_be_scaled_and_find_the_conductor() -> None:
    address = OURS["conductor"]["networks"]["cluster"]["ipv4_address"]
    for service in (OURS["prefill"], OURS["decode"]):
        assert not {"ports", "container_name", "hostname"} & service.keys()
        assert "MOONCAKE_INSTANCE" not in service["environment"]
        assert service["environment"]["MOONCAKE_CONDUCTOR_ENDPOINT"] == f"tcp://{address}:7800"
        assert service["depends_on"]["conductor"] == {"condition": "service_healthy"}


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_the_container_of_an_instance_knows_its_address_and_a_name(tmp_path: Path, role: str) -> None:
    (tmp_path / "hostname").write_text('#!/bin/sh\necho "${1:+10.0.0.5 }host"\n')
    (tmp_path / "mooncake-serve").write_text(
        '#!/bin/sh\necho "$MOONCAKE_MESSENGER_HOSTS $MOONCAKE_INSTANCE"\n'
    )
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MOONCAKE_ROLE": role}
    done = subprocess.run(
        ["sh", DOCKER / "entrypoint"], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout == f"10.0.0.5 {role}-host\n"


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_the_container_of_an_instance_is_healthy_when_its_own_port_says_so(role: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        Thread(target=server.serve_forever).start()
        environment = {
            "MOONCAKE_ROLE": role,
            "MOONCAKE_WORKER_METRICS_LISTEN": f"0.0.0.0:{server.server_port}",
            "MOONCAKE_HTTP_PORT": "1",
        }
        command = [sys.executable, DOCKER / "healthcheck.py"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        server.shutdown()
    assert done.returncode == 0, done.stderr


def test_prometheus_and_grafana_are_given_what_is_there() -> None:
    for name in ("prometheus", "grafana"):
        for volume in COMPOSE["services"][name]["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DOCKER / source).is_dir()
        assert ":" in COMPOSE["services"][name]["image"], "a version, so that the next pull changes nothing"
