"""The worker's side: loads and stores between the engine's pages and the pool.

Owns: what a step begins and ends. Does not know: vLLM's classes, requests.
"""

from dataclasses import dataclass

from kvstore.connectors.vllm import pages
from kvstore.connectors.vllm.link import PoolLink
from kvstore.connectors.vllm.loads import Loads
from kvstore.connectors.vllm.pages import EnginePages, Order
from kvstore.connectors.vllm.plans import Load, StepPlan
from kvstore.connectors.vllm.stores import Stores
from messenger.wire import checksums


@dataclass(frozen=True, slots=True)
class Memory:
    """The engine's pages: the address of page 0 of each layer. `keeps` keeps them mapped."""

    layers: list[int]
    page_stride: int
    num_pages: int
    keeps: object


class WorkerSide:
    """What the connector does in the worker's process. All methods are the engine's thread's."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self._registered: tuple[Memory, Order] | None = None
        self._transfers: tuple[Loads, Stores] | None = None
        """None until the pool was there, which decides about the blocks."""
        self._refused: list[Load] = []
        """Loads that came before that."""
        self._missing_pages: set[int] = set()

    def register(self, memory: Memory, order: Order) -> None:
        """Take note of the engine's pages and the order `[kv_head, 2, token, head_dim]` of their elements."""
        pages.prepare()
        checksums.prepare()
        self._registered = memory, order

    def begin_step(self, plan: StepPlan) -> None:
        """Begin what a step loads, and be ready to store what it completes."""
        if not plan.loads and not plan.stores:
            return
        if self._transfers is None:
            self._transfers = self._open()
        if self._transfers is None:
            self._refused += plan.loads
            return
        loads, stores = self._transfers
        for load in plan.loads:
            loads.begin(load)
        stores.begin(plan.stores)

    def _open(self) -> tuple[Loads, Stores] | None:
        assert self._registered is not None, "vLLM registers its pages before the first step"
        pool = self._link.pool
        if pool is None:
            return None
        memory, order = self._registered
        engine = EnginePages(memory.layers, memory.page_stride, memory.num_pages, order, pool.layout)
        return Loads(pool, engine), Stores(pool, engine)

    def computed(self, layer: int) -> None:
        """Take note that a layer of this step has been computed."""
        if self._transfers is not None:
            self._transfers[1].computed(layer)

    def end_step(self) -> None:
        """Return when the step's blocks are stored, or given up."""
        if self._transfers is not None:
            self._transfers[1].finish()

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since."""
        refused, self._refused = self._refused, []
        self._missing_pages.update(*(load.pages for load in refused))
        request_ids = {load.request_id for load in refused}
        if self._transfers is not None:
            ended, missing_pages = self._transfers[0].take_finished()
            request_ids |= ended
            self._missing_pages |= missing_pages
        return request_ids

    def take_missing_pages(self) -> set[int]:
        """Return the pages of these requests that lack what they should have."""
        missing_pages, self._missing_pages = self._missing_pages, set()
        return missing_pages

    def close(self) -> None:
        for side in self._transfers or ():
            side.close()
