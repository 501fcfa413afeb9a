"""How the fronts of a cluster are found by its name."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from conductor.picker import watching
from conductor.picker.fronts import READY_FOR_S, WatchedFronts
from tests.conductor.picker.stub_fronts import StubFront
from tests.deadline import DEADLINE_S


@pytest.fixture
def front() -> Iterator[StubFront]:
    with StubFront("127.0.0.1").served() as served:
        yield served


class Names:
    """Takes the place of DNS: `fronts` is 127.0.0.1, and nobody says so when the server does not answer."""

    answers = True

    def __call__(self, host: str, port: int, *_: object) -> list[object]:
        assert host == "fronts"
        if not self.answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


def test_fronts_stay_ready_while_no_names_are_known(
    front: StubFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, now_s = Names(), 0.0
    fronts = WatchedFronts(lambda: now_s)

    async def until(addresses: list[str]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while fronts.choose() != addresses:
                await asyncio.sleep(0.01)

    async def watched() -> None:
        nonlocal now_s
        watch = asyncio.create_task(watching.watch(f"http://fronts:{front.address.split(':')[1]}", fronts))
        await until([front.address])
        names.answers = False
        now_s = 2 * READY_FOR_S
        assert fronts.choose() == []
        await until([front.address])
        front.ready_status = 404
        await until([])
        front.ready_status = 200
        await until([front.address])
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    monkeypatch.setattr(watching, "PERIOD_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", names)
    asyncio.run(watched())
