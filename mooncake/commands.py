"""What `mooncake-serve` can be asked for: this node's processes, keys, a profile of this machine.

Every configuration key is a flag: `http.port` is `--http-port`, and the usual short names exist too.
`mooncake-serve keygen FILE` makes the key of a cluster, `mooncake-serve apikey FILE NAME` that of a client,
`mooncake-serve profile FILE` measures this machine.

Owns: the command line. Does not know: keys and their values (`mooncake.config`), processes
(`mooncake.supervisor`).
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import yaml

from mooncake.api_keys import LIMITS, add_api_key
from mooncake.config import Config, describe, leaf_keys, load_config, section_of
from mooncake.errors import ConfigError, MooncakeError
from mooncake.keys import ClusterKey
from mooncake.profiling import profile
from mooncake.supervisor import supervise

SHORT_NAMES = {
    ("http", "host"): "--host",
    ("http", "port"): "--port",
}
WRONG_USE_EXIT_CODE = 2


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0, 1 if a process could not serve, 2 if what was asked for cannot be."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        if options.command is not None:
            print("interrupted: nothing was written", file=sys.stderr)
        raise
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE_EXIT_CODE


def _run(options: argparse.Namespace) -> int:
    flags = {path: value for path in leaf_keys() if (value := getattr(options, "_".join(path))) is not None}
    if options.command == "keygen":
        if flags or options.config or options.print_config:
            raise ConfigError("keygen takes FILE and no other options")
        keygen(options.file)
        return 0
    if options.command == "apikey":
        if flags or options.config or options.print_config:
            raise ConfigError("apikey takes FILE, NAME and the options that its --help shows alone")
        limits = {name: getattr(options, name) for name in LIMITS}
        print(add_api_key(Path(options.file), options.name, limits))
        return 0
    config = load_config(options.config, os.environ, flags)
    if options.command == "profile":
        profile(config, Path(options.file))
        return 0
    if options.print_config:
        print(render(config), end="")
        return 0
    return asyncio.run(supervise(config))


def keygen(file: str) -> None:
    """Makes a cluster's key, in a new file or (`-`) on stdout. Raises ConfigError."""
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
    """The configuration as YAML that `--config` accepts."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake-serve",
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]\n"
        "       %(prog)s keygen FILE | apikey FILE NAME | profile FILE",
        description="Serve a language model: KVCache-centric, prefill and decode disaggregated.",
        epilog="Each flag is also a key in the YAML file and an environment variable: "
        "--http-port, http.port, MOONCAKE_HTTP_PORT. Exit codes: 0, also after Ctrl-C; 1 if a process cannot"
        " serve; 2 if the configuration is wrong; 130 after Ctrl-C before anything runs.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with configuration keys")
    parser.add_argument(
        "--print-config", action="store_true", help="show the resulting configuration and exit"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('mooncake-serve')}")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for path in leaf_keys():
        section, meaning = section_of(path)
        if section not in groups:
            groups[section] = parser.add_argument_group(section, meaning)
        names = ["--" + "-".join(path).replace("_", "-")]
        if path in SHORT_NAMES:
            names.append(SHORT_NAMES[path])
        groups[section].add_argument(*names, dest="_".join(path), metavar="VALUE", help=describe(path))
    commands = parser.add_subparsers(
        title="commands", prog="mooncake-serve", dest="command", metavar="COMMAND"
    )
    _add_commands(commands)
    return parser


def _add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for name, help_text in (
        ("keygen", "make the key that all nodes of a cluster share, in a new FILE (- for stdout), and exit"),
        ("profile", "measure the configured model on this device, for --conductor-profile FILE, and exit"),
    ):
        command = commands.add_parser(name, help=help_text, description=help_text)
        command.add_argument("file", metavar="FILE")
    help_text = "make a client's API key, add its hash to FILE (http.api_keys_file), print the key, and exit"
    apikey = commands.add_parser("apikey", help=help_text, description=help_text)
    apikey.add_argument("file", metavar="FILE")
    apikey.add_argument("name", metavar="NAME")
    for name, (kind, limit_help) in LIMITS.items():
        flag = "--" + name.replace("_", "-")
        apikey.add_argument(flag, type=kind, metavar="N", help=limit_help)
