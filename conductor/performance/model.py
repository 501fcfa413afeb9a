"""BanaServe's performance model of disaggregated serving (section 4.3), for requests of one size.

The paper divides operations by a device's peak. Here costs are measured seconds of the instances, learned or
profiled (`mooncake.messages.costs`). They cover all layers and operations at the speed that the device really
has.

    equations 12, 13  forward pass and transfer of a layer     `overlapped_s`
              18, 19  the objective and its terms              `Performance.terms`
              20, 21  T_TTFT = T_p + T_x + T_q                 `Pairs.performance`
              22      T_TPOT = T_d + T_c + T_m                 `DecodeCapacity.tpot_s`
              25, 29  memory and latency budget of a batch     `DecodeCapacity.batch_size`
              24, 27  U_p = Comp_p / C_gpu, and U_d            `Performance`
              30      Theta = N L_out / (T_TTFT + L_out T_TPOT)  `Performance.output_tokens_per_s`

Owns: this model. Does not know: how costs were measured, which decisions follow.
"""

from dataclasses import dataclass
from typing import NamedTuple

from conductor.performance.objective import Terms
from mooncake.messages.costs import TBT_MARGIN, Costs, prefill_quantities

_ROOM_SHARE = 0.9
"""The share of device pages that a batch may fill."""
_LEAST = 1e-9
"""The smallest divisor, used instead of 0."""
_NUM_HALVINGS = 40
"""The number of halvings in the bisection for the size of a batch."""


def overlapped_s(compute_s: float, transfer_s: float, num_layers: int) -> float:
    """Return the seconds of a forward pass and of the transfer of its KVCache, which overlap layer by layer.

    A layer's transfer is hidden by the computation of the next layer while T_KV <= T_F,layer. So the result
    is the longer of the two times plus one layer's part of the shorter time (BanaServe, section 4.2,
    equations 12 and 13; Mooncake, section 5.2).
    """
    return max(compute_s, transfer_s) + min(compute_s, transfer_s) / num_layers


class Sizes(NamedTuple):
    """The lengths of a request in tokens: L_in, L_out, and the cached part of L_in."""

    num_prompt_tokens: float
    num_output_tokens: float
    num_cached_tokens: float = 0.0

    @property
    def mean_kv_tokens(self) -> float:
        """The mean number of KVCache tokens of a request while it is decoded."""
        return self.num_prompt_tokens + self.num_output_tokens / 2

    def prefill_s(self, costs: Costs) -> float:
        """Return T_p, the seconds that an idle instance needs to compute the prompt."""
        num_new = self.num_prompt_tokens - self.num_cached_tokens
        return costs.seconds(*prefill_quantities(num_new, self.num_cached_tokens))


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """The size and speed of the decode batch of a mean instance."""

    costs: Costs
    """Seconds of an iteration as a polynomial in requests and KVCache tokens."""
    max_batch: float
    num_device_tokens: float
    """Tokens of KVCache that fit into device memory beside the weights: the limit of K_acc in equation 25."""
    tbt_slo_s: float | None = None
    least_chunk_s: float = 0.0
    """Seconds that the shortest chunk of a prompt takes, in an iteration with other requests."""

    def tpot_s(self, batch_size: float, mean_kv_tokens: float) -> float:
        """Return T_TPOT, the seconds of an iteration (equation 22).

        T_d, for computing, is the constant plus a part for each request. T_c + T_m, for reading KVCache, is a
        part for each token.
        """
        return self.costs.seconds(batch_size, batch_size * mean_kv_tokens)

    def batch_size(self, mean_kv_tokens: float) -> float:
        """Return the largest batch that all limits allow; at least 1.

        The limits are the TBT SLO (equation 29), the batch slots, and the device's pages (equation 25).
        """
        of_request_s = self.costs.first_s + mean_kv_tokens * self.costs.second_s
        size = min(self.max_batch, _ROOM_SHARE * self.num_device_tokens / max(mean_kv_tokens, 1.0))
        if self.tbt_slo_s is not None and of_request_s > 0:
            left_s = self.tbt_slo_s - self.costs.constant_s
            size = min(size, left_s / ((1 + TBT_MARGIN) * of_request_s))
        return max(1.0, size)

    def tokens_per_s(self, mean_kv_tokens: float) -> float:
        """Return the tokens drawn in a second with the largest batch that `batch_size` allows."""
        size = self.batch_size(mean_kv_tokens)
        return size / max(self.tpot_s(size, mean_kv_tokens), _LEAST)


