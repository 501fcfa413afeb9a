"""The simulator against the real server on this machine: the same requests, 1P1D, costs from a profile.

    python -m benchmarks.tools.simulator.against_real TRACE.jsonl.gz --out FOLDER

The command first profiles a worker. The profile of a single worker lacks three costs: the times before a
first token that are not computing, the variation of iterations, and how much instances on the same cores slow
each other down. Short closed loops on the running server measure these (`calibration`). Then the command
sends five loads through HTTP (`mooncake-bench`): a part of the trace with shorter lengths, and four synthetic
loads. Each is simulated with the same requests, and the figures are compared. Results of an earlier call in
FOLDER are used again.

Owns: the loads, this machine as a card, the comparison. Does not know: how the server is loaded, how it is
simulated.
"""

import argparse
import gzip
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.servers import free_port, serving
from benchmarks.tools.load.outcomes import Kind, Outcome
from benchmarks.tools.load.prompts import PromptMaker
from benchmarks.tools.load.sources import Plan, Run, Source, SyntheticSource, TraceSource
from benchmarks.tools.simulator.calibration import LOOPS, Calibration, calibrated
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.machines.cards import STATED, HardwareCard, ModelCard
from benchmarks.tools.simulator.cluster.machines.machine import IterationJitter
from benchmarks.tools.simulator.cluster.requests import Outcome as Simulated
from benchmarks.tools.simulator.cluster.requests import Results
from benchmarks.tools.simulator.cluster.shape import InstanceShape
from benchmarks.tools.traces.request import TraceRequest
from benchmarks.tools.traces.synthetic import SyntheticLoad
from conductor.settings import Limits, PolicySettings
from mooncake.config.profile import load_profile
from mooncake.messages.blocks import block_keys, root_key

MODEL = ModelCard("smollm2-135m", 30, 576, 9, 3, 1536, 49152)
GIB = 1 << 30
BLOCK_TOKENS, PREFILL_CHUNK, SATURATING_TOKENS, MAX_BATCH = 32, 512, 128, 32
COPY_BYTES_PER_S = 5e9
"""The bytes a second that a core copies in memory, to the device's pages or to another process."""
PATIENT_S = 600.0
"""A TTFT SLO in seconds that is so long that no request is rejected."""
CONTEXT_LEN = 8000
"""The most tokens of a request. Longer requests of the trace are left out."""
TTFT_SLO_S, TBT_SLO_S = 4.0, 0.15
SPEED, SCALE_LENGTHS, JITTER_S = 0.25, 0.1, 3.0
"""The replay's speed, the factor of its lengths, and the seconds of a tick of the trace's clock."""
CONVERSATIONS = "conversations"
TOKEN_IDS = (1000, 30_000)
TIMES_WITHIN, REJECTIONS_WITHIN = 0.15, 0.10

_PAIR = {"--config": "configs/local-cpu.yaml", "--num-prefill": 1, "--num-decode": 1}
"""The flags of the server: one prefill and one decode instance."""
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
}
"""The four synthetic loads. This server cannot serve all requests of two of them within the SLOs."""


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
    """Return the five loads by name. Writes the parameters of the synthetic loads to `folder`."""
    flags = {"--trace": trace, "--jitter": JITTER_S, "--speed": SPEED}
    source = TraceSource(trace, SPEED, JITTER_S)
    found = {CONVERSATIONS: Replay(source, flags, SCALE_LENGTHS, duration_s, seed)}
    for name, load in SYNTHETIC.items():
        file = folder / f"{name}.json"
        load.save(file)
        found[name] = Replay(SyntheticSource(load), {"--synthetic": file}, 1.0, duration_s, seed)
    return found


def measure_profile(file: Path) -> None:
    """Profile a worker of the pair with one thread on this machine."""
    flags: dict[str, object] = {**_PAIR, "--worker-num-threads": 1}
    subprocess.run([*_server(), *_flat(flags), "profile", str(file)], check=True)


