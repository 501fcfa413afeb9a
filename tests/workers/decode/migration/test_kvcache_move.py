"""The memory of a move, before it is complete and afterwards."""

import weakref
from collections.abc import Sequence

import pytest
import torch

from kernels.cpu.memory import HUGE_PAGE_BYTES
from kernels.cpu.page_copy import PageCopies
from tests.kernels.cpu.isas import SUPPORTED, library_of
from tests.kernels.cpu.test_memory import resident_bytes
from workers.decode.migration import kvcache_move
from workers.decode.migration.kvcache_move import KVCacheMove
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.spec import ModelSpec
from workers.errors import ModulesStayError

LIBRARY = library_of(SUPPORTED[0])
SPEC = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 64, 64)
PAGES_OF_HUGE_PAGE = 256
"""Pages of a layer in a huge page."""
PAGE_BYTES = 2 * HUGE_PAGE_BYTES // PAGES_OF_HUGE_PAGE
"""Bytes of a page in both layers."""


def begun(first_used: int = 0) -> tuple[DeviceKVCache, KVCacheMove]:
    """Return a cache of ten huge pages a layer, two of them in use, from `first_used` on, and a move to twice
    as many pages."""
    kv = DeviceKVCache(SPEC, range(2), 10 * PAGES_OF_HUGE_PAGE, 16, torch.float32)
    not_used = kv.pages.allocate(first_used * PAGES_OF_HUGE_PAGE)
    for page in kv.pages.allocate(2 * PAGES_OF_HUGE_PAGE):
        kv.layer(0)[page], kv.layer(1)[page] = page, -page
    kv.pages.free(not_used)
    return kv, KVCacheMove(LIBRARY, kv, 20 * PAGES_OF_HUGE_PAGE, None)


def bytes_in_memory(kv: DeviceKVCache) -> list[int]:
    return [resident_bytes(kv.layer(layer).view(-1).view(torch.uint8)) for layer in kv.layers]


@pytest.mark.parametrize("first_used", [0, 5, 8])
def test_pages_that_will_be_used_have_memory_before_the_pause(first_used: int) -> None:
    kv, move = begun(first_used)
    expected_bytes = move.expected_bytes
    move.take_memory()
    move.copy(kv.pages.used())
    move.complete()
    assert bytes_in_memory(kv) == [4 * HUGE_PAGE_BYTES] * 2  # a tenth of all pages may come into use
    assert expected_bytes == sum(bytes_in_memory(kv))


def test_all_pages_that_are_left_may_come_into_use() -> None:
    kv, _ = begun()
    kv.pages.allocate(kv.pages.num_free)
    move = KVCacheMove(LIBRARY, kv, kv.pages.num_pages + PAGES_OF_HUGE_PAGE, None)
    assert move.expected_bytes == 2 * 11 * HUGE_PAGE_BYTES


def test_a_move_that_is_given_up_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, move = begun()
    taken = list[torch.Tensor]()

    def take(memory: torch.Tensor) -> None:
        taken.append(memory)
        move.give_up()

    monkeypatch.setattr(kvcache_move, "populate", take)
    with pytest.raises(ModulesStayError, match="the move was given up"):
        move.take_memory()
    assert len(taken) == 1


def test_a_move_that_is_given_up_copies_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache_move, "COPIED_BYTES", 10 * PAGE_BYTES)
    kv, move = begun()
    copy = PageCopies.copy

    def copy_some(copies: PageCopies, pages: Sequence[int]) -> None:
        copy(copies, pages)
        move.give_up()

    monkeypatch.setattr(PageCopies, "copy", copy_some)
    with pytest.raises(ModulesStayError, match="the move was given up"):
        move.copy(kv.pages.used())
    assert move.copied_bytes == 10 * PAGE_BYTES


def test_the_memory_before_is_kept_by_nothing_but_the_result() -> None:
    kv, move = begun()
    before = weakref.ref(kv.layer(0).untyped_storage())
    copied = kv.pages.used()
    move.copy(copied)
    given_up = move.complete()
    is_kept = [before() is not None]
    given_up.clear()
    is_kept.append(before() is not None)
    assert is_kept == [True, False]
    assert move.copied_bytes == len(copied) * PAGE_BYTES
    for page in copied:
        assert (kv.layer(0)[page] == page).all()
        assert (kv.layer(1)[page] == -page).all()
