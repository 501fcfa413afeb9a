"""The models and machines of the simulator: published shapes and data sheets, no measurements.

The efficiencies say which share of a data sheet's figure software reaches. They are the same in all
experiments.

Owns: the cards, and the errors for unknown names. Does not know: what anything costs.
"""

import difflib
from collections.abc import Collection
from dataclasses import dataclass, replace

from mooncake.errors import ConfigError
from mooncake.messages.blocks import DTYPE_BYTES, KVLayout

GBPS = 1e9 / 8
"""Bytes a second of one Gbit/s."""
WEIGHT_BYTES = 2
"""Bytes of a weight in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Shape of a decoder-only model, in bfloat16."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocab: int
    mlp_matrices: int = 3
    """Matrices of an MLP: 3 for gated MLPs, 2 for plain ones."""

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def num_linear_weights(self) -> int:
        """The number of weights with which every token is multiplied.

        The output layer is left out, because prefill needs it once.
        """
        kv = self.num_kv_heads * self.head_dim
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        layer = 2 * self.hidden * self.hidden + 2 * self.hidden * kv + mlp
        return self.num_layers * layer

    @property
    def weights_bytes(self) -> int:
        """The bytes of all weights, both embeddings included."""
        return WEIGHT_BYTES * (self.num_linear_weights + 2 * self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES["bfloat16"]

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of this model's KVCache blocks."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, "bfloat16")


@dataclass(frozen=True, slots=True)
class HardwareCard:
    """One node: `num_gpus` devices of one tensor-parallel group. Bytes a second are of the whole node.

    `pool_bytes` is the DRAM that the node gives to the KVCache pool.
    """

    name: str
    num_gpus: int
    gpu_flops: float
    """Dense bfloat16 operations a second of one device."""
    gpu_memory_bytes_per_s: float
    gpu_memory_bytes: float
    nic_bytes_per_s: float
    pcie_bytes_per_s: float
    """Bytes a second between devices and host memory."""
    pool_bytes: float

    def with_gpus(self, num_gpus: int) -> "HardwareCard":
        """Return the card of a part of this node: NICs, PCIe and DRAM shrink with the number of devices."""
        share = num_gpus / self.num_gpus
        return replace(
            self,
            num_gpus=num_gpus,
            nic_bytes_per_s=share * self.nic_bytes_per_s,
            pcie_bytes_per_s=share * self.pcie_bytes_per_s,
            pool_bytes=share * self.pool_bytes,
        )


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Shares of the data sheets' figures that software reaches, and overheads that the sheets do not
    state."""

    compute: float = 0.5
    """Share of the matrix units' peak, in the large products of prefill (model FLOPs utilisation)."""
    memory: float = 0.8
    """Share of the device memory's bandwidth."""
    nic: float = 0.87
    """Share of the NICs' bandwidth: Mooncake's Transfer Engine reached 87 GB/s over 4 x 200 Gbit/s."""
    pcie: float = 0.8
    device_memory: float = 0.9
    """Share of the device memory that weights and KVCache can use."""
    iteration_overhead_s: float = 0.005
    """Seconds of an iteration for planning, sampling and launches."""
    layer_overhead_s: float = 60e-6
    """Seconds of a layer's two all-reduces of small tensors, where several devices work as a group."""


STATED = Efficiencies()
"""The efficiencies of all experiments."""

MODELS = {
    card.name: card
    for card in (
        ModelCard("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        ModelCard("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        ModelCard("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
        ModelCard("llama-13b", 40, 5120, 40, 40, 13824, 32000),
        ModelCard("opt-13b", 40, 5120, 40, 40, 20480, 50272, mlp_matrices=2),
    )
}

HARDWARE = {
    card.name: card
    for card in (
        # 1 TB of DRAM holds 3M tokens of a 70B model, the capacity that Mooncake's FAST'25 version gives a
        # node.
        HardwareCard("a100", 8, 312e12, 2.039e12, 80e9, 800 * GBPS, 8 * 25e9, 1e12),
        HardwareCard("a800", 8, 312e12, 2.039e12, 80e9, 800 * GBPS, 8 * 25e9, 1e12),
        HardwareCard("h800", 8, 989e12, 3.35e12, 80e9, 3200 * GBPS, 8 * 50e9, 1e12),
        HardwareCard("h200", 8, 989e12, 4.8e12, 141e9, 3200 * GBPS, 8 * 50e9, 1e12),
    )
}


def model_card(name: str) -> ModelCard:
    """Return the card of a model. If there is none, raises ConfigError with the nearest names."""
    return MODELS[_known("model", name, MODELS)]


def hardware_card(name: str) -> HardwareCard:
    """Return the card of a machine. If there is none, raises ConfigError with the nearest names."""
    return HARDWARE[_known("hardware", name, HARDWARE)]


def _known(kind: str, name: str, names: Collection[str]) -> str:
    if name.lower() not in names:
        near = difflib.get_close_matches(name.lower(), names)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
        raise ConfigError(f"{kind}: there is no card named {name!r}; {hint}")
    return name.lower()
