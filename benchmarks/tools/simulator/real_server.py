"""The real server that simulations are compared with: its instances, its profile, the loads that it serves.

Owns: the server's flags, which parts a folder has already, outcomes that were measured. Does not know: which
loads there are, simulations.
"""

import gzip
import itertools
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.servers import free_port, serving
from benchmarks.tools.load.outcomes import Outcome

PATIENT_S, PATIENT_TBT_S = 600.0, 10.0
"""A TTFT and a TBT SLO in seconds that are so long that no request is rejected."""
_CONFIG = "configs/local-cpu.yaml"


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server, described by the numbers of its instances.

    `flags` are flags of `mooncake-serve` in addition to the configuration.
    """

    num_prefill: int
    num_decode: int
    num_both: int
    flags: Mapping[str, object]

    def measure_profile(self, file: Path) -> None:
        """Profile a worker of this server on this machine."""
        subprocess.run([*self._command(), "profile", str(file)], check=True)

    def run_loads(
        self,
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
            "--port": port,
            "--conductor-profile": profile,
            "--conductor-ttft-slo-s": ttft_slo_s,
            "--conductor-tbt-slo-s": tbt_slo_s,
        }
        bench = [sys.executable, "-m", "benchmarks.tools.load", "run", url]
        with serving([*self._command(), *_flat(flags)], f"{url}/ready"):
            for name in lacking:
                subprocess.run([*bench, *_flat(loads[name]), "--out", str(folder / name)], check=True)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "mooncake", "--config", _CONFIG, *_flat(self.flags)]


DEFAULT = RealServer(0, 0, 1, {})
"""The default server: one instance with both roles, which may use all cores."""
PAIR = RealServer(
    1,
    1,
    0,
    {"--num-prefill": 1, "--num-decode": 1, "--worker-num-threads": 1, "--conductor-inlining": "false"},
)
"""One prefill and one decode instance with one thread each. Each request goes through both."""


def outcomes(folder: Path) -> list[Outcome]:
    """Return the outcomes in `folder` of a load that was measured, in order of arrival."""
    lines = gzip.decompress((folder / "requests.jsonl.gz").read_bytes()).splitlines()
    found = [msgspec.json.decode(line, type=Outcome) for line in lines]
    return sorted(found, key=lambda outcome: outcome.number)


def _flat(flags: Mapping[str, object]) -> list[str]:
    return [str(part) for part in itertools.chain.from_iterable(flags.items())]
