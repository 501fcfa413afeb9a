"""The pauses of streams while layers, KV heads or parts of sequences move to another instance and back.

For layers, the gain of a pipeline of two decode instances is measured, too.

    python -m benchmarks.migration.modules [--layers START:STOP | --heads N | --sequences SHARE] [--batch N]
        [--moves N] [--two-hosts]

There are two decode instances with the default model, one core each, on one host or on two. The first
instance decodes all streams. Its modules move to the second instance and back. Limit (*bar*): the p99 of
pauses is at most an iteration above the p99 of the longest gaps without a move.

Layers are then measured as a pipeline: with layers at the second instance, as many streams and twice as
many, for which one instance alone has too little memory. The first instance alone is measured before and
after. Each measurement has new streams, so that contexts are equally long. Limits: the throughput of
the larger pipeline is at least 1.7 times that of one instance, and TBT at most 1.15 times. For comparison,
the two instances also decode separately: their throughput together is the most that both cores can reach. It
is less than twice the throughput of one instance if the two cores are threads of one physical core.

Sequences are long, because an owner keeps short ones whole. They are divided with each move to the helper.
Their tokens are those of whole sequences only up to rounding, and are not compared.

Owns: the steps, the tables, the bars. Does not know: how modules move.
"""

import argparse
import asyncio
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.kvstore.rounds import print_table, progress
from benchmarks.migration.rig import Instance, Rig, Stream, rig
from benchmarks.servers import heeding_sigterm
from benchmarks.tools.arguments import count
from mooncake.messages.migration import LayerRange, ModulesPart

NUM_TOKENS = 60
"""The tokens of each stream in one measurement."""
TOKENS_BEHIND = 3
PROMPT, LONG_PROMPT, OUTPUT = 64, 2000, 4000
"""Tokens of a stream's prompt, of a long stream's prompt, and of an answer."""
LEAST_THROUGHPUT, MOST_TBT, MOST_ITERATIONS = 1.7, 1.15, 1.0
OTHER_TOKENS = "Streams with other tokens than without a move"
Move = Callable[[], Awaitable[object]]


