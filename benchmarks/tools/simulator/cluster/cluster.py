"""Simulated clusters: the server's Conductor over simulated instances.

Every message between front, Conductor and instances takes `MESSAGE_S`; tokens go directly to the front. The
Conductor is ticked, and gets heartbeats, as often as in the server.

Owns: the connections, the life of the requests. Does not know: what anything costs, what is compared.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from benchmarks.tools.simulator.cluster.cache import SimulatedPool
from benchmarks.tools.simulator.cluster.closed_loops import ClosedLoop, ClosedLoops
from benchmarks.tools.simulator.cluster.decode.instance import DecodeInstance
from benchmarks.tools.simulator.cluster.feed import Feed
from benchmarks.tools.simulator.cluster.instance import Instance
from benchmarks.tools.simulator.cluster.machines.clock import Clock
from benchmarks.tools.simulator.cluster.machines.machine import Machine
from benchmarks.tools.simulator.cluster.machines.network import Network
from benchmarks.tools.simulator.cluster.node import INCARNATION, Node
from benchmarks.tools.simulator.cluster.prefill import PrefillInstance
from benchmarks.tools.simulator.cluster.requests import Outcome, Results, SimulatedRequest
from benchmarks.tools.simulator.cluster.shape import InstanceShape
from benchmarks.tools.traces.request import TraceRequest
from conductor.effects import Effect
from conductor.policy import Conductor
from conductor.settings import Limits, PolicySettings
from mooncake.errors import ConfigError
from mooncake.messages.block_orders import Replicate
from mooncake.messages.fronts import Ended, Failed, FromFront, FrontHello, Rejected, Submit, ToFront
from mooncake.messages.migration import HandOver, PreCopy, Prepare, TakeOver
from mooncake.messages.pools import Capacity
from mooncake.messages.requests import Request, SamplingParams
from mooncake.messages.workers import (
    PROTOCOL_VERSION,
    Abort,
    Decode,
    FromWorker,
    Prefill,
    Register,
    Reserve,
    Retire,
    Retired,
    Role,
    SwitchRole,
    ToWorker,
)
from workers.decode.tbt_slo.prompt_budget import ChunkLimits
from workers.prefill.queue import PrefillQueue

FRONT = b"front"
FINGERPRINT = "simulated"
MESSAGE_S = 0.0005
"""Seconds of one message on the control plane."""
HEARTBEAT_S = 1.0
UNLIMITED = 1 << 62
_ORDERS = (
    Reserve,
    Prefill,
    Decode,
    Abort,
    PreCopy,
    Prepare,
    HandOver,
    TakeOver,
    SwitchRole,
    Replicate,
    Retired,
)
"""The messages that simulated instances carry out."""


class _CountedRequest(Request, frozen=True):
    """A request of which only the number of tokens matters. The blocks of its output have no keys."""

    def continued(self, output: list[int], block_size: int) -> Request:
        num_tokens = self.num_prompt_tokens + len(output)
        return msgspec.structs.replace(self, token_ids=range(num_tokens), num_output_tokens=len(output))


class DisaggregatedCluster:
    """A cluster of `num_prefill`, `num_decode` and `num_both` instances under the Conductor.

    `machine` is the machine that all instances share; if it is None, each has one of its own, unless `shape`
    has slowdowns. `on_second` is called each second. `max_tokens` is the limit of output tokens that clients
    set; the Conductor does not know the true length of an answer.
    """

    def __init__(
        self,
        shape: InstanceShape,
        num_prefill: int,
        num_decode: int,
        limits: Limits,
        settings: PolicySettings,
        max_tokens: int = 2048,
        on_second: Callable[["DisaggregatedCluster"], None] = lambda cluster: None,
        num_both: int = 0,
        machine: Machine | None = None,
    ) -> None:
        self.clock = Clock()
        self.conductor = Conductor(1, FINGERPRINT, limits, settings, shape.costs.profiled)
        self.results = Results(shape.jitter)
        if machine is None and shape.slowdowns is not None:
            machine = Machine({})
        self.machine = machine
        self.limits, self._settings = limits, settings
        self._shape, self._max_tokens, self._on_second = shape, max_tokens, on_second
        self._num_device_blocks = shape.num_device_blocks
        self._network = Network(self.clock)
        self._live: dict[str, SimulatedRequest] = {}
        self._nodes: dict[str, Node] = {}
        self._instances: dict[bytes, Instance] = {}
        """All instances by identity, including those that have left."""
        self._num_of_role = Counter[Role]()
        for role, number in ((Role.PREFILL, num_prefill), (Role.DECODE, num_decode), (Role.BOTH, num_both)):
            for _ in range(number):
                self._add(role)
        self._feed: Feed | ClosedLoops | None = None

    @property
    def instances(self) -> list[Instance]:
        """All instances that have not left."""
        return [instance for instance in self._instances.values() if not instance.has_left]

    @property
    def prefills(self) -> list[PrefillInstance]:
        """The instances that prefill at present."""
        return [of.prefill for of in self.instances if of.node.role is Role.PREFILL]

    @property
    def decodes(self) -> list[DecodeInstance]:
        """The instances that decode at present."""
        return [of.decode for of in self.instances if of.node.role is not Role.PREFILL]

    @property
    def num_submitted(self) -> int:
        assert self._feed is not None
        return self._feed.num_submitted

    def run(self, load: Iterable[TraceRequest]) -> Results:
        """Run all requests of `load` to their ends, and return the results."""
        return self._run(Feed(self.clock, load, self._shape.block_tokens, self._submit))

    def run_loops(self, loops: Iterable[ClosedLoop]) -> Results:
        """Run closed loops, one after the other, and return the results."""
        return self._run(ClosedLoops(self.clock, loops, self._shape.block_tokens, self._submit))

    def _run(self, feed: Feed | ClosedLoops) -> Results:
        self._feed = feed
        self._tell(FRONT, FrontHello(PROTOCOL_VERSION, FINGERPRINT))
        for instance in self.instances:
            self._tell(instance.node.identity, self._registration(instance.node))
        self._each_second()
        self.clock.run()
        assert not self._live
        return self.results

    # -- instances ----------------------------------------------------------------------------------

    def join_at(self, at_s: float, role: Role) -> None:
        """Plan that one more instance of this role joins at second `at_s`."""
        self.clock.at(at_s, self._join, role)

    def leave_at(self, at_s: float, name: str) -> None:
        """Plan that an instance drains and leaves at second `at_s`.

        Raises ConfigError for an unknown name.
        """
        if name not in self._nodes:
            raise ConfigError(f"there is no instance {name!r}; there are {', '.join(self._nodes)}")
        self.clock.at(at_s, self._tell, self._nodes[name].identity, Retire())

    def _join(self, role: Role) -> None:
        node = self._add(role).node
        self._tell(node.identity, self._registration(node))

    def _add(self, role: Role) -> Instance:
        node, shape = self._add_node(f"{role}-{self._num_of_role[role]}", role), self._shape
        self._num_of_role[role] += 1
        prefill = PrefillInstance(
            node,
            PrefillQueue(
                shape.prefill_chunk,
                saturating_tokens=shape.saturating_tokens,
                multiple=shape.block_tokens if shape.prefill_layer_window else 1,
                block_size=shape.block_tokens,
            ),
            self._live.__getitem__,
            lambda name: self._instances[self._nodes[name].identity].decode,
            is_windowed=shape.prefill_layer_window,
            prompt_s=shape.prompt_s,
        )
        decode = DecodeInstance(
            node,
            shape.max_batch,
            self._num_device_blocks * shape.block_tokens,
            ChunkLimits(shape.block_tokens, self._settings.mixed_chunk_tokens, shape.prefill_chunk),
            self._live.__getitem__,
            shape.join_costs,
            checks_reservations=shape.checks_reservations,
        )
        instance = Instance(node, prefill, decode, self._num_device_blocks)
        self._instances[node.identity] = instance
        return instance

    def _add_node(self, name: str, role: Role) -> Node:
        shape, identity = self._shape, f"{name}#{INCARNATION}".encode()
        if shape.slowdowns is not None and self.machine is not None:
            self.machine.slowdown[name] = shape.slowdowns[role is not Role.PREFILL]
        node = self._nodes[name] = Node(
            name,
            role,
            self.clock,
            shape.costs,
            self._network,
            SimulatedPool(
                self.clock,
                shape.num_blocks_in_pool,
                shape.eviction,
                partial(self.conductor.prefixes.apply, name),
            ),
            shape.layout,
            shape.hardware.nic_bytes_per_s * shape.efficiencies.nic,
            shape.hardware.pcie_bytes_per_s * shape.efficiencies.pcie,
            lambda message: self.clock.after(MESSAGE_S, self._tell, identity, message),
            self._nodes,
            self.machine,
        )
        return node

    def _registration(self, node: Node) -> Register:
        shape = self._shape
        capacity = Capacity(node.pool.num_pages, self._num_device_blocks, shape.max_batch)
        return Register(
            PROTOCOL_VERSION,
            node.name,
            INCARNATION,
            node.role,
            FINGERPRINT,
            node.layout,
            node.shards,
            capacity,
            f"simulated {shape.hardware.name}",
        )

    def _each_second(self) -> None:
        if self._feed is not None and self._feed.is_over and not self._live:
            return
        self._tell(FRONT, FrontHello(PROTOCOL_VERSION, FINGERPRINT))
        for instance in self.instances:
            self._tell(instance.node.identity, instance.heartbeat())
        self._carry_out(self.conductor.tick(self.clock.now_s))
        self._on_second(self)
        self.clock.after(HEARTBEAT_S, self._each_second)

    # -- messages -----------------------------------------------------------------------------------

    def _tell(self, sender: bytes, message: FromWorker | FromFront) -> None:
        self._carry_out(self.conductor.handle(sender, message, self.clock.now_s))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            message = effect.message
            if effect.peer == FRONT:
                self._end(message)
            elif isinstance(message, _ORDERS):
                self.clock.after(MESSAGE_S, self._instances[effect.peer].receive, message)

    def _submit(self, request: SimulatedRequest) -> None:
        request_id = str(request.number)
        self._live[request_id] = request
        message = _CountedRequest(
            request_id,
            range(request.num_input_tokens),  # type: ignore[arg-type]  # only their number matters
            request.block_keys,
            SamplingParams(max_tokens=max(self._max_tokens, request.num_output_tokens)),
            reply_to="",
        )
        self.clock.after(self._shape.first_token_s, self._tell, FRONT, Submit(message))

    def _end(self, message: ToWorker | ToFront) -> None:
        match message:
            case Ended(request_id=request_id):
                outcome = Outcome.FINISHED
            case Rejected(request_id=request_id):
                outcome = Outcome.REJECTED
            case Failed(request_id=request_id):
                outcome = Outcome.FAILED
            case _:
                return
        self.results.end(self._live.pop(request_id), outcome, self.clock.now_s)
        assert self._feed is not None
        self._feed.ended()
