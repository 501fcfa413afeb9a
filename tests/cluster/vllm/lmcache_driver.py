"""A program that drives our plugin as LMCache does, with LMCache's own factory, keys, objects and events.

    python lmcache_driver.py      (calls on stdin, answers on stdout, one JSON line each)

Owns: the objects. Does not know: what is expected.
"""

import json
import os
import select
import sys
import traceback
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

SHAPE, DTYPE = torch.Size([2, 3, 8, 16]), torch.bfloat16
NUM_BYTES = SHAPE.numel() * DTYPE.itemsize
DEADLINE_MS = 60_000


def object_of(seed: int | None) -> Any:
    """Return an object with random bytes; with zeros if `seed` is None."""
    raw = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    if seed is not None:
        raw.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return TensorMemoryObj(raw, MemoryObjMetadata(SHAPE, DTYPE, 0, NUM_BYTES, 1), None)


def keys_of(numbers: list[int], salt: str = "") -> list[Any]:
    return [ObjectKey(bytes([number]) * 32, "a/model", 0, cache_salt=salt) for number in numbers]


class Driver:
    def __init__(self, params: dict[str, object]) -> None:
        config = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "kvstore.connectors.lmcache",
                "class_name": "MooncakeServeL2Adapter",
                "adapter_params": params,
            }
        )
        self.adapter = create_l2_adapter_from_registry(config)

    def store(self, numbers: list[int], salt: str = "") -> bool:
        adapter = self.adapter
        task = adapter.submit_store_task(keys_of(numbers, salt), [object_of(number) for number in numbers])
        wait(adapter.get_store_event_fd())
        result = adapter.pop_completed_store_tasks()[task]
        assert result.bytes_transferred() == (NUM_BYTES * len(numbers) if result.is_successful() else 0)
        return bool(result.is_successful())

    def look_up(self, numbers: list[int], salt: str = "") -> list[int]:
        layouts = {0: MemoryLayoutDesc([SHAPE], [DTYPE])}
        task = self.adapter.submit_lookup_and_lock_task(keys_of(numbers, salt), layouts)
        wait(self.adapter.get_lookup_and_lock_event_fd())
        bitmap = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return list(bitmap.get_indices_list())

    def load(self, numbers: list[int], salt: str = "") -> list[int]:
        """Load objects, and return the positions of those that were loaded.

        Their bytes must be those stored.
        """
        objects = [object_of(None) for _ in numbers]
        task = self.adapter.submit_load_task(keys_of(numbers, salt), objects)
        wait(self.adapter.get_load_event_fd())
        loaded = list(self.adapter.query_load_result(task).get_indices_list())
        for position in loaded:
            assert torch.equal(objects[position].raw_tensor, object_of(numbers[position]).raw_tensor)
        return loaded

    def unlock(self, numbers: list[int], salt: str = "") -> None:
        self.adapter.submit_unlock(keys_of(numbers, salt))

    def delete(self, numbers: list[int]) -> None:
        self.adapter.delete(keys_of(numbers))

    def used(self) -> int:
        return int(self.adapter.get_usage().total_bytes_used) // NUM_BYTES


def wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(DEADLINE_MS), "the task has not ended"
    os.read(descriptor, 8)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what LMCache prints
    driver: Driver | None = None
    for line in sys.stdin:
        try:
            call = json.loads(line)
            if driver is None:
                driver = Driver(*call)
                answer: object = None
            else:
                answer = getattr(driver, call[0])(*call[1:])
            out.write(json.dumps({"answer": answer}) + "\n")
        except Exception as error:  # noqa: BLE001  # the test tells which it expects
            traceback.print_exc()
            out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
    if driver is not None:
        driver.adapter.close()


if __name__ == "__main__":
    main()
