"""The loops of Algorithm 1 over all instances, compiled (`algorithm1.cpp`).

They read the view's arrays in place. Their results are those of `conductor.scheduling.algorithm1.Scheduler`
to the last bit.

Owns: the compiled code, the addresses that it reads. Does not know: how the numbers were predicted.
"""

import ctypes
import struct
from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conductor.index.prefix_index import PrefixMatch, packed
from conductor.scheduling.algorithm1 import (
    NO_FETCH,
    Decoding,
    Inlined,
    LongestPrefix,
    Prompt,
    Scheduler,
    zeroed_candidates,
)
from conductor.scheduling.choices import Candidates
from conductor.settings import PolicySettings
from conductor.view.cluster_view import ClusterView
from mooncake.native import THIS_PROCESSOR, load_or_do_without

_PROMPT = struct.Struct("5qdq4d")
"""The layout of `Prompt` in `algorithm1.cpp`.

It has the fields of `Prompt` without the priority, the fields of `LongestPrefix` without the holder, and the
time.
"""
_INLINING = struct.Struct("2qd")
"""The layout of `Inlining` in `algorithm1.cpp`.

It has the blocks of the whole request, the most tokens of a chunk, and the budget in seconds.
"""


def new_scheduler(view: ClusterView, settings: PolicySettings) -> Scheduler:
    """Return the compiled scheduler, or the plain one if nothing can be compiled here."""
    exactly = (*THIS_PROCESSOR, "-ffp-contract=off")  # a fused operation rounds once, Python twice
    library = load_or_do_without(
        Path(__file__).with_name("algorithm1.cpp"), "decisions take longer", flags=exactly
    )
    return Scheduler(view, settings) if library is None else NativeScheduler(view, settings, library)


class NativeScheduler(Scheduler):
    """Algorithm 1 with compiled loops. Calls of the compiled code keep the GIL, as they are short."""

    def __init__(self, view: ClusterView, settings: PolicySettings, library: ctypes.CDLL) -> None:
        super().__init__(view, settings)
        self._code = _with_types(library)
        self._num_changes: int | None = None
        """The view's number of changes when the addresses of its arrays were taken."""
        self._found = zeroed_candidates(0)
        self._columns: list[NDArray[np.generic]] = []
        """The arrays whose addresses were taken. This list keeps them alive."""
        self._addresses = b""
        self._tbt_s = array("d", [0.0])
        self._inlined_s = array("d", [0.0] * 5)

    def find_best_prefix_match(self, match: PrefixMatch) -> int:
        """Return the slot that can send the longest prefix soonest, among the prefix's holders (line 4)."""
        return int(self._code.find_best_prefix_match(self._at(), *_packed(match), self._view.block_bytes))

    def estimate_ttft(
        self, prompt: Prompt, match: PrefixMatch, fetch: LongestPrefix, now_s: float
    ) -> Candidates:
        """Return the estimated TTFT on each instance (lines 2 to 23).

        The next call overwrites the returned arrays.
        """
        behind_s = self._view.loads.behind_s(prompt.priority)
        behind = None if behind_s is None else behind_s.ctypes.data
        p = self._code.estimate_ttft(
            self._at(), *_packed(match), _PROMPT.pack(*prompt[:6], *fetch[1:], now_s), behind
        )
        return Candidates(*self._found, p)

    def select_decoding_instance(self, request: Decoding) -> tuple[int, float] | None:
        """Return the slot and predicted TBT in seconds of the decode instance with the least TBT (line 24).

        None if no instance has room.
        """
        tbt_s, row = self._tbt_s, self._refused(request)
        d = self._code.select_decoding_instance(
            self._at(), request.num_tokens, request.num_blocks, row, tbt_s.buffer_info()[0]
        )
        return None if d < 0 else (d, tbt_s[0])

    def select_inlining_instance(
        self, prompt: Prompt, match: PrefixMatch, request: Decoding, budget_s: float, now_s: float
    ) -> Inlined | None:
        """Return the instance where inlining the prompt adds the least waiting (section 5); None for none."""
        behind_s = self._view.loads.behind_s(prompt.priority)
        times_s = self._inlined_s
        instance = self._code.select_inlining_instance(
            self._at(),
            *_packed(match),
            _PROMPT.pack(*prompt[:6], *NO_FETCH[1:], now_s),
            None if behind_s is None else behind_s.ctypes.data,
            _INLINING.pack(request.num_blocks, self._mixed_chunk_tokens, budget_s),
            self._refused(request),
            times_s.buffer_info()[0],
        )
        return None if instance < 0 else Inlined(instance, *times_s)

    def _refused(self, request: Decoding) -> bytes | None:
        """Return the bit mask of the slots that must not be chosen; None if there are no such slots."""
        if not request.refused:
            return None
        return packed([sum(1 << slot for slot in request.refused)], self._view.loads.num_slots)

    def _at(self) -> bytes:
        """Return the packed addresses of the view's arrays.

        The arrays are replaced when instances come, leave or change their roles.
        """
        view = self._view
        if self._num_changes != view.num_changes:
            self._num_changes = view.num_changes
            num_slots, loads = view.loads.num_slots, view.loads
            self._found = zeroed_candidates(num_slots)
            self._columns = columns = [
                *self._found,
                loads.is_prefill,
                loads.ends_s,
                loads.behind_head_s,
                view.prefill_costs.constant_s,
                view.prefill_costs.first_s,
                view.prefill_costs.second_s,
                loads.prefill_room_blocks,
                view.next_iteration_s,
                view.next_token_s,
                view.next_delay,
                view.decode_costs.constant_s,
                view.decode_costs.first_s,
                view.decode_costs.second_s,
                loads.decode_room_blocks,
                loads.inlines,
                loads.least_chunk_tokens,
                loads.num_prompts,
                loads.num_decoding,
                loads.num_decoding_tokens,
                view.transfers.in_flight_bytes,
                view.transfers.ordered_bytes,
            ]
            assert {view.prefixes.num_slots, *(len(column) for column in columns)} == {num_slots}
            self._addresses = struct.pack(f"q{len(columns)}P", num_slots, *(c.ctypes.data for c in columns))
        return self._addresses


def _packed(match: PrefixMatch) -> tuple[int, int, bytes, bytes]:
    on_ssd = match.on_ssd
    numbers = array("i", match.depths)
    masks = match.masks
    if on_ssd:
        numbers.extend([number for number, _ in on_ssd])
        masks = masks + [mask for _, mask in on_ssd]
    return len(match.depths), len(on_ssd), numbers.tobytes(), packed(masks, match.num_slots)


def _with_types(library: ctypes.CDLL) -> ctypes.PyDLL:
    code = ctypes.PyDLL(library._name, handle=library._handle)
    pointer, size = ctypes.c_char_p, ctypes.c_int64
    match = (size, size, pointer, pointer)
    code.find_best_prefix_match.argtypes = (pointer, *match, ctypes.c_double)
    code.estimate_ttft.argtypes = (pointer, *match, pointer, ctypes.c_void_p)
    code.select_decoding_instance.argtypes = (pointer, size, size, pointer, ctypes.c_void_p)
    code.select_inlining_instance.argtypes = (
        pointer,
        *match,
        pointer,
        ctypes.c_void_p,
        pointer,
        pointer,
        ctypes.c_void_p,
    )
    for function in (
        code.find_best_prefix_match,
        code.estimate_ttft,
        code.select_decoding_instance,
        code.select_inlining_instance,
    ):
        function.restype = size
    return code
