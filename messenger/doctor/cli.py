"""The command line of `mooncake-doctor`: the choice of checks, and the report.

Owns: the command line, the order of checks, the report, the finding about the configuration. Does not know:
how the other things are checked.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import rich.console
import rich.table
import rich.text

from messenger.doctor import certificates, gpu, host, network, rdma, reachability
from messenger.doctor.findings import Check, Finding, Level
from messenger.doctor.machine import Machine
from messenger.doctor.probe import ProbeClient
from messenger.doctor.reachability import PeerAddress
from messenger.native import SOURCES
from messenger.rdma.cards import Cards, open_cards
from messenger.transport.tls import Tls
from mooncake import native
from mooncake.cli.command_line import FAILED, INTERRUPTED, Parser
from mooncake.cli.steps import StepDisplay
from mooncake.config.sections import LARGEST_PORT, MessengerConfig
from mooncake.config.settings import Config, load_config
from mooncake.errors import ConfigError
from mooncake.security.keys import ClusterKey

_COMPILING_S = 120.0
"""Time limit in seconds of a check that compiles all C++ files."""
_MEASURING_S = 60.0
"""Time limit in seconds of a check that measures bandwidth over all paths."""
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


EXAMPLES = """examples:
  mooncake-doctor
  mooncake-doctor --config configs/cluster.yaml
  mooncake-doctor --peer 10.0.0.2:7900 --key-file cluster.key

Exit codes: 0 if nothing failed, 1 if something did, 2 for wrong use, 130 after Ctrl-C.
"""


def main() -> None:
    """Run the `mooncake-doctor` command, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command. Returns the exit code: 0 if no check failed, 1 if a check failed, 130 after Ctrl-C.

    Raises SystemExit with code 2 for wrong use.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.config is not None and not options.config.is_file():
        parser.error(f"--config: there is no file {options.config}")
    machine = Machine()
    try:
        config, first = read_config(options.config, machine)
        findings = [
            first,
            *look(checks(machine, config, options.peer, options.key_file or config.security.key_file)),
        ]
        (_print_json if options.json else _print_report)(findings)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return FAILED if any(finding.level is Level.FAIL for finding in findings) else 0


def read_config(file: Path | None, machine: Machine) -> tuple[Config, Finding]:
    """Return the configuration that `mooncake-serve` would have, and a finding about it.

    A wrong configuration is replaced by defaults.
    """
    try:
        config = load_config(file, machine.environ, {})
    except ConfigError as error:
        advice = "correct it; the other checks went by the defaults"
        return Config(), Finding(Level.FAIL, "configuration", str(error), advice)
    source = str(file) if file is not None else "defaults and environment (--config FILE names another)"
    return config, Finding(Level.OK, "configuration", f"{source}; role {config.role}")


def checks(machine: Machine, config: Config, other: PeerAddress | None, key_file: Path | None) -> list[Check]:
    """Return all checks. A check comes after the checks on which it depends."""
    sources = sorted(SOURCES.glob("*.cpp"))
    here = [
        Check("python", partial(host.python, machine)),
        Check("native code", partial(host.native_code, native.load, sources), _COMPILING_S),
        Check("cpu kernels", partial(host.cpu_kernels, _ask_for_kernels), _COMPILING_S),
        Check("memory", partial(host.memory, machine, config)),
        Check("open files", partial(host.open_files, machine, config)),
        Check("huge pages", partial(host.huge_pages, machine, config)),
        Check("clock", partial(host.clock, machine)),
        Check("cluster key", partial(host.cluster_key, key_file, ClusterKey.load, config)),
        Check("tls", partial(certificates.tls, config)),
        Check("gpu", partial(gpu.gpus, machine, config)),
        Check("rdma", partial(rdma.devices, machine, config)),
        Check("rdma access", partial(rdma.access, machine, config)),
        Check("memlock", partial(rdma.locked_memory, machine, config)),
        Check("rdma ports", partial(rdma.ports, machine, config)),
        Check("rdma mtu", partial(rdma.mtu, machine)),
        Check("rdma verbs", partial(rdma.verbs, machine, config, _find_rdma)),
        Check("gpudirect", partial(gpu.peer_memory, machine)),
        Check("interfaces", partial(network.interfaces, machine)),
        Check("topology", partial(gpu.nearest_nics, machine, config)),
        Check("tcp buffers", partial(network.tcp_buffers, machine)),
        Check("addresses", partial(network.addresses, machine, config)),
        Check("ports", partial(network.ports, machine, config)),
    ]
    return here + (_peer_checks(machine, other, key_file, config) if other is not None else [])


