"""Options that `mooncake-sim` and `mooncake-plan` share.

These are the source of requests, the kind of instances, and the weights of BanaServe's objective.

Owns: these options, the `Setup` that they describe. Does not know: other options.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.tools.arguments import count, not_negative, positive
from benchmarks.tools.simulator.cluster.machines.cards import HARDWARE, MODELS
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.replay import TICK_S
from conductor.performance.objective import Weights
from mooncake.errors import ConfigError


def add_source(group: argparse._ArgumentGroup) -> argparse._MutuallyExclusiveGroup:
    """Add options for a trace or a synthetic load, and return their group.

    The group's options exclude each other. The caller may add other sources to it.
    """
    source = group.add_mutually_exclusive_group(required=True)
    trace_help = "replay a trace: .jsonl or .csv, or either .gz"
    source.add_argument("--trace", type=Path, metavar="FILE", help=trace_help)
    synthetic_help = "a synthetic load, as mooncake-bench fit writes it"
    source.add_argument("--synthetic", type=Path, metavar="FILE", help=synthetic_help)
    jitter_help = "requests of one tick of a trace's clock arrive spread over so long (default: %(default)s)"
    group.add_argument("--jitter", type=not_negative, default=TICK_S, metavar="SECONDS", help=jitter_help)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (default: 0)")
    return source


def add_instances(group: argparse._ArgumentGroup) -> None:
    """Add options that describe each instance."""
    default = Setup()
    group.add_argument("--model", metavar="NAME", help=f"{', '.join(MODELS)} (default: {default.model})")
    group.add_argument(
        "--hardware", metavar="NAME", help=f"a node: {', '.join(HARDWARE)} (default: {default.hardware})"
    )
    group.add_argument("--profile", metavar="FILE", help="costs of a real worker instead of the cards'")
    group.add_argument(
        "--nic-gbps", type=positive, metavar="GBPS", help="of an instance (default: the hardware's)"
    )
    pool_help = "of an instance's part of the pool (default: its DRAM)"
    group.add_argument("--pool-tokens", type=count, metavar="TOKENS", help=pool_help)


def add_weights(group: argparse._ArgumentGroup, use: str) -> None:
    """Add the option for the weights of BanaServe's objective. `use` says what they are for."""
    group.add_argument(
        "--weights",
        type=not_negative,
        nargs=3,
        metavar=("ALPHA", "BETA", "GAMMA"),
        help=f"{use} J = ALPHA * U_avg - BETA * T_avg-latency + GAMMA * Theta (BanaServe): the worth of a"
        " mean utilisation of 1, of a second of mean TTFT + mean time per token, of an output token/s",
    )


def weights_of(options: argparse.Namespace) -> Weights | None:
    """Return the weights; None if none are given. Raises ConfigError if all are 0."""
    if options.weights is None:
        return None
    if not any(options.weights):
        raise ConfigError("--weights of 0 make all clusters equal: at least one must be above 0")
    return Weights(*options.weights)


def setup_of(options: argparse.Namespace, **more: Any) -> Setup:
    """Return the setup from the options that have the names of its fields. Raises ConfigError."""
    names = Setup.__struct_fields__
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return Setup(**given, **more)
