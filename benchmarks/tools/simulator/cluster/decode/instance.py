"""A simulated decode instance, with continuous batching.

A batch that outgrows the device preempts its newest member, which joins again later. `arrivals` admits
requests to the batch, `migrating` admits requests that migrate.

Owns: the batch and its iterations. Does not know: who placed requests here, prefill instances.
"""

from collections import deque
from collections.abc import Callable

from benchmarks.tools.simulator.cluster.batch import Batch, IterationCost, Member
from benchmarks.tools.simulator.cluster.decode.arrivals import Arrivals
from benchmarks.tools.simulator.cluster.decode.inlining import InlinedPrompts, Mixed
from benchmarks.tools.simulator.cluster.decode.migrating import Migrating
from benchmarks.tools.simulator.cluster.decode.sequence import Sequence, Sequences
from benchmarks.tools.simulator.cluster.decoding import BatchRunner
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.cluster.node import Node
from benchmarks.tools.simulator.cluster.requests import ANY_TOKEN, SimulatedRequest
from benchmarks.tools.simulator.cluster.shape import JoinCosts
from mooncake.messages.heartbeats import DecodeLoad, DecodeStats
from mooncake.messages.migration import MigrationOrder
from mooncake.messages.requests import FinishReason, Ref
from mooncake.messages.workers import Abort, Decode, Finished, Prefilled, Reserve
from workers.decode.tbt_slo.prompt_budget import ChunkLimits
from workers.decode.tbt_slo.tbt import IterationPredictors


