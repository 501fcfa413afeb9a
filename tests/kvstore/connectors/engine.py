"""A small engine that uses the connector as vLLM does: requests, pages, steps.

The KVCache of a token depends on all tokens up to it, so a test can check the content of each page.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from kvstore.client.client import KVCachePool
from kvstore.connectors.vllm.plans import StepPlan
from kvstore.connectors.vllm.scheduler_side import SchedulerSide
from kvstore.connectors.vllm.worker.worker_side import Memory, WorkerSide
from mooncake.messages.blocks import DTYPE_BYTES, KVLayout
from tests.deadline import DEADLINE_S

STEP_S = 0.001
"""The seconds of a step that waits for a pool. Steps of a real engine take longer."""
_numbers = itertools.count()


@dataclass
class Request:
    """A request with the fields that the connector reads of vLLM's requests."""

    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    num_computed_tokens: int = 0
    request_id: str = field(default_factory=lambda: f"request-{next(_numbers)}")

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Link:
    """A pool that can be present or absent."""

    pool: KVCachePool | None


@dataclass(frozen=True)
class Outcome:
    """The number of tokens that a request found, and the number of those that could not be loaded."""

    num_matched: int
    num_missing: int


def transposed_keys(layout: KVLayout, page_tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return an order of elements in which the keys of a head are `[head_dim, token]`, as in vLLM on CPUs."""
    shape = (layout.num_kv_heads, 2, page_tokens, layout.head_dim)
    places = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    keys = places[:, 0].reshape(layout.num_kv_heads, layout.head_dim, page_tokens)
    places[:, 0] = keys.transpose(0, 2, 1).copy()
    return places


class Engine:
    """One engine with pages of `page_tokens` tokens, which computes one request after the other."""

    def __init__(
        self,
        pool: KVCachePool | None,
        layout: KVLayout,
        page_tokens: int,
        num_pages: int = 64,
        **roles: bool,
    ) -> None:
        self.layout, self.page_tokens = layout, page_tokens
        self.order = transposed_keys(layout, page_tokens)
        kind = np.dtype(f"u{DTYPE_BYTES[layout.dtype]}")
        self.pages = np.zeros((layout.num_layers, num_pages, self.order.size), kind)
        self.link = Link(pool)
        self.scheduler = SchedulerSide(
            self.link,  # type: ignore[arg-type]
            page_tokens,
            adapter_of=lambda lora: lora or "",
            **roles,
        )
        self.worker = WorkerSide(self.link)  # type: ignore[arg-type]
        layers = [layer.ctypes.data for layer in self.pages]
        stride = self.order.size * kind.itemsize
        self.worker.register(Memory(layers, stride, num_pages, self.pages), self.order)
        self._free = list(reversed(range(num_pages)))

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()

    def run(self, request: Request, num_local_tokens: int = 0, chunk: int = 10**9) -> Outcome:
        """Compute a request's tokens in steps of `chunk`, and free its pages.

        The engine's own cache has the first `num_local_tokens` tokens.
        """
        num_matched = self.match(request, num_local_tokens)
        pages = [self._free.pop() for _ in range(-(-request.num_tokens // self.page_tokens))]
        self.compute(request, pages, range(num_local_tokens))
        self.scheduler.allocated(request, pages, num_matched)
        missing = self.load(request, pages, num_local_tokens + num_matched) if num_matched else 0
        request.num_computed_tokens = num_local_tokens + num_matched - missing
        while request.num_computed_tokens < request.num_tokens:
            self.step(request, pages, min(chunk, request.num_tokens - request.num_computed_tokens))
        self.assert_holds(request, pages)
        self.finish(request, pages)
        return Outcome(num_matched, missing)

    def finish(self, request: Request, pages: list[int], *, needs_pages: bool = False) -> None:
        """End a request, and run steps until its pages may be freed."""
        end_s = time.monotonic() + DEADLINE_S
        is_kept = self.scheduler.finished(request.request_id, len(pages))
        if is_kept and needs_pages:
            assert self.scheduler.demand_pages()
        while is_kept:
            assert time.monotonic() < end_s
            stored = self.empty_step()
            self.scheduler.stored(stored)
            is_kept = request.request_id not in stored
            time.sleep(STEP_S)
        self._free += reversed(pages)

    def empty_step(self, preempted: Sequence[str] = ()) -> set[str]:
        """Run a step that computes nothing. Returns the finished requests whose stores have ended."""
        plan = self.scheduler.plan({}, lambda _: [], preempted)
        self.worker.preempt(plan.preempted)
        self.worker.begin_step(plan)
        self.worker.end_step()
        return self.worker.take_stored()

    def match(self, request: Request, num_local_tokens: int = 0) -> int:
        """Ask the connector for the number of tokens in the pool, until it answers."""
        end_s = time.monotonic() + DEADLINE_S
        while (num_matched := self.scheduler.num_new_matched(request, num_local_tokens)) is None:
            assert time.monotonic() < end_s
            time.sleep(STEP_S)
        return num_matched

    def load(self, request: Request, pages: list[int], num_tokens: int) -> int:
        """Run a step that begins to load, and further ones until the load has ended.

        Returns how many tokens are missing.
        """
        self.worker.begin_step(self.scheduler.plan({}, lambda _: []))
        end_s = time.monotonic() + DEADLINE_S
        while request.request_id not in (ended := self.worker.take_loaded()):
            assert time.monotonic() < end_s
            self.worker.begin_step(StepPlan())
            self.worker.end_step()
        missing = self.worker.take_missing_pages()
        self.scheduler.loaded(ended, missing)
        first = next((i for i, page in enumerate(pages) if page in missing), len(pages))
        return max(0, num_tokens - first * self.page_tokens)

    def step(self, request: Request, pages: list[int], num_tokens: int) -> None:
        """Run a step that computes and stores tokens."""
        plan = self.scheduler.plan({request.request_id: num_tokens}, lambda _: pages)
        self.worker.begin_step(plan)
        tokens = range(request.num_computed_tokens, request.num_computed_tokens + num_tokens)
        self.compute(request, pages, tokens)
        self.worker.end_step()
        self.scheduler.stored(self.worker.take_stored())
        request.num_computed_tokens += num_tokens

    def compute(self, request: Request, pages: list[int], tokens: range) -> None:
        """Write the KVCache of `tokens` into pages."""
        for token in tokens:
            page, slot = pages[token // self.page_tokens], token % self.page_tokens
            values = self.kv_of(request, token)
            for each in range(self.layout.num_layers):
                self.pages[each, page, self.order[:, :, slot]] = values[each]

    def assert_holds(self, request: Request, pages: list[int]) -> None:
        for token in range(request.num_tokens):
            page, slot = pages[token // self.page_tokens], token % self.page_tokens
            found = self.pages[:, page][:, self.order[:, :, slot]]
            assert np.array_equal(found, self.kv_of(request, token)), f"token {token}"

    def kv_of(self, request: Request, token: int) -> np.ndarray[Any, Any]:
        """Return the KVCache of one token, as a model would compute it: `[layer, kv_head, 2, head_dim]`."""
        seed = xxhash.xxh3_64_intdigest(np.asarray(request.all_token_ids[: token + 1], "<u4").tobytes())
        shape = (self.layout.num_layers, self.layout.num_kv_heads, 2, self.layout.head_dim)
        return np.random.default_rng(seed).integers(1, 60000, shape, self.pages.dtype)
