"""Results that need no trace: costs of prompts and batches, bandwidth for reuse, occupancy of memory."""

from pathlib import Path

from benchmarks.reproduction.experiment import Experiment, Outcome, Table, Trace, always
from benchmarks.tools.simulator.cluster.machines.cards import (
    GBPS,
    HARDWARE,
    MODELS,
    STATED,
    HardwareCard,
    ModelCard,
)
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare, Roofline
from conductor.performance.model import overlapped_s

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 2048
"""The tokens of each request of a batch in Figure 2."""
LONG, HIT = 131_072, 0.95
PREFIX = 8192
CHUNK, RUNNING = 2048, 32

_A800 = Roofline(MODELS["llama2-70b"], HARDWARE["a800"])


def run_shapes(trace: Trace, folder: Path) -> Outcome:
    """Compute Figure 2: latency and throughput, each divided by its first value."""
    prefills = [_A800.iteration_s([PromptShare(length, 0)], 0) for length in LENGTHS]
    steps = [_A800.iteration_s((), batch) + batch * CONTEXT * _A800.kv_token_s for batch in BATCHES]
    return Outcome(
        [
            _normalized("prompt tokens", LENGTHS, prefills),
            _normalized("requests in the batch", BATCHES, steps),
        ]
    )


def _normalized(what: str, sizes: tuple[int, ...], seconds: list[float]) -> Table:
    rows: list[list[str | float | None]] = [
        ["latency", *(s / seconds[0] for s in seconds)],
        ["throughput", *(n / sizes[0] * seconds[0] / s for n, s in zip(sizes, seconds, strict=True))],
    ]
    return Table([what, *(f"{size:,}" for size in sizes)], rows)


def needed_bytes_per_s(model: ModelCard, hardware: HardwareCard, prefix: int) -> float:
    """Return the lowest bandwidth at which reuse pays.

    It is the prefix's KVCache divided by the time to compute the prefix at peak. FAST'25: B / G > 2 d s /
    (gqa (a p d + b d^2)), where G is the peak, a = 4, b = 22, and s the bytes of an element.
    """
    gqa = model.num_heads / model.num_kv_heads
    d, s = model.hidden, 2
    return hardware.num_gpus * hardware.gpu_flops * 2 * d * s / (gqa * (4 * prefix * d + 22 * d * d))


def run_reuse(trace: Trace, folder: Path) -> Outcome:
    """Compute when fetching is quicker than computing, and the time that a long prefix saves."""
    model = MODELS["llama3-70b"]
    rows: list[list[str | float | None]] = [
        [
            f"{hardware.upper()} x 8: bandwidth needed, GB/s",
            published,
            needed_bytes_per_s(model, HARDWARE[hardware], PREFIX) / 1e9,
        ]
        for hardware, published in (("a800", 6.0), ("h800", 19.0))
    ]
    card = HARDWARE["a800"]
    costs = Roofline(model, card)
    num_cached = int(HIT * LONG)
    whole_s = costs.iteration_s([PromptShare(LONG, 0)], 0)
    rest_s = costs.iteration_s([PromptShare(LONG - num_cached, num_cached)], 0)
    fetch_s = num_cached * model.kv_bytes_per_token / (card.nic_bytes_per_s * STATED.nic)
    rows.append(["128k prompt, 95% cached: prefill", "-92%", f"{100 * (rest_s / whole_s - 1):.0f}%"])
    fetched_s = overlapped_s(rest_s, fetch_s, model.num_layers)
    rows.append(["the same: TTFT, prefix fetched", "-86%", f"{100 * (fetched_s / whole_s - 1):.0f}%"])
    rows += _banaserve_layer()
    return Outcome([Table(["", "published", "ours"], rows)])


def _banaserve_layer() -> list[list[str | float | None]]:
    """Compute equation 17 of BanaServe for a layer of Llama-3.1-8B.

    The prompt has 1,000 tokens, of which half are cached.
    """
    model, card = MODELS["llama-3.1-8b"], HARDWARE["a100"].with_gpus(1)
    compute_s = Roofline(model, card).iteration_s([PromptShare(500, 500)], 0) / model.num_layers
    transfer_s = 500 * model.kv_bytes_per_token / model.num_layers / (200 * GBPS)
    what = "Llama-3.1-8B, 1,000 tokens, half cached"
    return [
        [f"{what}: computing a layer, ms", 4.22, 1000 * compute_s],
        [f"{what}: fetching it at 200 Gbit/s, ms", 0.082, 1000 * transfer_s],
    ]