def look(all_checks: Iterable[Check]) -> list[Finding]:
    """Run the checks in turn, showing the current one, and return their findings."""
    findings: list[Finding] = []
    with StepDisplay() as steps:
        for check in all_checks:
            steps.show(f"looking at {check.title}")
            findings += check.run()
    return findings


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return good findings, then warnings, then failures: on a terminal the last lines are read first.

    Good findings are in the order of the checks. Warnings are in reverse order, and so are failures: an early
    check may have found the cause of later findings, so its finding stands last.
    """
    good = [finding for finding in findings if finding.level is Level.OK]
    bad = [finding for finding in reversed(findings) if finding.level is not Level.OK]
    return good + sorted(bad, key=lambda finding: finding.level)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of the report: numbers of failures and warnings, and the finding to begin with."""
    num_failed, num_warnings = (
        sum(finding.level is level for finding in findings) for level in (Level.FAIL, Level.WARN)
    )
    if not num_failed and not num_warnings:
        return "Nothing is wrong."
    begin = in_order(findings)[-1].title
    counts = f"{num_failed} failed, {num_warnings} warning{'s' if num_warnings != 1 else ''}"
    return f"{counts}. Begin with: {begin}." if num_failed + num_warnings > 1 else f"{counts}."


def _peer_checks(machine: Machine, other: PeerAddress, key_file: Path | None, config: Config) -> list[Check]:
    async def open_probe() -> reachability.PeerProbe:
        if key_file is None:
            raise ConfigError("without the cluster's key nothing is measured; name it with --key-file")
        key = ClusterKey.load(key_file)
        return ProbeClient(*other, key, Tls.of(config.security), await _rdma_cards(config.messenger))

    return [
        Check("peer name", partial(reachability.name, machine, other)),
        Check("peer", partial(reachability.way, machine, other, open_probe), _MEASURING_S),
    ]


def _ask_for_kernels() -> str:
    """Return the instruction set of the CPU kernels, or `torch` and the reason for it.

    Another process finds out, so that this process need not load torch.
    """
    command = [sys.executable, "-m", "kernels.cpu.library"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILING_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"torch {error}"
    last_line = (result.stdout if result.returncode == 0 else result.stderr).strip().rpartition("\n")[2]
    return last_line if result.returncode == 0 else f"torch {last_line}"


async def _rdma_cards(settings: MessengerConfig) -> Cards:
    """Return the RDMA cards that a messenger would use.

    Returns no cards if they cannot be used; other checks say why.
    """
    try:
        cards = open_cards(settings)
        await cards.register(memoryview(mmap.mmap(-1, mmap.PAGESIZE)))
    except ConfigError:
        return Cards([])
    return cards


def _find_rdma() -> tuple[list[str], list[str]]:
    """Return descriptions of the RDMA ports that the messenger can use, and why other ports are not usable.

    The check calls this function only if the machine has RDMA devices.
    """
    from messenger.rdma.devices import find_devices

    found = find_devices()
    usable = [
        f"{device} (GID index {device.gid_index}, MTU {device.mtu_bytes} bytes)" for device in found.devices
    ]
    return usable, found.reasons


def _print_json(findings: Sequence[Finding]) -> None:
    for finding in in_order(findings):
        facts = {"level": finding.level.name, "title": finding.title, "found": finding.found}
        print(json.dumps({**facts, "advice": finding.advice}))
    sys.stdout.flush()


def _print_report(findings: Sequence[Finding]) -> None:
    """Print a line for each finding, the worst last, and a summary."""
    console = rich.console.Console(highlight=False)
    table = rich.table.Table.grid(padding=(0, 2))
    for finding in in_order(findings):
        text = f"{finding.found} -> {finding.advice}" if finding.advice else finding.found
        if console.is_terminal:
            level = rich.text.Text(finding.level.name, _STYLES[finding.level])
            table.add_row(level, rich.text.Text(finding.title), rich.text.Text(text, overflow="fold"))
        else:
            print(f"{finding.level.name:<4}  {finding.title:<13}  {text}")
    if console.is_terminal:
        console.print(table)
    print(summary(findings), flush=True)


def _peer(text: str) -> PeerAddress:
    host_text, _, port_text = text.rpartition(":")
    host_name = host_text.removeprefix("[").removesuffix("]")
    if not host_name or not port_text.isdecimal() or not 0 < int(port_text) <= LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"expected host:port, such as 10.0.0.2:7900, not {text!r}")
    return PeerAddress(host_name, int(port_text))


def _parser() -> Parser:
    parser = Parser(
        prog="mooncake-doctor",
        description="Look at this machine, and at the way to a peer, and say what is wrong and what to do.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--peer",
        type=_peer,
        metavar="HOST:PORT",
        help="one of another node's messenger.hosts, and its messenger.port",
    )
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help="the cluster's key; default: security.key_file"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the YAML file that mooncake-serve is started with"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_version()
    return parser


if __name__ == "__main__":
    main()
