"""The chart, rendered by Helm: Kubernetes takes what comes of it, and mooncake-serve what its pods are given.

`tests/cluster/test_kubernetes.py` runs its pods.
"""

import functools
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from conductor.picker.cli import parsed
from conductor.picker.watching import PERIOD_S
from mooncake.config.settings import Config, load_config
from mooncake.node.supervisor import KILL_GRACE_S, STOP_GRACE_S
from tests.deadline import DEADLINE_S
from tests.debian import fetched
from tests.wheels import helm

ROOT = Path(__file__).parent.parent
HELM = ROOT / "docker/helm"
CHART = HELM / "mooncake-serve"
ALERTS = ROOT / "docker/prometheus/alerts.yml"
CUSTOM = ("ScaledObject", "PodMonitor", "PrometheusRule")
"""Kinds that operators define."""
DNS_KEEPS_S = 30
"""Seconds for which caches keep the addresses of a headless Service, by CoreDNS as kubeadm sets it up."""
KUBERNETES = ("1.29", "1.37")
"""The oldest one of Chart.yaml and a recent one."""
EVERYTHING = {
    "secrets": {
        name: f"a-{name.lower()}"
        for name in (
            *("clusterKey", "apiKeys", "adminKeys", "httpTls", "clusterTls"),
            *("etcdCa", "etcdCert", "etcdPassword", "hubToken", "pickerTls"),
        )
    },
    "etcd": {"endpoints": ["https://etcd:2379"], "user": "mooncake"},
    "conductor": {
        "state": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        "drainSeconds": 300,
    },
    "prefill": {"config": {"pipeline": {"stages": 2}}, "runtimeClassName": "nvidia", "drainSeconds": 90},
    "decode": {"drainSeconds": 120},
    "picker": {"enabled": True},
    "networkPolicy": {"enabled": True, "gateways": {"name": "gateways"}},
    "image": {"pullSecrets": ["registry"]},
    "front": {
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "podAnnotations": {"c": "d"},
        "finishSeconds": 900,
    },
}
DRAINS_S = {"conductor": 300, "front": 900, "prefill": 90, "decode": 120}
"""Seconds for which the components of `EVERYTHING` drain: none as shipped."""
NODES = ("conductor", "front", "prefill", "decode")
"""Components that run mooncake-serve. The picker has no configuration."""
VALUES: dict[str, dict[str, Any]] = {
    "one-node-cpu": yaml.safe_load((HELM / "one-node-cpu.yaml").read_text()),
    "gpu-rdma": yaml.safe_load((HELM / "gpu-rdma.yaml").read_text()),
    "everything": EVERYTHING,
}
each_values = pytest.mark.parametrize("values", VALUES)


def run_helm(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(helm()), *arguments, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@functools.cache
def rendered(values: str) -> list[dict[str, Any]]:
    done = run_helm("template", "mooncake", str(CHART), "--namespace", "serving", values=VALUES[values])
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(values: str, *kinds: str) -> list[dict[str, Any]]:
    found = [each for each in rendered(values) if each["kind"] in kinds]
    assert found, f"no {kinds}"
    return found


def pods(values: str) -> dict[str, dict[str, Any]]:
    """Templates of the pods, by component."""
    templates = [each["spec"]["template"] for each in of_kind(values, "StatefulSet", "Deployment")]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in templates}


def files(values: str) -> dict[str, str]:
    [configuration] = of_kind(values, "ConfigMap")
    return dict(configuration["data"])


def environment(pod: dict[str, Any]) -> dict[str, str]:
    """As the kubelet makes it for a pod at 10.1.2.3."""
    given = {"POD_IP": "10.1.2.3", "POD_NAME": "mooncake-prefill-0"}
    for variable in pod["spec"]["containers"][0]["env"]:
        value = variable.get("value", given.get(variable["name"], "of a secret"))
        given[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], value)
    return given


def config_of(values: str, component: str, folder: Path) -> Config:
    """The configuration that a pod loads."""
    pod = pods(values)[component]
    option, path = pod["spec"]["containers"][0]["args"]
    assert option == "--config"
    file = folder / Path(path).name
    file.write_text(files(values)[file.name])
    return load_config(file, environment(pod), {})


@each_values
def test_lints(values: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), values=VALUES[values])
    assert done.returncode == 0, done.stdout + done.stderr


@each_values
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(values: str, version: str) -> None:
    for each in rendered(values):
        if each["kind"] not in (*CUSTOM, "InferencePool"):
            kubernetes_validate.validate(each, version, strict=True)


def test_the_operators_know_every_field() -> None:
    # Each process of tests would import them for this test: they take 2 s.
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule

    for kind, model in zip(CUSTOM, (ScaledObject, PodMonitor, PrometheusRule), strict=True):
        for each in of_kind("gpu-rdma", kind):
            read = model.model_validate(each).model_dump(mode="json", by_alias=True, exclude_unset=True)
            assert _without_labels(read) == _without_labels(each)


