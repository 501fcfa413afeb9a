"""Migrations at a simulated decode instance: both sides, with times from its links and costs.

The source stores blocks over PCIe. The destination fetches them over the network, in competition with all
other transfers, and loads them over PCIe. All of this happens while iterations run. The tokens behind the
loaded blocks are computed again with the destination's next iteration. Pool pages of the copies are not
counted.

Owns: requests that migrate here, and the orders of a migration. Does not know: why a request moves, which
requests are decoded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.tools.simulator.cluster.machines.network import Transfer
from benchmarks.tools.simulator.cluster.requests import ANY_TOKEN, SimulatedRequest
from mooncake.messages.migration import (
    HandedOver,
    HandOver,
    MigrationOrder,
    PreCopied,
    PreCopy,
    Prepare,
    Prepared,
    TakeOver,
)
from mooncake.messages.requests import Ref, Request
from mooncake.messages.workers import WorkFailed

if TYPE_CHECKING:
    from benchmarks.tools.simulator.cluster.decode.instance import DecodeInstance


@dataclass(slots=True, eq=False)
class _Coming:
    """A request that is being prepared to migrate here."""

    num_loaded: int = 0
    """The number of tokens whose KVCache is on the device."""
    num_held: int = 0
    """The number of tokens for which device memory is held."""
    transfer: Transfer | None = None


class Migrating:
    """The migrations from and to one instance, which carries out their orders."""

    def __init__(self, instance: "DecodeInstance", find_request: Callable[[str], SimulatedRequest]) -> None:
        self._instance, self._node, self._find_request = instance, instance.node, find_request
        self._coming: dict[Ref, _Coming] = {}
        self._num_stored: dict[Ref, int] = {}
        """The number of tokens in blocks that the pool has, for each request that migrates from here."""
        self.num_held_tokens = 0
        """The number of tokens for which device memory is held, for requests that migrate here."""

    @property
    def num_held(self) -> int:
        """The number of batch slots that are held for requests that migrate here."""
        return len(self._coming)

    def receive(self, order: MigrationOrder) -> None:
        """Receive an order of the Conductor. An order about a request that has ended is dropped."""
        match order:
            case PreCopy():
                self._instance.between_iterations(partial(self._pre_copy, order))
            case HandOver(ref):
                self._instance.between_iterations(partial(self._hand_over, ref))
            case Prepare():
                self._prepare(order)
            case TakeOver():
                self._instance.between_iterations(partial(self._take_over, order))

    def abort(self, ref: Ref) -> None:
        """Forget a request that was to migrate here. Idempotent."""
        coming = self._coming.pop(ref, None)
        self._num_stored.pop(ref, None)
        if coming is not None:
            self.num_held_tokens -= coming.num_held
            if coming.transfer is not None:
                self._node.traffic.cancel(coming.transfer)

    def _full_tokens(self, num_tokens: int) -> int:
        """Return how many of a request's tokens are in full blocks. The newest token has no KVCache."""
        block_size = self._node.layout.block_size
        return (num_tokens - 1) // block_size * block_size

    def _copy_s(self, num_tokens: int) -> float:
        """Return the seconds of a copy between pool and device."""
        return num_tokens * self._node.kv_bytes_per_token / self._node.pcie_bytes_per_s

    # -- source -------------------------------------------------------------------------------------

    def _pre_copy(self, order: PreCopy) -> None:
        ref = order.ref
        sequence = self._instance.find(ref)
        if sequence is None:
            return
        num_drawn = self._instance.num_drawn(sequence)
        num_tokens = sequence.request.num_input_tokens + num_drawn
        seconds = (order.num_tokens + 1 - num_tokens) * self._instance.iteration_s
        if seconds > 0:
            self._node.clock.after(seconds, self.receive, order)
            return
        num_full = self._full_tokens(num_tokens)
        seconds = self._copy_s(num_full - self._num_stored.get(ref, 0))
        self._num_stored[ref] = num_full
        answer = PreCopied(ref, [ANY_TOKEN] * num_drawn)
        self._node.clock.after(seconds, self._node.send, answer)

    def _hand_over(self, ref: Ref) -> None:
        sequence = self._instance.find(ref)
        self._num_stored.pop(ref, None)
        if sequence is not None:
            num_drawn = self._instance.num_drawn(sequence)
            self._instance.release(sequence)
            self._node.send(HandedOver(ref, [ANY_TOKEN] * num_drawn))

    # -- destination --------------------------------------------------------------------------------

    def _prepare(self, order: Prepare) -> None:
        num_tokens, coming = len(order.request.token_ids), self._coming.get(order.ref)
        if coming is None:
            if not self._instance.has_room(num_tokens):
                self._node.send(WorkFailed(order.ref, "no batch slot or device pages", True))
                return
            coming = self._coming[order.ref] = _Coming()
        self.num_held_tokens += num_tokens - coming.num_held
        coming.num_held, num_full = num_tokens, self._full_tokens(num_tokens)
        num_here = max(coming.num_loaded, self._num_in_pool(order.request))
        source = self._node.peers[order.shards[0].messenger.instance]
        if num_full <= num_here:
            self._loads(order.ref, coming, num_full)
            return
        coming.transfer = self._node.traffic.send(
            source.name,
            source.outgoing,
            self._node.incoming,
            (num_full - num_here) * self._node.kv_bytes_per_token,
            partial(self._loads, order.ref, coming, num_full),
        )

    def _num_in_pool(self, request: Request) -> int:
        """Return the number of tokens in the prompt's leading blocks that this instance's pool has."""
        index, keys = self._node.pool.allocator.index, request.block_keys
        num_blocks = next((number for number, key in enumerate(keys) if key not in index), len(keys))
        return num_blocks * self._node.layout.block_size

    def _loads(self, ref: Ref, coming: _Coming, num_tokens: int) -> None:
        coming.transfer = None
        seconds = self._copy_s(max(0, num_tokens - coming.num_loaded))
        self._node.clock.after(seconds, self._loaded, ref, coming, num_tokens)

    def _loaded(self, ref: Ref, coming: _Coming, num_tokens: int) -> None:
        if self._coming.get(ref) is coming:
            coming.num_loaded = max(coming.num_loaded, num_tokens)
            self._node.send(Prepared(ref, coming.num_loaded))

    def _take_over(self, order: TakeOver) -> None:
        coming = self._coming.pop(order.ref, None)
        if coming is None:
            return  # the request has just been aborted
        self.num_held_tokens -= coming.num_held
        request = self._find_request(order.ref.request_id)
        self._instance.continue_(order.ref, request, coming.num_loaded)