class Performance(NamedTuple):
    """The predicted performance of all instances together, while N requests are always in the system."""

    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    """Output tokens a second of all instances: Theta of equation 30."""
    prefill_utilisation: float
    """The share of time in which a prefill instance computes, U_p from 0 to 1 (equation 27)."""
    decode_utilisation: float
    """The utilisation U_d of a decode instance, from 0 to 1.

    It is the instance's tokens a second divided by those of its largest batch. The share of time in which it
    computes would be no measure, as an instance computes all the time even with one request.
    """
    utilisation: float
    """The mean utilisation U_avg of all instances (equation 19)."""
    batch_size: float
    """The mean number of requests that a decode instance decodes."""
    num_kv_tokens: float
    """The mean number of KVCache tokens at a decode instance (K_acc, equation 25)."""

    @property
    def terms(self) -> Terms:
        """The terms of the objective."""
        return Terms(self.utilisation, self.ttft_s + self.tpot_s, self.output_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A number of equal prefill instances, and a number of equal decode instances."""

    num_prefill: int
    num_decode: int
    prefill: Costs
    """Seconds of a prefill, as a polynomial in the two quantities of `prefill_quantities`."""
    decode: DecodeCapacity
    num_layers: int
    token_transfer_s: float = 0.0
    """Seconds to send the KVCache of one token to a decode instance."""
    first_token_s: float = 0.0
    """Seconds that a TTFT takes in addition to queue, prefill and transfer."""

    def performance(self, sizes: Sizes, num_requests: float) -> Performance:
        """Predict the performance in a closed loop: each answer that ends is replaced by a new request.

        The size of the decode batch follows from the rate of answers (Little's law), and the rate follows
        from the size. So both are found by bisection. T_q is the wait for iterations to end (`_wait_s`) and,
        if a stage is full, the wait in its queue. While no stage is full, prompts hardly wait for one
        another, because requests of one size come as evenly as they were prefilled.

        Args:
            sizes: The tokens of a request.
            num_requests: N, the number of requests at any time.
        """
        kv_tokens = sizes.mean_kv_tokens
        low, high = 0.0, min(self.decode.batch_size(kv_tokens), num_requests / self.num_decode)
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            tpot_s = self.decode.tpot_s(max(1.0, middle), kv_tokens)
            rate_per_s = self._rate_per_s(sizes, num_requests, middle, tpot_s)
            num_decoding = rate_per_s * _decode_s(sizes, tpot_s)
            low, high = (middle, high) if num_decoding > middle * self.num_decode else (low, middle)
        size = (low + high) / 2
        tpot_s = self.decode.tpot_s(max(1.0, size), kv_tokens)
        rate_per_s = self._rate_per_s(sizes, num_requests, size, tpot_s)
        if decode_s := _decode_s(sizes, tpot_s):
            rate_per_s = min(rate_per_s, size * self.num_decode / decode_s)
        num_busy_prefill = rate_per_s * sizes.prefill_s(self.prefill)
        num_drawn = rate_per_s * max(0.0, sizes.num_output_tokens - 1)
        num_busy_decode = num_drawn / self.decode.tokens_per_s(kv_tokens)
        return Performance(
            num_requests / rate_per_s - decode_s,
            tpot_s,
            rate_per_s * sizes.num_output_tokens,
            num_busy_prefill / self.num_prefill,
            num_busy_decode / self.num_decode,
            (num_busy_prefill + num_busy_decode) / (self.num_prefill + self.num_decode),
            size,
            size * kv_tokens,
        )

    def _rate_per_s(self, sizes: Sizes, num_requests: float, batch_size: float, tpot_s: float) -> float:
        """Return the answers a second with this batch and T_TPOT, if no request waits for a batch slot.

        The rate is at most the rate of prefill.
        """
        prefill_s = sizes.prefill_s(self.prefill)
        transfer_s = (sizes.num_prompt_tokens - sizes.num_cached_tokens) * self.token_transfer_s
        ttft_s = self.first_token_s + overlapped_s(prefill_s, transfer_s, self.num_layers)
        most_per_s = self.num_prefill / prefill_s
        rate_per_s = num_requests / (ttft_s + _decode_s(sizes, tpot_s))
        utilisation = min(1.0, rate_per_s / most_per_s)
        ttft_s += _wait_s(num_requests, batch_size, tpot_s, utilisation)
        return min(num_requests / (ttft_s + _decode_s(sizes, tpot_s)), most_per_s)


def _wait_s(num_requests: float, batch_size: float, tpot_s: float, prefill_utilisation: float) -> float:
    """Return the mean seconds of T_q for which requests wait because tokens come in iterations.

    A request joins the batch between two iterations, and its first token is held until then. So it waits for
    the rest of the iteration that runs when its KVCache has arrived, half an iteration on average.

    The next request comes when an answer ends, so also between two iterations. Answers end one behind the
    other, as their prompts were computed. So the next prompts come too early or too late by half an iteration
    on average, and wait for that long if the prefill instance is still busy.

    A request finds the batch that the other requests form (arrival theorem of closed networks). If the batch
    is empty, the request does not wait.
    """
    num_others = batch_size * max(0.0, num_requests - 1) / num_requests
    return min(1.0, num_others) * (1 + prefill_utilisation) * tpot_s / 2


def _decode_s(sizes: Sizes, tpot_s: float) -> float:
    """Return the seconds from the first token to the last.

    Equation 30 counts one gap more, for the first token.
    """
    return max(0.0, sizes.num_output_tokens - 1) * tpot_s
