"""The cut of a prompt into chunks for a pipeline of stages (Mooncake, section 5.1).

In chunked pipeline parallelism, a stage computes chunk c while the previous stage computes chunk c + 1. All
stages are busy only if chunks take equally long. A token behind a long prefix takes longer than the first
tokens, because its attention reads all keys before it. So chunks shrink as the prefix grows.

Owns: the arithmetic. Does not know: requests, stages.
"""

import math
from dataclasses import dataclass

from workers.engine.spec import ModelSpec

_PASS_TOKENS = 32
"""The fixed cost of a pass (reading weights, sending states), measured on CPUs.

It is the number of tokens without a prefix that cost as much.
"""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of a layer, in any unit.

    n tokens behind p earlier tokens cost `n * (token + pair * (p + n / 2))`.
    """

    token: float
    """The cost of one token at any position."""
    pair: float
    """The cost of one pair of a token and an earlier one."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "LayerCosts":
        """Return the costs of a model's layer in floating-point operations.

        A token costs 2 for each weight. A pair of tokens costs 4 for each head and head dimension.
        """
        heads_dim = spec.num_heads * spec.head_dim
        num_weights = spec.hidden_size * (
            2 * heads_dim
            + 2 * spec.num_kv_heads * spec.head_dim
            + (2 if spec.is_opt else 3) * spec.intermediate_size
        )
        return cls(token=2.0 * num_weights, pair=4.0 * heads_dim)

    def of_tokens(self, start: int, num_tokens: float) -> float:
        """Return the cost of tokens `[start, start + num_tokens)` of a prompt."""
        return num_tokens * (self.token + self.pair * (start + num_tokens / 2))

    def num_tokens(self, start: int, cost: float) -> float:
        """Return how many tokens from `start` on cost `cost` together: the inverse of `of_tokens`."""
        first = self.token + self.pair * start
        return 2 * cost / (first + math.sqrt(first * first + 2 * self.pair * cost))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A rule that cuts the prompts of a pipeline into chunks that take equally long, up to rounding.

    Chunk boundaries x_i count from `start`, with x_0 = 0 and x_m = end - start. They solve `of_tokens(start,
    x_i) = i / m * of_tokens(start, end - start)`. All boundaries but the last one are rounded to multiples of
    `multiple`: a block of the KVCache, so that each chunk fills the blocks that it stores.

    m chunks take X stages the time `(cost + m * pass_cost) * (m + X - 1) / (m * X)`. With more chunks, stages
    are idle for a shorter time at the beginning and the end of the prompt, but each chunk adds the fixed cost
    of a pass, `pass_cost`. The time is least for m = `sqrt((X - 1) * cost / pass_cost)`. m is larger if
    otherwise a chunk would be longer than `max_tokens`.
    """

    costs: LayerCosts
    num_stages: int
    max_tokens: int
    multiple: int

    def __call__(self, start: int, end: int) -> list[range]:
        """Return the chunks of the tokens `[start, end)` of a prompt."""
        assert 0 <= start < end
        cost = self.costs.of_tokens(start, end - start)
        num_chunks = self._num_chunks(start, cost)
        bounds = [start]
        for index in range(1, num_chunks):
            bound = start + round(self.costs.num_tokens(start, cost * index / num_chunks))
            bound = (bound + self.multiple // 2) // self.multiple * self.multiple
            bound = min(bound, bounds[-1] + self.max_tokens)
            if bounds[-1] < bound < end:
                bounds.append(bound)
        while end - bounds[-1] > self.max_tokens:
            bounds.append(bounds[-1] + self.max_tokens)
        return [range(a, b) for a, b in zip(bounds, [*bounds[1:], end], strict=True)]

    def _num_chunks(self, start: int, cost: float) -> int:
        best = math.sqrt((self.num_stages - 1) * cost / (_PASS_TOKENS * self.costs.token))
        # The first chunk is the longest.
        return max(1, round(best), math.ceil(cost / self.costs.of_tokens(start, self.max_tokens)))
