"""The memory of device pages."""

import subprocess
import sys
import threading
import weakref

import pytest
import torch

from kernels.cpu.memory import HUGE_PAGE_BYTES
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.test_memory import resident_bytes
from workers.engine.kvcache import device_kvcache
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.kvcache.device_pages import OutOfPages
from workers.engine.spec import ModelSpec

SPEC = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 8, 64)


@pytest.fixture
def kv() -> DeviceKVCache:
    return DeviceKVCache(SPEC, range(1, 3), num_pages=6, page_size=4, dtype=torch.float32)


def test_a_rank_has_pages_of_its_heads_only() -> None:
    spec = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 6, 3, 8, 64)
    kv = DeviceKVCache(spec, range(1, 3), 6, 4, torch.float32, kv_heads=range(1, 3))
    assert kv.layer(1).shape == (6, 2, 2, 4, 8)
    assert DeviceKVCache(spec, range(1), 1, 4, torch.float32).kv_heads == range(3)


def test_another_arrangement_has_other_memory(kv: DeviceKVCache) -> None:
    before = [kv.layer(1), kv.layer(2)]
    layers = kv.new_layers(9, 1)
    returned = kv.rearrange(layers, None)
    assert [pages.data_ptr() for pages in returned] == [pages.data_ptr() for pages in before]
    assert (kv.layer(2).data_ptr(), kv.pages.num_pages) == (layers[1].data_ptr(), 9)


def test_layers_are_numbered_as_in_the_whole_model(kv: DeviceKVCache) -> None:
    assert kv.layer(1).shape == (6, 1, 2, 4, 8)
    assert kv.layer(1).data_ptr() != kv.layer(2).data_ptr()
    with pytest.raises(AssertionError, match="not in"):
        kv.layer(0)


def test_memory_that_is_taken_early_keeps_what_passes_have_written(kv: DeviceKVCache) -> None:
    kv.layer(2)[3].fill_(1.5)
    kv.take_memory()
    assert kv.layer(1).sum() == 0
    assert (kv.layer(2)[3] == 1.5).all()


def test_lent_pages_are_the_last_ones_and_their_memory_is_given_back() -> None:
    spec = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 64, 64)
    kv = DeviceKVCache(spec, range(2), num_pages=8, page_size=16, dtype=torch.float32)
    used = kv.pages.allocate(2)
    for layer in kv.layers:
        kv.layer(layer).fill_(1.5)
    lent = kv.lend(3)
    assert (used, lent) == ([0, 1], [5, 6, 7])
    assert (kv.pages.num_usable, kv.pages.num_free) == (5, 3)
    for layer in kv.layers:
        assert (kv.layer(layer)[:5] == 1.5).all()
        assert not kv.layer(layer)[5:].any()
    with pytest.raises(OutOfPages):
        kv.lend(4)
    kv.end_loan(lent)
    assert (kv.pages.num_usable, kv.pages.num_free) == (8, 6)


def test_memory_that_is_taken_early_is_not_that_of_lent_pages() -> None:
    spec = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 64, 64)
    kv = DeviceKVCache(spec, range(2), num_pages=1024, page_size=16, dtype=torch.float32)
    lent = kv.lend(300)
    kv.take_memory()
    for layer in kv.layers:
        pages = kv.layer(layer)
        assert resident_bytes(pages[lent[0] :].reshape(-1).view(torch.uint8)) == 0
        assert resident_bytes(pages[:512].reshape(-1).view(torch.uint8)) == 4 << 20
    kv.end_loan(lent)


@pytest.fixture
def large() -> DeviceKVCache:
    """Several huge pages a layer."""
    spec = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 64, 64)
    return DeviceKVCache(spec, range(2), 3 * HUGE_PAGE_BYTES // 8192, 16, torch.float32)


def test_memory_of_an_earlier_arrangement_is_neither_taken_nor_kept(
    large: DeviceKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, num_taken = weakref.ref(large.layer(0)), 0
    memory = large.layer(0).untyped_storage().data_ptr()

    def take_and_rearrange(_: torch.Tensor) -> None:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 1:
            large.rearrange(large.new_layers(large.pages.num_pages, 1), None)

    monkeypatch.setattr(device_kvcache, "populate", take_and_rearrange)
    large.take_memory()
    assert num_taken == 1
    assert before() is None
    assert large.layer(0).untyped_storage().data_ptr() != memory


def test_a_cache_that_is_reset_takes_its_memory_early(large: DeviceKVCache) -> None:
    large.reset()
    for thread in threading.enumerate():
        if thread.name == "kvcache-memory":
            thread.join()
    for layer in large.layers:
        assert resident_bytes(large.layer(layer).view(-1).view(torch.uint8)) == 3 * HUGE_PAGE_BYTES


def test_memory_is_not_taken_while_a_cache_is_reset(
    large: DeviceKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_layers = large.new_layers

    def take_first(num_pages: int, num_heads: int) -> list[torch.Tensor]:
        large.take_memory()  # as a thread that was started a moment before
        return new_layers(num_pages, num_heads)

    monkeypatch.setattr(large, "new_layers", take_first)
    large.reset()
    assert large.pages.num_free == large.pages.num_own


def test_the_thread_that_takes_memory_ends_soon_and_before_the_process() -> None:
    probe = f"""
import threading, torch
from workers.engine.kvcache import device_kvcache
from workers.engine.spec import ModelSpec

began, num_taken = threading.Event(), 0

def populate(memory):
    global num_taken
    num_taken += 1
    began.set()
    threading.main_thread().join({DEADLINE_S})

class Cache(device_kvcache.DeviceKVCache):
    def take_memory(self):
        super().take_memory()
        print(num_taken, flush=True)

device_kvcache.populate = populate
spec = ModelSpec("LlamaForCausalLM", 32, 16, 16, 4, 2, 1, 64, 64)
cache = Cache(spec, range(2), {3 * HUGE_PAGE_BYTES // 8192}, 16, torch.float32)
cache.take_memory_beside()
began.wait({DEADLINE_S})
"""
    command = [sys.executable, "-c", probe]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3 * DEADLINE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


def test_a_cache_that_is_reset_never_has_memory_twice(
    large: DeviceKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, new_layers = weakref.ref(large.layer(1)), large.new_layers

    def checked(num_pages: int, num_heads: int) -> list[torch.Tensor]:
        assert before() is None
        return new_layers(num_pages, num_heads)

    monkeypatch.setattr(large, "new_layers", checked)
    large.reset()
    assert large.pages.num_free == large.pages.num_own
