"""The simulator against the real server on this machine: the same requests, costs from a profile.

    python -m benchmarks.tools.simulator.against_real TRACE.jsonl.gz --out FOLDER

The server is the default one: one instance with both roles. With `--num-prefill 1 --num-decode 1` it has a
prefill and a decode instance, with one thread each.

The command first profiles a worker, alone. Then it sends six loads to the server through HTTP
(`mooncake-bench`): a part of the trace with shorter lengths, and five synthetic loads. Before each load,
short closed loops measure the costs that the profile lacks (`calibration`), so that they are costs of these
minutes. Each load is simulated with the same requests and the mean costs, and the figures are compared.
Results of an earlier call in FOLDER with the same seed and duration are used again.

Owns: the loads, the comparison. Does not know: how the server is loaded, how it is simulated.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.load.prompts import PromptMaker
from benchmarks.tools.load.sources import Plan, Run, Source, SyntheticSource, TraceSource
from benchmarks.tools.simulator.calibration import one_instance, pair
from benchmarks.tools.simulator.calibration.costs import Calibration, mean
from benchmarks.tools.simulator.calibration.loops import AnyLoop
from benchmarks.tools.simulator.cluster.requests import Outcome as Simulated
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.real_server import (
    DEFAULT,
    PAIR,
    PATIENT_S,
    PATIENT_TBT_S,
    RealServer,
    outcomes,
)
from benchmarks.tools.simulator.this_machine import BLOCK_TOKENS, simulated_server
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad
from conductor.settings import Limits
from mooncake.config.profile import load_profile
from mooncake.messages.blocks import block_keys, root_key

CONTEXT_LEN = 8000
"""The most tokens of a request. Longer requests of the trace are left out."""
TTFT_SLO_S, TBT_SLO_S = 4.0, 0.15
SPEED, SCALE_LENGTHS, JITTER_S = 0.25, 0.1, 3.0
"""The replay's speed, the factor of its lengths, and the seconds of a tick of the trace's clock."""
CONVERSATIONS = "conversations"
TOKEN_IDS = (1000, 30_000)
WITHIN = 0.10
"""The relative difference up to which figures agree."""

Values = npt.NDArray[np.float64]


SYNTHETIC = {
    "short chats": SyntheticLoad(
        rate_per_s=6.0, first_input_tokens=(32, 64, 128, 240), output_tokens=(16, 48, 96)
    ),
    "long prompts": SyntheticLoad(
        rate_per_s=0.6, first_input_tokens=(800, 1500, 2500), output_tokens=(8, 16, 24)
    ),
    "chats and documents": SyntheticLoad(
        rate_per_s=2.0, first_input_tokens=(120, 120, 120, 120, 1500), output_tokens=(16, 64, 96)
    ),
    "shared prefix": SyntheticLoad(
        rate_per_s=3.0, shared_prefix_tokens=512, first_input_tokens=(544, 640, 896), output_tokens=(16, 48)
    ),
    "overload": SyntheticLoad(
        rate_per_s=8.0, first_input_tokens=(120, 120, 120, 120, 1500), output_tokens=(16, 64, 96)
    ),
}
"""The synthetic loads. No server on two cores can serve all requests of the last one within the SLOs."""
LOADS = (CONVERSATIONS, *SYNTHETIC)


@dataclass(frozen=True, slots=True)
class Replay:
    """A load: its requests, and the flags with which `mooncake-bench` sends the same requests."""

    source: Source
    flags: dict[str, object]
    scale_lengths: float
    duration_s: float
    seed: int

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests as the server gets them.

        Their blocks are those that the server makes of the sent tokens.
        """
        run = Run(
            source=self.source,
            seed=self.seed,
            duration_s=self.duration_s,
            scale_lengths=self.scale_lengths,
            context_len=CONTEXT_LEN,
            token_ids=TOKEN_IDS,
            timeout_s=600.0,
        )
        prompts, root = PromptMaker(TOKEN_IDS, self.seed, self.scale_lengths), root_key("simulated")
        for planned in Plan(run):
            keys = block_keys(prompts.tokens(planned), BLOCK_TOKENS, root)
            ids = tuple(int.from_bytes(key, "little") for key in keys)
            yield TraceRequest(planned.at_s, planned.num_input_tokens, planned.num_output_tokens, ids)

    def bench_flags(self) -> dict[str, object]:
        """Return all flags for `mooncake-bench run`."""
        return {
            **self.flags,
            "--scale-lengths": self.scale_lengths,
            "--duration": self.duration_s,
            "--context-len": CONTEXT_LEN,
            "--seed": self.seed,
            "--ttft-slo": TTFT_SLO_S,
            "--tbt-slo": TBT_SLO_S,
        }


def replays(trace: Path, folder: Path, duration_s: float, seed: int) -> dict[str, Replay]:
    """Return the loads by name. Writes the parameters of the synthetic loads to `folder`."""
    flags = {"--trace": trace, "--jitter": JITTER_S, "--speed": SPEED}
    source = TraceSource(trace, SPEED, JITTER_S)
    found = {CONVERSATIONS: Replay(source, flags, SCALE_LENGTHS, duration_s, seed)}
    for name, load in SYNTHETIC.items():
        file = folder / f"{name}.json"
        load.save(file)
        found[name] = Replay(SyntheticSource(load), {"--synthetic": file}, 1.0, duration_s, seed)
    return found


