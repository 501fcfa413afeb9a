"""The entry point of `mooncake-serve`.

Owns: the exit code after Ctrl-C, also while commands are being imported. Does not know: commands
(`mooncake.cli.commands`).
"""

import sys

INTERRUPTED_EXIT_CODE = 130


def main() -> None:
    """Run the `mooncake-serve` command, and exit with its code."""
    try:
        from mooncake.cli.commands import run  # takes half a second, in which Ctrl-C is no crash either

        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