class Rate(NamedTuple):
    """Tokens a second of all streams, and the gaps between tokens in seconds."""

    tokens_per_s: float
    gaps_s: list[float]

    @property
    def tbt_s(self) -> float:
        return statistics.median(self.gaps_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of unsorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Bench:
    """The streams at the instance `owner` of a rig. All prompts are `prompt_len` random tokens."""

    def __init__(self, on: Rig, owner: Instance, prompt_len: int = PROMPT) -> None:
        self._rig, self._generator = on, torch.Generator().manual_seed(0)
        self._prompt_len = prompt_len
        self.owner = owner
        self.streams: list[Stream] = []
        self._num_begun = 0

    async def begin(self, num: int) -> None:
        """Begin further streams, and wait until all of them are decoded."""
        for _ in range(num):
            prompt = torch.randint(1000, 40000, (self._prompt_len,), generator=self._generator).tolist()
            self._num_begun += 1
            name = f"{self.owner.register.instance}{self._num_begun}"
            stream = await self._rig.begin(name, prompt, OUTPUT, self.owner, seed=self._num_begun)
            self.streams.append(stream)
        await self.go_on(TOKENS_BEHIND)

    async def go_on(self, num_tokens: int) -> None:
        """Wait for `num_tokens` more tokens of each stream."""
        for goal in [(stream, len(stream.tokens) + num_tokens) for stream in self.streams]:
            await goal[0].reached(goal[1])

    async def end(self) -> None:
        """End all streams. The next streams have the same prompts, whose KVCache is in the pool."""
        for stream in self.streams:
            await self._rig.end(stream)
        self.streams.clear()
        self._generator.manual_seed(0)

    async def rate(self) -> Rate:
        """Measure the tokens a second and the gaps of all streams."""
        await self.go_on(TOKENS_BEHIND)
        began_s = time.perf_counter()
        before = [len(stream.tokens) for stream in self.streams]
        await self.go_on(NUM_TOKENS)
        ended_s = time.perf_counter()
        num = sum(len(stream.tokens) - num for stream, num in zip(self.streams, before, strict=True))
        return Rate(num / (ended_s - began_s), self._gaps_s(before))

    async def fresh_rate(self, num: int) -> Rate:
        """End all streams, and measure `num` new ones. So contexts are as long in each measurement."""
        await self.end()
        await self.begin(num)
        return await self.rate()

    async def pause_s(self, act: Move) -> float:
        """Return the longest gap of any stream in seconds, until a few tokens after the end of `act`."""
        before = [len(stream.tokens) for stream in self.streams]
        await act()
        await self.go_on(TOKENS_BEHIND)
        return max(self._gaps_s(before))

    def _gaps_s(self, before: Sequence[int]) -> list[float]:
        return [
            late - early
            for stream, num in zip(self.streams, before, strict=True)
            for early, late in itertools.pairwise(stream.times_s[num - 1 :])
        ]

    async def num_with_other_tokens(self, num: int) -> int:
        """Compute the first `num` streams again without a helper. Returns the number of streams that differ.

        They are computed at the other instance, which has all of its modules itself.
        """
        num_others = 0
        for index, stream in enumerate(self.streams[:num]):
            again = await self._rig.begin_again(stream, f"again{index}", self._rig.other(self.owner))
            num_tokens = len(stream.tokens)
            await again.reached(num_tokens)
            num_others += again.tokens[:num_tokens] != stream.tokens[:num_tokens]
            await self._rig.end(again)
        return num_others


class Pauses(NamedTuple):
    """The longest gap of any stream in seconds, during each move and during equal times without a move.

    `iteration_s`: the median gap of streams before the first move.
    """

    moves_s: list[float]
    gaps_s: list[float]
    iteration_s: float

    @property
    def num_iterations(self) -> float:
        """The difference between the p99 of the longest gaps with and without a move, in iterations."""
        return (percentile(self.moves_s, 0.99) - percentile(self.gaps_s, 0.99)) / self.iteration_s

    @property
    def there(self) -> "Pauses":
        """The pauses of the moves to the helper."""
        return Pauses(self.moves_s[::2], self.gaps_s[::2], self.iteration_s)

    @property
    def back(self) -> "Pauses":
        """The pauses of the moves back."""
        return Pauses(self.moves_s[1::2], self.gaps_s[1::2], self.iteration_s)

    @property
    def figures(self) -> tuple[str, ...]:
        """The number of moves, and the p50 and p99 of both kinds of gaps, as text."""
        gaps = (
            f"{1000 * percentile(of, share):.0f} ms"
            for of in (self.moves_s, self.gaps_s)
            for share in (0.5, 0.99)
        )
        return (str(len(self.moves_s)), *gaps, f"{self.num_iterations:.1f}")

    def __str__(self) -> str:
        moves, gaps = (
            " and ".join(f"{1000 * percentile(of, share):.0f}" for share in (0.5, 0.99))
            for of in (self.moves_s, self.gaps_s)
        )
        return (
            f"{len(self.moves_s)} moves pause streams for {moves} ms (p50 and p99); without a move the"
            f" longest gaps are {gaps} ms, {self.num_iterations:.1f} iterations less."
        )


async def pauses(bench: Bench, move: Move, back: Move, num_moves: int, iteration_s: float) -> Pauses:
    """Move modules to the helper and back `num_moves` times, and return the pauses.

    Each time there are new streams.
    """
    found, num_streams = Pauses([], [], iteration_s), len(bench.streams)
    for number in range(num_moves):
        progress(f"moves: {number} of {num_moves}")
        await bench.end()
        await bench.begin(num_streams)
        for act in (move, back):
            began_s = time.perf_counter()
            found.moves_s.append(await bench.pause_s(act))
            as_long = functools.partial(asyncio.sleep, time.perf_counter() - began_s)
            found.gaps_s.append(await bench.pause_s(as_long))
    return found


async def run_heads(num_heads: int, batch: int, num_moves: int, *, two_hosts: bool) -> bool:
    """Measure moves of KV heads, and print the results.

    Returns whether moves add at most `MOST_ITERATIONS` to the p99 of pauses, and tokens equal those of a
    stream that stays.
    """
    async with rig(batch, two_hosts=two_hosts) as on:
        bench = Bench(on, on.first)
        await bench.begin(batch)
        alone = await bench.rate()
        move = functools.partial(on.place, bench.owner, ModulesPart(num_heads))
        back = functools.partial(on.place, bench.owner, ModulesPart())
        found = await pauses(bench, move, back, num_moves, alone.tbt_s)
        num_others = await bench.num_with_other_tokens(3)
    print(f"{found}\n{OTHER_TOKENS}: {num_others}.")
    return found.num_iterations <= MOST_ITERATIONS and not num_others


async def run_sequences(share: float, batch: int, num_moves: int, *, two_hosts: bool) -> bool:
    """Measure divisions of long sequences and their way back, and print the results.

    Returns whether moves add at most `MOST_ITERATIONS` to the p99 of pauses, and each has divided sequences.
    """
    async with rig(batch, two_hosts=two_hosts) as on:
        bench = Bench(on, on.first, LONG_PROMPT)
        copied_bytes = list[int]()

        async def move() -> None:
            before = bench.owner.moves.copied_bytes
            await on.place(bench.owner, ModulesPart(share=share))
            copied_bytes.append(bench.owner.moves.copied_bytes - before)

        progress("prompts")
        await bench.begin(batch)
        alone = await bench.rate()
        back = functools.partial(on.place, bench.owner, ModulesPart())
        found = await pauses(bench, move, back, num_moves, alone.tbt_s)
    print_table(
        f"{share:g} of {batch} sequences of {LONG_PROMPT} tokens and more",
        ("", "moves", "pause p50", "p99", "without a move p50", "p99", "iterations more"),
        [("divided at a helper", *found.there.figures), ("back", *found.back.figures)],
        f"An iteration takes {1000 * alone.tbt_s:.1f} ms (median). A division moves"
        f" {statistics.median(copied_bytes) / (1 << 20):.0f} MiB of KVCache (median). Together: {found}",
    )
    return found.num_iterations <= MOST_ITERATIONS and min(copied_bytes) > 0


async def run_layers(layers: LayerRange, batch: int, num_moves: int, *, two_hosts: bool) -> bool:
    """Measure moves of layers and the pipeline, and print the results.

    Returns whether all figures are within their limits, and tokens equal those of a stream that stays.
    """
    async with rig(2 * batch, two_hosts=two_hosts) as on:
        bench, beside = Bench(on, on.first), Bench(on, on.other(on.first))
        move = functools.partial(on.place, bench.owner, ModulesPart(layers=layers))
        back = functools.partial(on.place, bench.owner, ModulesPart())
        progress("one instance")
        await bench.begin(batch)
        before = await bench.rate()
        progress("two instances")
        await beside.begin(batch)
        both = await asyncio.gather(bench.rate(), beside.rate())
        await beside.end()
        found = await pauses(bench, move, back, num_moves, before.tbt_s)
        progress("pipeline")
        await move()
        piped, larger = await bench.fresh_rate(batch), await bench.fresh_rate(2 * batch)
        await back()
        after = await bench.fresh_rate(batch)
        num_others = await bench.num_with_other_tokens(3)
    alone_per_s = (before.tokens_per_s + after.tokens_per_s) / 2
    apart = Rate(sum(rate.tokens_per_s for rate in both), [gap for rate in both for gap in rate.gaps_s])
    alone_s = (before.tbt_s + after.tbt_s) / 2
    rows = [
        (
            what,
            f"{rate.tokens_per_s:.0f}",
            f"{1000 * rate.tbt_s:.1f} ms",
            f"{1000 * percentile(rate.gaps_s, 0.99):.1f} ms",
            f"{rate.tokens_per_s / alone_per_s:.2f}",
            f"{rate.tbt_s / alone_s:.2f}",
        )
        for what, rate in (
            (f"one instance, {batch} streams", before),
            ("again", after),
            (f"two instances, {batch} streams each", apart),
            (f"layers {layers} at a helper, {batch} streams", piped),
            (f"the same, {2 * batch} streams", larger),
        )
    ]
    print_table(
        "A decode pipeline of two stages",
        ("", "tokens/s", "TBT p50", "p99", "times throughput", "times TBT"),
        rows,
        f"{found}\n{OTHER_TOKENS}: {num_others}.",
    )
    is_fast = larger.tokens_per_s >= LEAST_THROUGHPUT * alone_per_s and larger.tbt_s <= MOST_TBT * alone_s
    return is_fast and found.num_iterations <= MOST_ITERATIONS and not num_others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layers", type=LayerRange.parse, default=LayerRange(10, 30))
    which.add_argument("--heads", type=count, help="KV heads that move, in place of layers")
    which.add_argument("--sequences", type=float, metavar="SHARE", help="the share of sequences that moves")
    parser.add_argument("--batch", type=count, help="streams (default: 32, with --sequences 8)")
    parser.add_argument("--moves", type=count, default=10, help="there and back")
    parser.add_argument("--two-hosts", action="store_true", help="the instances are connected by TCP")
    arguments = parser.parse_args()
    moves, two_hosts = arguments.moves, arguments.two_hosts
    if arguments.sequences is not None:
        measured = run_sequences(arguments.sequences, arguments.batch or 8, moves, two_hosts=two_hosts)
    elif arguments.heads is not None:
        measured = run_heads(arguments.heads, arguments.batch or 32, moves, two_hosts=two_hosts)
    else:
        measured = run_layers(arguments.layers, arguments.batch or 32, moves, two_hosts=two_hosts)
    with heeding_sigterm():
        sys.exit(not asyncio.run(measured))


if __name__ == "__main__":
    main()
