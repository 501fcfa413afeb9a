"""The lengths of requests and the hits of blocks in a trace: Mooncake (arXiv), section 4, Figures 5 and 6."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.reproduction.experiment import Cell, Experiment, Outcome, Table, Trace, number
from benchmarks.tools.traces.reading import TraceFile
from benchmarks.tools.traces.request import TraceRequest

PUBLISHED_INPUT, PUBLISHED_OUTPUT = 7590.0, 182.0
"""The means of prompts and answers in tokens, in the trace of the arXiv version."""
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
PICTURE = "workload.svg"


def run(trace: Trace, folder: Path) -> Outcome:
    """Return the means and quantiles of lengths, and the shares of blocks by their hits, with a picture."""
    requests = list(TraceFile(trace.path))
    inputs = sorted(request.num_input_tokens for request in requests)
    outputs = sorted(request.num_output_tokens for request in requests)
    hits = sorted(block_hits(requests))
    _draw(inputs, outputs, hits, folder / PICTURE)
    lengths = Table(
        ["tokens", "mean, published", "mean, ours", *(f"p{share * 100:g}" for share in SHARES), "longest"],
        [
            ["prompt", PUBLISHED_INPUT, fmean(inputs), *_quantiles(inputs), inputs[-1]],
            ["answer", PUBLISHED_OUTPUT, fmean(outputs), *_quantiles(outputs), outputs[-1]],
        ],
    )
    num_unused = bisect_right(hits, 0)
    by_hits = Table(
        ["blocks", "published", "ours"],
        [
            ["of 512 tokens, different ones", None, len(hits)],
            ["that are never hit", "over 50%", _percent(num_unused / len(hits))],
            ["hits of the most popular one", "tens of thousands", hits[-1]],
            ["hits of the next one", None, hits[-2]],
            [
                "share of all hits that the most popular 1% have",
                None,
                _percent(sum(hits[-(len(hits) // 100) :]) / sum(hits)),
            ],
        ],
    )
    return Outcome([lengths, by_hits], [PICTURE])


def block_hits(requests: Sequence[TraceRequest]) -> list[int]:
    """Return the hits of each different block in an unlimited pool.

    The hits of a block are the number of requests after the first one that have the block.
    """
    num_requests = Counter(block for request in requests for block in request.hash_ids)
    return [num - 1 for num in num_requests.values()]


def _quantiles(ordered: Sequence[int]) -> list[Cell]:
    return [ordered[int(share * (len(ordered) - 1))] for share in SHARES]


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _draw(inputs: Sequence[int], outputs: Sequence[int], hits: Sequence[int], path: Path) -> None:
    """Draw the distributions of lengths and the CDF of hits.

    The axis of hits is logarithmic, so blocks without hits are at its left end.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, lengths, name in zip(panels[:2], (inputs, outputs), ("prompts", "answers"), strict=True):
        most = lengths[int(0.99 * (len(lengths) - 1))]
        panel.hist([length for length in lengths if length <= most], bins=60)
        panel.set(xlabel=f"tokens of {name}, to p99", ylabel="requests")
    counts = sorted(set(hits))
    panels[2].step(
        [max(count, 0.5) for count in counts],
        [bisect_right(hits, count) / len(hits) for count in counts],
        where="post",
    )
    panels[2].set(
        xlabel="hits of a block (leftmost: none)", ylabel="share of blocks", xscale="log", ylim=(0, 1.02)
    )
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path)


def remark(outcome: Outcome) -> str:
    """Return the remark about similarities to the published trace, and differences."""
    (prompt, answer), blocks = outcome.tables[0].rows, outcome.tables[1].rows
    return (
        "Another hour than the published one: prompts are"
        f" {number(prompt[2]) / PUBLISHED_INPUT:.1f} times as long, answers"
        f" {number(answer[2]) / PUBLISHED_OUTPUT:.1f} times. The imbalance is there, {blocks[1][2]} of the"
        " blocks are never hit, but popular is only the first block of all requests, with"
        f" {number(blocks[2][2]):,.0f} hits; the next one has {number(blocks[3][2]):,.0f}."
    )


EXPERIMENT = Experiment(
    "workload",
    "Lengths, and hits of blocks",
    "Mooncake (arXiv), section 4.2, Figures 5 and 6: prompts of 7,590 tokens and answers of 182 in the mean;"
    " over half of the blocks are never used again, some tens of thousands of times.",
    "The published figures are of a trace with 23,608 requests; ours is the conversation trace of the FAST'25"
    " version. A block is hit when a later request has it: a pool that forgets nothing.",
    remark,
    run,
)
