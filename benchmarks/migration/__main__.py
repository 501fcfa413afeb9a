"""The cost of moving a running stream: its pause, and the tokens that other streams lose.

    python -m benchmarks.migration [--sizes N,N,...] [--moves N] [--others N]

There are two decode instances with the default model, one core each, with real messenger processes. Each
decodes other streams at the same time. A stream with a context of each size moves from one instance to the
other and back. Before a move its destination's pool holds none of its blocks, so all blocks travel. The ways:

    none           the stream stays, for the same number of tokens as in the migration before
    migration      the stream's blocks are copied while it is decoded, then it is handed over
    stop and copy  the stream is stopped first, and its blocks are copied afterwards
    recompute      the stream is stopped, and the other instance computes its KVCache again

The pause is the longest gap between two tokens, from the first order until three tokens after the move.
Throughput is measured over the same time: the throughput of the other streams at source and destination,
divided by their throughput without a move. Limits (*bars*): the p99 of the pause is at most two iterations
above the p99 without a move, and throughput is at least 95%.

Owns: the ways, the table, the bars. Does not know: how a stream moves.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.migration.rig import Instance, Rig, Stream, rig
from benchmarks.servers import heeding_sigterm
from benchmarks.tools.arguments import count

NONE, MIGRATION, STOP, RECOMPUTE = "none", "migration", "stop and copy", "recompute"
MOVES_OF_A_STREAM = 10
TOKENS_BETWEEN = 8
TOKENS_BEHIND = 3
MOST_ITERATIONS, LEAST_THROUGHPUT = 2.0, 0.95
OTHER_PROMPT, OTHER_OUTPUT = 64, 3000


@dataclass(slots=True)
class Measured:
    """The moves of one way, in seconds, and the tokens of other streams at source and destination."""

    pauses_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_source_tokens: int = 0
    num_destination_tokens: int = 0

    def percentile_s(self, share: float) -> float:
        """Return a percentile of the pauses in seconds."""
        pauses_s = sorted(self.pauses_s)
        return pauses_s[min(len(pauses_s) - 1, int(share * len(pauses_s)))]

    @property
    def source_per_s(self) -> float:
        return self.num_source_tokens / self.seconds

    @property
    def destination_per_s(self) -> float:
        return self.num_destination_tokens / self.seconds


class Bench:
    """The streams on a rig, and the measurements. All prompts are random tokens."""

    def __init__(self, on: Rig, num_others: int) -> None:
        self._rig, self._num_others = on, num_others
        self._generator = torch.Generator().manual_seed(0)
        self._num_streams = 0
        self.iterations_s: list[float] = []
        """The gaps of streams that do not move, in seconds."""
        self.num_streams_with_other_tokens = 0

    def _prompt(self, num_tokens: int) -> list[int]:
        tokens: list[int] = torch.randint(1000, 40000, (num_tokens,), generator=self._generator).tolist()
        return tokens

    async def _stream(self, prompt: list[int], max_tokens: int, at: Instance, *, counts: bool) -> Stream:
        self._num_streams += 1
        name, seed = f"s{self._num_streams}", len(prompt)
        return await self._rig.begin(name, prompt, max_tokens, at, seed=seed, counts=counts)

    async def begin_others(self) -> list[Stream]:
        """Begin the streams that are decoded beside the moving one."""
        others = [
            await self._stream(self._prompt(OTHER_PROMPT), OTHER_OUTPUT, instance, counts=True)
            for instance in self._rig.instances.values()
            for _ in range(self._num_others)
        ]
        for stream in others:
            await stream.reached(2)
        return others

    async def measure(self, num_tokens: int, num_moves: dict[str, int]) -> dict[str, Measured]:
        """Measure moves in each way, with a context of about `num_tokens`, and equal times without a move."""
        measured: defaultdict[str, Measured] = defaultdict(Measured)
        for way, num in num_moves.items():
            while len(measured[way].pauses_s) < num:
                progress(f"{num_tokens} tokens, {way}: {len(measured[way].pauses_s)} of {num}")
                num_left = num - len(measured[way].pauses_s)
                await self._moves(way, num_tokens, min(num_left, MOVES_OF_A_STREAM), measured)
        return dict(measured)

    async def _moves(self, way: str, num_tokens: int, num_moves: int, measured: dict[str, Measured]) -> None:
        on, prompt = self._rig, self._prompt(num_tokens)
        others = await self.begin_others()
        stream = await self._stream(prompt, OTHER_OUTPUT, others[0].at, counts=False)
        move = {MIGRATION: on.migrate, STOP: on.stop_and_copy, RECOMPUTE: on.recompute}[way]
        for _ in range(num_moves):
            await stream.reached(len(stream.tokens) + TOKENS_BETWEEN)
            await on.drop_blocks(stream, on.other(stream.at))
            await stream.reached(len(stream.tokens) + TOKENS_BETWEEN)
            num = await self._window(stream, lambda: move(stream), measured[way])
            if way == MIGRATION:
                await stream.reached(len(stream.tokens) + TOKENS_BETWEEN)
                goal = len(stream.tokens) + num - TOKENS_BEHIND
                await self._window(stream, lambda: stream.reached(goal), measured[NONE])  # noqa: B023
        for ended in (stream, *others):
            await on.end(ended)
        await self._compare(stream, prompt)

    async def _window(self, stream: Stream, act: Callable[[], Awaitable[None]], measured: Measured) -> int:
        """Measure one move, and return the number of the stream's tokens meanwhile."""
        source, first, began_s = stream.at, len(stream.tokens), time.perf_counter()
        await act()
        await stream.reached(len(stream.tokens) + TOKENS_BEHIND)
        ended_s = time.perf_counter()
        times_s = stream.times_s[first - 1 :]
        gaps_s = [late - early for early, late in itertools.pairwise(times_s)]
        measured.pauses_s.append(max(gaps_s))
        measured.seconds += ended_s - began_s
        measured.num_source_tokens += source.num_tokens(began_s, ended_s)
        measured.num_destination_tokens += self._rig.other(source).num_tokens(began_s, ended_s)
        if stream.at is source:
            self.iterations_s += gaps_s
        return len(stream.tokens) - first

    async def _compare(self, stream: Stream, prompt: list[int]) -> None:
        """Count the stream if its tokens differ from those of an equal stream that does not move."""
        await self._rig.drop_blocks(stream, stream.at)
        stays = await self._stream(prompt, len(stream.tokens), stream.at, counts=False)
        await stays.reached(len(stream.tokens))
        self.num_streams_with_other_tokens += stays.tokens != stream.tokens