def _without_labels(content: dict[str, Any]) -> dict[str, Any]:
    return {"spec": content["spec"], "kind": content["kind"], "apiVersion": content["apiVersion"]}


@each_values
def test_pods_load_their_configuration(values: str, tmp_path: Path) -> None:
    for component in NODES:
        config = config_of(values, component, tmp_path)
        assert config.role == component
        assert config.conductor.ttft_slo_s == 15, "of the values' own defaults"
        if component in ("prefill", "decode"):
            assert config.messenger.hosts == ["10.1.2.3"]
            assert config.instance == "mooncake-prefill-0"
        if component == "conductor" or not config.cluster.has_standbys:
            at = "10.1.2.3" if component == "conductor" else "mooncake-conductor"
            assert config.conductor.endpoint == f"tcp://{at}:7800"


@each_values
def test_files_of_the_configuration_are_mounted(values: str, tmp_path: Path) -> None:
    """Files of secrets, models and state, all at places that exist in their containers."""
    for component in NODES:
        config, pod = config_of(values, component, tmp_path), pods(values)[component]
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        needed = set(_paths(config.model_dump(mode="json")))
        assert needed
        for path in needed:
            assert any(path.startswith(f"{mount}/") or path == mount for mount in mounts), (
                f"{component} {path}"
            )
        claims = {
            claim["metadata"]["name"]
            for each in of_kind(values, "StatefulSet")
            if each["spec"]["template"] == pod
            for claim in each["spec"].get("volumeClaimTemplates", [])
        }
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        assert set(mounts.values()) == claims | set(volumes)


def test_pods_get_the_secrets_that_they_read() -> None:
    """By file or by variable: no pod that is broken into gives away what another one needs."""
    of_all = {"a-clusterkey", "a-etcdca", "a-etcdcert", "a-etcdpassword", "a-hubtoken"}
    of_api = of_all | {"a-apikeys", "a-adminkeys", "a-httptls"}
    instance = of_all | {"a-clustertls"}
    assert {component: secrets_of(pod) for component, pod in pods("everything").items()} == {
        "conductor": of_api,
        "front": of_api,
        "prefill": instance,
        "decode": instance,
        "picker": {"a-pickertls"},
    }
    assert secrets_of(pods("one-node-cpu")["front"]) == {"mooncake"}


def secrets_of(pod: dict[str, Any]) -> set[str]:
    volumes = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
    variables = [
        variable["valueFrom"]["secretKeyRef"]["name"]
        for container in pod["spec"]["containers"]
        for variable in container.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    ]
    return {*volumes, *variables}


