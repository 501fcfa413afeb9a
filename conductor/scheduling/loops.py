"""Algorithm 1's loops over the instances (Mooncake, section 6): compiled (`loops.cpp`) one instance after the
other, as in the paper; where there is no compiler with numpy, all at once.

Both read the view's arrays by slot, and have the same results to the last bit.

Owns: both. Does not know: how the numbers came to be, what is done with the results.
"""

import ctypes
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from conductor.index.prefix_index import PrefixMatch, packed
from conductor.scheduling.choices import Candidates
from conductor.view.cluster_view import ClusterView
from conductor.view.estimators import Floats
from mooncake.native import THIS_PROCESSOR, load_or_do_without


class Prompt(NamedTuple):
    """What is to be prefilled. `load_block_s`: to bring one of its blocks from SSD to DRAM."""

    num_tokens: int
    num_blocks: int
    block_size: int
    load_block_s: float
    priority: int


class Fetch(NamedTuple):
    """What it takes to fetch the best prefix: all of it, and less for each block that is there already.

    Worth it, by line 8, for who holds fewer than `worth_below_blocks`.
    """

    num_blocks: int
    whole_s: float
    block_s: float
    worth_below_blocks: float

    def seconds(self, num_held_blocks: int) -> float:
        """For whoever holds so many of its blocks."""
        return self.whole_s - num_held_blocks * self.block_s


NO_FETCH = Fetch(0, 0.0, 0.0, 0.0)


class Loops(Protocol):
    """Over all instances. What is found for one prompt is gone when the next is looked at."""

    def find_best_prefix_match(self, match: PrefixMatch) -> int:
        """Line 4: of those that hold the longest prefix, the slot of the one that gives it first."""

    def find_candidates(self, prompt: Prompt, match: PrefixMatch, fetch: Fetch, now_s: float) -> Candidates:
        """Lines 5 to 23."""

    def select_decoding_instance(
        self, num_tokens: int, num_blocks: int, refused: Sequence[int]
    ) -> tuple[int, float] | None:
        """Line 24: slot and TBT of the instance on which a step is shortest with a request of so many tokens,
        which has so many blocks at last; none of the slots `refused`. None if it has room nowhere."""


