"""Parts of a pass whose layer a GPU copies to pinned memory together, without a GPU."""

from collections.abc import Sequence

import numpy as np
import pytest
from torch import empty

from tests.deadline import DEADLINE_S
from workers.engine.batch import Chunk
from workers.kvcache.copies import MOST_STAGED, BlockCopy, LoadedLayer, Mark, StagedLayer
from workers.kvcache.layerwise import LayerTransfers, PassPart, PromptBlock


class StagingCopies:
    """LayerCopies that stage each block at its device page's number. `failing`: a page that is not stored."""

    def __init__(self, failing: int | None = None) -> None:
        self._failing = failing
        self.staged: list[tuple[int, list[int]]] = []
        self.stored: dict[int, list[int]] = {}

    def load(self, layer: int, blocks: Sequence[BlockCopy], free: Mark) -> LoadedLayer:
        return LoadedLayer(None, [])

    def stage(self, layer: int, blocks: Sequence[BlockCopy], computed: Mark) -> StagedLayer:
        pages = [block.device_page for block in blocks]
        self.staged.append((layer, pages))
        return StagedLayer(empty(0), np.array(pages, np.int64), None)  # type: ignore[arg-type]

    def store(self, layer: int, blocks: Sequence[BlockCopy], staged: StagedLayer | None) -> list[int]:
        assert staged is not None
        if blocks[0].device_page == self._failing:
            raise OSError("not stored")
        self.stored[blocks[0].device_page] = staged.places.tolist()
        return [0] * len(blocks)

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass


def part_of(*pages: int, layer: int = 0) -> PassPart:
    blocks = [PromptBlock(page, page, layer) for page in pages]
    return PassPart(Chunk([1], 0, list(pages)), [], blocks, lambda _: True, lambda *_: None)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_part_stores_its_own_blocks_of_what_was_staged_together(overlap: bool) -> None:
    copies = StagingCopies()
    transfers = LayerTransfers(copies, overlap=overlap)
    dropped, later = part_of(9), part_of(8, layer=1)
    dropped.is_dropped = True
    transfers.launch_store(0, [part_of(1, 2), dropped, part_of(3), later, part_of(), part_of(4, 5, 6)])
    transfers.launch_store(0, [dropped, later])
    transfers.close()
    assert copies.staged == [(0, [1, 2, 3, 4, 5, 6])]
    assert copies.stored == {1: [1, 2], 3: [3], 4: [4, 5, 6]}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pass_of_more_parts_than_may_be_staged_is_stored_though_stores_fail(overlap: bool) -> None:
    copies = StagingCopies(failing=0)
    transfers = LayerTransfers(copies, overlap=overlap)
    parts = [part_of(page) for page in range(1, 2 * MOST_STAGED)]
    failing = [part_of(0) for _ in range(2 * MOST_STAGED)]
    transfers.launch_store(0, [*failing, *parts])
    for part in failing:
        assert isinstance(part.storing[0].exception(DEADLINE_S), OSError)
    for part in parts:
        part.storing[0].result(DEADLINE_S)
    transfers.close()
    assert len(copies.stored) == len(parts)