def _paths(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _paths(each)
    elif isinstance(node, str) and node.startswith("/") and not node.startswith("/mooncake"):
        yield node


@each_values
def test_nothing_is_killed_that_still_drains(values: str, tmp_path: Path) -> None:
    for component, pod in pods(values).items():
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        if component == "picker":
            assert grace_s > parsed(pod["spec"]["containers"][0]["args"]).finish_s + 6
            continue
        drain_s = config_of(values, component, tmp_path).worker.drain_timeout_s
        if values == "everything":
            assert drain_s == DRAINS_S[component]
        if component == "front":
            _, leave_s = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert float(leave_s) > DNS_KEEPS_S + PERIOD_S
            drain_s += float(leave_s)
        assert grace_s > drain_s + STOP_GRACE_S + KILL_GRACE_S


@each_values
def test_selectors_find_pods_and_ports(values: str) -> None:
    labels = {component: pod["metadata"]["labels"] for component, pod in pods(values).items()}
    ports = {
        component: {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        for component, pod in pods(values).items()
    }
    for each in of_kind(values, "Service", "PodDisruptionBudget", "StatefulSet", "Deployment"):
        selector = each["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        [component] = [name for name, own in labels.items() if selector.items() <= own.items()]
        if each["kind"] == "Service":
            for port in each["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                assert target in ports[component] or target in ports[component].values()
    for component, pod in pods(values).items():
        container = pod["spec"]["containers"][0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for how in container.get(probe, {}).keys() & {"httpGet", "tcpSocket"}:
                assert container[probe][how]["port"] in ports[component]


@pytest.mark.parametrize("values", ["gpu-rdma", "everything"])
def test_gateways_find_fronts_and_their_picker(values: str) -> None:
    [pool] = of_kind(values, "InferencePool")
    fronts = {name for name, pod in pods(values).items() if _matches(pool["spec"]["selector"], pod)}
    assert fronts == {"front"}
    asked = pool["spec"]["endpointPickerRef"]
    [service] = [each for each in of_kind(values, "Service") if each["metadata"]["name"] == asked["name"]]
    [container] = pods(values)["picker"]["spec"]["containers"]
    options = parsed(container["args"])
    assert container["command"] == ["mooncake-picker"]
    assert asked["port"]["number"] == service["spec"]["ports"][0]["port"] == int(options.listen[-4:])
    scheme, tls = ("https", True) if values == "everything" else ("http", False)
    assert options.clusters == [f"{scheme}://mooncake-fronts:8000"]
    assert (options.certificate is not None) == tls
    mounted = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
    assert mounted == ({"/secrets/pickerTls"} if tls else set())


def test_pickers_are_open_to_the_gateways_that_are_named() -> None:
    port = {"ports": [{"port": "grpc"}]}
    gateways = {"from": [{"namespaceSelector": {"matchLabels": {"name": "gateways"}}}]}
    for values, ingress in (("gpu-rdma", port), ("everything", port | gateways)):
        policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(values, "NetworkPolicy")}
        assert policies["mooncake-picker"]["ingress"] == [ingress]


@each_values
def test_fronts_and_pickers_are_replaced_one_at_a_time(values: str) -> None:
    for each in of_kind(values, "Deployment"):
        assert each["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def _matches(selector: dict[str, Any], pod: dict[str, Any]) -> bool:
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


def test_instances_of_gpus_may_lock_memory() -> None:
    for component in ("prefill", "decode"):
        spec = pods("gpu-rdma")[component]["spec"]
        assert spec["securityContext"]["runAsUser"] == 0
        assert spec["containers"][0]["securityContext"]["capabilities"] == {
            "drop": ["ALL"],
            "add": ["IPC_LOCK"],
        }
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    spec = pods("gpu-rdma")["front"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_standby_needs_etcd() -> None:
    replicas = {
        values: each["spec"]["replicas"]
        for values in ("one-node-cpu", "everything")
        for each in of_kind(values, "StatefulSet")
        if each["metadata"]["name"] == "mooncake-conductor"
    }
    assert replicas == {"one-node-cpu": 1, "everything": 2}


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (
            {"config": {"kvcache": {"pool_byts": "1GiB"}}},
            "/config/kvcache': additional properties 'pool_byts'",
        ),
        ({"prefill": {"config": {"worker": {"max_batch": 0}}}}, "/prefill/config/worker/max_batch"),
        ({"config": {"http": {"port": 9}}}, "/config/http': additional properties 'port'"),
        ({"instnces": {}}, "additional properties 'instnces'"),
        ({"decode": {"replica": 2}}, "/decode': additional properties 'replica'"),
        ({"secrets": {"clusterKey": ""}}, "secrets.clusterKey: name a Secret"),
        ({"prefill": {"ssd": {"bytes": "1GiB"}}}, "/prefill/ssd"),
        ({"etcd": {"endpoints": ["etcd:2379"]}}, "/etcd/endpoints/0"),
        (
            {"scaling": {"enabled": True}, "config": {"conductor": {"rebalancing": False}}},
            "conductor.rebalancing",
        ),
    ],
)
def test_a_mistake_in_values_is_named(mistake: dict[str, Any], told: str) -> None:
    done = run_helm("template", "mooncake", str(CHART), values={"secrets": {"clusterKey": "k"}, **mistake})
    assert done.returncode != 0
    assert told in done.stderr


def test_the_schema_is_current() -> None:
    generator = runpy.run_path(str(HELM / "generate.py"))
    assert generator["SCHEMA"].read_text() == generator["rendered"](), "run make generate"


def test_alerts_are_those_of_the_folder_of_prometheus() -> None:
    [rule] = of_kind("gpu-rdma", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


def test_as_many_pods_are_wanted_as_the_conductor_says(tmp_path: Path) -> None:
    """The query, as Prometheus computes it: of this release alone, whichever conductor leads."""
    promtool = fetched("prometheus", "usr/bin/promtool")
    series = [
        ('role="decode", namespace="serving", pod="mooncake-conductor-1"', 3),
        ('role="prefill", namespace="serving", pod="mooncake-conductor-1"', 2),
        ('role="decode", namespace="other", pod="mooncake-conductor-0"', 9),
        ('role="prefill", namespace="serving", pod="another-conductor-0"', 9),
    ]
    for each in of_kind("gpu-rdma", "ScaledObject"):
        [trigger] = each["spec"]["triggers"]
        role = each["spec"]["scaleTargetRef"]["name"].removeprefix("mooncake-")
        assert trigger["metricType"] == "AverageValue"
        assert trigger["metadata"]["threshold"] == "1"
        expected = {"expr": trigger["metadata"]["query"], "eval_time": "1m"}
        expected["exp_samples"] = [{"labels": "{}", "value": {"prefill": 2, "decode": 3}[role]}]
        inputs = [
            {"series": f"mooncake_desired_instances{{{labels}}}", "values": f"{value}x4"}
            for labels, value in series
        ]
        case = {"interval": "15s", "input_series": inputs, "promql_expr_test": [expected]}
        (tmp_path / "test.yml").write_text(json.dumps({"tests": [case]}))
        done = subprocess.run(
            [promtool, "test", "rules", "test.yml"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "replicas" not in next(
            spec["spec"]
            for spec in of_kind("gpu-rdma", "StatefulSet")
            if spec["metadata"]["name"] == f"mooncake-{role}"
        )
