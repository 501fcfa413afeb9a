"""A simulated prefill instance: the server's own queue, with passes as long as the cost model says.

A prompt's prefix comes from this instance's part of the pool, over PCIe, or from the instance that the order
names, over the network. Both come layer by layer while the device computes. New KVCache is sent to the decode
instance meanwhile.

Owns: prefill jobs. Does not know: who placed them here, decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks.tools.simulator.cluster.cache import Reservation
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.cluster.machines.network import Transfer
from benchmarks.tools.simulator.cluster.node import Node
from benchmarks.tools.simulator.cluster.requests import ANY_TOKEN, SimulatedRequest
from conductor.performance.model import overlapped_s
from mooncake.messages.block_orders import Replicate
from mooncake.messages.pools import PrefixSource
from mooncake.messages.requests import Ref
from mooncake.messages.workers import Abort, Prefill, Prefilled
from workers.prefill.queue import PrefillQueue, PromptState, QueuedChunk, QueuedPrompt


class Destination(Protocol):
    """The interface of the decode side to which KVCache is sent."""

    node: Node

    def arrived(self, ref: Ref) -> None:
        """Record that all KVCache of a reserved prompt is in the pool."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A prefix that is being fetched from another instance, where a lease keeps it."""

    source: Node
    pages: list[int]
    transfer: Transfer | None = None

    def end(self) -> None:
        """End the lease."""
        self.source.pool.end_lease(self.pages)


@dataclass(slots=True, eq=False)
class Job:
    """One prompt. Its stream to the decode side begins with its first pass, and ends after its last pass."""

    order: Prefill
    request: SimulatedRequest
    queued: QueuedPrompt
    reservation: Reservation | None = None
    take_back: Callable[[], None] | None = None
    """A callback that cancels the wait for pages."""
    fetch: Fetch | None = None
    has_begun: bool = False
    is_computed: bool = False
    is_aborted: bool = False
    stream: Transfer | None = None


