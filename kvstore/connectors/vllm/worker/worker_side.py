"""The worker's side: loads and stores between the engine's pages and the pool.

Owns: the transfers that a step begins and ends. Does not know: vLLM's classes, requests.
"""

from dataclasses import dataclass

from kvstore.connectors.vllm.link import PoolLink
from kvstore.connectors.vllm.plans import LoadPlan, StepPlan
from kvstore.connectors.vllm.worker import pages
from kvstore.connectors.vllm.worker.loads import WorkerLoads
from kvstore.connectors.vllm.worker.pages import EnginePages, Order
from kvstore.connectors.vllm.worker.stores import WorkerStores
from messenger.wire import checksums


@dataclass(frozen=True, slots=True)
class Memory:
    """The engine's pages: the address of page 0 of each layer.

    `page_stride`: the bytes from one page of a layer to the next page. `keeps`: an object that keeps the
    pages mapped.
    """

    layers: list[int]
    page_stride: int
    num_pages: int
    keeps: object


class WorkerSide:
    """The part of the connector in the worker's process. The engine's thread calls all of its methods."""

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self._registered: tuple[Memory, Order] | None = None
        self._transfers: tuple[WorkerLoads, WorkerStores] | None = None
        """Loads and stores; None until a pool has answered, as the pool determines the block size."""
        self._refused: list[LoadPlan] = []
        """Loads that were ordered before a pool had answered."""
        self._missing_pages: set[int] = set()
        self._plan = StepPlan()
        """The plan of the step in progress."""

    def register(self, memory: Memory, order: Order) -> None:
        """Register the engine's pages and the order `[kv_head, 2, token, head_dim]` of a page's elements."""
        pages.prepare()
        checksums.prepare()
        self._registered = memory, order

    def preempt(self, request_ids: set[str]) -> None:
        """Stop using the pages of preempted requests: the engine may overwrite these pages from now on."""
        if self._transfers is not None:
            self._transfers[1].give_up(request_ids)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin the loads of a step."""
        self._plan = plan
        if self._transfers is None and (plan.loads or plan.stores):
            self._transfers = self._open()
        for load in plan.loads:
            if self._transfers is None:
                self._refused.append(load)
            else:
                self._transfers[0].begin(load)

    def _open(self) -> tuple[WorkerLoads, WorkerStores] | None:
        assert self._registered is not None, "vLLM registers its pages before the first step"
        pool = self._link.pool
        if pool is None:
            return None
        memory, order = self._registered
        engine = EnginePages(memory.layers, memory.page_stride, memory.num_pages, order, pool.layout)
        return WorkerLoads(pool, engine), WorkerStores(pool, engine)

    def end_step(self) -> None:
        """Begin to store the blocks that the step has completed."""
        if self._transfers is not None:
            self._transfers[1].finish(self._plan.finished)
            self._transfers[1].add(self._plan.stores)

    def take_stored(self) -> set[str]:
        """Return the finished requests that need their pages no longer."""
        if self._transfers is None:
            return set(self._plan.finished)
        return self._transfers[1].take_ended(needs_pages=self._plan.needs_pages)

    def take_loaded(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, and note their missing pages."""
        refused, self._refused = self._refused, []
        self._missing_pages.update(*(load.pages for load in refused))
        request_ids = {load.request_id for load in refused}
        if self._transfers is not None:
            ended, missing_pages = self._transfers[0].take_finished()
            request_ids |= ended
            self._missing_pages |= missing_pages
        return request_ids

    def take_missing_pages(self) -> set[int]:
        """Return the pages that were not filled by the loads that have ended, since the last call."""
        missing_pages, self._missing_pages = self._missing_pages, set()
        return missing_pages

    def close(self) -> None:
        for side in self._transfers or ():
            side.close()
