"""The admission of requests to the batch of a simulated decode instance.

The double check (Mooncake, section 3) uses the server's own predictor. It is made when prefill has ended, and
repeated whenever a request leaves the batch, until the first token is due. Prompts that are inlined
(`inlining`) keep their pages in the pool until they are computed.

Owns: the order of events until a sequence waits for the batch. Does not know: iterations.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.tools.simulator.cluster.batch import Batch, Member
from benchmarks.tools.simulator.cluster.cache import Reservation
from benchmarks.tools.simulator.cluster.decode.inlining import InlinedPrompts, Prompt
from benchmarks.tools.simulator.cluster.decode.sequence import Sequence, Sequences
from benchmarks.tools.simulator.cluster.decode.turns import Turns
from benchmarks.tools.simulator.cluster.node import Node
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from mooncake.messages.pools import Grant, GrantedPage
from mooncake.messages.requests import Ref
from mooncake.messages.workers import Decode, DecodeRefused, Reserve, Reserved
from workers.decode.tbt_slo.tbt import IterationPredictors


class Arrivals:
    """The requests that are placed on one instance.

    Args:
        node: The instance.
        sequences: The instance's sequences.
        batch: The instance's batch.
        predictors: The instance's predictors.
        max_batch: The most requests that are decoded together.
        inlined: The prompts that the instance computes.
        enter: Called with a sequence whose KVCache is on the device, or will be computed there.
        finish: Called with a sequence that has all its tokens.
        checks_reservations: Whether the double check is also made when pages are reserved.
    """

    def __init__(
        self,
        node: Node,
        sequences: Sequences,
        batch: Batch,
        predictors: IterationPredictors,
        max_batch: int,
        inlined: InlinedPrompts,
        enter: Callable[[Sequence], None],
        finish: Callable[[Sequence], None],
        *,
        checks_reservations: bool,
    ) -> None:
        self._node, self._sequences, self._batch = node, sequences, batch
        self._predictors, self._max_batch, self._inlined = predictors, max_batch, inlined
        self._enter, self._finish = enter, finish
        self._checks_reservations = checks_reservations
        self.turns = Turns(node.clock, self._turn_too_slow_s, self._begin, self._refuse_turn)
        """The sequences that wait for a smaller batch."""
        self._num_grants = 0

    def reserve(self, order: Reserve, request: SimulatedRequest) -> None:
        """Reserve pages for a request."""
        member = Member(request.number, request.num_input_tokens, request.num_output_tokens - 1)
        request.member = member
        tbt_slo_s = order.tbt_slo_s if order.may_refuse else None
        sequence = Sequence(order.ref, request, member, tbt_slo_s, holds_first=order.tbt_slo_s is not None)
        if order.inline:
            sequence.prompt = Prompt(request, member, order.tbt_slo_s)
        elif self._checks_reservations:
            tbt_s = self._too_slow_s(sequence, len(self._sequences), self._sequences.num_outside_tokens)
            if tbt_s is not None:
                self._refuse(sequence, len(self._sequences), tbt_s)
                return
        self._sequences.add(sequence)
        if sequence.prompt is None:
            self._reserve_pages(sequence)
        else:
            self._inlined.turns.add(sequence.prompt, partial(self._reserve_pages, sequence))

    def decode(self, order: Decode) -> None:
        """Let a request whose prefill has ended wait for its turn.

        An order for an unknown request is dropped, because the request has just been aborted.
        """
        if (sequence := self._sequences.get(order.ref)) is not None:
            self.turns.add(sequence, order.time_left_s)

    def _reserve_pages(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.take_back = self._node.pool.reserve(
            request.block_keys, request.num_private_pages, partial(self._reserved, sequence)
        )

    def _reserved(self, sequence: Sequence, reservation: Reservation) -> None:
        sequence.reservation = reservation
        self._num_grants += 1
        pages = [GrantedPage(index, reservation.pages[index], 0) for index in reservation.missing]
        self._node.send(Reserved(sequence.ref, Grant(self._num_grants, self._node.messenger, pages)))
        if sequence.prompt is not None:
            self._begin_inlined(sequence, sequence.prompt, reservation)

    def _begin_inlined(self, sequence: Sequence, prompt: Prompt, reservation: Reservation) -> None:
        """Begin an inlined prompt. The tokens behind the blocks that the pool has are computed."""
        num_found = reservation.num_found * prompt.request.block_tokens
        prompt.request.num_cached_tokens = prompt.num_done = min(
            num_found, prompt.request.num_reusable_tokens
        )
        self._sequences.begin(sequence)
        self._load(sequence, prompt.num_done)
        self._inlined.turns.reserved(prompt, reservation.num_found)

    def _too_slow_s(self, sequence: Sequence, num_others: int, num_outside_tokens: int) -> float | None:
        """Return the predicted TBT of the sequence beside others if it misses the sequence's SLO, else None.

        An empty batch refuses no sequence, as in `workers.decode.tbt_slo.double_check`.
        """
        if sequence.tbt_slo_s is None or not num_others:
            return None
        num_kv_tokens = self._batch.num_kv_tokens + num_outside_tokens + sequence.member.num_tokens
        missed = self._predictors.too_slow(num_others + 1, num_kv_tokens, self._max_batch, sequence.tbt_slo_s)
        return None if missed is None else missed.tbt_s

    def _refuse(self, sequence: Sequence, num_others: int, tbt_s: float) -> None:
        self._node.send(DecodeRefused(sequence.ref, "the TBT SLO would be missed", num_others + 1, tbt_s))

    def _turn_too_slow_s(self, sequence: Sequence) -> float | None:
        sequences = self._sequences
        return self._too_slow_s(sequence, sequences.num_begun, sequences.num_begun_outside_tokens)

    def _refuse_turn(self, sequence: Sequence, tbt_s: float) -> None:
        self._refuse(sequence, self._sequences.num_begun, tbt_s)
        self.forget(sequence)

    def _begin(self, sequence: Sequence) -> None:
        self._sequences.begin(sequence)
        sequence.first_may_leave(self._node.clock.now_s)
        if not sequence.member.num_left:
            self._finish(sequence)
        elif sequence.has_arrived:
            self._load(sequence, sequence.member.num_tokens)

    def arrived(self, ref: Ref) -> None:
        """Record that the pool has all KVCache of a prompt."""
        sequence = self._sequences.get(ref)
        if sequence is None:
            return
        self._arrive(sequence)
        sequence.has_arrived = True
        if sequence.has_begun:
            self._load(sequence, sequence.member.num_tokens)

    def _arrive(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None
        self._node.pool.arrived(sequence.reservation, range(len(sequence.reservation.keys)))

    def _load(self, sequence: Sequence, num_tokens: int) -> None:
        """Load tokens of a sequence to the device, while iterations run."""
        num_bytes = num_tokens * self._node.kv_bytes_per_token
        self._node.clock.after(num_bytes / self._node.pcie_bytes_per_s, self._loaded, sequence)

    def _loaded(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.ref) is None:
            return
        if sequence.prompt is None:
            self._release(sequence)
        self._enter(sequence)

    def stored(self, sequence: Sequence) -> None:
        """Seal the blocks of a prompt that was computed here, and release their pages."""
        self._arrive(sequence)
        self._release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is in no batch."""
        self._sequences.remove(sequence)
        if sequence.reservation is not None:
            self._node.pool.release(sequence.reservation)
        elif sequence.take_back is not None:
            sequence.take_back()

    def _release(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None
        self._node.pool.release(sequence.reservation)
        sequence.reservation = None
