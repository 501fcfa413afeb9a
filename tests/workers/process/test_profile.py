"""What is measured for a profile, on a tiny model."""

import time

import torch

from tests.tiny_models import tiny_model
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.execution.executor import Executor
from workers.execution.model_spec import model_spec
from workers.process.profile import DecodeSize, PrefillSize, Profiler, grid

PAGE_SIZE = 8


def profiler(num_pages: int = 64) -> Profiler:
    spec = model_spec(tiny_model("llama2").config.to_dict())
    model = DecoderModel(spec, range(spec.num_layers), torch.float32)
    model.init_dummy_weights()
    kv = DeviceKVCache(spec, model.layers, num_pages, PAGE_SIZE, torch.float32)
    return Profiler(Executor(model, kv), prefill_chunk=32)


def test_the_grid_stays_within_memory_positions_and_batch() -> None:
    sizes = grid(max_tokens=3000, max_position=2048, max_batch=8)
    prefills = [size for size in sizes if isinstance(size, PrefillSize)]
    decodes = [size for size in sizes if isinstance(size, DecodeSize)]
    assert max(sum(prefill) for prefill in prefills) <= 2048
    assert {prefill.num_cached_tokens for prefill in prefills} == {0, 512}
    assert max(size.batch_size for size in decodes) == 8
    assert max(size.batch_size * (size.num_context_tokens + 1) for size in decodes) <= 3000


def test_every_size_is_measured_and_gives_its_pages_back() -> None:
    measuring = profiler()
    sizes: list[PrefillSize | DecodeSize] = [
        PrefillSize(16, 0),
        PrefillSize(64, 40),
        PrefillSize(1, 33),
        DecodeSize(1, 8),
        DecodeSize(4, 65),
    ]
    for size in sizes:
        begun_s = time.perf_counter()
        seconds = measuring.seconds(size)
        assert seconds is not None
        assert 0 < seconds < time.perf_counter() - begun_s
        assert measuring.num_free_pages == 64


def test_what_is_larger_than_something_too_long_is_left_out() -> None:
    measuring = profiler()
    measuring.too_long.append(PrefillSize(16, 8))
    assert measuring.seconds(PrefillSize(16, 8)) is None
    assert measuring.seconds(PrefillSize(32, 8)) is None
    assert measuring.seconds(PrefillSize(32, 0)) is not None
    assert measuring.seconds(DecodeSize(16, 8)) is not None
