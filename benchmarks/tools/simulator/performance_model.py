"""BanaServe's performance model (section 4.3) against the real server on this machine: 1P1D, one core each.

    python -m benchmarks.tools.simulator.performance_model FOLDER

A worker's profile and the closed loops of `benchmarks.tools.simulator.calibration.pair` give the costs. Then
closed loops of other sizes and other numbers of requests are measured and predicted. All loops run in several
rounds, one after the other, as a machine that others use too is faster in one minute than in the next. Costs
and figures are means over the rounds. Results that FOLDER has already are not measured again. The command
ends with status 1 if a figure differs by more than 15%.

    TTFT, TPOT    means over a round's requests without the first and the last one of each client: all clients
                  begin at the same time, and end one by one
    tokens/s      output tokens
    KV tokens     the mean number of tokens of KVCache at the decode instance (K_acc, equation 25)
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.simulator.against_real import Row
from benchmarks.tools.simulator.calibration.costs import Calibration, mean, times
from benchmarks.tools.simulator.calibration.loops import Loop
from benchmarks.tools.simulator.calibration.pair import LOOPS, calibrated
from benchmarks.tools.simulator.real_server import PAIR, PATIENT_S, PATIENT_TBT_S, outcomes
from benchmarks.tools.simulator.this_machine import MAX_BATCH, MODEL
from conductor.performance.model import DecodeCapacity, Pairs, Sizes
from mooncake.config.profile import load_profile

WITHIN = 0.15
NUM_ROUNDS = 3
_NO_LIMIT = 1e9
PREDICTED = {
    "2 requests of 256 and 96": Loop(256, 96, concurrency=2, num_requests=24, seed=201),
    "6 requests of 768 and 64": Loop(768, 64, concurrency=6, num_requests=36, seed=202),
    "12 requests of 200 and 128": Loop(200, 128, concurrency=12, num_requests=60, seed=203),
    "24 requests of 96 and 96": Loop(96, 96, concurrency=24, num_requests=120, seed=204),
}
"""The closed loops that are predicted. The calibration has no loops of these sizes."""


def pairs(machine: Calibration, loop: Loop) -> Pairs:
    """Return the model of one prefill and one decode instance, both of which compute all the time.

    The time that a request adds when it joins a batch is divided among the iterations of its answer.
    """
    of_prefill, of_decode = machine.slowdowns
    prefill, decode = times(of_prefill, machine.prefill), times(of_decode, machine.decode)
    prefill = prefill._replace(constant_s=prefill.constant_s + machine.busy_prompt_s)
    join_s = machine.join_costs.seconds(loop.num_input_tokens) / (loop.num_output_tokens - 1)
    capacity = DecodeCapacity(decode._replace(first_s=decode.first_s + join_s), MAX_BATCH, _NO_LIMIT)
    return Pairs(1, 1, prefill, capacity, MODEL.num_layers, first_token_s=machine.first_token_s)


class Figures(NamedTuple):
    """The figures of a loop, measured or predicted."""

    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    num_kv_tokens: float


FIGURES = ("TTFT, s", "TPOT, s", "tokens/s", "KV tokens")
"""The names of the figures in tables."""


def measured(loop: Loop, found: Sequence[Outcome]) -> Figures:
    """Return the figures of the finished requests of one round.

    Requests that begin together end nearly together, so the middle has whole turns of all clients.
    """
    by_end = sorted(found, key=_ended_s)
    steady = by_end[loop.concurrency : -loop.concurrency]
    rate_per_s = len(steady) / (_ended_s(steady[-1]) - _ended_s(by_end[loop.concurrency - 1]))
    ttft_s = fmean(outcome.ttft_s for outcome in steady if outcome.ttft_s is not None)
    decode_s = fmean(outcome.answered_s for outcome in steady) - ttft_s
    return Figures(
        ttft_s,
        decode_s / (loop.num_output_tokens - 1),
        rate_per_s * loop.num_output_tokens,
        rate_per_s * decode_s * _sizes(loop).mean_kv_tokens,
    )


def predicted(loop: Loop, machine: Calibration) -> Figures:
    """Return the figures that the model predicts."""
    found = pairs(machine, loop).performance(_sizes(loop), loop.concurrency)
    return Figures(found.ttft_s, found.tpot_s, found.output_tokens_per_s, found.num_kv_tokens)


def compare(name: str, loop: Loop, machine: Calibration, rounds: Sequence[Sequence[Outcome]]) -> list[Row]:
    """Return the rows of a loop's figures. `rounds` has the outcomes of each round."""
    of_rounds = [measured(loop, [o for o in found if o.kind is Kind.FINISHED]) for found in rounds]
    real, model = map(fmean, zip(*of_rounds, strict=True)), predicted(loop, machine)
    return [
        Row(f"{name}: {figure}", of_real, of_model, WITHIN)
        for figure, of_real, of_model in zip(FIGURES, real, model, strict=True)
    ]


def _ended_s(outcome: Outcome) -> float:
    return outcome.scheduled_s + outcome.answered_s


def _sizes(loop: Loop) -> Sizes:
    return Sizes(loop.num_input_tokens, loop.num_output_tokens)


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table of the figures."""
    table = Table("", title="BanaServe's performance model on this machine")
    for name in ("measured", "model", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        style = None if row.agrees else "red"
        table.add_row(
            row.name, f"{row.real:,.4g}", f"{row.simulated:,.4g}", f"{row.difference:+.1%}", style=style
        )
    Console().print(table)


def main() -> None:
    """Measure the loops that the folder lacks, and compare all loops with the predictions."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.simulator.performance_model",
        description="BanaServe's performance model beside the real server.",
    )
    parser.add_argument("folder", type=Path, help="profile and measured loops")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.json"
    if not profile.exists():
        PAIR.measure_profile(profile)
    rounds = [folder / f"round {nth}" for nth in range(1, NUM_ROUNDS + 1)]
    for of_round in rounds:
        of_round.mkdir(exist_ok=True)
        loads = {name: loop.flags(of_round) for name, loop in (LOOPS | PREDICTED).items()}
        PAIR.run_loads(loads, PATIENT_S, PATIENT_TBT_S, profile, of_round)
    costs = load_profile(profile).costs
    machine = mean(
        [calibrated(costs, {name: outcomes(of_round / name) for name in LOOPS}) for of_round in rounds]
    )
    print(machine)
    rows = [
        row
        for name, loop in PREDICTED.items()
        for row in compare(name, loop, machine, [outcomes(of_round / name) for of_round in rounds])
    ]
    print_rows(rows)
    sys.exit(0 if all(row.agrees for row in rows) else 1)


if __name__ == "__main__":
    main()
