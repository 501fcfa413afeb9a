"""`mooncake-serve`: where it begins and ends.

Owns: Ctrl-C before anything runs. Does not know: what is asked for (`mooncake.cli.commands`).
"""

import sys

INTERRUPTED_EXIT_CODE = 130


def main() -> None:
    """Entry point of the `mooncake-serve` command."""
    try:
        from mooncake.cli.commands import run  # takes half a second, in which Ctrl-C is no crash either

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
