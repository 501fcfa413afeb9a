"""The command line of the endpoint picker, `mooncake-picker`.

Owns: the options. Does not know: what the options do.
"""

import asyncio
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mooncake.cli.command_line import WRONG_USE, Parser
from mooncake.config.sections import LARGEST_PORT, LISTEN, URL, WORDS_OF_PATTERNS
from mooncake.errors import ConfigError

EXAMPLES = """examples:
  mooncake-picker http://mooncake-fronts.serving:8000
  mooncake-picker http://blue-fronts:8000 http://green-fronts:8000 --listen 0.0.0.0:9002 \\
    --tls-cert tls.crt --tls-key tls.key
"""


def main() -> None:
    """Run the `mooncake-picker` command."""
    sys.exit(run(sys.argv[1:]))


class Options(NamedTuple):
    """The parsed arguments of the command."""

    clusters: Sequence[str]
    listen: str
    certificate: tuple[Path, Path] | None
    finish_s: float


def run(arguments: Sequence[str]) -> int:
    """Run the picker, and return the exit code.

    The code is 0 if the picker was told to end, and 2 for wrong use or if the extra `gateway` is missing.
    """
    try:
        options = parsed(arguments)
        from conductor.picker.service import serve  # needs the extra

        asyncio.run(serve(*options))
    except ImportError as error:
        print(f"error: {error}; install mooncake-serve[gateway]", file=sys.stderr)
        return WRONG_USE
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    return 0


def parsed(arguments: Sequence[str]) -> Options:
    """Return the checked options.

    Raises ConfigError for wrong values. Unknown options end the program.
    """
    parser = Parser(
        prog="mooncake-picker",
        description="Say to a gateway which front gets a request (Gateway API inference extension).",
        epilog=EXAMPLES,
    )
    parser.add_version()
    parser.add_argument(
        "clusters",
        nargs="+",
        metavar="URL",
        help="the fronts of a cluster: a name that has all their addresses",
    )
    parser.add_argument(
        "--listen", default="0.0.0.0:9002", metavar="HOST:PORT", help="for gateways (default: %(default)s)"
    )
    parser.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): listen with TLS"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    parser.add_argument(
        "--finish-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long running answers, which go through the picker, may take when it is told to end"
        " (default: %(default)g)",
    )
    given = parser.parse_args(arguments)
    for url in given.clusters:
        if not re.match(URL, url):
            raise ConfigError(f"{url}: expected {WORDS_OF_PATTERNS[URL]}")
        _check_port(url, url)
    if not re.match(LISTEN, given.listen):
        raise ConfigError(f"--listen {given.listen}: expected {WORDS_OF_PATTERNS[LISTEN]}")
    _check_port(f"--listen {given.listen}", given.listen)
    if not 0 <= given.finish_s < math.inf:
        raise ConfigError(f"--finish-s {given.finish_s:g}: expected a finite number that is 0 or more")
    if (given.tls_cert is None) != (given.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: name both or none")
    certificate = None if given.tls_cert is None else (given.tls_cert, given.tls_key)
    return Options(given.clusters, given.listen, certificate, given.finish_s)


def _check_port(name: str, address: str) -> None:
    if int(address.rpartition(":")[2]) > LARGEST_PORT:
        raise ConfigError(f"{name}: expected a port up to {LARGEST_PORT}")
