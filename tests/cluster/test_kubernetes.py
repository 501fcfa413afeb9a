"""The chart's pods, as far as there are no containers: Helm renders them, and this plays the kubelet.

A pod is a process with the command, the variables, the files and the address that it would have. What the
image's entrypoint starts is forked. There are two hosts (network namespaces), with a list of names, where the
Service of the conductor is one.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mooncake.security.keys import ClusterKey
from tests.chaos.host_server import use_hosts_file
from tests.cluster.forked import ForkedServer, launch, supervise
from tests.cluster.harness import HTTP, ROOT, eventually
from tests.cluster.namespaces import Host, Unavailable, two_hosts
from tests.cluster.tiny_cluster import body
from tests.deadline import DEADLINE_S
from tests.forked import Forked
from tests.kvstore.forked import enter
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer
from tests.wheels import helm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
PLACES = {"conductor": 0, "prefill": 0, "front": 1, "decode": 1}
"""Hosts of the pods: each port of the chart is needed once on each."""
VALUES: dict[str, Any] = {
    "secrets": {"clusterKey": "mooncake"},
    "config": {
        "kvcache": {"block_size": 8},
        "conductor": {"peer_timeout_s": 120, "ttft_slo_s": 120, "tbt_slo_s": 60},
    },
    "instances": {
        "config": {
            "kvcache": {"pool_bytes": "8MiB", "device_bytes": "8MiB"},
            "worker": {"num_threads": 1},
        }
    },
}


class Pod(ForkedServer):
    """A pod's one container."""

    def __init__(self, host: Host, template: dict[str, Any], files: dict[str, str], folder: Path) -> None:
        """`folder` is that of all pods; `files` are those of the ConfigMap."""
        super().__init__(run_dir=folder, port=8000)
        [self.container] = template["spec"]["containers"]
        self.component = template["metadata"]["labels"]["app.kubernetes.io/component"]
        self.host, self.address = host, host.addresses[0]
        self._folder, self._files = folder, files

    def _launch(self, arguments: list[str], environ: dict[str, str], output: int) -> Forked:
        own = self._folder / self.component
        own.mkdir(exist_ok=True)
        option, path = self.container["args"]
        text = self._files[Path(path).name]
        for mount in ("/secrets/", "/state/"):
            text = text.replace(mount, f"{self._folder}{mount}")
        (own / "config.yaml").write_text(text)
        # The entrypoint finds this program, which tells what it was started with.
        tells = own / "mooncake-serve"
        tells.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        )
        tells.chmod(0o755)
        container = functools.partial(_be_container, self.host.network, self._folder / "hosts")
        environ = {**environ, "PATH": f"{own}:{environ['PATH']}", **self._environment()}
        return launch(container, [option, str(own / "config.yaml")], environ, output)

    def _environment(self) -> dict[str, str]:
        given = {"POD_IP": self.address, "POD_NAME": f"mooncake-{self.component}-0"}
        for variable in self.container["env"]:
            if variable["name"] != "HOME":  # kernels are compiled there
                value = variable.get("value", given.get(variable["name"]))
                given[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], value)
        return given

    def get(self, port: str, path: str) -> httpx.Response:
        """The answer to a request from its host to one of its ports, by name."""
        numbers = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        with self.host.entered():
            return HTTP.get(f"http://{self.address}:{numbers[port]}{path}", timeout=DEADLINE_S)

    def passes(self, probe: str) -> bool:
        """Whether the kubelet would say so, or there is no such probe."""
        if probe not in self.container:
            return True
        wanted = self.container[probe]["httpGet"]
        try:
            return self.get(wanted["port"], wanted["path"]).is_success
        except httpx.TransportError:
            return False

    def signal_all(self, signum: signal.Signals) -> None:
        """Stop its processes, or let them go on."""
        for pid in (self.process.pid, *self.children().values()):
            subprocess.run(["kill", f"-{signum}", str(pid)], check=True, timeout=DEADLINE_S)


