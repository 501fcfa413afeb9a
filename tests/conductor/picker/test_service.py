"""The protocol between gateway and picker, over a gRPC channel: what proposal 004 of the Gateway API
inference extension demands of a picker, section by section.

`tests/cluster/test_gateway.py` has an Envoy ask.
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from conductor.picker.cli import run
from conductor.picker.fronts import WatchedFronts
from conductor.picker.processing_stream import ProcessingStream
from tests.certificates import self_signed
from tests.cluster.harness import eventually
from tests.conductor.picker.running import PROGRAM, ROOT, picker
from tests.conductor.picker.stub_fronts import StubFront
from tests.deadline import DEADLINE_S

DESTINATION = "x-gateway-destination-endpoint"
FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
HEADERS = HttpHeaders(
    headers=HeaderMap(
        headers=[
            HeaderValue(key=":path", raw_value=b"/v1/completions"),
            HeaderValue(key=DESTINATION, raw_value=b"6.6.6.6:80"),  # a client's wish
        ]
    )
)


class Gateway:
    """Two clusters, a front each, and a picker that knows both."""

    def __init__(self, fronts: tuple[StubFront, StubFront], channel: grpc.Channel) -> None:
        self.fronts = fronts
        self._channel = channel

    def process(self, *messages: ProcessingRequest) -> list[ProcessingResponse]:
        """The answers to the messages of one request."""
        return list(self.begin(iter(messages)))

    def begin(self, messages: Iterator[ProcessingRequest]) -> Iterator[ProcessingResponse]:
        answers: Iterator[ProcessingResponse]
        answers = ExternalProcessorStub(self._channel).Process(messages, timeout=DEADLINE_S)
        return answers

    def health(self, service: str) -> str:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = HealthStub(self._channel).Check(request, timeout=DEADLINE_S)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def wait_until(self, *addresses: str) -> None:
        """Wait until these fronts are those that are chosen."""

        def known() -> bool:
            [answer] = self.process(ProcessingRequest(request_headers=HEADERS))
            return set(destinations(answer)) == set(addresses)

        eventually(known, f"{addresses} are known")


def destinations(answer: ProcessingResponse) -> list[str]:
    """The addresses that a gateway reads, which are the same in both places."""
    if answer.WhichOneof("response") != "request_headers":
        return []
    mutation = answer.request_headers.response.header_mutation
    [header] = [each for each in mutation.set_headers if each.header.key == DESTINATION]
    assert header.append_action == header.OVERWRITE_IF_EXISTS_OR_ADD
    assert MessageToDict(answer.dynamic_metadata) == {
        "envoy.lb": {DESTINATION: header.header.raw_value.decode()}
    }
    return header.header.raw_value.decode().split(",")


def hint(value: object) -> Metadata:
    struct = Struct()
    struct.update({"x-gateway-destination-endpoint-subset": value})
    return Metadata(filter_metadata={"envoy.lb.subset_hint": struct})


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    blue, green = StubFront("127.0.0.2"), StubFront("127.0.0.3")
    with (
        blue.served(),
        green.served(),
        picker(blue.url, green.url) as running,
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        made = Gateway((blue, green), channel)
        made.wait_until(blue.address, green.address)
        yield made


def test_a_request_is_sent_to_a_front_and_another_one_if_that_fails(gateway: Gateway) -> None:
    """Destination Endpoint: header and metadata have the same list of ip:port."""
    [answer] = gateway.process(ProcessingRequest(request_headers=HEADERS))
    assert set(destinations(answer)) == {front.address for front in gateway.fronts}
    assert answer.request_headers.response.clear_route_cache


def test_requests_go_where_fewer_are(gateway: Gateway) -> None:
    ended = threading.Event()

    def lasting() -> Iterator[ProcessingRequest]:
        yield ProcessingRequest(request_headers=HEADERS)
        ended.wait(DEADLINE_S)

    running, first = [], []
    for _ in range(6):
        running.append(gateway.begin(lasting()))
        first.append(destinations(next(running[-1]))[0])
    ended.set()
    assert [len(list(call)) for call in running] == [0] * 6
    assert sorted(first) == sorted([front.address for front in gateway.fronts] * 3)


@pytest.mark.parametrize("as_list", [True, False])
def test_only_endpoints_of_the_subset_are_chosen(gateway: Gateway, as_list: bool) -> None:
    """Endpoint Subset."""
    _, green = gateway.fronts
    wanted = [green.address, "9.9.9.9:80"]
    value = wanted if as_list else ", ".join(wanted)
    [answer] = gateway.process(ProcessingRequest(request_headers=HEADERS, metadata_context=hint(value)))
    assert destinations(answer) == [green.address]


@pytest.mark.parametrize("subset", [[], "", ["9.9.9.9:80"]])
def test_a_subset_without_a_ready_front_is_answered_at_once(gateway: Gateway, subset: object) -> None:
    """Endpoint Subset: none eligible, or an empty list, is a 503."""
    [answer] = gateway.process(ProcessingRequest(request_headers=HEADERS, metadata_context=hint(subset)))
    assert answer.immediate_response.status.code == 503
    headers = {
        each.header.key: each.header.raw_value for each in answer.immediate_response.headers.set_headers
    }
    assert headers == {"content-type": b"application/json", "retry-after": b"1"}
    assert json.loads(answer.immediate_response.body)["error"]["code"] == "unavailable"


@pytest.mark.parametrize("modes", [None, ProtocolConfiguration(request_body_mode=FULL_DUPLEX)])
def test_bodies_are_streamed_through(gateway: Gateway, modes: ProtocolConfiguration | None) -> None:
    chunks = [b'{"prompt": "', b"x" * 100_000, b'"}']
    messages = [ProcessingRequest(request_headers=HEADERS, protocol_config=modes)]
    messages += [ProcessingRequest(request_body=HttpBody(body=chunk)) for chunk in chunks]
    messages.append(ProcessingRequest(request_body=HttpBody(end_of_stream=True)))
    first, *bodies = gateway.process(*messages)
    assert destinations(first)
    sent = [each.request_body.response.body_mutation.streamed_response for each in bodies]
    assert [each.body for each in sent] == [*chunks, b""]
    assert [each.end_of_stream for each in sent] == [False, False, False, True]


def test_bodies_that_are_only_shown_are_not_sent_back(gateway: Gateway) -> None:
    modes = ProtocolConfiguration(
        request_body_mode=ProcessingMode.BUFFERED, response_body_mode=ProcessingMode.STREAMED
    )
    _, request, response = gateway.process(
        ProcessingRequest(request_headers=HEADERS, protocol_config=modes),
        ProcessingRequest(request_body=HttpBody(body=bytes(8 << 20), end_of_stream=True)),
        ProcessingRequest(response_body=HttpBody(body=b"data: ")),
    )
    assert not request.request_body.HasField("response")
    assert not response.response_body.HasField("response")


def test_everything_of_a_response_is_answered(gateway: Gateway) -> None:
    answers = gateway.process(
        ProcessingRequest(request_headers=HEADERS),
        ProcessingRequest(request_trailers=HttpTrailers()),
        ProcessingRequest(response_headers=HttpHeaders()),
        ProcessingRequest(response_body=HttpBody(body=b"data: 1", end_of_stream=True)),
        ProcessingRequest(response_trailers=HttpTrailers()),
    )
    kinds = ["request_headers", "request_trailers", "response_headers", "response_body", "response_trailers"]
    assert [answer.WhichOneof("response") for answer in answers] == kinds
    assert answers[3].response_body.response.body_mutation.streamed_response.body == b"data: 1"


def test_a_gateway_that_only_tells_gets_no_answer(gateway: Gateway) -> None:
    assert gateway.process(ProcessingRequest(request_headers=HEADERS, observability_mode=True)) == []


def test_a_message_of_no_kind_is_refused(gateway: Gateway) -> None:
    with pytest.raises(grpc.RpcError) as error:
        gateway.process(ProcessingRequest())
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_fronts_that_are_not_ready_are_not_chosen_and_health_says_so(gateway: Gateway) -> None:
    """Health Checking, and Destination Endpoint: 503 if there are no ready endpoints."""
    services = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "")
    blue, green = gateway.fronts
    assert [gateway.health(service) for service in services] == ["SERVING"] * 3
    blue.ready_status = 404
    gateway.wait_until(green.address)
    green.ready_status = 404
    gateway.wait_until()
    [answer] = gateway.process(ProcessingRequest(request_headers=HEADERS))
    assert answer.immediate_response.status.code == 503
    assert [gateway.health(service) for service in services] == ["NOT_SERVING"] * 3
    assert gateway.health("liveness") == "SERVING"
    blue.ready_status = green.ready_status = 200
    gateway.wait_until(blue.address, green.address)
    with pytest.raises(grpc.RpcError) as error:
        gateway.health("other")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_requests_end_before_a_picker_that_is_told_to_end() -> None:
    front, body = StubFront("127.0.0.1"), threading.Event()

    def lasting() -> Iterator[ProcessingRequest]:
        yield ProcessingRequest(request_headers=HEADERS)
        body.wait(DEADLINE_S)
        yield ProcessingRequest(request_body=HttpBody(body=b"{}", end_of_stream=True))

    with (
        front.served(),
        picker(front.url) as running,
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        gateway = Gateway((front, front), channel)
        gateway.wait_until(front.address)
        answers = gateway.begin(lasting())
        assert destinations(next(answers))
        running.tell_to_end()

        def refuses() -> bool:
            with contextlib.suppress(grpc.RpcError):
                gateway.process(ProcessingRequest(request_headers=HEADERS))
                return False
            return True

        eventually(refuses, "new requests are refused")
        body.set()
        [answer] = answers
        assert answer.request_body.response.body_mutation.streamed_response.end_of_stream


def test_gateways_reach_it_by_tls(tmp_path: Path) -> None:
    chain, key = self_signed(tmp_path, "DNS:localhost")
    trusted = grpc.ssl_channel_credentials(chain.read_bytes())
    with (
        picker("http://127.0.0.1:9", f"--tls-cert={chain}", f"--tls-key={key}") as running,
        grpc.secure_channel(f"localhost:{running.port}", trusted) as channel,
    ):
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = HealthStub(channel).Check(request, timeout=DEADLINE_S, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_request_counts_at_the_front_that_has_served_it() -> None:
    """Destination Endpoint Served."""
    fronts = WatchedFronts(lambda: 0.0)
    for name in ("a:80", "b:80"):
        fronts.is_ready(name, f"http://{name}", 1)
    stream = ProcessingStream(fronts)
    answer = stream.answer(ProcessingRequest(request_headers=HEADERS))
    assert answer is not None
    first, second = destinations(answer)
    assert fronts.choose()[0] == second
    struct = Struct()
    struct.update({"x-gateway-destination-endpoint-served": second})
    metadata = Metadata(filter_metadata={"envoy.lb": struct})
    stream.answer(ProcessingRequest(response_headers=HttpHeaders(), metadata_context=metadata))
    assert fronts.choose()[0] == first
    fronts.begins(first)
    stream.close()
    stream.close()
    assert fronts.choose()[0] == second


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mooncake:8000"], "mooncake:8000: expected http://host:port"),
        (["http://a:80", "--listen", "9002"], "--listen 9002: expected host:port"),
        (["http://a:99999"], "http://a:99999: expected a port up to 65535"),
        (["http://a:80", "--listen", "[::]:65536"], "--listen [::]:65536: expected a port up to 65535"),
        (["http://a:80", "--finish-s=-1"], "--finish-s -1: expected a finite number that is 0 or more"),
        (["http://a:80", "--finish-s", "nan"], "--finish-s nan: expected a finite number"),
        (["http://a:80", "--finish-s", "inf"], "--finish-s inf: expected a finite number"),
        (["http://a:80", "--tls-cert", "c.pem"], "--tls-cert and --tls-key go together"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["http://a:80", "--tls-cert", "none.pem", "--tls-key", "none.key"], "cannot read none.pem"),
        (["http://a:80", "--listen", "203.0.113.1:9002"], "cannot listen at 203.0.113.1:9002"),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {told}")
