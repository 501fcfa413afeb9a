"""Algorithm 1, KVCache-centric scheduling (Mooncake, section 6): the paper's listing in plain Python.

`Scheduler` has the order and names of the listing. The compiled loops (`conductor.scheduling.native`) have
the same results to the last bit. The plain loops are used where nothing can be compiled. These details are
left open by the paper:

    line 4   holders include the pools of decode instances; of several holders the one that can send first
             is taken
    line 6   blocks that a placed prompt has yet to compute count as held by its instance, but are not
             fetched: the new prompt waits for them in the queue (T_queue, the time of the prompts before it)
    line 8   the ratio is written as a product, as prefix_len may be 0; at equality the instance's own prefix
             is used
    line 9   the time includes copying the prefix's blocks from SSD to DRAM; at least one token is computed
    line 10  if an instance would compute blocks that another instance is about to compute, the time of this
             computation is added to its TTFT in the comparison
    line 14  a fetch must also be quicker than computing what it brings (section 6.2)

The listing chooses a prefill and a decode instance. The alternative is one decode instance that inlines the
prompt (section 5; Sarathi-Serve, OSDI 2024). Then no KVCache is transferred, but chunks of the prompt share
iterations with the requests that this instance is decoding. The alternative that adds less waiting is chosen.
Added waiting is the request's own wait for its first token, plus the time by which it delays other requests.

Lines 25 to 27 are in `conductor.admission.overload`. Lines 28 to 30 are the prefix source in the order to
prefill.

Owns: the choice. Does not know: how the choice is carried out, how the view's numbers were predicted.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from conductor.index.prefix_index import PrefixMatch
from conductor.scheduling.choices import Candidates, choice_of
from conductor.settings import PolicySettings
from conductor.view.cluster_view import ClusterView
from conductor.view.estimators import Floats
from conductor.view.placement import Placement, Prediction, num_tokens_held
from conductor.view.transfers import SSD_BYTES_PER_S
from mooncake.messages.blocks import KVLayout
from mooncake.messages.costs import TBT_SLO_SHARE, prefill_quantities
from mooncake.messages.requests import Request
from mooncake.messages.workers import Role


class Prompt(NamedTuple):
    """A prompt to schedule, with the quantities that Algorithm 1 needs."""

    num_tokens: int
    num_blocks: int
    block_size: int
    num_stored_blocks: int
    """The number of blocks of the longest prefix that any instance holds."""
    num_coming_blocks: int
    """The number of blocks of the longest prefix that earlier prompts have yet to compute.

    0 if computing this prefix again shall not count against an instance.
    """
    load_block_s: float
    """Seconds to bring one block of the prompt from SSD to DRAM."""
    priority: int


class LongestPrefix(NamedTuple):
    """The longest prefix that any instance holds, and the time that a fetch of it takes."""

    best_matched_instance: int | None
    """The slot of the prefix's best holder; None if no prefix can be fetched."""
    num_blocks: int
    whole_s: float
    """Seconds to fetch the whole prefix."""
    block_s: float
    """Seconds that a fetch saves for each block that the fetching instance holds itself."""
    worth_below_blocks: float
    """An instance with fewer held blocks than this number may fetch the prefix (line 8)."""

    def transfer_s(self, num_held_blocks: int) -> float:
        """Return the seconds of a transfer to an instance that holds `num_held_blocks` (lines 15 and 16)."""
        return self.whole_s - num_held_blocks * self.block_s


NO_FETCH = LongestPrefix(None, 0, 0.0, 0.0, 0.0)


class Decoding(NamedTuple):
    """The needs of a request at its decode instance."""

    num_tokens: int
    """Tokens of the prompt."""
    num_blocks: int
    """Blocks of the request when its output is complete."""
    refused: Sequence[int]
    """Slots of instances that must not be chosen."""


