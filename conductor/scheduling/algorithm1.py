"""Algorithm 1, KVCache-centric scheduling (Mooncake, section 6): which pair of instances serves a request.

In the paper's order and with its names; what it does instance by instance is in
`conductor.scheduling.loops`. Only a decode instance is chosen by load alone.

Owns: the choice. Does not know: what is done with it, whether overload rejects it
(`conductor.admission.overload`).
"""

import math
from collections.abc import Collection
from typing import NamedTuple

from conductor.index.prefix_index import PrefixMatch
from conductor.rules import Rules
from conductor.scheduling.choices import Candidates, choice_of
from conductor.scheduling.loops import NO_FETCH, Fetch, Prompt, loops_of
from conductor.view.cluster_view import ClusterView
from conductor.view.placement import Placement, Prediction, num_tokens_held
from conductor.view.transfers import SSD_BYTES_PER_S
from mooncake.messages.blocks import KVLayout
from mooncake.messages.requests import Request
from mooncake.messages.workers import Role


class BestMatch(NamedTuple):
    """Who holds the longest prefix of a prompt, and how much."""

    slot: int
    num_blocks: int
    num_ssd_blocks: int


class Scheduler:
    """Chooses with what `view` knows."""

    def __init__(self, view: ClusterView, rules: Rules) -> None:
        self._view = view
        self._loops = loops_of(view)
        self._fetches = rules.fetches_prefixes
        self._choose = choice_of(rules)

    def schedule(self, request: Request, now_s: float, refused_by: Collection[str] = ()) -> Placement | None:
        """The pair of instances for a request; None if no pair can hold it now.

        Not on decode instances that have refused it.
        """
        view, layout = self._view, self._view.layout
        if layout is None or not view.loads.prefill_mask:
            return None
        match = view.prefixes.match(request.block_keys)
        best = self.find_best_prefix_match(match) if self._fetches else None
        fetch = NO_FETCH if best is None else self.estimate_kvcache_transfer_time(best)
        candidates = self.estimate_ttft(request, match, fetch, layout, now_s)
        p = self._choose(candidates, view.loads)
        if candidates.ttft_s.item(p) == math.inf:
            return None
        decoding = self.select_decoding_instance(request, refused_by, layout)
        if decoding is None:
            return None
        d, tbt_s = decoding
        pair = view.instance_at(p), view.instance_at(d)
        queue_s, rest_s = candidates.queue_s.item(p), candidates.rest_s.item(p)
        num_local_blocks = match.num_blocks_at(p)
        if best is None or not candidates.is_remote.item(p):
            load_s = match.num_ssd_blocks_at(p) * self._load_block_s
            prediction = Prediction(queue_s, load_s, rest_s - load_s, tbt_s)
            return Placement(*pair, num_local_blocks, None, 0, prediction)
        transfer_s = fetch.seconds(num_local_blocks)
        prediction = Prediction(queue_s, transfer_s, rest_s - transfer_s, tbt_s)
        return Placement(*pair, num_local_blocks, view.instance_at(best.slot), best.num_blocks, prediction)

    @property
    def _load_block_s(self) -> float:
        """To bring a block from SSD to DRAM."""
        return self._view.block_bytes / SSD_BYTES_PER_S

    # -- the paper's functions ----------------------------------------------------------------------

    def find_best_prefix_match(self, match: PrefixMatch) -> BestMatch | None:
        """Line 4: in all pools, those of decode instances too. Of several the one that gives it first."""
        num_blocks, mask = match.depths[-1], match.masks[-1]
        if not num_blocks:
            return None
        slot = mask.bit_length() - 1
        if mask != 1 << slot:
            slot = self._loops.find_best_prefix_match(match)
        return BestMatch(slot, num_blocks, match.num_ssd_blocks_at(slot))

    def estimate_kvcache_transfer_time(self, best_matched_instance: BestMatch) -> Fetch:
        """Lines 15 and 16: of the best prefix.

        Line 8 is divided by the threshold, for prefix_len may be 0. At equality the own prefix is used.
        """
        source, num_blocks, num_ssd_blocks = best_matched_instance
        block_bytes = self._view.block_bytes
        first_s, byte_s = self._view.transfers.costs(source, num_ssd_blocks * block_bytes)
        block_s = byte_s * block_bytes
        worth_below_blocks = num_blocks / self._view.balancing.threshold
        return Fetch(num_blocks, first_s + num_blocks * block_s, block_s, worth_below_blocks)

    def estimate_ttft(
        self, request: Request, match: PrefixMatch, fetch: Fetch, layout: KVLayout, now_s: float
    ) -> Candidates:
        """Lines 5 to 23: on every instance."""
        num_tokens = len(request.token_ids)
        num_blocks = layout.num_blocks(num_tokens)
        prompt = Prompt(num_tokens, num_blocks, layout.block_size, self._load_block_s, request.priority)
        return self._loops.find_candidates(prompt, match, fetch, now_s)

    def select_decoding_instance(
        self, request: Request, refused_by: Collection[str], layout: KVLayout
    ) -> tuple[int, float] | None:
        """Line 24: slot and TBT of the decode instance on which a step is shortest with this request."""
        num_blocks = layout.num_blocks(num_tokens_held(request, Role.DECODE))
        refused = [slot for name in refused_by if (slot := self._view.slot_of(name)) is not None]
        return self._loops.select_decoding_instance(len(request.token_ids), num_blocks, refused)