class ArrayLoops:
    """All instances at once."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def find_best_prefix_match(self, match: PrefixMatch) -> int:
        """As in `Loops`."""
        holders = match.best_slots
        ahead_bytes = self._view.transfers.ahead_bytes(holders)
        ssd_bytes = match.num_ssd_blocks[holders] * float(self._view.block_bytes)
        return holders.item(int((ahead_bytes + ssd_bytes).argmin()))

    def find_candidates(self, prompt: Prompt, match: PrefixMatch, fetch: Fetch, now_s: float) -> Candidates:
        """As in `Loops`."""
        loads, num_blocks = self._view.loads, match.num_blocks
        queue_s = loads.queue_s(now_s, prompt.priority)
        load_s = match.num_ssd_blocks * prompt.load_block_s
        local_s = load_s + self._prefill_s(prompt, num_blocks)
        transfer_s = fetch.whole_s - num_blocks * fetch.block_s
        remote_s = transfer_s + self._prefill_s(prompt, np.full_like(num_blocks, fetch.num_blocks))
        is_remote = (num_blocks < fetch.worth_below_blocks) & (remote_s < local_s)
        rest_s = np.where(is_remote, remote_s, local_s)
        is_possible = loads.is_prefill & (loads.prefill_room_blocks >= prompt.num_blocks)
        ttft_s = np.where(is_possible, queue_s + rest_s, np.inf)
        return Candidates(queue_s, rest_s, ttft_s, is_remote, int(ttft_s.argmin()))

    def _prefill_s(self, prompt: Prompt, num_prefix_blocks: NDArray[np.int32]) -> Floats:
        """`mooncake.messages.costs`; at least one token is computed, from which the first one comes."""
        costs = self._view.prefill_costs
        prefix_len = np.minimum(num_prefix_blocks * prompt.block_size, prompt.num_tokens - 1)
        num_new = prompt.num_tokens - prefix_len
        num_pairs = num_new * (prefix_len + num_new / 2)
        seconds: Floats = costs.constant_s + num_new * costs.first_s + num_pairs * costs.second_s
        return seconds

    def select_decoding_instance(
        self, num_tokens: int, num_blocks: int, refused: Sequence[int]
    ) -> tuple[int, float] | None:
        """As in `Loops`."""
        view = self._view
        tbt_s = view.next_step_s + num_tokens * view.decode_costs.second_s
        tbt_s[view.loads.decode_room_blocks < num_blocks] = np.inf
        tbt_s[list(refused)] = np.inf
        d = int(tbt_s.argmin())
        return None if tbt_s[d] == np.inf else (d, tbt_s.item(d))


class NativeLoops:
    """One instance after the other. Calls keep the GIL: they are short."""

    def __init__(self, view: ClusterView, library: ctypes.CDLL) -> None:
        self._view, self._code = view, _with_types(library)
        self._num_changes: int | None = None
        """of the view, when its arrays were last looked for"""
        self._found = _nothing_found(0)
        self._columns: list[NDArray[np.generic]] = []
        """kept: nobody else may have them any more"""
        self._addresses = b""
        self._tbt_s = array("d", [0.0])

    def find_best_prefix_match(self, match: PrefixMatch) -> int:
        """As in `Loops`."""
        return int(self._code.find_best_prefix_match(self._at(), *_packed(match), self._view.block_bytes))

    def find_candidates(self, prompt: Prompt, match: PrefixMatch, fetch: Fetch, now_s: float) -> Candidates:
        """As in `Loops`."""
        behind_s = self._view.loads.behind_s(prompt.priority)
        behind = None if behind_s is None else behind_s.ctypes.data
        p = self._code.find_least_ttft(
            self._at(), *_packed(match), _PROMPT.pack(*prompt[:4], *fetch, now_s), behind
        )
        return Candidates(*self._found, p)

    def select_decoding_instance(
        self, num_tokens: int, num_blocks: int, refused: Sequence[int]
    ) -> tuple[int, float] | None:
        """As in `Loops`."""
        row = packed([sum(1 << slot for slot in refused)], self._view.loads.num_slots) if refused else None
        tbt_s = self._tbt_s
        d = self._code.select_decoding_instance(
            self._at(), num_tokens, num_blocks, row, tbt_s.buffer_info()[0]
        )
        return None if d < 0 else (d, tbt_s[0])

    def _at(self) -> bytes:
        """The addresses of the view's arrays, which are others when an instance has come or gone."""
        view = self._view
        if self._num_changes != view.num_changes:
            self._num_changes = view.num_changes
            num_slots, loads = view.loads.num_slots, view.loads
            self._found = _nothing_found(num_slots)
            self._columns = columns = [
                *self._found,
                loads.is_prefill,
                loads.ends_s,
                loads.behind_head_s,
                view.prefill_costs.constant_s,
                view.prefill_costs.first_s,
                view.prefill_costs.second_s,
                loads.prefill_room_blocks,
                view.next_step_s,
                view.decode_costs.second_s,
                loads.decode_room_blocks,
                view.transfers.in_flight_bytes,
                view.transfers.ordered_bytes,
            ]
            assert {view.prefixes.num_slots, *(len(column) for column in columns)} == {num_slots}
            self._addresses = struct.pack(f"q{len(columns)}P", num_slots, *(c.ctypes.data for c in columns))
        return self._addresses


_PROMPT = struct.Struct("3qdq4d")
"""the fields of `Prompt` but the priority, those of `Fetch`, and the time"""


def _nothing_found(num_slots: int) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    """Of candidates, by slot: to be filled."""
    queue_s, rest_s, ttft_s = np.zeros((3, num_slots))
    return queue_s, rest_s, ttft_s, np.zeros(num_slots, np.bool_)


def _packed(match: PrefixMatch) -> tuple[int, int, bytes, bytes]:
    on_ssd = match.on_ssd
    numbers = array("i", match.depths)
    masks = match.masks
    if on_ssd:
        numbers.extend([number for number, _ in on_ssd])
        masks = masks + [mask for _, mask in on_ssd]
    return len(match.depths), len(on_ssd), numbers.tobytes(), packed(masks, match.num_slots)


def loops_of(view: ClusterView) -> Loops:
    """Compiled ones, if they can be."""
    exactly = (*THIS_PROCESSOR, "-ffp-contract=off")  # what numpy does in two roundings is not done in one
    library = load_or_do_without(Path(__file__).with_suffix(".cpp"), "decisions take longer", flags=exactly)
    return ArrayLoops(view) if library is None else NativeLoops(view, library)


def _with_types(library: ctypes.CDLL) -> ctypes.PyDLL:
    code = ctypes.PyDLL(library._name, handle=library._handle)
    pointer, size = ctypes.c_char_p, ctypes.c_int64
    match = (size, size, pointer, pointer)
    code.find_best_prefix_match.argtypes = (pointer, *match, ctypes.c_double)
    code.find_least_ttft.argtypes = (pointer, *match, pointer, ctypes.c_void_p)
    code.select_decoding_instance.argtypes = (pointer, size, size, pointer, ctypes.c_void_p)
    for name in ("find_best_prefix_match", "find_least_ttft", "select_decoding_instance"):
        getattr(code, name).restype = size
    return code
