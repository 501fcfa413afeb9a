"""Algorithm 1, KVCache-centric scheduling (Mooncake, section 6): which pair of instances serves a request.

In the paper's order and with its names, for all instances at once: what the loop of the paper does for one
instance is one entry of an array here. Only a decode instance is chosen by load alone.

Owns: the choice. Does not know: what is done with it, whether overload rejects it (`conductor.overload`).
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from conductor.choices import Candidates, choice_of
from conductor.cluster_view import ClusterView
from conductor.estimators import Floats
from conductor.placement import Placement, Prediction, num_tokens_held
from conductor.prefix_index import PrefixMatch
from conductor.rules import Rules
from conductor.transfers import SSD_BYTES_PER_S
from mooncake.blocks import KVLayout
from mooncake.costs import prefill_quantities
from mooncake.messages import Role
from mooncake.requests import Request


class BestMatch(NamedTuple):
    """Who holds the longest prefix of a prompt, and how much."""

    slot: int
    num_blocks: int
    num_ssd_blocks: int


class Fetch(NamedTuple):
    """What it takes to fetch the best prefix: all of it, and less for each block that is there already."""

    whole_s: float
    block_s: float

    def seconds(self, num_held_blocks: int) -> float:
        """For whoever holds so many of its blocks."""
        return self.whole_s - num_held_blocks * self.block_s


class Scheduler:
    """Chooses with what `view` knows."""

    def __init__(self, view: ClusterView, rules: Rules) -> None:
        self._view = view
        self._fetches = rules.fetches_prefixes
        self._choose = choice_of(rules)

    def schedule(self, request: Request, now_s: float, refused_by: Collection[str] = ()) -> Placement | None:
        """The pair of instances for a request; None if no pair can hold it now.

        Not on decode instances that have refused it.
        """
        view, layout = self._view, self._view.layout
        if layout is None:
            return None
        if not view.loads.prefill_mask:
            return None
        match = view.prefixes.match(request.block_keys)
        best = self.find_best_prefix_match(match, layout) if self._fetches else None
        fetch = None if best is None else self.estimate_kvcache_transfer_time(best, layout)
        candidates = self._candidates(request, match, fetch, layout, now_s)
        p = self._choose(candidates, view.loads)
        if candidates.ttft_s.item(p) == math.inf:
            return None
        decoding = self.select_decoding_instance(request, refused_by, layout)
        if decoding is None:
            return None
        d, tbt_s = decoding
        pair = view.instance_at(p), view.instance_at(d)
        queue_s = candidates.queue_s.item(p)
        rest_s, num_local_blocks, is_remote = candidates.best_way(p)
        if best is None or fetch is None or not is_remote:
            load_s = match.num_ssd_blocks_at(p) * _load_block_s(layout)
            prediction = Prediction(queue_s, load_s, rest_s - load_s, tbt_s)
            return Placement(*pair, num_local_blocks, None, 0, prediction)
        transfer_s = fetch.seconds(num_local_blocks)
        prediction = Prediction(queue_s, transfer_s, rest_s - transfer_s, tbt_s)
        return Placement(*pair, num_local_blocks, view.instance_at(best.slot), best.num_blocks, prediction)

    def _candidates(
        self, request: Request, match: PrefixMatch, fetch: Fetch | None, layout: KVLayout, now_s: float
    ) -> Candidates:
        """Lines 5 to 23: the TTFT on every instance."""
        loads, num_tokens, best_depth = self._view.loads, len(request.token_ids), match.num_best_blocks
        depths, masks = [], []
        for depth, mask in zip(match.depths, match.masks, strict=True):
            if at_depth := mask & loads.prefill_mask:
                depths.append(depth)
                masks.append(at_depth)
        num_local = len(depths)
        prefixes = [(depth * layout.block_size, 0.0) for depth in depths]
        if fetch is not None:
            # Line 8, divided by the threshold, for prefix_len may be 0. At equality the own prefix is used.
            num_short = bisect_left(depths, best_depth / self._view.balancing.threshold)
            best_prefix_len = best_depth * layout.block_size
            prefixes += [(best_prefix_len, fetch.seconds(depth)) for depth in depths[:num_short]]
            depths += depths[:num_short]
            masks += masks[:num_short]
        ways_s = self.estimate_prefill_execution_time(num_tokens, prefixes)
        if match.on_ssd:
            ways_s[:num_local] += match.num_ssd_blocks * _load_block_s(layout)
        # Section 6.2: it is fetched only if that is quicker than computing what is lacking.
        rest_s = np.minimum.reduce(ways_s, where=match.rows_of(masks), initial=np.inf)
        queue_s = self.estimate_prefill_queue_time(now_s, request.priority)
        ttft_s = queue_s + rest_s
        num_blocks = layout.num_blocks(num_tokens)
        if num_blocks > loads.least_prefill_room_blocks:
            np.putmask(ttft_s, loads.prefill_room_blocks < num_blocks, np.inf)
        return Candidates(depths, masks, num_local, ways_s, queue_s, ttft_s)

    # -- the paper's functions ----------------------------------------------------------------------

    def find_best_prefix_match(self, match: PrefixMatch, layout: KVLayout) -> BestMatch | None:
        """Line 4: in all pools, those of decode instances too. Of several the one that gives it first."""
        num_blocks, mask = match.depths[-1], match.masks[-1]
        if not num_blocks:
            return None
        slot = mask.bit_length() - 1
        if mask != 1 << slot:
            holders = match.best_slots
            ahead_bytes = self._view.transfers.ahead_bytes(holders)
            if match.on_ssd:
                ahead_bytes += match.num_ssd_blocks[holders] * float(layout.block_bytes)
            slot = holders.item(int(ahead_bytes.argmin()))
        return BestMatch(slot, num_blocks, match.num_ssd_blocks_at(slot))

    def estimate_prefill_queue_time(self, now_s: float, priority: int) -> Floats:
        """Line 7: the sum of the predicted times of all prompts queued before it, less what has passed."""
        return self._view.loads.queue_s(now_s, priority)

    def estimate_prefill_execution_time(self, num_tokens: int, ways: Sequence[tuple[int, float]]) -> Floats:
        """Lines 9 and 17: of `num_tokens` tokens, by way: a prefix that has KVCache after some seconds.

        At least one token is computed: the first token comes from it.
        """
        quantities = []
        for prefix_len, after_s in ways:
            prefix_len = min(prefix_len, num_tokens - 1)
            quantities.append((1.0, *prefill_quantities(num_tokens - prefix_len, prefix_len), after_s))
        return self._view.prefill_costs.predict_all_s(quantities)

    def estimate_kvcache_transfer_time(self, best_matched_instance: BestMatch, layout: KVLayout) -> Fetch:
        """Lines 15 and 16: of the best prefix."""
        source, num_blocks, num_ssd_blocks = best_matched_instance
        block_bytes = layout.block_bytes
        first_s, byte_s = self._view.transfers.costs(source, num_ssd_blocks * block_bytes)
        block_s = byte_s * block_bytes
        return Fetch(first_s + num_blocks * block_s, block_s)

    def select_decoding_instance(
        self, request: Request, refused_by: Collection[str], layout: KVLayout
    ) -> tuple[int, float] | None:
        """Line 24: slot and TBT of the decode instance on which a step is shortest with this request."""
        view, num_tokens = self._view, len(request.token_ids)
        room_blocks = view.loads.decode_room_blocks
        num_blocks = layout.num_blocks(num_tokens_held(request, Role.DECODE))
        tbt_s = view.next_step_s + num_tokens * view.decode_costs.second_s
        np.putmask(tbt_s, room_blocks < num_blocks, np.inf)
        for name in refused_by:
            if (slot := view.slot_of(name)) is not None:
                tbt_s[slot] = np.inf
        d = int(tbt_s.argmin())
        shortest_s = tbt_s.item(d)
        return None if shortest_s == math.inf else (d, shortest_s)


def _load_block_s(layout: KVLayout) -> float:
    """To bring a block from SSD to DRAM."""
    return layout.block_bytes / SSD_BYTES_PER_S
