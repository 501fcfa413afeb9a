"""The batch of a forward pass: chunks of several sequences, concatenated without padding.

Owns: the inputs that all layers of a pass share (token ids, positions, pages to write, rotary factors,
attention plans), computed at most once. Does not know: why the scheduler chose these chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from kernels.attention import AttentionPlan, PageGeometry, plan_attention
from kernels.cpu.attention import AttentionShape, PagedAttention
from kernels.cpu.elementwise import Slots
from kernels.cpu.library import Library
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.rotary import cos_sin, rotation_factors
from workers.engine.upload import upload


@dataclass(slots=True)
class Chunk:
    """Consecutive new tokens of one sequence in a pass: a part of its prompt, or the newest token.

    Tokens `[0, start)` are in the cache already. `pages` holds the whole sequence in order: token t lies in
    `pages[t // page_size]`. Invariant: `pages` reach up to `start + len(token_ids)`; more are ignored.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]


class HostTokens(NamedTuple):
    """The tokens of a batch, int64 `[T]`, and the row of each chunk's last token, int64 `[S]`, on the CPU."""

    token_ids: np.ndarray
    positions: np.ndarray
    page_of_token: np.ndarray
    offset_of_token: np.ndarray
    last_rows: np.ndarray


class HostedSequences(NamedTuple):
    """The sequences of a pass that have pages at a helper: what the helper must know of them."""

    query_lens: list[int]
    kv_lens: list[int]
    page_tables: list[np.ndarray]
    """Each sequence's pages at the helper, by their numbers in the helper's memory."""
    tokens: np.ndarray
    """The rows of these sequences' new tokens in the pass: int64, on the CPU."""


