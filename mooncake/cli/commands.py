"""The commands of `mooncake-serve`: run a node, make keys, measure this machine, operate a cluster.

Every configuration key is a flag: `http.port` is `--http-port`, and the usual short names exist too.
`mooncake-serve keygen FILE` makes a cluster key, `mooncake-serve apikey FILE NAME` makes a client's API key,
and `mooncake-serve profile FILE` measures this machine. `mooncake-serve drain INSTANCE`, `mooncake-serve role
INSTANCE ROLE` and `mooncake-serve migrate INSTANCE HELPER` change a running cluster.

Owns: the command line. Does not know: keys and their values (`mooncake.config.settings`), processes
(`mooncake.node.supervisor`).
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from mooncake.cli.command_line import FAILED, WRONG_USE, Parser, exit_code
from mooncake.cli.preflight import check_node
from mooncake.cli.profiling import ProfileError, profile
from mooncake.config.flags import add_flags, given_flags
from mooncake.config.settings import Config, load_config
from mooncake.errors import ConfigError, MooncakeError
from mooncake.messages.migration import LEAST_SHARE, MOST_SHARE, LayerRange, ModulesPart
from mooncake.messages.workers import Role
from mooncake.node.supervisor import supervise
from mooncake.security.api_keys import LIMITS, add_api_key
from mooncake.security.keys import ClusterKey

EXAMPLES = """examples:
  mooncake-serve                                    the default model, on http://127.0.0.1:8000
  mooncake-serve --model Qwen/Qwen2.5-0.5B-Instruct --port 8001
  mooncake-serve --config configs/single-gpu.yaml --kvcache-pool-bytes 64GiB
  mooncake-serve --num-prefill 1 --num-decode 1     prefill and decode on instances of their own
  mooncake-serve keygen cluster.key                 what nodes of one cluster share: --security-key-file
  mooncake-serve profile costs.json --model DIR     what this device needs: --conductor-profile costs.json
  mooncake-serve role prefill-1 decode              another role for an instance of the cluster that runs
  mooncake-serve drain decode-0                     take it out: nothing that it runs is lost
  mooncake-serve migrate decode-0 decode-1 --layers 10:20    or --heads 1: a helper computes them; --back

Each flag is also a key in the YAML file and an environment variable: --http-port, http.port,
MOONCAKE_HTTP_PORT. docs/configuration.md has all of them.

