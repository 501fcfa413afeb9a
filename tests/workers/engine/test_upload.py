"""Arrays on the device: the same numbers, wherever it is."""

import numpy as np

from tests.triton_device import DEVICE
from workers.engine.upload import upload

ARRAYS = (np.arange(3), np.arange(8).reshape(2, 4), np.empty(0, dtype=np.int64), np.arange(5) - 2)


def test_every_array_arrives_in_its_shape_at_an_aligned_address() -> None:
    uploaded = upload(ARRAYS, DEVICE)
    for tensor, array in zip(uploaded, ARRAYS, strict=True):
        assert tensor.device.type == DEVICE.type
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()
        assert tensor.data_ptr() % 16 == 0
