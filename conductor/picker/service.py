"""The picker's gRPC server: external processing for gateways, and health for the kubelet.

Owns: this server. Does not know: messages of Envoy (`conductor.picker.processing_stream`), which fronts there
are.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from conductor.picker.fronts import WatchedFronts
from conductor.picker.processing_stream import ProcessingStream
from conductor.picker.watching import watch
from mooncake.errors import ConfigError

LIVENESS = "liveness"
LONGEST_MESSAGE_BYTES = 64 << 20
"""The most bytes of a message. A gateway that buffers bodies sends each body in one message."""
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


class Picker(ExternalProcessorServicer):  # type: ignore[misc]
    """The gRPC service of external processing: one stream for each HTTP request of a gateway."""

    def __init__(self, fronts: WatchedFronts) -> None:
        self._fronts = fronts

    async def Process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProcessingResponse]:
        """Answer the messages of one HTTP request."""
        with contextlib.closing(ProcessingStream(self._fronts)) as stream:
            async for message in request_iterator:
                try:
                    answer = stream.answer(message)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                if answer is not None:
                    yield answer


class Health(HealthServicer):  # type: ignore[misc]
    """The gRPC health service: it tells whether the picker lives, and whether it has a front to choose."""

    def __init__(self, fronts: WatchedFronts) -> None:
        self._fronts = fronts

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return the health of one service."""
        response = health_pb2.HealthCheckResponse
        if request.service != LIVENESS and request.service not in READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there are {LIVENESS} and {READINESS[1]}")
        serves = request.service == LIVENESS or bool(self._fronts.choose())
        return response(status=response.SERVING if serves else response.NOT_SERVING)


async def serve(
    clusters: Sequence[str], listen: str, certificate: tuple[Path, Path] | None, finish_s: float
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        clusters: The URL of the fronts of each cluster.
        listen: `host:port`; port 0 for any free port. The chosen port is printed.
        certificate: The files of the certificate chain and of its private key; None for no TLS.
        finish_s: The seconds that running requests have to end after the signal. The gateway breaks off the
            requests that remain.

    Raises:
        ConfigError: The address or the certificate cannot be used.
    """
    fronts = WatchedFronts(asyncio.get_running_loop().time)
    stopping = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", LONGEST_MESSAGE_BYTES)]
    server = grpc.aio.server(options=options)
    add_ExternalProcessorServicer_to_server(Picker(fronts), server)
    add_HealthServicer_to_server(Health(fronts), server)
    port = _add_port(server, listen, certificate)
    async with asyncio.TaskGroup() as group:
        watching = [group.create_task(watch(cluster, fronts)) for cluster in clusters]
        await server.start()
        print(f"listening on port {port}", flush=True)
        await stopping.wait()
        await server.stop(finish_s)
        for task in watching:
            task.cancel()


def _add_port(server: grpc.aio.Server, listen: str, certificate: tuple[Path, Path] | None) -> int:
    try:
        if certificate is None:
            return int(server.add_insecure_port(listen))
        chain, key = (path.read_bytes() for path in certificate)
        return int(server.add_secure_port(listen, grpc.ssl_server_credentials([(key, chain)])))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot listen at {listen}: {error}") from None
