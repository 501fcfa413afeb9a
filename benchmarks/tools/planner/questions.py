"""Questions about a workload that can be answered before any simulation.

Guides use such questions to decide for or against disaggregation. Split efficiency (Splitwise) is T_prefill /
(T_prefill + T_transfer) for the mean prompt, with a transfer that waits for the prefill. In this system
KVCache is sent layer by layer during the prefill, so the visible part of the transfer is much smaller.

Owns: the questions and the guides' thresholds. Does not know: simulations.
"""

import msgspec

from benchmarks.tools.planner.workload import Workload
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.setup import Setup

SHORT_PROMPT, LONG_PROMPT = 256, 1024
POOR_SPLIT, GOOD_SPLIT = 0.5, 0.8
STRICT_TBT_S = 0.05
LOW_USE, HIGH_USE = 0.4, 0.7


class Question(msgspec.Struct, frozen=True):
    """A question with its answer. The `hint` is 1 for disaggregation, -1 against it, 0 for neither."""

    text: str
    answer: str
    hint: int


def questions(
    setup: Setup, workload: Workload, coupled_per_s: float, wanted_per_s: float | None
) -> list[Question]:
    """Return the questions about instances of `setup`, with their answers.

    `coupled_per_s` is the goodput of all devices as coupled instances. `wanted_per_s` is the rate that the
    cluster is to serve, if it is known.
    """
    assert setup.tbt_slo_s is not None
    shape, tbt_slo_s = setup.shape(), setup.tbt_slo_s
    mean = workload.sizes.num_prompt_tokens
    prefill_s = shape.costs.iteration_s([PromptShare(round(mean), 0)], 0)
    bytes_per_s = shape.hardware.nic_bytes_per_s * shape.efficiencies.nic
    transfer_s = mean * shape.model.kv_bytes_per_token / bytes_per_s
    split = prefill_s / (prefill_s + transfer_s)
    asked = [
        Question("mean prompt", f"{mean:,.0f} tokens", _between(mean, SHORT_PROMPT, LONG_PROMPT)),
        Question(
            "split efficiency",
            f"{split:.0%}: prefill {_shown(prefill_s)}, transfer {_shown(transfer_s)}",
            _between(split, POOR_SPLIT, GOOD_SPLIT),
        ),
        Question("TBT SLO", _shown(tbt_slo_s), 1 if tbt_slo_s < STRICT_TBT_S else 0),
        Question(
            "a prefill among decoding requests",
            f"{prefill_s / tbt_slo_s:.1f} TBT SLOs long",
            1 if prefill_s > tbt_slo_s else 0,
        ),
    ]
    if wanted_per_s is not None and coupled_per_s:
        use = wanted_per_s / coupled_per_s
        answer = f"{use:.0%} of what coupled instances serve"
        asked.append(Question("wanted rate", answer, _between(use, LOW_USE, HIGH_USE)))
    return asked


def _between(value: float, low: float, high: float) -> int:
    return -1 if value < low else 1 if value > high else 0


def _shown(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
