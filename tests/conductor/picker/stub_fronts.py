"""Fake fronts that answer `/ready`, and answer requests with a status and their own address."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class StubFront:
    """A fake front at an address of this host. `ready_status` and `status` can be changed while it serves."""

    def __init__(self, host: str) -> None:
        self.ready_status = self.status = 200
        self.bodies: list[bytes] = []
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self.url = f"http://{self.address}"

    @contextlib.contextmanager
    def served(self) -> Iterator["StubFront"]:
        routes = [Route("/ready", self._ready), Route("/{path:path}", self._answer, methods=["POST"])]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=[[self._socket]])
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join()

    async def _ready(self, _: Request) -> Response:
        return JSONResponse({"status": "ready", "num_prefill": 1, "num_decode": 1}, self.ready_status)

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        return JSONResponse({"front": self.address}, self.status)
