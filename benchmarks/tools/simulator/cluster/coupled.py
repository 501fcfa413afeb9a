"""Simulated rivals: instances that prefill and decode in one batch, each with a prefix cache of its own.

There are two kinds, because vLLM can be run in two ways. Either prompts are computed whole, in iterations of
their own, while the running requests wait. Or prompts are computed in chunks that share iterations with the
running requests. The KVCache of finished requests stays on the device until its pages are needed (the pool's
code, least recently used first). Pages for a prompt and its answer are allocated together, so that no request
is ever preempted. This favours the rival.

Owns: one coupled instance. Does not know: which requests it gets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.tools.simulator.cluster.batch import Batch, IterationCost, Member
from benchmarks.tools.simulator.cluster.cache import Reservation, SimulatedPool
from benchmarks.tools.simulator.cluster.decoding import BatchRunner
from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.machines.costs import Costs, PromptShare
from benchmarks.tools.simulator.cluster.requests import SimulatedRequest


@dataclass(slots=True, eq=False)
class CoupledSequence:
    """One request at a coupled instance. `num_done` is the number of prompt tokens with KVCache."""

    request: SimulatedRequest
    reservation: Reservation
    member: Member
    num_done: int

    @property
    def num_left(self) -> int:
        """The number of prompt tokens still to be computed."""
        return self.request.num_input_tokens - self.num_done


class CoupledInstance:
    """A coupled instance.

    If prompts are computed in chunks, `chunk_tokens` is the most tokens of an iteration. If it is None,
    prompts are computed whole, several together up to `max_prefill_tokens`.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        pool: SimulatedPool,
        max_batch: int,
        chunk_tokens: int | None,
        max_prefill_tokens: int,
        on_end: Callable[[SimulatedRequest], None],
    ) -> None:
        self._clock, self._costs, self.pool, self._on_end = clock, costs, pool, on_end
        self._max_batch, self._chunk_tokens = max_batch, chunk_tokens
        self._max_prefill_tokens = max_prefill_tokens
        self.batch = Batch()
        self._runner = BatchRunner(clock, self._iteration_cost, self.batch, self._run_ended)
        self._waiting: list[SimulatedRequest] = []
        self._prompts: list[CoupledSequence] = []
        self._sequence_of: dict[Member, CoupledSequence] = {}
        self._is_in_iteration = False

    @property
    def num_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._waiting) + len(self._prompts) + self.batch.size

    def _iteration_cost(self) -> IterationCost:
        return IterationCost(self._costs.iteration_s((), self.batch.size), self._costs.kv_token_s)

    def submit(self, request: SimulatedRequest) -> None:
        """Add a request to the wait queue."""
        self._waiting.append(request)
        if self._runner.is_running:
            self._runner.cut()
        elif not self._is_in_iteration:
            self._iterate()

    def _admit(self) -> None:
        """Admit requests in order of arrival, as long as there are pages."""
        while self._waiting and len(self._prompts) + self.batch.size < self._max_batch:
            request = self._waiting[0]
            num_private = num_pages_of(request) - len(request.block_keys)
            admitted: list[Reservation] = []
            take_back = self.pool.reserve(request.block_keys, num_private, admitted.append)
            if not admitted:
                take_back()
                return
            del self._waiting[0]
            num_found = admitted[0].num_found * request.block_tokens
            request.num_cached_tokens = min(num_found, request.num_reusable_tokens)
            member = Member(request.number, request.num_input_tokens, request.num_output_tokens - 1)
            sequence = CoupledSequence(request, admitted[0], member, request.num_cached_tokens)
            self._prompts.append(sequence)
            self._sequence_of[member] = sequence

    def _iterate(self) -> None:
        self._admit()
        if not self._prompts:
            if self.batch.size:
                self._runner.start()
            return
        planned = self._plan_chunks() if self._chunk_tokens else self._plan_prompts()
        shares = [PromptShare(num_tokens, sequence.num_done) for sequence, num_tokens in planned]
        size = self.batch.size if self._chunk_tokens else 0
        seconds = self._costs.iteration_s(shares, size)
        if size:
            seconds += self._costs.kv_token_s * self.batch.num_kv_tokens
        self._is_in_iteration = True
        self._clock.after(seconds, self._iteration_ended, planned, size, seconds)

    def _plan_chunks(self) -> list[tuple[CoupledSequence, int]]:
        """Return the prompt chunks of the next iteration, in order of arrival.

        Together they have `chunk_tokens` tokens, less one for each running request, or all tokens that are
        left.
        """
        assert self._chunk_tokens is not None
        planned: list[tuple[CoupledSequence, int]] = []
        num_free = max(1, self._chunk_tokens - self.batch.size)
        for sequence in self._prompts:
            if num_free:
                num_tokens = min(num_free, sequence.num_left)
                planned.append((sequence, num_tokens))
                num_free -= num_tokens
        return planned

    def _plan_prompts(self) -> list[tuple[CoupledSequence, int]]:
        planned: list[tuple[CoupledSequence, int]] = []
        num_tokens = 0
        for sequence in self._prompts:
            if planned and num_tokens + sequence.num_left > self._max_prefill_tokens:
                break
            planned.append((sequence, sequence.num_left))
            num_tokens += sequence.num_left
        return planned

    def _iteration_ended(
        self, planned: Sequence[tuple[CoupledSequence, int]], size: int, seconds: float
    ) -> None:
        self._is_in_iteration = False
        if size:
            self._leave(self.batch.advance(1, seconds))
        elif self.batch.size:
            self.batch.stall(seconds)
        num_tokens = sum(num for _, num in planned)
        for sequence, num in planned:
            sequence.request.prefill_s += seconds * num / num_tokens
            sequence.num_done += num
            if not sequence.num_left:
                self._prompts.remove(sequence)
                self._begin(sequence)
        self._iterate()

    def _begin(self, sequence: CoupledSequence) -> None:
        """Record that the first token has been drawn, and add the sequence to the batch."""
        now_s = self._clock.now_s
        self.pool.arrived(sequence.reservation, range(len(sequence.request.block_keys)))
        sequence.request.first_token_s = sequence.member.left_s = now_s
        if sequence.member.num_left:
            self.batch.add(sequence.member, now_s)
        else:
            self._leave([sequence.member])

    def _run_ended(self, num_iterations: int, seconds: float, ended: list[Member]) -> None:
        self._leave(ended)
        self._iterate()

    def _leave(self, ended: list[Member]) -> None:
        for member in ended:
            sequence = self._sequence_of.pop(member)
            self.pool.release(sequence.reservation)
            sequence.request.gaps = member.gaps
            self._on_end(sequence.request)


def num_pages_of(request: SimulatedRequest) -> int:
    """Return the number of pages for a request's prompt and answer."""
    return -(-(request.num_input_tokens + request.num_output_tokens) // request.block_tokens)


def least_loaded(instances: Sequence[CoupledInstance]) -> CoupledInstance:
    """Return the instance with the fewest requests; the first one if there are several."""
    return min(instances, key=lambda instance: instance.num_requests)
