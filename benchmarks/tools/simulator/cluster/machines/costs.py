"""The durations of iterations: by roofline from cards, or from a profile of real workers.

An iteration computes *shares* of prompts, and one token for each running request. Both cost models are affine
in the KV tokens of the running requests. So the time of many decoding iterations in a row has a closed form
(`batch`).

Owns: seconds of computing. Does not know: queues, networks, who computes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from benchmarks.tools.simulator.cluster.machines.cards import STATED, Efficiencies, HardwareCard, ModelCard
from mooncake.messages.costs import Costs as Polynomial


class PromptShare(NamedTuple):
    """The next `num_tokens` tokens of a prompt, behind `num_before` tokens that have KVCache."""

    num_tokens: int
    num_before: int


class Costs(Protocol):
    """The interface of a cost model. All costs are seconds on one instance."""

    kv_token_s: float
    """Seconds that one more token of KVCache adds to an iteration of decoding."""
    profiled: tuple[Polynomial, Polynomial]
    """The costs of prefill and of decode that the Conductor learns from measurements."""

    def iteration_s(self, shares: Sequence[PromptShare], batch_size: int) -> float:
        """Return the seconds of one forward pass, without reading the KVCache of running requests.

        Reading it takes `kv_token_s` for each token.
        """


class Roofline:
    """Costs by roofline, with attention added.

    Linear layers take the longer of computing and reading the weights: computing takes 2 floating-point
    operations for each weight and token. Causal attention over n new tokens behind p others takes 4 * layers
    * hidden * n * (p + n / 2) operations.
    """

    def __init__(self, model: ModelCard, hardware: HardwareCard, efficiencies: Efficiencies = STATED) -> None:
        flops = hardware.num_gpus * hardware.gpu_flops * efficiencies.compute
        bytes_per_s = hardware.num_gpus * hardware.gpu_memory_bytes_per_s * efficiencies.memory
        self._linear_token_s = 2 * model.num_linear_weights / flops
        self._pair_s = 4 * model.num_layers * model.hidden / flops
        self._weights_s = model.weights_bytes / bytes_per_s
        group_s = efficiencies.layer_overhead_s * model.num_layers if hardware.num_gpus > 1 else 0.0
        self._overhead_s = efficiencies.iteration_overhead_s + group_s
        self.kv_token_s = model.kv_bytes_per_token / bytes_per_s
        self.profiled = (
            Polynomial(self._overhead_s, self._linear_token_s, self._pair_s),
            Polynomial(self._overhead_s + self._weights_s, 0.0, self.kv_token_s),
        )

    def iteration_s(self, shares: Sequence[PromptShare], batch_size: int) -> float:
        num_tokens, num_pairs = batch_size, 0.0
        for num_new, num_before in shares:
            num_tokens += num_new
            num_pairs += num_new * (num_before + num_new / 2)
        linear_s = max(self._weights_s, num_tokens * self._linear_token_s)
        return self._overhead_s + linear_s + num_pairs * self._pair_s


class Profiled:
    """Costs by polynomials, which `mooncake-serve profile` fits to a real worker (`mooncake.messages.costs`).

    Prefill of n new tokens behind c cached ones: c0 + c1 * n + c2 * n * (c + n / 2). One iteration of b
    requests with k KV tokens: c0 + c1 * b + c2 * k. The constants include the time to read all weights, which
    are read once in a pass. So a pass has one constant: that of decoding, or that of prefill if nothing is
    decoded. `beside` are the costs of prompt tokens in a pass that decodes, without its constant; None if
    they are those of prefill.
    """

    def __init__(self, prefill: Polynomial, decode: Polynomial, beside: Polynomial | None = None) -> None:
        self._prefill, self._decode, self._beside = prefill, decode, beside or prefill
        self.kv_token_s = decode.second_s
        self.profiled = (prefill, decode)

    def iteration_s(self, shares: Sequence[PromptShare], batch_size: int) -> float:
        seconds = 0.0
        if batch_size:
            seconds += self._decode.constant_s + self._decode.first_s * batch_size
        if shares:
            constant_s, token_s, pair_s = self._beside if batch_size else self._prefill
            seconds += 0.0 if batch_size else constant_s
            seconds += sum(n * (token_s + pair_s * (before + n / 2)) for n, before in shares)
        return seconds
