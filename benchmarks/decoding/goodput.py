"""How many requests a second a server answers within the SLOs, in an open loop: short chats and long prompts.

Owns: the mix, the SLOs, what counts. Does not know: how requests are sent, which server.
"""

import random
from collections.abc import Sequence

from benchmarks.decoding.requests import Answer, Planned, Sender

SHORT, LONG = (120, 64), (1500, 16)
"""tokens of prompt and answer"""
SHORT_SHARE = 0.8
TTFT_SLO_S, TBT_SLO_S = 5.0, 0.15


def poisson(rate_per_s: float, duration_s: float, seed: int = 0) -> list[Planned]:
    """Arrivals of the mix in `[0, duration_s)`."""
    rng = random.Random(seed)
    schedule: list[Planned] = []
    at_s = rng.expovariate(rate_per_s)
    while at_s < duration_s:
        schedule.append(Planned(at_s, *(SHORT if rng.random() < SHORT_SHARE else LONG)))
        at_s += rng.expovariate(rate_per_s)
    return schedule


def is_effective(answer: Answer) -> bool:
    """Within both SLOs."""
    return answer.is_whole and answer.ttft_s <= TTFT_SLO_S and answer.tbt_s <= TBT_SLO_S


def attainment(answers: Sequence[Answer]) -> str:
    """The share that is effective."""
    return f"{sum(map(is_effective, answers)) / len(answers):.0%}" if answers else "-"


async def measure(name: str, sender: Sender, rates_per_s: Sequence[float], duration_s: float) -> None:
    """Print the rows of one server; each rate is offered for `duration_s`."""
    for rate_per_s in rates_per_s:
        answers = await sender.send_all(poisson(rate_per_s, duration_s))
        short = [answer for answer in answers if answer.request.num_prompt_tokens == SHORT[0]]
        long = [answer for answer in answers if answer.request.num_prompt_tokens == LONG[0]]
        whole = [answer for answer in answers if answer.is_whole]
        tbt_s = sorted(answer.tbt_s for answer in whole)
        ttft_s = sorted(answer.ttft_s for answer in whole)
        p90s = [f"{values[int(0.9 * len(values))]:.2f} s" if values else "-" for values in (ttft_s, tbt_s)]
        num_refused = len(answers) - len(whole)
        print(
            f"| {name} | {rate_per_s:g} | {sum(map(is_effective, answers)) / duration_s:.2f} "
            f"| {attainment(short)} | {attainment(long)} | {num_refused} | {' | '.join(p90s)} |",
            flush=True,
        )


HEADER = (
    "| server | offered, req/s | goodput, req/s | short within SLO | long within SLO | refused "
    "| TTFT p90 | TBT p90 |\n|---|---|---|---|---|---|---|---|"
)
