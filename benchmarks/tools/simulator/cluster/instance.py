"""A simulated instance, which can prefill and decode, and does what its present role says.

Owns: which part gets which message, heartbeats. Does not know: the work of the parts, how requests are
placed.
"""

from dataclasses import dataclass

from benchmarks.tools.simulator.cluster.decode.instance import DecodeInstance
from benchmarks.tools.simulator.cluster.node import Node
from benchmarks.tools.simulator.cluster.prefill import PrefillInstance
from mooncake.messages.block_orders import Replicate
from mooncake.messages.heartbeats import Heartbeat
from mooncake.messages.migration import HandOver, PreCopy, Prepare, TakeOver
from mooncake.messages.workers import Abort, Decode, Prefill, Reserve, Retired, Role, SwitchRole, ToWorker


@dataclass(slots=True, eq=False)
class Instance:
    """One instance, from its registration until it has left."""

    node: Node
    prefill: PrefillInstance
    decode: DecodeInstance
    num_device_blocks: int
    has_left: bool = False

    def receive(self, message: ToWorker) -> None:
        """Receive a message from the Conductor."""
        match message:
            case SwitchRole(role):
                self.node.role = role
            case Retired():
                self.has_left = True
            case Replicate():
                self.prefill.replicate(message)
            case Prefill():
                self.prefill.receive(message)
            case Abort():
                self.prefill.receive(message)
                self.decode.receive(message)
            case Reserve() | Decode() | PreCopy() | Prepare() | HandOver() | TakeOver():
                self.decode.receive(message)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat of a worker with the present role."""
        pools = {self.node.name: self.node.pool_stats()}
        prefill, decode = self.prefill, self.decode
        if self.node.role is Role.PREFILL and not decode.num_sequences:
            return Heartbeat(
                0,
                prefill.num_queued,
                self.num_device_blocks,
                pools,
                prefill_s=prefill.busy_s,
                decode=decode.stats(),
            )
        return Heartbeat(
            decode.batch.size,
            prefill.num_queued + decode.num_sequences - decode.batch.size,
            decode.num_free_tokens // self.node.layout.block_size,
            pools,
            prefill_s=prefill.busy_s,
            decode=decode.stats(),
            decode_load=decode.load,
        )