def measure_loops(server: RealServer, profile: Path, folder: Path) -> Calibration:
    """Return the calibration of the server by closed loops, whose outcomes `folder` has or gets."""
    loops: Mapping[str, AnyLoop]
    loops, calibrated = (
        (one_instance.LOOPS, one_instance.calibrated) if server.num_both else (pair.LOOPS, pair.calibrated)
    )
    folder.mkdir(exist_ok=True)
    flags = {name: loop.flags(folder) for name, loop in loops.items()}
    server.run_loads(flags, PATIENT_S, PATIENT_TBT_S, profile, folder)
    return calibrated(load_profile(profile).costs, {name: outcomes(folder / name) for name in loops})


def simulate(replay: Replay, server: RealServer, machine: Calibration) -> Results:
    """Simulate the requests of a replay on instances like those of the server on this machine."""
    limits = Limits(ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S)
    return simulated_server(server, machine, limits).run(replay.requests())


class Row(msgspec.Struct, frozen=True):
    """One figure of the real server and of the simulation.

    Both agree if their relative difference is at most `within`.
    """

    name: str
    real: float
    simulated: float
    within: float = WITHIN

    @property
    def difference(self) -> float:
        """The difference relative to the real figure."""
        return (self.simulated - self.real) / self.real if self.real else float(self.simulated != 0)

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.within


def compare(real: Sequence[Outcome], simulated: Results) -> list[Row]:
    """Return the rows of the figures that docs/simulator.md compares."""
    finished = [outcome for outcome in real if outcome.kind is Kind.FINISHED]
    times = {
        "TTFT": ([o.ttft_s for o in finished if o.ttft_s is not None], simulated["ttft_s"]),
        "TBT": ([o.tbt_s for o in finished if o.tbt_s is not None], simulated["tbt_s"]),
    }
    rows = []
    for name, (of_real, of_simulated) in times.items():
        pair: list[Values] = [np.array(of_real), of_simulated[~np.isnan(of_simulated)]]
        for figure, value in (("mean", np.mean), ("p90", lambda values: np.percentile(values, 90))):
            real_s, simulated_s = (float(value(of)) for of in pair)
            rows.append(Row(f"{name} {figure}, s", real_s, simulated_s))
    num_rejected = sum(outcome.kind is Kind.REJECTED for outcome in real)
    rows.append(Row("rejected", num_rejected, simulated.num(Simulated.REJECTED)))
    num_cached = sum(outcome.num_cached_tokens or 0 for outcome in finished)
    rows.append(Row("cached tokens", num_cached, int(simulated["num_cached_tokens"].sum())))
    return rows


def print_rows(name: str, rows: Sequence[Row], num_requests: int) -> None:
    """Print a table of the figures of a load."""
    table = Table(title=f"{name}: {num_requests:,} requests on the real server and simulated")
    table.add_column("")
    for name in ("real", "simulated", "difference", "agreed within"):
        table.add_column(name, justify="right")
    for row in rows:
        style = None if row.agrees else "red"
        figures = (f"{row.real:,.4g}", f"{row.simulated:,.4g}", f"{row.difference:+.1%}", f"{row.within:.0%}")
        table.add_row(row.name, *figures, style=style)
    Console().print(table)


def main() -> None:
    """Run the comparison, and exit with 1 if a figure does not agree."""
    parser = _parser()
    options = parser.parse_args()
    server = _server(parser, options.num_prefill, options.num_decode)
    names = _known(parser, options.loads.split(","))
    folder: Path = options.out
    of_loads = folder / f"seed {options.seed}, {options.duration:g} s"
    of_loads.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.json"
    if not profile.exists():
        server.measure_profile(profile)
    loads = replays(options.trace, of_loads, options.duration, options.seed)
    rounds = []
    for name in names:
        rounds.append(measure_loops(server, profile, of_loads / f"loops before {name}"))
        server.run_loads({name: loads[name].bench_flags()}, TTFT_SLO_S, TBT_SLO_S, profile, of_loads)
    machine, all_agree = mean(rounds), True
    print(machine)
    for name in names:
        real = outcomes(of_loads / name)
        rows = compare(real, simulate(loads[name], server, machine))
        print_rows(name, rows, len(real))
        all_agree &= all(row.agrees for row in rows)
    sys.exit(0 if all_agree else 1)


def _server(parser: argparse.ArgumentParser, num_prefill: int, num_decode: int) -> RealServer:
    servers = {(server.num_prefill, server.num_decode): server for server in (DEFAULT, PAIR)}
    if (num_prefill, num_decode) not in servers:
        parser.error("expected --num-prefill 1 --num-decode 1, or neither of them")
    return servers[num_prefill, num_decode]


def _known(parser: argparse.ArgumentParser, names: Sequence[str]) -> Sequence[str]:
    if unknown := set(names) - set(LOADS):
        parser.error(f"--loads {sorted(unknown)[0]}: expected some of {','.join(LOADS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.simulator.against_real",
        description="The simulator beside the real server: one instance with both roles, or a pair.",
    )
    parser.add_argument("trace", type=Path, help="Mooncake's conversation_trace.jsonl, or .gz")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="profile and outcomes")
    parser.add_argument("--num-prefill", type=int, default=0, metavar="1", help="with --num-decode 1: a pair")
    parser.add_argument("--num-decode", type=int, default=0, metavar="1", help="with --num-prefill 1: a pair")
    parser.add_argument("--loads", default=",".join(LOADS), metavar="NAME,...", help="default: %(default)s")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of each load")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
