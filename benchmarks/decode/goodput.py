"""The requests a second that a server answers within the SLOs, in an open loop of chats and long prompts.

Owns: the mix, the SLOs, which requests count. Does not know: how requests are sent, which server.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.decode.requests import Answer, Planned, Sender

SHORT, LONG = (120, 64), (1500, 16)
"""Tokens of a prompt and of its answer: short chats, and long prompts."""
SHORT_SHARE = 0.8
TTFT_SLO_S, TBT_SLO_S = 5.0, 0.15
MIN_RATIOS = {"mooncake": (2.2, 1.75), "vllm": (1.3, 1.3)}
"""The least ratios of our goodput to vLLM's, by the engine of our instances.

The first ratio is to vLLM with its defaults, the second to vLLM with its best settings.
"""
MIN_LONG_BY_SHORT = 0.9
MIN_IN_TIME = 0.5
OVERLOAD, MIN_OVERLOADED = 2.0, 0.9
"""The rate of the overload as a multiple of our best rate, and the least share of goodput to keep there."""


def poisson(rate_per_s: float, duration_s: float, seed: int = 0) -> list[Planned]:
    """Return random arrivals of the mix in `[0, duration_s)`."""
    rng = random.Random(seed)
    schedule: list[Planned] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < duration_s:
        schedule.append(Planned(at_s, *(SHORT if rng.random() < SHORT_SHARE else LONG)))
        at_s += rng.expovariate(rate_per_s)
    return schedule


def is_effective(answer: Answer) -> bool:
    """Return whether an answer is complete and within both SLOs."""
    return answer.is_whole and answer.ttft_s <= TTFT_SLO_S and answer.tbt_s <= TBT_SLO_S


class Row(NamedTuple):
    """The figures of one server at one rate.

    `short_share` and `long_share`: the share of the sent requests of this kind that met the SLOs; None if no
    request of the kind was sent.
    """

    rate_per_s: float
    goodput_per_s: float
    short_share: float | None
    long_share: float | None

    @property
    def serves_both_kinds(self) -> bool:
        """Whether long prompts meet the SLOs at least `MIN_LONG_BY_SHORT` times as often as short ones.

        True if the share of one kind is None.
        """
        if self.short_share is None or self.long_share is None:
            return True
        return self.long_share >= MIN_LONG_BY_SHORT * self.short_share


def row_of(rate_per_s: float, answers: Sequence[Answer], duration_s: float) -> Row:
    """Return the figures of all requests that were sent within `duration_s`."""

    def share(kind: tuple[int, int]) -> float | None:
        effective = [is_effective(a) for a in answers if a.request.num_prompt_tokens == kind[0]]
        return sum(effective) / len(effective) if effective else None

    num_effective = sum(map(is_effective, answers))
    return Row(rate_per_s, num_effective / duration_s, share(SHORT), share(LONG))


async def measure(name: str, sender: Sender, rates_per_s: Sequence[float], duration_s: float) -> list[Row]:
    """Measure one server at each rate for `duration_s` seconds. Prints and returns the rows.

    Rates ascend. After a rate at which less than half of the requests were in time, no higher rate is
    measured.
    """
    rows: list[Row] = []
    await sender.send_all([Planned(0.0, *SHORT), Planned(0.0, *LONG)])  # the first ones allocate and compile
    for rate_per_s in rates_per_s:
        answers = await sender.send_all(poisson(rate_per_s, duration_s))
        row = row_of(rate_per_s, answers, duration_s)
        rows.append(row)
        whole = [answer for answer in answers if answer.is_whole]
        p90s = [_p90([a.ttft_s for a in whole]), _p90([a.tbt_s for a in whole])]
        print(
            f"| {name} | {rate_per_s:g} | {row.goodput_per_s:.2f} | {_percent(row.short_share)} "
            f"| {_percent(row.long_share)} | {len(answers) - len(whole)} | {' | '.join(p90s)} |",
            flush=True,
        )
        if sum(map(is_effective, answers)) < MIN_IN_TIME * len(answers):
            break
    return rows


def best(rows: Sequence[Row]) -> Row:
    """Return the row with the most goodput."""
    return max(rows, key=lambda row: row.goodput_per_s)


def best_that_serves_both_kinds(rows: Sequence[Row]) -> Row:
    """Return the best row in which both kinds of requests are served; if there is none, the best row."""
    return best([row for row in rows if row.serves_both_kinds] or rows)


def holds(best: Row, overloaded: Row) -> bool:
    """Print the goodput that is left under an overload.

    Returns whether that is at least `MIN_OVERLOADED` of the best goodput, and `overloaded` serves both kinds
    of requests.
    """
    share = overloaded.goodput_per_s / best.goodput_per_s if best.goodput_per_s else 0.0
    print(
        f"\nours at {overloaded.rate_per_s:g} req/s, {OVERLOAD:g} times its best rate: {share:.0%} of its"
        f" best goodput (bar {MIN_OVERLOADED:.0%}), serves both kinds of requests:"
        f" {'yes' if overloaded.serves_both_kinds else 'no'}"
    )
    return share >= MIN_OVERLOADED and overloaded.serves_both_kinds


def compare(ours: Row, peer: Row | None, tuned_peer: Row | None, bars: tuple[float, float]) -> bool:
    """Print our best goodput as a multiple of vLLM's.

    `bars` are the least ratios: to vLLM with its defaults, and to vLLM with its best settings. Returns
    whether both ratios are reached, and our row serves both kinds of requests.
    """
    is_met = ours.serves_both_kinds
    print(f"\nours at {ours.rate_per_s:g} req/s serves both kinds of requests: {'yes' if is_met else 'no'}")
    names = ("with its defaults", "in its best way")
    for name, best, bar in zip(names, (peer, tuned_peer), bars, strict=True):
        if best is not None:
            ratio = ours.goodput_per_s / best.goodput_per_s if best.goodput_per_s else float("inf")
            is_met &= ratio >= bar
            print(f"goodput by vLLM's {name}: {ratio:.2f} (bar {bar})", flush=True)
    return is_met


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _p90(values: Sequence[float]) -> str:
    return f"{sorted(values)[int(0.9 * len(values))]:.2f} s" if values else "-"


HEADER = (
    "| server | offered, req/s | goodput, req/s | short within SLO | long within SLO | refused "
    "| TTFT p90 | TBT p90 |\n|---|---|---|---|---|---|---|---|"
)