Exit codes: 0, also after Ctrl-C; 1 if a process cannot serve, an order is refused, or costs cannot
be measured; 2 if the configuration is wrong; 130 after Ctrl-C before anything runs, or while waiting
for an instance.
"""


ROLES = ", ".join(role.value for role in Role)
_OPERATING = ("drain", "role", "migrate")
"""The commands about a running cluster."""


def run(arguments: Sequence[str]) -> int:
    """Run a command, and return its exit code (`EXAMPLES` explains the codes).

    Raises SystemExit with code 2 for wrong use. Raises KeyboardInterrupt after Ctrl-C, unless the command is
    about a running cluster.
    """
    options = _parser(shows_all="--help-all" in arguments).parse_args(arguments)
    if options.command in _OPERATING:
        return exit_code(lambda: _operate(options))
    try:
        return _run(options)
    except KeyboardInterrupt:
        if options.command is not None:
            print("interrupted: nothing was written", file=sys.stderr)
        raise
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED if isinstance(error, ProfileError) else WRONG_USE


def _operate(options: argparse.Namespace) -> int:
    from mooncake.cli import operating  # an HTTP client, which starts of servers need not wait for

    _check_no_configuration(options, "INSTANCE and what its --help shows alone")
    client = operating.AdminClient(options.url, operating.read_key(options.key_file))
    if options.command == "migrate":
        part = ModulesPart(options.heads, options.layers, options.sequences)
        return operating.migrate(client, options.instance_name, options.helper_name, part)
    if options.command == "drain":
        return operating.drain(client, options.instance_name, force=options.force)
    return operating.change_role(client, options.instance_name, Role(options.new_role), force=options.force)


def _check_no_configuration(options: argparse.Namespace, takes: str) -> None:
    if given_flags(options) or options.config or options.print_config:
        raise ConfigError(f"{options.command} takes {takes}")


def _run(options: argparse.Namespace) -> int:
    takes = {"keygen": "FILE and no other options", "apikey": "FILE, NAME and what its --help shows alone"}
    if options.command in takes:
        _check_no_configuration(options, takes[options.command])
    if options.command == "keygen":
        keygen(options.file)
        return 0
    if options.command == "apikey":
        limits = {name: getattr(options, name) for name in LIMITS}
        print(add_api_key(Path(options.file), options.name, limits))
        return 0
    config = load_config(options.config, os.environ, given_flags(options))
    if options.command == "profile":
        profile(config, Path(options.file))
        return 0
    if options.print_config:
        print(render(config), end="")
        return 0
    check_node(config)
    return asyncio.run(supervise(config))


def keygen(file: str) -> None:
    """Make a cluster key, in a new file or (`-`) on stdout. Raises ConfigError."""
    key = ClusterKey.generate()
    if file == "-":
        print(key.to_text())
        return
    path = Path(file)
    key.save(path)
    print(
        f"{path.absolute()} holds a new cluster key (key id {key.key_id}). Copy it to every node, readable by"
        f" the user of mooncake-serve alone, and start every node with --security-key-file {path}"
    )


def render(config: Config) -> str:
    """Return the configuration as YAML that `--config` accepts."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _parser(*, shows_all: bool) -> Parser:
    parser = Parser(
        prog="mooncake-serve",
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]\n"
        "       %(prog)s keygen FILE | apikey FILE NAME | profile FILE\n"
        "       %(prog)s drain INSTANCE | role INSTANCE ROLE | migrate INSTANCE HELPER --layers A:B",
        description="Serve a language model: KVCache-centric, prefill and decode disaggregated.",
        epilog=EXAMPLES,
        no_command="serving needs no command, a model is named with --model",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show the resulting configuration and exit"
    )
    parser.add_version()
    parser.set_defaults(config=None)
    _add_configuration(parser, shows_all=shows_all)
    commands = parser.add_subparsers(
        title="commands", prog="mooncake-serve", dest="command", metavar="COMMAND"
    )
    for name, help_text in (
        ("keygen", "make the key that all nodes of a cluster share, in a new FILE (- for stdout), and exit"),
        ("profile", "measure the configured model on this device, for --conductor-profile FILE, and exit"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("file", metavar="FILE")
        if name == "profile":
            _add_configuration(command, shows_all=shows_all)
    help_text = "make a client's API key, add its hash to FILE (http.api_keys_file), print the key, and exit"
    apikey = commands.add_parser("apikey", help=help_text, description=help_text)
    apikey.add_argument("file", metavar="FILE")
    apikey.add_argument("name", metavar="NAME")
    for name, (kind, limit_help) in LIMITS.items():
        option = "--" + name.replace("_", "-")
        apikey.add_argument(option, type=kind, metavar="N", help=limit_help)
    for name, help_text in (
        ("drain", "move what an instance of a running cluster has to others, and end it; wait for that"),
        ("role", "give an instance of a running cluster another role; wait for that"),
        (
            "migrate",
            "have another instance compute layers, KV heads or long sequences of an instance (of one that"
            " only prefills, layers alone); wait for that",
        ),
    ):
        _add_operating(commands.add_parser(name, help=help_text, description=help_text), name)
    return parser


def _add_operating(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("instance_name", metavar="INSTANCE", help="its name, as /dashboard shows it")
    if name == "role":
        command.add_argument("new_role", metavar="ROLE", choices=[role.value for role in Role], help=ROLES)
    if name == "migrate":
        command.add_argument("helper_name", metavar="HELPER", help="the instance that helps")
        wanted = command.add_mutually_exclusive_group(required=True)
        wanted.add_argument(
            "--heads", type=_count, default=0, metavar="N", help="so many KV heads of each layer go there"
        )
        wanted.add_argument(
            "--layers", type=_layers, metavar="START:STOP", help="these layers go there, such as 10:20"
        )
        wanted.add_argument(
            "--sequences",
            type=_share,
            default=0.0,
            metavar="SHARE",
            help="so much of each long sequence's KVCache goes there, from its beginning on, such as 0.5",
        )
        wanted.add_argument("--back", action="store_true", help="all comes back from there")
    command.add_argument(
        "--url", default="http://127.0.0.1:8000", help="a front of the cluster (default: %(default)s)"
    )
    command.add_argument("--key-file", type=Path, metavar="FILE", help="holds an admin's API key")
    if name == "migrate":
        return
    command.add_argument(
        "--force", action="store_true", help="even if no other instance could do its part of requests then"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of heads, 1 or more, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not LEAST_SHARE <= share <= MOST_SHARE:
        raise argparse.ArgumentTypeError(
            f"expected a share from {LEAST_SHARE} to {MOST_SHARE}, such as 0.5, got {text!r}"
        )
    return share


def _layers(text: str) -> LayerRange:
    try:
        return LayerRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_configuration(parser: Parser, *, shows_all: bool) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file with configuration keys",
    )
    parser.add_argument("--help-all", action="help", help="show all flags, not only those needed first")
    add_flags(parser, shows_all=shows_all)
