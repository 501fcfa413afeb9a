"""The shape of the instances of a simulated cluster: the properties that all of them share.

Owns: this description. Does not know: instances, clusters.
"""

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.tools.simulator.cluster.machines.cards import STATED, Efficiencies, HardwareCard, ModelCard
from benchmarks.tools.simulator.cluster.machines.costs import Costs
from benchmarks.tools.simulator.cluster.machines.machine import IterationJitter
from benchmarks.tools.traces.request import BLOCK_TOKENS
from mooncake.config.policies import EvictionPolicy
from mooncake.errors import ConfigError
from mooncake.messages.blocks import KVLayout


class JoinCosts(NamedTuple):
    """The seconds by which a joining request makes an iteration longer, if its KVCache comes from elsewhere.

    They are 0 where copies do not slow the device down. Where the device is the processor, copies take the
    processor's time.
    """

    constant_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds for a request with the KVCache of `num_tokens` tokens."""
        return self.constant_s + self.token_s * num_tokens


NO_JOIN_COSTS = JoinCosts()


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """The shape of every instance of a cluster. Capacities are in blocks."""

    model: ModelCard
    hardware: HardwareCard
    costs: Costs
    efficiencies: Efficiencies = STATED
    num_pool_blocks: int | None = None
    """Blocks of a pool; None for as many as the hardware's DRAM holds."""
    eviction: EvictionPolicy = EvictionPolicy.LRU
    prefill_chunk: int = 2048
    max_batch: int = 256
    checks_reservations: bool = False
    """Whether the double check is also made when pages are reserved."""
    block_tokens: int = BLOCK_TOKENS
    saturating_tokens: int | None = None
    """Number of tokens above which a larger pass computes no more tokens a second, as in `PrefillQueue`."""
    prefill_layer_window: bool = False
    """Whether the devices of prefill instances have memory for only some layers at a time."""
    first_token_s: float = 0.0
    """Seconds that front and dispatch add before each first token. Queues and computing are not included."""
    prompt_s: float = 0.0
    """Seconds for which each prompt occupies a prefill instance in addition to its passes."""
    slowdowns: tuple[float, float] | None = None
    """Factors of prefill's and decode's times while other instances compute.

    None if each instance has a machine of its own.
    """
    join_costs: JoinCosts = NO_JOIN_COSTS
    jitter: IterationJitter | None = None

    @property
    def layout(self) -> KVLayout:
        return self.model.layout(self.block_tokens)

    @property
    def num_blocks_in_pool(self) -> int:
        return self.num_pool_blocks or int(self.hardware.pool_bytes // self.layout.block_bytes)

    @property
    def num_device_blocks(self) -> int:
        """The number of KVCache blocks that fit beside the weights.

        Raises ConfigError if not even one fits.
        """
        memory_bytes = self.hardware.num_gpus * self.hardware.gpu_memory_bytes
        left_bytes = self.efficiencies.device_memory * memory_bytes - self.model.weights_bytes
        num_blocks = int(left_bytes // self.layout.block_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"the weights of {self.model.name} ({self.model.weights_bytes / 1e9:.0f} GB) leave no room"
                f" for KVCache on {self.hardware.num_gpus} {self.hardware.name}; use more devices"
            )
        return num_blocks
