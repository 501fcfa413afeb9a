"""Copies of whole blocks: a call returns when the device has ended what the call gave it."""

from collections.abc import Sequence

import pytest
import torch

from workers.decode.blocks.block_transfers import BlockPair, BlockTransfers
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.spec import ModelSpec
from workers.kvcache.copies import BlockCopy, LoadedLayer, Mark, StagedLayer

SPEC = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 8, 64)
NUM_LAYERS = 4


class MarkOf:
    """The mark behind a layer's load on the device."""

    def __init__(self, layer: int, awaited: list[int]) -> None:
        self._layer, self._awaited = layer, awaited

    def synchronize(self) -> None:
        self._awaited.append(self._layer)


class DeviceLoads:
    """LayerCopies whose loads end on the device later. The load of layer `failing` raises OSError."""

    def __init__(self, failing: int | None = None) -> None:
        self._failing = failing
        self.awaited: list[int] = []

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        if layer == self._failing:
            raise OSError("not loaded")
        return LoadedLayer(MarkOf(layer, self.awaited), [])  # type: ignore[arg-type]

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> None:
        pass

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        return [0] * len(blocks)

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass


def transfers_of(copies: DeviceLoads) -> BlockTransfers:
    return BlockTransfers(copies, DeviceKVCache(SPEC, range(NUM_LAYERS), 2, 4, torch.float32))


async def test_a_load_waits_for_every_layer() -> None:
    copies = DeviceLoads()
    assert await transfers_of(copies).load([BlockPair(0, 0)]) == []
    assert copies.awaited == list(range(NUM_LAYERS))


async def test_a_load_that_fails_waits_for_the_layers_before() -> None:
    """Otherwise the device would write to pages that are others' by then."""
    copies = DeviceLoads(failing=2)
    with pytest.raises(OSError, match="not loaded"):
        await transfers_of(copies).load([BlockPair(0, 0)])
    assert copies.awaited == [0, 1]
