"""Which devices a messenger uses, and when it may."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from messenger.rdma import cards
from messenger.rdma.cards import Cards, open_cards
from messenger.rdma.devices import FoundDevices, find_devices
from messenger.rdma.errors import RdmaUnavailableError
from messenger.rdma.memory import RdmaMemory
from mooncake.config.sections import MessengerConfig
from mooncake.errors import ConfigError, TransferError
from tests.kvstore.nodes import DEADLINE_S, SEGMENT_PAGE_BYTES, Node
from tests.messenger.fake_rdma import FakeAdapter, FakeNetwork, device

SEGMENT_BYTES = 4096


class Full(FakeAdapter):
    """A device that no memory can be registered with."""

    def register(self, buffer: memoryview) -> RdmaMemory:
        raise RdmaUnavailableError(f"{self.device} cannot register {len(buffer)} bytes of memory")


def adapters(*kinds: type[FakeAdapter]) -> list[FakeAdapter]:
    return [kind(FakeNetwork(), device(name)) for name, kind in zip("abc", kinds, strict=False)]


def segment() -> memoryview:
    return memoryview(bytearray(SEGMENT_BYTES))


async def test_a_device_that_cannot_take_the_segment_is_not_used() -> None:
    some = Cards(adapters(Full, FakeAdapter), is_demanded=True)
    await some.register(segment())
    assert some.names == ["b/1"]
    with pytest.raises(TransferError, match="a/1 is not in use"):
        await some.card("a/1")
    assert (await some.card("b/1")).memory.size_bytes == SEGMENT_BYTES


@pytest.mark.parametrize("is_demanded", [True, False])
async def test_rdma_that_is_demanded_and_cannot_have_the_segment_is_an_error(is_demanded: bool) -> None:
    none = Cards(adapters(Full), is_demanded=is_demanded)
    if is_demanded:
        with pytest.raises(ConfigError, match="transport: rdma, but a/1 cannot register"):
            await none.register(segment())
    else:
        await none.register(segment())
    with pytest.raises(TransferError, match="not in use"):
        await none.card("a/1")


async def test_who_needs_the_segment_waits_a_moment_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Cards(adapters(FakeAdapter))
    waiting = asyncio.create_task(late.card("a/1"))
    await asyncio.sleep(0)
    await late.register(segment())
    assert (await waiting).adapter.device.name == "a"
    monkeypatch.setattr(cards, "_REGISTERED_WITHIN_S", 0.01)
    with pytest.raises(TransferError, match="not registered for RDMA yet"):
        await Cards(adapters(FakeAdapter)).card("a/1")


def no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards.Topology, "discover", lambda: cards.Topology({}))


def test_rdma_that_is_demanded_and_not_there_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_rdma(monkeypatch)
    monkeypatch.setattr(cards, "find_devices", lambda: FoundDevices([], ["the cards are elsewhere"]))
    with pytest.raises(
        ConfigError,
        match=r"^messenger.transport: rdma, but there is no device to use: the cards are elsewhere$",
    ):
        open_cards(MessengerConfig(transport="rdma"))
    assert open_cards(MessengerConfig(transport="auto")).names == []


@pytest.mark.cluster
@pytest.mark.skipif(bool(find_devices().devices), reason="this machine has an RDMA device")
def test_a_messenger_without_the_rdma_that_is_demanded_does_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(Node(tmp_path, "prefill", 16 * SEGMENT_PAGE_BYTES, "rdma")) as node:
        node.start()
        assert node.process is not None
        assert node.process.wait(DEADLINE_S) == 3
    assert "error: messenger.transport: rdma, but there is no device to use: " in capfd.readouterr().err