def report(num_tokens: int, measured: dict[str, Measured], iteration_s: float) -> bool:
    """Print the table of one size.

    Returns whether a migration adds at most `MOST_ITERATIONS` to the p99 of pauses, and leaves the other
    streams at least `LEAST_THROUGHPUT` of their throughput.
    """
    none, migration = measured[NONE], measured[MIGRATION]
    rows = [
        (
            way,
            str(len(of.pauses_s)),
            *(f"{1000 * of.percentile_s(share):.0f} ms" for share in (0.5, 0.99)),
            f"{1000 * of.seconds / len(of.pauses_s):.0f} ms",
            f"{of.source_per_s / none.source_per_s:.0%}",
            f"{of.destination_per_s / none.destination_per_s:.0%}",
        )
        for way, of in measured.items()
    ]
    more = (migration.percentile_s(0.99) - none.percentile_s(0.99)) / iteration_s
    print_table(
        f"A context of {num_tokens} tokens",
        ("way", "moves", "pause p50", "pause p99", "duration", "source's others", "destination's others"),
        rows,
        f"An iteration takes {1000 * iteration_s:.1f} ms (median); the p99 of the pause by a migration is"
        f" {more:.1f} iterations above that of none (bar {MOST_ITERATIONS:g}).",
    )
    shares = (
        migration.source_per_s / none.source_per_s,
        migration.destination_per_s / none.destination_per_s,
    )
    return more <= MOST_ITERATIONS and min(shares) >= LEAST_THROUGHPUT


async def run(sizes: Sequence[int], num_moves: int, num_others: int) -> bool:
    """Measure all sizes. Returns whether figures are within their limits, and tokens are right.

    The right tokens are those of equal streams that do not move.
    """
    is_met = True
    async with rig() as on:
        bench = Bench(on, num_others)
        await bench.measure(256, {MIGRATION: 4})  # allocations, connections
        for num_tokens in sizes:
            bench.iterations_s.clear()
            few = max(1, num_moves // 5)
            ways = {MIGRATION: num_moves, STOP: few, RECOMPUTE: few}
            measured = await bench.measure(num_tokens, ways)
            is_met &= report(num_tokens, measured, statistics.median(bench.iterations_s))
        print(f"\nStreams with other tokens than one that stays: {bench.num_streams_with_other_tokens}")
        return is_met and not bench.num_streams_with_other_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1000, 4000]
    )
    parser.add_argument("--moves", type=count, default=100)
    parser.add_argument("--others", type=count, default=3, help="other streams of each instance")
    arguments = parser.parse_args()
    with heeding_sigterm():
        sys.exit(not asyncio.run(run(arguments.sizes, arguments.moves, arguments.others)))


if __name__ == "__main__":
    main()