def run_occupancy(trace: Trace, folder: Path) -> Outcome:
    """Compute section 5.2: bytes of device memory times seconds for one prompt's KVCache."""
    model, card = MODELS["llama2-70b"], HARDWARE["a800"]
    pcie_bytes_per_s = card.pcie_bytes_per_s * STATED.pcie
    rows: list[list[str | float | None]] = []
    for length in LENGTHS[3:]:
        num_bytes = length * model.kv_bytes_per_token
        compute_s = _A800.iteration_s([PromptShare(length, 0)], 0)
        copy_s = num_bytes / pcie_bytes_per_s
        # A layer leaves when it has been computed: on average half of one layer is in memory.
        layerwise = num_bytes / model.num_layers * (compute_s + copy_s / model.num_layers)
        # Stored at the end, the layers gather until the last one has been computed.
        whole = num_bytes * (compute_s / 2 + copy_s)
        starts = range(0, length, CHUNK)
        inlined_s = [
            _A800.iteration_s([PromptShare(min(CHUNK, length - start), start)], RUNNING)
            + RUNNING * CONTEXT * _A800.kv_token_s
            for start in starts
        ]
        chunked = sum(
            seconds * (start + CHUNK) * model.kv_bytes_per_token
            for start, seconds in zip(starts, inlined_s, strict=True)
        )
        store_s = copy_s / model.num_layers
        rows.append(
            [f"{length:,}", layerwise / 1e9, whole / 1e9, chunked / 1e9, 1000 * store_s, 1000 * copy_s]
        )
    header = ["prompt tokens", "layer-wise, GB s", "stored at the end, GB s", "inlined in chunks, GB s"]
    header += ["storing shows, layer-wise, ms", "at the end, ms"]
    return Outcome([Table(header, rows)])


SHAPES = Experiment(
    "shapes",
    "Costs of prefill and decode",
    "Mooncake (arXiv), Figure 2: prefill latency grows superlinearly with the prompt, decode latency"
    " sublinearly with"
    " the batch.",
    f"llama2-70b on 8 x A800, by roofline; {CONTEXT:,} tokens a request in the batch. Normalized to"
    " the first column.",
    always(
        "The same shapes: prefill is superlinear from some 8,192 tokens on, a step of 64 requests takes 16% "
        "longer than a step of one."
    ),
    run_shapes,
)
REUSE = Experiment(
    "reuse",
    "When reuse pays",
    "Mooncake (FAST'25): bandwidth from which fetching a prefix of 8,192 tokens is quicker than"
    " computing it; a 128k"
    " prompt of which 95% is cached.",
    "llama3-70b. The first two are the paper's formula, the others the simulator's costs, prefix"
    " fetched over 800 Gbit/s.",
    always(
        "The formula gives the published bandwidths. The saving of prefill is the published one; TTFT is "
        "lower here, because layer by layer the fetch hides behind the computation, and nothing else is "
        "added to TTFT but messages. BanaServe's example (equation 17) counts 270 ms for the whole prompt; "
        "the roofline of one A100 is quicker, and the fetch of a layer still hides behind it."
    ),
    run_reuse,
)
OCCUPANCY = Experiment(
    "occupancy",
    "What a prompt's KVCache occupies",
    "Mooncake (arXiv), section 5.2 and Figure 7: layer-wise prefill lowers the cost S * T of KVCache"
    " in device memory"
    " and hides storing it; inlining chunks among decoding requests raises it.",
    f"llama2-70b on 8 x A800, by roofline; chunks of {CHUNK:,} tokens inlined among {RUNNING} running"
    " requests.",
    always(
        "As the paper says. Layer by layer the KVCache of a prompt occupies a fraction of the memory time "
        "that it does when it is stored at the end, and inlined chunks occupy the most."
    ),
    run_occupancy,
)
