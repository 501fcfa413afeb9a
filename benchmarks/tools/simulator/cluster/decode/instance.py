"""A simulated decode instance: pages, the double check, continuous batching.

The double check (Mooncake, section 3) is made when prefill has ended, with the server's own predictor, and
again whenever somebody leaves the batch, while there is time until the first token is due. A
batch that outgrows the device preempts its newest member, which joins again later. Prompts that are inlined
(`inlining`) keep their pages, in the pool until they are computed. Requests that migrate are `migrating`'s.

Owns: sequences and the batch. Does not know: who placed them here, prefill instances.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from benchmarks.tools.simulator.cluster.batch import Batch, Member, StepCost
from benchmarks.tools.simulator.cluster.cache import Reservation
from benchmarks.tools.simulator.cluster.decode.double_check import DoubleCheck
from benchmarks.tools.simulator.cluster.decode.inlining import InlinedPrompts, Mixed, Prompt
from benchmarks.tools.simulator.cluster.decode.migrating import Migrating
from benchmarks.tools.simulator.cluster.decode.sequence import Sequence
from benchmarks.tools.simulator.cluster.decode.turns import Turns
from benchmarks.tools.simulator.cluster.decoding import BatchRunner
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.cluster.node import Node
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest
from mooncake.messages.migration import MigrationOrder
from mooncake.messages.pools import Grant, GrantedPage
from mooncake.messages.requests import FinishReason, Ref
from mooncake.messages.workers import (
    Abort,
    Decode,
    DecodeLoad,
    DecodeStats,
    Finished,
    Prefilled,
    Refused,
    Reserve,
    Reserved,
)
from workers.decode.prompt_budget import ChunkLimits
from workers.decode.tbt import IterationPredictors

ANY_TOKEN = 0


class DecodeInstance:
    """Takes `Reserve`, `Decode`, `Abort` and the orders of migrations; sends `Reserved`, `Prefilled`,
    `Refused`, `Finished` and the answers.

    `capacity_tokens`: of KVCache on the device. Without `checks_reservations` the double check is made only
    when prefill has ended.
    """

    def __init__(
        self,
        node: Node,
        max_batch: int,
        capacity_tokens: int,
        chunk_limits: ChunkLimits,
        find_request: Callable[[str], SimulatedRequest],
        *,
        checks_reservations: bool = False,
    ) -> None:
        self.node = node
        self._max_batch, self.capacity_tokens = max_batch, capacity_tokens
        self._find_request, self._checks_reservations = find_request, checks_reservations
        self.batch = Batch()
        self._runner = BatchRunner(node.clock, self._step_cost, self.batch, self._run_ended)
        if node.machine is not None:
            node.machine.on_change[node.name] = self._runner.cut
        self.predictors = IterationPredictors()
        self._double_check = DoubleCheck(self.predictors, max_batch)
        self.inlined = InlinedPrompts(self.predictors, chunk_limits)
        self._is_mixed = False  # whether an iteration with prompts is under way
        self._sequences: dict[Ref, Sequence] = {}
        self._sequence_of: dict[Member, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._turns = Turns(node.clock, self._turn_too_slow_s, self._begin, self._refuse_turn)
        """Sequences that wait because the batch is too large."""
        self._num_begun = self._num_grants = 0
        self._num_outside_tokens = self._num_begun_outside_tokens = 0
        """Tokens of all sequences outside the batch, and of the ones among them that have begun."""
        self.num_refusals = self.num_preemptions = self._num_iterations = self._num_tokens = 0
        self.busy_s = 0.0
        """Seconds of iterations."""
        self.migrating = Migrating(self, find_request)
        self._between_steps: list[Callable[[], None]] = []
        self._tails: list[tuple[Sequence, int]] = []
        """Requests that have moved here, each with the tokens that it has on the device."""

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def load(self) -> DecodeLoad:
        """The load for heartbeats, as `workers.decode.double_check` reports it."""
        num_kv_tokens = self.batch.num_kv_tokens + self._num_outside_tokens
        tbt_s = self._double_check.tbt_s(self.num_sequences, num_kv_tokens)
        num_left = sum(s.prompt.num_left for s in self._sequences.values() if s.prompt is not None)
        token_s = self.predictors.prompt_cost.predict_s(1) or 0.0
        return DecodeLoad(self.num_sequences, len(self._turns), tbt_s, num_left, token_s)

    @property
    def num_free_tokens(self) -> int:
        """Free tokens of the device's KVCache."""
        num_others = self.inlined.num_device_tokens + self.migrating.num_held_tokens
        return self.capacity_tokens - self.batch.num_kv_tokens - num_others

    @property
    def step_s(self) -> float:
        """What a step of the batch takes now; 0 without a batch."""
        if not self.batch.size:
            return 0.0
        costs = self.node.costs
        return costs.iteration_s((), self.batch.size) + costs.kv_token_s * self.batch.num_kv_tokens

    def stats(self) -> DecodeStats:
        """Totals, for heartbeats."""
        return DecodeStats(
            self._num_iterations,
            self._num_tokens,
            forward_s=self.busy_s,
            num_inlined=self.inlined.num_computed,
            mixed=self.inlined.mixed,
        )

    def receive(self, message: Reserve | Decode | Abort | MigrationOrder) -> None:
        """Receive a message from the Conductor."""
        match message:
            case Reserve():
                self._reserve(message)
            case Decode():
                if (sequence := self._sequences.get(message.ref)) is not None:
                    self._turns.add(sequence, message.time_left_s)
            case Abort():
                self.migrating.abort(message.ref)
                self._abort(message.ref)
            case _:
                self.migrating.receive(message)

    # -- before the batch ---------------------------------------------------------------------------

    def _reserve(self, order: Reserve) -> None:
        request = self._find_request(order.ref.request_id)
        member = Member(request.number, request.num_input_tokens, request.num_output_tokens - 1)
        request.member = member
        tbt_slo_s = order.tbt_slo_s if order.may_refuse else None
        sequence = Sequence(order.ref, request, member, tbt_slo_s, holds_first=order.tbt_slo_s is not None)
        if order.inline:
            sequence.prompt = Prompt(request, member, order.tbt_slo_s)
        elif self._checks_reservations:
            tbt_s = self._too_slow_s(sequence, len(self._sequences), self._num_outside_tokens)
            if tbt_s is not None:
                self._refuse(sequence, len(self._sequences), tbt_s)
                return
        self._sequences[order.ref] = self._sequence_of[member] = sequence
        self._num_outside_tokens += member.num_tokens
        if sequence.prompt is None:
            self._reserve_pages(sequence)
        else:
            self.inlined.turns.add(sequence.prompt, partial(self._reserve_pages, sequence))

    def _reserve_pages(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.take_back = self.node.pool.reserve(
            request.block_keys, request.num_private_pages, partial(self._reserved, sequence)
        )

    def _reserved(self, sequence: Sequence, reservation: Reservation) -> None:
        sequence.reservation = reservation
        self._num_grants += 1
        pages = [GrantedPage(index, reservation.pages[index], 0) for index in reservation.missing]
        self.node.send(Reserved(sequence.ref, Grant(self._num_grants, self.node.messenger, pages)))
        if sequence.prompt is not None:
            self._begin_inlined(sequence, sequence.prompt, reservation)

    def _begin_inlined(self, sequence: Sequence, prompt: Prompt, reservation: Reservation) -> None:
        """Begin a prompt that is computed behind what the pool holds of it."""
        num_found = reservation.num_found * prompt.request.block_tokens
        prompt.request.num_cached_tokens = prompt.num_done = min(
            num_found, prompt.request.num_reusable_tokens
        )
        self._note_begun(sequence)
        self._load(sequence, prompt.num_done)
        self.inlined.turns.reserved(prompt, reservation.num_found)

    def _note_begun(self, sequence: Sequence) -> None:
        sequence.has_begun = True
        self._num_begun += 1
        self._num_begun_outside_tokens += sequence.member.num_tokens

    def _too_slow_s(self, sequence: Sequence, num_others: int, num_outside_tokens: int) -> float | None:
        num_kv_tokens = self.batch.num_kv_tokens + num_outside_tokens + sequence.member.num_tokens
        return self._double_check.too_slow_s(sequence.tbt_slo_s, num_others, num_kv_tokens)

    def _refuse(self, sequence: Sequence, num_others: int, tbt_s: float) -> None:
        self.num_refusals += 1
        self.node.send(Refused(sequence.ref, "the TBT SLO would be missed", num_others + 1, tbt_s))

    def _turn_too_slow_s(self, sequence: Sequence) -> float | None:
        return self._too_slow_s(sequence, self._num_begun, self._num_begun_outside_tokens)

    def _refuse_turn(self, sequence: Sequence, tbt_s: float) -> None:
        self._refuse(sequence, self._num_begun, tbt_s)
        self._forget(sequence)

    def _begin(self, sequence: Sequence) -> None:
        self._note_begun(sequence)
        sequence.first_may_leave(self.node.clock.now_s)
        if not sequence.member.num_left:
            self._finish(sequence)
        elif sequence.has_arrived:
            self._load(sequence, sequence.member.num_tokens)

    def arrived(self, ref: Ref) -> None:
        """All its KVCache is in the pool."""
        sequence = self._sequences.get(ref)
        if sequence is None:
            return
        self._arrive(sequence)
        sequence.has_arrived = True
        if sequence.has_begun:
            self._load(sequence, sequence.member.num_tokens)

    def _arrive(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None
        self.node.pool.arrived(sequence.reservation, range(len(sequence.reservation.keys)))

    def _load(self, sequence: Sequence, num_tokens: int) -> None:
        """Load tokens of a sequence to the device, beside the batch."""
        num_bytes = num_tokens * self.node.kv_bytes_per_token
        self.node.clock.after(num_bytes / self.node.pcie_bytes_per_s, self._loaded, sequence)

    def _loaded(self, sequence: Sequence) -> None:
        if sequence.ref not in self._sequences:
            return
        if sequence.prompt is None:
            self._release(sequence)
        self._wait(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None
        self.node.pool.release(sequence.reservation)
        sequence.reservation = None

    # -- the batch ----------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        sequence.is_waiting = True
        self._waiting.append(sequence)
        if not self._runner.is_running:
            if not self._is_mixed:
                self._run()
        elif self.has_room(sequence.member.num_tokens):
            self._runner.cut()

    def has_room(self, num_tokens: int) -> bool:
        """Whether there is room for a request, and for the next token of all others."""
        num_next = self.batch.size + len(self.inlined) + self.migrating.num_held + 1
        return num_next <= self._max_batch and self.num_free_tokens >= num_tokens + num_next

    def _run(self) -> None:
        actions, self._between_steps = self._between_steps, []
        for action in actions:
            action()
        while self._waiting and self.has_room(self._waiting[0].member.num_tokens):
            sequence = self._waiting.popleft()
            sequence.is_waiting = False
            if sequence.prompt is not None and sequence.prompt.num_left:
                self.inlined.add(sequence.prompt)
            else:
                self._join(sequence)
        while self.batch.size > 1 and self.num_free_tokens < self.batch.size:
            self._preempt(self._sequence_of[self.batch.newest()])
        mixed = self.inlined.plan(self.batch)
        if self._tails:
            self._run_tails()
        elif mixed is not None:
            self._run_mixed(mixed)
        elif self.batch.size:
            most = 1 if self.inlined else max(1, self.num_free_tokens // self.batch.size)
            self._runner.start(most)
        self.node.computes(self._is_mixed or self.batch.size > 0)

    def _join(self, sequence: Sequence) -> None:
        """Let a sequence take part in the next iteration."""
        sequence.first_leaves(self.node.clock.now_s)
        self._num_outside_tokens -= sequence.member.num_tokens
        self._num_begun_outside_tokens -= sequence.member.num_tokens
        self.batch.add(sequence.member, self.node.clock.now_s)

    def _step_cost(self) -> StepCost:
        factor, costs = self.node.factor, self.node.costs
        return StepCost(factor * costs.iteration_s((), self.batch.size), factor * costs.kv_token_s)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.batch.remove(sequence.member)
        self._leave_batch(sequence)
        sequence.is_waiting = True
        self._waiting.appendleft(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        sequence.member.left_s = self.node.clock.now_s
        self._num_outside_tokens += sequence.member.num_tokens
        self._num_begun_outside_tokens += sequence.member.num_tokens

    def _run_ended(self, num_steps: int, seconds: float, ended: list[Member]) -> None:
        size = self.batch.size + len(ended)
        num_ended_tokens = sum(member.num_tokens for member in ended)
        num_kv_tokens = self.batch.num_kv_tokens + num_ended_tokens
        self.predictors.observe(size, num_kv_tokens, 0, seconds / num_steps)
        self._num_iterations += num_steps
        self._num_tokens += num_steps * size
        self._computed_for(seconds)
        self._leave(ended)
        self._turns.take()
        self._run()

    def _computed_for(self, seconds: float) -> None:
        self.busy_s += seconds
        self.node.busy_s += seconds

    def _leave(self, ended: list[Member]) -> None:
        for member in ended:
            sequence = self._sequence_of[member]
            self._leave_batch(sequence)
            self._finish(sequence)

    def _run_mixed(self, mixed: Mixed) -> None:
        """Run one iteration with chunks of prompts."""
        self._is_mixed = True
        node, costs = self.node, self.node.costs
        seconds = costs.iteration_s(mixed.shares, mixed.batch_size) + costs.kv_token_s * mixed.num_kv_tokens
        node.clock.after(node.factor * seconds, self._mixed_ended, mixed, node.factor * seconds)

    def _mixed_ended(self, mixed: Mixed, seconds: float) -> None:
        self._is_mixed = False
        computed = self.inlined.ended(mixed, seconds)
        self._num_iterations += 1
        self._num_tokens += mixed.batch_size + len(computed)
        self._computed_for(seconds)
        if mixed.batch_size:
            self._leave(self.batch.advance(1, seconds))
        for prompt in computed:
            self._prefilled(self._sequence_of[prompt.member])
            self.inlined.turns.end(prompt)
        self._turns.take()
        self._run()

    def _prefilled(self, sequence: Sequence) -> None:
        """Note that an inlined prompt has its first token; others find its blocks."""
        self._arrive(sequence)
        self._release(sequence)
        sequence.request.first_token_s = sequence.member.left_s = self.node.clock.now_s
        self.node.send(Prefilled(sequence.ref, ANY_TOKEN, sequence.request.num_cached_tokens))
        if sequence.member.num_left:
            self._join(sequence)
        else:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.request.gaps = sequence.member.gaps
        self.node.send(Finished(sequence.ref, FinishReason.LENGTH, sequence.request.num_output_tokens))
        self._forget(sequence)

    # -- migrations (`Batched`) ---------------------------------------------------------------------

    def find(self, ref: Ref) -> Sequence | None:
        return self._sequences.get(ref)

    def between_steps(self, action: Callable[[], None]) -> None:
        self._between_steps.append(action)
        if self._runner.is_running:
            self._runner.cut()
        elif not self._is_mixed:
            self._run()

    def num_drawn(self, sequence: Sequence) -> int:
        return sequence.request.num_output_tokens - self.batch.num_left_of(sequence.member)

    def let_go(self, sequence: Sequence) -> None:
        if sequence.request.first_token_s is None:  # it was held, or the request waited for its turn
            sequence.request.first_token_s = sequence.member.left_s = self.node.clock.now_s
        self._abort(sequence.ref)

    def continue_(self, ref: Ref, request: SimulatedRequest, num_tokens: int, num_loaded: int) -> None:
        member = request.member
        assert member is not None
        sequence = Sequence(ref, request, member, None, has_begun=True, has_arrived=True)
        self._sequences[ref] = self._sequence_of[member] = sequence
        self._num_begun += 1
        self._num_outside_tokens += member.num_tokens
        self._num_begun_outside_tokens += member.num_tokens
        self._tails.append((sequence, num_loaded))

    def _run_tails(self) -> None:
        """Run one iteration that computes the tokens behind loaded blocks again."""
        self._is_mixed = True
        tails, self._tails = self._tails, []
        node, costs = self.node, self.node.costs
        shares = [PromptShare(of.member.num_tokens + 1 - num_loaded, num_loaded) for of, num_loaded in tails]
        seconds = costs.iteration_s(shares, self.batch.size) + costs.kv_token_s * self.batch.num_kv_tokens
        seconds *= node.factor
        node.clock.after(seconds, self._tails_ended, [of for of, _ in tails], seconds)

    def _tails_ended(self, sequences: list[Sequence], seconds: float) -> None:
        self._is_mixed = False
        self._num_iterations += 1
        self._num_tokens += self.batch.size + len(sequences)
        self._computed_for(seconds)
        if self.batch.size:
            self._leave(self.batch.advance(1, seconds))
        for sequence in sequences:
            if self._sequences.get(sequence.ref) is sequence:
                self._continued(sequence)
        self._turns.take()
        self._run()

    def _continued(self, sequence: Sequence) -> None:
        """Note the first token that a request draws here, and let it join the batch."""
        member, now_s = sequence.member, self.node.clock.now_s
        member.gaps.append((1, now_s - member.left_s))
        member.left_s = now_s
        member.num_tokens += 1
        member.num_left -= 1
        self._num_outside_tokens += 1
        self._num_begun_outside_tokens += 1
        if member.num_left:
            self._join(sequence)
        else:
            self._finish(sequence)

    # -- ends ---------------------------------------------------------------------------------------

    def _abort(self, ref: Ref) -> None:
        sequence = self._sequences.get(ref)
        if sequence is None:
            return
        if sequence.is_waiting:
            self._waiting.remove(sequence)
        self._turns.remove(sequence)
        if sequence.member.is_running:
            self.batch.remove(sequence.member)
            self._leave_batch(sequence)
        self._forget(sequence)
        if sequence.prompt is not None:
            self.inlined.remove(sequence.prompt)
            self.inlined.turns.end(sequence.prompt)
        self._turns.take()

    def _forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is in no batch."""
        del self._sequences[sequence.ref], self._sequence_of[sequence.member]
        self._num_outside_tokens -= sequence.member.num_tokens
        if sequence.has_begun:
            self._num_begun -= 1
            self._num_begun_outside_tokens -= sequence.member.num_tokens
        if sequence.reservation is not None:
            self.node.pool.release(sequence.reservation)
        elif sequence.take_back is not None:
            sequence.take_back()