class PrefillInstance:
    """A simulated prefill instance. It carries out `Prefill` and `Abort`, and sends `Prefilled`."""

    def __init__(
        self,
        node: Node,
        queue: PrefillQueue,
        find_request: Callable[[str], SimulatedRequest],
        destinations: Callable[[str], Destination],
        *,
        is_windowed: bool = False,
        prompt_s: float = 0.0,
    ) -> None:
        """Prepare the instance.

        If `is_windowed`, the device has memory for a window of layers, so that each pass of a prompt loads
        the blocks before its tokens. `prompt_s`: seconds for which each prompt occupies the instance in
        addition to its passes.
        """
        self.node, self._prompt_s = node, prompt_s
        self._is_windowed = is_windowed
        self._queue = queue
        self._find_request, self._destinations = find_request, destinations
        self._jobs: dict[Ref, Job] = {}
        self._job_of: dict[QueuedPrompt, Job] = {}
        self._admitting: Job | None = None
        self._pass: list[QueuedChunk] = []
        self._pass_began_s = self._pass_layer_s = 0.0
        self._is_waiting_for_fetches = False
        self.busy_s = 0.0
        """Total seconds of passes."""

    @property
    def num_queued(self) -> int:
        return len(self._job_of)

    @property
    def queued_s(self) -> float:
        """The seconds in which all prompts of this instance would be computed one by one."""
        costs, of = self.node.costs, self._job_of
        return sum(costs.iteration_s([PromptShare(p.num_left, p.num_done)], 0) for p in of if p.num_left)

    def receive(self, message: Prefill | Abort) -> None:
        """Receive a message from the Conductor."""
        if isinstance(message, Abort):
            self._abort(message.ref)
            return
        request = self._find_request(message.ref.request_id)
        now_s = self.node.clock.now_s
        num_tokens, of = request.num_input_tokens, message.request
        num_reusable = min(message.num_reusable_blocks * self.node.layout.block_size, num_tokens - 1)
        queued = self._queue.add(
            num_tokens,
            message.time_left_s,
            now_s,
            of.priority,
            of.flow,
            num_reusable,
            request.block_keys,
        )
        job = Job(message, request, queued)
        self._jobs[message.ref] = self._job_of[queued] = job
        self._admit_next()

    # -- admission ----------------------------------------------------------------------------------

    def _admit_next(self) -> None:
        while self._admitting is None and (prompt := self._queue.next_to_admit()) is not None:
            prompt.state = PromptState.ADMITTED
            job = self._admitting = self._job_of[prompt]
            request = job.request
            job.take_back = self.node.pool.reserve(
                request.block_keys, request.num_private_pages, partial(self._reserved, job)
            )

    def _reserved(self, job: Job, reservation: Reservation) -> None:
        """Reuse blocks that this pool has, or that the order's source still has."""
        self._admitting = None
        job.reservation = reservation
        block_size = self.node.layout.block_size
        num_local = job.queued.num_held_blocks = reservation.num_found
        num_fetched = self._begin_fetch(job, num_local, job.order.prefix_source)
        num_cached = min((num_local + num_fetched) * block_size, job.request.num_reusable_tokens)
        job.request.num_cached_tokens = num_cached
        job.request.num_fetched_tokens = max(0, num_cached - num_local * block_size)
        self._queue.ready(job.queued, num_cached)
        self._begin_pass()
        self.node.clock.after(0.0, self._admit_next)

    def _begin_fetch(self, job: Job, num_local: int, prefix_source: PrefixSource | None) -> int:
        """Begin to fetch the prefix from the order's source.

        Returns the number of blocks that will arrive.
        """
        if prefix_source is None or prefix_source.num_blocks <= num_local:
            return 0
        source = self.node.peers[prefix_source.shards[0].messenger.instance]
        keys = job.request.block_keys[num_local : prefix_source.num_blocks]
        pages = source.pool.lease(keys)
        if not pages:
            return 0
        num_there = len(pages)
        fetch = job.fetch = Fetch(source, pages)
        blocks = range(num_local, num_local + num_there)
        fetch.transfer = self.node.traffic.send(
            source.name,
            source.outgoing,
            self.node.incoming,
            num_there * self.node.block_bytes,
            partial(self._fetched, job, blocks),
        )
        return num_there

    def _fetched(self, job: Job, blocks: range) -> None:
        assert job.fetch is not None
        assert job.reservation is not None
        job.fetch.end()
        job.fetch = None
        self.node.pool.arrived(job.reservation, blocks)
        if self._is_waiting_for_fetches:
            self._compute_ended()

    def replicate(self, order: Replicate) -> None:
        """Fetch blocks that another instance has, and keep them in the pool. A failure is not reported."""
        source = self.node.peers[order.shards[0].messenger.instance]
        pages = source.pool.lease(order.keys)
        keys = order.keys[: len(pages)]
        if not pages or any(key in self.node.pool.allocator.index for key in keys[-1:]):
            source.pool.end_lease(pages)
            return
        self.node.pool.reserve(keys, 0, partial(self._replicate, source, pages))

    def _replicate(self, source: Node, pages: list[int], reservation: Reservation) -> None:
        def ended() -> None:
            source.pool.end_lease(pages)
            self.node.pool.arrived(reservation, range(len(reservation.keys)))
            self.node.pool.release(reservation)

        num_bytes = len(reservation.missing) * self.node.block_bytes
        if num_bytes:
            self.node.traffic.send(source.name, source.outgoing, self.node.incoming, num_bytes, ended)
        else:
            ended()

    # -- passes -------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        if self._pass:
            return
        self._pass = self._queue.plan()
        if not self._pass:
            return
        node = self.node
        shares = [PromptShare(chunk.num_tokens, chunk.prompt.num_done) for chunk in self._pass]
        num_copied_tokens = sum(chunk.num_tokens for chunk in self._pass)
        begun_s = 0.0
        for chunk in self._pass:
            job = self._job_of[chunk.prompt]
            if self._is_windowed or not job.has_begun:
                num_copied_tokens += chunk.prompt.num_done
            if not job.has_begun:
                job.has_begun = True
                begun_s += self._prompt_s
                self._begin_stream(job)
        node.computes(True)
        compute_s = begun_s + node.factor * node.costs.iteration_s(shares, 0)
        copy_s = num_copied_tokens * node.kv_bytes_per_token / node.pcie_bytes_per_s
        self._pass_began_s, self._pass_layer_s = node.clock.now_s, compute_s / node.layout.num_layers
        node.clock.after(overlapped_s(compute_s, copy_s, node.layout.num_layers), self._compute_ended)

    def _compute_ended(self) -> None:
        """End the pass.

        If a prefix is still being fetched, the last layer is computed after the prefix has arrived.
        """
        if any(self._job_of[chunk.prompt].fetch is not None for chunk in self._pass):
            self._is_waiting_for_fetches = True
        elif self._is_waiting_for_fetches:
            self._is_waiting_for_fetches = False
            self.node.clock.after(self._pass_layer_s, self._end_pass)
        else:
            self._end_pass()

    def _end_pass(self) -> None:
        node, chunks, self._pass = self.node, self._pass, []
        seconds = node.clock.now_s - self._pass_began_s
        node.busy_s += seconds
        self.busy_s += seconds
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        for prompt, num_computed in chunks:
            job = self._job_of[prompt]
            job.request.prefill_s += seconds * num_computed / num_tokens
            prompt.num_done += num_computed
            if job.is_aborted:
                self._forget(job)
            elif not prompt.num_left:
                self._end_prefill(job)
        self._begin_pass()
        if not self._pass:
            node.computes(False)
        self._admit_next()

    def _end_prefill(self, job: Job) -> None:
        assert job.reservation is not None
        job.is_computed = True
        self._queue.remove(job.queued)
        del self._job_of[job.queued]
        self.node.pool.arrived(job.reservation, range(len(job.reservation.keys)))
        self.node.pool.release(job.reservation)
        self.node.send(Prefilled(job.order.ref, ANY_TOKEN, job.request.num_cached_tokens))
        if job.stream is None:
            self._end_stream(job)

    # -- the stream to the decode side --------------------------------------------------------------

    def _begin_stream(self, job: Job) -> None:
        num_bytes = self._granted_bytes(job)
        if num_bytes:
            destination = self.node.peers[job.order.grant.messenger.instance]
            job.stream = self.node.traffic.send(
                destination.name,
                self.node.outgoing,
                destination.incoming,
                num_bytes,
                partial(self._stream_ended, job),
            )

    def _granted_bytes(self, job: Job) -> int:
        return len(job.order.grant.pages) * self.node.block_bytes

    def _stream_ended(self, job: Job) -> None:
        job.stream = None
        if job.is_computed:
            self._end_stream(job)

    def _end_stream(self, job: Job) -> None:
        """Send the last layer to the decode side.

        It was computed last, so it is the only layer that has not been sent.
        """
        last_layer_s = self._granted_bytes(job) / self.node.layout.num_layers / self.node.nic_bytes_per_s
        self.node.clock.after(last_layer_s, self._all_arrived, job)

    def _all_arrived(self, job: Job) -> None:
        if self._jobs.pop(job.order.ref, None) is not None:
            self._destinations(job.order.grant.messenger.instance).arrived(job.order.ref)

    # -- ends ---------------------------------------------------------------------------------------

    def _abort(self, ref: Ref) -> None:
        """Abort a prompt. A prompt in a pass is forgotten when the pass ends."""
        job = self._jobs.pop(ref, None)
        if job is None:
            return
        if job.stream is not None:
            self.node.traffic.cancel(job.stream)
        if job.is_computed:
            return
        if any(chunk.prompt is job.queued for chunk in self._pass):
            job.is_aborted = True
        else:
            self._forget(job)
            self.node.clock.after(0.0, self._admit_next)

    def _forget(self, job: Job) -> None:
        self._queue.remove(job.queued)
        del self._job_of[job.queued]
        if job.fetch is not None and job.fetch.transfer is not None:
            self.node.traffic.cancel(job.fetch.transfer)
            job.fetch.end()
        if job.reservation is not None:
            self.node.pool.release(job.reservation)
        elif self._admitting is job and job.take_back is not None:
            self._admitting = None
            job.take_back()
