"""`mooncake-serve`: reads the configuration and runs this node's processes.

Every configuration key is a flag: `http.port` is `--http-port`, and the usual short names exist too.
`mooncake-serve keygen FILE` makes the key of a cluster, `mooncake-serve apikey FILE NAME` that of a client,
`mooncake-serve profile FILE` measures this machine.
"""

import argparse
import asyncio
import os
import sys
from importlib.metadata import version
from pathlib import Path

import yaml

from mooncake.api_keys import LIMITS, add_api_key
from mooncake.config import Config, describe, leaf_keys, load_config
from mooncake.errors import ConfigError, MooncakeError
from mooncake.keys import ClusterKey
from mooncake.profiling import profile
from mooncake.supervisor import supervise

SHORT_NAMES = {
    ("http", "host"): "--host",
    ("http", "port"): "--port",
}
CONFIG_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130


def main() -> None:
    """Entry point of the `mooncake-serve` command."""
    arguments = _parser().parse_args()
    flags = {path: value for path in leaf_keys() if (value := getattr(arguments, "_".join(path))) is not None}
    try:
        if arguments.command == "keygen":
            if flags or arguments.config or arguments.print_config:
                raise ConfigError("keygen takes FILE and no other options")
            keygen(arguments.file)
            return
        if arguments.command == "apikey":
            if flags or arguments.config or arguments.print_config:
                raise ConfigError("apikey takes FILE, NAME and the options that its --help shows alone")
            limits = {name: getattr(arguments, name) for name in LIMITS}
            print(add_api_key(Path(arguments.file), arguments.name, limits))
            return
        config = load_config(arguments.config, os.environ, flags)
        if arguments.command == "profile":
            profile(config, Path(arguments.file))
            return
        if arguments.print_config:
            print(render(config), end="")
            return
        sys.exit(asyncio.run(supervise(config)))
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        sys.exit(INTERRUPTED_EXIT_CODE)
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(CONFIG_EXIT_CODE)


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
        description="Serve a language model: KVCache-centric, prefill and decode disaggregated.",
        epilog="Each flag is also a key in the YAML file and an environment variable: "
        "--http-port, http.port, MOONCAKE_HTTP_PORT.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with configuration keys")
    parser.add_argument(
        "--print-config", action="store_true", help="show the resulting configuration and exit"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('mooncake-serve')}")
    for path in leaf_keys():
        names = ["--" + "-".join(path).replace("_", "-")]
        if path in SHORT_NAMES:
            names.append(SHORT_NAMES[path])
        parser.add_argument(*names, dest="_".join(path), metavar="VALUE", help=describe(path))
    commands = parser.add_subparsers(dest="command", metavar="keygen FILE | apikey FILE NAME | profile FILE")
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
    return parser