class Inlined(NamedTuple):
    """The decode instance that computes the prompt with the least added waiting, and its predictions."""

    instance: int
    queue_s: float
    load_s: float
    """Seconds to bring the prefix from SSD to DRAM."""
    prefill_s: float
    beside_s: float
    """Seconds of other requests in the iterations that they share with the prompt's chunks."""
    waiting_s: float
    """Seconds of waiting that the prompt adds.

    They are its own wait for its first token, the waits of delayed requests, and the time to compute blocks
    that another instance will compute too.
    """


class Scheduler:
    """Algorithm 1. It chooses the pair of instances for a request, from the numbers of `view`."""

    def __init__(self, view: ClusterView, settings: PolicySettings) -> None:
        self._view = view
        self._fetches = settings.fetches_prefixes
        self._mixed_chunk_tokens = settings.mixed_chunk_tokens
        self._choose = choice_of(settings)

    def schedule(
        self,
        request: Request,
        now_s: float,
        refused_by: Collection[str] = (),
        tbt_slo_s: float | None = None,
        *,
        may_compute_again: bool = False,
        inlined: bool | None = None,
    ) -> Placement | None:
        """Return the pair of instances for a request, or the instance that inlines its prompt.

        Args:
            request: The request to place.
            now_s: The present time in seconds.
            refused_by: Names of decode instances that have refused the request. One of them is chosen only if
                no other instance has room.
            tbt_slo_s: The strictest TBT SLO, in seconds, among requests that would share iterations with an
                inlined prompt; None if they have none.
            may_compute_again: Whether to compare instances by the request's TTFT alone. Otherwise an instance
                is also charged for the time in which it would compute blocks that earlier prompts will
                compute on other instances.
            inlined: True for an instance that inlines the prompt, False for a pair, None for the choice that
                adds less waiting.

        Returns:
            The chosen instances and the predicted times; None if no instance or pair has room.
        """
        view, layout = self._view, self._view.layout
        if layout is None:
            return None
        num_tokens = len(request.token_ids)
        load_block_s = view.block_bytes / SSD_BYTES_PER_S
        num_blocks = layout.num_blocks(num_tokens)
        pooled = view.prefixes.match(request.block_keys)
        fetch = self._best_fetch(pooled) if self._fetches else NO_FETCH
        held = view.prefixes.match_own(request.block_keys, pooled)
        coming = view.coming.match(request.block_keys, request.priority, now_s)
        # Blocks that are coming count as held where they will be computed; elsewhere it costs their time to
        # compute them again, unless only the first token counts.
        match = held.with_coming(coming) if coming else held
        pays_again = match is not held and not may_compute_again
        prompt = Prompt(
            num_tokens,
            num_blocks,
            layout.block_size,
            num_stored_blocks=held.num_best_blocks,
            num_coming_blocks=max(coming)[0] if pays_again else 0,
            load_block_s=load_block_s,
            priority=request.priority,
        )
        candidates = self.estimate_ttft(prompt, match, fetch, now_s)
        p = self._choose(candidates, view.loads)
        can_prefill = candidates.ttft_s.item(p) < math.inf
        decoding = self._decoding(request, refused_by, layout)
        best = None if inlined is False else self._inlined(prompt, match, decoding, tbt_slo_s, now_s)
        if best is not None and (
            inlined or not can_prefill or best.waiting_s <= self._waiting_s(candidates, p)
        ):
            return self._inlined_placement(best, decoding.num_tokens, held, match)
        chosen = self._decoding_instance(decoding) if can_prefill and not inlined else None
        if chosen is None:
            return None
        d, _ = chosen
        num_local_blocks = match.num_blocks_at(p)
        num_coming_blocks = 0 if match is held else num_local_blocks - held.num_blocks_at(p)
        if fetch.best_matched_instance is not None and candidates.is_remote.item(p):
            source, num_source_blocks = view.instance_at(fetch.best_matched_instance), fetch.num_blocks
            transfer_s = fetch.transfer_s(num_local_blocks)
        else:
            source, num_source_blocks = None, 0
            transfer_s = match.num_ssd_blocks_at(p) * load_block_s
        prefill_s = candidates.rest_s.item(p) - transfer_s
        gap_s = view.next_gap_s(d, num_tokens)
        prediction = Prediction(candidates.queue_s.item(p), transfer_s, prefill_s, gap_s)
        prefill, decode = view.instance_at(p), view.instance_at(d)
        return Placement(
            prefill, decode, num_local_blocks, num_coming_blocks, source, num_source_blocks, prediction
        )

    def _waiting_s(self, candidates: Candidates, p: int) -> float:
        """Return the seconds of waiting that a prompt adds on a prefill instance.

        The number of prompts that will arrive behind it is assumed to be the number queued now.
        """
        behind_s = self._view.loads.num_prompts.item(p) * candidates.rest_s.item(p)
        return candidates.ttft_s.item(p) + candidates.again_s.item(p) + behind_s

    def _inlined(
        self, prompt: Prompt, match: PrefixMatch, decoding: Decoding, tbt_slo_s: float | None, now_s: float
    ) -> Inlined | None:
        if not self._view.loads.inlines.any():
            return None
        budget_s = math.inf if tbt_slo_s is None else TBT_SLO_SHARE * tbt_slo_s
        found = self.select_inlining_instance(prompt, match, decoding, budget_s, now_s)
        if found is None or prompt.num_blocks > self._view.instance_at(found.instance).max_prompt_blocks:
            return None
        return found

    def _inlined_placement(
        self, inlined: Inlined, num_tokens: int, held: PrefixMatch, match: PrefixMatch
    ) -> Placement:
        view, slot = self._view, inlined.instance
        gap_s = view.next_gap_s(slot, num_tokens)
        prediction = Prediction(inlined.queue_s, inlined.load_s, inlined.prefill_s, gap_s, inlined.beside_s)
        instance, num_local_blocks = view.instance_at(slot), match.num_blocks_at(slot)
        num_coming_blocks = num_local_blocks - held.num_blocks_at(slot)
        return Placement(instance, instance, num_local_blocks, num_coming_blocks, None, 0, prediction)

    def _best_fetch(self, match: PrefixMatch) -> LongestPrefix:
        """Return the source of the best fetch (line 4), with its transfer times (line 16)."""
        view, num_blocks, mask = self._view, match.depths[-1], match.masks[-1]
        if not num_blocks:
            return NO_FETCH
        slot = mask.bit_length() - 1
        if mask != 1 << slot:
            slot = self.find_best_prefix_match(match)
        first_s, byte_s = view.transfers.costs(slot, match.num_ssd_blocks_at(slot) * view.block_bytes)
        block_s = byte_s * view.block_bytes
        worth_below_blocks = num_blocks / view.balancing.threshold
        return LongestPrefix(slot, num_blocks, first_s + num_blocks * block_s, block_s, worth_below_blocks)

    def _decoding(self, request: Request, refused_by: Collection[str], layout: KVLayout) -> Decoding:
        num_blocks = layout.num_blocks(num_tokens_held(request, Role.DECODE))
        refused = [slot for name in refused_by if (slot := self._view.slot_of(name)) is not None]
        return Decoding(len(request.token_ids), num_blocks, refused)

    def _decoding_instance(self, decoding: Decoding) -> tuple[int, float] | None:
        found = self.select_decoding_instance(decoding)
        if found is None and decoding.refused:
            found = self.select_decoding_instance(decoding._replace(refused=()))
        return found

    # -- the listing's loops over all instances, which `conductor.scheduling.native` replaces ---------------

    def find_best_prefix_match(self, match: PrefixMatch) -> int:
        """Return the slot that can send the longest prefix soonest, among the prefix's holders (line 4)."""
        transfers, block_bytes = self._view.transfers, self._view.block_bytes

        def ahead_bytes(slot: int) -> float:
            ahead = max(transfers.in_flight_bytes.item(slot), transfers.ordered_bytes.item(slot))
            return ahead + float(match.num_ssd_blocks_at(slot) * block_bytes)

        best_prefix_len = match.num_best_blocks
        holders = [slot for slot in range(match.num_slots) if match.num_blocks_at(slot) == best_prefix_len]
        return min(holders, key=ahead_bytes)

    def estimate_ttft(
        self, prompt: Prompt, match: PrefixMatch, fetch: LongestPrefix, now_s: float
    ) -> Candidates:
        """Return the estimated TTFT on each instance, and the slot with the least (lines 2 to 23)."""
        loads = self._view.loads
        behind_s = loads.behind_s(prompt.priority)
        queue_s, rest_s, ttft_s, is_remote, again_s = zeroed_candidates(loads.num_slots)
        prefill_time = partial(self._estimate_prefill_execution_time, prompt)
        least_cost_s, p = math.inf, 0  # lines 2 and 3
        for instance in range(loads.num_slots):  # line 5
            prefix_blocks = match.num_blocks_at(instance)  # line 6
            t_queue = self._estimate_prefill_queue_time(instance, behind_s, now_s)  # line 7
            t_load = match.num_ssd_blocks_at(instance) * prompt.load_block_s
            t_prefill = prefill_time(instance, prefix_blocks)  # line 9
            least_rest_s = t_load + t_prefill
            used_blocks = prefix_blocks
            if prefix_blocks < fetch.worth_below_blocks:  # lines 8 and 14
                t_transfer = fetch.transfer_s(prefix_blocks)  # lines 15 and 16
                t_prefill = prefill_time(instance, fetch.num_blocks)  # line 17
                if t_transfer + t_prefill < least_rest_s:
                    least_rest_s, is_remote[instance] = t_transfer + t_prefill, True
                    used_blocks = fetch.num_blocks
            t_again = self._estimate_time_again(prompt, instance, used_blocks)
            has_room = loads.prefill_room_blocks.item(instance) >= prompt.num_blocks
            ttft = t_queue + least_rest_s if has_room and loads.is_prefill.item(instance) else math.inf
            if least_cost_s > ttft + t_again:  # lines 10 and 18
                least_cost_s, p = ttft + t_again, instance  # lines 11 and 12, 19 and 20
            queue_s[instance], rest_s[instance], ttft_s[instance] = t_queue, least_rest_s, ttft
            again_s[instance] = t_again
        return Candidates(queue_s, rest_s, ttft_s, is_remote, again_s, p)

    def _estimate_prefill_queue_time(self, instance: int, behind_s: Floats | None, now_s: float) -> float:
        """Return the seconds until the instance has computed all prompts ahead of this one (line 7)."""
        loads = self._view.loads
        left_s = max(loads.ends_s.item(instance) - now_s, loads.behind_head_s.item(instance))
        return left_s if behind_s is None else left_s - behind_s.item(instance)

    def _estimate_prefill_execution_time(self, prompt: Prompt, instance: int, prefix_blocks: int) -> float:
        """Return the seconds to compute the prompt after its first `prefix_blocks` (lines 9 and 17)."""
        prefix_len = min(prefix_blocks * prompt.block_size, prompt.num_tokens - 1)
        num_new, num_pairs = prefill_quantities(prompt.num_tokens - prefix_len, prefix_len)
        return self._view.prefill_costs.predict_s(instance, num_new, num_pairs)

    def _estimate_time_again(self, prompt: Prompt, instance: int, prefix_blocks: int) -> float:
        """Return the seconds that a prefill spends on blocks that are coming elsewhere.

        The prefill begins after `prefix_blocks`. Blocks that some instance holds already do not count.
        """
        prefix_blocks = max(prefix_blocks, prompt.num_stored_blocks)
        if prefix_blocks >= prompt.num_coming_blocks:
            return 0.0
        whole_s = self._estimate_prefill_execution_time(prompt, instance, prefix_blocks)
        return whole_s - self._estimate_prefill_execution_time(prompt, instance, prompt.num_coming_blocks)

    def select_decoding_instance(self, request: Decoding) -> tuple[int, float] | None:
        """Return the slot and predicted TBT in seconds of the decode instance with the least TBT (line 24).

        None if no instance has room.
        """
        view = self._view
        least_s, d = math.inf, None
        for instance in range(view.loads.num_slots):
            tokens_s = request.num_tokens * view.next_token_s.item(instance)
            tbt_s = view.next_delay.item(instance) * (view.next_iteration_s.item(instance) + tokens_s)
            if self._has_room_to_decode(instance, request) and tbt_s < least_s:
                least_s, d = tbt_s, instance
        return None if d is None else (d, least_s)

    def _has_room_to_decode(self, instance: int, request: Decoding) -> bool:
        room_blocks = self._view.loads.decode_room_blocks.item(instance)
        return room_blocks >= request.num_blocks and instance not in request.refused

    def select_inlining_instance(
        self, prompt: Prompt, match: PrefixMatch, request: Decoding, budget_s: float, now_s: float
    ) -> Inlined | None:
        """Return the instance on which the prompt adds the least waiting if it is inlined there.

        Args:
            prompt: The prompt.
            match: The instances that hold a prefix of the prompt.
            request: The request's requirements on its decode instance.
            budget_s: The most seconds that an iteration with a chunk of the prompt and other requests may
                take.
            now_s: The time.

        Returns:
            The instance with the predicted times; None if no inlining instance has room and keeps the budget.
        """
        loads, costs = self._view.loads, self._view.decode_costs
        behind_s = loads.behind_s(prompt.priority)
        best: Inlined | None = None
        for instance in range(loads.num_slots):
            if not (loads.inlines.item(instance) and self._has_room_to_decode(instance, request)):
                continue
            prefix_blocks = match.num_blocks_at(instance)
            prefill_s = self._estimate_prefill_execution_time(prompt, instance, prefix_blocks)
            num_new = prompt.num_tokens - min(prefix_blocks * prompt.block_size, prompt.num_tokens - 1)
            num_decoding, beside_s = loads.num_decoding.item(instance), 0.0
            if num_decoding:
                num_kv_tokens = loads.num_decoding_tokens.item(instance)
                iteration_s = costs.predict_s(instance, num_decoding, num_kv_tokens)
                left_s = budget_s - iteration_s
                chunk = max(prompt.block_size, min(loads.least_chunk_tokens.item(instance), num_new))
                if left_s <= 0 or chunk * (prefill_s / num_new) > left_s:
                    continue
                num_chunks = num_new / self._mixed_chunk_tokens if left_s == math.inf else prefill_s / left_s
                beside_s = math.ceil(num_chunks) * iteration_s
            queue_s = self._estimate_prefill_queue_time(instance, behind_s, now_s)
            load_s = match.num_ssd_blocks_at(instance) * prompt.load_block_s
            delayed_s = (num_decoding + loads.num_prompts.item(instance)) * prefill_s
            again_s = self._estimate_time_again(prompt, instance, prefix_blocks)
            waiting_s = queue_s + load_s + prefill_s + beside_s + delayed_s + again_s
            if best is None or waiting_s < best.waiting_s:
                best = Inlined(instance, queue_s, load_s, prefill_s, beside_s, waiting_s)
        return best


def zeroed_candidates(
    num_slots: int,
) -> tuple[Floats, Floats, Floats, np.ndarray[tuple[int], np.dtype[np.bool_]], Floats]:
    """Return zeroed arrays for the fields of `Candidates` in order, without the last field `least`."""
    queue_s, rest_s, ttft_s, again_s = np.zeros((4, num_slots))
    return queue_s, rest_s, ttft_s, np.zeros(num_slots, np.bool_), again_s
