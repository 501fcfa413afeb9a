"""The effect of prompts on running decodes: gaps between tokens while long prompts arrive.

For comparison the gaps are also measured while a bare matrix product keeps another core busy.

Owns: the three situations. Does not know: how requests are sent, which server.
"""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from benchmarks.decode.requests import Planned, Sender

NUM_DECODES, NUM_OUTPUT = 4, 200
LONG_PROMPT = 1500
MAX_RATIO = 1.2
_PRODUCT = "import torch\ntorch.set_num_threads(1)\na = torch.randn(512, 512)\nwhile True: a @ a"


class Gaps(NamedTuple):
    """Percentiles in seconds of all gaps in the running decodes."""

    p50_s: float
    p99_s: float


@contextlib.contextmanager
def matrix_products() -> Iterator[None]:
    """Make a context in which another process computes matrix products on one thread."""
    process = subprocess.Popen([sys.executable, "-c", _PRODUCT])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def long_prompts(sender: Sender) -> AsyncIterator[None]:
    """Make a context in which long prompts are sent one after the other, without a pause."""

    async def send() -> None:
        for _ in itertools.count():
            await sender.send(Planned(0.0, LONG_PROMPT, 1))

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def decode_gaps(sender: Sender) -> Gaps:
    """Return the gaps of `NUM_DECODES` short prompts that are decoded together."""
    answers = await sender.send_all([Planned(0.0, 16, NUM_OUTPUT)] * NUM_DECODES)
    # Without the first gaps, in which the other streams' prompts were computed.
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s[NUM_DECODES:])
    return Gaps(gaps[len(gaps) // 2], gaps[int(0.99 * len(gaps))])


async def measure(sender: Sender) -> bool:
    """Print the table of gaps. Returns whether the ratio of the gaps' p99 is at most `MAX_RATIO`."""
    await decode_gaps(sender)  # the first calls allocate
    alone = await decode_gaps(sender)
    with matrix_products():
        beside_products = await decode_gaps(sender)
    async with long_prompts(sender):
        beside_prompts = await decode_gaps(sender)
    ratio = beside_prompts.p99_s / beside_products.p99_s
    print(f"| {NUM_DECODES} decodes beside | gap p50 | gap p99 |\n|---|---|---|")
    rows = {
        "nothing": alone,
        "a matrix product on another core": beside_products,
        f"prompts of {LONG_PROMPT} tokens, one after the other": beside_prompts,
    }
    for name, gaps in rows.items():
        print(f"| {name} | {1000 * gaps.p50_s:.1f} ms | {1000 * gaps.p99_s:.1f} ms |")
    print(f"\np99 beside prompts by p99 beside products: {ratio:.2f} (bar {MAX_RATIO})", flush=True)
    return ratio <= MAX_RATIO
