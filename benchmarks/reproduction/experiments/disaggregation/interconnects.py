"""KVCache transfers by interconnect, and split efficiency.

The published figures are from the guide `Disaggregated serving explained`.
"""

from pathlib import Path

from benchmarks.reproduction.experiment import Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.simulator.cluster.machines.cards import GBPS, HARDWARE, MODELS
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from conductor.performance.model import overlapped_s

INTERCONNECTS = {"InfiniBand 200 Gbit/s": 25e9, "InfiniBand 400 Gbit/s": 50e9, "NVLink 4.0": 450e9}
"""Interconnects with their bytes a second, in the guide's figures."""
PUBLISHED_MS = {
    512: (6.4, 3.2, 0.36),
    2048: (25.6, 12.8, 1.4),
    4096: (51.2, 25.6, 2.8),
    8192: (102.4, 51.2, 5.7),
    32768: (409.6, 204.8, 22.8),
}
PUBLISHED_EFFICIENCY = {256: 0.38, 512: 0.56, 1024: 0.72, 2048: 0.84, 4096: 0.91, 8192: 0.95}
SLOWER = {"25 Gbit/s": 25 * GBPS, "10 Gbit/s": 10 * GBPS}
"""Slower Ethernets with their bytes a second. The guide names the first as too slow an interconnect."""

_MODEL = MODELS["llama2-70b"]
_COSTS = Roofline(_MODEL, HARDWARE["a100"])


def transfer_s(num_tokens: int, bytes_per_s: float) -> float:
    """Return the seconds in which an idle link sends a prompt's KVCache."""
    return num_tokens * _MODEL.kv_bytes_per_token / bytes_per_s


def prefill_s(num_tokens: int) -> float:
    """Return the seconds in which an idle node computes a prompt."""
    return _COSTS.iteration_s([PromptShare(num_tokens, 0)], 0)


def shown_s(num_tokens: int, bytes_per_s: float) -> float:
    """Return the seconds that a transfer takes after the end of prefill if each layer is sent once computed.

    The link is idle until the first layer has been computed. Then layers follow at the speed of computing or
    of sending, whichever is slower (Mooncake, section 5.2).
    """
    compute_s = prefill_s(num_tokens)
    return overlapped_s(compute_s, transfer_s(num_tokens, bytes_per_s), _MODEL.num_layers) - compute_s


def run(trace: Trace, folder: Path) -> Outcome:
    """Compute transfer times and split efficiencies."""
    rows: list[list[Cell]] = []
    for num_tokens, published_ms in PUBLISHED_MS.items():
        row: list[Cell] = [f"{num_tokens:,}"]
        for published, bytes_per_s in zip(published_ms, INTERCONNECTS.values(), strict=True):
            row += [published, 1000 * transfer_s(num_tokens, bytes_per_s)]
        rows.append(row)
    header = ["prompt tokens"]
    for name in INTERCONNECTS:
        header += [f"{name}, published, ms", "ours, ms"]
    return Outcome([Table(header, rows), _efficiencies()])


def _efficiencies() -> Table:
    """Return the split efficiencies: prefill time / (prefill + transfer time).

    The transfer follows prefill, or is made layer by layer.
    """
    links = {"200 Gbit/s": INTERCONNECTS["InfiniBand 200 Gbit/s"], **SLOWER}
    rows: list[list[Cell]] = []
    for num_tokens, published in PUBLISHED_EFFICIENCY.items():
        alone_s = prefill_s(num_tokens)
        row: list[Cell] = [f"{num_tokens:,}", published]
        for bytes_per_s in links.values():
            added_s = transfer_s(num_tokens, bytes_per_s), shown_s(num_tokens, bytes_per_s)
            row += [alone_s / (alone_s + seconds) for seconds in added_s]
        rows.append(row)
    header = ["prompt tokens", "200 Gbit/s, published"]
    for name in links:
        header += [f"{name}, after prefill", f"{name}, by layer"]
    return Table(header, rows)


def remark(outcome: Outcome) -> str:
    """Return the remark about the effects of length and of transfers by layer."""
    first, last = outcome.tables[1].rows[0], outcome.tables[1].rows[-1]
    produced_gbps = 8192 * _MODEL.kv_bytes_per_token / prefill_s(8192) / GBPS
    return (
        "Transfer times are bytes by bandwidth, and so the published ones. The guide's split efficiency grows"
        " with the prompt; by the roofline prefill and transfer grow in proportion, so the length hardly"
        f" matters: {number(first[2]):.2f} for 256 tokens, {number(last[2]):.2f} for 8,192. What a fixed cost"
        " of each transfer would add for short prompts is not known. A node produces"
        f" {produced_gbps:.0f} Gbit/s of KVCache. Sent layer by layer, only the last layer's transfer is seen"
        f" on a link that carries this ({number(last[5]):.2f} at 25 Gbit/s instead of {number(last[4]):.2f}),"
        f" and the excess on one that does not ({number(last[7]):.2f} at 10 Gbit/s instead of"
        f" {number(last[6]):.2f})."
    )


EXPERIMENT = Experiment(
    "interconnects",
    "Transfers by interconnect",
    "Disaggregated serving explained: KVCache transfer times of Llama 70B, and split efficiency, that is"
    " prefill time by prefill and transfer time; above 0.8 disaggregation pays, below 0.5 it does not.",
    "llama2-70b on 8 x A100, by roofline; bandwidths as the guide counts them.",
    remark,
    run,
)