def run_loads(
    loads: Mapping[str, dict[str, object]],
    ttft_slo_s: float,
    tbt_slo_s: float,
    profile: Path,
    folder: Path,
) -> None:
    """Run the loads whose folders do not exist yet, on one server with these SLOs.

    Args:
        loads: The flags of `mooncake-bench run` for each load, by the load's name.
        ttft_slo_s, tbt_slo_s: The SLOs in seconds.
        profile: The file with the profile of a worker.
        folder: The folder in which each load gets a folder with its outcomes.
    """
    lacking = [name for name in loads if not (folder / name).exists()]
    if not lacking:
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags: dict[str, object] = {
        **_PAIR,
        "--port": port,
        "--worker-num-threads": 1,
        "--conductor-profile": profile,
        "--conductor-inlining": "false",
        "--conductor-ttft-slo-s": ttft_slo_s,
        "--conductor-tbt-slo-s": tbt_slo_s,
    }
    bench = [sys.executable, "-m", "benchmarks.tools.load", "run", url]
    with serving([*_server(), *_flat(flags)], f"{url}/ready"):
        for name in lacking:
            subprocess.run([*bench, *_flat(loads[name]), "--out", str(folder / name)], check=True)


def _server() -> list[str]:
    return [sys.executable, "-m", "mooncake"]


def _flat(flags: dict[str, object]) -> list[str]:
    return [str(part) for part in itertools.chain.from_iterable(flags.items())]


def outcomes(folder: Path) -> list[Outcome]:
    """Return the outcomes in `folder` of a load that was measured, in order of arrival."""
    lines = gzip.decompress((folder / "requests.jsonl.gz").read_bytes()).splitlines()
    found = [msgspec.json.decode(line, type=Outcome) for line in lines]
    return sorted(found, key=lambda outcome: outcome.number)


def simulate(replay: Replay, machine: Calibration) -> Results:
    """Simulate the requests of a replay on a prefill and a decode instance, each with a core of this
    machine."""
    weights_bytes, efficiencies = MODEL.weights_bytes, STATED
    core = HardwareCard(
        name="core",
        num_gpus=1,
        gpu_flops=1.0,
        gpu_memory_bytes_per_s=1.0,
        gpu_memory_bytes=(GIB + weights_bytes) / efficiencies.device_memory,
        nic_bytes_per_s=COPY_BYTES_PER_S / efficiencies.nic,
        pcie_bytes_per_s=COPY_BYTES_PER_S / efficiencies.pcie,
        pool_bytes=GIB,
    )
    shape = InstanceShape(
        MODEL,
        core,
        machine.costs,
        prefill_chunk=PREFILL_CHUNK,
        max_batch=MAX_BATCH,
        block_tokens=BLOCK_TOKENS,
        saturating_tokens=SATURATING_TOKENS,
        first_token_s=machine.first_token_s,
        prompt_s=machine.prompt_s,
        slowdowns=machine.slowdowns,
        join_costs=machine.join_costs,
        jitter=IterationJitter(machine.longest_mean),
    )
    limits = Limits(ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S)
    return DisaggregatedCluster(shape, 1, 1, limits, PolicySettings(), max_tokens=1).run(replay.requests())


class Row(msgspec.Struct, frozen=True):
    """One figure of the real server and of the simulation.

    Both agree if their relative difference is at most `within`.
    """

    name: str
    real: float
    simulated: float
    within: float

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
            rows.append(Row(f"{name} {figure}, s", real_s, simulated_s, TIMES_WITHIN))
    num_rejected = sum(outcome.kind is Kind.REJECTED for outcome in real)
    rows.append(Row("rejected", num_rejected, simulated.num(Simulated.REJECTED), REJECTIONS_WITHIN))
    num_cached = sum(outcome.num_cached_tokens or 0 for outcome in finished)
    rows.append(Row("cached tokens", num_cached, int(simulated["num_cached_tokens"].sum()), TIMES_WITHIN))
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
    options = _parser().parse_args()
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.json"
    if not profile.exists():
        measure_profile(profile)
    of_loops = {name: loop.flags() for name, loop in LOOPS.items()}
    run_loads(of_loops, PATIENT_S, TBT_SLO_S, profile, folder)
    machine = calibrated(load_profile(profile).costs, {name: outcomes(folder / name) for name in LOOPS})
    print(machine)
    all_agree = True
    for name, replay in replays(options.trace, folder, options.duration, options.seed).items():
        run_loads({name: replay.bench_flags()}, TTFT_SLO_S, TBT_SLO_S, profile, folder)
        real = outcomes(folder / name)
        rows = compare(real, simulate(replay, machine))
        print_rows(name, rows, len(real))
        all_agree &= all(row.agrees for row in rows)
    sys.exit(0 if all_agree else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.simulator.against_real",
        description="The simulator beside the real server.",
    )
    parser.add_argument("trace", type=Path, help="Mooncake's conversation_trace.jsonl, or .gz")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="profile and outcomes")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of each load")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
