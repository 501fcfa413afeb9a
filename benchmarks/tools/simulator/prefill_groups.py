"""The time of a prompt on a group of prefill nodes: chunked pipeline parallelism, and sequence parallelism.

- *CPP* (Mooncake, section 5.1): each node has a part of the layers, and chunks of the prompt follow one
  another. Hidden states go from node to node, once for each boundary.
- *Ring attention* (Liu et al., 2023): each node has all layers and a contiguous part of the tokens. In each
  layer the KVCache of all parts goes round the nodes: in each step a node attends to one part while the next
  part arrives. Because of the causal mask the node with the first tokens is idle in most steps: all nodes
  wait for the node with the last tokens.
- *Striped attention* (Brandon et al., 2023): token i is on node i mod N, so half of a step is masked on each.

Owns: these times, by roofline. Does not know: queues, which nodes a prompt gets.
"""

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.tools.simulator.cluster.machines.cards import STATED, HardwareCard, ModelCard
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from mooncake.messages.blocks import DTYPE_BYTES
from workers.prefill.chunks import LayerCosts

MOST_CHUNK_TOKENS = 8192
"""The most tokens of a pass of CPP."""
STEP_S = 20e-6
"""The least seconds of a step of the ring: the launch of a kernel, and of a transfer."""


class Attention(StrEnum):
    """The ways in which sequence parallelism divides the tokens of a prompt."""

    RING = "ring"
    STRIPED = "striped"


@dataclass(frozen=True, slots=True)
class PrefillNodes:
    """Nodes that prefill with one model.

    Each pair of nodes exchanges `link_bytes_per_s` in each direction.
    """

    model: ModelCard
    hardware: HardwareCard
    link_bytes_per_s: float

    def chunks(self, num_tokens: int, num_nodes: int) -> list[range]:
        """Return the chunks of a prompt, all of which take equally long.

        With more or fewer chunks the prompt would end later. The rule is the server's
        (`workers.prefill.chunks`), with the duration of a pass by roofline.
        """
        costs = LayerCosts(2 * self.model.num_linear_weights / self._flops, self._pair_s)
        whole_s, pass_s = costs.of_tokens(0, num_tokens), num_nodes * self.stage_s(range(0), num_nodes)
        least = math.ceil(whole_s / costs.of_tokens(0, MOST_CHUNK_TOKENS))
        num_chunks = max(least, round(math.sqrt((num_nodes - 1) * whole_s / pass_s)))
        ends = [int(costs.num_tokens(0, whole_s * part / num_chunks)) for part in range(1, num_chunks)]
        return [range(start, end) for start, end in itertools.pairwise([0, *ends, num_tokens])]

    def stage_s(self, chunk: range, num_nodes: int) -> float:
        """Return the seconds that a stage takes for a chunk.

        They are the seconds of its layers, or of sending hidden states if that takes longer.
        """
        computed_s = STATED.iteration_overhead_s + self._layers_s(len(chunk), chunk.start) / num_nodes
        return max(computed_s, self.hidden_s(len(chunk)) if num_nodes > 1 else 0.0)

    def hidden_s(self, num_tokens: int) -> float:
        """Return the seconds in which the hidden states of `num_tokens` tokens go to the next node."""
        return num_tokens * self.model.hidden * DTYPE_BYTES["bfloat16"] / self._bytes_per_s

    def sp_s(self, num_tokens: int, num_nodes: int, attention: Attention) -> float:
        """Return the seconds of a prompt on `num_nodes` idle nodes that share its tokens."""
        if num_nodes == 1:
            return STATED.iteration_overhead_s + self._layers_s(num_tokens, 0)
        part = num_tokens / num_nodes
        linear_s = self._layers_s(part, 0) - part * part / 2 * self._pair_s
        return STATED.iteration_overhead_s + linear_s + self._steps_s(part, num_nodes, attention)

    def _steps_s(self, part: float, num_nodes: int, attention: Attention) -> float:
        """Return the seconds of attention in all layers.

        Each step takes as long as the slowest node, or as the transfer beside it.
        """
        num_layers, block_s = self.model.num_layers, part * part * self._pair_s
        send_s = num_layers * STEP_S + part * self.model.kv_bytes_per_token / self._bytes_per_s
        # The last node has nothing masked but in the first step; striped, half is masked on every node.
        later_s = block_s if attention is Attention.RING else block_s / 2
        steps_s = [block_s / 2] + [later_s] * (num_nodes - 1)
        return sum(max(step_s, send_s) for step_s in steps_s[:-1]) + steps_s[-1]

    def sent_bytes(self, num_tokens: int, num_nodes: int, *, is_pipeline: bool) -> float:
        """Return the bytes that a node sends for a prompt."""
        if is_pipeline:
            return float(num_tokens * self.model.hidden * DTYPE_BYTES["bfloat16"])
        return (num_nodes - 1) * num_tokens / num_nodes * self.model.kv_bytes_per_token

    # -- by roofline ----------------------------------------------------------------------------------

    @property
    def _flops(self) -> float:
        return self.hardware.num_gpus * self.hardware.gpu_flops * STATED.compute

    @property
    def _pair_s(self) -> float:
        return 4 * self.model.num_layers * self.model.hidden / self._flops

    @property
    def _bytes_per_s(self) -> float:
        return self.link_bytes_per_s * STATED.nic

    def _layers_s(self, num_tokens: float, num_before: int) -> float:
        """Return the seconds of all layers for new tokens on one node."""
        share = PromptShare(int(num_tokens), num_before)
        return Roofline(self.model, self.hardware).iteration_s([share], 0) - STATED.iteration_overhead_s
