"""What computes on the device."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from tests.tiny_models import tiny_model
from workers.engine.batch import Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.execution.executor import Executor
from workers.execution.model_spec import model_spec
from workers.kvcache.layerwise import LayerTransfers, PassPart


class FakeModel:
    """The second stage of two; notes where its layers find their input."""

    layers = range(1, 2)
    shard = None

    def __init__(self) -> None:
        self.devices: list[str] = []

    def forward_layer(self, layer: int, hidden: torch.Tensor, *_: object) -> torch.Tensor:
        self.devices.append(hidden.device.type)
        return hidden


def test_hidden_states_of_the_stage_before_come_to_the_device() -> None:
    """They arrive in host memory. The device is one without memory, so that no GPU is needed."""
    spec = model_spec(tiny_model("smollm2").config.to_dict())
    kv, model = DeviceKVCache(spec, FakeModel.layers, 2, 8, torch.float32, "meta"), FakeModel()
    part = PassPart(Chunk([1, 2], 0, [0]), [], [], lambda _: True, lambda *_: None)
    transfers: Any = SimpleNamespace(
        launch_load=lambda *_: None, wait_loaded=lambda *_: None, launch_store=lambda *_: None
    )
    executor = Executor(cast(DecoderModel, model), kv)
    executor.prefill([part], cast(LayerTransfers, transfers), torch.zeros(2, spec.hidden_size))
    assert model.devices == ["meta"]
