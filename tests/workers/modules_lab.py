"""A decode lab whose first decode instance can have modules at the second one."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import transformers

from messenger.transport.listeners import listen_tcp
from mooncake.messages.migration import (
    LayerRange,
    ModulesPart,
    ModulesPlace,
    PlaceModules,
    PreCopied,
    Prepared,
)
from mooncake.messages.requests import SamplingParams
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from tests.tiny_models import tiny_model
from tests.workers.decode_lab import Decoded, DecodeLab, Move, StartDecodeLab
from tests.workers.mini_cluster import FINGERPRINT, InstanceUnderTest, Sizes
from tests.workers.references import prompt_of
from workers.modules import connections
from workers.modules.connections import Owners
from workers.modules.hosting import ModulesHost

NUM_PAGES = 48
SIZES = Sizes(num_decode=2, num_device_pages=NUM_PAGES, num_pool_pages=160)
WITH_A_THIRD = Sizes(num_decode=3, num_device_pages=NUM_PAGES, num_pool_pages=160)
"""Sizes with a third decode instance, whose requests migrate to the owner."""


Part = int | LayerRange | float
"""The modules to move: a range of layers, a number of KV heads, or a share of sequences; 0 for none."""


def part_of(part: Part) -> ModulesPart:
    if isinstance(part, float):
        return ModulesPart(share=part)
    return ModulesPart(part) if isinstance(part, int) else ModulesPart(layers=part)


def wide_model() -> transformers.PreTrainedModel:
    """Return a model that the CPU's own kernels compute.

    It has 4 KV heads, and sliding windows in some layers.
    """
    return tiny_model(
        "qwen2_window",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_hidden_layers=3,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass(slots=True, eq=False)
class Pair:
    """Two instances of a lab, the owner of modules and its helper."""

    lab: DecodeLab
    owner: InstanceUnderTest
    helper: InstanceUnderTest
    path: str
    """The address of the helper."""
    numbers: "itertools.count[int]"
    listener: socket.socket
    """The socket at which the helper listens for owners on other hosts."""
    host: ModulesHost
    hosting: "asyncio.Task[None]"

    def order(self, part: Part) -> int:
        number = next(self.numbers)
        self.owner.decode.place_modules(PlaceModules(1, number, "d1", self.path, part_of(part)))
        return number

    async def ended(self, number: int) -> ModulesPlace:
        """Wait for the end of an ordered move, and return the place of the modules."""
        await until(lambda: self._place.number == number and not self._place.is_moving)
        return self._place

    async def place(self, part: Part) -> ModulesPlace:
        """Order a move, wait for its end, and return the place of the modules."""
        return await self.ended(self.order(part))

    async def move(self, part: Part) -> None:
        place = await self.place(part)
        assert (place.error, place.part) == ("", part_of(part))

    async def lose_helper(self) -> None:
        """End the helper's connections, as if its process had ended."""
        self.hosting.cancel()
        await asyncio.wait([self.hosting])
        self.listener.shutdown(socket.SHUT_RDWR)  # connections are refused until it listens again

    async def restart_helper(self) -> None:
        """Let the helper listen again."""
        self.listener.listen()
        if connections.is_remote(self.path):
            self.path = endpoint_of(self.listener)
        self.hosting = self.lab.group.create_task(self.host.run())
        await asyncio.sleep(0)  # it listens before it waits for anything

    def lose_owner(self) -> None:
        """Begin to end the owner's work and connections, as if its process ended."""
        for ref in self.owner.decode_jobs.refs:
            self.owner.decode_jobs.cancel(ref)
        assert self.owner.decoding is not None
        self.owner.decoding.cancel()

    async def owner_has_gone(self) -> None:
        """Wait until none of the owner's work runs. A session that follows has all modules again."""
        assert self.owner.decoding is not None
        await asyncio.wait([self.owner.decoding])
        await until(lambda: not self.owner.is_busy)
        self.owner.executor.kv.reset()
        self.owner.executor.load_freed_layers()

    def begin(
        self, name: str, max_tokens: int, at: InstanceUnderTest, num_tokens: int = 8, *, inline: bool = True
    ) -> Decoded:
        """Order a greedy request. Its prompt depends on its length alone."""
        sampling = SamplingParams(max_tokens, temperature=0)
        return self.lab.begin(name, prompt_of(num_tokens, num_tokens), sampling, at, inline=inline)

    @property
    def _place(self) -> ModulesPlace:
        return self.owner.decode.modules


def endpoint_of(listener: socket.socket) -> str:
    """Return the address of a helper for owners on other hosts. It changes with each `listen`."""
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def hosting(instance: InstanceUnderTest, path: str, owners: Owners | None = None) -> ModulesHost:
    executor = instance.executor
    return ModulesHost(
        "d1",
        path,
        FINGERPRINT,
        executor.model,
        executor.kv,
        lambda: instance.decode.most_pages,
        lambda: bool(instance.decode.modules.helper),
        owners,
    )


@contextlib.asynccontextmanager
async def paired(
    start: StartDecodeLab,
    folder: Path,
    sizes: Sizes = SIZES,
    *,
    is_remote: bool = False,
    is_prefill: bool = False,
) -> AsyncIterator[Pair]:
    """Make a context with an owner and its helper, the second decode instance.

    The owner is the first decode instance; if `is_prefill`, the prefill instance. They are connected through
    shared memory; if `is_remote`, over TCP, as between two hosts.
    """
    with listen_tcp("127.0.0.1", 0) as listener:
        async with start(sizes=sizes) as lab:
            path = str(folder / "modules.sock")
            owner, helper = lab.instances[0] if is_prefill else lab.decodes[0], lab.decodes[1]
            host = hosting(helper, path, Owners(listener, CLUSTER_KEY))
            task = lab.group.create_task(host.run())
            address = endpoint_of(listener) if is_remote else path
            pair = Pair(lab, owner, helper, address, itertools.count(1), listener, host, task)
            await until(Path(path).exists)
            yield pair
            pair.hosting.cancel()
            await lab.assert_nothing_is_held()


async def prepared(pair: Pair, decoded: Decoded) -> Move:
    """Begin to move a request to the owner, and return the migration once its full blocks are loaded there.

    The request must have more output to draw until then.
    """
    move = Move(pair.lab, decoded, pair.owner)
    assert isinstance(await move.pre_copy(), PreCopied)
    assert isinstance(await move.prepare(), Prepared)
    return move
