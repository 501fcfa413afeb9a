"""A program that lets faults happen to a cluster under load, one after the other and sometimes two at once.

    python -m tests.chaos [--minutes M] [--seed S] [--faults NAME,...] [--longest SECONDS] [--json FILE]

Three hosts (network namespaces, so this needs root) have two conductors, two fronts and four instances of a
tiny model, with an etcd beside them. Clients send requests with known answers all the time. After each fault
the whole cluster has to recover: see docs/failures.md. The program prints a table, and ends with status 1 if
an invariant was violated.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.kvstore.rounds import print_table
from benchmarks.servers import heeding_sigterm
from tests.chaos.clocks import Clocks
from tests.chaos.cluster import Cluster, running
from tests.chaos.faults import FAULTS
from tests.chaos.network import Unavailable
from tests.chaos.rounds import Round, chaos

_TWO_AT_ONCE = 0.25
"""The share of rounds with two faults at once."""


def draws(rng: random.Random, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the faults of each round.

    Each fault comes once before any comes again; sometimes two come at once.
    """
    while True:
        for name in rng.sample(names, len(names)):
            others = [other for other in names if other != name]
            yield [name, rng.choice(others)] if others and rng.random() < _TWO_AT_ONCE else [name]


def go(cluster: Cluster, arguments: argparse.Namespace) -> list[Round]:
    """Run rounds until the time is over, or until the cluster does not recover."""
    rounds: list[Round] = []
    end_s = time.monotonic() + 60 * arguments.minutes
    with chaos(cluster, arguments.seed) as going, contextlib.suppress(KeyboardInterrupt):
        for names in draws(random.Random(arguments.seed), arguments.faults):
            if time.monotonic() > end_s:
                break
            rounds.append(going.go_through(names, arguments.longest))
            tell(rounds[-1], cluster)
            if rounds[-1].is_over:
                break
    return rounds


def tell(done: Round, cluster: Cluster) -> None:
    """Print a line about a round and, if there were problems, the latest output of all nodes."""
    print(
        f"{done.name}, {done.lasted_s:.0f} s: answered after {done.answered_s:.1f} s, whole after"
        f" {done.whole_s:.1f} s, {dict(done.ends)}",
        file=sys.stderr,
        flush=True,
    )
    for problem in done.problems:
        print(f"  PROBLEM: {problem}", file=sys.stderr)
    if done.problems:
        for name, node in cluster.nodes.items():
            print(f"  == {name}", *node.lines[-30:], sep="\n     ", file=sys.stderr, flush=True)


def show(rounds: Sequence[Round]) -> None:
    """Print the table of all rounds."""
    by_name: dict[str, list[Round]] = {}
    for one in rounds:
        by_name.setdefault(one.name if "+" not in one.name else "two at once", []).append(one)
    rows = []
    for name, of_name in sorted(by_name.items()):
        answered_s = sorted(one.answered_s for one in of_name)
        whole_s = sorted(one.whole_s for one in of_name)
        rows.append(
            (
                name,
                str(len(of_name)),
                f"{answered_s[len(answered_s) // 2]:.1f} s",
                f"{answered_s[-1]:.1f} s",
                f"{whole_s[len(whole_s) // 2]:.1f} s",
                f"{whole_s[-1]:.1f} s",
                str(sum(one.ends.total() for one in of_name)),
                str(sum(one.num_broken for one in of_name)),
                str(sum(len(one.problems) for one in of_name)),
            )
        )
    columns = ("fault", "rounds", "answered p50", "max", "whole p50", "max", "requests", "broken", "problems")
    print_table("chaos", columns, rows)


def main() -> None:
    """Run the rounds, print the table, and exit with 1 if there were problems."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1000))
    parser.add_argument("--faults", type=lambda text: text.split(","), default=list(FAULTS))
    parser.add_argument("--longest", type=float, default=30.0, help="seconds that a fault lasts at most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.faults) - FAULTS.keys():
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    print(f"seed {arguments.seed}", file=sys.stderr)
    try:
        with heeding_sigterm(), tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with running(folder, Clocks(folder)) as cluster:
                rounds = go(cluster, arguments)
    except Unavailable as reason:
        sys.exit(str(reason))
    show(rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "rounds": list(map(vars, rounds))}))
    sys.exit(any(one.problems for one in rounds))


if __name__ == "__main__":
    main()