def _be_container(network: Path, hosts_file: Path, arguments: list[str]) -> None:
    """Do what the image's entrypoint does, and be the supervisor that it starts."""
    enter(network)
    use_hosts_file(hosts_file)
    entrypoint = [ROOT / "docker/entrypoint", *arguments]
    told = subprocess.run(entrypoint, stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S).stdout
    arguments, environ = json.loads(told)
    os.environ.update(environ)
    supervise(arguments)


@dataclass(frozen=True)
class Release:
    pods: dict[str, Pod]

    def ask(self, num_tokens: int) -> httpx.Response:
        front = self.pods["front"]
        with front.host.entered():
            return HTTP.post(
                f"http://{front.address}:8000/v1/completions",
                json={**body(num_tokens=num_tokens), "model": "tiny"},
                timeout=DEADLINE_S,
            )

    def shows_under_load(self, name: str) -> bool:
        """Ask once more, as a load that is no burst says at once how many instances are desired. Returns
        whether the conductor has a metric."""
        assert self.ask(num_tokens=1).status_code == 200
        return name in self.pods["conductor"].get("admin", "/metrics").text

    def num_waiting(self) -> float:
        text = self.pods["front"].get("admin", "/metrics").text
        [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_waiting{")]
        return float(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("release")
    tiny_model("llama3", folder / "tiny")
    write_tiny_tokenizer(folder / "tiny")
    key = folder / "secrets/clusterKey/cluster.key"
    key.parent.mkdir(parents=True)
    (folder / "state").mkdir()
    ClusterKey.generate().save(key)
    values = {**VALUES, "config": {**VALUES["config"], "model": str(folder / "tiny")}}
    manifests = subprocess.run(
        [str(helm()), "template", "mooncake", str(ROOT / "docker/helm/mooncake-serve"), "--values", "-"],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    documents = [each for each in yaml.safe_load_all(manifests.stdout) if each]
    [files] = [each["data"] for each in documents if each["kind"] == "ConfigMap"]
    templates = [
        each["spec"]["template"] for each in documents if each["kind"] in ("StatefulSet", "Deployment")
    ]
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except Unavailable as reason:
            pytest.skip(str(reason))
        names = f"127.0.0.1 localhost\n{hosts[0].addresses[0]} mooncake-conductor\n"
        (folder / "hosts").write_text(names)
        pods = {}
        for template in templates:
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            # Sockets have paths of limited length.
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pod-")))
            pods[component] = Pod(hosts[PLACES[component]], template, files, folder)
            pods[component].run_dir = run_dir
            pods[component].start()
            stack.callback(pods[component].__exit__)
        yield Release(pods)


def test_probes_pass_and_the_front_answers(release: Release) -> None:
    for pod in release.pods.values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            eventually(functools.partial(pod.passes, probe), f"{probe} of {pod.component}")
    answer = release.ask(num_tokens=5)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5
    conductor = release.pods["conductor"]
    assert 'instance="mooncake-decode-0"' in conductor.get("admin", "/metrics").text
    for role in ("prefill", "decode"):
        wanted = f'mooncake_desired_instances{{role="{role}"}}'  # what ScaledObjects ask for
        eventually(functools.partial(release.shows_under_load, wanted), wanted)


def test_a_front_that_is_told_to_end_finishes_its_answers(release: Release) -> None:
    front, decode = release.pods["front"], release.pods["decode"]
    assert front.container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "35"]
    with ThreadPoolExecutor(1) as client:
        decode.signal_all(signal.SIGSTOP)
        try:
            answer = client.submit(release.ask, 20)
            eventually(lambda: release.num_waiting() == 1, "a request waits for a decode instance")
            front.process.send_signal(signal.SIGTERM)
            front.wait_for_line("waiting for 1 open answer, at most 600 s")
        finally:
            decode.signal_all(signal.SIGCONT)
        assert answer.result().status_code == 200
    assert front.process.wait(DEADLINE_S) == 0


def test_pods_end_by_themselves_when_they_are_told(release: Release) -> None:
    for component in ("decode", "prefill", "conductor"):
        release.pods[component].stop()
        assert release.pods[component].process.returncode == 0, component