class DecodeInstance:
    """A simulated decode instance.

    It carries out `Reserve`, `Decode`, `Abort` and the orders of migrations. It sends `Reserved`,
    `Prefilled`, `DecodeRefused`, `Finished` and the answers to migration orders.

    `capacity_tokens` is the number of tokens for which the device has memory. `checks_reservations` is for
    `Arrivals`.
    """

    def __init__(
        self,
        node: Node,
        max_batch: int,
        capacity_tokens: int,
        chunk_limits: ChunkLimits,
        find_request: Callable[[str], SimulatedRequest],
        join_costs: JoinCosts,
        *,
        checks_reservations: bool = False,
    ) -> None:
        self.node = node
        self._max_batch, self.capacity_tokens = max_batch, capacity_tokens
        self._find_request, self._join_costs = find_request, join_costs
        self._joining_s = 0.0
        """Seconds by which the next iteration is longer because of requests that join the batch."""
        self.batch = Batch()
        self._runner = BatchRunner(node.clock, self._iteration_cost, self.batch, self._run_ended)
        if node.machine is not None:
            node.machine.on_change[node.name] = self._runner.cut
        self.predictors = IterationPredictors()
        self.inlined = InlinedPrompts(self.predictors, chunk_limits)
        self._is_mixed = False  # whether an iteration with prompts is in flight
        self._sequences = Sequences()
        self._waiting: deque[Sequence] = deque()
        self._arrivals = Arrivals(
            node,
            self._sequences,
            self.batch,
            self.predictors,
            max_batch,
            self.inlined,
            self._wait,
            self._finish,
            checks_reservations=checks_reservations,
        )
        self._turns = self._arrivals.turns
        self.num_preemptions = self._num_iterations = self._num_tokens = 0
        self.busy_s = 0.0
        """Total seconds of iterations."""
        self.migrating = Migrating(self, find_request)
        self._between_iterations: list[Callable[[], None]] = []
        self._tails: list[tuple[Sequence, int]] = []
        """Requests that have migrated here, each with the number of tokens whose KVCache was loaded."""

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def load(self) -> DecodeLoad:
        """The load for heartbeats, as `workers.decode.tbt_slo.double_check` reports it."""
        num_kv_tokens = self.batch.num_kv_tokens + self._sequences.num_outside_tokens
        tbt_s = self.predictors.batch_tbt_s(self.num_sequences, num_kv_tokens, self._max_batch)
        num_left = sum(s.prompt.num_left for s in self._sequences if s.prompt is not None)
        token_s = self.predictors.prompt_cost.predict_s(1, 0) or 0.0
        return DecodeLoad(self.num_sequences, len(self._turns), tbt_s, num_left, token_s)

    @property
    def num_free_tokens(self) -> int:
        """The number of tokens for which the device has free memory."""
        num_others = self.inlined.num_device_tokens + self.migrating.num_held_tokens
        return self.capacity_tokens - self.batch.num_kv_tokens - num_others

    @property
    def iteration_s(self) -> float:
        """The seconds of an iteration of the present batch; 0 if it is empty."""
        if not self.batch.size:
            return 0.0
        costs = self.node.costs
        return costs.iteration_s((), self.batch.size) + costs.kv_token_s * self.batch.num_kv_tokens

    def stats(self) -> DecodeStats:
        """Return the totals in the form of heartbeats."""
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
                self._arrivals.reserve(message, self._find_request(message.ref.request_id))
            case Decode():
                self._arrivals.decode(message)
            case Abort():
                self.migrating.abort(message.ref)
                self._abort(message.ref)
            case _:
                self.migrating.receive(message)

    def arrived(self, ref: Ref) -> None:
        """Record that the pool has all KVCache of a prompt."""
        self._arrivals.arrived(ref)

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
        """Return whether a batch slot and device memory are free for a request of `num_tokens` tokens.

        Memory is kept for the next token of every request.
        """
        num_next = self.batch.size + len(self.inlined) + self.migrating.num_held + 1
        return num_next <= self._max_batch and self.num_free_tokens >= num_tokens + num_next

    def _run(self) -> None:
        actions, self._between_iterations = self._between_iterations, []
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
            self._preempt(self._sequences.of(self.batch.newest()))
        mixed = self.inlined.plan(self.batch)
        if self._tails:
            self._run_tails()
        elif mixed is not None:
            self._run_mixed(mixed)
        elif self.batch.size:
            most = 1 if self.inlined else max(1, self.num_free_tokens // self.batch.size)
            self._runner.start(most, self._taken_joining_s())
        self.node.computes(self._is_mixed or self.batch.size > 0)

    def _join(self, sequence: Sequence) -> None:
        """Add a sequence to the next iteration."""
        sequence.first_leaves(self.node.clock.now_s)
        self._sequences.join(sequence)
        self.batch.add(sequence.member, self.node.clock.now_s)
        if sequence.prompt is None:
            self._joining_s += self._join_costs.seconds(sequence.member.num_tokens)

    def _taken_joining_s(self) -> float:
        joining_s, self._joining_s = self._joining_s, 0.0
        return joining_s

    def _iteration_cost(self) -> IterationCost:
        factor, costs = self.node.factor, self.node.costs
        return IterationCost(factor * costs.iteration_s((), self.batch.size), factor * costs.kv_token_s)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.batch.remove(sequence.member)
        self._leave_batch(sequence)
        sequence.is_waiting = True
        self._waiting.appendleft(sequence)

    def _leave_batch(self, sequence: Sequence) -> None:
        sequence.member.left_s = self.node.clock.now_s
        self._sequences.leave(sequence)

    def _run_ended(self, num_iterations: int, seconds: float, ended: list[Member]) -> None:
        size = self.batch.size + len(ended)
        num_ended_tokens = sum(member.num_tokens for member in ended)
        num_kv_tokens = self.batch.num_kv_tokens + num_ended_tokens
        self.predictors.observe(size, num_kv_tokens, 0, 0, seconds / num_iterations)
        self._num_iterations += num_iterations
        self._num_tokens += num_iterations * size
        self._computed_for(seconds)
        self._leave(ended)
        self._turns.take()
        self._run()

    def _computed_for(self, seconds: float) -> None:
        self.busy_s += seconds
        self.node.busy_s += seconds

    def _leave(self, ended: list[Member]) -> None:
        for member in ended:
            sequence = self._sequences.of(member)
            self._leave_batch(sequence)
            self._finish(sequence)

    def _run_mixed(self, mixed: Mixed) -> None:
        """Run one iteration with chunks of prompts."""
        self._run_shares(mixed.shares, mixed.batch_size, mixed.num_kv_tokens, self._mixed_ended, mixed)

    def _run_shares(
        self,
        shares: list[PromptShare],
        size: int,
        num_kv_tokens: int,
        ended: Callable[..., None],
        *of: object,
    ) -> None:
        """Run one iteration with shares of prompts beside `size` requests, then call `ended(seconds,
        *of)`."""
        self._is_mixed = True
        node, costs = self.node, self.node.costs
        seconds = node.factor * (costs.iteration_s(shares, size) + costs.kv_token_s * num_kv_tokens)
        seconds += self._taken_joining_s()
        node.clock.after(seconds, ended, seconds, *of)

    def _shares_ended(self, seconds: float, size: int, num_drawn: int) -> None:
        self._is_mixed = False
        self._num_iterations += 1
        self._num_tokens += size + num_drawn
        self._computed_for(seconds)
        if size:
            self._leave(self.batch.advance(1, seconds))

    def _mixed_ended(self, seconds: float, mixed: Mixed) -> None:
        computed = self.inlined.ended(mixed, seconds)
        self._shares_ended(seconds, mixed.batch_size, len(computed))
        for prompt in computed:
            self._prefilled(self._sequences.of(prompt.member))
            self.inlined.turns.end(prompt)
        self._turns.take()
        self._run()

    def _prefilled(self, sequence: Sequence) -> None:
        """Record that an inlined prompt has its first token. From now on its blocks are in the pool."""
        self._arrivals.stored(sequence)
        sequence.request.first_token_s = sequence.member.left_s = self.node.clock.now_s
        self.node.send(Prefilled(sequence.ref, ANY_TOKEN, sequence.request.num_cached_tokens))
        if sequence.member.num_left:
            self._join(sequence)
        else:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.request.gaps = sequence.member.gaps
        self.node.send(Finished(sequence.ref, FinishReason.LENGTH, sequence.request.num_output_tokens))
        self._arrivals.forget(sequence)

    # -- for migrations -----------------------------------------------------------------------------

    def find(self, ref: Ref) -> Sequence | None:
        """Return the sequence of an attempt; None if this instance has none."""
        return self._sequences.get(ref)

    def between_iterations(self, action: Callable[[], None]) -> None:
        """Call `action` before the next iteration, when none is in flight."""
        self._between_iterations.append(action)
        if self._runner.is_running:
            self._runner.cut()
        elif not self._is_mixed:
            self._run()

    def num_drawn(self, sequence: Sequence) -> int:
        """Return the number of output tokens of a sequence so far."""
        return sequence.request.num_output_tokens - self.batch.num_left_of(sequence.member)

    def release(self, sequence: Sequence) -> None:
        """Remove a request that another instance decodes from now on."""
        # Without one, the first token was held, or the request waited for its turn.
        if sequence.request.first_token_s is None:
            sequence.request.first_token_s = sequence.member.left_s = self.node.clock.now_s
        self._abort(sequence.ref)

    def continue_(self, ref: Ref, request: SimulatedRequest, num_loaded: int) -> None:
        """Decode a migrated request. Its first `num_loaded` tokens have KVCache here."""
        assert request.member is not None
        sequence = Sequence(ref, request, request.member, None, has_begun=True, has_arrived=True)
        self._sequences.add(sequence)
        self._tails.append((sequence, num_loaded))

    def _run_tails(self) -> None:
        """Run one iteration that computes the tokens of migrated requests behind their loaded blocks."""
        tails, self._tails = self._tails, []
        shares = [PromptShare(of.member.num_tokens + 1 - num_loaded, num_loaded) for of, num_loaded in tails]
        size, num_kv_tokens = self.batch.size, self.batch.num_kv_tokens
        self._run_shares(shares, size, num_kv_tokens, self._tails_ended, [of for of, _ in tails])

    def _tails_ended(self, seconds: float, sequences: list[Sequence]) -> None:
        self._shares_ended(seconds, self.batch.size, len(sequences))
        for sequence in sequences:
            if self._sequences.get(sequence.ref) is sequence:
                self._continued(sequence)
        self._turns.take()
        self._run()

    def _continued(self, sequence: Sequence) -> None:
        """Record the first token that a migrated request draws here, and add the request to the batch."""
        member, now_s = sequence.member, self.node.clock.now_s
        member.gaps.append((1, now_s - member.left_s))
        member.left_s = now_s
        self._sequences.draw(sequence)
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
        if sequence.member in self.batch:
            self.batch.remove(sequence.member)
            self._leave_batch(sequence)
        self._arrivals.forget(sequence)
        if sequence.prompt is not None:
            self.inlined.remove(sequence.prompt)
            self.inlined.turns.end(sequence.prompt)
        self._turns.take()