class Batch:
    """The inputs of all layers for one pass over T tokens in S chunks, on the cache's device.

    An input that only one implementation of a layer needs is prepared on its first use, and kept.
    """

    def __init__(self, chunks: Sequence[Chunk], kv: DeviceKVCache) -> None:
        # A decode step of many sequences waits for this code, so it works on arrays of all chunks.
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        kv_lens = [chunk.start + num for chunk, num in zip(chunks, query_lens, strict=True)]
        nums_pages = [-(-kv_len // kv.page_size) for kv_len in kv_lens]
        used = (chunk.pages[:num] for chunk, num in zip(chunks, nums_pages, strict=True))
        pages = np.fromiter(chain.from_iterable(used), np.int64, sum(nums_pages))
        has_hosted = kv.hosted_pages is not None
        _check_range("pages", pages, kv.pages.num_pages if has_hosted else kv.layer_shape[0])
        new, ends = np.array(query_lens), np.cumsum(query_lens)
        page_ends = np.cumsum(nums_pages)
        first_pages = page_ends - nums_pages
        positions = np.arange(ends[-1]) + np.repeat(np.array(kv_lens) - ends, new)
        page_of_token = pages[np.repeat(first_pages, new) + positions // kv.page_size]
        token_ids = np.fromiter(
            chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, int(ends[-1])
        )
        _check_range("token ids", token_ids, kv.spec.vocab_size)
        self.kv_shape = kv.layer_shape
        self.page_size = kv.page_size
        self.dtype, self.device = kv.dtype, kv.device
        self.num_tokens = len(token_ids)
        self.query_lens = tuple(query_lens)
        """New tokens of each chunk."""
        self.kv_lens = tuple(kv_lens)
        """Tokens of each sequence, the new ones included."""
        self.pages, self.first_pages = pages, first_pages
        """Page tables of all sequences, one after the other, and where each begins: int64, on the CPU."""
        self.nums_hosted: tuple[int, ...] | None = None
        """The number of leading pages of each sequence that a helper has; None if no page is at a helper."""
        if has_hosted and pages.max() >= kv.layer_shape[0]:
            self.nums_hosted = _nums_hosted(np.split(pages, first_pages[1:]), chunks, kv)
        self.host = HostTokens(token_ids, positions, page_of_token, positions % kv.page_size, ends - 1)
        self._spec = kv.spec
        self._plans: dict[int | None, AttentionPlan] = {}
        self._workspace: torch.Tensor | None = None
        self._attentions: dict[int | None, PagedAttention] = {}

    @classmethod
    def build(cls, chunks: Sequence[Chunk], kv: DeviceKVCache) -> "Batch":
        """Return the batch of `chunks`, of prefill and decode in any mix, for the pages of `kv`.

        Raises ValueError if there is no chunk, or a chunk is empty; if the pages of a chunk do not reach its
        end, or are not in the cache; if the model lacks one of the positions or tokens.
        """
        if not chunks:
            raise ValueError("a batch needs at least one chunk")
        for chunk in chunks:
            _check(chunk, kv)
        return cls(chunks, kv)

    @cached_property
    def page_tables(self) -> list[np.ndarray]:
        """The page table of each sequence up to its last token, int64, on the CPU."""
        return np.split(self.pages, self.first_pages[1:])

    def fill_in(self, chunks: Sequence[int], token_ids: Sequence[int]) -> None:
        """Fill in the last tokens of `chunks` (indices), which were unknown when the batch was built.

        To be called before anything is computed, as the computation begins by copying the tokens from the
        host.
        """
        assert "_uploaded" not in self.__dict__, "the batch is on its device already"
        self.host.token_ids[self.host.last_rows[chunks]] = token_ids

    @cached_property
    def _uploaded(self) -> list[torch.Tensor]:
        """The tokens of `host` on the device, not used by captured graphs."""
        return upload(self.host, self.device)

    @property
    def token_ids(self) -> torch.Tensor:
        """Token ids: int64 `[T]`."""
        return self._uploaded[0]

    @cached_property
    def hosted(self) -> HostedSequences | None:
        """The sequences that have pages at a helper; None if no page is at a helper."""
        if self.nums_hosted is None:
            return None
        those = [index for index, num in enumerate(self.nums_hosted) if num]
        ends = self.host.last_rows + 1
        first = self.kv_shape[0]
        return HostedSequences(
            [self.query_lens[index] for index in those],
            [self.kv_lens[index] for index in those],
            [self.page_tables[index][: self.nums_hosted[index]] - first for index in those],
            np.concatenate([np.arange(ends[i] - self.query_lens[i], ends[i]) for i in those], dtype=np.int64),
        )

    @property
    def positions(self) -> torch.Tensor:
        """Positions: int64 `[T]`."""
        return self._uploaded[1]

    @property
    def page_of_token(self) -> torch.Tensor:
        """The page to which each token's keys and values are written: int64 `[T]`."""
        return self._uploaded[2]

    @property
    def offset_of_token(self) -> torch.Tensor:
        """The offset of each token within its page: int64 `[T]`."""
        return self._uploaded[3]

    @property
    def last_rows(self) -> torch.Tensor:
        """The row of each chunk's last token: int64 `[S]`."""
        return self._uploaded[4]

    @cached_property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each token's angles: two float32 tensors `[T, head_dim / 2]`."""
        return cos_sin(self._spec, self.positions)

    @cached_property
    def rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of `rotate`: two tensors `[T, 1, head_dim]`, in the cache's dtype."""
        return rotation_factors(*self.cos_sin, self.dtype)

    def plan(self, sliding_window: int | None) -> AttentionPlan:
        """Return the plan of torch's attention for layers with this sliding window; None: no window."""
        if sliding_window not in self._plans:
            tables = [torch.from_numpy(table) for table in self.page_tables]
            _, num_kv_heads, _, page_size, _ = self.kv_shape
            geometry = PageGeometry(num_kv_heads, page_size, self.dtype, self.device)
            plan = plan_attention(self.query_lens, self.kv_lens, tables, geometry, sliding_window)
            self._plans[sliding_window] = plan
        return self._plans[sliding_window]

    @cached_property
    def slots(self) -> Slots:
        """Angles and token slots in the form of the CPU's kernels."""
        return Slots(*self.cos_sin, self.page_of_token, self.offset_of_token)

    def attention(
        self, library: Library, heads: AttentionShape, sliding_window: int | None
    ) -> PagedAttention:
        """Return the CPU's attention for layers with this sliding window; None: no window.

        `heads` are the same in all calls: the heads in this process.
        """
        if sliding_window not in self._attentions:
            kv_lens, tables = self._own
            self._attentions[sliding_window] = PagedAttention(
                library, self.query_lens, kv_lens, tables, self.kv_shape, heads, sliding_window
            )
        return self._attentions[sliding_window]

    @cached_property
    def _own(self) -> tuple[Sequence[int], list[np.ndarray]]:
        """The number of tokens and the page table of each sequence, without its pages at a helper.

        Positions then count from the first page in this process, not from the sequence's first token. That is
        allowed because attention depends only on distances between tokens.
        """
        if self.nums_hosted is None:
            return self.kv_lens, self.page_tables
        each = list(zip(self.kv_lens, self.page_tables, self.nums_hosted, strict=True))
        kv_lens = [kv_len - num * self.page_size for kv_len, _, num in each]
        return kv_lens, [table[num:] for _, table, num in each]

    def workspace(self, num_elements: int) -> torch.Tensor:
        """Return the memory for intermediate results, `num_elements` per token, that all layers share."""
        if self._workspace is None:
            self._workspace = torch.empty(self.num_tokens * num_elements, dtype=self.dtype)
        return self._workspace


def _check_range(what: str, numbers: np.ndarray, end: int) -> None:
    lowest, highest = numbers.min(), numbers.max()
    if lowest < 0 or highest >= end:
        raise ValueError(f"expected {what} in [0, {end}), got {lowest} to {highest}")


def _nums_hosted(tables: Sequence[np.ndarray], chunks: Sequence[Chunk], kv: DeviceKVCache) -> tuple[int, ...]:
    """Return how many leading pages of each sequence a helper has.

    Raises ValueError if the helper's pages are not the first pages of a sequence, or have new tokens.
    """
    nums = []
    for table, chunk in zip(tables, chunks, strict=True):
        are_hosted = table >= kv.layer_shape[0]
        num = int(are_hosted.sum())
        if not are_hosted[:num].all() or num * kv.page_size > chunk.start:
            raise ValueError(
                f"expected leading full pages alone at a helper, got {table}, with tokens from {chunk.start}"
            )
        nums.append(num)
    return tuple(nums)


def _check(chunk: Chunk, kv: DeviceKVCache) -> None:
    end = chunk.start + len(chunk.token_ids)
    if len(chunk.token_ids) == 0:
        raise ValueError("a chunk needs at least one token")
    if end > len(chunk.pages) * kv.page_size:
        raise ValueError(
            f"a chunk that ends at token {end} needs {-(-end // kv.page_size)} pages "
            f"of {kv.page_size} tokens, got {len(chunk.pages)}"
        )
    if end > kv.spec.max_position:
        raise ValueError(f"a chunk ends at token {end}, the model has {kv.spec.max_position} positions")
