"""Algorithm 1, KVCache-centric scheduling (Mooncake, section 6): which pair of instances serves a request.

In the paper's order and with its names, for all instances at once: what the loop of the paper does for one
instance is one entry of an array here. Only a decode instance is chosen by load alone.

Owns: the choice. Does not know: what is done with it, whether overload rejects it (`conductor.overload`).
"""

from collections.abc import Collection
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
        match = view.prefixes.match(request.block_keys)
        best = self.find_best_prefix_match(match, layout) if self._fetches else None
        candidates = self._candidates(request, match, best, layout, now_s)
        p = self._choose(candidates, view.loads)
        if candidates.ttft_s[p] == np.inf:
            return None
        decoding = self.select_decoding_instance(request, refused_by, layout)
        if decoding is None:
            return None
        d, tbt_s = decoding
        transfer_s, prefill_s = candidates.times_of(p)
        prediction = Prediction(candidates.queue_s.item(p), transfer_s, prefill_s, tbt_s)
        pair = view.instance_at(p), view.instance_at(d)
        num_local_blocks = match.num_blocks.item(p)
        if best is None or not candidates.fetches(p):
            return Placement(*pair, num_local_blocks, None, 0, prediction)
        return Placement(*pair, num_local_blocks, view.instance_at(best.slot), best.num_blocks, prediction)

    def _candidates(
        self, request: Request, match: PrefixMatch, best: BestMatch | None, layout: KVLayout, now_s: float
    ) -> Candidates:
        """Lines 5 to 23: the TTFT on every instance."""
        num_tokens = len(request.token_ids)
        queue_s = self.estimate_prefill_queue_time(now_s, request.priority)
        rest_s = self.estimate_prefill_execution_time(num_tokens, 0)
        load_s, transfer_s, is_remote = None, None, None
        prefix_len = match.num_blocks * float(layout.block_size)
        best_prefix_len = match.num_best_blocks * layout.block_size
        if best_prefix_len:
            rest_s -= self._estimate_spared_time(prefix_len, best_prefix_len, num_tokens)
        if match.num_dram_blocks is not match.num_blocks:
            num_ssd_blocks = match.num_blocks - match.num_dram_blocks
            load_s = num_ssd_blocks * (layout.block_bytes / SSD_BYTES_PER_S)
            rest_s += load_s
        if best is not None:
            transfer_s = self.estimate_kvcache_transfer_time(best, prefix_len, layout)
            remote_s = transfer_s + self.estimate_prefill_execution_time(num_tokens, best_prefix_len)
            # Line 8, divided by the threshold, for prefix_len may be 0. At equality the own prefix is used.
            is_remote = prefix_len < best_prefix_len / self._view.balancing.threshold
            # And, section 6.2, it is fetched only if that is quicker than computing what is lacking.
            is_remote &= remote_s < rest_s
            np.copyto(rest_s, remote_s, where=is_remote)
        ttft_s = queue_s + rest_s
        ttft_s[self._view.loads.prefill_room_blocks < layout.num_blocks(num_tokens)] = np.inf
        return Candidates(queue_s, load_s, transfer_s, is_remote, rest_s, ttft_s)

    # -- the paper's functions ----------------------------------------------------------------------

    def find_best_prefix_match(self, match: PrefixMatch, layout: KVLayout) -> BestMatch | None:
        """Line 4: in all pools, those of decode instances too. Of several the one that gives it first."""
        best, holders = match.num_best_blocks, match.best_slots
        if best == 0:
            return None
        slot = holders.item(0)
        if len(holders) > 1:
            ahead_bytes = self._view.transfers.ahead_bytes(holders)
            if match.num_dram_blocks is not match.num_blocks:
                ahead_bytes += (best - match.num_dram_blocks[holders]) * float(layout.block_bytes)
            slot = holders.item(int(ahead_bytes.argmin()))
        return BestMatch(slot, best, best - match.num_dram_blocks.item(slot))

    def estimate_prefill_queue_time(self, now_s: float, priority: int) -> Floats:
        """Line 7: the sum of the predicted times of all prompts queued before it, less what has passed."""
        return self._view.loads.queue_s(now_s, priority)

    def estimate_prefill_execution_time(self, num_tokens: int, prefix_len: int) -> Floats:
        """Lines 9 and 17: of `num_tokens` tokens, `prefix_len` of which have KVCache.

        At least one token is computed: the first token comes from it.
        """
        prefix_len = min(prefix_len, num_tokens - 1)
        return self._view.prefill_costs.predict_all_s(
            *prefill_quantities(num_tokens - prefix_len, prefix_len)
        )

    def estimate_kvcache_transfer_time(
        self, best_matched_instance: BestMatch, prefix_len: Floats, layout: KVLayout
    ) -> Floats:
        """Lines 15 and 16: of what an instance lacks of the best prefix."""
        source, num_blocks, num_ssd_blocks = best_matched_instance
        first_s, byte_s = self._view.transfers.costs(source, num_ssd_blocks * layout.block_bytes)
        block_s = byte_s * layout.block_bytes
        return first_s + num_blocks * block_s - prefix_len * (block_s / layout.block_size)

    def select_decoding_instance(
        self, request: Request, refused_by: Collection[str], layout: KVLayout
    ) -> tuple[int, float] | None:
        """Line 24: slot and TBT of the decode instance on which a step is shortest with this request."""
        view = self._view
        tbt_s = view.next_step_s + len(request.token_ids) * view.decode_costs.second_s
        num_blocks = layout.num_blocks(num_tokens_held(request, Role.DECODE))
        tbt_s[view.loads.decode_room_blocks < num_blocks] = np.inf
        for name in refused_by:
            if (slot := view.slot_of(name)) is not None:
                tbt_s[slot] = np.inf
        d = int(tbt_s.argmin())
        return None if tbt_s[d] == np.inf else (d, tbt_s.item(d))

    def _estimate_spared_time(self, prefix_len: Floats, best_prefix_len: int, num_tokens: int) -> Floats:
        """Line 9: of the whole prompt's prefill, what each instance spares by its own prefix.

        n tokens behind c others make n * (c + n / 2) pairs, which is (num_tokens^2 - c^2) / 2.
        """
        costs = self._view.prefill_costs
        if best_prefix_len >= num_tokens:
            prefix_len = np.minimum(prefix_len, num_tokens - 1.0)
        spared_s = costs.second_s * 0.5
        spared_s *= prefix_len
        spared_s += costs.first_s
        spared_s *= prefix_len
        return spared_s
