"""One HTTP request in Envoy's external processing: its messages, and the answer to each message.

The front is chosen when the headers have arrived. The prompt is not needed for this choice, as the Conductor
places the request later. Bodies are passed on unchanged.

Owns: the messages of external processing. Does not know: gRPC, how a front is chosen.
"""

import json
from collections.abc import Iterable

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from conductor.picker.fronts import WatchedFront, WatchedFronts

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LOAD_BALANCING, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"
"""The namespaces in Envoy's metadata: load balancing, and the gateway's subset of endpoints."""
UNAVAILABLE = 503
NO_FRONT = {
    "error": {
        "message": "no front is ready",
        "type": "server_error",
        "param": None,
        "code": "unavailable",
    }
}
RETRY_AFTER_S = 1
"""Seconds after which a client may try again, sent with `NO_FRONT`."""


class ProcessingStream:
    """One HTTP request and its response in Envoy's external processing.

    The caller must close the stream when the request has ended.
    """

    def __init__(self, fronts: WatchedFronts) -> None:
        self._fronts = fronts
        self._front: WatchedFront | None = None
        """The front at which the request is counted; None if it is counted nowhere."""
        self._streams_request = self._streams_response = True

    def answer(self, message: ProcessingRequest) -> ProcessingResponse | None:
        """Return the answer to a message; None for a message to which Envoy expects no answer.

        Raises ValueError for a message of no known kind.
        """
        if message.HasField("protocol_config"):
            # Gateways other than Envoy may not send this: the protocol demands full duplex then.
            modes, full = message.protocol_config, ProcessingMode.FULL_DUPLEX_STREAMED
            self._streams_request = modes.request_body_mode == full
            self._streams_response = modes.response_body_mode == full
        answer = self._answer(message)
        return None if message.observability_mode else answer

    def close(self) -> None:
        """Stop counting the request at its front. Idempotent."""
        self._move(None)

    def _answer(self, message: ProcessingRequest) -> ProcessingResponse:
        kind = message.WhichOneof("request")
        match kind:
            case "request_headers":
                return self._choose(message.metadata_context)
            case "request_body":
                return ProcessingResponse(request_body=_body(message.request_body, self._streams_request))
            case "response_headers":
                if served := _values(message.metadata_context, LOAD_BALANCING, SERVED):
                    self._move(served[0])
                return ProcessingResponse(response_headers=HeadersResponse())
            case "response_body":
                return ProcessingResponse(response_body=_body(message.response_body, self._streams_response))
            case "request_trailers":
                return ProcessingResponse(request_trailers=TrailersResponse())
            case "response_trailers":
                return ProcessingResponse(response_trailers=TrailersResponse())
        raise ValueError("a message of no known kind")

    def _choose(self, metadata: Metadata) -> ProcessingResponse:
        chosen = self._fronts.choose(_values(metadata, SUBSET_HINT, SUBSET))
        if not chosen:
            return ProcessingResponse(immediate_response=_unavailable())
        self._move(chosen[0])
        addresses = ",".join(chosen)
        for_load_balancing = Struct()
        for_load_balancing.update({LOAD_BALANCING: {DESTINATION: addresses}})
        mutation = HeaderMutation(set_headers=_headers([(DESTINATION, addresses)]))
        response = CommonResponse(header_mutation=mutation, clear_route_cache=True)
        return ProcessingResponse(
            request_headers=HeadersResponse(response=response), dynamic_metadata=for_load_balancing
        )

    def _move(self, address: str | None) -> None:
        """Count the request at the front of this address instead of its earlier front; None for no front."""
        if self._front is not None:
            self._fronts.ends(self._front)
        self._front = None if address is None else self._fronts.begins(address)


def _body(body: HttpBody, is_streamed: bool) -> BodyResponse:
    if not is_streamed:
        return BodyResponse()
    same = StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=same)))


def _unavailable() -> ImmediateResponse:
    headers = [("content-type", "application/json"), ("retry-after", str(RETRY_AFTER_S))]
    return ImmediateResponse(
        status=HttpStatus(code=UNAVAILABLE),
        headers=HeaderMutation(set_headers=_headers(headers)),
        body=json.dumps(NO_FRONT).encode(),
        details="no front is ready",
    )


def _headers(headers: Iterable[tuple[str, str]]) -> list[HeaderValueOption]:
    """Return mutations that set these headers and replace the client's headers of the same names."""
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers
    ]


def _values(metadata: Metadata, namespace: str, key: str) -> list[str] | None:
    """Return the metadata's values at `namespace` and `key`; None if there is no such key.

    In the metadata the values are a list, or a text in which commas separate them.
    """
    fields = metadata.filter_metadata[namespace].fields if namespace in metadata.filter_metadata else {}
    if key not in fields:
        return None
    value = fields[key]
    texts = [each.string_value for each in value.list_value.values] or [value.string_value]
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
