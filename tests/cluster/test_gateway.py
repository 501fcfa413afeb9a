"""An Envoy that asks the picker for the front of each request, as gateways do for an InferencePool.

One cluster is real. Another one is a front alone, which answers as it is told to.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.cluster.forked import ForkedServer
from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import body, tiny_server
from tests.conductor.picker.running import picker
from tests.conductor.picker.stub_fronts import StubFront
from tests.deadline import DEADLINE_S
from tests.ports import free_port
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer
from tests.wheels import envoy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
TYPE = "type.googleapis.com/envoy.extensions"
SUBSET = "test-subset"
"""A header in which these clients say what the gateway is to allow."""


@dataclass(frozen=True)
class Gateway:
    url: str
    real: Server
    other: StubFront

    def ask(self, *fronts: str, **fields: object) -> httpx.Response:
        """The answer to a request for one of these fronts."""
        headers = {SUBSET: ",".join(fronts)} if fronts else {}
        headers["x-gateway-destination-endpoint"] = "127.0.0.1:1"  # a client's wish, which is ignored
        content = {**body(num_tokens=4), "model": "tiny", **fields}
        return HTTP.post(f"{self.url}/v1/completions", json=content, headers=headers, timeout=DEADLINE_S)

    @property
    def real_address(self) -> str:
        return f"127.0.0.1:{self.real.port}"


def configuration(port: int, picker_port: int, fronts: list[str]) -> dict[str, Any]:
    """Envoy's: what gateways make of an InferencePool, whose fronts these are."""
    asks_picker = {
        "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "60s"},
        "message_timeout": "60s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    hints = {
        "@type": f"{TYPE}.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": SUBSET,
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                },
            }
        ],
    }
    router = {"@type": f"{TYPE}.filters.http.router.v3.Router"}
    retry = {"retry_on": "retriable-status-codes", "retriable_status_codes": [429, 503], "num_retries": 1}
    route = {"cluster": "fronts", "timeout": "0s", "retry_policy": retry}
    manager = {
        "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "http_filters": [
            {"name": "hints", "typed_config": hints},
            {"name": "picker", "typed_config": asks_picker},
            {"name": "router", "typed_config": router},
        ],
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    otherwise = {
        "name": "otherwise",
        "typed_config": {"@type": f"{TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    as_told = {
        "@type": f"{TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"header": "x-gateway-destination-endpoint"}],
        "fallback_policy": {"policies": [{"typed_extension_config": otherwise}]},
    }
    policy = {"policies": [{"typed_extension_config": {"name": "as-told", "typed_config": as_told}}]}
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": socket_address(f"127.0.0.1:{port}"),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "picker",
                    "type": "STATIC",
                    "typed_extension_protocol_options": http2,
                    "load_assignment": assignment("picker", [f"127.0.0.1:{picker_port}"]),
                },
                {
                    "name": "fronts",
                    "type": "STATIC",
                    "load_balancing_policy": policy,
                    "load_assignment": assignment("fronts", fronts),
                },
            ],
        }
    }


def socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def assignment(name: str, addresses: list[str]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": socket_address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    tiny_model("llama3", folder / "tiny")
    write_tiny_tokenizer(folder / "tiny")
    other = StubFront("127.0.0.1")
    with contextlib.ExitStack() as stack:
        real: ForkedServer = stack.enter_context(tiny_server(folder / "tiny", folder))
        stack.enter_context(other.served())
        chooses = stack.enter_context(picker(f"http://127.0.0.1:{real.port}", other.url))
        port = free_port()
        addresses = [f"127.0.0.1:{real.port}", other.address]
        (folder / "envoy.json").write_text(json.dumps(configuration(port, chooses.port, addresses)))
        command = [envoy(), "-c", folder / "envoy.json", "--concurrency", "1", "--disable-hot-restart"]
        with (folder / "envoy.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        made = Gateway(f"http://127.0.0.1:{port}", real, other)

        def goes_through() -> bool:
            assert process.poll() is None, (folder / "envoy.log").read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return all(made.ask(address).is_success for address in addresses)
            return False

        eventually(goes_through, "requests reach both fronts")
        yield made


def test_answers_are_streamed_from_the_front_that_was_chosen(gateway: Gateway) -> None:
    answer = gateway.ask(gateway.real_address, stream=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert gateway.ask(gateway.other.address).json() == {"front": gateway.other.address}


def test_long_bodies_arrive_as_they_were_sent(gateway: Gateway) -> None:
    prompt = "long " * 100_000
    gateway.other.bodies.clear()
    assert gateway.ask(gateway.other.address, prompt=prompt).is_success
    assert [json.loads(each)["prompt"] for each in gateway.other.bodies] == [prompt]


@pytest.mark.parametrize("status", [429, 503])
def test_another_cluster_is_tried_if_the_first_one_refuses(gateway: Gateway, status: int) -> None:
    gateway.other.status = status
    try:
        gateway.other.bodies.clear()
        answers = [gateway.ask() for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert gateway.other.bodies, "it was asked first, now and then"
    finally:
        gateway.other.status = 200


def test_without_a_front_the_picker_answers(gateway: Gateway) -> None:
    answer = gateway.ask("9.9.9.9:80")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "no front is ready"
